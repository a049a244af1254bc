"""Warmups in SGLang's log and metrics: out of what is counted of clients, and under names of their own.

SGLang reports every prefill: tokens computed and cached, hit rate, time in the queue. A slice is no client's, so

    a batch of slices alone   is not reported; the log says `Warmup batch` where SGLang says `Prefill batch`
    a slice beside clients    is taken out of what is reported
    times of a slice          are not observed

What is told of the device in other places stays as it is: memory in use, idle time, the load that routers see. With
--enable-metrics the rank that decides exports `sglang_scout:warmup_*`, with SGLang's labels.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from radix_policy.warm_account import Totals
from sglang_scout.preflight import Seam
from sglang_scout.scheduler import Hook
from sglang_scout.warmup import Warmup
from sglang_scout.warmup_hooks import running

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """The part of a prefill batch that slices are."""

    requests: int
    computed: int  # tokens
    device: int  # tokens found on the device
    host: int
    storage: int

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.host + self.storage


def share_of(batch: Any, rids: Collection[str]) -> Share:
    """What the requests `rids` are of the prefill in a batch that was run."""
    found = Share(0, 0, 0, 0, 0)
    decoding = {req.rid for req in batch.decoding_reqs or ()}  # rows of a mixed batch that are no prefill
    for req, before, computed in zip(batch.reqs, batch.prefix_lens, batch.extend_lens):
        if req.rid in rids and req.rid not in decoding:
            cached = (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
            first = before == sum(cached)  # of its chunks: SGLang counts hits once
            found = Share(*(a + b for a, b in zip(found, (1, computed, *(cached if first else (0, 0, 0))))))
    return found


def without(stats: Any, share: Share) -> Any:
    """The PrefillStats of the rest of the batch."""
    return dataclasses.replace(
        stats,
        num_new_seqs=max(stats.num_new_seqs - share.requests, 0),
        log_input_tokens=max(stats.log_input_tokens - share.computed, 0),
        log_hit_tokens=max(stats.log_hit_tokens - share.cached, 0),
        log_device_hit_tokens=max(stats.log_device_hit_tokens - share.device, 0),
        log_host_hit_tokens=max(stats.log_host_hit_tokens - share.host, 0),
        log_storage_hit_tokens=max(stats.log_storage_hit_tokens - share.storage, 0),
    )


# ---- Prometheus ----

TOKENS = {"prefilled": "tokens", "useful": "useful_tokens", "wasted": "wasted_tokens"}  # outcome: name in Totals
REQUESTS = {"finished": "finished", "aborted": "aborted"}


class _Families(NamedTuple):
    requests: Any
    tokens: Any
    saved: Any
    gate: Any


@functools.cache
def _families(labels: tuple[str, ...]) -> _Families:
    from prometheus_client import Counter, Gauge  # not before SGLang has chosen the folder of its processes

    return _Families(
        Counter("sglang_scout:warmup_requests_total", "Warmup requests that ended.", [*labels, "outcome"]),
        Counter(
            "sglang_scout:warmup_tokens_total",
            "Tokens prefilled by warmups; of these, what a request read and what none will.",
            [*labels, "outcome"],
        ),
        Counter("sglang_scout:warmup_saved_seconds_total", "Estimated prefill time that requests were spared.", labels),
        Gauge(
            "sglang_scout:warmup_gate_open",
            "1 while warmup runs, 0 while it pauses because too little of it was used.",
            labels,
            multiprocess_mode="mostrecent",
        ),
    )


class Exporter:
    """The planner's totals as Prometheus metrics."""

    def __init__(self, labels: dict[str, Any]) -> None:
        """`labels`: SGLang's of this scheduler."""
        self._labels = {name: str(value) for name, value in labels.items()}
        self._families = _families(tuple(self._labels))
        self._told: Totals | None = None
        self._open: bool | None = None

    def update(self, totals: Totals, is_open: bool) -> None:
        """Count what is new."""
        told, self._told = self._told, totals
        for family, names in ((self._families.requests, REQUESTS), (self._families.tokens, TOKENS)):
            for outcome, name in names.items():
                new = getattr(totals, name) - (getattr(told, name) if told is not None else 0)
                if new > 0 or told is None:
                    family.labels(**self._labels, outcome=outcome).inc(new)
        self._families.saved.labels(**self._labels).inc(
            max(totals.seconds_saved - (told.seconds_saved if told is not None else 0.0), 0.0)
        )
        if is_open != self._open:
            self._open = is_open
            self._families.gate.labels(**self._labels).set(int(is_open))


