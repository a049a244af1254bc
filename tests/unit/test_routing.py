"""The mixture of predictors: probabilities whatever comes, against a naive twin, and who wins on which process."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.routing import FAST, FLAT, PAIR, SLOW, STATES, TRIPLE, Context, Router
from radix_policy.transitions import TransitionCounts

AGENTS = 4
PER_STATE = 6
walks = st.lists(st.integers(0, AGENTS - 1), max_size=80)


class Walker:
    """One session that calls agents, as scout tells the router of it; the tables are rebuilt every `every` calls."""

    def __init__(self, every: int = 1, agents: int = AGENTS) -> None:
        self.chain = TransitionCounts(decay=0.98)
        self.router = Router(self.chain)
        self.agents = agents
        self.every = every
        self.past = (-1, -1, -1)
        self.calls = 0

    def call(self, agent: int) -> None:
        *trail, source = self.past
        if source >= 0:
            self.router.observe((trail[0], trail[1]), source, agent)
            self.chain.add(source, agent)
        self.past = (trail[1], source, agent)
        self.calls += 1
        if self.calls % self.every == 0:
            self.router.matrix(self.agents)

    def walk(self, path: list[int]) -> "Walker":
        for agent in path:
            self.call(agent)
        return self


class Naive:
    """The docstring, transition by transition, with dicts."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, int, int]] = []  # older, before, source, target

    def counts(self, fade: float) -> np.ndarray:
        """Each count fades with every later transition of its row."""
        n = np.zeros((AGENTS, AGENTS))
        for *_, source, target in self.log:
            n[source] *= fade
            n[source, target] += 1
        return n

    def shares(self) -> np.ndarray:
        """pi: shares of agents, but an agent follows itself as often as agents do; always where no other was called."""
        n = self.counts(0.998)
        pi = np.zeros((AGENTS, AGENTS))
        if n.sum() == 0:
            return pi
        own = (np.trace(n) + 1 / AGENTS) / (n.sum() + 1)
        for i in range(AGENTS):
            others = {j: n[:, j].sum() for j in range(AGENTS) if j != i and n[:, j].any()}
            pi[i, i] = own if others else 1.0
            for j, count in others.items():
                pi[i, j] = (1 - own) * count / sum(others.values())
        return pi

    def predictors(self) -> list[np.ndarray]:
        """fast, slow and flat."""
        fast, slow, pi = self.counts(0.98), self.counts(0.998), self.shares()
        return [(n + b * pi) / (n.sum(axis=1, keepdims=True) + b) for n, b in ((fast, 0.5), (slow, 0.5), (slow, 20.0))]

    def after(self, *context: int) -> dict[int, float]:
        """Counts of what followed these agents."""
        row: dict[int, float] = {}
        for *trail, j in self.log:
            if tuple(trail[-len(context) :]) == context and min(context) >= 0:
                row = {k: 0.99 * n for k, n in row.items()}
                row[j] = row.get(j, 0.0) + 1.0
        return row


def mixed(row: dict[int, float], base: np.ndarray) -> np.ndarray:
    own = np.array([row.get(j, 0.0) for j in range(len(base))])
    return (own + 3 * base) / (own.sum() + 3)


