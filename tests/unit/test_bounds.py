"""Bad input: state stays bounded whatever comes, clocks may go back, and nothing of no length is a problem."""

import gc
import sys
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.events import PrefixMatched, RequestArrived, RequestFinished, SessionClosed, Tag, Tick
from radix_policy.eviction import POLICIES
from radix_policy.prompts import SpanPrompt, TokenPrompt
from radix_policy.runtime import Runtime
from tests.unit.stage import Stage


def deep_size(thing: Any) -> int:
    """Bytes of the object and of all that only it keeps alive: modules, classes and functions are left out."""
    seen: set[int] = set()
    left, total = [thing], 0
    while left:
        at = left.pop()
        if id(at) in seen or isinstance(at, type(sys) | type | type(deep_size)):
            continue
        seen.add(id(at))
        total += at.nbytes if isinstance(at, np.ndarray) and at.base is None else sys.getsizeof(at)
        if not isinstance(at, str | bytes | array):
            left.extend(gc.get_referents(at))
    return total


def flood(stage: Stage, first: int, many: int, agents: int | None = None, sessions: int | None = None) -> None:
    """Calls by ever new agents and sessions, each with a prompt of its own; none ever ends or comes back."""
    for n in range(first, first + many):
        agent = f"agent {n if agents is None else n % agents}"
        session = f"session {n if sessions is None else n % sessions}"
        stage.wait(0.1)
        rid = stage.start(((100 * n, 20),), agent, session, output=2)
        if rid is not None:
            stage.finish(rid)


def flood_of_names(runtime: Runtime, first: int, many: int) -> None:
    """The same without a tree, for great numbers: what identity, sessions and the models keep of names."""
    for n in range(first, first + many):
        runtime.observe(Tick(n, n * 0.1))
        runtime.observe(RequestArrived("r", SpanPrompt(((100 * n, 9),)), "", Tag(f"agent {n}", f"session {n}")))
        runtime.observe(PrefixMatched("r", (), 0))
        runtime.observe(RequestFinished("r"))
        if n % 32 == 0:
            runtime.begin_eviction()


def lengths(stage: Stage) -> dict[str, int]:
    """Entries of every table of the runtime, the models and the policy."""
    runtime, world, policy = stage.runtime, stage.world, stage.runtime.policy
    hazard = policy.hazard  # type: ignore[attr-defined]
    return {
        "requests": len(runtime.requests),
        "sessions": len(world.sessions),
        "live": len(world.sessions.live),
        "agents": len(world.identifier.agents),
        "chain": len(world.transitions),
        "starts": len(world.starts.counts),
        "views": len(hazard._views),
        "slots": len(hazard._end),
        "moved": len(hazard._dirty),
        "contexts": len(hazard.router._counts),
        "steps": len(hazard._steps),
        "calls": len(policy._calls),  # type: ignore[attr-defined]
        "weights": max((len(v.weights) for v in hazard._views.values()), default=0),
        "nodes": len(world.nodes),
        "index": len(runtime.index),
    }


CAPACITY, SESSIONS, AGENTS = 2000, 128, 16


def test_twenty_thousand_agents_and_sessions_stay_within_the_caps() -> None:
    stage = Stage(CAPACITY, max_sessions=SESSIONS, max_agents=AGENTS)
    flood(stage, 0, 1500)
    middle = deep_size(stage.runtime)
    flood_of_names(stage.runtime, 1500, 17_000)
    flood(stage, 18_500, 1500)
    found = lengths(stage)
    assert found["requests"] == 0
    assert found["sessions"] == SESSIONS and found["live"] <= SESSIONS
    assert found["agents"] == AGENTS + 1  # the pooled one
    for table in ("chain", "starts", "calls"):
        assert found[table] <= AGENTS + 1, table
    for table in ("views", "weights"):
        assert found[table] <= SESSIONS, table
    assert found["slots"] <= 2 * SESSIONS
    assert found["contexts"] <= 6 * 24
    assert found["steps"] <= (AGENTS + 1) * 64
    assert found["nodes"] <= CAPACITY and found["index"] <= CAPACITY
    assert deep_size(stage.runtime) < 1.1 * middle + 50_000


def test_state_is_bounded_when_nothing_is_ever_evicted() -> None:
    """A cache that is large enough never asks for a victim; sessions come and go all the same."""
    stage = Stage(10**9, max_sessions=SESSIONS, max_agents=AGENTS)
    for n in range(3000):
        stage.call(((1, 20),), f"agent {n % 5}", f"session {n}", gap=0.1, output=1)
    found = lengths(stage)
    assert found["sessions"] == SESSIONS
    assert found["moved"] <= 1024


def test_one_session_that_never_ends_costs_no_more_than_its_agents() -> None:
    stage = Stage(CAPACITY, max_agents=AGENTS)
    flood(stage, 0, 500, agents=5, sessions=1)
    early = deep_size(stage.runtime)
    flood(stage, 500, 1500, agents=5, sessions=1)
    session = stage.session("session 0")
    assert session.calls == 2000 and len(session.visits) == 5 and len(session.trail) == 2
    assert deep_size(stage.runtime) < 1.1 * early + 20_000


