"""First passage: the tables that scout looks ahead with, against enumeration, simulation and chains solved by hand."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from radix_policy.survival import first_passage

Matrix = NDArray[np.float64]


@st.composite
def chains(draw: st.DrawFn, most: int = 3) -> Matrix:
    """Rows that sum to at most 1; some are certain, some end at once, some are empty."""
    agents = draw(st.integers(1, most))
    rows = []
    for _ in range(agents):
        weights = draw(st.lists(st.integers(0, 4), min_size=agents + 1, max_size=agents + 1))
        rows.append([w / max(sum(weights), 1) for w in weights[:agents]])
    return np.array(rows)


def enumerated(p: Matrix, steps: int) -> Matrix:
    """The definition: the probability of every path of k steps, added up where j is reached by its last step only."""
    agents = len(p)
    h = np.zeros((steps, agents, agents))
    for start in range(agents):
        for k in range(1, steps + 1):
            for path in product(range(agents), repeat=k):
                if path[-1] in path[:-1]:
                    continue
                chance, at = 1.0, start
                for step in path:
                    chance *= p[at, step]
                    at = step
                h[k - 1, start, path[-1]] += chance
    return h


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(1, 5))
def test_first_passage_is_the_sum_over_all_paths(p: Matrix, steps: int) -> None:
    assert first_passage(p, steps) == pytest.approx(enumerated(p, steps), abs=1e-6)


def enumerated_over(p: Matrix, agent_of: list[int], steps: int) -> Matrix:
    """The same where a state is more than an agent: j is reached when the last state, and none before, is j's."""
    states, agents = len(p), max(agent_of) + 1
    h = np.zeros((steps, states, agents))
    for start in range(states):
        for k in range(1, steps + 1):
            for path in product(range(states), repeat=k):
                if agent_of[path[-1]] in [agent_of[state] for state in path[:-1]]:
                    continue
                chance, at = 1.0, start
                for step in path:
                    chance *= p[at, step]
                    at = step
                h[k - 1, start, agent_of[path[-1]]] += chance
    return h


@settings(max_examples=40, deadline=None)
@given(chains(), st.data())
def test_first_passage_where_agents_have_several_states(p: Matrix, data: st.DataObject) -> None:
    extra = data.draw(st.lists(st.integers(0, len(p) - 1), max_size=len(p) - 1))
    kept = len(p) - len(extra)
    agent_of = [*range(kept), *(a % kept for a in extra)]
    assert first_passage(p, 4, agent_of) == pytest.approx(enumerated_over(p, agent_of, 4), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(chains(), st.integers(0, 2), st.integers(1, 12))
def test_a_state_that_is_like_its_agent_changes_nothing(p: Matrix, twin: int, steps: int) -> None:
    n, twin = len(p), twin % len(p)
    wide = np.zeros((n + 1, n + 1))
    wide[:n, :n], wide[n, :n] = p, p[twin]
    wide[:, n] = wide[:, twin] / 2  # half of the visits of the agent are to its twin state
    wide[:, twin] /= 2
    h = first_passage(wide, steps, [*range(n), twin])
    assert h[:, :n] == pytest.approx(first_passage(p, steps), abs=1e-6)
    assert h[:, n] == pytest.approx(h[:, twin])


@settings(max_examples=60, deadline=None)
@given(chains(most=6), st.integers(1, 64))
def test_an_agent_is_reached_for_the_first_time_at_most_once(p: Matrix, steps: int) -> None:
    h = first_passage(p, steps)
    assert h.shape == (steps, len(p), len(p))
    assert np.isfinite(h).all() and h.min() >= 0
    assert h.sum(axis=0, dtype=np.float64).max() <= 1 + 1e-5


def test_first_passage_agrees_with_simulated_walks() -> None:
    rng = np.random.default_rng(5)
    p = rng.dirichlet(np.ones(5) / 2, size=4)[:, :4]  # the fifth share is END
    steps, walks = 6, 200_000
    h = first_passage(p, steps)
    edges = np.cumsum(np.vstack([p, np.zeros(4)]), axis=1)  # state 4 is END and is never left
    for start in range(4):
        at = np.full(walks, start)
        seen = np.zeros((walks, 5), dtype=bool)
        for k in range(steps):
            at = (rng.random(walks)[:, None] >= edges[at]).sum(axis=1)
            fresh = ~seen[np.arange(walks), at]
            seen[np.arange(walks), at] = True
            for target in range(4):
                share = float((fresh & (at == target)).mean())
                expected = float(h[k, start, target])
                assert share == pytest.approx(expected, abs=5 * np.sqrt(expected / walks) + 2e-5)


def test_in_a_cycle_agents_are_ordered_by_the_steps_to_their_next_visit() -> None:
    agents, gamma = 5, 0.85
    cycle = np.zeros((agents, agents))
    cycle[np.arange(agents), (np.arange(agents) + 1) % agents] = 1.0
    worth = np.add.reduce(gamma ** np.arange(8)[:, None, None] * first_passage(cycle, 8))
    for here in range(agents):
        distance = [(j - here - 1) % agents + 1 for j in range(agents)]  # itself is a whole round away
        assert worth[here] == pytest.approx([gamma ** (d - 1) for d in distance])
        assert sorted(range(agents), key=lambda j: -worth[here, j]) == sorted(range(agents), key=distance.__getitem__)


def test_an_end_before_every_step_scales_step_k_by_its_kth_power() -> None:
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(4), size=4)
    whole, cut = first_passage(p, 10), first_passage(0.7 * p, 10)
    assert cut == pytest.approx(whole * 0.7 ** np.arange(1, 11)[:, None, None], abs=1e-6)
    # without END every agent of an irreducible chain is reached in the end, with it not always
    assert first_passage(p, 256).sum(axis=0) == pytest.approx(np.ones((4, 4)), abs=1e-4)
    assert first_passage(0.7 * p, 256).sum(axis=0).max() < 0.75


def test_what_cannot_be_reached_has_no_first_passage() -> None:
    h = first_passage(np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]), 12)
    assert h[0, 0].tolist() == [0, 1, 0] and not h[1:, 0].any()
    assert not h[:, 1].any()
    assert h[:, 2, 1] == pytest.approx([0.5, 0.5] + [0.0] * 10)  # directly, or by way of 0
    assert first_passage(np.zeros((0, 0)), 3).shape == (3, 0, 0)
