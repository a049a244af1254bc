"""Worth by age against hazards counted by brute force, and the clock that dates stamps."""

import math
from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.ages import AgeModel, StampClock
from radix_policy.gaps import EDGES

BINS = len(EDGES) - 1
KINDS = 6
NEWEST = 128  # moments of the clock
events = st.lists(
    st.tuples(st.booleans(), st.integers(0, KINDS - 1), st.floats(0, 3e5) | st.sampled_from((0.0, 1.0, 10.0))),
    max_size=120,
)


def model(seen: list[tuple[bool, int, float]]) -> AgeModel:
    made = AgeModel()
    for hit, kind, age in seen:
        (made.hit if hit else made.lost)(kind, age)
    return made


def hazards(seen: list[tuple[bool, int, float]], kind: int | None) -> list[float]:
    """By definition: everything that became of a node is looked at again for every bin."""
    prior = hazards(seen, None) if kind is not None else [0.0] * BINS
    weight = 4.0 if kind is not None else 1.0
    own = [(hit, min(bisect_right(EDGES, age) - 1, BINS - 1)) for hit, k, age in seen if kind in (None, k)]
    found = []
    for k in range(BINS):
        hits = sum(hit and at == k for hit, at in own)
        risk = sum(at >= k for _, at in own) - sum(not hit and at == k for hit, at in own) / 2
        found.append(min((hits + weight * prior[k]) / (risk + weight), 1.0))
    return found


def worth(hazard: list[float], theta: float) -> list[float]:
    """V at the edges: the sum over all bins in which the hit may come, and the best of what is still to come."""
    exact = []
    for k in range(BINS):
        total, alive = 0.0, 1.0
        for n in range(k, BINS):
            middle = (EDGES[n] + EDGES[n + 1]) / 2 - EDGES[k]
            total += alive * hazard[n] * math.exp(-theta * middle)
            alive *= 1.0 - hazard[n]
        exact.append(total)
    return [max(exact[k:]) for k in range(BINS)] + [0.0]


@settings(max_examples=30, deadline=None)
@given(events, st.floats(0.3, 0.99), st.sampled_from((0.0, 1e-9, 0.5, 20.0)))
def test_worth_is_that_of_hazards_counted_by_brute_force(
    seen: list[tuple[bool, int, float]], gamma: float, cycle: float
) -> None:
    made = model(seen)
    made.refresh(gamma, cycle)
    assert made.events == len(seen)
    theta = (1 - gamma) / cycle if cycle > 1e-6 else 0.0
    for kind in {k for _, k, _ in seen} | {0}:
        exact = worth(hazards(seen, kind), theta)
        assert [made.value(kind, EDGES[k]) for k in range(BINS)] == pytest.approx(exact[:BINS], abs=1e-5)
        between = (EDGES[40] + EDGES[41]) / 2
        assert made.value(kind, between) == pytest.approx((exact[40] + exact[41]) / 2, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(events, st.floats(0.3, 0.99), st.floats(0, 1e4), st.lists(st.floats(-1, 1e9), min_size=2, max_size=20))
def test_worth_is_a_chance_that_never_rises_with_age(
    seen: list[tuple[bool, int, float]], gamma: float, cycle: float, ages: list[float]
) -> None:
    made = model(seen)
    made.refresh(gamma, cycle)
    for kind in range(KINDS):
        values = [made.value(kind, age) for age in sorted(ages)]
        assert all(b <= a + 1e-12 for a, b in pairwise(values))
        assert all(0 <= v <= 1 + 1e-6 for v in values)


def test_without_an_event_nothing_is_worth_anything() -> None:
    made = AgeModel()
    assert made.value(3, 1.0) == 0.0
    made.refresh(0.85, 10.0)
    assert [made.value(kind, age) for kind in range(KINDS) for age in (0.0, 5.0, 1e9)] == [0.0] * 18


def test_what_is_hit_soon_or_never_is_worth_much_when_young_and_little_when_old() -> None:
    made = AgeModel()
    for _ in range(300):
        made.hit(0, 2.0)
        made.lost(0, 100.0)
        made.lost(1, 100.0)
    made.refresh(0.999, 10.0)
    assert made.value(0, 0.0) == pytest.approx(0.5, abs=0.05)
    assert made.value(0, 10.0) < 0.02
    assert made.value(1, 0.0) < 0.05, "a kind that is never hit"
    assert made.value(2, 0.0) == pytest.approx(0.25, abs=0.1), "an unknown kind is taken for the mean of all"
    assert made.value(0, 0.0) == pytest.approx(made.value(0, 1.5)), "never below the best that is still to come"


def test_an_eviction_censors_and_does_not_deny() -> None:
    """Half are evicted at once, the others are all hit at 10: whoever lives that long is hit."""
    made = AgeModel()
    for _ in range(500):
        made.lost(0, 0.5)
        made.hit(0, 10.0)
    made.refresh(0.999, 100.0)
    assert made.value(0, 2.0) > 0.95


def test_old_counts_are_halved_so_that_a_change_comes_through() -> None:
    made = AgeModel()
    for _ in range(20_000):
        made.lost(0, 1.0)
    made.refresh(0.999, 10.0)
    assert made.value(0, 0.0) < 0.01
    for _ in range(8_000):
        made.hit(0, 1.0)
    made.refresh(0.999, 10.0)
    assert made.value(0, 0.0) > 0.75
    assert made.events == 28_000


# ---- the clock ----


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=60),
    st.lists(st.floats(-5, 120), min_size=1, max_size=10),
)
def test_a_stamp_is_dated_by_the_last_moment_that_had_not_passed_it(
    notes: list[tuple[float, float]], asked: list[float]
) -> None:
    clock, kept = StampClock(), list[tuple[float, float]]()
    for stamp, seconds in notes:
        clock.note(stamp, seconds)
        if not kept or (stamp > kept[-1][0] and seconds > kept[-1][1]):
            kept.append((stamp, seconds))
    for stamp in asked:
        before = [seconds for at, seconds in kept if at <= stamp]
        first = kept[0][1] if kept else 0.0
        assert clock.seconds(stamp) == (before[-1] if before else first)


def long_dated(last: int) -> list[float]:
    """When stamps 1, 2, ... are taken to have been, where stamp n was at n seconds."""
    clock = StampClock()
    for n in range(1, last + 1):
        clock.note(float(n), float(n))
    assert clock.seconds(last + 5.0) == last
    return [clock.seconds(float(n)) for n in range(1, last + 1)]


def test_the_newest_moments_are_exact_and_older_ones_never_later_than_they_were() -> None:
    last = 20_000
    dated = long_dated(last)
    assert dated[-NEWEST:] == [float(n) for n in range(last - NEWEST + 1, last + 1)]
    assert dated == sorted(dated) and all(when <= n for n, when in enumerate(dated, 1))
    assert dated[0] == 1.0, "the first moment stays"
    assert len(set(dated)) <= 2 * NEWEST


@pytest.mark.xfail(strict=True, reason="thinning forgets all of the past but its first moment")
def test_older_moments_get_no_coarser_than_the_time_since_then() -> None:
    last = 20_000
    assert all(n - when <= last - n + 1 for n, when in enumerate(long_dated(last), 1))


def test_a_new_tree_starts_anew() -> None:
    clock = StampClock()
    clock.note(100.0, 7.0)
    assert (clock.seconds(50.0), clock.seconds(200.0)) == (7.0, 7.0)
    clock.clear()
    assert clock.seconds(100.0) == 0.0
    clock.note(1.0, 8.0)
    assert clock.seconds(100.0) == 8.0