def export(found: Warmup, reporter: Any) -> None:
    """Bring the exported metrics up to date, where SGLang has any. After a fault none are, and warmup goes on."""
    collector = reporter.metrics_collector
    if not (found.decides and found.exports and reporter.current_scheduler_metrics_enabled and collector is not None):
        return
    try:
        if found.exporter is None:
            found.exporter = Exporter(collector.labels)
        account = found.planner.account
        found.exporter.update(account.totals(), account.open)
    except Exception:
        found.exports = False
        found.bridge.count_fault("warmup_metrics")


# ---- hooks ----


def on_adding(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """BEFORE Scheduler._add_request_to_queue: nobody waited for a slice."""
    found = running()
    if found is None or req.rid not in found.own:
        return
    try:
        req.time_stats.enable_metrics = False
    except Exception:
        found.fail()


def around_report(
    original: Callable[..., Any],
    reporter: Any,
    batch: Any,
    prefill_stats: Any,
    can_run_cuda_graph: bool,
    dp_cooperation_info: Any = None,
) -> Any:
    """AROUND SchedulerMetricsReporter.report_prefill_stats."""
    found = running()
    if found is None:
        return original(reporter, batch, prefill_stats, can_run_cuda_graph, dp_cooperation_info)
    try:
        export(found, reporter)
        share = share_of(batch, found.recent) if found.recent and batch is not None else None
        if share is not None and share.requests:
            if reporter.is_stats_logging_rank:
                logger.info("Warmup batch, #new-token: %d, #cached-token: %d", share.computed, share.cached)
            if share.requests >= prefill_stats.num_new_seqs:
                reporter.scheduler.kv_events_publisher.publish_kv_events()
                return None
            prefill_stats = without(prefill_stats, share)
    except Exception:
        found.fail()
    return original(reporter, batch, prefill_stats, can_run_cuda_graph, dp_cooperation_info)


_SCHEDULER = "sglang.srt.managers.scheduler"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter"

HOOKS = (
    Hook(_SCHEDULER, "Scheduler._add_request_to_queue", "before", on_adding, ("self", "req", "is_retracted")),
    Hook(
        _REPORTER,
        "SchedulerMetricsReporter.report_prefill_stats",
        "around",
        around_report,
        ("self", "batch", "prefill_stats", "can_run_cuda_graph", "dp_cooperation_info"),
    ),
)

SEAMS = (
    *(Seam(hook.module, hook.name, hook.parameters) for hook in HOOKS),
    Seam(
        _REPORTER,
        "SchedulerMetricsReporter.report_prefill_stats",
        None,
        (
            "num_new_seqs",
            "log_input_tokens",
            "log_hit_tokens",
            "log_device_hit_tokens",
            "log_host_hit_tokens",
            "log_storage_hit_tokens",
        ),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.copy",
        None,
        ("prefix_lens", "extend_lens", "decoding_reqs"),
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.kv_events_publisher",
        "SchedulerKvEventsPublisher.publish_kv_events",
        ("self",),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.__init__",
        None,
        ("cached_tokens_device", "cached_tokens_host", "cached_tokens_storage"),
    ),
    Seam(
        "sglang.srt.observability.req_time_stats",
        "SchedulerReqTimeStats.set_forward_entry_time",
        None,
        ("enable_metrics",),
    ),
)
