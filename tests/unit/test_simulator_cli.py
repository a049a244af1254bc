"""`python -m benchmarks simulate`: what it prints and writes, how it goes on after a stop, bad input in one line."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results, simulate
from benchmarks.study_plan import CEILING_WHOLE, PARTS, Plan
from tests.unit.commands import ran

SMALL = ["simulate", "--workload", "selector", "--sessions", "4", "--seed", "7"]


def test_a_table_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out.json"
    words = [*SMALL, "--policies", "lru,scout,opt", "--capacity", "2F,4F", "--concurrency", "1,4"]
    status, out, err = ran(capsys, *words, "--json", str(target))
    assert status == 0
    assert "selector: hit rate" in out and "share of the gap" in out
    assert len(err.splitlines()) == 12 and "[12/12]" in err
    document = json.loads(target.read_text())
    assert document["complete"] and document["kind"] == "simulate" and document["seed"] == 7
    assert document["command"].startswith("python -m benchmarks simulate --workload selector")
    assert "--json" not in document["command"]
    assert {"versions", "machine", "date", "settings"} <= set(document)
    assert len(document["points"]) == 12
    needed = {"workload", "policy", "capacity_tokens", "concurrency", "prompt_tokens", "cached_tokens", "hit_rate"}
    for point in document["points"]:
        assert needed <= set(point)
        assert point["hit_rate"] == pytest.approx(point["cached_tokens"] / point["prompt_tokens"])
    orders = {(p["capacity_tokens"], p["concurrency"], p["order"]) for p in document["points"]}
    assert len(orders) == 4, "every policy of a point sees one order"


def test_every_policy_that_the_study_names_can_be_asked_for() -> None:
    names = sorted({point.policy for part in PARTS for point in Plan().points(part)})
    assert {"scout-guard", "scout:guard_budget=6", CEILING_WHOLE} <= set(names)
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    _, points = simulate.plan(parser.parse_args([*SMALL, "--policies", ",".join(names)]))
    assert [point.policy for point in points] == names


def test_an_order_that_differs_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measure = simulate.measure
    monkeypatch.setattr(simulate, "measure", lambda p, s: {**measure(p, s), "order": p.policy})
    status, out, err = ran(capsys, *SMALL, "--policies", "lru,fifo")
    assert (status, out) == (1, "") and "did not see the same order" in err
    monkeypatch.undo()
    assert ran(capsys, *SMALL, "--policies", "lru,ttl-pin")[0] == 0, "hard pins delay requests"


def test_a_stopped_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    words = [*SMALL, "--policies", "lru,fifo,lfu,slru", "--json", str(target)]
    measured: list[str] = []
    measure = simulate.measure

    def stops(point: simulate.Point, settings: simulate.Settings) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point.policy)
        return measure(point, settings)

    monkeypatch.setattr(simulate, "measure", stops)
    status, out, err = ran(capsys, *words)
    assert (status, out) == (130, "")
    assert "stopped: 2 of 4 points done" in err
    half = json.loads(target.read_text())
    assert [p["policy"] for p in half["points"]] == ["lru", "fifo"] and not half["complete"]

    again: list[str] = []
    monkeypatch.setattr(simulate, "measure", lambda p, s: again.append(p.policy) or measure(p, s))
    status, _, err = ran(capsys, *words, "--jobs", "1")
    assert status == 0 and "2 of 4 points are in" in err
    assert again == ["lfu", "slru"]
    whole = json.loads(target.read_text())
    assert [p["policy"] for p in whole["points"]] == ["lru", "fifo", "lfu", "slru"] and whole["complete"]


def test_another_command_does_not_overwrite(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    assert ran(capsys, *SMALL, "--policies", "lru", "--json", str(target))[0] == 0
    before = target.read_text()
    status, _, err = ran(capsys, *SMALL, "--policies", "fifo", "--json", str(target))
    assert status == 2 and "results of another command" in err and len(err.splitlines()) == 1
    assert target.read_text() == before


def test_points_of_other_versions_are_kept_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    words = [*SMALL, "--policies", "lru,fifo", "--json", str(target)]
    monkeypatch.setattr(results, "versions", lambda: {"commit": "first"})
    assert ran(capsys, *words)[0] == 0
    document = json.loads(target.read_text())
    target.write_text(json.dumps({**document, "points": document["points"][:1]}))
    for commit in ("second", "second", "third"):
        monkeypatch.setattr(results, "versions", lambda commit=commit: {"commit": commit})
        status, _, err = ran(capsys, *words)
        assert status == 0
    assert f"{target}: keeps 1 points that were measured at commit second on " in err
    found = json.loads(target.read_text())
    assert found["versions"] == {"commit": "third"} and len(found["points"]) == 2
    assert [(e["versions"]["commit"], e["points"]) for e in found["earlier"]] == [("first", 1), ("second", 1)]
    assert found["earlier"][0]["date"] == document["date"]


def trace(path: Path, *rows: dict[str, Any], text: str | None = None) -> Path:
    call = {"session": 0, "step": 0, "agent": "a", "t": None, "blocks_rle": [[1, 3]], "block_size": 4}
    call |= {"input_len": 10, "output_len": 3}
    path.parent.mkdir(exist_ok=True)
    path.write_text(text or "".join(json.dumps(call | row) + "\n" for row in rows))
    return path


def test_a_trace_is_known_by_its_content(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target, path = tmp_path / "out.json", trace(tmp_path / "a" / "x.jsonl", {}, {"step": 1})
    words = ["simulate", "--policies", "lru", "--trace", str(path)]
    for _ in range(2):
        assert ran(capsys, *words, "--json", str(target))[0] == 0
    other = trace(tmp_path / "b" / "x.jsonl", {})
    for command in (words, ["identity", "--trace", str(path)]):
        status, _, err = ran(capsys, *command, "--trace", str(other))
        assert status == 2 and "two traces of the same name" in err and len(err.splitlines()) == 1
    trace(path, {}, {"step": 2})
    status, _, err = ran(capsys, *words, "--json", str(target))
    assert status == 2 and "trace x.jsonl is not the file" in err and str(target) in err


@pytest.mark.parametrize("row", [{"output_len": 1 << 62}, {"t": 10**400}, {"session": "\ud800"}, {}])
def test_a_trace_out_of_range_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, row: dict[str, Any]
) -> None:
    path = trace(tmp_path / "x.jsonl", {}, row, text=None if row else "[" * 100_000)
    status, _, err = ran(capsys, "simulate", "--policies", "lru", "--trace", str(path))
    assert status == 2 and str(path) in err and len(err.splitlines()) == 1


def test_what_is_asked_for_twice_is_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--policies", "lru,lru", "--capacity", "4F,4F", "--workload", "selector,selector"]
    status, _, err = ran(capsys, *words)
    assert status == 0 and "[1/1]" in err


def test_two_processes_give_the_same_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        target = tmp_path / f"{jobs}.json"
        words = [*SMALL, "--policies", "lru,scout,opt", "--jobs", jobs, "--json", str(target)]
        assert ran(capsys, *words)[0] == 0
        found.append(json.loads(target.read_text())["points"])
    assert found[0] == found[1]


def test_time_to_first_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    words = [*SMALL, "--policies", "lru", "--service", "cost", "--capacity", "2F", "--json", str(target)]
    status, out, _ = ran(capsys, *words)
    assert status == 0 and "ttft" in out and "p99" in out
    times = json.loads(target.read_text())["points"][0]["ttft_ms"]
    assert 0 < times["p50"] <= times["p99"] and times["mean"] > 0


def test_pairs_of_concurrency_and_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, *SMALL, "--policies", "lru", "--points", "1:1.15F,16:9000")
    assert status == 0
    assert "C=1 1.15F" in out and "C=16 9000" in out


def test_the_frozen_grid_has_64_points() -> None:
    words = ["simulate", "--grid", "--policies", "lru", "--sessions", "2"]
    parser = __import__("benchmarks.__main__", fromlist=["Parser"]).Parser()
    simulate.add_parser(parser.add_subparsers())
    _, points = simulate.plan(parser.parse_args(words))
    assert len(points) == 64
    assert {p.concurrency for p in points} == {1, 4, 16, 64}


def test_requests_that_fit_nowhere_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, *SMALL, "--policies", "lru,opt", "--capacity", "1000")
    assert status == 0 and "larger than the capacity were not served" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "selector"], "--policies"),
        (["--policies", "lru"], "--workload"),
        (["--workload", "nothing", "--policies", "lru"], "unknown workload 'nothing'"),
        (["--workload", "selector", "--policies", "nothing"], "unknown policy 'nothing'"),
        (["--workload", "selector", "--policies", "lru:x=1"], "unknown key 'x'"),
        (["--workload", "selector", "--policies", "cachescout:tau=7"], "tau"),
        (["--workload", "selector", "--policies", ","], "--policies names none"),
        (["--workload", ",", "--policies", "lru"], "--workload names none"),
        (["--workload", "selector", "--policies", "lru", "--capacity", "0F"], "capacity"),
        (["--workload", "selector", "--policies", "lru", "--capacity", "4FF"], "capacity"),
        (["--workload", "selector", "--policies", "lru", "--capacity="], "capacity"),
        (["--workload", "selector", "--policies", "lru", "--concurrency", "²"], "--concurrency"),
        (["--workload", "selector", "--policies", "lru", "--sessions", "1000001"], "--sessions"),
        (["--workload", "selector", "--policies", "lru", "--js", "x"], "--js"),
        (["--workload", "selector", "--policies", "lru", "--json", "/dev/null"], "/dev/null: not a regular file"),
        (["--workload", "selector", "--policies", "lru", "--json", "/proc/x/y"], "/proc/x/y"),
        (["--trace", "/tmp", "--policies", "lru"], "/tmp: not a file"),
        (["--workload", "selector", "--policies", "lru", "--capacity", "many"], "capacity"),
        (["--workload", "selector", "--policies", "lru", "--capacity", "nanF"], "capacity"),
        (["--workload", "selector", "--policies", "lru", "--capacity", "infF"], "capacity"),
        (["--workload", "selector", "--policies", "lru", "--concurrency", "0"], "concurrency"),
        (["--workload", "selector", "--policies", "lru", "--concurrency", "two"], "concurrency"),
        (["--workload", "selector", "--policies", "lru", "--points", "4"], "--points"),
        (["--workload", "selector", "--policies", "lru", "--points", "4:2F", "--capacity", "2F"], "one or the other"),
        (["--workload", "selector", "--policies", "lru", "--page-size", "0"], "--page-size"),
        (["--workload", "selector", "--policies", "lru", "--sessions", "0"], "--sessions"),
        (["--workload", "selector", "--policies", "lru", "--jobs", "0"], "--jobs"),
        (["--workload", "selector", "--policies", "lru", "--half", "1"], "--half"),
        (["--workload", "selector", "--policies", "lru", "--identity", "guess"], "--identity"),
        (["--workload", "selector", "--policies", "opt", "--service", "cost"], "--service fixed"),
        (["--workload", "drift", "--policies", "informed"], "one true law"),
        (["--workload", "selector", "--trace", "x", "--policies", "lru"], "not allowed with"),
        (["--trace", "/nowhere/at/all.jsonl", "--policies", "lru"], "no such file"),
        (["--trace", __file__, "--policies", "lru"], "test_simulator_cli.py"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    status, out, err = ran(capsys, "simulate", *words)
    assert (status, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1, err


def test_a_file_that_is_no_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = "python -m benchmarks simulate --workload selector --sessions 4 --seed 7 --policies lru"
    point = {"workload": "selector", "policy": "lru", "capacity_tokens": 1, "concurrency": 4, "hit_rate": 0.5}
    point["unserved_requests"] = 0
    damaged = [None, "x", {k: v for k, v in point.items() if k != "hit_rate"}, {**point, "hit_rate": "much"}]
    documents = [{"kind": "simulate", "command": command, "points": [p]} for p in (*damaged, {**point, "policy": "z"})]
    for content in ("{", "[]", '{"points": 3}', *map(json.dumps, documents)):
        target.write_text(content)
        status, _, err = ran(capsys, *SMALL, "--policies", "lru", "--json", str(target))
        assert status == 2 and str(target) in err.splitlines()[-1] and "Traceback" not in err
        assert target.read_text() == content


def test_ctrl_c_leaves_a_valid_file(tmp_path: Path) -> None:
    """The real signal, to the real process."""
    target = tmp_path / "out.json"
    words = ["--workload", "selector", "--policies", "lru,scout,cachescout,opt,lhd", "--concurrency", "16", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "simulate", *words, str(target), "--capacity", "4F,8F,16F,32F"],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ""},
        text=True,
    )
    deadline = time.monotonic() + 60
    while not target.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and out == ""
    document = json.loads(target.read_text())
    assert document["points"] and not document["complete"]


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="looks at the workers in /proc")
@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        ([signal.SIGHUP], 129),
        ([signal.SIGKILL], -signal.SIGKILL),
    ],
)
def test_no_worker_outlives_the_command(tmp_path: Path, numbers: list[signal.Signals], status: int) -> None:
    target = tmp_path / "out.json"
    words = ["--workload", "selector", "--policies", "lru,scout,cachescout,opt,lhd", "--concurrency", "16", "--jobs"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "simulate", *words, "2", "--json", str(target), "--capacity", "4F,8F,16F"],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not target.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    _, err = process.communicate(timeout=30)
    # a second Ctrl-C may find an interpreter that has nothing left to do but die of it: 130 as well, for a shell
    assert process.returncode in (status, -signal.SIGINT if status == 130 else status) and "Traceback" not in err, err
    assert json.loads(target.read_text())["points"]
    while (left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers and not left


def test_the_dispatcher(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "--help")
    assert status == 0 and all(name in out for name in ("simulate", "replay", "compare", "micro", "report"))
    assert "host tier" in out and "warmup" in out
    status, _, err = ran(capsys, "nothing")
    assert status == 2 and len(err.splitlines()) == 1
    assert ran(capsys)[0] == 2


def test_output_that_cannot_be_written_is_no_traceback() -> None:
    command = f"{sys.executable} -m benchmarks {' '.join(SMALL)} --policies lru"
    for end in (" | true", " > /dev/full"):
        done = subprocess.run(
            ["bash", "-c", command + end + "; echo ${PIPESTATUS[0]} >&2"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        *lines, status = done.stderr.splitlines()
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr and status != "120"
        if "full" in end:
            assert status == "1" and "No space left" in lines[-1]


def test_simulate_needs_no_engine() -> None:
    code = (
        "import sys; import benchmarks.__main__, benchmarks.simulate; "
        "print([m for m in ('torch', 'sglang', 'aiohttp', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# ---- the shared result file ----


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    results.write(target, {"points": [{"a": 1}]})
    with pytest.raises(TypeError):
        results.write(target, {"points": [object()]})
    assert results.read(target) == {"points": [{"a": 1}]}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(results.UsageError):
        results.write(tmp_path / "file" / "x.json", {"points": []})


def test_options_that_change_no_figure_are_left_out() -> None:
    words = ["--json", "a b", "--jobs=2", "--seed", "1", "--report", "d", "--api-key", "secret", "--api-key=secret"]
    assert results.canonical_command("simulate", words) == "python -m benchmarks simulate --seed 1"


def test_machine_and_versions() -> None:
    assert results.machine()["cores"] >= 1
    assert {"python", "numpy"} <= set(results.versions())


def test_tables() -> None:
    text = results.table(["name", "n"], [["a", 1], ["long", 22]])
    assert text.splitlines() == ["name   n", "----  --", "a      1", "long  22"]


def test_gap_closed_is_weighted_by_the_gap() -> None:
    def point(policy: str, rate: float, capacity: int) -> dict[str, Any]:
        return {"workload": "w", "policy": policy, "hit_rate": rate, "capacity_tokens": capacity, "concurrency": 1}

    found = [point("lru", 0.5, 1), point("x", 0.6, 1), point("opt", 0.9, 1)]
    found += [point("lru", 0.8, 2), point("x", 0.8, 2), point("opt", 0.9, 2)]
    assert simulate.gap_closed(found) == {"x": pytest.approx(0.2)}
    assert simulate.gap_closed(found[:2]) == {}
