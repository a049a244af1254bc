"""One point on a running server: check it, warm it up, play, and keep every result on disk on the way."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.client import Client, ServerGone, ServerInfo
from benchmarks.learned import learned
from benchmarks.playback import Journal, Played, figures, play
from benchmarks.pool import Stopped, stop_signals
from benchmarks.results import Results, UsageError, progress
from benchmarks.sources import Source

T = TypeVar("T")
SAVE_EVERY_S = 5.0
IDENTITY = ("workload", "trace", "policy", "policy_config", "capacity_tokens", "concurrency")


class PointResults(Results):
    """A result file whose last point may be `partial`: a stop leaves it, the next run of the command replaces it."""

    def __init__(self, name: str, argv: Sequence[str], path: str | os.PathLike[str] | None, **extra: Any) -> None:
        """See Results. Partial points of an earlier run are dropped; their calls are in the journals."""
        self.resumes = path is not None and Path(path).exists()
        super().__init__(name, argv, path, identity=IDENTITY, **extra)
        self.points[:] = [p for p in self.points if not p.get("partial")]
        self._done = {self._key(p) for p in self.points}

    def show(self, point: Mapping[str, Any]) -> None:
        """Keep the point as it stands now, marked partial."""
        self._drop(point)
        self.points.append({**point, "partial": True})
        self.save()

    def add(self, point: Mapping[str, Any]) -> None:
        """Keep the finished point."""
        self._drop(point)
        super().add(point)

    def find(self, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """The point with this one's identity."""
        return next((p for p in self.points if self._key(p) == self._key(point)), None)

    def journal_path(self, point: Mapping[str, Any]) -> Path | None:
        """Where the calls of the point are kept."""
        if self.path is None:
            return None
        out = Path(self.path)
        name = f"{out.stem}.{point['policy']}-{point['capacity_tokens']}-c{point['concurrency']}.calls.jsonl"
        return out.with_name(name)

    def _drop(self, point: Mapping[str, Any]) -> None:
        key = self._key(point)
        self.points[:] = [p for p in self.points if self._key(p) != key]


@dataclass(frozen=True)
class Options:
    """How a source is played."""

    concurrency: int
    time_scale: float = 1.0
    tags: frozenset[str] = frozenset({"agent", "session"})
    seed: int | None = None
    silence_timeout_s: float = 300.0
    api_key: str | None = None
    quiet: bool = False  # no progress bar


def identity(source: Source, info: ServerInfo, options: Options) -> dict[str, Any]:
    """The part of a point that says what was measured."""
    return {
        **source.label,
        "policy": info.policy,
        "policy_config": info.policy_config,
        "capacity_tokens": info.capacity_tokens,
        "capacity_F": round(info.capacity_tokens / source.largest, 3) if source.largest else None,
        "concurrency": options.concurrency,
        "time_scale": options.time_scale,
        "tags": ",".join(sorted(options.tags)) or "none",
    }


async def model_of(url: str, options: Options) -> str:
    """Path or name of the model that the server runs; UsageError when it cannot be reached."""
    async with Client(url, api_key=options.api_key, silence_timeout_s=options.silence_timeout_s) as client:
        try:
            return (await client.info()).model_path
        except ServerGone as error:
            raise UsageError(str(error)) from None


async def measure(
    url: str, source: Source, options: Options, results: PointResults, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Play the source on the server at `url`; returns the point, which is in `results` then, `extra` included.

    UsageError when the server cannot be reached, ServerGone when it goes away.
    """
    async with Client(url, api_key=options.api_key, silence_timeout_s=options.silence_timeout_s) as client:
        try:
            info = await client.info()
        except ServerGone as error:
            raise UsageError(str(error)) from None
        named = identity(source, info, options)
        if results.has(named):
            known = results.find(named) or {}
            progress(
                f"{info.policy}, {info.capacity_tokens} tokens, C={options.concurrency}: already in {results.path}"
            )
            return known
        path = results.journal_path(named)
        if path is not None and not results.resumes:
            path.unlink(missing_ok=True)  # of a result file that is gone
        key = {
            **named,
            "seed": options.seed,
            "calls": source.calls,
            "largest": source.largest,
            "model": info.model_path,
        }
        results.save()  # a journal without its result file would count for nothing
        journal = Journal(path, {**key, "sglang": info.version})
        had = len(journal.progress.ended)
        if had:
            progress(f"going on at session {had + 1} of {source.sessions}: the others are in {path} (cache is cold)")
        try:
            await client.warm_up()
            await _play(client, source, options, results, journal, named)
            after = await client.info()
        finally:
            journal.close()
        point = {**named, **figures(journal.progress), "server": after.record(), **(extra or {})}
        if after.scout:
            point["scout"] = list(after.scout)
            point["learned"] = learned(after.scout, journal.progress.calls, source.agents)
        results.add(point)
        return results.points[-1]


async def _play(
    client: Client,
    source: Source,
    options: Options,
    results: PointResults,
    journal: Journal,
    named: Mapping[str, Any],
) -> None:
    bar = _bar(f"{named['policy']} {named['capacity_tokens']} C={options.concurrency}", source.calls, options.quiet)
    kept = journal.progress
    bar.update(len(kept.calls))
    totals = [sum(c.prompt for c in kept.calls), sum(c.cached for c in kept.calls)]
    saved = time.monotonic()

    def on_call(call: Played) -> None:
        nonlocal saved
        totals[0] += call.prompt
        totals[1] += call.cached
        bar.set_postfix_str(f"hit {100 * totals[1] / max(totals[0], 1):.1f} %", refresh=False)
        bar.update()
        if time.monotonic() - saved > SAVE_EVERY_S:
            saved = time.monotonic()
            results.show({**named, **figures(kept)})

    try:
        await play(
            client,
            source.open(),
            journal,
            concurrency=options.concurrency,
            time_scale=options.time_scale,
            tags=options.tags,
            on_call=on_call,
        )
    except BaseException:
        results.show({**named, **figures(kept)})
        raise
    finally:
        bar.close()


class _NoBar:
    def update(self, n: int = 1) -> None: ...
    def close(self) -> None: ...
    def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...


def _bar(text: str, total: int, quiet: bool) -> Any:
    if quiet:
        return _NoBar()
    from tqdm import tqdm

    # A log file gets a line now and then, not a redrawn bar.
    tty = sys.stderr.isatty()
    return tqdm(total=total, desc=text, unit="call", file=sys.stderr, mininterval=0.2 if tty else 15, ncols=100)


def run_stoppable(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """asyncio.run that SIGTERM and SIGHUP stop as Ctrl-C does: the work is cancelled and cleans up, then Stopped."""
    received: list[int] = []

    async def main() -> T:
        task = asyncio.ensure_future(work())

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in before:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await task

    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise Stopped(*received[:1]) from None
    finally:
        for number, old in before.items():
            signal.signal(number, old)
