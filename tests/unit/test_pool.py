"""Work in several processes: results as they come, and a worker that is killed ends it in one line."""

import os
import signal
from typing import Any

import pytest

from benchmarks import measuring
from benchmarks.__main__ import main
from benchmarks.pool import WorkerLost, spread


def double(point: int) -> int:
    if point < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * point


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_point_comes_once(jobs: int) -> None:
    assert sorted(spread([3, 1, 2], double, jobs=jobs)) == [(1, 2), (2, 4), (3, 6)]


def test_a_worker_that_is_killed_is_told_as_such() -> None:
    with pytest.raises(WorkerLost, match="killed"):
        list(spread([1, -1, 2, 3], double, jobs=2))


def test_a_command_whose_worker_is_killed_says_so_in_one_line(monkeypatch: Any, capsys: Any) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        return spread([-1, -1], double, jobs=2)

    monkeypatch.setattr(measuring, "spread", lost)
    status = main(["simulate", "--workload", "selector", "--policies", "lru", "--capacity", "2F", "--concurrency", "1"])
    said = capsys.readouterr().err
    assert status == 1
    assert "Traceback" not in said and "a worker process was killed" in said.strip().splitlines()[-1]
