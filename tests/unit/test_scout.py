"""scout: what its scores promise, and the index against scoring every leaf."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.identity import POOLED
from radix_policy.leaf_index import naive_order
from radix_policy.nodes import Node
from tests.unit.stage import Stage

ANCHOR = {"a": (10_000, 20), "b": (20_000, 12), "c": (30_000, 30)}


def told(session: int, messages: int) -> tuple[tuple[int, int], ...]:
    """What was said in a session so far: messages of 9 tokens."""
    return tuple((100_000 * (session + 1) + 100 * m, 9) for m in range(messages))


def prompt(agent: str, session: int, messages: int) -> tuple[tuple[int, int], ...]:
    """The agent's anchor, then the session's messages."""
    return (ANCHOR[agent], *told(session, messages))


def order(stage: Stage) -> list[int]:
    """Every leaf by score, as scoring each and sorting finds it."""
    return [n.id for n in naive_order(stage.world.nodes, stage.runtime.policy.score)]


def drained(stage: Stage) -> list[int]:
    """Every victim of one eviction call that empties the tree; each is the first by score of what is left."""
    victims = []
    with stage.runtime.evicting() as drain:
        while (node := drain.next()) is not None:
            victims.append(node.id)
            stage.engine.tree.evict(node.id)
    return victims


# ---- any stream of events ----

moves = st.lists(
    st.tuples(
        st.sampled_from(("call", "call", "call", "start", "finish", "wait", "close", "alone", "rewrite", "stay")),
        st.integers(0, 3),
        st.sampled_from("abc"),
        st.sampled_from((0.1, 1.0, 7.0, 60.0)),
    ),
    max_size=50,
)


class Player:
    """Plays such moves: append-only talk, calls that overlap, calls without a session, rewritten and repeated ones."""

    def __init__(self, **config: Any) -> None:
        self.stage = Stage(**config)
        self.said = [1, 1, 1, 1]
        self.running: list[str] = []

    def play(self, move: str, session: int, agent: str, seconds: float) -> None:
        stage, key = self.stage, f"s{session}"
        if move == "call":
            self.said[session] += 1
            stage.call(prompt(agent, session, self.said[session]), agent, key, min(seconds, 7.0))
        elif move == "start":
            rid = stage.start(prompt(agent, session, self.said[session]), agent, key, next_agent="b")
            if rid is not None:
                self.running.append(rid)
        elif move == "finish" and self.running:
            stage.finish(self.running.pop(session % len(self.running)))
        elif move == "wait":
            stage.wait(seconds)
        elif move == "close":
            stage.close(key)
        elif move == "alone":
            stage.call(prompt(agent, session, 1), None, None)
        elif move == "rewrite":
            spans = (*prompt(agent, session, 1), (900_000 + 1000 * len(stage.nodes()), 11))
            stage.call(spans, agent, key)
        elif move == "stay":
            stage.call(prompt(agent, session, self.said[session]), agent, key, final=seconds > 50)


@settings(max_examples=60, deadline=None)
@given(moves, st.integers(90, 400), st.booleans())
def test_scores_are_finite_and_between_zero_and_one(steps: list[Any], capacity: int, guard: bool) -> None:
    player = Player(capacity=capacity, guard=guard, every=1)
    for step in steps:
        player.play(*step)
        stage = player.stage
        stage.refresh()
        for node in stage.nodes():
            score = stage.score(node)
            assert math.isfinite(score) and 0 <= score <= 1, node
            session = stage.world.sessions.get(node.session)
            note = node.state
            if session is not None and session.ended and not node.shared and node.start + node.length > note.cut:
                assert score == 0, node


@settings(max_examples=200, deadline=None)
@given(moves, st.integers(90, 400), st.sampled_from([1, 2, 16]))
def test_the_index_hands_out_what_scoring_every_leaf_and_sorting_would(
    steps: list[Any], capacity: int, every: int
) -> None:
    player = Player(capacity=capacity, guard=False, every=every)
    stage = player.stage
    for step in steps:
        player.play(*step)
        with stage.runtime.evicting() as drain:
            first = drain.next()
        expected = order(stage)
        assert (first.id if first is not None else None) == (expected[0] if expected else None)
        assert len(stage.runtime.index) == len(expected)
    with stage.runtime.evicting() as drain:
        while (node := drain.next()) is not None:
            assert node.id == order(stage)[0]
            stage.engine.tree.evict(node.id)
    assert order(stage) == []


@settings(max_examples=40, deadline=None)
@given(moves, st.integers(90, 200))
def test_with_the_guard_on_victims_go_by_score_or_by_recency(steps: list[Any], capacity: int) -> None:
    player = Player(capacity=capacity, guard=True, every=1)
    stage = player.stage
    for step in steps:
        player.play(*step)
        with stage.runtime.evicting() as drain:
            first = drain.next()
        leaves = naive_order(stage.world.nodes, stage.runtime.policy.score)
        oldest = min(leaves, key=lambda n: (n.stamp, n.id), default=None)
        assert first in ((leaves[0], oldest) if leaves else (None,))


# ---- sessions that are over, and that come back ----


def three_sessions(**config: Any) -> Stage:
    """Three sessions take turns at a -> b -> c -> a ..., seven calls each."""
    stage = Stage(**{"guard": False, "every": 1, **config})
    for turn in range(7):
        for session in range(3):
            agent = "abc"[turn % 3]
            stage.call(prompt(agent, session, turn + 1), agent, f"s{session}")
    return stage


def private(stage: Stage, session: str) -> list[Node]:
    return [n for n in stage.leaves_of(session) if not n.shared]


def test_nodes_of_an_ended_session_score_exactly_zero_and_go_first() -> None:
    stage = three_sessions()
    stage.refresh()
    assert private(stage, "s1") and all(stage.score(n) > 0 for n in private(stage, "s1"))
    stage.close("s1")
    stage.refresh()
    over = private(stage, "s1")
    assert [stage.score(n) for n in over] == [0.0] * len(over)
    assert all(stage.score(n) > 0 for key in ("s0", "s2") for n in private(stage, key))
    dead = {n.id for n in stage.nodes() if n.session == stage.session("s1").id and not n.shared}
    leaves = {n.id for n in over}
    victims = drained(stage)
    assert len(dead) > len(leaves) > 2
    assert set(victims[: len(dead)]) == dead
    assert [v for v in victims if v in leaves] == [n.id for n in sorted(over, key=lambda n: (n.stamp, n.id))]


def test_a_session_that_comes_back_gets_its_scores_back() -> None:
    # soft_end off: the shares of waiting sessions are a fixed point that is approached from the rates of before
    stage, twin = three_sessions(soft_end=False), three_sessions(soft_end=False)
    stage.close("s1")
    stage.refresh()
    assert all(stage.score(n) == 0 for n in private(stage, "s1"))
    twin.refresh()
    for each in (stage, twin):
        each.call(prompt("b", 1, 8), "b", "s1")
        for _ in range(4):  # the others catch up with the new tables one by one
            each.refresh()
            each.wait(1.0)
    assert [n.id for n in stage.nodes()] == [n.id for n in twin.nodes()]
    assert [stage.score(n) for n in stage.nodes()] == pytest.approx([twin.score(n) for n in twin.nodes()])
    assert all(stage.score(n) > 0 for n in private(stage, "s1"))
    assert drained(stage) == drained(twin)


def test_a_dropped_session_is_worth_nothing() -> None:
    stage = three_sessions(max_sessions=3)
    known = {key: private(stage, key) for key in ("s0", "s1", "s2")}
    stage.call(prompt("a", 3, 1), "a", "s3")  # s0 is the one called longest ago
    stage.refresh()
    assert [stage.score(n) for n in known["s0"]] == [0.0] * len(known["s0"])
    assert all(stage.score(n) > 0 for n in known["s1"])


# ---- silence ----


def silent_scores(times: list[float], **config: Any) -> list[list[float]]:
    """Scores of one session's private leaves, in one order, while it stays silent for so long."""
    stage = three_sessions(tend=1000.0, adapt=0.0, **config)
    leaves = private(stage, "s2")
    stage.refresh()
    found, now = [], 0.0
    for time in times:
        stage.wait(time - now)
        now = time
        stage.refresh()
        found.append([stage.score(n) for n in leaves])
    assert len(leaves) >= 3 and all(s > 0 for s in found[0])
    return found


