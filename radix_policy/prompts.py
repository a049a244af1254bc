"""Prompts as identity and the simulator need them.

`TokenPrompt` wraps real token ids. `SpanPrompt` is the run-length form of the workloads: a prompt is a sequence of
spans (first, count), standing for the tokens first, first + 1, ...; every message has ids of its own, so two prompts
share a prefix exactly as far as the expanded ids agree.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

Span = tuple[int, int]  # (first token id, count >= 1)
Spans = tuple[Span, ...]
_SHORT = 1024  # tokens up to which two array slices compare faster than numpy views do


class TokenPrompt:
    """Real token ids. `tokens` may be an array('q') (used as it is) or any sequence of ints."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def fingerprint(self, start: int, stop: int) -> int:
        """64-bit blake2b of the ids as little-endian int64."""
        part = self.tokens[start:stop]
        data = part if isinstance(part, array) and part.typecode == "q" else array("q", part)
        return int.from_bytes(blake2b(data.tobytes(), digest_size=8).digest(), "little")

    def token(self, at: int) -> int:
        """The token id at a position."""
        return self.tokens[at]

    def ids(self, start: int, stop: int) -> "array[int]":
        """The token ids of [start, stop)."""
        part = self.tokens[start:stop]
        return part if isinstance(part, array) and part.typecode == "q" else array("q", part)

    def slice(self, start: int, stop: int) -> "TokenPrompt":
        """A copy of [start, stop) as a prompt of its own."""
        return TokenPrompt(self.ids(start, stop))

    def join(self, other: "TokenPrompt") -> "TokenPrompt":
        """This prompt, then the other."""
        return TokenPrompt(self.ids(0, len(self)) + other.ids(0, len(other)))

    def agree(self, other: "TokenPrompt", at: int) -> int:
        """How many of the first tokens of `other` stand in this prompt from position `at` on."""
        tokens, wanted = self.tokens, other.tokens
        n = min(len(wanted), len(tokens) - at)
        if n <= 0:
            return 0
        if n <= _SHORT and tokens[at : at + n] == (wanted if n == len(wanted) else wanted[:n]):
            return n
        same = _view(self.tokens, at, at + n) == _view(other.tokens, 0, n)
        return n if same.all() else int(same.argmin())


_64_BITS = (1 << 64) - 1


class SpanPrompt:
    """Spans of synthetic token ids; equal tokens give equal fingerprints however they are cut into spans."""

    __slots__ = ("length", "spans")

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.length = span_tokens(spans)

    def __len__(self) -> int:
        return self.length

    def fingerprint(self, start: int, stop: int) -> int:
        """A hash of the canonical spans of [start, stop); Python's own, nobody forges synthetic tokens."""
        return hash(tuple(cut(self.spans, start, stop))) & _64_BITS

    def token(self, at: int) -> int:
        """The token id at a position."""
        for first, count in self.spans:
            if at < count:
                return first + at
            at -= count
        raise IndexError(at)

    def ids(self, start: int, stop: int) -> "array[int]":
        """The token ids of [start, stop)."""
        return array("q", expand(cut(self.spans, start, stop)))

    def slice(self, start: int, stop: int) -> "SpanPrompt":
        """[start, stop) as a prompt of its own."""
        return SpanPrompt(tuple(cut(self.spans, start, stop)))

    def join(self, other: "SpanPrompt") -> "SpanPrompt":
        """This prompt, then the other."""
        spans = self.spans + other.spans
        return SpanPrompt(tuple(cut(spans, 0, self.length + other.length)))

    def agree(self, other: "SpanPrompt", at: int) -> int:
        """How many of the first tokens of `other` stand in this prompt from position `at` on."""
        mine, theirs = iter(self.spans), iter(other.spans)
        first = count = skipped = 0
        while count == 0:  # the span that holds position `at`
            span = next(mine, None)
            if span is None:
                return 0
            if skipped + span[1] > at:
                first, count = span[0] + at - skipped, span[1] - at + skipped
            skipped += span[1]
        total = other_first = other_count = 0
        while True:
            if other_count == 0:
                span = next(theirs, None)
                if span is None:
                    return total
                other_first, other_count = span
            if count == 0:
                span = next(mine, None)
                if span is None:
                    return total
                first, count = span
            if first != other_first:
                return total
            n = min(count, other_count)
            total, first, count = total + n, first + n, count - n
            other_first, other_count = other_first + n, other_count - n


def _view(tokens: Sequence[int], start: int, stop: int) -> "np.ndarray":
    if isinstance(tokens, array) and tokens.typecode == "q":
        return np.frombuffer(tokens, dtype=np.int64)[start:stop]
    return np.array(tokens[start:stop], dtype=np.int64)


def span_tokens(spans: Sequence[Span]) -> int:
    """Tokens in the spans."""
    return sum(count for _, count in spans)


def cut(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """The canonical spans (adjacent ones merged) of tokens [start, stop)."""
    out: list[Span] = []
    at = 0
    for first, count in spans:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            if out and out[-1][0] + out[-1][1] == first + low:
                out[-1] = (out[-1][0], out[-1][1] + high - low)
            else:
                out.append((first + low, high - low))
        at += count
        if at >= stop:
            break
    return out


def expand(spans: Sequence[Span]) -> Iterator[int]:
    """Every token id, one by one."""
    for first, count in spans:
        yield from range(first, first + count)
