"""Hooks on SGLang's scheduler: who asks, when, and what the clock says.

Nothing here is registered before a tree core of ours exists in the process (`install`, called by its factory), so with
another policy SGLang's hot paths are untouched. A hook never raises: a fault goes to the Bridge, and SGLang's own
function runs exactly once whatever happens.

The clock (DESIGN section 4): `step` is the scheduler's forward_ct; `seconds` is rank 0's monotonic clock, which rides
the request broadcast as one more local request and is taken out again on every rank before SGLang sees it, so it is the
same everywhere, costs no collective of its own and never counts as activity.
"""

import functools
import logging
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from radix_policy.events import RequestArrived
from radix_policy.identity import TagError, parse_tag
from radix_policy.prompts import TokenPrompt
from sglang_scout.bridge import Bridge

logger = logging.getLogger(__name__)

TICK_EVERY = 0.1  # seconds between clock values while no request comes
HEALTH_CHECK = "HEALTH_CHECK"  # sglang.srt.constants.HEALTH_CHECK_RID_PREFIX
WARMUP_TEXT = "The capital city of France is"  # of SGLang's own request at start, which nothing marks
WARMUP_IDS = [10, 11, 12]  # the same with --skip-tokenizer-init
WARMUP_TOKENS = 8
WARMUP_MAX_IDS = 64


class ClockTick(NamedTuple):
    """Rank 0's clock, on its way to the other ranks."""

    seconds: float


class _Clock:
    """The bridge of this process's scheduler, and when its clock was last sent."""

    bridge: Bridge | None = None
    sent = float("-inf")


def bridge_of(tree_cache: Any) -> Bridge | None:
    """The bridge of a tree cache whose core is ours."""
    return getattr(getattr(tree_cache, "tree_core", None), "scout", None)


def namespace(extra_key: str | None, cache_salt: str | None, lora_id: str | None) -> str:
    """The three joined so that no two different tuples give one text, absent and empty told apart; "" for none."""
    if extra_key is None and cache_salt is None and lora_id is None:
        return ""
    return "".join("-" if part is None else f"{len(part)}:{part}" for part in (extra_key, cache_salt, lora_id))


# ---- requests ----


