"""`micro`: the figures are there and have the right form; how fast this machine is, is no test."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import micro
from benchmarks.__main__ import main
from benchmarks.results import read

RUN = ["micro", "--leaves", "500", "--repeats", "1"]


def test_every_operation_of_the_core_is_measured_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.json"
    assert main([*RUN, "--no-engine", "--json", str(out)]) == 0
    document = read(out)
    assert document["complete"] and document["kind"] == "micro"
    found = {(p["op"], p["policy"]) for p in document["points"]}
    assert found == {
        (op, policy)
        for op in ("observe", "observe_node", "score", "evict", "part")
        for policy in ("lru", "cachescout", "scout")
    }
    for p in document["points"]:
        assert {"op", "core", "policy", "leaves", "classes", "us"} <= set(p) and p["us"] >= 0
        assert p["core"] == "none" and p["classes"] >= 1
    assert {p["leaves"] for p in document["points"] if p["op"] in ("score", "evict")} == {500}
    printed = capsys.readouterr().out
    assert "state" in printed and "not asked for" in printed and "time:" in printed


def test_it_works_without_sglang_and_says_what_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(micro.importlib.util, "find_spec", lambda name: None)
    assert main([*RUN, "--policies", "lru"]) == 0
    assert "sglang is not installed" in capsys.readouterr().out


def test_figures_of_two_runs_are_never_mixed(tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    for policies in ("lru", "scout"):
        assert main([*RUN, "--no-engine", "--policies", policies, "--json", str(out)]) == 0
        assert {p["policy"] for p in read(out)["points"]} == {policies}
    out.write_text(json.dumps({"kind": "simulate", "points": []}))
    assert main([*RUN, "--no-engine", "--json", str(out)]) == 2
    assert read(out)["kind"] == "simulate"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--leaves", "10"], "--leaves"),
        (["--leaves", "a"], "--leaves"),
        (["--policies", "nonsense"], "unknown policy 'nonsense'"),
        (["--policies", ","], "--policies names none"),
        (["--repeats", "0"], "--repeats"),
        (["--per-class", "0,1"], "--per-class"),
        (["--per-class", "1,many"], "--per-class"),
        (["--json", "/proc/x"], "/proc/x"),
        (["--json", "/dev/full"], "not a regular file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["micro", "--no-engine", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_an_eviction_call_loses_as_many_leaves_as_it_says() -> None:
    populated = micro.Populated("scout", 600)
    assert len(populated.runtime.index) == 600
    us = micro._evict_us(populated, 1)
    assert us > 0 and len(populated.runtime.index) == 600 - micro.VICTIMS


def test_deep_bytes_counts_each_object_once_and_no_code() -> None:
    shared = list(range(1000, 2000))
    alone = micro.deep_bytes([shared], [])
    assert alone > sys.getsizeof(shared)
    assert micro.deep_bytes([shared, shared], []) == alone
    assert micro.deep_bytes([[shared]], [shared]) == sys.getsizeof([None])
    assert micro.deep_bytes([micro, micro.deep_bytes, dict], []) == 0


def test_learned_state_does_not_grow_with_sessions() -> None:
    few, many = micro.Populated("scout", 1200), micro.Populated("scout", 6000)
    sizes = [micro.deep_bytes([p.runtime.world.transitions], []) for p in (few, many)]
    assert sizes[0] == sizes[1]
    point = micro.state_point("cachescout")
    assert point["bytes"] == point["policy_bytes"] <= point["limit"] == 25 * 1024


def test_the_table_gives_ratios_to_the_stock_cores() -> None:
    def p(core: str, policy: str, us: float) -> dict[str, object]:
        return {"op": "evict", "core": core, "policy": policy, "leaves": 1000, "classes": 1, "us": us, "per_class": 1}

    text = micro.render({"points": [p("python", "lru", 100.0), p("rust", "lru", 10.0), p("python", "scout", 50.0)]})
    assert text.splitlines()[-1].split()[-3:] == ["0.50x", "5.00x", "1.00x"]


@pytest.mark.slow  # +1 min
def test_stock_cores_and_the_plug_ins_core_are_measured(tmp_path: Path) -> None:
    if importlib.util.find_spec("sglang") is None:  # not imported: here it may lack the CPU engine's variable
        pytest.skip("SGLang is not installed")
    import subprocess

    out = tmp_path / "m.json"
    words = [*RUN, "--policies", "lru,cachescout,scout", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        timeout=600,
    )
    assert done.returncode == 0
    found = {(p["op"], p["core"], p["policy"]) for p in read(out)["points"] if p["core"] != "none"}
    pairs = [(core, policy) for core in ("python", "rust") for policy in ("lru", "cachescout", "scout")]
    ops = ("evict", "evict again", "match", "lock", "insert")
    assert found == {(op, *pair) for op in ops for pair in pairs}
    for held in read(out)["node_bytes"]:
        assert held["nodes"] > 100 and held["index"] > 0 and (held["tokens"] > 0) == (held["core"] == "rust")
