"""The stack-distance curve against a cache that really evicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_policy.admission import published_working_set
from radix_policy.prompts import Spans
from radix_policy.simulator import Study, spans_of
from radix_policy.working_set import ReuseCurve, stability
from radix_policy.workloads import Workload, make
from radix_policy.workloads.base import SessionScript, make_call

Tokens = tuple[int, ...]


class NaiveLru:
    """Prefixes in the order of use, each standing for its last token: the naive twin, at any size of cache."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stack: list[Tokens] = []  # latest first

    def call(self, prompt: Tokens, output: Tokens) -> int:
        kept = set(self.stack)
        found = 0
        while found < len(prompt) - 1 and prompt[: found + 1] in kept:
            found += 1
        whole = (prompt + output)[:-1]
        used = [whole[: n + 1] for n in range(len(whole))]
        rest = set(used)
        self.stack = [*used, *(p for p in self.stack if p not in rest)][: self.capacity]
        return found


numbers = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@given(st.lists(st.tuples(numbers, numbers), max_size=14), st.integers(0, 40))
def test_the_curve_is_what_an_lru_cache_of_any_size_finds(calls: list[tuple[Tokens, Tokens]], more: int) -> None:
    largest = max((len(p) + len(o) for p, o in calls), default=1)
    curve, naive = ReuseCurve(), NaiveLru(largest + more)
    found = 0
    for prompt, output in calls:
        curve.call(spans_of(prompt), len(prompt), spans_of(output), len(output))
        found += naive.call(prompt, output)
        assert curve.found([naive.capacity]) == [found]
    assert curve.found([10**6]) == [curve.reachable]
    assert curve.found([curve.tokens, 0]) == [curve.reachable, 0]
    assert len(curve.needs) == curve.calls == len(calls)
    useful = [need for need in curve.needs if need]
    assert curve.need(0.0) == min(useful, default=0) and curve.need(1.0) == max(useful, default=0)


def started_and_finished(workload: Workload, capacity: int, concurrency: int) -> ReuseCurve:
    """The curve of the calls as they begin and end in a pool of that size."""
    curve, calls = ReuseCurve(), [call for session in workload.sessions for call in session.calls]
    for event in Study(workload).order(capacity, concurrency).log[::2]:
        number, ends = event // 2, event % 2
        call = calls[number]
        if ends:
            curve.finish(number, call.prompt + call.output, call.prompt_tokens + call.output_tokens)
        else:
            curve.start(number, call.prompt, call.prompt_tokens)
    return curve


@pytest.mark.parametrize("name", ["selector", "pipeline"])
@pytest.mark.parametrize(
    ("concurrency", "factor"),
    [(1, 1.3), (1, 2), (1, 8), (4, 1.5), (4, 4), (4, 8), (16, 2), (16, 6), (16, 16), (16, 24)],
)
def test_the_curve_predicts_what_the_simulated_engine_computes(name: str, concurrency: int, factor: float) -> None:
    workload = make(name, seed=5, concurrency=concurrency, sessions=40)
    capacity = int(factor * workload.largest)
    curve = started_and_finished(workload, capacity, concurrency)
    outcome = Study(workload).run("lru+trim", capacity, concurrency)
    computed = outcome.prompt_tokens - outcome.cached_tokens
    assert curve.prompt_tokens - curve.found([capacity])[0] == pytest.approx(computed, rel=0.05)


def test_what_a_running_call_holds_is_there_and_nothing_else_can_be() -> None:
    """A call that began long ago and still runs lies above one that began later and is over."""
    curve = ReuseCurve()
    curve.start("long", ((0, 100),), 100)
    curve.start("short", ((1000, 50),), 50)
    curve.finish("short", ((1000, 51),), 51)
    curve.start("short again", ((1000, 51), (2000, 10)), 61)
    assert [*map(tuple, curve.pieces)] == [(100, 50)], "the running call's 100 tokens lie above, though they are older"
    curve.finish("long", ((0, 101),), 101)
    curve.start("long again", ((0, 101), (3000, 10)), 111)
    assert tuple(curve.pieces[-1]) == (61, 100), "only what still runs lies above a call that has just ended"


def test_ten_prompts_in_turn_are_found_all_or_not_at_all() -> None:
    curve = ReuseCurve()
    for number in range(400):
        curve.call(((1000 * (number % 10), 101),), 101, ((10**6 + number, 1),), 1)
    assert curve.found([909, 1009, 959]) == [0, 39_000, 19_500]
    assert curve.enough(0.0) == 1009 and curve.enough(1.0) == 0
    assert curve.found([curve.enough(0.01)])[0] >= 39_000 - 404 > curve.found([curve.enough(0.01) - 1])[0]


def test_the_published_working_set() -> None:
    assert published_working_set(8, 1000.0) == 7000.0
    assert published_working_set(0, 1000.0) == published_working_set(1, 1000.0) == 0.0


def script(*prompts: Spans, agents: str = "") -> SessionScript:
    calls = [
        make_call(agents[i] if agents else "a", prompt, ((10**6 + i, 5),), 1.0) for i, prompt in enumerate(prompts)
    ]
    return SessionScript("s", tuple(calls))


def test_stability_counts_what_is_kept_and_what_is_rewritten() -> None:
    kept = stability(script(((0, 100),), ((0, 100), (10**6, 5), (500, 20)), ((0, 40), (900, 60))))
    assert (kept.calls, kept.prompt_tokens) == (2, 225)
    assert (kept.kept, kept.kept_with_output) == (100 + 40, 105 + 40)
    assert (kept.broken, kept.lost) == (1, 85)
    other = stability(script(((0, 100),), ((700, 50),), ((0, 100), (1, 9)), agents="aba"))
    assert (other.calls, other.broken, other.lost) == (1, 0, 0), "agent by agent"
