"""The simulator against a real server at concurrency 1: the token ids that were sent find the same cached tokens.

Scores move with the clock, so the simulator is given the server's own: the events that its plug-in saw (ticks by step
and second, arrivals, ends) are played again, and one token is decoded per step, as on the server.
"""

import importlib.util
import json
import urllib.request
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from benchmarks.agents.live import LiveCall, LiveSession, live_sessions
from launch.command import CPU_OVERLAP_ENV
from radix_policy.events import Tag, Tick
from radix_policy.runtime import Runtime
from radix_policy.simulator import Engine, Run, spans_of
from radix_policy.workloads import make

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,  # about 2 minutes a policy on two free cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

CAPACITY = 2600  # tokens: one and a half of the largest request below
LONGEST = 1700  # tokens of prompt and output; a session that comes to more is left
CALLS = 120


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


@pytest.mark.parametrize("policy", ["lru", "cachescout", "scout"])
def test_same_cached_tokens(
    policy: str,
    start_server: Callable[..., Any],
    generate: Callable[..., dict[str, Any]],
    post: Callable[..., dict[str, Any]],
) -> None:
    # a decode step ahead of its time (overlap) would hold one more token than the simulator knows of
    env = {"SGLANG_SCOUT_VERIFY": "1", CPU_OVERLAP_ENV: "0"}
    server = start_server(policy, max_total_tokens=CAPACITY, env=env)
    post(server.url, "/flush_cache?timeout=30")
    calls: list[tuple[LiveCall, array[int], int]] = []  # with the output, and the tokens that were found
    sessions = live_sessions(make("selector", seed=5, sessions=12), vocab=500, reserved=10)
    for session, call in islice(interleaved(sessions, 3), CALLS):
        assert call.input_ids is not None
        body = {"custom_params": {"scout": {"agent": call.agent, "session": call.session}}}
        answer = generate(server.url, list(call.input_ids), call.max_new_tokens, ignore_eos=True, **body)
        output = array("q", answer["output_ids"])
        session.feed(output)
        calls.append((call, output, answer["meta_info"]["cached_tokens"]))
    if policy == "lru":
        events = [event for n, (_, output, _) in enumerate(calls) for event in ((f"r{n}",), (f"r{n}", len(output)))]
    else:
        with urllib.request.urlopen(server.url + "/server_info", timeout=60) as response:
            scout = json.load(response)["internal_states"][0]["scout"]
        assert scout["live"] and not scout["faults"] and not scout["mirror"]["differences"]
        events = scout["events"]

    runtime = Runtime(policy)
    engine = Engine(runtime, CAPACITY)
    waiting = iter(calls)
    run: Run | None = None
    at = due = found = 0  # the step of the last token, and of the next one
    for number, event in enumerate(events):
        if run is not None and due > at and event[0] != due:
            # a step may tick twice (its number, then the time): it decodes when both are known
            at = due
            if run.allocated < run.kv:
                engine.grow(((run, 1),))
        if len(event) == 1:
            call, output, found = next(waiting)
            assert call.input_ids is not None
            prompt = array("q", call.input_ids)
            run = Run(event[0], spans_of(prompt), spans_of(output), len(prompt), len(output))
            engine.arrive(run, Tag(call.agent, call.session))
            assert engine.admit(run)
            at = due = runtime.world.clock.step
        elif isinstance(event[0], str):
            assert run is not None and event[0] == run.rid
            engine.finish(run)
            assert run.cached == found, f"event {number}: {found} cached tokens on the server, {run.cached} here"
            run = None
        else:
            runtime.observe(Tick(*event))
            due = event[0]
    assert next(waiting, None) is None
    assert engine.evicted > 10 * CAPACITY, "no pressure: the test would show nothing"
