"""The mixture of predictors: probabilities whatever comes, against a naive twin, and who wins on which process."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.routing import FAST, FLAT, PAIR, SLOW, Router
from radix_policy.transitions import TransitionCounts

AGENTS = 4
PAIRS = 512
walks = st.lists(st.integers(0, AGENTS - 1), max_size=80)


class Walker:
    """One session that calls agents, as scout tells the router of it; the tables are rebuilt every `every` calls."""

    def __init__(self, every: int = 1, agents: int = AGENTS) -> None:
        self.chain = TransitionCounts(decay=0.98)
        self.router = Router(self.chain)
        self.agents = agents
        self.every = every
        self.past = [-1, -1]
        self.calls = 0

    def call(self, agent: int) -> None:
        before, source = self.past
        if source >= 0:
            self.router.observe(before, source, agent)
            self.chain.add(source, agent)
        self.past = [source, agent]
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
        self.log: list[tuple[int, int, int]] = []  # before, source, target

    def counts(self, fade: float) -> np.ndarray:
        """Each count fades with every later transition of its row."""
        n = np.zeros((AGENTS, AGENTS))
        for _, source, target in self.log:
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

    def pair(self, before: int, source: int) -> dict[int, float]:
        row: dict[int, float] = {}
        for h, i, j in self.log:
            if (h, i) == (before, source) and h >= 0:
                row = {k: 0.98 * n for k, n in row.items()}
                row[j] = row.get(j, 0.0) + 1.0
        return row


@settings(max_examples=40, deadline=None)
@given(walks)
def test_the_tables_are_those_of_a_naive_twin(path: list[int]) -> None:
    walker, naive = Walker(), Naive()
    walker.router.matrix(AGENTS)
    scores, known = [0.0, 0.0, -1.0, -1.0], np.zeros((AGENTS, AGENTS))
    past = [-1, -1]
    for agent in path:
        before, source = past
        if source >= 0:
            # what each would have said; pi is that of the last rebuild
            fast, slow = naive.counts(0.98)[source], naive.counts(0.998)[source]
            share = known[source, agent]
            said = [
                (fast[agent] + 0.5 * share) / (fast.sum() + 0.5),
                (slow[agent] + 0.5 * share) / (slow.sum() + 0.5),
                (slow[agent] + 20 * share) / (slow.sum() + 20),
            ]
            row = naive.pair(before, source)
            said.append((row.get(agent, 0.0) + 3 * said[0]) / (sum(row.values()) + 3))
            scores = [0.99 * s + math.log(max(p, 1e-4)) for s, p in zip(scores, said, strict=True)]
            naive.log.append((before, source, agent))
        walker.call(agent)
        past = [source, agent]
        known = naive.shares()
    p = walker.router.matrix(AGENTS)
    assert walker.router.scores == pytest.approx(scores)
    raw = np.exp(np.array(scores) - max(scores))
    weights = raw[:3] / raw[:3].sum()
    assert walker.router.weights(pairs=False) == pytest.approx([*weights, 0.0])
    assert walker.router.weights(pairs=True) == pytest.approx(raw / raw.sum())
    assert p == pytest.approx(sum(w * q for w, q in zip(weights, naive.predictors(), strict=True)))
    for before in range(AGENTS):
        for source in range(AGENTS):
            row = naive.pair(before, source)
            expected = p[source]
            if row:
                own = 3 * p[source] + np.array([row.get(j, 0.0) for j in range(AGENTS)])
                w = raw[PAIR] / raw.sum()
                expected = (1 - w) * p[source] + w * own / (sum(row.values()) + 3)
            assert walker.router.pair_row(before, source, p[source]) == pytest.approx(expected)


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
    for pairs in (False, True):
        weights = router.weights(pairs=pairs)
        assert sum(weights) == pytest.approx(1.0) and min(weights) >= 0
        assert pairs or weights[PAIR] == 0
    for before in range(-1, agents):
        for source in range(agents):
            row = router.pair_row(before, source, p[source])
            assert (row >= 0).all() and row.sum() == pytest.approx(whole)
    assert (router.pair_row(-1, 0, p[0]) == p[0]).all()


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


def best(walker: Walker, pairs: bool = True) -> int:
    return int(np.argmax(walker.router.weights(pairs=pairs)))


def test_a_speaker_that_depends_on_the_two_before_is_the_pairs_to_tell() -> None:
    """0 asks 1 and 2 by turns, and they answer 3 and 0: only who came before tells what is next."""
    random, path = Random(1), [0]
    for _ in range(300):
        who = random.choice((1, 2))
        path += [who, 0, 3 - who + 2, 0]  # after (1, 0) comes 4, after (2, 0) comes 3
    walker = Walker(every=8, agents=5).walk(path)
    assert best(walker) == PAIR and walker.router.pair_weight > 0.95
    p = walker.router.matrix(5)
    assert walker.router.pair_row(1, 0, p[0])[4] > 0.9 and walker.router.pair_row(2, 0, p[0])[3] > 0.9
    assert p[0, 4] < 0.5


def test_a_pipeline_that_changes_is_the_short_memory_s_to_tell() -> None:
    path = []
    for phase in range(6):
        step = 1 + phase % 3
        at = 0
        for _ in range(300):
            path.append(at)
            at = (at + step) % 4
    walker = Walker(every=8).walk(path[:-250])  # soon after a change
    fast, slow, flat, _ = walker.router.weights(pairs=False)
    assert fast > 0.9 > slow + flat


def test_random_routing_is_the_smooth_one_s_to_tell() -> None:
    random = Random(3)
    walker = Walker(every=8, agents=12).walk([random.randrange(12) for _ in range(1200)])
    assert best(walker) == FLAT
    weights = walker.router.weights(pairs=True)
    assert weights[FLAT] > 0.8 and weights[PAIR] < 0.05 and weights[FAST] < weights[SLOW] + 0.05


def test_a_mixture_forgets_who_was_right_long_ago() -> None:
    random = Random(4)
    walker = Walker(every=8, agents=12).walk([random.randrange(12) for _ in range(1200)])
    assert best(walker) == FLAT
    walker.walk([n % 12 for n in range(1200)])
    assert best(walker, pairs=False) != FLAT


# ---- bounds ----


def test_at_most_512_pairs_are_known_and_the_one_not_seen_for_longest_goes_first() -> None:
    router = Router(TransitionCounts(decay=0.98))
    agents = 30
    router.matrix(agents)

    def known(pair: tuple[int, int]) -> bool:
        base = np.full(agents, 1 / agents)
        return not np.array_equal(router.pair_row(*pair, base), base)

    pairs = [(i, j) for i in range(agents) for j in range(agents)][: PAIRS + 100]
    for number, pair in enumerate(pairs):
        router.observe(*pair, 1)
        router.observe(*pairs[0], 1)  # seen all the time
        if number == PAIRS - 2:
            router.observe(*pairs[1], 1)  # seen again
    router.scores = [-50.0, -50.0, -50.0, 0.0]  # all weight on the pairs
    router.matrix(agents)
    assert sum(map(known, pairs)) == PAIRS
    assert known(pairs[0]) and known(pairs[1]) and known(pairs[-1])
    assert not known(pairs[2]) and not known(pairs[50])


def test_what_is_kept_is_bounded_and_scores_stay_finite() -> None:
    walker, random = Walker(every=50, agents=6), Random(5)
    sizes = []
    for _ in range(3):
        walker.walk([random.randrange(6) for _ in range(2000)])
        sizes.append(walker.router.nbytes)
    assert sizes[2] == sizes[1]
    assert all(100 * math.log(1e-4) - 1 <= s <= 0 for s in walker.router.scores)


def test_no_smoothing_at_all_divides_nothing_by_zero() -> None:
    router = Router(TransitionCounts(decay=0.98), light=0.0)
    for before, source, target in ((-1, 0, 1), (0, 1, 2), (1, 2, 0), (2, 0, 1)):
        router.matrix(4)
        router.observe(before, source, target)
        router.chain.add(source, target)
    assert np.isfinite(router.matrix(4)).all() and all(math.isfinite(s) for s in router.scores)
