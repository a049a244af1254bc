"""How much memory a stream of calls can use: the exact stack-distance curve of an LRU radix cache (Mattson, 1970).

LRU loses the token that was used longest ago, and of one call's tokens the last ones first. So a cache of C tokens
holds the top C of one stack whatever C is, and a token is found exactly if fewer than C tokens lie above it:

    distance(t) = tokens used by later calls than the last one that used t, and not again since
                + tokens of that call, not used again since, that stand before t in its prompt

A call's path through the tree meets calls in order, latest first, so its distances rise along the prompt: what is found
is a prefix at every C. Runs of tokens that the same call used last are one piece: its distances are d, d + 1, ..., and
the found tokens are a piecewise linear function of C. No sampling, O(pieces x log calls) per call.

What a running request uses is locked: it is there whatever is used meanwhile, and what is not locked has to make room
for it, also where it was used later than the request began. So running requests lie on top of the stack, in the order
in which they began, and a request's tokens are as old as its end (`start` and `finish`; `call` is both at once).
Without this, `coding_agents` with 16 sessions at a time is predicted to compute 20 to 35 % too little below two largest
calls; with it, and calls in the order of that pool, 0.3 % of what the simulated engine computes, at every size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radix_policy.curves import Curve
from radix_policy.prompts import Spans
from radix_policy.simulator.tree import Silent, SimNode, SimTree, common
from radix_policy.workloads.base import Call, SessionScript

_BROKEN = 0.1  # of a prompt: recorded ones are known to whole blocks only, so that their end often seems to change


class Piece(NamedTuple):
    """Tokens of one prompt, in a row, that one earlier call used last."""

    distance: int  # of the first; the next one's is one more
    tokens: int


class ReuseCurve(Silent, Curve):
    """Prompt tokens by stack distance, one call after the other. Hears of splits from a tree that loses nothing."""

    def __init__(self, page_size: int = 1) -> None:
        self.calls = 0
        self.prompt_tokens = 0
        self.pieces: list[Piece] = []
        self.users: list[int] = []  # of each piece: which use was its last one; a call is two, its start and its end
        self.needs: list[int] = []  # tokens that a cache must hold so that a call finds all that it could; 0: nothing
        self._last: dict[int, int] = {}  # use that was the last of a node, by node
        self._held = _Sums()  # tokens that a use was the last of, by use
        self._running: dict[object, int] = {}  # use with which a call began that is not over, by the call's key
        self._tree = SimTree(self, page_size)
        self._sorted: tuple[NDArray[np.int64], ...] | None = None  # first distances and last ones, when last asked
        self._sums: tuple[NDArray[np.int64], ...] = ()  # of those before each

    def call(self, prompt: Spans, prompt_tokens: int, output: Spans, output_tokens: int) -> None:
        """The next call, over before another begins."""
        self.start(None, prompt, prompt_tokens)
        self.finish(None, prompt + output, prompt_tokens + output_tokens)

    def start(self, key: object, prompt: Spans, prompt_tokens: int) -> None:
        """The next call begins; its last prompt token is never found (as in SGLang)."""
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self._measure(self._tree.match(prompt, prompt_tokens - 1).node)
        self._running[key] = self._touch(prompt, prompt_tokens)

    def finish(self, key: object, whole: Spans, tokens: int) -> None:
        """The call ends, with prompt and output; its last output token has no KV (as in SGLang)."""
        del self._running[key]
        self._touch(whole, tokens - 1)

    def _touch(self, spans: Spans, tokens: int) -> int:
        use = self._held.append()
        for node in _path(self._tree.insert(spans, tokens).node):
            self._use(node, use)
        return use

    def split(self, prefix: int, suffix: int, at: int, prefix_stamp: float, suffix_stamp: float) -> None:
        """From the tree: a node was cut in two. Both parts are as old as it was."""
        self._last[prefix] = self._last[suffix]

    def _use(self, node: SimNode, use: int) -> None:
        before = self._last.get(node.id)
        if before is not None:
            self._held.add(before, -node.length)
        self._held.add(use, node.length)
        self._last[node.id] = use

    @property
    def reachable(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return self._tree.used

    def found(self, capacities: Sequence[int]) -> list[int]:
        if self._sorted is None or len(self._sorted[0]) != len(self.pieces):
            distances = np.array([piece.distance for piece in self.pieces], dtype=np.int64)
            ends = distances + np.array([piece.tokens for piece in self.pieces], dtype=np.int64)
            self._sorted = (np.sort(distances), np.sort(ends))
            self._sums = tuple(np.concatenate(([0], np.cumsum(edges))) for edges in self._sorted)
        answer = []
        for capacity in capacities:
            # of each piece max(0, C - d) - max(0, C - d - n)
            begun, over = (int(np.searchsorted(edges, capacity, side="right")) for edges in self._sorted)
            answer.append(capacity * (begun - over) - int(self._sums[0][begun]) + int(self._sums[1][over]))
        return answer

    def need(self, share: float) -> int:
        needs = sorted(need for need in self.needs if need)
        return needs[min(int(len(needs) * share), len(needs) - 1)] if needs else 0

    def _measure(self, node: SimNode) -> None:
        """The pieces of a path that was found."""
        caller, inside, above = -1, 0, 0
        running = set(self._running.values())
        for step in _path(node):
            last = self._last[step.id]
            if last != caller:
                caller, inside = last, 0
                if last in running:
                    above = sum(self._held[use] for use in running if use > last)
                else:
                    above = self._held.after(last) + sum(self._held[use] for use in running if use < last)
            self.pieces.append(Piece(above + inside, step.length))
            self.users.append(last)
            inside += step.length
        self.needs.append(above + inside)


class _Sums:
    """Numbers in a row and the sum of all behind one of them, in O(log n) (a Fenwick tree that grows)."""

    def __init__(self) -> None:
        self._tree = [0]
        self._values: list[int] = []
        self._total = 0

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def append(self) -> int:
        """One more, of 0; returns its index."""
        at = len(self._tree)
        value, step = 0, 1
        while at & step == 0:  # what the entries below it cover
            value += self._tree[at - step]
            step <<= 1
        self._tree.append(value)
        self._values.append(0)
        return at - 1

    def add(self, index: int, amount: int) -> None:
        self._total += amount
        self._values[index] += amount
        at = index + 1
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at

    def after(self, index: int) -> int:
        """The sum of all behind that one."""
        before, at = 0, index + 1
        while at:
            before += self._tree[at]
            at -= at & -at
        return self._total - before


def _path(node: SimNode) -> list[SimNode]:
    path = []
    walk: SimNode | None = node
    while walk is not None and walk.parent is not None:
        path.append(walk)
        walk = walk.parent
    path.reverse()
    return path


class Stability(NamedTuple):
    """What the calls of a session keep of the prompt before, agent by agent: all of it, if nobody rewrites history."""

    session: str
    calls: int  # that have one before
    prompt_tokens: int  # of those calls
    kept: int  # tokens of them that stood in the prompt before, from the start
    kept_with_output: int  # the same, and in the output that followed it
    broken: int  # calls that leave more than a tenth of the prompt before
    lost: int  # tokens of prompts before that were not taken up


def stability(script: SessionScript) -> Stability:
    """How much of each prompt is unchanged since the same agent's last call in the session."""
    before: dict[str, Call] = {}
    calls = tokens = kept = kept_with_output = broken = lost = 0
    for call in script.calls:
        last = before.get(call.agent)
        before[call.agent] = call
        if last is None:
            continue
        same, _, _ = common(last.prompt + last.output, call.prompt, 0, 0, call.prompt_tokens)
        calls += 1
        tokens += call.prompt_tokens
        kept += min(same, last.prompt_tokens)
        kept_with_output += same
        broken += same < (1 - _BROKEN) * last.prompt_tokens
        lost += max(last.prompt_tokens - same, 0)
    return Stability(script.key, calls, tokens, kept, kept_with_output, broken, lost)
