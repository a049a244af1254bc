"""The law of silences: quantiles, the chance to wait still longer, and what the wait leaves of a hit's worth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.gaps import EDGES, GapHistogram

gap_lists = st.lists(st.floats(0, 2e5), min_size=1, max_size=80)


def histogram(gaps: list[float], cycle: float = 0.0) -> GapHistogram:
    made = GapHistogram()
    for gap in gaps:
        made.add(gap)
    if cycle:
        made.add_cycle(cycle)
    return made


@settings(max_examples=100, deadline=None)
@given(gap_lists, st.floats(0.01, 1.0))
def test_a_quantile_is_right_to_a_quarter_octave_and_never_too_short(gaps: list[float], p: float) -> None:
    need = p * len(gaps)
    exact = next(x for i, x in enumerate(sorted(gaps), 1) if i >= need)
    found = histogram(gaps).quantile(p)
    assert exact < found <= max(exact * 2**0.25 * (1 + 1e-12), EDGES[1])


@settings(max_examples=60, deadline=None)
@given(gap_lists, st.floats(0.01, 0.999), st.floats(0, 1e4))
def test_survival_falls_from_one_and_both_tables_stay_between_zero_and_one(
    gaps: list[float], gamma: float, cycle: float
) -> None:
    tables = histogram(gaps, cycle).tables(gamma)
    times = np.concatenate([np.geomspace(1e-5, 1e9, 300), np.array(EDGES)])
    times.sort()
    s, d = tables.lookup(times)
    assert tables.lookup(np.zeros(1))[0][0] == pytest.approx(1.0)
    assert (np.diff(s) <= 1e-12).all()
    assert s.min() > 0 and s.max() <= 1 + 1e-12
    assert d.min() >= 0 and d.max() <= 1 + 1e-9


def test_survival_is_the_share_of_longer_gaps() -> None:
    tables = histogram([0.5] * 30 + [8.0] * 10).tables(0.85)
    s, _ = tables.lookup(np.array([0.1, 2.0, 100.0]))
    assert s[0] == pytest.approx(1.0, abs=1e-9)
    assert s[1] == pytest.approx(0.25, abs=0.02)
    assert 0 < s[2] < 0.02  # a tail is left for what was never seen


def test_a_hit_is_worth_more_the_nearer_the_end_of_the_wait() -> None:
    """All gaps are ten seconds, of a cycle of 20: theta is 0.15 / 20."""
    made = histogram([10.0] * 2000, cycle=20.0)
    theta = 0.15 / 20
    _, d = made.tables(0.85).lookup(np.array([0.0, 5.0, 8.0]))
    assert d == pytest.approx([math.exp(-theta * left) for left in (10.0, 5.0, 2.0)], abs=0.01)
    assert d[0] < d[1] < d[2]
    # and beyond every gap seen there is no end in sight: the longer the silence, the longer it will be
    _, late = made.tables(0.85).lookup(np.array([20.0, 100.0, 1000.0]))
    assert d[2] > late[0] > late[1] > late[2]
    # a smaller gamma discounts more, and the cycle can be given
    assert made.tables(0.5).discount[0] < made.tables(0.85).discount[0]
    assert made.tables(0.85, 2.0).discount[0] < made.tables(0.85).discount[0]


def test_without_a_gap_nothing_is_known_and_nothing_discounted() -> None:
    made = GapHistogram()
    assert made.quantile(0.95) == 0.0
    s, d = made.tables(0.85).lookup(np.array([0.0, 1.0, 1e9]))
    assert s.tolist() == d.tolist() == [1.0, 1.0, 1.0]


def test_odd_gaps_are_counted_in_the_outer_bins() -> None:
    made = histogram([-5.0, 0.0, 1e12, math.inf])
    assert (made.total, made.counts[0], made.counts[-1]) == (4.0, 2.0, 2.0)
    assert made.quantile(0.5) == EDGES[1] and made.quantile(1.0) == EDGES[-1]


def test_old_gaps_fade_so_that_the_law_may_drift() -> None:
    made = histogram([1.0] * 4096)
    assert made.total == 2048 and made.seen == 4096
    for _ in range(20_000):
        made.add(100.0)
    assert made.total <= 4096
    assert 100.0 < made.quantile(0.1) < 120.0


def test_the_cycle_follows_its_mean_and_ignores_what_took_no_time() -> None:
    made = GapHistogram()
    made.add_cycle(0.0)
    made.add_cycle(-3.0)
    assert made.cycle == 0.0
    for _ in range(400):
        made.add(1.0)
        made.add_cycle(4.0)
    assert made.cycle == pytest.approx(4.0)
    for _ in range(400):
        made.add(1.0)
        made.add_cycle(8.0)
    assert made.cycle == pytest.approx(8.0, abs=0.1)
