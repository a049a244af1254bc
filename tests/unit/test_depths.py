"""Where anchors end and which ends of prompts are dead, as learned from calls."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.depths import AnchorDepths, DeadTails
from tests.unit.test_bounds import deep_size

# ---- AnchorDepths ----


def faded(seen: list[int]) -> dict[int, float]:
    """Counts that lose 10 % with each later sighting."""
    counts: Counter[int] = Counter()
    weights = dict.fromkeys(seen, 0.0)
    for back, depth in enumerate(reversed(seen)):
        weights[depth] += 0.9**back
        counts[depth] += 1
    return weights


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from((10, 20, 30, 40, 50)), min_size=1, max_size=60))
def test_the_depth_is_the_one_seen_most_of_late_and_needs_two_sightings(seen: list[int]) -> None:
    depths = AnchorDepths()
    for depth in seen:
        depths.parted(2, depth)
    weights = faded(seen)
    top = max(weights.values())
    if top > 1.5 + 1e-9:
        assert depths.of(2) in [d for d, w in weights.items() if w > top - 1e-9]
    elif top < 1.5 - 1e-9:
        assert depths.of(2) == 0
    assert depths.of(0) == depths.of(1) == 0, "of others nothing is known"


def test_one_sighting_is_not_enough_and_two_in_a_row_are() -> None:
    depths = AnchorDepths()
    assert (depths.of(0), depths.of(-1), depths.of(99)) == (0, 0, 0)
    depths.parted(0, 400)
    assert depths.of(0) == 0
    depths.parted(0, 400)
    assert depths.of(0) == 400


def test_the_deeper_one_wins_a_tie() -> None:
    for order in ((64, 900), (900, 64)):
        depths = AnchorDepths()
        for turn in range(40):
            depths.parted(0, order[turn % 2])
        # whichever came last is ahead by a tenth: no tie; so the two are as often seen, and the later one leads
        assert depths.of(0) == order[1]


def test_an_anchor_that_changes_is_learned_anew_and_the_odd_branch_says_nothing() -> None:
    depths = AnchorDepths()
    for turn in range(100):
        depths.parted(0, 500 if turn % 4 else 500 + turn)
        assert turn < 3 or depths.of(0) == 500
    calls = 0
    while depths.of(0) != 800:
        depths.parted(0, 800)
        calls += 1
    assert 4 <= calls <= 10


def test_a_depth_that_is_never_the_same_twice_is_never_believed_and_little_is_kept() -> None:
    depths = AnchorDepths()
    sizes = []
    for turn in range(3000):
        depths.parted(0, 1000 + turn)
        assert depths.of(0) == 0
        if turn % 1000 == 999:
            sizes.append(deep_size(depths))
    assert sizes[2] <= sizes[0] + 200 and sizes[2] < 3000


def test_the_usual_depth_survives_eight_others() -> None:
    depths = AnchorDepths()
    for _ in range(20):
        depths.parted(0, 300)
    for other in range(8):
        depths.parted(0, other)
    assert depths.of(0) == 300, "what was seen least goes first"


# ---- DeadTails ----


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 60), max_size=40))
def test_the_tail_is_the_lower_fifth_of_the_last_sixteen(seen: list[int]) -> None:
    tails = DeadTails()
    for tokens in seen:
        tails.saw(1, tokens)
    last = sorted(max(t, 0) for t in seen[-16:])
    expected = 0
    if len(last) >= 4:
        expected = next(t for i, t in enumerate(last) if i >= len(last) // 5)
        # at least four fifths of those calls left that much behind
        assert sum(t >= expected for t in last) >= 0.8 * len(last)
    assert tails.of(1) == (expected if expected >= 16 else 0)
    assert tails.of(0) == tails.of(2) == tails.of(-1) == 0


def test_a_closing_instruction_is_found_and_a_rare_rewrite_of_all_is_not() -> None:
    tails = DeadTails()
    for turn in range(40):
        tails.saw(0, 900 if turn % 5 == 0 else 48)
        tails.saw(1, 900 if turn % 5 == 0 else 0)
    assert (tails.of(0), tails.of(1)) == (48, 0)


@pytest.mark.parametrize(("least", "found"), [(16, 0), (15, 15), (1, 15)])
def test_fewer_than_the_least_count_as_none(least: int, found: int) -> None:
    tails = DeadTails(least)
    for _ in range(10):
        tails.saw(0, 15)
    assert tails.of(0) == found


def test_three_calls_say_nothing_and_a_tail_that_is_gone_is_unlearned() -> None:
    tails = DeadTails()
    for calls in range(1, 5):
        tails.saw(0, 100)
        assert tails.of(0) == (100 if calls >= 4 else 0)
    for _ in range(16):
        tails.saw(0, 0)
    assert tails.of(0) == 0
    before = deep_size(tails)
    for _ in range(5000):
        tails.saw(0, 7)
    assert deep_size(tails) <= before + 600
