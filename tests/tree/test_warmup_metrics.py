"""What SGLang reports of batches with warmups in them, on its real PrefillStats and a real Prometheus registry."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from radix_policy.warm_account import Totals
from tests.tree.test_warmup_hooks import Rank, done, injected, streamed

pytest.importorskip("sglang")

from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
from sglang.srt.observability.metrics_collector import QueueCount

from sglang_scout import warmup_metrics
from sglang_scout.warmup_metrics import Exporter, around_report, on_adding


def member(rid: str, device: int = 0, host: int = 0) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, cached_tokens_device=device, cached_tokens_host=host, cached_tokens_storage=0)


class Reporter:
    """As much of SGLang's reporter as the hook uses; `told` is what SGLang would report."""

    def __init__(self, *, metrics: bool = False) -> None:
        self.told: list[PrefillStats] = []
        self.published = 0
        self.is_stats_logging_rank = True
        self.current_scheduler_metrics_enabled = metrics
        self.metrics_collector = SimpleNamespace(labels={"model_name": "m", "tp_rank": 3}) if metrics else None
        self.scheduler = SimpleNamespace(kv_events_publisher=SimpleNamespace(publish_kv_events=self.publish))

    def publish(self) -> None:
        self.published += 1

    def report(
        self, *members: tuple[SimpleNamespace, int], later: Sequence[str] = (), decoding: Sequence[Any] = ()
    ) -> None:
        """One batch of (request, tokens computed), counted as SGLang's PrefillAdder does.

        `later`: rids of which this is not the first chunk; `decoding`: rows of a mixed batch that only decode.
        """
        reqs = [req for req, _ in members]
        firsts = [req for req in reqs if req.rid not in later]
        cached = {r.rid: r.cached_tokens_device + r.cached_tokens_host for r in [*reqs, *decoding]}
        batch = SimpleNamespace(
            reqs=[*reqs, *decoding],
            extend_lens=[*(n for _, n in members), *(1 for _ in decoding)],
            prefix_lens=[cached[r.rid] + 50 * (r.rid in later) for r in reqs] + [cached[r.rid] + 7 for r in decoding],
            decoding_reqs=list(decoding) or None,
        )
        stats = PrefillStats(
            log_input_tokens=sum(n for _, n in members),
            log_hit_tokens=sum(cached[r.rid] for r in firsts),
            new_token_ratio=0.5,
            num_running_reqs=QueueCount(total=0),
            num_new_seqs=len(reqs),
            log_device_hit_tokens=sum(r.cached_tokens_device for r in firsts),
            log_host_hit_tokens=sum(r.cached_tokens_host for r in firsts),
        )
        around_report(lambda reporter, batch, stats, *rest: self.told.append(stats), self, batch, stats, False)


@pytest.fixture
def rank() -> Rank:
    return Rank().learn()


def test_a_batch_of_slices_alone_is_not_reported(rank: Rank, caplog: Any) -> None:
    item, reporter = injected(rank), Reporter()
    streamed(rank, done(rank.queue(item)))
    assert item.rid not in rank.warmup.own, "SGLang reports after the output has left"
    with caplog.at_level(logging.INFO):
        reporter.report((member(item.rid, device=40, host=16), 64))
    assert reporter.told == [] and reporter.published == 1, "the events of the tree are published all the same"
    assert "Warmup batch, #new-token: 64, #cached-token: 56" in caplog.text


def test_a_slice_is_taken_out_of_a_batch_with_clients(rank: Rank) -> None:
    item, reporter = injected(rank), Reporter()
    reporter.report((member("r", device=100), 30), (member(item.rid, device=40, host=16), 64))
    (told,) = reporter.told
    assert (told.num_new_seqs, told.log_input_tokens, told.log_hit_tokens) == (1, 30, 100)
    assert (told.log_device_hit_tokens, told.log_host_hit_tokens) == (100, 0)
    assert told.new_token_ratio == 0.5


