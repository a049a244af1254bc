"""The closed loop: slots play sessions against a server, and every finished call is on disk before the next one starts.

A slot takes the next session, waits the call's think time, sends it, feeds the answer back to the session, and so on;
a new session starts when the slot's previous one is over. At concurrency 1 both the order of the requests and the
requests themselves are therefore the same whatever the server's cache does, which the digests prove.
"""

import asyncio
import hashlib
import json
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.agents import LiveCall, LiveSession
from benchmarks.client import Client
from benchmarks.results import UsageError
from benchmarks.results import progress as say


@dataclass(frozen=True)
class Played:
    """One finished call. Times in milliseconds; `at`: seconds from the start (or resumption) to the call's end."""

    session: int
    call: int
    agent: str
    prompt: int
    output: int
    cached: int
    ttft_ms: float
    turn_ms: float
    at: float
    sent: str  # digest of the prompt's token ids
    got: str  # digest of the output's token ids
    device: int | None = None
    host: int | None = None
    wanted: int = 0  # output tokens asked for
    segment: int = 0


@dataclass
class Progress:
    """What has been played so far, as the journal has it."""

    calls: list[Played] = field(default_factory=list)
    ended: dict[int, str | None] = field(default_factory=dict)  # session number: why it was cut short, or None
    segments: int = 0  # times the run was started

    def drop_unfinished(self) -> None:
        """Forget the calls of sessions that did not end: a session is resumed from its beginning."""
        self.calls = [c for c in self.calls if c.session in self.ended]


