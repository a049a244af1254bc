"""CacheScout's worked example by hand: counts, P, R, edges, hops, survival, scores (eq. 2-9)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_policy.events import PrefixMatched, RequestArrived, RequestFinished, Tag, Tick
from radix_policy.prompts import SpanPrompt
from radix_policy.runtime import Runtime
from radix_policy.survival import bfs_hops, hop_survival
from radix_policy.transitions import TransitionCounts

P, T, H, C = range(4)  # planner, travel, hotel, critic


def example() -> TransitionCounts:
    """P->T P->T P->H T->P H->C C->P with epsilon 0."""
    counts = TransitionCounts()
    for i, j in [(P, T), (P, T), (P, H), (T, P), (H, C), (C, P)]:
        counts.add(i, j)
    return counts


def test_counts_and_probabilities_by_hand() -> None:
    counts = example()
    assert [counts.count(P, j) for j in range(4)] == [0, 2, 1, 0]
    assert counts.row(P) == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert counts.likeliest(P) == (T, pytest.approx(2 / 3))
    smooth = TransitionCounts(epsilon=0.5)
    for i, j in [(0, 1), (0, 1), (0, 2)]:
        smooth.add(i, j)
    assert smooth.row(0) == pytest.approx([0.5 / 4.5, 2.5 / 4.5, 1.5 / 4.5])
    assert smooth.row(2) == pytest.approx([1 / 3] * 3)  # never left: uniform
    assert smooth.row(9) == [0, 0, 0]


def test_predictability_by_hand() -> None:
    # next: T 2, H 1, P 2, C 1 of 6; given P (3 of 6): 2/3, 1/3; the other rows are certain
    h_next = 2 * (1 / 3) * math.log2(3) + 2 * (1 / 6) * math.log2(6)
    h_cond = 0.5 * (2 / 3 * math.log2(1.5) + 1 / 3 * math.log2(3))
    assert example().predictability() == pytest.approx(1 - h_cond / h_next)
    ring = TransitionCounts()
    for i in range(4):
        ring.add(i, (i + 1) % 4, 5)
    assert ring.predictability() == pytest.approx(1.0)
    assert TransitionCounts().predictability() == 0.0


def test_edges_hops_and_survival_by_hand() -> None:
    row = example().row
    assert bfs_hops(row, P, 4, tau=0.3, horizon=8) == [0, 1, 1, 2]
    assert bfs_hops(row, P, 4, tau=0.5, horizon=8) == [0, 1, 8, 8]  # P->H pruned: H and C out of reach
    assert bfs_hops(row, P, 4, tau=0.3, horizon=2) == [0, 1, 1, 2]
    assert bfs_hops(row, H, 4, tau=0.3, horizon=8) == [2, 3, 0, 1]
    assert bfs_hops(row, 99, 4, tau=0.3, horizon=8) == [8] * 4
    assert [hop_survival(e, 4) for e in (0, 1, 4, 9)] == [1, 0.75, 0, 0]


def test_cachescout_scores_by_hand() -> None:
    """Eq. 9 on three nodes after planner -> travel -> planner, the planner being current."""
    runtime = Runtime("cachescout", {"epsilon": 0, "tau": 0.3, "E_max": 4, "lambda": 0.01, "delta": 0.05})
    runtime.reset(0)
    for step, (rid, agent, node, length) in enumerate([("a", "P", 1, 100), ("b", "T", 2, 40), ("c", "P", 3, 10)]):
        runtime.observe(Tick(step * 100, step))
        runtime.observe(RequestArrived(rid, SpanPrompt(((node * 1000, length),)), tag=Tag(agent, "s")))
        runtime.observe(PrefixMatched(rid, [], 0))
        runtime.added(node, 0, length, 0, float(node), rid)
        runtime.observe(RequestFinished(rid))
    runtime.observe(Tick(250, 3.0))
    # travel is one hop from the current planner: survival 1 - 1/4; ages 250, 150, 50 steps
    assert runtime.score(1) == pytest.approx((1 + 0.05) * (math.exp(-2.5) + 0.05) * 100)
    assert runtime.score(2) == pytest.approx((0.75 + 0.05) * (math.exp(-1.5) + 0.05) * 40)
    assert runtime.score(3) == pytest.approx((1 + 0.05) * (math.exp(-0.5) + 0.05) * 10)
    with runtime.evicting() as drain:
        victim = drain.next()
    assert victim is not None and victim.id == 3  # 6.9 against 8.7: the short node goes though it is the freshest


def test_cachescout_counts_a_transition_only_when_the_agent_changes() -> None:
    """Algorithm 1, line 18: repeated touches by one agent are one dispatch."""
    runtime = Runtime("cachescout")
    runtime.reset(0)
    for i, agent in enumerate("AABBA"):
        runtime.observe(RequestArrived(str(i), SpanPrompt(((0, 5),)), tag=Tag(agent)))
        runtime.observe(PrefixMatched(str(i), [], 0))
    counts = runtime.policy.transitions  # type: ignore[attr-defined]
    assert counts.count(1, 1) == 0 and counts.count(1, 2) == 1 and counts.count(2, 1) == 1


def test_learner_state_is_within_the_papers_25_kb_at_24_agents() -> None:
    counts = TransitionCounts()
    for i in range(24):
        counts.add(i, (i * 7) % 24)
    assert counts.nbytes <= 25_000


moves = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60)


@given(moves, st.floats(0, 2), st.sampled_from([1.0, 0.98, 0.5]))
def test_rows_are_distributions(pairs: list, epsilon: float, decay: float) -> None:
    counts = TransitionCounts(epsilon, decay)
    for i, j in pairs:
        counts.add(i, j)
    for i in range(len(counts)):
        row = counts.row(i)
        assert all(0 <= p <= 1 for p in row)
        assert sum(row) == pytest.approx(1.0) or sum(row) == 0
    assert -1e-9 <= counts.predictability() <= 1 + 1e-9 or decay != 1.0


@given(moves)
def test_adding_and_taking_back_is_exact_without_decay(pairs: list) -> None:
    counts, twin = TransitionCounts(), TransitionCounts()
    for i, j in pairs:
        counts.add(i, j)
        counts.add(j, i)
        counts.add(j, i, -1)
        twin.add(i, j)
    assert [[counts.count(i, j) for j in range(6)] for i in range(6)] == [
        [twin.count(i, j) for j in range(6)] for i in range(6)
    ]
