"""`compare` and `demo` on fake servers: fair points, honest words, checked outputs, nothing lost by a stop."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("aiohttp")

from benchmarks import compare as module
from benchmarks.__main__ import main
from benchmarks.compare import against, outputs_line, render, verdict
from benchmarks.learned import learned
from benchmarks.playback import Played
from benchmarks.results import read
from launch.command import UsageError as LaunchUsageError
from launch.server import ServerError
from radix_policy.workloads import make
from tests.unit.fake_sglang import FakeSglang

ROOT = Path(__file__).parents[2]
KEEP = {"lru": 7, "scout": 100, "worse": 1, "liar": 7}  # sequences that the fake cache of a policy holds


class FakeServer:
    """Stands for launch.server.Server."""

    started: ClassVar[list[tuple[str, int]]] = []
    running: ClassVar[int] = 0
    fail: ClassVar[dict[str, Exception]] = {}
    fakes: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, model_path: str, policy: str, *, max_total_tokens: int, **options: Any) -> None:
        if isinstance(self.fail.get(policy), LaunchUsageError):
            raise self.fail[policy]
        self.policy, self.capacity = policy, max_total_tokens
        self.start_seconds = 1.5
        scout = {"policy": policy, "faults": {}} if policy != "lru" else None
        more = {"keep": KEEP[policy], "salt": int(policy == "liar"), "scout": scout, **self.fakes.get(policy, {})}
        self.fake = FakeSglang(policy=policy, capacity=max_total_tokens, **more)
        self.command = self

    def shell(self) -> str:
        return f"serve --policy {self.policy}"

    @property
    def url(self) -> str:
        return self.fake.url

    def scheduler_cpu_s(self) -> float:
        """0.3 s under lru, 0.6 s under others, from one look to the next."""
        self.looks = getattr(self, "looks", -1) + 1
        return self.looks * (0.3 if self.policy == "lru" else 0.6)

    def start(self) -> "FakeServer":
        if self.policy in self.fail:
            raise self.fail[self.policy]
        self.started.append((self.policy, self.capacity))
        self.fake.__enter__()
        FakeServer.running += 1
        return self

    def stop(self) -> None:
        self.fake.__exit__(None, None, None)
        FakeServer.running -= 1

    def log_tail(self, lines: int) -> str:
        return "RuntimeError: out of luck\n"


@pytest.fixture(autouse=True)
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> Any:
    FakeServer.started, FakeServer.fail, FakeServer.fakes, FakeServer.running = [], {}, {}, 0
    monkeypatch.setattr(module, "Server", FakeServer)
    yield
    assert FakeServer.running == 0


def compare(*words: str) -> int:
    common = ["--workload", "pipeline", "--sessions", "2", "--time-scale", "0", "--quiet", "--model-path", "m"]
    return main(["compare", *common, *words])


def test_every_policy_gets_a_fresh_server_and_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    assert compare("--policies", "lru,scout", "--max-total-tokens", "3000,2F", "--json", str(out)) == 0
    largest = make("pipeline", seed=1, sessions=2).largest
    assert FakeServer.started == [(p, c) for c in (3000, 2 * largest) for p in ("lru", "scout")]
    document = read(out)
    assert document["complete"] and document["outputs"] == {"checked": 2, "different": []}
    assert [p["policy"] for p in document["points"]] == ["lru", "scout", "lru", "scout"]
    assert len({p["digest"] for p in document["points"]}) == 1
    for point in document["points"]:
        assert point["start_s"] == 1.5 and point["replay_s"] > 0 and point["stop_s"] >= 0
        assert point["server_command"] == f"serve --policy {point['policy']}"
    assert document["points"][1]["scout"] == [{"policy": "scout", "faults": {}}]
    calls = document["points"][0]["calls"]
    cpu = [p["scheduler_cpu_ms"] for p in document["points"]]
    assert cpu == [round(s * 1000 / calls, 3) for s in (0.3, 0.6, 0.3, 0.6)]
    printed = capsys.readouterr().out
    assert "2.00x" in printed
    assert "scout wins" in printed and "identical in all 2 comparisons" in printed and "starting servers 6 s" in printed


def test_a_policy_that_changes_an_output_fails_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    assert compare("--policies", "lru,liar", "--max-total-tokens", "3000", "--json", str(out)) == 1
    printed = capsys.readouterr().out
    assert "OUTPUTS DIFFER" in printed
    assert "session 0 call 0 (planner) was answered with other tokens under liar" in printed
    assert len(read(out)["outputs"]["different"]) == 1


def test_outputs_are_compared_at_concurrency_1_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--policies", "lru,scout", "--max-total-tokens", "3000", "--concurrency", "2") == 0
    assert "not compared" in capsys.readouterr().out


def test_a_server_that_fails_costs_its_point_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    words = ("--policies", "lru,scout", "--max-total-tokens", "3000", "--json", str(out))
    FakeServer.fail = {"scout": ServerError("the server exited with code 1: no memory", 1)}
    assert compare(*words) == 1
    assert "no memory" in capsys.readouterr().err
    assert [p["policy"] for p in read(out)["points"]] == ["lru"] and not read(out)["complete"]
    FakeServer.fail = {}
    assert compare(*words) == 0
    assert FakeServer.started == [("lru", 3000), ("scout", 3000)]
    assert read(out)["complete"]


def test_a_server_that_dies_midway_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    words = ("--policies", "lru,scout", "--max-total-tokens", "3000", "--json", str(out))
    FakeServer.fakes = {"scout": {"die_after": 30}}
    assert compare(*words) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert "out of luck" in lines[-1] and "goes on from there" in lines[-1]
    lru, scout = read(out)["points"]
    assert not lru.get("partial") and scout["partial"] and scout["calls"] == 28
    FakeServer.fakes = {}
    assert compare(*words) == 0
    done = read(out)
    assert [p["calls"] for p in done["points"]] == [p["calls"] for p in done["points"][:1]] * 2
    assert "scheduler_cpu_ms" not in done["points"][1], "a part of it was used on the server that died"
    assert done["points"][1]["segments"] == 2 and done["outputs"] == {"checked": 1, "different": []}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (LaunchUsageError("model path nowhere: no such folder"), 2),
        (LaunchUsageError("port 80 on 127.0.0.1 cannot be used: permission denied"), 2),
        (ServerError("the server exited with code 2: error: argument --radix-eviction-policy: invalid choice", 2), 2),
        (ServerError("the server was not ready after 300 s", None), 1),
    ],
)
def test_a_server_that_does_not_start_is_one_line(
    failure: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeServer.fail = {"lru": failure}
    assert compare("--max-total-tokens", "3000") == status
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == f"python -m benchmarks compare: {failure}"


def test_every_server_is_checked_before_the_first_one_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeServer.fail = {"scout": LaunchUsageError("unknown key 'nope'")}
    out = tmp_path / "c.json"
    assert compare("--policies", "lru,scout", "--max-total-tokens", "3000,3000", "--json", str(out)) == 2
    assert not out.exists()
    FakeServer.fail = {}
    assert compare("--max-total-tokens", "3000", "--logs", "/proc/x") == 2
    assert compare("--max-total-tokens", "3000", "--report", "/proc/x") == 2
    assert not FakeServer.started
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "unknown key 'nope'" in lines[0] and "/proc/x" in lines[1] and "/proc/x" in lines[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-total-tokens", "0"], "--max-total-tokens"),
        (["--max-total-tokens", "2X"], "--max-total-tokens"),
        (["--max-total-tokens", "4096", "--policies", "lru,lru"], "--policies"),
        (["--max-total-tokens", "4096", "--policies", ""], "--policies"),
        (["--max-total-tokens", "4096", "--concurrency", "x"], "--concurrency"),
        (["--max-total-tokens", "4096", "--concurrency", "²"], "--concurrency"),
        (["--max-total-tokens", "4096", "--port", "0"], "--port"),
        (["--max-total-tokens", "4096", "--policy-config", "scout"], "--policy-config"),
        (["--max-total-tokens", "4096", "--policy-config", "lfu={}"], "--policy-config"),
        (["--max-total-tokens", "4096", "--policy-config", "scout={"], "not JSON"),
        (["--max-total-tokens", "4096", "--server-args", "'"], "--server-args"),
        ([], "--max-total-tokens"),
        (["--max-total-tokens", "4096", "--model-path", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compare", "--workload", "pipeline", "--model-path", "/nowhere", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert said in line and line.startswith("python -m benchmarks compare: ")


# ---- words ----


def point(policy: str, computed: int, **more: Any) -> dict[str, Any]:
    return {
        "policy": policy,
        "capacity_tokens": 100,
        "concurrency": 1,
        "computed_prefill_tokens": computed,
        **more,
    }


def test_the_verdict_says_who_wins_also_when_scout_loses() -> None:
    lru = point("lru", 1000)
    assert verdict(point("scout", 500), lru) == "scout wins: 50.0 % less prefill"
    assert verdict(point("scout", 1200), lru) == "scout loses: 20.0 % more prefill"
    assert verdict(point("scout", 1004), lru) == "tie"
    assert verdict(point("scout", 0), point("lru", 0)) == "tie"


def test_only_points_of_one_setting_are_compared() -> None:
    points = [point("lru", 1), point("scout", 2, capacity_tokens=200), point("scout", 3, concurrency=4), point("s", 4)]
    assert against(points, "lru") == [(points[3], points[0])]


def test_a_loss_is_printed_as_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    assert compare("--policies", "lru,worse", "--max-total-tokens", "3000", "--json", str(out)) == 0
    text = render(read(out)["points"], "lru")
    assert "worse loses" in text and "-" in text.split("worse vs lru")[1]
    assert "identical" in outputs_line(read(out)["outputs"])


# ---- what was learned ----


def test_the_learned_matrix_is_the_servers_own_where_it_shows_it() -> None:
    shown = {"transitions": {"agents": ["tag:a", "tag:b"], "rows": [[0, 1], [0.5, 0.5]]}, "predictability": 0.3}
    found = learned([shown], [], ("a", "b"))
    assert found["source"] == "server" and found["agents"] == ["a", "b"] and found["rows"] == [[0, 1], [0.5, 0.5]]


def test_else_it_is_worked_out_from_the_calls() -> None:
    def call(session: int, n: int, agent: str) -> Played:
        return Played(session, n, agent, 5, 1, 0, 1.0, 1.0, at=session + n * 0.1, sent="", got="")

    calls = [call(s, n, agent) for s in range(2) for n, agent in enumerate(("a", "b", "c", "a"))]
    found = learned([], calls, ("a", "b", "c", "never"))
    assert found["source"] == "recomputed"
    assert found["rows"] == [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


# ---- demo ----


def test_the_demo_writes_table_result_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    _tokenizer_only(model)
    monkeypatch.setitem(KEEP, "lru", 2)
    out = tmp_path / "demo"
    words = ["demo", "--out", str(out), "--sessions", "1", "--max-calls", "9", "--model-path", str(model), "--quiet"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "text:selector: 6 agents" in printed and "scout vs lru" in printed and "where the time went" in printed
    document = read(out / "demo.json")
    assert document["kind"] == "demo" and document["complete"] and len(document["points"]) == 2
    assert document["source"]["agents"][0] == "Planner" and len(document["source"]["transitions"]) == 6
    assert document["points"][1]["learned"]["rows"]
    html = (out / "report.html").read_text()
    for part in ("Served from cache", "Who is called next", "Where the time went", "python -m benchmarks demo"):
        assert part in html or part.replace(" ", "") in html.replace(" ", "")
    FakeServer.started.clear()
    assert main(words) == 0
    assert len(FakeServer.started) == 2  # a finished demo is shown again, not remembered


def test_a_demo_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model, out = tmp_path / "model", tmp_path / "demo"
    _tokenizer_only(model)
    words = ["demo", "--out", str(out), "--sessions", "1", "--max-calls", "5", "--model-path", str(model), "--quiet"]
    FakeServer.fail = {"scout": ServerError("no memory", 1)}
    assert main(words) == 1
    FakeServer.fail = {}
    assert main(words) == 0
    assert [policy for policy, _ in FakeServer.started] == ["lru", "scout"]
    assert "going on with the demo" in capsys.readouterr().err


def _tokenizer_only(folder: Path) -> None:
    from launch import tiny_model

    folder.mkdir()
    whole = next((ROOT / "out" / "models").glob(f"tiny-{tiny_model.fingerprint()}/tokenizer.json"), None)
    if whole is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(whole.with_name(name), folder / name)
        return
    tiny_model._write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(tiny_model.config()))
