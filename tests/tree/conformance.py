"""One suite for every tree that tells a Runtime what happens: SGLang's real cache and the simulator's.

Subclass `Conformance` and give it `make`; `machine` makes a hypothesis state machine of the same tree against a naive
model. After every operation the Runtime's mirror must be the tree.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from radix_policy.events import RequestArrived, RequestFinished, Tag, Tick
from radix_policy.nodes import UNKNOWN
from radix_policy.prompts import TokenPrompt
from tests.tree.trees import Tokens, Tree, Victim, assert_mirror

Factory = Callable[..., Tree]

BLOCK = 16  # tokens that always come together: a whole page at every page size that is tested


def block(number: int) -> Tokens:
    """Sixteen tokens of their own."""
    return tuple(range(1000 * (number + 1), 1000 * (number + 1) + BLOCK))


def blocks(*numbers: int) -> Tokens:
    """A sequence of such blocks."""
    return tuple(t for n in numbers for t in block(n))


def arrive(tree: Tree, rid: str, prompt: Tokens, agent: str | None = None, session: str | None = None) -> None:
    """Tell the Runtime that a request came."""
    tag = Tag(agent, session) if agent is not None or session is not None else None
    tree.runtime.observe(RequestArrived(rid, TokenPrompt(prompt), "", tag))


@pytest.mark.parametrize("page_size", [1, 16])
class Conformance:
    """What the contract in `radix_policy.tree_view` says, step by step."""

    def make(self, page_size: int, capacity: int = 256, policy: str = "scout") -> Tree:
        raise NotImplementedError

    def test_insert_match_split(self, page_size: int) -> None:
        tree = self.make(page_size)
        tree.insert(blocks(0, 1, 2))
        assert_mirror(tree)
        assert [n.length for n in tree.truth().values()] == [3 * BLOCK]
        assert tree.match(blocks(0, 1, 2)) == 3 * BLOCK
        assert_mirror(tree)
        assert tree.match(blocks(0, 9)) == BLOCK
        assert_mirror(tree)
        assert sorted(n.length for n in tree.truth().values()) == [BLOCK, 2 * BLOCK]
        tree.insert(blocks(0, 1, 7))
        assert_mirror(tree)
        assert sorted((n.start, n.length) for n in tree.truth().values()) == [
            (0, BLOCK),
            (BLOCK, BLOCK),
            (2 * BLOCK, BLOCK),
            (2 * BLOCK, BLOCK),
        ]

    def test_a_split_keeps_the_id_of_the_suffix(self, page_size: int) -> None:
        tree = self.make(page_size)
        tree.insert(blocks(0, 1))
        (whole,) = tree.truth()
        tree.match(blocks(0, 5))
        truth = tree.truth()
        (prefix,) = (n for n in truth if n != whole)
        assert truth[whole].parent == prefix
        assert truth[whole].start == BLOCK
        assert_mirror(tree)

    def test_locks_reach_the_root_and_survive_splits(self, page_size: int) -> None:
        tree = self.make(page_size)
        tree.insert(blocks(0, 1, 2))
        tree.insert(blocks(5))
        held = tree.lock(blocks(0, 1, 2))
        assert_mirror(tree)
        tree.match(blocks(0, 9))
        assert_mirror(tree)
        assert sum(n.locks for n in tree.truth().values()) == 2
        again = tree.lock(blocks(0))
        assert_mirror(tree)
        assert [v.sequence for v in tree.evict(10_000)] == [blocks(5)]
        assert_mirror(tree)
        tree.unlock(held)
        assert_mirror(tree)
        assert [v.sequence for v in tree.evict(10_000)] == [blocks(0, 1, 2)]
        assert_mirror(tree)
        tree.unlock(again)
        assert [v.sequence for v in tree.evict(10_000)] == [blocks(0)]
        assert tree.truth() == {}
        assert_mirror(tree)

    def test_a_parent_becomes_a_leaf_when_its_children_are_gone(self, page_size: int) -> None:
        tree = self.make(page_size)
        tree.insert(blocks(0, 1))
        tree.insert(blocks(0, 2))
        assert len(tree.leaves()) == 2
        tree.evict(1)
        assert_mirror(tree)
        tree.evict(1)
        assert_mirror(tree)
        assert len(tree.leaves()) == 1
        assert [v.sequence for v in tree.evict(1)] == [blocks(0)]
        assert_mirror(tree)

    def test_without_evidence_the_order_is_lru(self, page_size: int) -> None:
        tree = self.make(page_size)
        for number in range(6):
            tree.insert(blocks(number))
            tree.runtime.observe(Tick(number, float(number)))
        tree.match(blocks(1))
        tree.runtime.observe(Tick(9, 9.0))
        tree.match(blocks(0))
        assert [v.sequence for v in tree.evict(6 * BLOCK)] == [blocks(n) for n in (2, 3, 4, 5, 1, 0)]
        assert_mirror(tree)

    def test_identity_is_attached_and_survives_splits(self, page_size: int) -> None:
        tree = self.make(page_size)
        prompt = blocks(0, 1, 2)
        arrive(tree, "r1", prompt, "planner", "s1")
        assert tree.match(prompt, "r1") == 0
        tree.insert(prompt, "r1")
        (node,) = (tree.runtime.world.nodes[i] for i in tree.truth())
        owner = (node.agent, node.session)
        assert owner[0] > 0 and owner[1] != UNKNOWN and not node.output
        tree.match(blocks(0, 7))
        tree.match(blocks(0, 1, 7))
        assert_mirror(tree)
        nodes = [tree.runtime.world.nodes[i] for i in tree.truth()]
        assert len(nodes) == 3
        assert {(n.agent, n.session) for n in nodes} == {owner}

    def test_a_node_that_a_second_session_matches_is_shared(self, page_size: int) -> None:
        tree = self.make(page_size)
        for rid, session in (("r1", "s1"), ("r2", "s2")):
            prompt = blocks(0, 1 if session == "s1" else 2)
            arrive(tree, rid, prompt, "planner", session)
            tree.match(prompt, rid)
            tree.insert(prompt, rid)
            tree.runtime.observe(RequestFinished(rid))
        shared = {n.start: n.shared for n in (tree.runtime.world.nodes[i] for i in tree.truth())}
        assert shared == {0: True, BLOCK: False}

    def test_output_is_told_from_prompt(self, page_size: int) -> None:
        tree = self.make(page_size)
        prompt = blocks(0, 1)
        arrive(tree, "r1", prompt, "planner", "s1")
        tree.match(prompt, "r1")
        tree.insert(prompt, "r1")
        tree.insert(prompt + block(8), "r1")
        output = {n.start: n.output for n in (tree.runtime.world.nodes[i] for i in tree.truth())}
        assert output == {0: False, 2 * BLOCK: True}

    @pytest.mark.parametrize("cuts", [(2,), (1, 2), (3, 2), (1, 3, 2)])
    def test_prompt_and_output_that_came_as_one_node(self, page_size: int, cuts: tuple[int, ...]) -> None:
        tree = self.make(page_size)
        prompt = blocks(0, 1)  # as when a retracted request is computed again
        arrive(tree, "r1", prompt, "planner", "s1")
        tree.match(prompt, "r1")
        tree.insert(prompt + blocks(8, 9), "r1")
        for cut in cuts:
            tree.match(blocks(0, 1, 8, 9)[: cut * BLOCK])
            assert_mirror(tree)
        output = {n.start: n.output for n in (tree.runtime.world.nodes[i] for i in tree.truth())}
        assert output == {at * BLOCK: at >= 2 for at in {0, *cuts}}

    def test_only_the_first_match_of_a_request_counts(self, page_size: int) -> None:
        tree = self.make(page_size)
        tree.insert(blocks(0))
        arrive(tree, "r1", blocks(0), "planner", "s1")
        tree.match(blocks(0), "r1")
        tree.match(blocks(0), "r1")
        tree.match(blocks(0))
        (node,) = (tree.runtime.world.nodes[i] for i in tree.truth())
        assert node.hits == 1

    def test_reset_forgets_nodes_and_keeps_requests(self, page_size: int) -> None:
        tree = self.make(page_size)
        arrive(tree, "r1", blocks(0), "planner", "s1")
        tree.insert(blocks(0, 1))
        tree.reset()
        assert tree.truth() == {}
        assert_mirror(tree)
        assert "r1" in tree.runtime.requests
        tree.insert(blocks(0))
        assert_mirror(tree)

    def test_a_sequence_shorter_than_a_page_changes_nothing(self, page_size: int) -> None:
        tree = self.make(page_size)
        tree.insert(())
        arrive(tree, "r1", (1,), "planner", "s1")
        assert tree.match((), "r1") == 0
        if page_size > 1:
            tree.insert(block(0)[:-1])
        assert tree.truth() == {}
        assert_mirror(tree)


class NaiveCache:
    """Which page-aligned prefixes are cached, as a plain set."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.have: set[Tokens] = set()

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:n] for n in range(self.page_size, len(tokens) + 1, self.page_size)]

    def insert(self, tokens: Tokens) -> None:
        self.have.update(self.prefixes(tokens))

    def match(self, tokens: Tokens) -> int:
        return max((len(p) for p in self.prefixes(tokens) if p in self.have), default=0)

    def tokens(self) -> int:
        return len(self.have) * self.page_size

    def evicted(self, victims: Sequence[Victim]) -> None:
        for victim in victims:
            self.have.difference_update(p for p in self.prefixes(victim.sequence) if len(p) > victim.start)


