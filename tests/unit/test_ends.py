"""The END hazard: rates by hand, censoring, taking an END back, and the buckets of turns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.ends import BUCKETS, EndMark, EndModel, Share, bucket
from radix_policy.transitions import TransitionCounts
from tests.unit.stage import Calls


def model(decay: float = 1.0) -> EndModel:
    return EndModel(TransitionCounts(decay=decay))


def rates(ends: EndModel, agents: int = 3) -> list[float]:
    return [
        *(ends.agent_rate(a) for a in range(agents)),
        *(odds_after(ends, entry, turns) for entry in range(agents) for turns in (1, 2, 3, 9)),
        *(ends.rate(a, (a + 1) % agents, turns, kind) for a in range(agents) for turns in (1, 9) for kind in (0, 1, 5)),
    ]


def odds_after(ends: EndModel, entry: int, turns: int) -> float:
    return float(ends.odds_of(entry, turns, 1)[0])


def odds(rate: float) -> float:
    return rate / (1 - rate)


def test_end_rates_by_hand() -> None:
    """Four sessions that open with agent 0: three go on to agent 1, where two of them end; one ends at once."""
    ends = model()
    for _ in range(3):
        ends.transitions.add(0, 1)
        ends.called_again(0, 0, 1)
    for _ in range(2):
        ends.end(1, 0, 2)
    ends.end(0, 0, 1)
    ends.refresh(agent_prior=2.0, turn_prior=3.0)
    e_0 = (1 + 300 * (1 + 2 * 0.5) / (4 + 2)) / (4 + 300)
    e_1 = (2 + 300 * (2 + 2 * 0.5) / (2 + 2)) / (2 + 300)
    assert (ends.agent_rate(0), ends.agent_rate(1)) == pytest.approx((e_0, e_1))
    mean = 0.5  # of the type: 3 ends in 6 trials, with a prior of the same
    first, second = (1 + 3 * 0.5) / (4 + 3), (2 + 3 * 0.5) / (2 + 3)  # of the buckets over all types
    e1 = (1 + 3 * (mean + first) / 2) / (4 + 3)
    e2 = (2 + 3 * (mean + second) / 2) / (2 + 3)
    assert odds_after(ends, 0, 1) == pytest.approx((1 - e1) / (1 - mean))
    assert odds_after(ends, 0, 2) == pytest.approx((1 - e2) / (1 - mean))
    joint = odds(e_1) * odds(e2) / odds(mean)
    assert ends.rate(1, 0, 2) == pytest.approx(joint / (1 + joint))
    assert ends.rate(1, -1, 2) == pytest.approx(e_1)
    assert (ends.counts(0, 1), ends.counts(0, 2), ends.counts(0, 3)) == ((1, 4), (2, 2), (0, 0))


def test_nothing_seen_means_no_end_and_even_odds() -> None:
    ends = model()
    ends.refresh()
    assert (ends.agent_rate(0), odds_after(ends, 0, 1), ends.rate(5, 5, 5)) == (0.0, 1.0, 0.0)
    ends.ensure(2)
    ends.refresh()
    assert (ends.agent_rate(1), odds_after(ends, 1, 7), ends.rate(1, 1, 1), ends.rate(-1, -1, 1)) == (
        0.0,
        1.0,
        0.0,
        0.0,
    )


def test_a_session_that_always_ends_at_turn_three_is_seen_to() -> None:
    ends = model()
    for _ in range(200):
        for turns in (1, 2):
            ends.transitions.add(0, 0)
            ends.called_again(0, 0, turns)
        ends.end(0, 0, 3)
    ends.refresh()
    assert max(ends.rate(0, 0, 1), ends.rate(0, 0, 2)) < 0.02 < 0.98 < ends.rate(0, 0, 3)
    assert ends.rate(0, -1, 1) == ends.rate(0, -1, 3) == pytest.approx(1 / 3, abs=0.01)


def test_an_agent_that_never_closes_a_session_does_not_at_any_turn() -> None:
    """Agent 0 selects, agent 1 speaks, and the third speech ends it all: turn 6 is dangerous, for speakers only."""
    ends = model()
    for _ in range(100):
        for turns in range(1, 6):
            ends.transitions.add(1 - turns % 2, turns % 2)
            ends.called_again(1 - turns % 2, 0, turns)
        ends.end(1, 0, 6)
    ends.refresh()
    assert ends.rate(1, 0, 6) > 0.95
    assert ends.rate(0, 0, 6) < 0.4 and ends.rate(0, 0, 5) < 0.001


# ---- censoring ----


def censored(truth: float, soft: bool, seed: int, calls: int = 6000) -> float:
    """The END rate learned from calls of all ages, most of them too young for their END to have been noticed.

    Gaps are exponential with mean 1; silence of three times their 95 % quantile is an END; no call is older than 1.2
    times that.
    """
    rng = np.random.default_rng(seed)
    limit = 3 * -np.log(0.05)
    ages = rng.random(calls) * 1.2 * limit
    over = rng.random(calls) < truth
    gaps = np.where(over, np.inf, rng.exponential(size=calls))
    ends, waiting = model(), []
    for age, gap in zip(ages.tolist(), gaps.tolist()):
        if gap < age:
            ends.transitions.add(0, 0)
            ends.called_again(0, 0, 1)
        elif age > limit:
            ends.end(0, 0, 1)
        else:
            waiting.append(age)
    survival = np.exp(-np.array(waiting))
    rate = 0.0
    ends.refresh()
    for _ in range(40 if soft else 1):
        rate = max(ends.rate(0, 0, 1), 1e-3)
        dead = rate / ((1 - rate) * survival + rate)
        shares = (dead * (1 - survival)).tolist()
        ends.refresh([Share(0, 0, 1, w) for w in shares] if soft else [])
    return ends.rate(0, 0, 1)


@pytest.mark.parametrize("truth", [0.05, 0.3, 0.6])
def test_the_end_rate_is_unbiased_under_censoring_and_biased_without_the_shares(truth: float) -> None:
    soft = [censored(truth, True, seed) for seed in range(4)]
    hard = [censored(truth, False, seed) for seed in range(4)]
    sigma = (truth * (1 - truth) / (4 * 6000)) ** 0.5
    assert np.mean(soft) == pytest.approx(truth, abs=4 * sigma + 0.004)
    assert np.mean(hard) < 0.6 * truth


def test_shares_are_gone_once_every_session_is_resolved() -> None:
    once, never = model(), model()
    for ends in (once, never):
        ends.transitions.add(0, 1)
        ends.called_again(0, 0, 1)
        ends.end(1, 0, 2)
    once.refresh([Share(1, 0, 2, 0.5), Share(1, 1, 1, 1.0, 5)])
    never.refresh([])
    assert rates(once) != rates(never)
    assert once.counts(0, 2) == never.counts(0, 2)
    once.refresh([])
    assert rates(once) == rates(never)


# ---- taking back ----

steps = st.lists(
    st.tuples(st.sampled_from(("call", "end", "undone")), st.integers(0, 2), st.integers(1, 60)), max_size=60
)


@settings(max_examples=100, deadline=None)
@given(steps, st.sampled_from((1.0, 0.98, 0.5)), st.randoms(use_true_random=False))
def test_an_end_taken_back_leaves_everything_as_if_it_had_never_been(moves, decay, random) -> None:  # type: ignore[no-untyped-def]
    ends, twin = model(decay), model(decay)
    for each in (ends, twin):
        each.ensure(3)
    open_marks: list[EndMark] = []
    for move, agent, turns in moves:
        entry = (agent + turns) % 3
        if move == "undone":
            open_marks.append(ends.end(agent, entry, turns, turns % 12))
        for each in (ends, twin):
            if move == "call":
                each.transitions.add(agent, entry)
                each.called_again(agent, entry, turns, turns % 12)
            elif move == "end":
                each.end(agent, entry, turns, turns % 12)
        if open_marks and random.random() < 0.3:
            ends.undo(open_marks.pop(random.randrange(len(open_marks))))
    while open_marks:
        ends.undo(open_marks.pop())
    for agent in range(3):
        assert ends.transitions.ends(agent) == pytest.approx(twin.transitions.ends(agent), abs=1e-9)
        assert ends.transitions.ends(agent) >= 0
        assert ends.transitions.counts(agent) == twin.transitions.counts(agent)
        for turns in range(1, 70):
            assert ends.counts(agent, turns) == twin.counts(agent, turns)
            assert 0 <= ends.counts(agent, turns)[0] <= ends.counts(agent, turns)[1]
    ends.refresh()
    twin.refresh()
    assert rates(ends) == pytest.approx(rates(twin), abs=1e-9)
    assert all(0 <= ends.rate(a, b, n) <= 0.999 for a in range(3) for b in range(3) for n in (1, 5, 50))


def test_an_end_is_taken_back_at_what_it_is_worth_by_then() -> None:
    """Also when the row was rescaled in between: 500 halvings are far beyond what a double's exponent should reach."""
    for halvings in (1, 3, 500):
        ends = model(0.5)
        early = ends.end(0, 0, 1)
        for _ in range(halvings):
            ends.transitions.add(0, 0)
        assert ends.transitions.ends(0) == pytest.approx(0.5**halvings)
        late = ends.end(0, 0, 1)
        assert ends.transitions.ends(0) == pytest.approx(1.0 + 0.5**halvings)
        ends.undo(early)
        assert ends.transitions.ends(0) == pytest.approx(1.0)
        ends.undo(late)
        assert ends.transitions.ends(0) == 0.0
        assert ends.counts(0, 1) == (0.0, 0.0)


