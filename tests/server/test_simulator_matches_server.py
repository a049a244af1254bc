"""The simulator against a real server at concurrency 1: the token ids that were sent find the same cached tokens.

Scores move with the clock, so the simulator is given the server's own: the events that its plug-in saw (ticks by step
and second, arrivals, ends) are played again, and one token is decoded per step, as on the server.
"""

import importlib.util
import json
import urllib.request
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pytest

from benchmarks.agents.live import LiveCall, LiveSession, live_sessions
from launch.command import CPU_OVERLAP_ENV, HOST_TIER_MIN_FREE_GIB, available_memory_gib
from radix_policy.admission import AdmissionConfig
from radix_policy.events import Tag, Tick
from radix_policy.runtime import Runtime
from radix_policy.simulator import Engine, Run, spans_of
from radix_policy.simulator.tiers import TieredEngine
from radix_policy.workloads import make

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,  # a minute a server on two free cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

CAPACITY = 2600  # tokens: one and a half of the largest request below
LONGEST = 1700  # tokens of prompt and output; a session that comes to more is left
CALLS = 45


def interleaved(sessions: list[LiveSession], width: int) -> Iterator[tuple[LiveSession, LiveCall]]:
    """One call after the other, from `width` sessions in turn; one that is over or too long makes room for the next."""
    waiting, playing = deque(sessions), deque[LiveSession]()
    while waiting or playing:
        while waiting and len(playing) < width:
            playing.append(waiting.popleft())
        session = playing.popleft()
        call = session.next_call()
        if call is not None and call.input_ids and len(call.input_ids) + call.max_new_tokens <= LONGEST:
            yield session, call
            playing.append(session)


class Heard(NamedTuple):
    """A call, what the server answered, and the prompt tokens that it found on the device and on the host."""

    call: LiveCall
    output: "array[int]"
    cached: int
    restored: int


def play(server: Any, policy: str, post: Callable[..., Any], generate: Callable[..., Any]) -> tuple[list[Heard], list]:
    """The calls one after the other; returns them with the events that the plug-in saw."""
    post(server.url, "/flush_cache?timeout=30")
    calls: list[Heard] = []
    sessions = live_sessions(make("selector", seed=5, sessions=12), vocab=500, reserved=10)
    for session, call in islice(interleaved(sessions, 3), CALLS):
        assert call.input_ids is not None
        body = {"custom_params": {"scout": {"agent": call.agent, "session": call.session}}}
        answer = generate(server.url, list(call.input_ids), call.max_new_tokens, ignore_eos=True, **body)
        output, meta = array("q", answer["output_ids"]), answer["meta_info"]
        session.feed(output)
        host = (meta.get("cached_tokens_details") or {}).get("host") or 0
        calls.append(Heard(call, output, meta["cached_tokens"], host))
    if policy == "lru":
        return calls, [e for n, heard in enumerate(calls) for e in ((f"r{n}",), (f"r{n}", len(heard.output)))]
    state = scout_of(server)
    assert state["live"] and not state["faults"] and not state["mirror"]["differences"] and not state["unhooked"]
    return calls, state["events"]


def scout_of(server: Any) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/server_info", timeout=60) as response:
        return json.load(response)["internal_states"][0]["scout"]


def assert_same(calls: Sequence[Heard], events: Sequence[Any], runtime: Runtime, engine: Engine) -> None:
    """The simulated engine finds what the server found, call by call."""
    waiting = iter(calls)
    run: Run | None = None
    heard = calls[0]
    at = due = restored = 0  # the step of the last token, and of the next one; tokens
    for number, event in enumerate(events):
        if run is not None and due > at and event[0] != due:
            # a step may tick twice (its number, then the time): it decodes when both are known
            at = due
            if run.allocated < run.kv:
                engine.grow(((run, 1),))
        if len(event) == 1:
            heard = next(waiting)
            call, output = heard.call, heard.output
            assert call.input_ids is not None
            prompt = array("q", call.input_ids)
            run = Run(event[0], spans_of(prompt), spans_of(output), len(prompt), len(output))
            engine.arrive(run, Tag(call.agent, call.session))
            assert engine.admit(run)
            at = due = runtime.world.clock.step
        elif isinstance(event[0], str):
            assert run is not None and event[0] == run.rid
            engine.finish(run)
            here, restored = getattr(engine.tree, "restored", 0) - restored, getattr(engine.tree, "restored", 0)
            found = (heard.cached, heard.restored)
            assert (run.cached, here) == found, f"event {number}: {found} found and restored, {run.cached, here} here"
            run = None
        else:
            runtime.observe(Tick(*event))
            due = event[0]
    assert next(waiting, None) is None


# a decode step ahead of its time (overlap) would hold one more token than the simulator knows of
ENV = {"SGLANG_SCOUT_VERIFY": "1", CPU_OVERLAP_ENV: "0"}


@pytest.mark.parametrize("policy", ["scout"])  # the others are compared in process, on both cores
def test_same_cached_tokens(
    policy: str, start_server: Callable[..., Any], generate: Callable[..., Any], post: Callable[..., Any]
) -> None:
    server = start_server(policy, max_total_tokens=CAPACITY, env=ENV)
    calls, events = play(server, policy, post, generate)
    runtime = Runtime(policy)
    engine = Engine(runtime, CAPACITY)
    assert_same(calls, events, runtime, engine)
    assert engine.evicted > 2 * CAPACITY, "no pressure: the test would show nothing"


@pytest.mark.skipif(available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB free")
@pytest.mark.parametrize(
    ("policy", "core", "mode"),
    [("scout", "rust", "measured"), ("scout", "python", "measured")],
)
def test_same_tokens_with_a_host_tier(
    policy: str,
    core: str,
    mode: str,
    start_server: Callable[..., Any],
    generate: Callable[..., Any],
    post: Callable[..., Any],
) -> None:
    keys = {"admission": mode, "admission_chunk": 32}
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through"]
    if policy != "lru":
        flags += ["--radix-eviction-policy-config", json.dumps(keys)]
    env = {**ENV, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}
    server = start_server(policy, max_total_tokens=CAPACITY, extra_args=flags, env=env)
    calls, events = play(server, policy, post, generate)
    runtime = Runtime(policy)
    host = 2 * CAPACITY + 1  # SGLang allocates a page more than it is told
    engine = TieredEngine(
        runtime,
        CAPACITY,
        host,
        admission=AdmissionConfig(**keys),
        forgets=(policy, core) == ("scout", "rust"),
        ordered=(policy, core) == ("scout", "python"),
    )
    assert_same(calls, events, runtime, engine)
    assert engine.tree.restored > 0 and engine.tree.host_evicted > 0, "no pressure"
    if policy != "lru":
        state = scout_of(server)["host"]
        assert state["capacity_tokens"] == host and state["used_tokens"] == engine.tree.host_used
        assert state["declined"] == engine.declined_requests
