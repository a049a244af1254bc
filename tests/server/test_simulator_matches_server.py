"""The simulator against a real server at concurrency 1: the token ids that were sent find the same cached tokens.

The clock is the one thing that a server does not repeat. `lru` does not ask for it: no difference is allowed. The
scored policies do: the simulator is given the times at which the requests were sent, which are on the same monotonic
clock as the server's own ticks, and a decision on a knife's edge may still fall the other way.
"""

import importlib.util
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from benchmarks.agents.live import LiveCall, LiveSession, live_sessions
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


@pytest.mark.parametrize(("policy", "allowed"), [("lru", 0.0), ("cachescout", 0.01), ("scout", 0.01)])
def test_same_cached_tokens(
    policy: str,
    allowed: float,
    start_server: Callable[..., Any],
    generate: Callable[..., dict[str, Any]],
    post: Callable[..., dict[str, Any]],
) -> None:
    # a decode step ahead of its time (overlap) would hold one more token than the simulator knows of
    server = start_server(policy, max_total_tokens=CAPACITY, extra_args=["--disable-overlap-schedule"])
    post(server.url, "/flush_cache")
    runtime = Runtime(policy)
    engine = Engine(runtime, CAPACITY, trims=False)
    step, found, expected, differing = 0, 0, 0, 0
    workload = make("selector", seed=5, sessions=12)
    sessions = live_sessions(workload, vocab=500, reserved=10)
    for number, (session, call) in enumerate(islice(interleaved(sessions, 3), CALLS)):
        assert call.input_ids is not None
        prompt = array("q", call.input_ids)
        tag = Tag(call.agent, call.session)
        runtime.observe(Tick(step, time.monotonic()))
        body = {"custom_params": {"scout": {"agent": call.agent, "session": call.session}}}
        answer = generate(server.url, list(prompt), call.max_new_tokens, ignore_eos=True, **body)
        output = array("q", answer["output_ids"])
        cached = answer["meta_info"]["cached_tokens"]
        run = Run(f"r{number}", spans_of(prompt), spans_of(output), len(prompt), len(output))
        engine.arrive(run, tag)
        assert engine.admit(run)
        step += len(output)  # one prefill, then one step for each further token
        runtime.observe(Tick(step, time.monotonic()))
        engine.finish(run)
        session.feed(output)
        found, expected, differing = found + cached, expected + run.cached, differing + (cached != run.cached)
        if not allowed:
            assert cached == run.cached, f"call {number}: {cached} cached tokens on the server, {run.cached} here"
    assert engine.evicted > 10 * CAPACITY, "no pressure: the test would show nothing"
    assert abs(found - expected) <= allowed * max(found, expected), f"{found} against {expected}, {differing} calls"