def test_beyond_the_usual_gap_more_silence_never_raises_a_score() -> None:
    # the usual gap is 4 seconds: the two other sessions' calls in between
    rows = silent_scores([10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0])
    for earlier, later in pairwise(rows):
        assert all(b < a for a, b in zip(earlier, later))
    assert max(rows[-1]) < 0.25 * max(rows[0])


def test_when_waiting_costs_nothing_silence_never_raises_a_score_at_all() -> None:
    """Before the usual gap is over a hit draws nearer, which a discount rewards; without one only doubt is left."""
    rows = silent_scores([0.0, 1.0, 2.0, 4.0, 5.0, 8.0, 30.0, 200.0], gamma=0.999)
    for earlier, later in pairwise(rows):
        assert all(b <= a * 1.003 for a, b in zip(earlier, later))
    assert max(rows[-1]) < max(rows[0])


def test_without_timing_silence_changes_nothing() -> None:
    rows = silent_scores([0.0, 3.0, 50.0, 3000.0], timing=False)
    assert all(row == rows[0] for row in rows)


def test_the_session_that_is_silent_for_longer_goes_first() -> None:
    stage = Stage(guard=False, every=1, tend=1000.0)
    for turn in range(12):
        for session in range(2):
            stage.call(prompt("a", session, turn + 1), "a", f"s{session}")
    for turn in range(12, 16):
        stage.call(prompt("a", 1, turn + 1), "a", "s1", gap=10.0)
    stage.refresh()
    assert max(map(stage.score, private(stage, "s0"))) < max(map(stage.score, private(stage, "s1")))


