"""A stack-distance curve in bounded memory, from a sample: fixed-size SHARDS over chunks of prompts.

Waldspurger et al., "Efficient MRC Construction with SHARDS" (FAST 2015): look only at items whose hash lies below a
threshold. The same item is always looked at or never, so among n sampled items that were used since, the expected
number of all is n / R, R the share of hashes below the threshold. Whenever the sample would grow beyond its size the
threshold is lowered, and what then lies above it is dropped (their fixed-size variant).

An item is a chunk of `chunk` tokens with everything before it: its key hashes the namespace and the whole prompt up to
its end, so that equal keys mean equal KV. Chunks are put on the stack in the order in which a radix cache loses them
(working_set.py): the first of a prompt lies on top. At R = 1 this is `ReuseCurve` with pages of `chunk` tokens, but for
distances from 128 chunks on, which are kept to 1/64 of themselves.

Error: of a distance d, about sqrt(chunk x d / R) tokens. Of the found tokens, as a share of all prompt tokens, from one
largest call on, calls one after the other, root mean square over eight hash functions, chunks of 16: 16,384 samples
0.6 % on `coding_agents`, 0.4 % on `tau_airline`, 1.1 % on 4,800 generated calls whose few anchors carry most of what is
found; four times fewer samples 1.0 %, 0.9 % and 5.5 %. With 16 calls running in a pool of one largest call it was 2.2 %
on `coding_agents` (one hash function), 0.5 % from one and a half on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radix_policy.curves import Curve
from radix_policy.prompts import Spans

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]

_ALL = (1 << 64) - 1
_SUB = 64  # buckets per octave of distances
_SUB_BITS = 6
_BUCKETS = _SUB * 36  # distances up to 2^41 chunks
_ROOM = 16  # a full sample is cut by one in so many, so that not every call has to cut it
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64 (Steele et al., 2014)
_STEP = 0xD1342543DE82EF95  # of the powers that tell places in a prompt apart; odd, so that none is lost


class CurveError(ValueError):
    """A curve's JSON form cannot be used; one line."""


