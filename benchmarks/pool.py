"""Long work that can be stopped: what the signals do, and processes that never outlive the one that started them."""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any, TypeVar

P = TypeVar("P")
R = TypeVar("R")
STOPS = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """A signal came: what was measured is saved, the exit status is `status`."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class WorkerLost(RuntimeError):
    """A worker process was killed from outside."""


def status_of(stop: BaseException) -> int:
    """The exit status that a KeyboardInterrupt or Stopped deserves."""
    return stop.status if isinstance(stop, Stopped) else 130


def stop_signals() -> list[signal.Signals]:
    """Signals that should stop the work; not one that the caller had ignored, as nohup does."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Stopped in the main thread, as Ctrl-C raises KeyboardInterrupt."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def spread(points: Sequence[P], work: Callable[..., R], *more: Any, jobs: int) -> Iterator[tuple[P, R]]:
    """(point, work(point, *more)) as they come, in this process or in several; WorkerLost when one is killed."""
    if jobs == 1 or len(points) < 2:
        for point in points:
            yield point, work(point, *more)
        return
    pool = ProcessPoolExecutor(min(jobs, len(points)), initializer=_deaf)
    try:
        futures: dict[Future[R], P] = {pool.submit(work, point, *more): point for point in points}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    except BrokenProcessPool as error:
        lost = "a worker process was killed, perhaps for want of memory; run it again: it goes on from what is saved"
        raise WorkerLost(lost) from error
    finally:
        _end(pool)


def _end(pool: ProcessPoolExecutor) -> None:
    """Kill the workers: points are pure, so nothing is lost, and a second Ctrl-C finds nothing to wait for."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *STOPS)}
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)
    for number, old in before.items():
        signal.signal(number, old)


def _deaf() -> None:
    """Signals are the parent's to handle, which ends its workers; and when it is killed, they go with it."""
    for number in (signal.SIGINT, *STOPS):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