@settings(max_examples=40, deadline=None)
@given(walks)
def test_the_tables_are_those_of_a_naive_twin(path: list[int]) -> None:
    walker, naive = Walker(), Naive()
    walker.router.matrix(AGENTS)
    scores, known = [0.0, 0.0, -1.0, -1.0, -2.0], np.zeros((AGENTS, AGENTS))
    past = (-1, -1, -1)
    for agent in path:
        older, before, source = past
        if source >= 0:
            # what each would have said; pi is that of the last rebuild
            fast, slow = naive.counts(0.98)[source], naive.counts(0.998)[source]
            share = known[source, agent]
            said = [
                (fast[agent] + 0.5 * share) / (fast.sum() + 0.5),
                (slow[agent] + 0.5 * share) / (slow.sum() + 0.5),
                (slow[agent] + 20 * share) / (slow.sum() + 20),
            ]
            for row in (naive.after(before, source), naive.after(older, before, source)):
                base = said[0] if len(said) == 3 else said[3]
                said.append((row.get(agent, 0.0) + 3 * base) / (sum(row.values()) + 3))
            scores = [0.99 * s + math.log(max(p, 1e-4)) for s, p in zip(scores, said, strict=True)]
            naive.log.append((older, before, source, agent))
        walker.call(agent)
        past = (before, source, agent)
        known = naive.shares()
    p = walker.router.matrix(AGENTS)
    assert walker.router.scores == pytest.approx(scores)
    raw = np.exp(np.array(scores) - max(scores))
    weights = raw[:3] / raw[:3].sum()
    assert walker.router.weights(contexts=False) == pytest.approx([*weights, 0.0, 0.0])
    assert walker.router.weights(contexts=True) == pytest.approx(raw / raw.sum())
    assert p == pytest.approx(sum(w * q for w, q in zip(weights, naive.predictors(), strict=True)))
    _, _, _, w_pair, w_triple = raw / raw.sum()
    for older in range(-1, AGENTS):
        for before in range(AGENTS):
            for source in range(AGENTS):
                base = p[source]
                pair = mixed(naive.after(before, source), base)
                triple = mixed(naive.after(older, before, source), pair) if older >= 0 else pair
                expected = (1 - w_pair - w_triple) * base + w_pair * pair + w_triple * triple
                context = (older, before, source) if older >= 0 else (before, source)
                assert walker.router.row_of(context, base) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(walks, st.integers(1, 9), st.integers(AGENTS, AGENTS + 3))
def test_weights_sum_to_one_and_rows_are_probabilities(path: list[int], every: int, agents: int) -> None:
    walker = Walker(every, agents).walk(path)
    router = walker.router
    p = router.matrix(agents)
    assert p.shape == (agents, agents) and np.isfinite(p).all() and (p >= 0).all()
    # Agents that were never left are given the shares of all, so every row is whole once anything moved.
    whole = 1.0 if len(path) > 1 else 0.0
    assert p.sum(axis=1) == pytest.approx(np.full(agents, whole))
    for contexts in (False, True):
        weights = router.weights(contexts=contexts)
        assert sum(weights) == pytest.approx(1.0) and min(weights) >= 0
        assert contexts or weights[PAIR] == weights[TRIPLE] == 0
    for context in router.contexts(agents):
        assert set(context) <= set(path)
        row = router.row_of(context, p[context[-1]])
        assert (row >= 0).all() and row.sum() == pytest.approx(whole)


