"""The guard by itself, step by step: what counts as lost and gained, marks, and the rule of who is in control."""

from typing import Any

import pytest

from radix_policy.guard import WIDTH, Guard, GuardConfig, Mark, mark_at, mark_of
from radix_policy.nodes import Node, NodeTable
from radix_policy.prompts import SpanPrompt
from tests.unit.test_bounds import deep_size

GHOSTS = 4096


class Hand:
    """A guard above a table of nodes; every node below the root is one prompt of its own."""

    def __init__(self, **keys: Any) -> None:
        self.table = NodeTable()
        self.table.reset(0)
        self.guard = Guard(GuardConfig(**keys), self.table.get)
        self.clock = 0.0
        self.ids = 0

    def hold(self, tokens: int = 100, parent: int = 0) -> Node:
        self.ids += 1
        self.clock += 1.0
        above = self.table[parent]
        node = self.table.add(self.ids, parent, tokens, above.start + above.length, self.clock, 0)
        self.guard.added(node)
        return node

    def back(self, gone: Node) -> Node:
        """The same tokens as a new node of the same number."""
        self.clock += 1.0
        assert gone.parent is not None
        node = self.table.add(gone.id, gone.parent.id, gone.length, gone.start, self.clock, 0)
        self.guard.added(node)
        return node

    def drop(self, node: Node, mark: bool = True) -> None:
        self.guard.begin(self.table)
        prompt = self.prompt(node)
        self.guard.dropped(node, mark_of(prompt, node, len(prompt) - 1, 0) if mark else None)
        self.table.remove(node.id)

    def prompt(self, node: Node, more: int = 1) -> SpanPrompt:
        """What runs over the node and the nodes above it, and `more` tokens."""
        spans = [(10**9, more)] if more else []
        at: Node | None = node
        while at is not None and at.parent is not None:
            spans.insert(0, (1_000_000 * at.id, at.length))
            at = at.parent
        return SpanPrompt(tuple(spans))

    tagged = True

    def ask(self, node: Node, session: int = 0, more: int = 1) -> tuple[int, int]:
        """Look the node up; returns what that lost and gained."""
        guard, prompt = self.guard, self.prompt(node, more)
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.id in self.table:
                path.insert(0, self.table[at.id])
            at = at.parent
        before = (guard.lost, guard.gained)
        for found in path:
            self.clock += 1.0
            found.stamp = self.clock
        guard.matched(prompt, path, 0, session, self.tagged)
        return guard.lost - before[0], guard.gained - before[1]

    # one step of a policy that is wrong, and of one that is right, about two nodes of 100 tokens

    def lose(self, new: Node) -> Node:
        self.drop(new)
        self.ask(new)
        return self.back(new)

    def gain(self, old: Node, new: Node) -> Node:
        self.drop(new)
        self.ask(old)
        return self.back(new)

    def miss(self, tokens: int) -> bool:
        """Calls of 100 tokens ask for so many that LRU would still hold; whether the policy is still in control."""
        while tokens > 0:
            part = min(tokens, 90)
            node = self.hold(part)
            self.drop(node)
            assert self.ask(node, more=100 - part) == (part, 0)
            tokens -= part
        return self.guard.in_control

    def rest(self) -> int:
        """Evict until the next trial; returns the tokens of that."""
        evicted = 0
        while not self.guard.begin(self.table):
            self.drop(self.hold())
            evicted += 100
        return evicted


def test_the_newest_dropped_and_asked_for_is_a_loss_and_the_oldest_kept_a_gain() -> None:
    hand = Hand()
    old, new = hand.hold(), hand.hold()
    hand.drop(new)
    assert hand.ask(new) == (100, 0)
    new = hand.back(new)
    hand.drop(new)
    assert hand.ask(old) == (0, 100), "LRU would have dropped it by now"
    assert hand.ask(new) == (0, 0), "and with it in the cache again it would have dropped the other"
    assert (hand.guard.lost, hand.guard.gained, hand.guard.regret) == (100, 100, 0.0)


@pytest.mark.parametrize(("gains", "losses"), [(0, 2), (1, 3), (2, 6), (3, 7), (50, 7)])
def test_a_trial_may_lose_its_stake_and_once_it_has_gained_as_much_the_budget(gains: int, losses: int) -> None:
    """A stake of 101 tokens and a budget of 303; each step is of 100."""
    hand = Hand()
    old, new = hand.hold(), hand.hold()
    for _ in range(gains):
        new = hand.gain(old, new)
    assert hand.guard.regret == max(-100 * gains, -303)
    assert hand.guard.proven == (gains > 1)
    for _ in range(losses):
        assert hand.guard.in_control
        new = hand.lose(new)
    assert not hand.guard.in_control


def test_a_stake_above_the_budget_counts_as_the_budget() -> None:
    hand = Hand(guard_stake=5.0, guard_budget=2.0)
    hand.hold(1000)
    assert hand.miss(200)
    assert not hand.miss(1)