def on_queued(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """BEFORE Scheduler._add_request_to_queue."""
    bridge = bridge_of(scheduler.tree_cache)
    if bridge is None or not bridge.live or is_retracted or req.is_retracted or req.rid in bridge.runtime.requests:
        return
    try:
        if req.to_finish is None and req.finished_reason is None and not _is_own(bridge, req):
            bridge.arrived(_arrival(bridge, req))
    except Exception:
        bridge.fail("request", mendable=False)


def _arrival(bridge: Bridge, req: Any) -> RequestArrived:
    try:
        tag = parse_tag(req.sampling_params.custom_params, req.session_id)
    except TagError as error:
        tag = None
        bridge.counters["tag_errors"] += 1
        if bridge.counters["tag_errors"] == 1:
            logger.warning(
                "sglang-scout: malformed tag, request served untagged: %s (later ones are only counted)", error
            )
    return RequestArrived(
        req.rid,
        TokenPrompt(req.origin_input_ids),
        namespace(req.extra_key, req.cache_salt, req.lora_id),
        tag,
        req.priority or 0,
    )


def _is_own(bridge: Bridge, req: Any) -> bool:
    """Whether no client sent the request: a health check, a warmup of ours, or SGLang's before the first real one."""
    if req.rid.startswith(HEALTH_CHECK) or req.rid in bridge.own:
        return True
    if bridge.counters["requests"] or req.sampling_params.max_new_tokens != WARMUP_TOKENS:
        return False
    ids = list(req.origin_input_ids)
    if len(ids) > WARMUP_MAX_IDS:
        return False
    return ids == WARMUP_IDS or (req.tokenizer is not None and WARMUP_TEXT in req.tokenizer.decode(ids))


def on_aborted(result: Any, scheduler: Any, req: Any) -> None:
    """AFTER Scheduler._release_aborted_request."""
    _leave(bridge_of(scheduler.tree_cache), req, aborted=True)


def on_abort_sent(result: Any, scheduler: Any, abort_req: Any, req: Any) -> None:
    """AFTER Scheduler.send_abort_output: also the requests that a failed retraction drops."""
    _leave(bridge_of(scheduler.tree_cache), req, aborted=True)


def on_released(result: Any, cache: Any, req: Any, *, checkpointed: bool) -> None:
    """AFTER UnifiedRadixCache.on_release: finished, or merely retracted."""
    if req.finished_reason is not None:
        _leave(bridge_of(cache), req)


def on_claimed(result: Any, cache: Any, req: Any) -> None:
    """AFTER UnifiedRadixCache.claim_kv_row: a streaming session keeps the finished request's KV, none is released."""
    if result and req.finished_reason is not None:
        _leave(bridge_of(cache), req)


def _leave(bridge: Bridge | None, req: Any, aborted: bool = False) -> None:
    if bridge is None or not bridge.live or req.rid not in bridge.runtime.requests:
        return
    try:
        reason = req.finished_reason
        kind = "abort" if aborted or reason is None else reason.to_json()["type"]
        tokens = len(req.output_ids) if req.finished_len is None else req.finished_len
        bridge.finished(req.rid, tokens, kind == "abort", kind == "stop")
    except Exception:
        bridge.fail("request", mendable=False)


def around_checkpoint(original: Callable[..., Any], cache: Any, req: Any, **kwargs: Any) -> Any:
    """AROUND UnifiedRadixCache.checkpoint_into_tree: nodes added inside belong to this request."""
    bridge = bridge_of(cache)
    if bridge is None:
        return original(cache, req, **kwargs)
    bridge.inserting = req.rid
    try:
        return original(cache, req, **kwargs)
    finally:
        bridge.inserting = None


def around_evict(
    original: Callable[..., Any],
    cache: Any,
    request_by_type: Any,
    tracker: Any,
    available_size_targets: Any = None,
    *,
    allocation_reclaim_satisfied: Any = None,
) -> Any:
    """AROUND UnifiedRadixCache._evict_components: how many tokens are missing, for as long as it runs.

    Not the count that a walk is begun with: SGLang raises that to all that can be evicted. The tokens that are free
    fall short of a target, or those evicted of a number; with a predicate of the allocator's nobody can tell.
    """
    evict = functools.partial(
        original,
        cache,
        request_by_type,
        tracker,
        available_size_targets,
        allocation_reclaim_satisfied=allocation_reclaim_satisfied,
    )
    bridge = bridge_of(cache)
    if bridge is None:
        return evict()
    outer, bridge.shortfall = bridge.shortfall, None
    try:
        if allocation_reclaim_satisfied is None:
            bridge.shortfall = _shortfall(cache, request_by_type, tracker, available_size_targets)
    except Exception:
        bridge.count_fault("shortfall")
    try:
        return evict()
    finally:
        bridge.shortfall = outer


def _shortfall(cache: Any, request_by_type: Any, tracker: Any, targets: Any) -> Callable[[], int]:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    full = ComponentType.FULL
    if targets is None or full not in targets:
        return lambda: int(request_by_type[full] - tracker[full])
    component, size = targets[full]
    return lambda: int(size - cache._component_available_size(component))


# ---- clock ----


def on_ingest(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler.ingest_requests: once per iteration, on every rank."""
    bridge = _Clock.bridge = bridge_of(scheduler.tree_cache)
    if bridge is not None:
        bridge.tick(scheduler.forward_ct, bridge.seconds)


def around_broadcast(original: Callable[..., Any], receiver: Any, recv_reqs: Any, local_reqs: Any = None) -> Any:
    """AROUND SchedulerRequestReceiver._broadcast_reqs_across_ranks; `recv_reqs` is a list on the sending rank only."""
    bridge = _Clock.bridge
    if bridge is None:
        return original(receiver, recv_reqs, local_reqs)
    if recv_reqs is not None and bridge.live:
        now = time.monotonic()
        if recv_reqs or local_reqs or now - _Clock.sent >= TICK_EVERY:
            _Clock.sent = now
            # The local requests ride the channel of the ranks that share one waiting queue, also under DP attention.
            local_reqs = [*(local_reqs or ()), ClockTick(now)]
    received = original(receiver, recv_reqs, local_reqs)
    if received:
        ticks = [r for r in received if isinstance(r, ClockTick)]
        if ticks:
            received = [r for r in received if not isinstance(r, ClockTick)]
            bridge.tick(bridge.step, ticks[-1].seconds)
    return received


# ---- waiting requests ----


def around_touch_waiting(original: Callable[..., Any], schedule: Any, policy: Any, waiting_queue: Any) -> None:
    """AROUND SchedulePolicy._touch_waiting_prefixes, which does nothing unless the eviction policy is called `lru`.

    The same refresh for ours: SGLang's conditions but for that name, in SGLang's order (head last).
    """
    original(schedule, policy, waiting_queue)
    bridge = bridge_of(schedule.tree_cache)
    if bridge is None or not waiting_queue:
        return
    from sglang.srt.environ import envs
    from sglang.srt.managers import schedule_policy as sglang_policy

    cache = schedule.tree_cache
    if (
        isinstance(policy, sglang_policy.CacheAwarePolicy)
        or not envs.SGLANG_ENABLE_WAITING_PREFIX_REFRESH.get()
        or cache.supports_fast_match_prefix()
        or not cache.supports_prefix_sharing()
    ):
        return
    refresh = schedule._waiting_prefix_refresh_calls % sglang_policy.WAITING_PREFIX_REFRESH_INTERVAL == 0
    schedule._waiting_prefix_refresh_calls += 1
    if refresh:
        for req in reversed(waiting_queue[: sglang_policy.WAITING_QUEUE_PREFIX_MATCH_MAX]):
            sglang_policy.touch_waiting_prefix(req, cache)


# ---- looking in ----


def on_internal_state(result: Any, scheduler: Any, recv_req: Any) -> None:
    """AFTER Scheduler.get_internal_state: GET /server_info answers internal_states[i]["scout"]."""
    bridge = bridge_of(scheduler.tree_cache)
    if bridge is None:
        return
    state = result.internal_state["scout"] = bridge.snapshot()
    if bridge.log is not None:
        state["events"] = list(bridge.log)
        state["unhooked"] = [hook.target for hook in _installed if not is_applied(hook)]
        nodes = list(bridge.runtime.world.nodes)
        state["mirror"] = {
            "differences": scheduler.tree_cache.tree_core.differences()[:20],
            "owned": sum(node.session >= 0 for node in nodes),
            "output": sum(node.output for node in nodes),
            "host_only": sum(not node.resident for node in nodes),
        }


# ---- registration ----


class Hook(NamedTuple):
    """One hook: on what, of which kind, our function, and the parameters that the target must have."""

    module: str
    name: str
    kind: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


_SCHEDULER = "sglang.srt.managers.scheduler"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
_QUEUE = "sglang.srt.managers.schedule_policy"

HOOKS = (
    Hook(_SCHEDULER, "Scheduler._add_request_to_queue", "before", on_queued, ("self", "req", "is_retracted")),
    Hook(_SCHEDULER, "Scheduler._release_aborted_request", "after", on_aborted, ("self", "req")),
    Hook(_SCHEDULER, "Scheduler.send_abort_output", "after", on_abort_sent, ("self", "abort_req", "req")),
    Hook(_SCHEDULER, "Scheduler.ingest_requests", "before", on_ingest, ("self", "stop_at_pause")),
    Hook(_SCHEDULER, "Scheduler.get_internal_state", "after", on_internal_state, ("self", "recv_req")),
    Hook(
        _RECEIVER,
        "SchedulerRequestReceiver._broadcast_reqs_across_ranks",
        "around",
        around_broadcast,
        ("self", "recv_reqs", "local_reqs"),
    ),
    Hook(
        _QUEUE,
        "SchedulePolicy._touch_waiting_prefixes",
        "around",
        around_touch_waiting,
        ("self", "policy", "waiting_queue"),
    ),
    Hook(_CACHE, "UnifiedRadixCache.on_release", "after", on_released, ("self", "req", "checkpointed")),
    Hook(_CACHE, "UnifiedRadixCache.claim_kv_row", "after", on_claimed, ("self", "req")),
    Hook(
        _CACHE,
        "UnifiedRadixCache.checkpoint_into_tree",
        "around",
        around_checkpoint,
        ("self", "req", "up_to", "kwargs"),
    ),
    Hook(
        _CACHE,
        "UnifiedRadixCache._evict_components",
        "around",
        around_evict,
        ("self", "request_by_type", "tracker", "available_size_targets", "allocation_reclaim_satisfied"),
    ),
)


_installed: list[Hook] = []


def install(hooks: Sequence[Hook] = HOOKS) -> list[str]:
    """Hook the scheduler and its cache; returns the targets that did not take their hook. A second call does nothing.

    A process that has not imported a target's module has no scheduler (a tree in a test, say): nothing to hook there.
    SGLang applies the hooks of one target once, all together, when plug-ins load. This comes later, so where another
    plug-in hooked the same target already, ours is put around that.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("scout", "sglang-scout")
    wanted = [hook for hook in hooks if hook.module in sys.modules]
    for hook in wanted:
        if is_applied(hook):
            continue
        kind = HookType(hook.kind)
        HookRegistry.register(hook.target, hook.function, kind, source=source)
        if hook.target in HookRegistry._patched:
            HookRegistry._apply_target(hook.target, [(kind, hook.function, source)])
    HookRegistry.apply_hooks()
    _installed[:] = wanted
    return [hook.target for hook in wanted if not is_applied(hook)]


def is_applied(hook: Hook) -> bool:
    """Whether our function really is in the chain of wrappers around the target (SGLang only logs what fails)."""
    try:
        found = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    while found is not None:
        cells: Sequence[Any] = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
