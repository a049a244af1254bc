"""Prompts as identity and the simulator need them.

`TokenPrompt` wraps real token ids. `SpanPrompt` is the run-length form of the workloads: a prompt is a sequence of
spans (first, count), standing for the tokens first, first + 1, ...; every message has ids of its own, so two prompts
share a prefix exactly as far as the expanded ids agree.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

Span = tuple[int, int]  # (first token id, count >= 1)
Spans = tuple[Span, ...]


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


class SpanPrompt:
    """Spans of synthetic token ids; equal tokens give equal fingerprints however they are cut into spans."""

    __slots__ = ("length", "spans")

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.length = span_tokens(spans)

    def __len__(self) -> int:
        return self.length

    def fingerprint(self, start: int, stop: int) -> int:
        """A hash of the canonical spans of [start, stop)."""
        data = array("q", [x for span in cut(self.spans, start, stop) for x in span])
        return int.from_bytes(blake2b(data.tobytes(), digest_size=8).digest(), "little")


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