def test_an_unseen_agent_follows_itself_as_often_as_agents_do_overall() -> None:
    stays = Walker(agents=5).walk([n // 10 % 4 for n in range(400)])
    leaves = Walker(agents=5).walk([n % 4 for n in range(400)])
    assert stays.router.matrix(5)[4, 4] == pytest.approx(0.9, abs=0.02)
    assert leaves.router.matrix(5)[4, 4] < 0.01


def test_where_one_agent_alone_was_ever_called_it_follows_itself() -> None:
    walker = Walker(agents=3).walk([1] * 5)
    p = walker.router.matrix(3)
    assert p[1] == pytest.approx([0.0, 1.0, 0.0])
    assert p.sum(axis=1) == pytest.approx(np.ones(3))
    assert p[0, 0] == p[2, 2] > 0 and p[0, 1] == p[2, 1] > 0


# ---- who wins ----


def best(walker: Walker, contexts: bool = True) -> int:
    return int(np.argmax(walker.router.weights(contexts=contexts)))


def test_a_speaker_that_depends_on_the_two_before_is_the_pairs_to_tell() -> None:
    """0 asks 1 and 2 by turns, and they answer 3 and 0: only who came before tells what is next."""
    random, path = Random(1), [0]
    for _ in range(300):
        who = random.choice((1, 2))
        path += [who, 0, 3 - who + 2, 0]  # after (1, 0) comes 4, after (2, 0) comes 3
    walker = Walker(every=8, agents=5).walk(path)
    p, router = walker.router.matrix(5), walker.router
    assert sum(router.weights(contexts=True)[PAIR:]) > 0.95
    assert router.row_of((1, 0), p[0])[4] > 0.85 and router.row_of((2, 0), p[0])[3] > 0.85
    assert p[0, 4] < 0.5
    assert {(1, 0), (2, 0), (3, 0), (4, 0)} <= set(router.contexts(5))


def test_a_pattern_of_three_is_the_triples_to_tell() -> None:
    """0 is called twice, then by turns 1 and 2: the agent before the two tells whose turn it is."""
    path = [0, 0, 1, 0, 0, 2] * 60
    walker = Walker(every=8, agents=3).walk(path)
    p, router = walker.router.matrix(3), walker.router
    assert sum(router.weights(contexts=True)[PAIR:]) > 0.95 and best(walker) == TRIPLE
    assert router.row_of((2, 0, 0), p[0])[1] > 0.9
    assert (2, 0, 0) in router.contexts(3)
    random = Random(2)
    noise = Walker(every=8, agents=8).walk([random.randrange(8) for _ in range(600)])
    assert noise.router.contexts(8) == []


def test_a_pipeline_that_changes_is_the_short_memory_s_to_tell() -> None:
    path = []
    for phase in range(6):
        step = 1 + phase % 3
        at = 0
        for _ in range(300):
            path.append(at)
            at = (at + step) % 4
    walker = Walker(every=8).walk(path[:-250])  # soon after a change
    fast, slow, flat, *_ = walker.router.weights(contexts=False)
    assert fast > 0.9 > slow + flat


def test_random_routing_is_the_smooth_one_s_to_tell() -> None:
    random = Random(3)
    walker = Walker(every=8, agents=12).walk([random.randrange(12) for _ in range(1200)])
    assert best(walker) == FLAT
    weights = walker.router.weights(contexts=True)
    assert weights[FLAT] > 0.8 and weights[PAIR] < 0.05 and weights[FAST] < weights[SLOW] + 0.05


def test_a_mixture_forgets_who_was_right_long_ago() -> None:
    random = Random(4)
    walker = Walker(every=8, agents=12).walk([random.randrange(12) for _ in range(1200)])
    assert best(walker) == FLAT
    walker.walk([n % 12 for n in range(1200)])
    assert best(walker, contexts=False) != FLAT


# ---- bounds ----


def test_contexts_are_bounded_and_the_one_not_seen_for_longest_goes_first() -> None:
    agents = 20
    router = Router(TransitionCounts(decay=0.98))
    router.matrix(agents)
    assert router.room == STATES - agents
    most = PER_STATE * router.room
    pairs = [(i, j) for i in range(agents) for j in range(agents)][: most + 10]

    def known() -> set[Context]:
        base = np.full(agents, 1 / agents)
        router.scores = [-50.0, -50.0, -50.0, 0.0, -50.0]  # all weight on the pairs
        router.matrix(agents)
        return {pair for pair in pairs if not np.array_equal(router.row_of(pair, base), base)}

    for number, pair in enumerate(pairs):
        router.observe((-1, pair[0]), pair[1], 1)
        router.observe((-1, pairs[0][0]), pairs[0][1], 1)  # seen all the time
        if number == most - 2:
            router.observe((-1, pairs[1][0]), pairs[1][1], 1)  # seen again
    found = known()
    assert len(found) == most and {pairs[0], pairs[1], pairs[-1]} <= found
    assert pairs[2] not in found and pairs[10] not in found
    assert len(router.contexts(agents)) == router.room and pairs[0] in router.contexts(agents)


def test_with_as_many_agents_as_states_no_context_is_counted() -> None:
    walker = Walker(agents=STATES - 1).walk([0, 1, 0, 2] * 50)
    assert 1 <= len(walker.router.contexts(STATES - 1)) <= 1
    walker.agents = STATES
    walker.walk([0, 1, 0, 2] * 10)
    assert walker.router.room == 0 and walker.router.contexts(STATES) == []


def test_what_is_kept_is_bounded_and_scores_stay_finite() -> None:
    walker, random = Walker(every=50, agents=6), Random(5)
    sizes = []
    for _ in range(3):
        walker.walk([random.randrange(6) for _ in range(2000)])
        sizes.append(walker.router.nbytes)
    assert sizes[2] <= 1.02 * sizes[1]
    assert len(walker.router._counts) == PER_STATE * (STATES - 6)
    assert all(100 * math.log(1e-4) - 1 <= s <= 0 for s in walker.router.scores)


def test_no_smoothing_at_all_divides_nothing_by_zero() -> None:
    router = Router(TransitionCounts(decay=0.98), light=0.0)
    trails = (((-1, -1), 0, 1), ((-1, 0), 1, 2), ((0, 1), 2, 0), ((1, 2), 0, 1))
    for trail, source, target in trails:
        router.matrix(4)
        router.observe(trail, source, target)
        router.chain.add(source, target)
    assert np.isfinite(router.matrix(4)).all() and all(math.isfinite(s) for s in router.scores)