def test_failures_in_a_row_make_the_stake_smaller_and_the_rest_longer() -> None:
    hand, rests = Hand(guard_rest=0.5), []
    hand.hold(1000)
    for trial, stake in enumerate((100, 70, 49, 34.3, 25, 25, 25), 1):
        guard = hand.guard
        assert (guard.trials, guard.in_control, guard.proven, guard.regret) == (trial, True, False, 0.0)
        assert hand.miss(int(stake) - 1)
        assert not hand.miss(2)
        assert guard.held == 1000
        rests.append(hand.rest())
    assert rests == [500, 1500, 4500, 13500, 32000, 32000, 32000], "at most 64 times the first"


def test_where_nobody_says_who_calls_a_trial_may_lose_less_and_the_rest_is_longer() -> None:
    hand = Hand(guard_rest=0.5)
    hand.tagged = False
    hand.hold(1000)
    assert hand.miss(34)
    assert not hand.miss(2), "35 of 100 tokens"
    assert hand.rest() == 1000
    hand.tagged = True
    for _ in range(500):
        hand.ask(hand.table[1], more=100)
    assert hand.guard.untagged < 0.001, "it is the share of late that counts"


def test_a_gain_of_a_whole_budget_ends_the_row_of_failures_and_earns_no_more_than_that() -> None:
    hand = Hand(guard_rest=2.0)
    old, new = hand.hold(), hand.hold()

    def fail(gains: int = 0) -> tuple[int, int]:
        """(losses until it yields, tokens that the rest takes), after so many gains."""
        nonlocal new
        losses = 0
        for _ in range(gains):
            new = hand.gain(old, new)
        while hand.guard.in_control:
            new = hand.lose(new)
            losses += 1
        hand.drop(new)
        return losses, 100 + hand.rest()

    def again() -> None:
        nonlocal new
        new = hand.back(new)

    found = []
    for gains in (0, 0, 3, 4, 0):
        found.append(fail(gains))
        again()
    # a budget is 303 tokens: the third row goes on, the fourth ended
    assert found == [(2, 200), (1, 600), (7, 1800), (7, 200), (1, 600)]


def test_what_is_lost_at_rest_is_not_counted() -> None:
    hand = Hand()
    hand.hold()
    new = hand.hold()
    while hand.guard.in_control:
        new = hand.lose(new)
    lost = hand.guard.lost
    hand.drop(new)
    assert hand.ask(new) == (0, 0) and hand.guard.lost == lost


def test_a_trial_begins_with_a_fresh_shadow() -> None:
    hand = Hand(guard_budget=0.5)
    hand.hold(400)
    ghosts = [hand.hold() for _ in range(4)]
    for node in ghosts:
        hand.drop(node)
    assert hand.ask(ghosts[0]) == (100, 0) and not hand.guard.in_control
    big = hand.hold(1000)
    hand.drop(big)
    assert hand.guard.begin(hand.table) and hand.guard.trials == 2
    for node in ghosts[1:]:
        assert hand.ask(node) == (0, 0)


def test_after_a_reset_nothing_is_asked_for_and_nothing_is_held() -> None:
    hand = Hand()
    old, new = hand.hold(), hand.hold()
    hand.drop(new)
    hand.guard.reset()
    hand.table.reset(0)
    assert hand.guard.held == 0
    assert hand.ask(new) == (0, 0)
    again = hand.back(old)
    assert hand.ask(again) == (0, 0), "what was marked is no longer"
    assert hand.guard.held == 100


def test_only_the_prompt_that_shows_the_mark_asks_for_a_ghost() -> None:
    hand = Hand()
    hand.hold(1000)
    other, new, short = hand.hold(), hand.hold(), hand.hold(8)
    for node in (new, short):
        hand.drop(node)
    assert hand.ask(Node(77, hand.table[0], 100, 0, 0.0, 0)) == (0, 0)
    assert hand.ask(other) == (0, 0), "its match does not end where the ghost hangs"
    assert hand.ask(new, more=0) == (99, 0), "the last token of a prompt is always computed"
    assert hand.ask(new) == (0, 0), "it is back in both caches"
    assert hand.ask(short) == (8, 0)


def test_a_ghost_below_ghosts_is_asked_for_with_them_when_its_own_mark_is_shown() -> None:
    hand = Hand()
    hand.hold(1000)
    top = hand.hold(50)
    low, other = hand.hold(70, parent=top.id), hand.hold(30, parent=top.id)
    for node in (low, other, top):
        hand.drop(node)
    assert hand.ask(other) == (80, 0)
    hand.drop(hand.back(top))
    assert hand.ask(low) == (120, 0), "nobody had asked for it before"


def test_the_cut_off_tail_of_a_leaf_is_asked_for_by_its_own_session_or_with_its_head() -> None:
    for head_too in (False, True):
        hand = Hand()
        hand.hold(1000)
        head = hand.hold(50)
        tail = hand.hold(70, parent=head.id)
        tail.session = 3
        hand.drop(tail, mark=False)
        if head_too:
            hand.drop(head)
            assert hand.ask(tail, session=8) == (120, 0)
        else:
            assert hand.ask(tail, session=8) == (0, 0)
            assert hand.ask(tail, session=3) == (70, 0)


