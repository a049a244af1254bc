"""`python -m benchmarks host`: what it prints and writes, how it goes on after a stop, bad input in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host
from radix_policy.admission import MODES
from tests.unit.commands import ran

SMALL = ["host", "--workload", "swe", "--sessions", "10", "--concurrency", "6", "--policies", "lru"]


def test_a_table_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "host.json"
    status, out, err = ran(capsys, *SMALL, "--sizes", "0.7,3,400000t", "--json", str(target))
    assert status == 0 and "[12/12]" in err
    assert "A=6, lru: working set" in out
    document = json.loads(target.read_text())
    assert document["kind"] == "host" and document["complete"] and len(document["points"]) == 12
    points: dict[Any, dict[str, Any]] = {(p["size"], p["mode"]): p for p in document["points"]}
    for point in points.values():
        assert point["computed_prefill_tokens"] == point["prompt_tokens"] - point["cached_tokens"] > 0
        assert {"written_tokens", "restored_tokens", "declined_requests", "makespan_s"} <= set(point)
    assert {p["host_tokens"] for p in points.values() if p["size"] == "400000t"} == {400000}
    for mode in ("conditioned", "measured"):
        assert points["3", mode]["computed_prefill_tokens"] == points["3", "none"]["computed_prefill_tokens"]
    assert points["3", "fixed"]["computed_prefill_tokens"] > points["3", "none"]["computed_prefill_tokens"]
    assert ran(capsys, "report", str(target))[0] == 0
    assert (tmp_path / "host-report" / "report.html").is_file()


def test_kappa_and_theta_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--modes", "fixed", "--sizes", "0.7", "--kappa", "2,16", "--theta", "0.5,0.95"]
    status, out, err = ran(capsys, *words)
    assert status == 0 and "[4/4]" in err and "kappa" in out and "theta" in out


def test_a_stopped_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, measure, done = tmp_path / "host.json", host.measure, []

    def stops(point: host.Point, settings: host.Settings) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(point)
        return measure(point, settings)

    monkeypatch.setattr(host, "measure", stops)
    words = [*SMALL, "--sizes", "0.7", "--json", str(target)]
    status, out, err = ran(capsys, *words)
    assert status == 130 and out == "" and "2 of 4 points done" in err
    monkeypatch.undo()
    status, out, err = ran(capsys, *words)
    assert status == 0 and "2 of 4 points are in" in err
    assert [p["mode"] for p in json.loads(target.read_text())["points"]] == list(MODES)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--sizes", "0"], "--sizes"),
        (["--sizes", "-1"], "--sizes"),
        (["--sizes", "nan"], "--sizes"),
        (["--sizes", "inf"], "--sizes"),
        (["--sizes", "2F"], "--sizes"),
        (["--sizes", ","], "--sizes"),
        (["--device", "0.001"], "--device"),
        (["--device", "x"], "--device"),
        (["--modes", "maybe"], "--modes"),
        (["--policies", "opt"], "--policies"),
        (["--policies", "nobody"], "unknown policy"),
        (["--concurrency", "1"], "--concurrency"),
        (["--concurrency", "0x10"], "--concurrency"),
        (["--kappa", "-1"], "--kappa"),
        (["--theta", "1.5"], "--theta"),
        (["--theta", "nan"], "--theta"),
        (["--admission-chunk", "1e3"], "--admission-chunk"),
        (["--sessions", "0"], "--sessions"),
        (["--page-size", "0"], "--page-size"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    status, out, err = ran(capsys, *SMALL, *words)
    assert status == 2 and out == "" and named in err and len(err.splitlines()) == 1


def test_no_such_trace(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = ran(capsys, "host", "--trace", "/nowhere/a.jsonl.gz")
    assert status == 2 and "no such file" in err and len(err.splitlines()) == 1