@pytest.mark.slow
def test_four_hundred_thousand_agents_leave_what_a_hundred_thousand_leave() -> None:
    runtime = Runtime("scout", {"identity": "tags"})
    runtime.reset(0)
    flood_of_names(runtime, 0, 100_000)
    early = deep_size(runtime)
    flood_of_names(runtime, 100_000, 300_000)
    assert len(runtime.world.identifier.agents) == 65
    assert len(runtime.world.sessions) == 4096
    assert deep_size(runtime) < 1.1 * early


def test_learned_identity_stays_bounded_too() -> None:
    stage = Stage(CAPACITY, identity="learned", max_agents=AGENTS, max_sessions=SESSIONS, identity_threads=64)
    sizes = []
    for n in range(1600):
        stage.wait(0.1)
        rid = stage.start(((50_000 * (n // 3), 30), (10**9 + 100 * n, 20)), None, None, output=2)
        if rid is not None:
            stage.finish(rid)
        if n + 1 in (800, 1600):
            sizes.append(deep_size(stage.runtime))
    assert len(stage.world.identifier.agents) <= AGENTS + 1
    assert len(stage.world.sessions) <= SESSIONS
    assert sizes[1] < 1.15 * sizes[0] + 50_000


# ---- clocks ----


def test_a_clock_that_goes_back_stands_still() -> None:
    stage = Stage()
    clock = stage.world.clock
    stage.runtime.observe(Tick(10, 100.0))
    stage.runtime.observe(Tick(4, 40.0))
    assert (clock.step, clock.seconds) == (10, 100.0)
    stage.runtime.observe(Tick(11, 40.0))
    assert (clock.step, clock.seconds) == (11, 100.0)
    stage.runtime.observe(Tick(3, 101.0))
    assert (clock.step, clock.seconds) == (11, 101.0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 2), st.sampled_from("ab")), min_size=1, max_size=25))
def test_calls_under_a_jumping_clock_are_scored_all_the_same(calls: list[tuple[float, int, str]]) -> None:
    stage, latest = Stage(150), 0.0
    for n, (seconds, session, agent) in enumerate(calls):
        stage.runtime.observe(Tick(n, seconds))
        latest = max(latest, seconds)
        assert stage.world.clock.seconds == latest
        rid = stage.start(((1000 * session, 10 + n),), agent, f"s{session}")
        if rid is not None:
            stage.finish(rid)
        stage.refresh()
        assert all(0 <= stage.score(node) <= 1 for node in stage.nodes())
        assert stage.world.gaps.cycle >= 0
    assert all(s.finished_at <= latest for s in stage.world.sessions)


# ---- nothing, and what nobody knows ----


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("identity", ["learned", "window", "tags", "off"])
def test_prompts_of_no_tokens_and_events_of_nobody_change_nothing(policy: str, identity: str) -> None:
    runtime = Runtime(policy, {"identity": identity})
    runtime.reset(0)
    for n, prompt in enumerate((SpanPrompt(()), SpanPrompt(()), SpanPrompt(((5, 1),)))):
        for tag in (None, Tag(), Tag("a", "s"), Tag(None, "s", True), Tag("a", None, False, "nobody")):
            runtime.observe(RequestArrived("r", prompt, "", tag))
            runtime.observe(PrefixMatched("r", (), 0))
            runtime.observe(PrefixMatched("r", (), 0))
            runtime.observe(RequestFinished("r", 0, True))
            runtime.observe(Tick(n, float(n)))
    runtime.observe(RequestArrived("t", SpanPrompt(())))
    runtime.observe(RequestFinished("t"))
    runtime.observe(RequestFinished("never arrived"))
    runtime.observe(PrefixMatched("never arrived", (), 0))
    runtime.observe(SessionClosed("never seen"))
    with runtime.evicting() as drain:
        assert drain.next() is None
    assert runtime.requests == {}
    assert runtime.snapshot()["nodes"] == 1
    with pytest.raises(TypeError, match="not an event"):
        runtime.observe("hello")  # type: ignore[arg-type]


def test_real_token_prompts_of_no_tokens_are_taken_as_well() -> None:
    runtime = Runtime("scout")
    runtime.reset(0)
    for tokens in ([], array("q"), [7]):
        runtime.observe(RequestArrived("r", TokenPrompt(tokens), "ns", Tag("a", "s")))
        runtime.observe(PrefixMatched("r", (), 0))
        runtime.observe(RequestFinished("r"))
    session = runtime.world.sessions.find("ns", "s")
    assert session is not None and session.calls == 3


def test_a_request_that_never_matches_or_arrives_twice_leaves_nothing_behind() -> None:
    runtime = Runtime("scout", {"identity": "tags"})
    runtime.reset(0)
    for _ in range(50):
        runtime.observe(RequestArrived("same", SpanPrompt(((1, 9),)), "", Tag("a", "s")))
    runtime.observe(RequestFinished("same"))
    assert runtime.requests == {}
    session = runtime.world.sessions.find("", "s")
    assert session is not None and session.calls == 50
