"""END by the length of an output: by hand, where it tells and where it does not."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.ends import EndModel, Share
from radix_policy.lengths import KINDS, LengthEvidence, length_kind
from radix_policy.transitions import TransitionCounts
from tests.unit.stage import Calls


def test_kinds_are_powers_of_two_and_bounded() -> None:
    assert [length_kind(n) for n in (1, 2, 3, 4, 1023, 1024, 10**9)] == [1, 2, 2, 3, 10, 11, 11]
    assert length_kind(0) == length_kind(-5) == 0
    assert max(length_kind(n) for n in range(5000)) == KINDS - 1


def test_by_hand() -> None:
    lengths = LengthEvidence()
    lengths.ensure(1)
    for _ in range(8):
        lengths.called_again(0, 3)
    for _ in range(2):
        lengths.end(0, 7)
    lengths.refresh({})
    short, long = (0 + 6 * 0.2) / (8 + 6), (2 + 6 * 0.2) / (2 + 6)  # of ten calls two were the last
    ratio = {3: short / (1 - short) * 4, 7: long / (1 - long) * 4}  # the odds of 0.2 are 1 to 4
    evidence = -1 + 8 * math.log((1 - 1.2 / 13) / 0.8) + 2 * math.log((1 + 1.2) / 7 / 0.2)
    w = 1 / (1 + math.exp(-evidence))
    assert lengths.weight == pytest.approx(w)
    for kind, r in ratio.items():
        assert lengths.factor(0, kind) == pytest.approx(1 + w * (r - 1))
    assert lengths.factor(0, 5) == lengths.factor(0, 0) == lengths.factor(3, 7) == lengths.factor(-1, 7) == 1


def talk(length_of_last: int, spread: int, sessions: int = 120, seed: int = 1, drift: float = 0.1) -> EndModel:
    """Sessions of one agent: a tenth (later `drift`) of its calls are last ones. Answers: 64 - spread to 64 tokens."""
    random, ends = Random(seed), EndModel(TransitionCounts(decay=0.98))
    for number in range(sessions):
        turns = 1
        while random.random() >= (0.1 if number < sessions // 2 else drift):
            ends.transitions.add(0, 0)
            ends.called_again(0, 0, turns, length_kind(random.randint(64 - spread, 64)))
            turns += 1
        ends.end(0, 0, turns, length_kind(random.randint(length_of_last - spread, length_of_last)))
        ends.refresh()
    return ends


def test_a_closing_answer_of_another_length_is_known_for_one() -> None:
    ends = talk(length_of_last=400, spread=0)
    assert ends.lengths.weight > 0.99
    assert ends.rate(0, -1, 1, length_kind(400)) > 0.8
    assert ends.rate(0, -1, 1, length_kind(64)) < 0.02
    assert ends.rate(0, -1, 1) == pytest.approx(0.1, abs=0.06)


@pytest.mark.parametrize("spread", [0, 60])
@pytest.mark.parametrize("drift", [0.1, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_that_tell_nothing_change_next_to_nothing(seed: int, drift: float, spread: int) -> None:
    """Also where sessions now end more often than they did: the agent's own rate forgets, the table does not."""
    ends = talk(length_of_last=64, spread=spread, seed=seed, sessions=600, drift=drift)
    plain = ends.rate(0, -1, 1)
    for kind in range(4, 8):
        assert ends.rate(0, -1, 1, kind) == pytest.approx(plain, abs=0.1)


def test_only_the_latest_call_of_a_session_says_how_long_its_answer_was() -> None:
    stage = Calls()
    older, latest = stage.arrive("s", "x"), stage.arrive("s", "y")
    stage.finish(older, 900)
    assert stage.session("s").length_kind == 0, "the latest still runs"
    stage.finish(latest, 3)
    assert stage.session("s").length_kind == length_kind(3)
    older, latest = stage.arrive("s", "x"), stage.arrive("s", "y")
    stage.finish(latest, 3)
    stage.finish(older, 900)
    assert stage.session("s").length_kind == length_kind(3)


def test_undecided_ends_count_as_shares_of_their_length() -> None:
    ends = talk(length_of_last=64, spread=0, sessions=20)
    before = ends.lengths.factor(0, length_kind(400))
    ends.refresh([Share(0, 0, 1, 0.9, length_kind(400))] * 10)
    assert ends.lengths.factor(0, length_kind(400)) > 2 > before == 1.0
    ends.refresh()
    assert ends.lengths.factor(0, length_kind(400)) == before


calls = st.lists(st.tuples(st.integers(0, 2), st.integers(0, KINDS - 1), st.booleans()), max_size=60)


@settings(max_examples=80, deadline=None)
@given(calls)
def test_factors_are_finite_and_the_weight_is_one(calls) -> None:  # type: ignore[no-untyped-def]
    lengths = LengthEvidence()
    lengths.ensure(3)
    for agent, kind, over in calls:
        (lengths.end if over else lengths.called_again)(agent, kind)
    lengths.refresh({})
    assert 0 <= lengths.weight <= 1
    for agent in range(3):
        for kind in range(KINDS):
            assert 0 < lengths.factor(agent, kind) < math.inf
