"""`replay` against a fake server: the closed loop, what it reports, what a stop leaves, bad input."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from benchmarks.__main__ import main
from benchmarks.client import Client
from benchmarks.measure import Options, PointResults, measure
from benchmarks.playback import Journal, Played, Progress, figures, first_difference, quantile, spread, thin
from benchmarks.results import UsageError, read
from benchmarks.sources import from_workload, parse_capacity, parse_concurrency, parse_tags
from radix_policy.workloads import SessionScript, Workload, make, make_call
from tests.unit.fake_sglang import FakeSglang

ROOT = Path(__file__).parents[2]
SIZES = [len(script.calls) for script in make("pipeline", seed=1, sessions=3).sessions]


def replay(url: str, *more: str) -> int:
    return main(["replay", "--url", url, "--workload", "pipeline", "--time-scale", "0", "--quiet", *more])


def spawn(url: str, *more: str, command: str = "replay") -> "subprocess.Popen[str]":
    words = ["--url", url, "--workload", "pipeline", "--time-scale", "0"] if command == "replay" else []
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", command, *words, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def only_point(path: Path) -> dict[str, Any]:
    points = read(path)["points"]
    assert len(points) == 1
    return points[0]


def test_a_replay_reports_what_the_server_counted(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with FakeSglang() as fake:
        assert replay(fake.url, "--sessions", "2", "--json", str(out)) == 0
        assert fake.flushes == 1
        sent = fake.calls
    document, point = read(out), only_point(out)
    assert document["complete"] and document["seed"] == 1
    assert document["versions"]["python"] and document["machine"]["cores"] and document["date"]
    assert (point["workload"], point["policy"], point["capacity_tokens"], point["concurrency"]) == (
        "pipeline",
        "lru",
        4096,
        1,
    )
    assert point["calls"] == len(sent) == sum(SIZES[:2]) and point["sessions"] == 2
    assert point["prompt_tokens"] == sum(len(body["input_ids"]) for body in sent)
    assert 0 < point["cached_tokens"] < point["prompt_tokens"]
    assert point["cached_device_tokens"] == point["cached_tokens"] and point["cached_host_tokens"] == 0
    assert point["hit_rate"] == pytest.approx(point["cached_tokens"] / point["prompt_tokens"], abs=1e-6)
    assert point["computed_prefill_tokens"] == point["prompt_tokens"] - point["cached_tokens"]
    for name in ("ttft_ms", "turn_ms"):
        assert 0 < point[name]["p50"] <= point[name]["p99"]
    assert point["turn_ms"]["mean"] >= point["ttft_ms"]["mean"]
    assert point["turns_per_s"] == pytest.approx(point["calls"] / point["wall_s"], rel=1e-2)
    assert len(point["ttft_samples_ms"]) == len(sent)
    assert sum(a["calls"] for a in point["agents"].values()) == len(sent)
    assert point["refused_calls"] == point["short_calls"] == 0


def test_requests_are_greedy_streamed_tagged_and_contain_what_the_model_wrote() -> None:
    with FakeSglang() as fake:
        assert replay(fake.url, "--max-calls", "3") == 0
        first, second, third = fake.calls
        written = fake._output(first["input_ids"], first["sampling_params"]["max_new_tokens"])
    assert first["stream"] is True
    sampling = first["sampling_params"]
    assert sampling["temperature"] == 0 and sampling["ignore_eos"] is True
    tags = [body["sampling_params"]["custom_params"]["scout"] for body in (first, second, third)]
    assert [tag["agent"] for tag in tags] == ["planner", "researcher", "coder"]
    assert len({tag["session"] for tag in tags}) == 1
    ids = second["input_ids"]
    assert any(ids[i : i + len(written)] == written for i in range(len(ids)))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("none", (None, False)),
        ("agent", ({"agent"}, False)),
        ("session_id", (None, True)),
        ("agent,session,final", ({"agent", "session", "final"}, False)),
    ],
)
def test_tags_say_only_what_was_asked_for(tags: str, expected: tuple[set[str] | None, bool]) -> None:
    with FakeSglang() as fake:
        assert replay(fake.url, "--max-calls", "1", "--tags", tags) == 0
        (body,) = fake.calls
    params = body["sampling_params"].get("custom_params")
    assert (None if params is None else set(params["scout"]), "session_id" in body) == expected


def test_two_runs_on_one_server_never_share_a_session() -> None:
    with FakeSglang() as fake:
        for _ in range(2):
            assert replay(fake.url, "--max-calls", "1") == 0
        sessions = [
            body["sampling_params"]["custom_params"]["scout"]["session"]
            for body in fake.requests
            if "custom_params" in body["sampling_params"]
        ]
    assert len(sessions) == len(set(sessions)) == 2


def test_requests_do_not_depend_on_the_cache_at_concurrency_1(tmp_path: Path) -> None:
    digests = []
    for n, keep in enumerate((0, 3, 100)):
        out = tmp_path / f"{n}.json"
        with FakeSglang(keep=keep) as fake:
            assert replay(fake.url, "--sessions", "2", "--json", str(out)) == 0
        digests.append((only_point(out)["requests_digest"], only_point(out)["digest"], only_point(out)["hit_rate"]))
    assert len({d[:2] for d in digests}) == 1
    assert digests[0][2] == 0 < digests[1][2] < digests[2][2]
    out = tmp_path / "other.json"
    with FakeSglang(salt=1) as fake:
        assert replay(fake.url, "--sessions", "2", "--json", str(out)) == 0
    assert only_point(out)["digest"] != digests[0][1]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_slots_bound_how_many_calls_run_at_once(concurrency: int) -> None:
    with FakeSglang(delay_s=0.02) as fake:
        assert replay(fake.url, "--sessions", "4", "--max-calls", "60", "--concurrency", str(concurrency)) == 0
        assert fake.most_at_once == concurrency


def test_a_sessions_calls_wait_for_each_other_and_for_think_time() -> None:
    calls = [make_call("a", ((n * 100, 10),), ((n * 100 + 50, 2),), 0.1) for n in range(3)]
    workload = Workload("toy", (SessionScript("s", tuple(calls)),))
    results = PointResults("replay", [], None)
    source = from_workload(workload, {"workload": "toy"})
    with FakeSglang() as fake:
        point = asyncio.run(measure(fake.url, source, Options(1, time_scale=2.0, quiet=True), results))
    assert point["wall_s"] >= 0.6


def test_background_traffic_has_slots_of_its_own() -> None:
    slow = SessionScript("slow", tuple(make_call("a", ((n * 50, 9),), ((n * 50 + 20, 2),), 0.05) for n in range(8)))
    other = SessionScript("other", (make_call("", ((9000, 9),), ((9050, 2),), 0.0),), tagged=False, lane=1)
    source = from_workload(Workload("toy", (slow, other)), {"workload": "toy"})
    assert source.lanes == 2
    with FakeSglang() as fake:
        asyncio.run(measure(fake.url, source, Options(1, quiet=True), PointResults("replay", [], None)))
        tagged = ["custom_params" in body["sampling_params"] for body in fake.calls]
    assert tagged.index(False) < 7 and tagged.count(False) == 1


def test_calls_that_the_server_refuses_end_their_session_and_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    with FakeSglang(longest=1200) as fake:
        assert replay(fake.url, "--sessions", "2", "--json", str(out)) == 0
    point = only_point(out)
    assert point["refused_calls"] == 2 and point["calls"] < sum(SIZES[:2])
    assert sum(point["refusals"].values()) == 2 and "exceeds the maximum allowed length" in next(
        iter(point["refusals"])
    )
    assert "2 sessions were cut short" in capsys.readouterr().out


def test_a_server_that_refuses_everything_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeSglang(longest=100) as fake:
        assert replay(fake.url, "--sessions", "2") == 1
    out, err = capsys.readouterr()
    assert out == "" and "no call was served" in err and len(err.splitlines()) == 1


def test_incremental_streams_are_put_together() -> None:
    async def outputs(incremental: bool) -> tuple[int, ...]:
        with FakeSglang(incremental=incremental) as fake:
            async with Client(fake.url) as client:
                await client.info()
                return (await client.generate([5, 6, 7], 5)).output_ids

    assert asyncio.run(outputs(True)) == asyncio.run(outputs(False))


# ---- stops ----


def test_a_server_that_goes_away_leaves_a_partial_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with FakeSglang(die_after=12) as fake:
        assert replay(fake.url, "--sessions", "2", "--json", str(out)) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert "marked partial" in lines[-1] and fake.url in lines[-1]
    point = only_point(out)
    assert point["partial"] and point["calls"] == 10 and not read(out)["complete"]  # two were the warm-up


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_replay_goes_on_at_the_first_unfinished_session(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out.json"
    whole = tmp_path / "whole.json"
    more = ("--sessions", "3", "--json")
    with FakeSglang() as fake:
        assert replay(fake.url, *more, str(whole)) == 0
    with FakeSglang(delay_s=0.02) as fake:
        process = spawn(fake.url, *more, str(out))
        journal = tmp_path / "out.lru-4096-c1.calls.jsonl"
        until(lambda: journal.exists() and journal.read_text().count('"call"') >= SIZES[0] + 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        stopped = read(out)
        assert not stopped["complete"] and all(p["partial"] for p in stopped["points"])
        if number != signal.SIGKILL:
            assert "marked partial" in err.splitlines()[-1] and stopped["points"][0]["calls"] >= SIZES[0] + 3
        before = len(fake.requests)
        process = spawn(fake.url, *more, str(out))
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "going on at session 2 of 3" in err
        again = len(fake.requests) - before - 2
    point, reference = only_point(out), only_point(whole)
    assert point["calls"] == reference["calls"] and not point.get("partial") and point["segments"] == 2
    assert again == reference["calls"] - SIZES[0]  # the first session was not played again
    assert point["digest"] == reference["digest"]


def test_a_finished_replay_is_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with FakeSglang() as fake:
        for _ in range(2):
            assert replay(fake.url, "--max-calls", "5", "--json", str(out)) == 0
        assert len(fake.requests) == 7
        out.unlink()
        assert replay(fake.url, "--max-calls", "5", "--json", str(out)) == 0
        assert len(fake.requests) == 14


def test_a_journal_cut_in_the_middle_of_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"a": 1})
    journal.start()
    for n in range(3):
        journal.call(played(0, n))
    journal.end(0, None)
    journal.call(played(1, 0))
    journal.close()
    text = path.read_text()
    path.write_text(text[:-20])
    kept = Journal(path, {"a": 1}).progress
    assert len(kept.calls) == 3 and kept.ended == {0: None}
    assert [p.name for p in tmp_path.iterdir()] == ["j.jsonl"]
    other = Journal(path, {"a": 2}).progress
    assert not other.calls and not other.ended


# ---- figures ----


@pytest.mark.parametrize("line", ["{x", "7", "[]", '{"ended": "x"}', '{"session": 0, "what": 1}'])
def test_a_journal_damaged_in_its_middle_is_kept_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"a": 1})
    journal.start()
    for session in range(3):
        journal.call(played(session, 0))
        journal.end(session, None)
    journal.close()
    lines = path.read_text().splitlines()
    text = "\n".join([*lines[:3], line, *lines[4:], ""])
    path.write_text(text)
    assert Journal(path, {"a": 1}).progress.ended == {0: None}
    said = capsys.readouterr().err
    assert "line 4 is damaged, 4 lines" in said and said.count("\n") == 1
    assert (tmp_path / "j.jsonl.damaged1").read_text() == text


def played(session: int, call: int, **more: Any) -> Played:
    values: dict[str, Any] = {"prompt": 10, "output": 2, "cached": 4, "ttft_ms": 5.0, "turn_ms": 9.0, "at": 1.0 + call}
    return Played(session=session, call=call, agent="a", sent="s", got="g", **(values | more))


def test_figures_of_nothing_are_zero() -> None:
    empty = figures(Progress())
    assert empty["calls"] == empty["hit_rate"] == empty["turns_per_s"] == 0
    assert empty["ttft_ms"] == {"mean": None, "p50": None, "p99": None}


def test_quantiles_and_thinned_samples_keep_the_distribution() -> None:
    values = [float(v) for v in range(101)]
    assert quantile(values, 0.5) == 50 and quantile(values, 0.99) == 99
    assert spread([4.0, 1.0, 1.0]) == {"mean": 2.0, "p50": 1.0, "p99": pytest.approx(3.94)}
    few = thin(list(reversed(values * 30)), 11)
    assert few == sorted(few) and len(few) == 11 and few[0] == 0 and few[-1] == 100
    assert few[5] == pytest.approx(50, abs=1)


def test_time_of_a_resumed_run_is_the_sum_of_its_parts() -> None:
    progress = Progress(
        [played(0, 0, at=3.0), played(0, 1, at=4.0), played(1, 0, at=2.0, segment=1)], {0: None, 1: None}
    )
    assert figures(progress)["wall_s"] == 6.0


def test_the_first_difference_names_the_call() -> None:
    a = [played(0, 0), played(0, 1), played(1, 0)]
    assert first_difference(a, list(a)) is None
    for changed, how in (("got", "output"), ("sent", "request")):
        found = first_difference(
            a, [a[0], played(0, 1, **{changed: "x"}) if changed == "none" else _with(a[1], changed)]
        )
        assert found is not None and (found[0].call, found[1]) == (1, how)
    found = first_difference(a, a[:2])
    assert found is not None and (found[0].session, found[1]) == (1, "missing")


def _with(call: Played, name: str) -> Played:
    return Played(**{**vars(call), name: "other"})


# ---- options ----


def test_capacities_are_tokens_or_multiples_of_the_largest_request() -> None:
    assert [parse_capacity(t, 1000) for t in ("4096", "2F", "1.15F", " 4f ")] == [4096, 2000, 1150, 4000]
    for bad in ("", "F", "0", "-1", "2G", "nanF", "infF", "1e99"):
        with pytest.raises(UsageError):
            parse_capacity(bad, 1000)


def test_options_out_of_range_are_named() -> None:
    assert parse_concurrency("1,4") == [1, 4] and parse_tags("none") == frozenset()
    for bad in ("", "0", "a", "1.5", "99999", "1,,2"):
        with pytest.raises(UsageError, match="--concurrency"):
            parse_concurrency(bad)
    for bad in ("", "agents", "none,agent"):
        with pytest.raises(UsageError, match="--tags"):
            parse_tags(bad)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "nonsense"], "unknown workload"),
        (["--workload", "pipeline", "--sessions", "0"], "--sessions"),
        (["--workload", "pipeline", "--max-calls", "-3"], "--max-calls"),
        (["--workload", "pipeline", "--seed", "x"], "--seed"),
        (["--workload", "pipeline", "--time-scale", "nan"], "--time-scale"),
        (["--workload", "pipeline", "--concurrency", "0"], "--concurrency"),
        (["--workload", "pipeline", "--tags", "me"], "--tags"),
        (["--workload", "pipeline", "--timeout", "0"], "--timeout"),
        (["--workload", "pipeline", "--trace", "x"], "not allowed with"),
        ([], "one of the arguments --workload --trace is required"),
        (["--trace", "/nowhere/trace.jsonl.gz"], "no such file"),
        (["--workload", "pipeline"], "cannot connect"),
        (["--workload", "text:nonsense", "--tokenizer", "/nowhere"], "tokenizer /nowhere"),
        (["--workload", "text:pipeline"], "cannot connect"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "replay", "--url", "http://127.0.0.1:9", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert said in line and line.startswith("python -m benchmarks replay: ")


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://a:b:c", "http://no-such-host.invalid:1"])
def test_a_bad_url_is_one_line_and_status_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(url, "--max-calls", "1") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_bad_trace_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"session": 1}\n')
    assert main(["replay", "--url", "http://127.0.0.1:9", "--trace", str(bad)]) == 2
    assert f"{bad}:1" in capsys.readouterr().err


def test_something_that_is_not_sglang_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeSglang(api_key="secret") as fake:
        assert replay(fake.url, "--max-calls", "1") == 2
        assert "401" in capsys.readouterr().err
        out = tmp_path / "out.json"
        for given in (["--api-key", "secret"], ["--api-key=secret"]):
            assert replay(fake.url, "--max-calls", "1", *given, "--json", str(out)) == 0
        assert not [path for path in tmp_path.iterdir() if "secret" in path.read_text()]
        assert replay(fake.url + "/nothing/here", "--max-calls", "1") == 2


def test_a_result_file_of_another_command_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"command": "python -m benchmarks simulate", "points": [{"a": 1}]}))
    with FakeSglang() as fake:
        assert replay(fake.url, "--json", str(out)) == 2
    assert "another command" in capsys.readouterr().err and read(out)["points"] == [{"a": 1}]


def test_the_same_sessions_come_out_of_every_open() -> None:
    source = from_workload(make("selector", seed=3, sessions=2), {"workload": "selector"})
    prompts = [list(s.next_call().input_ids or ()) for _ in range(2) for s in source.open()]  # type: ignore[union-attr]
    assert prompts[:2] == prompts[2:]


def until(condition: Any, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_no_descendant_outlives_these_tests() -> None:
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True)
    assert "benchmarks replay" not in children.stdout