def _mixed(values: Keys) -> Keys:
    """splitmix64's finaliser: a bijection of 64-bit numbers, each output bit depending on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


class ChunkKeys:
    """Keys of the whole chunks of a prompt, uint64, the same in every process.

    Multilinear hash of a chunk's ids, mixed; then sum over chunks of hash x step^place, mixed again. Not meant against
    somebody who forges collisions: he would only bend the curve.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._weights = _mixed(np.arange(1, chunk + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
        self._powers = np.ones(1, dtype=np.uint64)

    def __call__(self, ids: Ids, namespace: str = "") -> Keys:
        """One key per chunk of `ids` (int64, shape (tokens,)); tokens after the last whole chunk have none."""
        count = len(ids) // self.chunk
        rows = ids[: count * self.chunk].view(np.uint64).reshape(count, self.chunk)
        chunks = _mixed(rows @ self._weights + np.uint64(_GOLDEN))  # or a chunk of zeros would add nothing
        while len(self._powers) < count:
            last = self._powers[-1:] * np.uint64(_STEP)
            self._powers = np.concatenate((self._powers, self._powers * last))
        start = int.from_bytes(blake2b(namespace.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
        return _mixed(np.cumsum(chunks * self._powers[:count], dtype=np.uint64) + np.uint64(start))


def ids_of(spans: Spans) -> Ids:
    """The token ids of spans, int64."""
    if not spans:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in spans])


def _buckets(distances: "NDArray[np.floating[Any]]") -> NDArray[np.int64]:
    """Bucket of each distance in chunks: one per chunk below 128, 64 per octave from there on."""
    whole = distances.astype(np.int64)
    shift = np.maximum(np.frexp(whole.astype(np.float64))[1] - (_SUB_BITS + 1), 0)
    return np.minimum(shift * _SUB + (whole >> shift), _BUCKETS - 1)


def _edges(bucket: int) -> tuple[int, int]:
    """Distances of a bucket, in chunks: [first, one past the last)."""
    shift = max(bucket // _SUB - 1, 0)
    low = bucket - shift * _SUB
    return low << shift, (low + 1) << shift


@dataclass(frozen=True)
class SampledCounts(Curve):
    """What a SampledCurve has counted, JSON-ready by `to_json`."""

    chunk: int  # tokens
    rate: float  # R now
    entries: int  # sampled chunks on the stack now
    calls: int
    prompt_tokens: int
    largest: int  # tokens of the largest call
    looked_up: int  # prompt tokens in chunks that could have been found
    sampled: float  # the estimate of `looked_up` from the sample: it shows what hashing happened to pick
    depth: int | None  # tokens of stack that are kept: found tokens are those of a cache no larger than this
    hits: Mapping[int, float]  # bucket of distance -> prompt tokens
    needs: Mapping[int, float]  # bucket of what a call needs to find all -> calls

    @property
    def reachable(self) -> int:
        return self._bounded(sum(self.hits.values()) + self._correction)

    @property
    def tokens(self) -> int:
        return round(self.entries * self.chunk / self.rate)

    @property
    def _correction(self) -> float:
        """Their SHARDS-adj: the sample's error lies in the few chunks used most, and those are found at any size."""
        return self.looked_up - self.sampled if self.hits else 0.0

    def _bounded(self, tokens: float) -> int:
        return round(min(max(tokens, 0.0), self.looked_up))

    def found(self, capacities: Sequence[int]) -> list[int]:
        edges = [(*_edges(bucket), tokens) for bucket, tokens in self.hits.items()]
        answer = []
        for capacity in capacities:
            size = capacity / self.chunk
            tokens = sum(t * min(max((size - lo) / (hi - lo), 0.0), 1.0) for lo, hi, t in edges)
            answer.append(self._bounded(tokens + self._correction * min(size, 1.0)))
        return answer

    def need(self, share: float) -> int:
        left, most = share * sum(self.needs.values()), 0
        for bucket, calls in sorted(self.needs.items()):
            left, most = left - calls, _edges(bucket)[1] * self.chunk
            if left < 0:
                break
        return most

    def to_json(self) -> dict[str, Any]:
        """As plain numbers and lists, a few KB to some 30 KB."""
        return {
            "chunk": self.chunk,
            "rate": self.rate,
            "entries": self.entries,
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "largest_call": self.largest,
            "looked_up_tokens": self.looked_up,
            "sampled_tokens": round(self.sampled),
            "depth_tokens": self.depth,
            "hits": [[bucket, round(tokens)] for bucket, tokens in self.hits.items()],
            "needs": [[bucket, round(calls)] for bucket, calls in self.needs.items()],
        }

    @classmethod
    def from_json(cls, given: Any) -> "SampledCounts":
        """What `to_json` gave; CurveError where it is not that."""
        try:
            hits, needs = ({int(bucket): float(n) for bucket, n in given[name]} for name in ("hits", "needs"))
            depth = given["depth_tokens"]
            made = cls(
                chunk=int(given["chunk"]),
                rate=float(given["rate"]),
                entries=int(given["entries"]),
                calls=int(given["calls"]),
                prompt_tokens=int(given["prompt_tokens"]),
                largest=int(given["largest_call"]),
                looked_up=int(given["looked_up_tokens"]),
                sampled=float(given["sampled_tokens"]),
                depth=None if depth is None else int(depth),
                hits=hits,
                needs=needs,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CurveError(f"not a sampled curve: {type(error).__name__} {error}") from None
        counts = (made.entries, made.calls, made.prompt_tokens, made.looked_up, made.sampled)
        values = (*counts, *hits.values(), *needs.values())
        if (
            not 1 <= made.chunk <= 1 << 30
            or not 1e-12 <= made.rate <= 1
            or made.largest < 1
            or (made.depth is not None and made.depth < 1)
            or not all(0 <= b < _BUCKETS for b in (*hits, *needs))
            or not all(0 <= value < 1e18 for value in values)
        ):
            raise CurveError("not a sampled curve: its numbers are out of range")
        return made

    @classmethod
    def merged(cls, parts: Sequence["SampledCounts"]) -> "SampledCounts":
        """Caches of one size each, side by side: what they find together, as a function of the size of one."""
        largest = max(parts, key=lambda part: part.tokens)
        if any(part.chunk != largest.chunk for part in parts):
            raise CurveError("curves over chunks of different sizes cannot be added up")
        hits, needs = Counter[int](), Counter[int]()
        for part in parts:
            hits.update(part.hits)  # type: ignore[arg-type]  # a Counter adds up what it is given, floats too
            needs.update(part.needs)  # type: ignore[arg-type]
        return replace(
            largest,
            calls=sum(part.calls for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            largest=max(part.largest for part in parts),
            looked_up=sum(part.looked_up for part in parts),
            sampled=sum(part.sampled for part in parts),
            hits=hits,
            needs=needs,
        )


class _Running(NamedTuple):
    """A call that is not over."""

    namespace: str
    keys: Keys  # sampled chunks of its prompt
    begun: int  # times of its uses: [begun, ended)
    ended: int


class SampledCurve:
    """Prompt tokens by stack distance, one call after the other, from at most `samples` chunks.

    `depth`: tokens of stack to keep (None: all). What lies deeper is forgotten, and counts as never found when it comes
    again; without a depth the rate of a process that runs for ever falls for ever.
    """

    def __init__(self, chunk: int, samples: int, depth: int | None = None) -> None:
        if chunk < 1 or samples < 1 or (depth is not None and depth < chunk):
            raise ValueError(f"chunk {chunk}, samples {samples}, depth {depth}: each at least 1 (depth: one chunk)")
        self.samples = samples
        self.depth = depth
        self._hash = ChunkKeys(chunk)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.calls = self.prompt_tokens = self.largest = 0
        self._looked_up = 0
        self._sampled = 0.0
        self._limit = _ALL  # keys up to it are sampled
        self._hits = np.zeros(_BUCKETS)
        self._needs = np.zeros(_BUCKETS)
        self._clock = 0
        self._used: dict[int, int] = {}  # key -> time of its last use
        self._keys: Keys = np.empty(0, dtype=np.uint64)  # the stack, the top last
        self._times: Ids = np.empty(0, dtype=np.int64)  # their last uses, growing
        self._running: dict[object, _Running] = {}

    def __len__(self) -> int:
        return len(self._used)

    @property
    def rate(self) -> float:
        """Share of all chunks that are sampled."""
        return (self._limit + 1) / (_ALL + 1)

    def call(self, prompt: Ids, output: Ids | None = None, namespace: str = "") -> None:
        """The next call, over before another begins; ids int64."""
        self.start(None, prompt, namespace)
        self.finish(None, None if output is None or not len(output) else np.concatenate((prompt, output)))

    def start(self, key: object, prompt: Ids, namespace: str = "") -> None:
        """The next call begins; its last prompt token is never found (as in SGLang). What it uses is locked now."""
        chunk, tokens = self._hash.chunk, len(prompt)
        keys = self._hash(prompt, namespace)
        limit = max(tokens - 1, 0) // chunk  # chunks that can be found
        self.calls += 1
        self.prompt_tokens += tokens
        self.largest = max(self.largest, tokens)
        self._looked_up += limit * chunk
        picked = np.flatnonzero(keys <= np.uint64(self._limit))
        wanted = keys[picked]
        before = self._before(wanted)
        self._measure(before[: int(np.searchsorted(picked, limit))])
        begun = self._clock
        self._use(wanted, before)
        self._running[key] = _Running(namespace, wanted, begun, self._clock)

    def finish(self, key: object, whole: Ids | None = None) -> None:
        """The call ends, with prompt and output; its last output token has no KV (as in SGLang).

        Without `whole` its output is not known: it is first met, and not found, in the prompt that continues it.
        """
        running = self._running.pop(key)
        keys = running.keys
        if whole is not None:
            self.largest = max(self.largest, len(whole))
            keys = self._hash(whole[:-1], running.namespace)
        keys = keys[keys <= np.uint64(self._limit)]
        self._use(keys, self._before(keys))

    def is_running(self, key: object) -> bool:
        """Whether the call began and is not over."""
        return key in self._running

    def _before(self, keys: Keys) -> Ids:
        """When the chunks were last used; -1: never, or forgotten."""
        get = self._used.get
        return np.array([get(key, -1) for key in keys.tolist()], dtype=np.int64)

    def _measure(self, before: Ids) -> None:
        """Distances of the sampled chunks that were looked up, by the time of their last use (-1: none)."""
        rate, chunk = self.rate, self._hash.chunk
        self._sampled += len(before) * chunk / rate
        known = before[before >= 0]
        if not len(known):
            return
        above = self._above(known)
        # k sampled chunks above: it stands for 1 / R of them, between k / R and (k + 1) / R
        np.add.at(self._hits, _buckets((above + 0.5) / rate), chunk / rate)
        self._needs[_buckets((above[-1:] + 0.5) / rate)] += 1

    def _above(self, times: Ids) -> Ids:
        """Sampled chunks above those with these last uses: running calls lie on top (see working_set.py)."""
        find, stack = np.searchsorted, self._times
        after = len(stack) - find(stack, times, side="right")
        if not self._running:
            return after
        begun = np.array([call.begun for call in self._running.values()], dtype=np.int64)  # in the order of starts
        ends = np.array([call.ended for call in self._running.values()], dtype=np.int64)
        low, high = find(stack, begun), find(stack, ends)
        below = np.concatenate(([0], np.cumsum(high - low)))  # chunks of running calls, before each of them
        at = find(begun, times, side="right")
        mine = at - 1
        running = (mine >= 0) & (times < ends[mine])
        on_top = high[mine] - find(stack, times, side="right") + below[-1] - below[at]
        return np.where(running, on_top, after + below[at])

    def _use(self, keys: Keys, before: Ids) -> None:
        """Put the chunks on top of the stack, the first of the prompt last."""
        known = before[before >= 0]
        if len(set(keys.tolist())) < len(keys):  # two chunks of one prompt with one key: keep the first
            keys = keys[np.sort(np.unique(keys, return_index=True)[1])]
            known = np.unique(known)
        if len(known):
            at = np.searchsorted(self._times, known)
            self._keys, self._times = np.delete(self._keys, at), np.delete(self._times, at)
        times = np.arange(self._clock, self._clock + len(keys), dtype=np.int64)
        self._clock += len(keys)
        keys = keys[::-1]
        self._used.update(zip(keys.tolist(), times.tolist()))
        self._keys, self._times = np.concatenate((self._keys, keys)), np.concatenate((self._times, times))
        if len(self._keys) > self.samples:
            self._lower()
        if self.depth is not None and (over := len(self._keys) - int(self.depth * self.rate / self._hash.chunk)) > 0:
            self._forget(self._keys[:over])
            self._keys, self._times = self._keys[over:], self._times[over:]

    def _lower(self) -> None:
        """Lower the threshold until the sample has room again."""
        keep = self.samples - self.samples // _ROOM
        self._limit = int(np.partition(self._keys, keep)[keep]) - 1
        below = self._keys <= np.uint64(self._limit)
        self._forget(self._keys[~below])
        self._keys, self._times = self._keys[below], self._times[below]

    def _forget(self, keys: Keys) -> None:
        for key in keys.tolist():
            del self._used[key]

    def counts(self) -> SampledCounts:
        """What was counted so far."""
        return SampledCounts(
            self._hash.chunk,
            self.rate,
            len(self),
            self.calls,
            self.prompt_tokens,
            self.largest,
            self._looked_up,
            self._sampled,
            self.depth,
            *({int(b): float(values[b]) for b in np.flatnonzero(values)} for values in (self._hits, self._needs)),
        )
