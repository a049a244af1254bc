"""The offline optimum: equal to brute force on small cases, and never beaten."""

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radix_policy.eviction import POLICIES
from radix_policy.prompts import expand
from radix_policy.simulator import Loop, Outcome, Study
from radix_policy.simulator.optimum import Plan, optimal
from radix_policy.workloads import SessionScript, Workload, make, make_call
from tests.unit.small_workloads import workloads

ONLINE = sorted(POLICIES)


def brute_force(workload: Workload, log: "Outcome") -> int:
    """The most tokens that can be hit, token by token and choice by choice; page size 1."""
    calls = [c for s in workload.sessions for c in s.calls]
    tokens = [tuple(expand(c.prompt + c.output)) for c in calls]
    held: dict[tuple[int, ...], int] = {}
    since: dict[tuple[int, ...], int] = {}
    free = 0
    intervals: dict[tuple[int, int], int] = {}
    events = len(log.log) // 2
    for event in range(events):
        number, finish = divmod(log.log[2 * event], 2)
        call, ids = calls[number], tokens[number]
        for end in range(1, call.prompt_tokens + 1):
            key = ids[:end]
            if finish:
                held[key] -= 1
                if not held[key]:
                    since[key] = event
                continue
            if end < call.prompt_tokens:  # the last prompt token is always computed
                if held.get(key):
                    free += 1
                elif key in since:
                    span = (since[key], event)
                    intervals[span] = intervals.get(span, 0) + 1
            held[key] = held.get(key, 0) + 1
        if finish:
            for end in range(call.prompt_tokens + 1, len(ids)):  # the last output token has no KV
                if not held.get(ids[:end]):
                    since[ids[:end]] = event
    room = [log.capacity - log.log[2 * event + 1] for event in range(events)]

    @cache
    def best(event: int, kept: tuple[tuple[int, int], ...]) -> int:
        """Hits from this event on; `kept`: (end, tokens) of what is kept now."""
        if event == events:
            return 0
        hits = sum(n for end, n in kept if end == event)
        going = tuple((end, n) for end, n in kept if end != event)
        over = sum(n for _, n in going) - room[event]
        found = 0
        for left in drops(going, max(over, 0)):
            ends = dict(left)
            for (begin, end), n in intervals.items():
                if begin == event:
                    ends[end] = ends.get(end, 0) + n
            found = max(found, best(event + 1, tuple(sorted(ends.items()))))
        return hits + found

    def drops(kept: tuple[tuple[int, int], ...], over: int) -> list[tuple[tuple[int, int], ...]]:
        """Every way to drop exactly so many tokens."""
        if not kept:
            return [()] if over == 0 else []
        (end, n), rest = kept[0], kept[1:]
        found = []
        for gone in range(min(n, over) + 1):
            head = ((end, n - gone),) if n > gone else ()
            found += [head + tail for tail in drops(rest, over - gone)]
        return found

    return free + best(0, ())


@settings(max_examples=200, deadline=None)
@given(workloads(sessions=3, calls=3), st.integers(1, 3), st.floats(1.05, 3))
def test_equals_brute_force(workload: Workload, concurrency: int, factor: float) -> None:
    capacity = int(factor * (workload.largest + 2))
    log = Loop(workload, "lru", capacity=capacity, concurrency=concurrency).run()
    assume(len(log.log) <= 24)
    assert sum(Plan(workload).optimum(log.log, capacity)) == brute_force(workload, log)


@settings(max_examples=40, deadline=None)
@given(
    workloads(), st.integers(1, 4), st.floats(1.05, 4), st.sampled_from((1, 4)), st.sampled_from((0, 8)), st.booleans()
)
def test_no_policy_exceeds_it(
    workload: Workload, concurrency: int, factor: float, page: int, chunk: int, trims: bool
) -> None:
    capacity = int(factor * (workload.largest + 2 * page))
    study = Study(workload, page, chunk)
    bound = study.run("opt", capacity, concurrency)
    for policy in (*ONLINE, "kvflow+END", "belady", "beladyP"):
        unlimited = None if policy.startswith("belady") else trims
        outcome = study.run(policy, capacity, concurrency, trims=unlimited)
        assert outcome.order == bound.order, policy
        assert outcome.cached_tokens <= bound.cached_tokens, policy
        assert outcome.prompt_tokens == bound.prompt_tokens


@pytest.mark.parametrize(("name", "concurrency", "factor"), [("selector", 4, 3), ("random", 16, 6)])
def test_belady_with_trimming_reaches_it(name: str, concurrency: int, factor: int) -> None:
    workload = make(name, seed=3, concurrency=concurrency, sessions=20)
    study = Study(workload)
    capacity = factor * workload.largest
    rates = {p: study.run(p, capacity, concurrency).hit_rate for p in ("lru", "belady", "beladyP", "opt")}
    assert rates["lru"] < rates["belady"] <= rates["beladyP"] <= rates["opt"]
    assert rates["opt"] - rates["beladyP"] < 0.003


def test_per_request_figures_add_up() -> None:
    workload = make("debate", seed=3, concurrency=4, sessions=12)
    study = Study(workload)
    reference = study.order(3 * workload.largest, 4)
    best = optimal(study.plan(), reference)
    assert len(best.cached) == reference.requests
    assert best.cached_tokens == sum(best.cached)
    assert all(0 <= c < p for c, p in zip(best.cached, best.prompts))


def test_everything_fits() -> None:
    workload = make("selector", seed=3, concurrency=1, sessions=6)
    study = Study(workload)
    assert study.run("opt", 10**7, 1).cached_tokens == study.run("lru", 10**7, 1).cached_tokens


def test_what_runs_is_hit_without_being_kept() -> None:
    """Two requests with one prompt at the same time: the second finds all but its last token, at any capacity."""
    call = make_call("a", ((1, 50),), ((1000, 40),), 0.0)
    workload = Workload("twins", (SessionScript("x", (call,)), SessionScript("y", (call,))))
    outcome = Study(workload).run("opt", 182, 2)
    assert list(outcome.cached) == [0, 49]
