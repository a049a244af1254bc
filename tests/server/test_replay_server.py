"""`replay` and `compare` on real SGLang servers."""

import asyncio
import contextlib
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.client import Client
from benchmarks.results import read
from launch.server import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

ROOT = Path(__file__).parents[2]
TAU = ROOT.parent / "shared" / "traces" / "tau_airline.jsonl.gz"


def replay(server: Server, out: Path, *words: str) -> dict[str, Any]:
    common = ["--url", server.url, "--time-scale", "0", "--quiet", "--json", str(out)]
    assert main(["replay", *common, *words]) == 0
    (point,) = read(out)["points"]
    return point


def small_trace(path: Path) -> Path:
    """Two sessions of three calls in 16-token blocks: a shared system prompt, then chats that grow."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for session in (0, 1):
            chain = [[0, 6], [100 * (session + 1), 2]]
            for step in range(3):
                chain = [*chain, [100 * (session + 1) + 10 * (step + 1), 2]]
                blocks = sum(count for _, count in chain)
                record = {
                    "session": session,
                    "step": step,
                    "agent": "assistant",
                    "t": None,
                    "input_len": 16 * (blocks - 1),
                    "output_len": 16,
                    "block_size": 16,
                    "blocks_rle": chain,
                    "sys_len": 96,
                }
                file.write(json.dumps(record) + "\n")
    return path


def test_a_workload_is_replayed_twice_with_the_same_requests_and_answers(lru_server: Server, tmp_path: Path) -> None:
    words = ("--workload", "debate", "--max-calls", "8")
    first = replay(lru_server, tmp_path / "1.json", *words)
    second = replay(lru_server, tmp_path / "2.json", *words)
    assert first["calls"] == 8 and first["short_calls"] == first["refused_calls"] == 0
    assert 0 < first["cached_tokens"] < first["prompt_tokens"]
    assert first["cached_device_tokens"] == first["cached_tokens"]
    assert first["policy"] == "lru" and first["capacity_tokens"] == 16384
    assert 0 < first["ttft_ms"]["p50"] < first["turn_ms"]["p50"]
    # a cold cache each time: what the first run left was flushed
    for name in ("digest", "requests_digest", "prompt_tokens", "cached_tokens"):
        assert first[name] == second[name]


def test_what_stands_in_the_prompt_is_what_the_model_wrote(lru_server: Server, tmp_path: Path) -> None:
    # one agent, one session: all of a prompt but its newest message is in the cache, the answers included
    point = replay(lru_server, tmp_path / "t.json", "--trace", str(small_trace(tmp_path / "t.jsonl.gz")))
    assert point["trace"] == "t.jsonl.gz" and point["calls"] == 6
    prompts = [16 * n for n in (9, 11, 13)]
    found = [c["cached"] for c in map(json.loads, journal(tmp_path / "t.json").splitlines()) if "call" in c]
    # blocks reach over the output, so a prompt holds the previous prompt and answer; the last token is not stored
    assert found[1] >= prompts[0] + 15 and found[2] >= prompts[1] + 15
    assert found[3] >= 96  # the second session finds the system prompt


def journal(out: Path) -> str:
    (path,) = out.parent.glob(f"{out.stem}.*.calls.jsonl")
    return path.read_text()


def test_text_agents_are_replayed_with_the_servers_own_tokenizer(lru_server: Server, tmp_path: Path) -> None:
    point = replay(lru_server, tmp_path / "x.json", "--workload", "text:pipeline", "--max-calls", "7")
    assert set(point["agents"]) == {"Planner", "Travel", "Hotel", "Restaurant", "Critic", "Summarizer"}
    assert point["agents"]["Planner"]["cached_tokens"] > 1000  # its second call finds its anchor


def test_concurrent_sessions_answer_the_same(lru_server: Server, tmp_path: Path) -> None:
    words = ("--workload", "gsm8k", "--sessions", "3", "--max-calls", "20", "--concurrency")
    one = replay(lru_server, tmp_path / "1.json", *words, "1")
    more = replay(lru_server, tmp_path / "3.json", *words, "3")
    assert one["digest"] == more["digest"]


def test_a_request_that_does_not_fit_is_refused_not_fatal(lru_server: Server) -> None:
    async def ask() -> tuple[str | None, str | None, int]:
        async with Client(lru_server.url) as client:
            await client.warm_up()
            pool = await client.generate([5] * 17000, 4)
            context = await client.generate([5] * 40000, 4)
            fine = await client.generate([5] * 50, 4)
            return pool.refused, context.refused, len(fine.output_ids)

    pool, context, fine = asyncio.run(ask())
    assert pool and "\n" not in pool and context and fine == 4


# ---- compare ----


MARK = "SCOUT_TEST_MARK"


def processes_with(mark: str) -> list[str]:
    """Living processes that were started with this mark in their environment, whatever they call themselves now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().decode(errors='replace')[:120]}")
    return found


