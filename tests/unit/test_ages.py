"""Worth by age against hazards counted by brute force, and the clock that dates stamps."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.ages import AgeModel, StampClock
from radix_policy.gaps import EDGES
from tests.unit.test_bounds import deep_size

BINS = len(EDGES) - 1
KINDS = 6
MOMENTS = 512  # that the clock keeps at most
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


GAPS: dict[str, Callable[[int, Random], float]] = {  # seconds before note n
    "even": lambda n, random: 1.0,
    "random": lambda n, random: random.expovariate(1.0),
    "bursts": lambda n, random: 1e-3 if n % 300 else 60.0,
    "long bursts": lambda n, random: 1e-4 if n % 3000 else 600.0,
    "heavy": lambda n, random: min(1e-3 * random.paretovariate(0.7), 1e5),
    "any scale": lambda n, random: 10 ** random.uniform(-5, 4),
    "ever slower": lambda n, random: 1e-3 * 1.0002**n,
}


def worst(clock: StampClock, moments: Sequence[float]) -> float:
    """The largest share of its age by which a moment is dated too early; stamp n was at moments[n]."""
    now = moments[-1]
    dated = [clock.seconds(float(n)) for n in range(len(moments))]
    assert dated[0] == moments[0], "the first moment stays"
    assert dated[-1] == clock.seconds(len(moments) + 5.0) == now, "and the last one"
    assert dated == sorted(dated) and all(a <= b for a, b in zip(dated, moments, strict=True)), "never too late"
    assert len(set(dated)) <= MOMENTS
    return max((b - a) / (now - b) for a, b in zip(dated[:-1], moments[:-1], strict=True))


@pytest.mark.parametrize("kind", GAPS)
def test_a_moment_is_dated_to_a_twelfth_of_its_age_however_long_ago(kind: str) -> None:
    """A gap between moments kept is at most a twelfth of the age at its end, so 1/11 of the age inside it."""
    clock, random, seconds, moments = StampClock(), Random(1), 0.0, list[float]()
    for n in range(100_000):
        seconds += GAPS[kind](n, random)
        clock.note(float(n), seconds)
        moments.append(seconds)
        if n in (600, 5_000, 14_780, 50_123):
            assert worst(clock, moments) <= 1 / 11 + 1e-9
    assert 1 / 50 < worst(clock, moments) <= 1 / 11 + 1e-9
    assert deep_size(clock) < 25_000


def test_where_a_twelfth_would_keep_too_many_it_is_a_sixth() -> None:
    """Ever faster: about as many notes at each scale of age."""
    clock, seconds, moments = StampClock(), 0.0, list[float]()
    shares = []
    for n in range(100_000):
        seconds += max(1e3 * 0.9998**n, 1e-5)
        clock.note(float(n), seconds)
        moments.append(seconds)
        if n % 9_999 == 0 and n:
            shares.append(worst(clock, moments))
    assert 1 / 11 + 1e-9 < max(shares) <= 1 / 5 + 1e-9
    assert deep_size(clock) < 25_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from((1e-3, 0.1, 1.0, 30.0, 1e3))), min_size=1, max_size=20),
)
def test_bursts_and_silences_in_any_order_are_dated_as_well(bursts: list[tuple[int, float]]) -> None:
    clock, seconds, moments = StampClock(), 0.0, [0.0]
    clock.note(0.0, 0.0)
    for count, gap in bursts:
        for _ in range(count):
            seconds += gap
            clock.note(float(len(moments)), seconds)
            moments.append(seconds)
    assert worst(clock, moments) <= (1 / 5 if len(moments) > MOMENTS else 0.0) + 1e-9


def test_a_new_tree_starts_anew() -> None:
    clock = StampClock()
    clock.note(100.0, 7.0)
    assert (clock.seconds(50.0), clock.seconds(200.0)) == (7.0, 7.0)
    clock.clear()
    assert clock.seconds(100.0) == 0.0
    clock.note(1.0, 8.0)
    assert clock.seconds(100.0) == 8.0