# ---- size ----


def test_a_leaf_of_ten_times_the_tokens_scores_the_same() -> None:
    stage = three_sessions()
    for session, agent in (("s0", "b"), (None, None)):
        spans = prompt("b", 0, 8) if session else ((77_000, 40),)
        rid = stage.start(spans, agent, session)
        assert rid is not None
        runtime, root = stage.runtime, stage.engine.tree.root.id
        for number, tokens in ((8001, 30), (8002, 300)):
            runtime.added(number, root, tokens, 0, 5000.0, rid)
        stage.finish(rid)
        stage.refresh()
        small, large = (stage.world.nodes[n] for n in (8001, 8002))
        assert stage.score(small) == stage.score(large)
        if session:
            assert stage.score(small) > 0
        ids = order(stage)
        assert ids.index(8002) == ids.index(8001) + 1  # nothing comes between them: LRU's order, then the id
        stage.runtime.removed(8001)
        stage.runtime.removed(8002)


def test_two_worlds_that_differ_in_message_length_alone_rank_their_nodes_alike() -> None:
    orders = []
    for factor in (1, 10):
        stage = Stage(guard=False, every=1, dead_tails=False)
        for turn in range(9):
            for session in range(3):
                agent = "abc"[(turn + session) % 3]
                spans = tuple((10 * first, factor * n) for first, n in prompt(agent, session, turn + 1))
                stage.call(spans, agent, f"s{session}", output=3 * factor)
        stage.refresh()
        orders.append(
            [(n.id, round(stage.score(n), 12)) for n in naive_order(stage.world.nodes, stage.runtime.policy.score)]
        )
    assert orders[0] == orders[1]


# ---- shared nodes ----


def anchor_node(stage: Stage, agent: str) -> Node:
    found = [n for n in stage.nodes() if n.start == 0 and n.shared and n.agent == stage.agent(agent)]
    assert len(found) == 1
    return found[0]


def test_an_anchor_whose_agent_has_live_predecessors_outranks_all_of_ended_sessions() -> None:
    stage = three_sessions()
    stage.close("s0")
    stage.close("s1")
    stage.refresh()
    over = private(stage, "s0") + private(stage, "s1")
    assert over
    for agent in "abc":
        assert stage.score(anchor_node(stage, agent)) > max(stage.score(n) for n in over) == 0


def test_an_anchor_is_worth_at_least_what_its_likeliest_session_gives_it() -> None:
    """The chance that any session calls is at least the chance that one does."""
    stage = three_sessions()
    stage.refresh()
    for agent in "abc":
        shared = stage.score(anchor_node(stage, agent))
        one = [n for k in ("s0", "s1", "s2") for n in private(stage, k) if n.agent == stage.agent(agent)]
        assert one and shared >= max(map(stage.score, one)) - 1e-9


