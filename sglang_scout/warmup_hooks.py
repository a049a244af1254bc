"""Where warmup takes hold of SGLang's scheduler, and all that it needs there. A hook never raises."""

from collections.abc import Callable, Sequence
from typing import Any

from radix_policy.prompts import TokenPrompt
from sglang_scout.preflight import Seam
from sglang_scout.scheduler import Hook, bridge_of
from sglang_scout.warmup import Warmup
from sglang_scout.warmup_requests import WORK, Space, make_request


class _Process:
    """The warmup of this process's scheduler."""

    warmup: Warmup | None = None


def running() -> Warmup | None:
    """The warmup of this process's scheduler; None where there is none."""
    return _Process.warmup


def on_ingest(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler.ingest_requests: once per iteration, on every rank."""
    bridge = bridge_of(scheduler.tree_cache)
    found = bridge.warmup if bridge is not None else None
    _Process.warmup = found if isinstance(found, Warmup) else None
    if _Process.warmup is not None:
        _Process.warmup.scheduler = scheduler


def around_broadcast(original: Callable[..., Any], receiver: Any, recv_reqs: Any, local_reqs: Any = None) -> Any:
    """AROUND SchedulerRequestReceiver._broadcast_reqs_across_ranks; `recv_reqs` is a list on the sending rank only."""
    warmup = running()
    if warmup is None:
        return original(receiver, recv_reqs, local_reqs)
    added = None
    if recv_reqs is not None:
        try:
            added = warmup.decide(recv_reqs)
        except Exception:
            warmup.fail()
    if added is not None:
        local_reqs = [*(local_reqs or ()), added]
    received = original(receiver, recv_reqs, local_reqs)
    if not received and not warmup.listens:
        return received
    try:
        return warmup.received([*(received or ())])
    except Exception:
        warmup.fail()
        return warmup.released(received or ())


def on_added(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """AFTER Scheduler._add_request_to_queue."""
    warmup = running()
    if warmup is None:
        return
    try:
        warmup.queued(req, is_retracted)
    except Exception:
        warmup.fail()


def around_stream(
    original: Callable[..., Any],
    streamer: Any,
    reqs: Sequence[Any],
    return_logprob: bool,
    skip_req: Any = None,
    is_idle_batch: bool = False,
) -> Any:
    """AROUND SchedulerOutputStreamer._stream_output_generation: what leaves for the detokenizer."""
    warmup = running()
    if warmup is not None and warmup.own:
        mine = [req for req in reqs if req.rid in warmup.own]
        if mine:
            reqs = [req for req in reqs if req.rid not in warmup.own]
            for req in mine:
                try:
                    warmup.streamed(req)
                except Exception:
                    warmup.fail()
    return original(streamer, reqs, return_logprob, skip_req, is_idle_batch)


def around_abort(original: Callable[..., Any], scheduler: Any, abort_req: Any, req: Any) -> Any:
    """AROUND Scheduler.send_abort_output: requests that end outside the output stream."""
    warmup = running()
    if warmup is not None and req.rid in warmup.own:
        warmup.dropped(req)
        return None
    return original(scheduler, abort_req, req)


def around_sleep(original: Callable[..., Any], sleeper: Any) -> Any:
    """AROUND IdleSleeper.maybe_sleep (--sleep-on-idle), which sleeps up to a second unless a client sends something."""
    warmup = running()
    return None if warmup is not None and warmup.eager else original(sleeper)


_SCHEDULER = "sglang.srt.managers.scheduler"
_PARTS = "sglang.srt.managers.scheduler_components."

HOOKS = (
    Hook(_SCHEDULER, "Scheduler.ingest_requests", "before", on_ingest, ("self", "stop_at_pause")),
    Hook(
        _PARTS + "request_receiver",
        "SchedulerRequestReceiver._broadcast_reqs_across_ranks",
        "around",
        around_broadcast,
        ("self", "recv_reqs", "local_reqs"),
    ),
    Hook(_SCHEDULER, "Scheduler._add_request_to_queue", "after", on_added, ("self", "req", "is_retracted")),
    Hook(
        _PARTS + "output_streamer",
        "SchedulerOutputStreamer._stream_output_generation",
        "around",
        around_stream,
        ("self", "reqs", "return_logprob", "skip_req", "is_idle_batch"),
    ),
    Hook(_SCHEDULER, "Scheduler.send_abort_output", "around", around_abort, ("self", "abort_req", "req")),
    Hook(_PARTS + "idle_sleeper", "IdleSleeper.maybe_sleep", "around", around_sleep, ("self",)),
)

# Needed only where warmup is on.
SEAMS = (
    *(Seam(hook.module, hook.name, hook.parameters) for hook in HOOKS),
    Seam(_SCHEDULER, "Scheduler.is_fully_idle", ("self", "for_health_check", "ignore_waiting")),
    Seam(_SCHEDULER, "Scheduler.abort_request", ("self", "recv_req")),
    Seam(
        _SCHEDULER,
        "Scheduler._abort_on_queued_limit",
        ("self", "recv_req"),
        ("max_queued_requests", "waiting_queue"),
    ),
    Seam(_SCHEDULER, "Scheduler.init_tokenizer", ("self",), ("is_generation",)),
    Seam(_SCHEDULER, "Scheduler.get_next_batch_to_run", None, ("dllm_config",)),
    Seam(_SCHEDULER, "Scheduler.init_weight_updater", None, ("weight_updater",)),
    Seam(_PARTS + "weight_updater", "SchedulerWeightUpdaterManager.release_memory_occupation", None, ("offload_tags",)),
    Seam(_PARTS + "flush_wrapper", "SchedulerFlushWrapper.check_pending", ("self",), ("_pending",)),
    Seam(_SCHEDULER, "Scheduler.process_input_requests", None, ("flush_wrapper",)),
    *(Seam("sglang.srt.managers.io_struct", name) for name in WORK),
    Seam("sglang.srt.sampling.sampling_params", "SamplingParams.normalize"),
    Seam(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core",
        "UnifiedTreeCore.match_full_device_prefix",
        ("self", "key"),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.__init__",
        None,
        (
            "multimodal_inputs",
            "input_embeds",
            "positional_embed_overrides",
            "token_type_ids",
            "session",
            "cached_tokens",
        ),
    ),
)


def problems(more: Sequence[Seam] = ()) -> list[str]:
    """What SGLang lacks for warmup, or of `more` seams, one text each."""
    from sglang_scout import preflight

    found = preflight.amiss([*SEAMS, *more])
    if not found:
        try:
            make_request("probe", TokenPrompt((1, 2, 3)), Space(None, None, None, None))
        except Exception as error:
            found.append(f"TokenizedGenerateReqInput cannot be made ({type(error).__name__}: {error})")
    return found