def test_a_slice_in_pieces_is_taken_out_piece_by_piece(rank: Rank) -> None:
    item, reporter = injected(rank), Reporter()
    slice_ = member(item.rid, device=40)
    reporter.report((member("r", device=100), 30), (slice_, 20))
    reporter.report((member("r2", device=70), 30), (slice_, 44), later=[item.rid])
    assert [(t.log_input_tokens, t.log_hit_tokens, t.num_new_seqs) for t in reporter.told] == [
        (30, 100, 1),
        (30, 70, 1),
    ]


def test_rows_that_only_decode_are_no_part_of_the_prefill(rank: Rank, caplog: Any) -> None:
    item, reporter = injected(rank), Reporter()
    reporter.report((member("r", device=100), 30), decoding=[member(item.rid, device=40)])
    (told,) = reporter.told
    assert (told.num_new_seqs, told.log_input_tokens, told.log_hit_tokens) == (1, 30, 100)
    reporter.report((member(item.rid, device=40), 64), decoding=[member("r", device=100)])
    assert len(reporter.told) == 1, "of the prefill there was nothing else"


def test_clients_are_reported_as_ever(rank: Rank) -> None:
    reporter = Reporter()
    reporter.report((member("scout-warmup-1", device=5), 30))
    injected(rank)
    reporter.report((member("scout-warmup-1", device=5), 30))
    assert [told.log_input_tokens for told in reporter.told] == [30, 30]


def test_a_fault_reports_the_batch_as_it_is(rank: Rank) -> None:
    item, reporter = injected(rank), Reporter()
    odd = SimpleNamespace(rid=item.rid, cached_tokens_device=None, cached_tokens_host=0, cached_tokens_storage=0)
    stats = PrefillStats(1, 0, 0.5, QueueCount(total=0), 1)
    batch = SimpleNamespace(reqs=[odd], extend_lens=[1], prefix_lens=[0], decoding_reqs=None)
    around_report(lambda reporter, batch, stats, *rest: reporter.told.append(stats), reporter, batch, stats, False)
    assert reporter.told == [stats]
    assert rank.bridge.faults == {"warmup": 1} and not rank.warmup.on


def test_a_fault_of_the_exporter_ends_the_export_only(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("two labels of one name")

    monkeypatch.setattr(warmup_metrics, "Exporter", broken)
    reporter = Reporter(metrics=True)
    for _ in range(2):
        reporter.report((member("r"), 5))
    assert rank.bridge.faults == {"warmup_metrics": 1} and rank.warmup.on and len(reporter.told) == 2


def test_the_times_of_a_slice_are_not_observed(rank: Rank) -> None:
    item = injected(rank)
    for rid, expected in ((item.rid, False), ("r1", True)):
        req = SimpleNamespace(rid=rid, time_stats=SimpleNamespace(enable_metrics=True))
        on_adding(rank.engine, req)
        assert req.time_stats.enable_metrics is expected
    on_adding(rank.engine, SimpleNamespace(rid=item.rid))
    assert rank.bridge.faults == {"warmup": 1}, "a hook never raises"


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang_scout:warmup_{name}", {"model_name": "m", "tp_rank": "3", **labels})


def test_totals_are_exported_as_counters_that_only_grow(rank: Rank) -> None:
    exporter = Exporter({"model_name": "m", "tp_rank": 3})
    nothing = Totals(0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)
    exporter.update(nothing, True)
    before = value("tokens_total", outcome="useful") or 0.0
    assert value("gate_open") == 1.0, "a metric is there before anything happens"
    some = nothing._replace(finished=2, aborted=1, tokens=100, useful_tokens=60, wasted_tokens=40, seconds_saved=0.5)
    exporter.update(some, False)
    exporter.update(some, False)
    assert (value("tokens_total", outcome="useful") or 0.0) == before + 60
    assert value("gate_open") == 0.0
    again = Exporter({"model_name": "m", "tp_rank": 3})  # a second tree in the process: the same metrics
    again.update(some, True)
    assert (value("tokens_total", outcome="useful") or 0.0) == before + 120
    reporter = Reporter(metrics=True)
    reporter.report((member("r"), 5))
    assert isinstance(rank.warmup.exporter, warmup_metrics.Exporter)