def test_a_shared_node_that_calls_pass_by_is_doubted_more_with_each() -> None:
    stage = Stage(guard=False, every=1, cut=False)
    odd = ((10_000, 20), (777_000, 15))
    for session in range(2):
        for _ in range(4):
            stage.call((*odd, *told(session, 1)), "a", f"s{session}")
    node = next(n for n in stage.nodes() if n.shared and n.start + n.length == 35)
    weights = []
    for b in range(1, 30):
        stage.call(prompt("a", 2 + b % 2, 1 + b), "a", f"s{2 + b % 2}")
        stage.refresh()
        weights.append(stage.runtime.policy.weight(node))  # type: ignore[attr-defined]
        if b > 2:
            assert weights[-1] <= 2 / b + 1e-12
    assert weights == sorted(weights, reverse=True) and weights[-1] < 0.1 < 0.5 < weights[0]


# ---- next: the client's forecast ----


def test_a_forecast_raises_the_agent_it_names() -> None:
    scores = {}
    for hint in (None, "a", "b", "c", "unheard of"):
        stage = Stage(guard=False, every=1)
        for turn in range(8):
            for session in range(2):
                agent = "abcacbab"[turn]
                tag = {} if hint is None or turn < 7 or session == 0 else {"next_agent": hint}
                stage.call(prompt(agent, session, turn + 1), agent, f"s{session}", **tag)
        stage.refresh()
        scores[hint] = {
            name: max(stage.score(n) for n in private(stage, "s1") if n.agent == stage.agent(name)) for name in "abc"
        }
    for name in "abc":
        assert scores[name][name] > max(scores[other][name] for other in (None, *"abc") if other != name)
        assert scores[name][name] == max(scores[name].values())
    assert scores["unheard of"] == scores[None]


# ---- who is unknown ----


def lru_order(stage: Stage) -> list[int]:
    return [n.id for n in sorted(stage.world.nodes.leaves(), key=lambda n: (n.stamp, n.id))]


@pytest.mark.parametrize(("agent", "session"), [(None, None), ("a", None), ("a", "own")])
def test_without_evidence_the_order_is_that_of_lru(agent: str | None, session: str | None) -> None:
    """Nobody is named, or one agent calls once per session, and nothing was ever hit: recency is all there is."""
    stages = [Stage(300, policy=policy) for policy in ("scout", "lru")]
    for n in range(60):
        for stage in stages:
            key = f"s{n}" if session else None
            stage.call(((1000 * (n + 1), 10 + 7 * n % 31),), agent, key, output=1 + n % 5)
        ours = stages[
            0
        ]  # it trims its last victim, so the trees differ; which leaf is next is LRU's choice all the same
        with ours.runtime.evicting() as drain:
            node = drain.next()
        assert node is not None and node.id == lru_order(ours)[0]
    whole = [Stage(300, policy=policy, **more) for policy, more in (("scout", {"trim": False}), ("lru", {}))]
    for n in range(60):
        for stage in whole:
            stage.call(((1000 * (n + 1), 10 + 7 * n % 31),), agent, f"s{n}" if session else None, output=1 + n % 5)
        assert [x.id for x in whole[0].nodes()] == [x.id for x in whole[1].nodes()]
    assert whole[0].engine.evicted == whole[1].engine.evicted > 500
    assert drained(whole[0]) == drained(whole[1])


def test_unknown_and_pooled_agents_are_scored_like_any_other() -> None:
    for config in ({"max_agents": 1}, {}):
        stage = Stage(260, guard=False, every=1, **config)
        for turn in range(10):
            for session in range(3):
                agent = "abc"[turn % 3] if config else None  # beyond the cap, or unnamed
                stage.call(prompt("abc"[turn % 3], session, turn % 4 + 1), agent, f"s{session}")
        stage.refresh()
        sessions = [stage.session(f"s{n}") for n in range(3)]
        assert all(POOLED in s.visits for s in sessions)
        scores = [stage.score(n) for n in stage.nodes()]
        assert all(0 <= s <= 1 for s in scores) and max(scores) > 0
        stage.close("s0")
        stage.refresh()
        own = [n for n in private(stage, "s0") if n.start + n.length > n.state.cut]  # not its agent's anchor
        assert own and all(stage.score(n) == 0 for n in own)
        drained(stage)
        assert stage.nodes() == []
