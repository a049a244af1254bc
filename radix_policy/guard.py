"""Never much worse than LRU: a shadow of the cache that LRU would have kept.

While the policy is in control, the guard follows what plain LRU (whole leaves, no trimming) would hold instead:

    marked   in the cache, but LRU would have dropped it
    ghost    dropped, but LRU would still hold it

Both caches are as large as each other: whenever ghosts outweigh the marked tokens, the shadow drops its own oldest
leaf (a cached one is marked, a ghost is forgotten); what a ghost hangs on is no leaf. A request that runs over marked
nodes is a gain of their tokens, one that asks for ghosts is a loss of theirs. So the regret against LRU is known in
tokens, at every moment:

    regret = max(-budget, regret + losses - gains),  budget, stake = guard_budget, guard_stake * mean prompt

A trial stakes little until it has gained as much once (regret at -stake); from then on it may lose the budget. When
regret passes what it may lose, LRU takes over for guard_rest * tokens held of evictions. Then the policy is tried
again, from a fresh shadow. Each failure in a row triples the rest (to at most 64 times) and takes 30 % off the stake
(down to a quarter); a gain of a whole budget ends the row. So wrong identities cost a stake per trial, and less and
less often; right ones keep the policy in control, and where a few unlucky calls end a trial it is back soon.

Who calls may only be inferred from tokens. As far as calls come without a tag, a trial stakes less (`_UNTAGGED_STAKE`
of it) and the rests are longer (`_UNTAGGED_REST` times).

Recognising a ghost. Every node has a mark: 16 tokens at its start (past the agent's anchor when it holds both), or for
an output the last 16 of the prompt before it. A part taken for dead has a mark of its own: the belief may be what is
wrong. A ghost hangs on its deepest ancestor that is still there, and is asked for when a match ends at that ancestor
and the prompt shows the mark at its place. The cut-off tail of a leaf has no mark; it is asked for when its head is, or
by its own session when the match ends where it began.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radix_policy.config import key
from radix_policy.events import Prompt
from radix_policy.nodes import Node

WIDTH = 16  # tokens of a mark
_GHOSTS = 4096  # at most; the oldest is forgotten
_SLACK = 256  # stale entries tolerated in the shadow's order
_EWMA = 0.02
_LONGER, _LONGEST = 3, 64  # a failure makes the next rest longer, up to this many times the first
_LESS, _LEAST = 0.7, 0.25  # and the next stake smaller, down to this share of the first
_UNTAGGED_STAKE, _UNTAGGED_REST = 0.35, 2.0


@dataclass(frozen=True)
class GuardConfig:
    """Keys of the guard."""

    guard: bool = key(True, "use LRU's order while the policy loses against it")
    guard_budget: float = key(
        3.0, "tokens that may be lost against LRU in one trial", low=0.01, high=1e6, unit="mean prompts"
    )
    guard_stake: float = key(
        1.0,
        "the same while the trial has not gained as much yet; less after failures",
        low=0.01,
        high=1e6,
        unit="mean prompts",
    )
    guard_rest: float = key(0.5, "evictions under LRU before another try", low=0.1, high=1000, unit="tokens held")


class Mark(NamedTuple):
    """What a node is recognised by: tokens [start, stop) of a prompt hash to `hash`."""

    at: int  # the node holds this token (counted from the root)
    start: int
    stop: int
    hash: int


def mark_at(prompt: Prompt, start: int, prompt_tokens: int) -> Mark:
    """The mark that begins at token `start` of the prompt."""
    stop = min(start + WIDTH, prompt_tokens)
    return Mark(start, start, stop, prompt.fingerprint(start, stop))


def mark_of(prompt: Prompt, node: Node, prompt_tokens: int, cut: int) -> Mark | None:
    """The mark of a node that the prompt covers, or that is the output after it; None when there is none."""
    if node.start >= prompt_tokens:
        tail = prompt_tokens - WIDTH
        if node.start > prompt_tokens or tail < 0:
            return None
        return Mark(node.start, tail, prompt_tokens, prompt.fingerprint(tail, prompt_tokens))
    start = cut if node.start < cut < min(node.start + node.length, prompt_tokens) else node.start
    return mark_at(prompt, start, prompt_tokens)


class _Ghost:
    __slots__ = ("asked", "attached", "below", "head", "mark", "number", "session", "stamp", "start", "tokens")

    def __init__(self, number: int, node: Node, mark: Mark | None, attached: int) -> None:
        self.number = number
        self.start = node.start
        self.tokens = node.length
        self.stamp = node.stamp
        self.session = node.session
        self.mark = mark
        self.attached = attached
        self.head: int | None = None  # number of the ghost that it hangs on, when that is one
        self.below = 0  # ghosts whose head it is: the shadow drops leaves only
        self.asked = False


class Guard:
    """The shadow, the regret, and who is in control."""

    def __init__(self, config: GuardConfig, nodes: Callable[[int], Node | None]) -> None:
        """`nodes` finds a node of the tree by id."""
        self.config = config
        self.in_control = config.guard  # the policy, with its shadow; False: LRU, or nobody watches
        self.held = 0  # tokens in the tree
        self.mean_prompt = 0.0  # tokens, EWMA
        self.untagged = 0.0  # share of the calls, EWMA
        self.regret = 0.0
        self.proven = False  # whether this trial has gained its stake
        self.gained = self.lost = 0  # tokens, over all time
        self.trials = 1
        self._nodes = nodes
        self._failures = 0  # trials that failed in a row
        self._resting = 0.0  # tokens of eviction until the next trial
        self._numbers = 0
        self._marked: dict[int, int] = {}  # tokens, by node
        self._marked_tokens = 0
        self._marked_children: dict[int, int] = {}
        self._ghosts: dict[int, _Ghost] = {}  # by number, the first one the oldest
        self._ghost_tokens = 0
        self._at: dict[int, list[int]] = {}  # numbers of ghosts, by node
        self._order: list[tuple[float, int, int]] = []  # (stamp, 0, node) or (stamp, 1, ghost), cleaned lazily
        self._cleaned = 0  # its length after the last cleaning

    # ---- what happens ----

    def begin(self, nodes: Iterable[Node]) -> bool:
        """An eviction call begins; whether the policy's order holds for it. `nodes`: all nodes of the tree."""
        if not self.in_control and self._resting <= 0:
            self._clear()
            self.in_control = True
            self.trials += 1
            self.regret, self.proven = 0.0, False
            self._order = [(n.stamp, 0, n.id) for n in nodes if n.parent is not None and n.resident]
            heapq.heapify(self._order)
        return self.in_control

    def added(self, node: Node) -> None:
        """A node was inserted or is back."""
        self.held += node.length
        if self.in_control:
            heapq.heappush(self._order, (node.stamp, 0, node.id))
            above = node.parent
            if above is not None and above.id in self._marked:
                # below what the shadow had dropped: it was computed again there too (a prompt's last token never hits)
                while above is not None and above.id in self._marked:
                    self._unmark(above)
                    above = above.parent
                self._balance()
            if len(self._order) > 2 * self._cleaned + _SLACK:
                self._clean()

    def split(self, prefix: Node, suffix: Node) -> None:
        """`prefix` was cut off the head of `suffix`."""
        if not self.in_control:
            return
        heapq.heappush(self._order, (prefix.stamp, 0, prefix.id))
        if suffix.id in self._marked:
            self._marked[suffix.id] = suffix.length
            self._marked[prefix.id] = prefix.length
            self._marked_children[prefix.id] = 1
        # what counted for the suffix's parent now hangs on the prefix, whose mark is the suffix's

    def dropped(self, node: Node, mark: Mark | None) -> None:
        """A node leaves the device."""
        self.held -= node.length
        if not self.in_control:
            self._resting -= node.length
            return
        parent = node.parent
        below = self._at.pop(node.id, [])
        self._marked_children.pop(node.id, None)
        number: int | None = None
        if node.id in self._marked:
            self._unmark(node)
        elif parent is not None:
            self._numbers += 1
            number = self._numbers
            ghost = self._ghosts[number] = _Ghost(number, node, mark, parent.id)
            self._ghost_tokens += ghost.tokens
            self._at.setdefault(parent.id, []).append(number)
            below = self._joined(ghost, below)
        for hanging in below:
            ghost = self._ghosts[hanging]
            if number is None or parent is None:
                self._forget(ghost)  # the shadow holds no child without its parent
                continue
            ghost.attached = parent.id
            if ghost.head is None:
                ghost.head = number
                self._ghosts[number].below += 1
            self._at.setdefault(parent.id, []).append(hanging)
        if number is not None and self._ghosts[number].below == 0:
            heapq.heappush(self._order, (node.stamp, 1, number))
        if len(self._ghosts) > _GHOSTS:
            self._forget(next(iter(self._ghosts.values())))
        self._balance(node)

    def _joined(self, ghost: _Ghost, below: list[int]) -> list[int]:
        """Take in what was cut off this leaf's end before: a leaf lost bit by bit is one ghost, as if lost whole.

        Returns the ghosts that are left to hang anew. One with a mark of its own (a dead end) stays apart.
        """
        for number in below:
            tail = self._ghosts[number]
            cut_here = tail.start == ghost.start + ghost.tokens and tail.stamp == ghost.stamp
            if cut_here and tail.head is None and tail.mark is None:
                ghost.tokens += tail.tokens
                ghost.below = tail.below
                del self._ghosts[number]
                left = [hanging for hanging in below if hanging != number]
                for hanging in left:
                    if self._ghosts[hanging].head == number:
                        self._ghosts[hanging].head = ghost.number
                return left
        return below

    def matched(self, prompt: Prompt, path: Sequence[Node], root: int, session: int, tagged: bool = True) -> None:
        """A prompt was looked up; `path` was found below `root`."""
        length, weight = len(prompt), _EWMA if self.mean_prompt else 1.0
        self.mean_prompt += weight * (length - self.mean_prompt)
        self.untagged += weight * ((not tagged) - self.untagged)
        if not self.in_control:
            return
        gained = lost = 0
        if self._marked:
            for node in path:
                if node.id in self._marked:
                    gained += node.length
                    self._unmark(node)
        hanging = self._at.get(path[-1].id if path else root)
        if hanging:
            lost = self._ask(prompt, hanging, session)
        if gained or lost:
            self.gained += gained
            self.lost += lost
            budget = self.config.guard_budget * self.mean_prompt
            self.regret = max(self.regret + lost - gained, -budget)
            share = max(_LESS**self._failures, _LEAST) * (1.0 - (1.0 - _UNTAGGED_STAKE) * self.untagged)
            stake = min(self.config.guard_stake * self.mean_prompt * share, budget)
            self.proven = self.proven or self.regret <= -stake
            if self.regret > (budget if self.proven else stake):
                self._yield()
            elif self.regret <= -budget:
                self._failures = 0
            self._balance()

    def reset(self) -> None:
        """The tree forgot every node."""
        self._clear()
        self.held = 0

    def passing(self) -> list[object]:
        """State by tree node and ghost."""
        return [self._order, self._marked, self._marked_children, self._ghosts, self._at]

    def snapshot(self) -> dict[str, Any]:
        """Numbers for status."""
        return {
            "in_control": "scout" if self.in_control or not self.config.guard else "lru",
            "guard_regret_tokens": round(self.regret),
            "guard_gained_tokens": self.gained,
            "guard_lost_tokens": self.lost,
            "guard_trials": self.trials,
        }

    # ---- inside ----

    def _ask(self, prompt: Prompt, hanging: list[int], session: int) -> int:
        """Tokens of the ghosts that the prompt asks for; they are back in both caches."""
        length = len(prompt)
        asked: list[_Ghost] = []
        hashes: dict[tuple[int, int], int] = {}  # many ghosts of one agent begin at the same place
        # shallow first, so that a head is decided before what hangs on it
        for ghost in sorted((self._ghosts[n] for n in hanging), key=lambda g: (g.start, g.number)):
            if length <= ghost.start + 1:
                continue
            mark = ghost.mark
            if mark is not None:
                wanted = False
                if length >= mark.stop:
                    place = (mark.start, mark.stop)
                    if place not in hashes:
                        hashes[place] = prompt.fingerprint(mark.start, mark.stop)
                    wanted = hashes[place] == mark.hash
            elif ghost.head is not None:
                head = self._ghosts.get(ghost.head)
                wanted = head is not None and head.asked
            else:
                wanted = ghost.session == session
            if wanted:
                ghost.asked = True
                asked.append(ghost)
        lost = 0
        for ghost in asked:
            lost += min(ghost.tokens, length - 1 - ghost.start)
            self._forget(ghost)
        return lost

    def _balance(self, leaving: Node | None = None) -> None:
        """Let the shadow drop its oldest until it is no larger than the cache, from which `leaving` just goes."""
        order, aside = self._order, []
        while self._ghost_tokens > self._marked_tokens and order:
            stamp, ghostly, number = heapq.heappop(order)
            if ghostly:
                ghost = self._ghosts.get(number)
                if ghost is not None:
                    self._forget(ghost)
                continue
            node = self._nodes(number)
            if node is None or node is leaving or not node.resident or number in self._marked:
                continue
            if number in self._at:
                continue  # ghosts hang on it; it is filed again when the last one is gone
            if node.stamp != stamp:
                heapq.heappush(order, (node.stamp, 0, number))
            elif node.locks or node.children > self._marked_children.get(number, 0):
                aside.append((stamp, 0, number))
            else:
                self._mark(node)
        for entry in aside:
            heapq.heappush(order, entry)

    def _clean(self) -> None:
        """One entry for each that the shadow may drop, and none for what is gone."""
        left: dict[tuple[int, int], float] = {}
        for _, ghostly, number in self._order:
            if ghostly:
                ghost = self._ghosts.get(number)
                if ghost is not None and ghost.below == 0:
                    left[1, number] = ghost.stamp
                continue
            node = self._nodes(number)
            if node is not None and node.resident and number not in self._marked and number not in self._at:
                left[0, number] = node.stamp
        self._order = [(stamp, ghostly, number) for (ghostly, number), stamp in left.items()]
        heapq.heapify(self._order)
        self._cleaned = len(self._order)

    def _mark(self, node: Node) -> None:
        self._marked[node.id] = node.length
        self._marked_tokens += node.length
        if node.parent is not None:
            parent = node.parent.id
            self._marked_children[parent] = self._marked_children.get(parent, 0) + 1

    def _unmark(self, node: Node) -> None:
        self._marked_tokens -= self._marked.pop(node.id)
        heapq.heappush(self._order, (node.stamp, 0, node.id))
        if node.parent is not None:
            parent = node.parent.id
            left = self._marked_children.get(parent, 0) - 1
            if left > 0:
                self._marked_children[parent] = left
            else:
                self._marked_children.pop(parent, None)

    def _forget(self, ghost: _Ghost) -> None:
        del self._ghosts[ghost.number]
        self._ghost_tokens -= ghost.tokens
        hanging = self._at.get(ghost.attached)
        if hanging is not None:
            hanging.remove(ghost.number)
            if not hanging:
                del self._at[ghost.attached]
                node = self._nodes(ghost.attached)
                if node is not None and node.parent is not None:
                    heapq.heappush(self._order, (node.stamp, 0, node.id))
        head = self._ghosts.get(ghost.head) if ghost.head is not None else None
        if head is not None:
            head.below -= 1
            if head.below == 0:
                heapq.heappush(self._order, (head.stamp, 1, head.number))

    def _yield(self) -> None:
        """LRU takes over."""
        self.in_control = False
        longer = min(_LONGER**self._failures, _LONGEST) * (1.0 + (_UNTAGGED_REST - 1.0) * self.untagged)
        self._resting = self.config.guard_rest * longer * self.held
        self._failures = min(self._failures + 1, 32)
        self._clear()

    def _clear(self) -> None:
        self._marked.clear()
        self._marked_children.clear()
        self._ghosts.clear()
        self._at.clear()
        self._order = []
        self._marked_tokens = self._ghost_tokens = 0