def start_compare(mark: str, out: Path, *words: str) -> "subprocess.Popen[str]":
    common = ["--time-scale", "0", "--quiet", "--json", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "compare", *common, *words],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition: Any, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


@pytest.mark.slow  # +4 min
def test_a_killed_compare_leaves_nothing_running_and_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    words = ["--workload", "pipeline", "--sessions", "2", "--max-calls", "18", "--max-total-tokens", "2F"]
    words += ["--policies", "lru,scout", "--model-path", str(tiny_model), "--logs", str(tmp_path)]
    mark = str(tmp_path)
    process = start_compare(mark, out, *words)
    until(lambda: len(processes_with(mark)) >= 4, 60)  # the command, the guard, and SGLang's first processes
    process.send_signal(signal.SIGKILL)  # while the server starts
    process.communicate(timeout=30)
    until(lambda: not processes_with(mark), 30)

    process = start_compare(mark, out, *words)
    until(lambda: any('"call"' in p.read_text() for p in tmp_path.glob("c.*.calls.jsonl")), 180)
    process.send_signal(signal.SIGTERM)  # while it replays
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "goes on from there" in err.splitlines()[-1]
    until(lambda: not processes_with(mark), 30)
    assert not read(out)["complete"]

    process = start_compare(mark, out, *words)
    printed, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert not processes_with(mark)
    document = read(out)
    assert document["complete"] and document["outputs"] == {"checked": 1, "different": []}
    lru, scout = document["points"]
    assert (lru["policy"], scout["policy"]) == ("lru", "scout") and lru["calls"] == scout["calls"] == 18
    assert scout["scout"][0]["faults"] == {} and scout["learned"]["rows"]
    assert "scout vs lru" in printed


@pytest.mark.slow  # +3 min
@pytest.mark.skipif(not TAU.exists(), reason="the recorded traces are not beside this checkout")
def test_a_slice_of_a_recorded_trace_runs_through_compare(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "tau.json"
    words = ["--trace", str(TAU), "--max-calls", "12", "--max-total-tokens", "1.5F", "--model-path", str(tiny_model)]
    process = start_compare(str(tmp_path), out, *words, "--report", str(tmp_path / "report"))
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    document = read(out)
    assert document["outputs"] == {"checked": 1, "different": []}
    assert {p["trace"] for p in document["points"]} == {TAU.name}
    assert all(p["calls"] == 12 and p["hit_rate"] > 0 for p in document["points"])
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.slow  # +1 min
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "nonsense"], "nonsense"),
        (["--policies", "scout", "--policy-config", 'scout={"nonsense": 1}'], "nonsense"),
    ],
)
def test_what_the_server_refuses_is_one_line(words: list[str], said: str, tiny_model: Path, tmp_path: Path) -> None:
    common = ["--workload", "pipeline", "--max-calls", "2", "--max-total-tokens", "4096"]
    process = start_compare(str(tmp_path), tmp_path / "x.json", *common, "--model-path", str(tiny_model), *words)
    _, err = process.communicate(timeout=180)
    assert process.returncode in (1, 2) and said in err.strip().splitlines()[-1]
    assert not processes_with(str(tmp_path))
