"""`warmup --servers` on fake servers: the order of the modes, fresh servers, checked outputs, resumption, figures."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("aiohttp")

from benchmarks import warmup_servers as module
from benchmarks.pool import Stopped
from benchmarks.results import read
from benchmarks.warmup_servers import Run, check_outputs, report, rotated
from launch.command import UsageError as LaunchUsageError
from launch.server import ServerError
from radix_policy.simulator.warm import UNGATED
from radix_policy.workloads import make
from tests.unit.commands import ran
from tests.unit.fake_sglang import FakeSglang

SMALL = ["warmup", "--servers", "--workload", "pipeline", "--sessions", "2", "--time-scale", "0", "--model-path", "m"]
POINT = ["--points", "1:1.3"]
MODES = {None: "off", '{"warmup": true}': "on"}


class FakeServer:
    """Stands for launch.server.Server."""

    started: ClassVar[list[tuple[str, int]]] = []  # mode and capacity
    asked: ClassVar[list[FakeSglang]] = []
    running: ClassVar[int] = 0
    fail: ClassVar[dict[str, BaseException]] = {}
    fakes: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(
        self, model_path: str, policy: str, *, policy_config: str | None, max_total_tokens: int, extra_args: Any
    ) -> None:
        self.mode, self.capacity = MODES.get(policy_config, "ungated"), max_total_tokens
        assert self.mode != "ungated" or json.loads(policy_config or "") == UNGATED
        if isinstance(self.fail.get(self.mode), LaunchUsageError):
            raise self.fail[self.mode]
        self.start_seconds = 1.5
        scout: dict[str, Any] = {"policy": policy, "faults": {}}
        if self.mode != "off":
            scout["warmup"] = {"on": True, "issued": 9, "tokens": 4000, "useful_tokens": 3000, "longest_slice_s": 0.25}
        more = {"policy": policy, "capacity": max_total_tokens, "scout": scout, "keep": 7 if self.mode == "off" else 99}
        self.fake = FakeSglang(**{**more, **self.fakes.get(self.mode, {})})
        self.command = self

    def shell(self) -> str:
        return f"serve {self.mode}"

    @property
    def url(self) -> str:
        return self.fake.url

    def start(self) -> None:
        if self.mode in self.fail:
            raise self.fail[self.mode]
        self.started.append((self.mode, self.capacity))
        self.asked.append(self.fake)
        self.fake.__enter__()
        FakeServer.running += 1

    def stop(self) -> None:
        self.fake.__exit__(None, None, None)
        FakeServer.running -= 1

    def log_tail(self, lines: int) -> str:
        return "RuntimeError: out of luck\n"


@pytest.fixture(autouse=True)
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> Any:
    FakeServer.started, FakeServer.asked, FakeServer.fail, FakeServer.fakes, FakeServer.running = [], [], {}, {}, 0
    monkeypatch.setattr(module, "Server", FakeServer)
    yield
    assert FakeServer.running == 0


def test_every_round_begins_with_another_mode_and_every_run_has_a_fresh_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.json"
    status, printed, err = ran(capsys, *SMALL, *POINT, "--json", str(out))
    assert status == 0 and "[9/9]" in err and "round 3 ungated, " in err
    capacity = int(1.3 * make("pipeline", seed=1, sessions=2).largest)
    order = ["off", "on", "ungated", "on", "ungated", "off", "ungated", "off", "on"]
    assert FakeServer.started == [(mode, capacity) for mode in order]
    document = read(out)
    assert document["complete"] and document["outputs"] == {"checked": 8, "different": []}
    assert [(p["round"], p["mode"]) for p in document["points"]] == [(1 + i // 3, m) for i, m in enumerate(order)]
    for point in document["points"]:
        assert point["capacity_tokens"] == capacity and point["calls"] > 0 and point["start_s"] == 1.5
        assert point["computed_prefill_tokens"] == point["prompt_tokens"] - point["cached_tokens"]
        assert point["faults"] == {} and point["tags"] == "agent,session" and point["time_scale"] == 0
        assert (point["warmup"] is None) == (point["mode"] == "off")
        assert point.get("longest_slice_s") == (None if point["mode"] == "off" else 0.25)
    assert "median of 3 round(s)" in printed and "against warmup off" in printed
    assert "identical in all 8 comparisons" in printed
    tags = [call["sampling_params"]["custom_params"]["scout"] for call in FakeServer.asked[0].calls]
    assert all(set(tag) == {"agent", "session"} for tag in tags)


def test_more_workloads_and_places(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "pipeline,debate", "--points", "1:1.3,2:2", "--modes", "off,on", "--rounds", "1"]
    status, printed, _ = ran(capsys, *SMALL, *words)
    assert status == 0 and [mode for mode, _ in FakeServer.started] == ["off", "on"] * 4
    assert "one round: the noise is unknown" in printed and "identical in all 2 comparisons" in printed


def test_what_a_stop_cut_is_played_again_on_a_fresh_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w.json"
    words = [*SMALL, *POINT, "--rounds", "1", "--json", str(out)]
    FakeServer.fakes = {"on": {"die_after": 30}}
    status, printed, err = ran(capsys, *words)
    assert (status, printed) == (1, "") and "out of luck" in err and "goes on from there" in err
    assert [p["mode"] for p in read(out)["points"]] == ["off"] and not read(out)["complete"]
    FakeServer.fakes = {}
    status, printed, err = ran(capsys, *words)
    assert status == 0 and "1 of 3 points are in" in err
    assert [mode for mode, _ in FakeServer.started] == ["off", "on", "on", "ungated"]
    assert len({p["calls"] for p in read(out)["points"]}) == 1 and read(out)["complete"]
    assert ran(capsys, *words)[:2] == (0, printed) and len(FakeServer.started) == 4


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (Stopped(), 143)])
def test_a_signal_keeps_what_is_done(
    stop: BaseException, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.json"
    FakeServer.fail = {"ungated": stop}
    found, printed, err = ran(capsys, *SMALL, *POINT, "--json", str(out))
    assert (found, printed) == (status, "") and f"2 of 9 points done, kept in {out}" in err.splitlines()[-1]
    assert len(read(out)["points"]) == 2


def test_an_output_that_differs_fails_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeServer.fakes = {"on": {"salt": 1}}
    out = tmp_path / "w.json"
    status, printed, _ = ran(capsys, *SMALL, *POINT, "--rounds", "1", "--json", str(out))
    assert status == 1 and "OUTPUTS DIFFER" in printed
    assert "pipeline C=1 1.3F: off in round 1 and on in round 1: another prompt or output in session 0" in printed
    assert len(read(out)["outputs"]["different"]) == 1


@pytest.mark.parametrize(
    ("fakes", "said"),
    [
        ({"scout": None}, "round 1 off: 0 schedulers show the state of the plug-in, not one"),
        ({"scout": {"faults": {}, "warmup": {}}}, "round 1 off: the server runs with warmup on"),
        (
            {"scout": {"faults": {"warmup": 1}, "warmup": {"on": False}}},
            "round 1 on: warmup switched itself off; faults: {'warmup': 1}",
        ),
        ({"capacity": 100}, "the server has 100"),
        ({"longest": 1}, "no call was served; Input length"),
    ],
)
def test_a_server_that_runs_something_else_is_one_line(
    fakes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeServer.fakes = {"on" if "round 1 on" in said else "off": fakes}
    status, printed, err = ran(capsys, *SMALL, *POINT)
    assert (status, printed) == (1, "") and said in err.splitlines()[-1]


def test_a_server_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    FakeServer.fail = {"off": ServerError("the server exited with code 1: no memory", 1)}
    status, _, err = ran(capsys, *SMALL, *POINT)
    assert status == 1 and err.splitlines()[-1].endswith("no memory")
    FakeServer.fail = {"ungated": LaunchUsageError("model path m: no such folder")}  # seen before any server starts
    status, _, err = ran(capsys, *SMALL, *POINT)
    assert status == 2 and "no such folder" in err and err.count("\n") == 1
    assert FakeServer.started == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "2"], "--seeds is not for --servers"),
        (["--jobs", "1"], "--jobs is not for --servers"),
        (["--policy", "lru"], "--policy: warmup on servers is the plug-in's, so scout or cachescout, not 'lru'"),
        (["--rounds", "0"], "--rounds must be in 1..1000, not 0"),
        (["--rounds", "x"], "--rounds"),
        (["--time-scale", "-1"], "--time-scale must be in [0, 1000], not -1"),
        (["--time-scale", "nan"], "--time-scale must be in [0, 1000], not nan"),
        (["--points", "2000:2"], "--points: on servers a concurrency of at most 1024"),
        (["--points", "1:0.5"], "--points: CONCURRENCY:CAPACITY in F"),
        (["--modes", "maybe"], "--modes: some of off, on, ungated"),
        (["--workload", "text:pipeline"], "unknown workload"),
        (["--sessions", "0"], "--sessions must be in 1.."),
        (["--server-args", "'"], "--server-args: no closing quotation"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, *SMALL, *words)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert FakeServer.started == []


@pytest.mark.parametrize("option", ["--rounds", "--time-scale", "--model-path", "--server-args"])
def test_what_is_for_servers_needs_servers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "warmup", option, "1")
    assert (status, out, err) == (2, "", f"python -m benchmarks warmup: {option} is only for --servers\n")


# ---- figures ----


def point(mode: str, number: int, mean: float, hit: float = 0.5, computed: int = 5000, **more: Any) -> dict[str, Any]:
    run = Run("pipeline", "scout", 1, 1.3, mode, 1, number, 2)
    return {
        **run.key(),
        "lanes": 1,
        "ttft_ms": {"mean": mean, "p50": mean / 2, "p99": 2 * mean},
        "hit_rate": hit,
        "computed_prefill_tokens": computed,
        "warmup": None if mode == "off" else {"on": True, "tokens": 2000, "useful_tokens": 500 * number},
        "longest_slice_s": None if mode == "off" else 0.05 + 0.1 * (number - 1),
        "requests_digest": "r",
        "digest": "d",
        "session_digests": ["a", "b"],
        **{"refused_calls": 0, "refusals": {}, "short_calls": 0, "segments": 1, "faults": {}},
        **more,
    }


OFF = [point("off", 1, 100.0), point("off", 2, 104.0), point("off", 3, 90.0, hit=0.52)]


def cells(text: str, mode: str) -> list[list[str]]:
    return [line.replace(" ±", "±").split() for line in text.splitlines() if f" {mode} " in line and "pipeline" in line]


def test_the_tables_hold_medians_and_changes_with_the_noise_of_off() -> None:
    better = [point("on", n, mean, 0.75, 2500) for n, mean in ((1, 80.0), (2, 60.0), (3, 75.0))]
    text = report([*OFF, *better])
    assert cells(text, "off") == [
        ["pipeline", "1", "1.3F", "off", "100.00", "50.00", "200.00", "50.00", "5.00", "0.00", "0.00", "0.00"]
    ]
    median, change = cells(text, "on")
    assert median[4:] == ["75.00", "37.50", "150.00", "75.00", "2.50", "2.00", "50.00", "250.00"]
    assert change[4:] == ["-25.00±7.00", "-25.00±7.00", "-25.00±7.00", "25.00±1.00", "-50.00±0.00"]
    assert text.endswith("beyond the noise: none")


def test_where_on_is_worse_is_named_only_beyond_the_noise() -> None:
    worse = [point("on", n, mean, 0.45, 5040) for n, mean in ((1, 107.9), (2, 60.0), (3, 200.0))]
    assert report([*OFF, *worse]).endswith("pipeline C=1 1.3F (hit -5.00)")
    slow = [point("on", n, 108.1, 0.485) for n in (1, 2, 3)]
    text = report([*OFF, *slow])
    assert text.endswith("pipeline C=1 1.3F (ttft mean +8.10, p50 +8.10, p99 +8.10)")
    assert "worse with warmup on" not in report([*OFF, *(point("ungated", n, 500.0) for n in (1, 2, 3))])
    assert "against" not in report(slow)


def test_a_run_with_a_remark_is_named() -> None:
    odd = point("on", 1, 100.0, faults={"warmup": 1}, refused_calls=1, refusals={"too long": 1})
    text = report([point("off", 1, 100.0), odd])
    assert "pipeline C=1 1.3F round 1 on: faults of the plug-in: {'warmup': 1}" in text
    assert "round 1 on: 1 sessions were cut short by a refused call: 1 x too long" in text


def test_outputs_are_compared_within_a_place_where_the_order_of_requests_is_the_same() -> None:
    other = point("on", 2, 1.0, digest="x", session_digests=["a", "c"])
    assert check_outputs([*OFF, other]) == {
        "checked": 3,
        "different": ["pipeline C=1 1.3F: off in round 1 and on in round 2: another output in session 1"],
    }
    assert check_outputs([*OFF, {**other, "factor": 2.0}]) == {"checked": 2, "different": []}
    assert check_outputs([{**p, "lanes": 2} for p in (*OFF, other)])["checked"] == 0
    assert check_outputs([{**p, "concurrency": 4} for p in (*OFF, other)])["checked"] == 0


def test_the_order_of_a_round() -> None:
    assert [rotated("abc", n) for n in (1, 2, 3, 4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated(["on"], 7) == ["on"]