def machine(make: Factory, examples: int = 20, steps: int = 40) -> type[RuleBasedStateMachine]:
    """A state machine over random operations on `make(page_size=..., capacity=...)`."""

    class TreeMachine(RuleBasedStateMachine):
        @initialize(page_size=st.sampled_from([1, 16]))
        def build(self, page_size: int) -> None:
            self.tree = make(page_size=page_size, capacity=256)
            self.naive = NaiveCache(page_size)
            self.held: list[object] = []
            self.requests = 0
            self.step = 0

        sequences = st.lists(st.integers(0, 2), min_size=1, max_size=4).flatmap(
            lambda numbers: st.integers(1, BLOCK).map(
                lambda cut: blocks(*numbers)[: len(numbers) * BLOCK - BLOCK + cut]
            )
        )

        def after(self) -> None:
            assert_mirror(self.tree)
            assert self.naive.tokens() == sum(n.length for n in self.tree.truth().values())

        @rule(tokens=sequences, tagged=st.booleans(), session=st.integers(0, 3), agent=st.integers(0, 2))
        def request(self, tokens: Tokens, tagged: bool, session: int, agent: int) -> None:
            rid = f"r{self.requests}"
            self.requests += 1
            arrive(self.tree, rid, tokens, f"a{agent}" if tagged else None, f"s{session}" if tagged else None)
            assert self.tree.match(tokens, rid) == self.naive.match(tokens)
            victims, done = self.tree.insert(tokens, rid)
            self.naive.evicted(victims)
            if done:
                self.naive.insert(tokens[: len(tokens) - len(tokens) % self.tree.page_size])
            self.tree.runtime.observe(RequestFinished(rid))
            self.after()

        @rule(tokens=sequences)
        def match(self, tokens: Tokens) -> None:
            assert self.tree.match(tokens) == self.naive.match(tokens)
            self.after()

        @rule(tokens=sequences)
        def lock(self, tokens: Tokens) -> None:
            self.held.append(self.tree.lock(tokens))
            self.after()

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def unlock(self, data: st.DataObject) -> None:
            self.tree.unlock(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))
            self.after()

        @rule(tokens=st.integers(1, 96))
        def evict(self, tokens: int) -> None:
            self.naive.evicted(self.tree.evict(tokens))
            self.after()

        @rule(steps=st.integers(1, 5), seconds=st.floats(0, 3))
        def tick(self, steps: int, seconds: float) -> None:
            self.step += steps
            clock = self.tree.runtime.world.clock
            self.tree.runtime.observe(Tick(self.step, clock.seconds + seconds))

        @precondition(lambda self: not self.held)
        @rule()
        def reset(self) -> None:
            self.tree.reset()
            self.naive.have.clear()
            self.after()

    TreeMachine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return TreeMachine
