"""`python -m benchmarks warmup`: what it prints and writes, how it goes on after a stop, bad input in one line."""

import json
from pathlib import Path

import pytest

from tests.unit.commands import ran

SMALL = ["warmup", "--workload", "pipeline", "--sessions", "3", "--points", "1:1.3"]


def test_a_table_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    status, out, err = ran(capsys, *SMALL, "--seeds", "2", "--json", str(target))
    assert status == 0 and "[6/6]" in err
    assert "mean over 2 seed(s)" in out and "against warmup off" in out
    document = json.loads(target.read_text())
    assert document["complete"] and document["kind"] == "warmup"
    by_mode = {(p["mode"], p["seed"]): p for p in document["points"]}
    assert set(by_mode) == {(mode, seed) for mode in ("off", "on", "ungated") for seed in (1, 2)}
    for seed in (1, 2):
        off, on = by_mode["off", seed], by_mode["on", seed]
        assert off["warmup"] is None and on["warmup"]["useful_tokens"] > 0
        assert off["prompt_tokens"] == on["prompt_tokens"]
        assert on["ttft_ms"]["mean"] < off["ttft_ms"]["mean"]
    again = ran(capsys, *SMALL, "--seeds", "2", "--json", str(target))
    assert again[0] == 0 and "6 of 6 points are in" in again[2] and again[1] == out


def test_off_alone_has_nothing_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, *SMALL, "--modes", "on")
    assert status == 0 and "against" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--points", "1"], "--points: CONCURRENCY:CAPACITY in F"),
        (["--points", "0:2"], "--points: CONCURRENCY:CAPACITY in F"),
        (["--points", "1:nan"], "--points: CONCURRENCY:CAPACITY in F"),
        (["--points", ","], "--points names none"),
        (["--modes", "off,maybe"], "--modes: some of off, on, ungated"),
        (["--workload", "nothing"], "unknown workload 'nothing'"),
        (["--workload", ","], "--workload names none"),
        (["--seeds", "0"], "--seeds must be in 1..1000, not 0"),
        (["--jobs", "0"], "--jobs must be in 1..4096, not 0"),
        (["--sessions", "0"], "--sessions must be in 1.."),
        (["--policy", "nope"], "invalid choice: 'nope'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, *SMALL, *words)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
