"""A paired duel with LRU: who chose the better victim, and so who is in control.

When the policy and LRU would drop different leaves, the pair is kept (at most 512). Whichever of the two is asked for
first shows who was wrong: LRU's choice first is a win, the policy's choice first a loss, weighted by the tokens that
both would have freed. It does not matter whose victim was really dropped, so the duel goes on under either control:

    LRU's order while  losses > margin * wins

Wins and losses fade (each resolved pair takes 1 / memory off both), so that a policy that has lost its bearings is out
within tens of pairs, and back as soon as it would win again. It starts with a
small credit of wins.

Recognising what is asked for. Each node has a mark: 16 tokens at its start (past the agent's anchor, when the node
holds both), or for an output the last 16 tokens of the prompt before it. A leaf that is still there is asked for when
a match runs over its mark. One that was dropped leaves a ghost at its deepest ancestor that is still there; it is
asked for when a match ends at that ancestor and the prompt shows the mark at the same place. Tokens that no prompt
ever showed have no mark, and their leaves do not duel.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radix_policy.config import key
from radix_policy.events import Prompt
from radix_policy.nodes import Node

WIDTH = 16  # tokens of a mark
_PENDING = 512


@dataclass(frozen=True)
class GuardConfig:
    """Keys of the guard."""

    guard: bool = key(True, "fall back to LRU's order while the policy loses against it")
    guard_margin: float = key(1.02, "losses per win that are tolerated", low=0, high=100)
    guard_memory: float = key(150.0, "resolved pairs that the duel remembers", low=1, high=1e6, unit="pairs")
    guard_credit: float = key(1000.0, "wins assumed at the start", low=0, high=1e9, unit="tokens")


class Mark(NamedTuple):
    """What a node is recognised by."""

    at: int  # the node holds this token (counted from the root)
    start: int  # tokens [start, stop) of a prompt must hash to `hash`
    stop: int
    hash: int


def mark_of(prompt: Prompt, node: Node, prompt_tokens: int, cut: int) -> Mark | None:
    """The mark of a node that the prompt covers, or that is the output after it; None when it is too short."""
    end = node.start + node.length
    if node.start >= prompt_tokens:
        if node.start > prompt_tokens or prompt_tokens < WIDTH:
            return None
        return Mark(
            node.start, prompt_tokens - WIDTH, prompt_tokens, prompt.fingerprint(prompt_tokens - WIDTH, prompt_tokens)
        )
    start = cut if node.start < cut < end else node.start
    stop = min(start + WIDTH, prompt_tokens)
    return Mark(start, start, stop, prompt.fingerprint(start, stop))


class _Pair:
    __slots__ = ("number", "sides", "weight")

    def __init__(self, number: int, weight: int) -> None:
        self.number = number
        self.weight = weight
        self.sides: tuple[_Side, ...] = ()


class _Side:
    __slots__ = ("ghost", "mark", "node", "pair", "win")

    def __init__(self, pair: _Pair, win: bool, node: int, mark: Mark) -> None:
        self.pair = pair
        self.win = win  # asking for it is a win
        self.node = node  # the node that holds the mark; of a ghost: the deepest ancestor that is still there
        self.mark = mark
        self.ghost = False


class Duel:
    """The pairs and the score."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.wins = config.guard_credit
        self.losses = 0.0
        self.resolved = 0
        self.switches = 0
        self.in_control = True  # the policy, not LRU
        self._numbers = 0
        self._pairs: OrderedDict[int, _Pair] = OrderedDict()
        self._at: dict[int, list[_Side]] = {}  # by node

    def __len__(self) -> int:
        return len(self._pairs)

    def chose(self, ours: Node, our_mark: Mark | None, theirs: Node, their_mark: Mark | None, tokens: int) -> None:
        """The policy would drop `ours` and LRU `theirs` (before either is dropped)."""
        if ours is theirs or our_mark is None or their_mark is None or our_mark == their_mark:
            return
        if len(self._pairs) >= _PENDING:
            self._forget(next(iter(self._pairs.values())))
        self._numbers += 1
        pair = self._pairs[self._numbers] = _Pair(self._numbers, tokens)
        pair.sides = (_Side(pair, False, ours.id, our_mark), _Side(pair, True, theirs.id, their_mark))
        for side in pair.sides:
            self._at.setdefault(side.node, []).append(side)

    def matched(self, prompt: Prompt, path: Sequence[Node], root: int) -> None:
        """A prompt was looked up; `path` was found, `root` is the tree's root."""
        held = self._at
        if not held:
            return
        asked: list[_Side] = []
        for node in path:
            if node.id in held:
                asked.extend(s for s in held[node.id] if not s.ghost)
        last = path[-1].id if path else root
        ghosts = held.get(last)
        if ghosts is not None:
            length = len(prompt)
            for side in ghosts:
                at, start, stop, mark = side.mark
                if side.ghost and length >= stop and length > at and prompt.fingerprint(start, stop) == mark:
                    asked.append(side)
        for side in asked:
            if side.pair.number in self._pairs:
                self._resolve(side)

    def split(self, prefix: Node, suffix: Node) -> None:
        """`prefix` was cut off the head of `suffix`."""
        sides = self._at.get(suffix.id)
        if sides is None:
            return
        moved = [s for s in sides if not s.ghost and s.mark.at < suffix.start]
        if moved:
            for side in moved:
                side.node = prefix.id
            self._at.setdefault(prefix.id, []).extend(moved)
            self._put(suffix.id, [s for s in sides if s.ghost or s.mark.at >= suffix.start])

    def dropped(self, node: Node) -> None:
        """The node leaves the device."""
        sides = self._at.pop(node.id, None)
        if sides is None or node.parent is None:
            return
        for side in sides:
            side.ghost = True
            side.node = node.parent.id
        self._at.setdefault(node.parent.id, []).extend(sides)

    def clear(self) -> None:
        """The tree was reset."""
        self._pairs.clear()
        self._at.clear()

    def snapshot(self) -> dict[str, Any]:
        """Numbers for status."""
        return {
            "in_control": "scout" if self.in_control else "lru",
            "duel_wins": round(self.wins, 1),
            "duel_losses": round(self.losses, 1),
            "duels_resolved": self.resolved,
            "control_switches": self.switches,
        }

    def _resolve(self, side: _Side) -> None:
        keep = 1.0 - 1.0 / self.config.guard_memory
        self.wins *= keep
        self.losses *= keep
        if side.win:
            self.wins += side.pair.weight
        else:
            self.losses += side.pair.weight
        self.resolved += 1
        control = self.losses <= self.config.guard_margin * self.wins
        self.switches += control != self.in_control
        self.in_control = control
        self._forget(side.pair)

    def _forget(self, pair: _Pair) -> None:
        del self._pairs[pair.number]
        for side in pair.sides:
            sides = self._at.get(side.node)
            if sides is not None:
                self._put(side.node, [s for s in sides if s is not side])

    def _put(self, node: int, sides: list[_Side]) -> None:
        if sides:
            self._at[node] = sides
        else:
            self._at.pop(node, None)