def test_an_id_that_goes_to_another_agent_takes_no_counts_along() -> None:
    ends = model()
    marks = [ends.end(1, 1, 1, 5) for _ in range(20)]
    ends.end(2, 2, 1, 5)
    ends.forget(1)
    ends.forget(99)
    assert ends.counts(1, 1) == (0.0, 0.0) and ends.lengths.sums(1) == (0.0, 0.0)
    assert ends.counts(2, 1) == (1.0, 1.0) and ends.lengths.sums(2) == (1.0, 1.0)
    for mark in marks:
        ends.undo(mark)
    assert ends.counts(1, 1) == (0.0, 0.0) and ends.lengths.sums(1) == (0.0, 0.0), "nothing is taken back twice"


def test_the_runtime_forgets_what_an_agent_did_whose_id_is_handed_on() -> None:
    stage = Calls(max_agents=2)
    stage.call("s1", "x", output=5)
    stage.close("s1")
    agents = stage.world.identifier.agents
    agent = agents.find("", "tag:x")
    assert stage.world.ends.lengths.sums(agent) == (1.0, 1.0)
    agents.handed_on.append(agent)  # as `intern` does for a learned agent that was released
    stage.call("s2", "x", output=5)
    assert stage.world.ends.lengths.sums(agent) == (0.0, 0.0) and not agents.handed_on


# ---- buckets ----


def test_turns_have_a_bucket_each_up_to_seven_and_then_share_one_by_fours() -> None:
    assert [bucket(n) for n in range(1, 8)] == [0, 1, 2, 3, 4, 5, 6]
    assert [bucket(n) for n in range(8, 17)] == [7] * 4 + [8] * 4 + [9]
    numbers = [bucket(n) for n in range(1, 1000)]
    assert numbers == sorted(numbers) and set(numbers) == set(range(BUCKETS))
    assert bucket(10**9) == BUCKETS - 1