def test_a_part_taken_for_dead_is_asked_for_by_any_session_that_shows_its_own_mark() -> None:
    hand = Hand()
    hand.hold(1000)
    head = hand.hold(50)
    tail = hand.hold(70, parent=head.id)
    hand.guard.dropped(tail, mark_at(hand.prompt(tail, more=0), 50, 120))
    hand.table.remove(tail.id)
    assert hand.ask(head, session=3) == (0, 0)
    assert hand.ask(tail, session=8) == (70, 0)


def test_at_most_4096_ghosts_are_known_and_the_oldest_are_forgotten() -> None:
    hand = Hand(guard_budget=1e6, guard_stake=1e6)
    hand.hold(10**6)  # LRU would drop it first, and have room for all that follows
    ghosts = [hand.hold() for _ in range(GHOSTS + 500)]
    for node in ghosts:
        hand.drop(node)
    assert [hand.ask(ghosts[n])[0] for n in (0, 250, 499)] == [0, 0, 0]
    assert [hand.ask(ghosts[n])[0] for n in (500, 501, -1)] == [100, 100, 100]


def test_what_the_shadow_keeps_is_bounded_by_nodes_and_ghosts() -> None:
    """Dead weight that LRU would have dropped, and a flood of prompts that come once."""
    hand = Hand()
    hand.hold(10**6)
    sizes = []
    for _ in range(3):
        for _ in range(GHOSTS + 1000):
            hand.drop(hand.hold(1))
        sizes.append(deep_size(hand.guard))
    assert sizes[2] < 1.1 * sizes[1]


def test_the_shadow_cannot_drop_what_is_locked() -> None:
    hand = Hand()
    old, middle, new = hand.hold(), hand.hold(), hand.hold()
    hand.table.lock(old.id)
    hand.drop(new)
    assert hand.ask(old) == (0, 0)
    assert hand.ask(middle) == (0, 100), "the oldest that could go"


def test_the_shadow_does_not_drop_a_parent_before_its_child() -> None:
    """A parent is stamped before its child; LRU drops the child first whoever holds it."""
    hand = Hand()
    hand.hold(40)
    parent = hand.hold()
    child = hand.hold(40, parent=parent.id)
    new = hand.hold(40)
    hand.drop(child)  # LRU drops the oldest
    hand.drop(new)  # and now the child
    assert hand.ask(child) == (0, 0), "as LRU does: the parent is a hit and the child a miss, here and there"


def test_a_split_node_keeps_its_mark_in_the_shadow() -> None:
    hand = Hand()
    old, new = hand.hold(), hand.hold()
    hand.drop(new)  # LRU would have dropped the old one
    prefix = hand.table.split(900, old.id, 40, old.stamp, old.stamp)
    hand.guard.split(prefix, old)
    prefix.stamp = 10.0
    hand.guard.matched(SpanPrompt(((1_000_000 * old.id, 60),)), [prefix], 0, 0)
    assert hand.guard.gained == 40
    prefix.stamp = old.stamp = 11.0
    hand.guard.matched(SpanPrompt(((1_000_000 * old.id, 101),)), [prefix, old], 0, 0)
    assert hand.guard.gained == 100


# ---- marks ----


def test_a_mark_is_sixteen_tokens_at_the_start_or_past_the_anchor_or_before_an_output() -> None:
    prompt = SpanPrompt(((0, 100),))

    def mark(start: int, length: int, cut: int = 0) -> tuple[int, int, int] | None:
        found = mark_of(prompt, Node(1, None, length, start, 0.0, 0), 100, cut)
        if found is None:
            return None
        assert found == Mark(found.at, found.start, found.stop, prompt.fingerprint(found.start, found.stop))
        assert start <= found.at < start + length, "the node holds the token that it is known by"
        return found[:3]

    assert mark(0, 100) == (0, 0, WIDTH)
    assert mark(30, 50) == (30, 30, 46)
    assert mark(30, 50, cut=40) == (40, 40, 56)
    assert mark(30, 50, cut=30) == mark(30, 50, cut=80) == mark(30, 50, cut=10) == (30, 30, 46)
    assert mark(95, 20) == (95, 95, 100), "what is left of the prompt"
    assert mark(95, 20, cut=103) == (95, 95, 100), "an anchor does not end in an output"
    assert mark(100, 20) == (100, 84, 100), "an output: the prompt's last"
    assert mark(110, 20) is None, "an output that does not follow the prompt"
    assert mark_at(prompt, 60, 100)[:3] == (60, 60, 76) and mark_at(prompt, 95, 100)[:3] == (95, 95, 100)
    assert mark_at(prompt, 60, 100).hash == prompt.fingerprint(60, 76)
    short = SpanPrompt(((0, 15),))
    assert mark_of(short, Node(1, None, 5, 15, 0.0, 0), 15, 0) is None, "too short a prompt"