class Journal:
    """Finished calls as JSON lines. `path=None` keeps nothing. A line cut by a kill is ignored when reading back."""

    def __init__(self, path: Path | None, key: Mapping[str, Any]) -> None:
        """`key`: what makes this run this run; a journal with another key is started anew."""
        self.path = path
        self.progress = Progress()
        self._file = None
        if path is None:
            return
        header = {"journal": 1, "key": dict(key)}
        try:
            kept = list(self._kept(path, header))
            path.parent.mkdir(parents=True, exist_ok=True)
            # Rewritten without the unfinished sessions: what is read back later is what this run builds on.
            self._file = path.with_suffix(".tmp").open("w", encoding="utf-8")
            for record in [header, *kept]:
                self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            path.with_suffix(".tmp").replace(path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None

    def _kept(self, path: Path, header: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        records = read_journal(path)
        if (lost := path.read_bytes().count(b"\n") - len(records)) > 0:
            aside = next(p for n in count(1) if not (p := path.with_name(f"{path.name}.damaged{n}")).exists())
            path.replace(aside)
            say(f"{path}: line {len(records) + 1} is damaged, {lost} lines are not used; kept as {aside}")
        if not records or records[0] != header:
            return
        progress = self.progress
        for record in records[1:]:
            take(record, progress)
        progress.drop_unfinished()
        for call in progress.calls:
            yield call_record(call)
        for session, reason in progress.ended.items():
            yield {"ended": session, "refused": reason}

    def start(self) -> None:
        """The run begins, or goes on after a stop."""
        self.progress.segments = max((c.segment for c in self.progress.calls), default=-1) + 1
        self._segment = self.progress.segments
        self.progress.segments += 1

    @property
    def segment(self) -> int:
        """Number of this start of the run, from 0."""
        return self._segment

    def call(self, played: Played) -> None:
        """Keep a finished call."""
        self.progress.calls.append(played)
        self._write(call_record(played))

    def end(self, session: int, refused: str | None) -> None:
        """A session is over; `refused`: the server's reason for not running its next call."""
        self.progress.ended[session] = refused
        self._write({"ended": session, "refused": refused})

    def close(self) -> None:
        """Done writing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def call_record(call: Played) -> dict[str, Any]:
    """The call as a journal line."""
    return {k: v for k, v in vars(call).items() if v is not None}


def take(record: Mapping[str, Any], progress: Progress) -> None:
    """Add one journal line to `progress`."""
    if "ended" in record:
        progress.ended[int(record["ended"])] = record.get("refused")
    elif "session" in record:
        progress.calls.append(Played(**record))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal up to the first one that is not whole."""
    records = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    for line in text.splitlines():
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                break
            take(record, Progress())
        except (ValueError, TypeError, RecursionError):
            break
        records.append(record)
    return records


def digest(ids: Sequence[int]) -> str:
    """16 hex digits of the token ids."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()


def make_tag(call: LiveCall, kinds: frozenset[str], run: str) -> tuple[dict[str, Any] | None, str | None]:
    """The tag and the top-level session id that a call carries.

    `run` keeps the sessions of two runs against one server apart.
    """
    if not call.tagged:
        return None, None
    key = f"{call.session}/{run}"
    tag: dict[str, Any] = {}
    if "agent" in kinds and call.agent:
        tag["agent"] = call.agent
    if "session" in kinds:
        tag["session"] = key
    if "final" in kinds and call.final:
        tag["final"] = True
    return tag or None, key if "session_id" in kinds else None


async def play(
    client: Client,
    sessions: Sequence[LiveSession],
    journal: Journal,
    *,
    concurrency: int,
    time_scale: float = 1.0,
    tags: frozenset[str] = frozenset({"agent", "session"}),
    on_call: Callable[[Played], None] = lambda played: None,
) -> None:
    """Play every session that the journal does not have yet; each lane has `concurrency` slots of its own.

    ServerGone when the server goes away; what was played is in the journal.
    """
    journal.start()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    run = secrets.token_hex(3)

    async def one(number: int, session: LiveSession) -> None:
        position, refused = 0, None
        while (call := session.next_call()) is not None:
            if call.input_ids is None:
                raise ValueError(f"session {session.key}: its calls are chat messages, not token ids")
            if call.gap > 0 and time_scale > 0:
                await asyncio.sleep(call.gap * time_scale)
            tag, session_id = make_tag(call, tags, run)
            reply = await client.generate(call.input_ids, call.max_new_tokens, tag=tag, session_id=session_id)
            if reply.refused is not None:
                refused = reply.refused  # later prompts of the session contain this one's answer, so it ends here
                break
            session.feed(reply.output_ids)
            played = Played(
                session=number,
                call=position,
                agent=call.agent,
                prompt=reply.prompt_tokens,
                output=len(reply.output_ids),
                cached=reply.cached_tokens,
                ttft_ms=round(reply.ttft_s * 1e3, 3),
                turn_ms=round(reply.latency_s * 1e3, 3),
                at=round(loop.time() - begin, 4),
                sent=digest(call.input_ids),
                got=digest(reply.output_ids),
                device=reply.cached_device,
                host=reply.cached_host,
                wanted=call.max_new_tokens,
                segment=journal.segment,
            )
            journal.call(played)
            on_call(played)
            position += 1
        journal.end(number, refused)

    async def slot(waiting: Iterator[tuple[int, LiveSession]]) -> None:
        for number, session in waiting:
            await one(number, session)

    lanes: dict[int, list[tuple[int, LiveSession]]] = {}
    for number, session in enumerate(sessions):
        if number not in journal.progress.ended:
            lanes.setdefault(session.lane, []).append((number, session))
    slots = []
    for lane in lanes.values():
        waiting = iter(lane)
        slots += [asyncio.ensure_future(slot(waiting)) for _ in range(concurrency)]
    try:
        await asyncio.gather(*slots)
    finally:
        for task in slots:
            task.cancel()
        await asyncio.gather(*slots, return_exceptions=True)


# ---- figures ----


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    ordered = sorted(values)
    return {
        "mean": round(sum(ordered) / len(ordered), 3),
        "p50": round(quantile(ordered, 0.5), 3),
        "p99": round(quantile(ordered, 0.99), 3),
    }


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile of a sorted, non-empty list, linear between neighbours."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


MAX_SAMPLES = 1000


def thin(values: Sequence[float], limit: int = MAX_SAMPLES) -> list[float]:
    """The values sorted, or `limit` evenly spaced quantiles of them: the distribution's shape in bounded space."""
    ordered = sorted(values)
    if len(ordered) > limit:
        ordered = [quantile(ordered, i / (limit - 1)) for i in range(limit)]
    return [round(v, 3) for v in ordered]


def figures(progress: Progress) -> dict[str, Any]:
    """The measured part of a point: tokens, hit rate, times, throughput and digests over the calls so far."""
    calls = sorted(progress.calls, key=lambda c: (c.session, c.call))
    prompt, cached = sum(c.prompt for c in calls), sum(c.cached for c in calls)
    ends: dict[int, float] = {}
    agents: dict[str, dict[str, int]] = {}
    by_session: dict[int, list[Played]] = {}
    for c in calls:
        ends[c.segment] = max(ends.get(c.segment, 0.0), c.at)
        agent = agents.setdefault(c.agent, {"calls": 0, "prompt_tokens": 0, "cached_tokens": 0})
        agent["calls"] += 1
        agent["prompt_tokens"] += c.prompt
        agent["cached_tokens"] += c.cached
        by_session.setdefault(c.session, []).append(c)
    wall = sum(ends.values())
    refusals = [r for r in progress.ended.values() if r is not None]
    return {
        "sessions": len(progress.ended),
        "calls": len(calls),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": round(cached / prompt, 6) if prompt else 0.0,
        "computed_prefill_tokens": prompt - cached,
        "output_tokens": sum(c.output for c in calls),
        **_tiers(calls),
        "ttft_ms": spread([c.ttft_ms for c in calls]),
        "turn_ms": spread([c.turn_ms for c in calls]),
        "turns_per_s": round(len(calls) / wall, 4) if wall else 0.0,
        "wall_s": round(wall, 3),
        "refused_calls": len(refusals),
        "refusals": dict(sorted((r, refusals.count(r)) for r in set(refusals))),
        "short_calls": sum(c.output < c.wanted for c in calls),
        "segments": progress.segments,
        "agents": dict(sorted(agents.items())),
        "requests_digest": _combine(f"{c.session}.{c.call}:{c.sent}" for c in calls),
        "digest": _combine(f"{c.session}.{c.call}:{c.sent}:{c.got}" for c in calls),
        "session_digests": [_combine(f"{c.call}:{c.sent}:{c.got}" for c in by_session[s]) for s in sorted(by_session)],
        "ttft_samples_ms": thin([c.ttft_ms for c in calls]),
    }


def _tiers(calls: Sequence[Played]) -> dict[str, int]:
    """Cached tokens by tier, where the engine told."""
    found = {}
    for tier in ("device", "host"):
        known = [n for c in calls if (n := getattr(c, tier)) is not None]
        if known:
            found[f"cached_{tier}_tokens"] = sum(known)
    return found


def _combine(parts: Iterator[str]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part.encode() + b"\n")
    return total.hexdigest()


def first_difference(a: Sequence[Played], b: Sequence[Played]) -> tuple[Played, str] | None:
    """The first call of `a` that is not the same in `b`, and how: `missing`, `request` or `output`."""
    other = {(c.session, c.call): c for c in b}
    for c in sorted(a, key=lambda c: (c.session, c.call)):
        d = other.get((c.session, c.call))
        if d is None:
            return c, "missing"
        if c.sent != d.sent:
            return c, "request"
        if c.got != d.got:
            return c, "output"
    return None
