"""`sglang-scout plan`: from a trace, exact and sampled, and from what a server answers."""

import gzip
import json
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from radix_policy.events import RequestArrived
from radix_policy.prompts import TokenPrompt
from radix_policy.sampled_curve import SampledCounts
from radix_policy.simulator import Study
from radix_policy.workloads import make, read_trace
from radix_policy.workloads.base import SessionScript
from sglang_scout import cli, config, plan, plan_report
from sglang_scout.bridge import Bridge
from sglang_scout.curve import CurveConfig, OnlineCurve
from sglang_scout.plan_report import Deployment, PlanError

Capture = pytest.CaptureFixture[str]


def trace(path: Path, sessions: int = 6, turns: int = 8) -> Path:
    lines = []
    for turn in range(turns):
        for session in range(sessions):
            blocks = [[0, 4], [1000 * (session + 1), turn + 1]]
            lines.append(
                {
                    "trace": "t",
                    "session": session,
                    "step": turn,
                    "agent": "a",
                    "t": 10.0 * turn + session,
                    "blocks_rle": blocks,
                    "block_size": 16,
                    "input_len": 16 * (turn + 5),
                    "output_len": 4,
                }
            )
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return trace(tmp_path / "t.jsonl.gz")


def planned(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *words: str) -> str:
    """The one line that is said."""
    assert cli.main(["plan", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith("sglang-scout plan: ")
    return error


# ---- from a trace ----


def test_a_curve_and_one_line_of_advice(recorded: Path, capsys: Capture) -> None:
    words = ["--trace", str(recorded), "--concurrency", "6", "--device-tokens", "400"]
    report = planned(capsys, *words)
    assert report["calls"] == 48 and report["working_set"]["published"] == 5 * 136
    assert report["method"] == "exact" and report["offload"] is report["sample"] is None
    points = report["curve"]
    assert [p["tokens"] for p in points] == sorted(p["tokens"] for p in points) and 400 in [p["tokens"] for p in points]
    assert points[-1]["found_tokens"] == report["reachable_tokens"] > points[0]["found_tokens"]
    assert all(p["found_tokens"] + p["computed_prefill_tokens"] == report["prompt_tokens"] for p in points)
    assert report["stability"]["kept"] > 0.8 and report["stability"]["sessions_that_break_their_prefix"] == []
    assert report["gamma_g"] == pytest.approx(6 * 136 / 400)
    assert "--hicache-ratio" in report["advice"]
    assert cli.main(["plan", *words, "--bytes-per-token", "131072"]) == 0
    printed = capsys.readouterr().out
    assert "<- device" in printed and "--hicache-size" in printed.splitlines()[-1]


def test_host_sizes_restore_what_the_device_has_lost(recorded: Path, capsys: Capture) -> None:
    words = ["--trace", str(recorded), "--concurrency", "6", "--device-tokens", "400", "--bytes-per-token", "1048576"]
    report = planned(capsys, *words, "--host-tokens", "300,800", "--host-gib", "0.5,100")
    device = next(p for p in report["curve"] if p["tokens"] == 400)
    rows = {row["tokens"]: row for row in report["host"]}
    assert list(rows) == [300, 512, 800, 102_400], "0.5 GiB are 512 tokens of 1 MiB"
    assert rows[300]["restored_tokens"] == 0, "smaller than the device: what it holds is there, too"
    assert rows[300]["computed_prefill_tokens"] == device["computed_prefill_tokens"]
    for row in rows.values():
        assert row["found_tokens"] == device["found_tokens"] + row["restored_tokens"]
        assert row["found_tokens"] + row["computed_prefill_tokens"] == report["prompt_tokens"]
        assert row["gamma_h"] == pytest.approx(5 * 136 / row["tokens"])
        assert row["gib"] == pytest.approx(row["tokens"] / 1024)
    assert rows[102_400]["found_tokens"] == report["reachable_tokens"] > rows[512]["found_tokens"]


def test_the_host_prediction_is_a_cache_of_that_size_in_the_simulator() -> None:
    """Device and host as one LRU cache of max(G, H) tokens, against the simulated engine with a pool of that size."""
    workload = make("pipeline", seed=5, concurrency=4, sessions=40)
    sizes = [factor * workload.largest for factor in (4, 8)]
    deployment = Deployment(4, device_tokens=2 * workload.largest, host_tokens=tuple(sizes))
    report, _ = plan.plan(workload, deployment)
    for row in report["host"]:
        outcome = Study(workload).run("lru+trim", row["tokens"], 4)
        assert row["computed_prefill_tokens"] == pytest.approx(outcome.prompt_tokens - outcome.cached_tokens, rel=0.05)


def test_a_host_tier_that_is_not_needed_is_not_advised(recorded: Path) -> None:
    workload = read_trace(recorded, seed=0)
    assert "a host tier adds little" in plan.plan(workload, Deployment(6, device_tokens=10**6))[0]["advice"]
    alone = make("selector", seed=1, concurrency=1, sessions=1)
    first = SessionScript("s", alone.sessions[0].calls[:1])
    nothing, _ = plan.plan(type(alone)("one", (first,)), Deployment(1, device_tokens=10**6))
    assert nothing["advice"].startswith("no prompt continues another one") and nothing["stability"]["kept"] is None
    assert plan_report.lines(nothing)[-1] == nothing["advice"] and nothing["host"] == []


def test_sampled_is_close_to_exact_and_says_that_it_is(recorded: Path, capsys: Capture) -> None:
    words = ["--trace", str(recorded), "--device-tokens", "400"]
    exact, sampled = planned(capsys, *words), planned(capsys, *words, "--sample", "1000")
    assert sampled["method"] == "sampled" and sampled["sample"]["rate"] == 1.0
    assert sampled["stability"] == exact["stability"] and sampled["prompt_tokens"] == exact["prompt_tokens"]
    assert sampled["enough_tokens"] == pytest.approx(exact["enough_tokens"], rel=0.1)
    for got, wanted in zip(sampled["host"], exact["host"]):
        # chunks of 16: of each of the 48 prompts up to 15 tokens are not looked up
        assert got["found_tokens"] == pytest.approx(wanted["found_tokens"], abs=48 * 15)
    assert cli.main(["plan", *words, "--sample", "10"]) == 0
    assert "from a sample of" in capsys.readouterr().out


def test_whole_pages_are_found(recorded: Path, capsys: Capture) -> None:
    one = planned(capsys, "--trace", str(recorded))
    pages = planned(capsys, "--trace", str(recorded), "--page-size", "32")
    assert pages["reachable_tokens"] < one["reachable_tokens"]


def test_a_call_that_the_device_cannot_hold_is_named(recorded: Path) -> None:
    workload = read_trace(recorded, seed=0)
    for device, named in ((workload.largest, 6), (workload.largest + 2, 0)):  # SGLang wants a page and a token more
        report, _ = plan.plan(workload, Deployment(6, device_tokens=device))
        assert report["calls_too_large"] == named and report["calls"] == 48 - named
        assert any("do not fit" in line for line in plan_report.lines(report)) == bool(named)
    with pytest.raises(PlanError, match="no call of the trace fits"):
        plan.plan(workload, Deployment(6, device_tokens=50))


def test_obr_and_what_it_advises(recorded: Path, capsys: Capture) -> None:
    words = ["--trace", str(recorded), "--device-tokens", "200", "--concurrency", "6"]
    h20 = planned(capsys, *words, "--gpu", "H20", "--model", "qwen3-coder-30b-a3b", "--tp", "8")
    assert h20["bytes_per_token"] == 24 * 1024 and h20["offload"]["pays"] == "yes"
    assert h20["offload"]["obr"] == pytest.approx(0.846, abs=0.005), "0.86 us against 5.6 us: the paper's bound"
    assert "--hicache-size" in h20["advice"]
    h800 = planned(capsys, *words, "--gpu", "h800", "--model", "qwen2.5-coder-32b", "--tp", "2")
    assert h800["offload"]["pays"] == "measure" and "measure with and without" in h800["advice"]
    slow = planned(capsys, *words, "--gpu", "h800", "--link-gbs", "1", "--model", "qwen3-coder-30b-a3b")
    assert slow["offload"]["pays"] == "no" and "no host tier" in slow["advice"] and slow["offload"]["obr"] < 0
    shape = ["--layers", "48", "--heads", "32", "--kv-heads", "4", "--head-dim", "128", "--active-parameters", "3.3"]
    given = planned(capsys, *words, "--tflops", "148", "--link-gbs", "64", *shape, "--tp", "8")
    assert given["offload"] == h20["offload"]
    for end, offload in (("is worth nothing", slow), ("where hits survive", h20), ("whatever OBR says", h800)):
        assert any(line.startswith("OBR ") and line.endswith(end) for line in plan_report.lines(offload))


def test_a_plot_is_made(recorded: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    words = ["--trace", str(recorded), "--device-tokens", "200", "--bytes-per-token", "98304", "--plot"]
    planned(capsys, *words, str(path))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert "cannot be written" in refused(capsys, *words, str(tmp_path / "nowhere" / "plan.png"))
    assert "cannot be written" in refused(capsys, *words, str(tmp_path / "plan.doc"))


def test_a_plot_without_matplotlib(recorded: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "--plot needs matplotlib" in refused(capsys, "--trace", str(recorded), "--plot", "p.png")


SHAPE = ["--layers", "2", "--heads", "2", "--kv-heads", "2", "--head-dim", "8"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "nowhere.gz"], "--trace nowhere.gz: no such file"),
        (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
        (["--concurrency", "1000000000"], "--concurrency must be at most 4,096"),
        (["--device-tokens", "9" * 400], "--device-tokens must be at most"),
        (["--bytes-per-token", "9" * 400], "--bytes-per-token must be at most"),
        (["--page-size", "1000000000"], "--page-size must be at most"),
        (["--page-size", "100000"], "--page-size 100000: no call of the trace fits"),
        (["--device-tokens", "9", "--host-tokens", "9" * 400], "--host-tokens must be whole numbers"),
        (["--device-tokens", "9", "--bytes-per-token", "10", "--host-gib", "1e308"], "--host-gib must be finite"),
        (["--active-parameters", "1e308"], "--active-parameters must be in"),
        (["--tflops", "1e-320"], "--tflops must be in"),
        (["--layers", "9" * 400], "--layers must be at most"),
        (["--tp", "9" * 400], "--tp must be at most"),
        (["--flops-utilisation", "1e-320"], "--flops-utilisation must be above 0"),
        (["--bytes-per-token", "-5"], "--bytes-per-token must be at least 1, not -5"),
        (["--device-tokens", "0"], "--device-tokens must be at least 1, not 0"),
        (["--sample", "0"], "--sample must be at least 1, not 0"),
        (["--page-size", "0"], "--page-size must be at least 1, not 0"),
        (["--trace", "BAD"], "line 1"),
        (["--host-tokens", "5"], "need --device-tokens"),
        (["--device-tokens", "9", "--host-tokens", "5,x"], "--host-tokens must be whole numbers above 0"),
        (["--device-tokens", "9", "--host-tokens", "5,0"], "--host-tokens must be whole numbers above 0"),
        (["--device-tokens", "9", "--host-tokens", ""], "--host-tokens must be whole numbers above 0"),
        (["--device-tokens", "9", "--host-gib", "nan"], "--host-gib must be finite numbers above 0"),
        (["--device-tokens", "9", "--host-gib", "inf"], "--host-gib must be finite numbers above 0"),
        (["--device-tokens", "9", "--host-gib", "1"], "--host-gib needs --bytes-per-token"),
        (["--device-tokens", "9", "--host-gib", "1e-9", "--bytes-per-token", "99"], "smaller than one token"),
        (["--gpu", "h9000"], "--gpu h9000: unknown; known: rtx3090, h20"),
        (["--gpu", "h20"], "OBR needs the model's shape"),
        (["--model", "gpt"], "--model gpt: unknown; known: qwen3"),
        (["--tflops", "100", *SHAPE, "--active-parameters", "1"], "--link-gbs is missing"),
        (["--link-gbs", "100"], "--tflops is missing"),
        (["--layers", "5"], "the shape needs --heads, --kv-heads, --head-dim, --active-parameters"),
        *((["--link-gbs", n], "--link-gbs must be a finite number above 0") for n in ("0", "-1", "nan", "inf")),
        *((["--tflops", n], "--tflops must be a finite number above 0") for n in ("0", "-1", "nan", "inf")),
        (["--active-parameters", "nan"], "--active-parameters must be a finite number above 0"),
        (["--link-utilisation", "1.5"], "--link-utilisation must be above 0 and at most 1"),
        (["--flops-utilisation", "nan"], "--flops-utilisation must be above 0 and at most 1"),
        (["--kv-heads", "0"], "--kv-heads must be at least 1, not 0"),
        (["--tp", "0"], "--tp must be at least 1, not 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], said: str, recorded: Path, tmp_path: Path, capsys: Capture
) -> None:
    bad = tmp_path / "bad.jsonl.gz"
    with gzip.open(bad, "wt") as file:
        file.write("{not json\n")
    words = [{"BAD": str(bad)}.get(word, word) for word in words]
    if "--trace" not in words:
        words = ["--trace", str(recorded), *words]
    assert said in refused(capsys, *words)


# ---- from a server ----


class Fake:
    """Answers /server_info with what `info` says, to whom `key` lets in."""

    def __init__(self) -> None:
        self.info: Any = {}
        self.key: str | None = None
        self.raw: bytes | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = outer.key is None or self.headers["Authorization"] == f"Bearer {outer.key}"
                status = 404 if self.path != "/server_info" else 200 if allowed else 401
                body = outer.raw if outer.raw is not None else json.dumps(outer.info).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def bridge(curve: OnlineCurve | None) -> Bridge:
    made = Bridge(config.make_runtime("scout", None), curve=curve)
    made.reset(0)
    return made


def arrive(to: Bridge, number: int, tokens: list[int], namespace: str = "") -> None:
    to.arrived(RequestArrived(f"r{number}", TokenPrompt(array("q", tokens)), namespace, None, 0))
    to.matched(f"r{number}", (), 0, 0)
    to.finished(f"r{number}", 1, False, True)


def sessions(to: Bridge, turns: int = 12) -> None:
    """Eight sessions in turn whose prompts grow by 64 tokens."""
    for turn in range(turns):
        for session in range(8):
            first = 10_000 * session
            arrive(to, 8 * turn + session, list(range(first, first + 64 * (turn + 1))))


def server_info(*bridges: Bridge, **changes: Any) -> dict[str, Any]:
    states = [
        {"scout": b.snapshot(), "memory_usage": {"kvcache": 2.0, "token_capacity": 1 << 15}, "tp_size": 2}
        for b in bridges
    ]
    info = {"max_total_num_tokens": 1024, "tp_size": 2, "enable_hierarchical_cache": False, "hicache_size": 0}
    return json.loads(json.dumps({**info, "internal_states": states, **changes}))


def online(**keys: Any) -> OnlineCurve:
    return OnlineCurve(CurveConfig(**keys), 1)


def test_a_server_is_planned_from_its_own_curve(fake: Fake, capsys: Capture) -> None:
    watched = bridge(online())
    sessions(watched)
    fake.info = server_info(watched)
    report = planned(capsys, "--url", fake.url + "/")
    assert report["method"] == "server" and report["calls"] == 96 and report["largest_call"] == 12 * 64
    assert report["device_tokens"] == 1024 and report["bytes_per_token"] == 65536 and report["gamma_g"] is None
    # every turn finds the prompt before: whole chunks of what the last turn had
    assert report["reachable_tokens"] == sum(8 * 64 * turn for turn in range(1, 12))
    assert report["working_set"]["published"] is None and report["working_set"]["measured_p90"] > 3000
    assert "--hicache-size" in report["advice"] and len(report["host"]) > 2
    assert cli.main(["plan", "--url", fake.url, "--concurrency", "8", "--host-gib", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "gamma_G" in printed and "nothing is known of caches beyond 16,777,216 tokens" in printed


def test_the_servers_own_host_tier_is_predicted(fake: Fake, capsys: Capture) -> None:
    watched = bridge(online())
    sessions(watched)
    fake.info = server_info(watched, enable_hierarchical_cache=True, hicache_ratio=3.0)
    assert [row["tokens"] for row in planned(capsys, "--url", fake.url)["host"]] == [3072]
    fake.info = server_info(watched, enable_hierarchical_cache=True, hicache_ratio=3.0, hicache_size=1)
    assert [row["tokens"] for row in planned(capsys, "--url", fake.url)["host"]] == [10**9 // 65536]


def test_replicas_are_planned_as_one(fake: Fake, capsys: Capture) -> None:
    watched = bridge(online())
    sessions(watched)
    fake.info = server_info(watched)
    one = planned(capsys, "--url", fake.url)
    fake.info = server_info(watched, watched)
    two = planned(capsys, "--url", fake.url)
    assert two["calls"] == 2 * one["calls"] and two["enough_tokens"] == one["enough_tokens"]
    assert two["curve"][0]["found_tokens"] == 2 * one["curve"][0]["found_tokens"]


def test_the_key_is_sent(fake: Fake, capsys: Capture) -> None:
    watched = bridge(online())
    sessions(watched)
    fake.info, fake.key = server_info(watched), "secret"
    assert "refused (401); --api-key gives the key" in refused(capsys, "--url", fake.url)
    assert planned(capsys, "--url", fake.url, "--api-key", "secret")["calls"] == 96


def young() -> dict[str, Any]:
    watched = bridge(online())
    sessions(watched, turns=2)
    return server_info(watched)


def broken_curve() -> dict[str, Any]:
    watched = bridge(online())
    info = server_info(watched)
    info["internal_states"][0]["scout"]["curve"]["hits"] = "many"
    return info


def faulty() -> Bridge:
    watched = bridge(online())
    arrive(watched, 0, [1, 2, 3])
    watched.curve._curve = None  # type: ignore[union-attr,assignment]
    arrive(watched, 1, [1, 2, 3])
    return watched


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (lambda: {}, "answers, but not as an SGLang server does"),
        (lambda: [1], "answers, but not as an SGLang server does"),
        (lambda: server_info(internal_states=[{"tp_size": 1}]), "runs without a policy of sglang-scout"),
        (lambda: server_info(bridge(None)), "its curve is off (key curve"),
        (lambda: server_info(faulty()), "the curve ended with a fault"),
        (young, "has seen 16 calls, a plan needs at least 50"),
        (broken_curve, "not a sampled curve"),
    ],
)
def test_servers_that_cannot_be_planned(info: Callable[[], Any], said: str, fake: Fake, capsys: Capture) -> None:
    fake.info = info()
    assert said in refused(capsys, "--url", fake.url)


def test_no_server_and_no_json(fake: Fake, capsys: Capture) -> None:
    fake.raw = b"<html>"
    assert "cannot be asked" in refused(capsys, "--url", fake.url)
    assert "/server_info answers 404" in refused(capsys, "--url", fake.url + "/v2")
    assert "must begin with http://" in refused(capsys, "--url", "127.0.0.1:30000")
    assert "cannot be asked (" in refused(capsys, "--url", "http://127.0.0.1:1")
    assert "cannot be asked (" in refused(capsys, "--url", "http://[nonsense")
    assert "--sample is for --trace" in refused(capsys, "--url", fake.url, "--sample", "10")
    assert "--page-size is for --trace" in refused(capsys, "--url", fake.url, "--page-size", "16")


# ---- the curve in the plug-in ----


def test_a_fault_ends_the_curve_and_nothing_else() -> None:
    watched = faulty()
    assert watched.curve is None and watched.live and watched.faults == {"curve": 1}
    assert watched.snapshot()["curve"] is None
    arrive(watched, 2, [1, 2, 3])
    assert watched.counters["requests"] == watched.counters["finished"] == 3 and watched.faults == {"curve": 1}


def test_a_flush_begins_the_curve_anew() -> None:
    watched = bridge(online(curve_chunk=1))
    arrive(watched, 0, [1, 2, 3])
    watched.reset(1)
    arrive(watched, 1, [1, 2, 3])
    counts = SampledCounts.from_json(watched.snapshot()["curve"])
    assert (counts.calls, counts.reachable) == (1, 0)


def test_a_request_that_never_ran_is_not_counted() -> None:
    watched = bridge(online(curve_chunk=1))
    for number in range(3):
        watched.arrived(RequestArrived(f"r{number}", TokenPrompt([1, 2, 3, 4]), "", None, 0))
    watched.matched("r1", (), 0, 0)
    watched.matched("r1", (), 0, 0)  # again, after a retraction
    for number in (0, 2, 1, 1):
        watched.finished(f"r{number}", 0, True, False)
    assert SampledCounts.from_json(watched.snapshot()["curve"]).calls == 1 and watched.faults == {}


def test_a_flush_under_running_requests_is_no_fault() -> None:
    watched = bridge(online(curve_chunk=1))
    watched.arrived(RequestArrived("r", TokenPrompt([1, 2, 3, 4]), "", None, 0))
    watched.matched("r", (), 0, 0)
    watched.reset(1)
    watched.finished("r", 1, False, True)
    assert watched.faults == {} and watched.curve is not None


def test_namespaces_and_plain_lists_of_tokens() -> None:
    watched = bridge(online(curve_chunk=1))
    for number, namespace in enumerate(["a", "b", "a"]):
        watched.arrived(RequestArrived(f"r{number}", TokenPrompt([1, 2, 3, 4]), namespace, None, 0))
        watched.matched(f"r{number}", (), 0, 0)
    assert SampledCounts.from_json(watched.snapshot()["curve"]).reachable == 3


@pytest.mark.parametrize(("chunk", "page", "wanted"), [(16, 1, 16), (16, 64, 64), (48, 32, 64), (1, 1, 1)])
def test_a_chunk_is_whole_pages(chunk: int, page: int, wanted: int) -> None:
    assert OnlineCurve(CurveConfig(curve_chunk=chunk), page).snapshot()["chunk"] == wanted


# ---- size ----


def long_trace(path: Path, calls: int = 8000, sessions: int = 100) -> Path:
    """Sessions of 80 turns that grow to twice the mean of 100,000 tokens, a run of blocks of its own for each turn."""
    turns = calls // sessions
    with gzip.open(path, "wt", compresslevel=1) as file:
        for session in range(sessions):
            runs, blocks = [], 0
            for turn in range(turns):
                count = 39 + (session + turn) % 2  # of 64 tokens
                runs.append([(session * turns + turn) * 64 + 1, count])
                blocks += count
                line = {"session": session, "step": turn, "agent": "a", "t": 20.0 * turn, "blocks_rle": runs}
                file.write(json.dumps(line | {"block_size": 64, "input_len": 64 * blocks, "output_len": 100}) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--sample", "16384"]])
def test_a_long_trace_is_planned_within_a_minute_and_2_gib(extra: list[str], tmp_path: Path) -> None:
    path = long_trace(tmp_path / "long.jsonl.gz")
    code = (
        "import resource, sys; from sglang_scout import cli; status = cli.main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(status)"
    )
    words = ["plan", "--trace", str(path), "--device-tokens", "350000", "--json", *extra]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["calls"] == 8000 and 99_000 < report["mean_prompt_tokens"] < 103_000
    assert int(done.stderr.split()[-1]) < 2 * 1024 * 1024, "KiB"
