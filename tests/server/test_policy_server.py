"""Stock SGLang with `--radix-eviction-policy scout`: accepted, observed, exact, and never changing an output."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launch.command import CPU_OVERLAP_ENV, HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.server import Server
from launch.tiny_model import ORDINARY_TOKENS

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

Generate = Callable[..., dict[str, Any]]
LOGS = Path(__file__).parents[2] / "out" / "test-logs"
POOL = 4096
# With the overlap schedule, as on a GPU.
VERIFY = {"SGLANG_SCOUT_VERIFY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", CPU_OVERLAP_ENV: "1"}


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ORDINARY_TOKENS) for _ in range(length)]


def get(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.load(response)


def states(server: Server) -> list[dict[str, Any]]:
    """What the plug-in says of itself in each data-parallel rank."""
    return [state["scout"] for state in get(server.url, "/server_info")["internal_states"]]


def settled(server: Server) -> dict[str, Any]:
    """The plug-in's state once nothing is in flight and the idle checks have run."""
    deadline = time.monotonic() + 30
    while True:
        time.sleep(0.5)
        (state,) = states(server)
        if state["counters"]["in_flight"] == 0 or time.monotonic() > deadline:
            return state


def assert_sound(server: Server, core: str = "RustScoutCore") -> dict[str, Any]:
    """Everything hooked, the mirror exact, no fault, no request left behind, no leak, alive."""
    state = settled(server)
    assert state["unhooked"] == []
    assert state["mirror"]["differences"] == []
    assert state["live"] and state["faults"] == {}
    counts = state["counters"]
    assert counts["in_flight"] == 0 and counts["requests"] == counts["finished"] + counts["aborted"]
    assert counts["overflowed"] == 0
    log = server.log_path.read_text(errors="replace")
    assert f"Tree Core: {core}" in log
    for trouble in ("leak detected", "Scheduler hit an exception", "sglang-scout: fault", "Sanity check FAILED"):
        assert trouble not in log
    return state


def workload(sessions: int, turns: int, seed: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    """Interleaved agent sessions: shared anchors, a growing private context; (prompt, tag) in order."""
    rng = random.Random(seed)
    anchors = [prompt(160, 100 + agent) for agent in range(3)]
    context = {s: prompt(60, 1000 + s) for s in range(sessions)}
    calls = []
    for turn in range(turns):
        for session in range(sessions):
            agent = rng.randrange(3)
            tag = {"agent": f"agent{agent}", "session": f"w{seed}-{session}", "final": turn == turns - 1}
            calls.append((anchors[agent] + context[session], tag))
            context[session] = context[session] + prompt(40, 5000 + 100 * session + turn)
    return calls


@pytest.fixture(scope="module")
def scout_server(tiny_model: Path) -> Iterator[Server]:
    """One server for the module, started by the stock command `sglang serve`."""
    server = Server(
        tiny_model,
        "scout",
        policy_config='{"max_agents": 32}',
        max_total_tokens=POOL,
        env=VERIFY,
        extra_args=["--sleep-on-idle"],
        log_path=LOGS / "policy-scout.log",
    )
    with stock_serve(server):
        yield server


@contextlib.contextmanager
def stock_serve(server: Server) -> Iterator[Server]:
    """Run the server by `sglang serve` instead of `python -m sglang.launch_server`."""
    command = server.command
    script = Path(command.argv[0]).with_name("sglang")
    server.command = dataclasses.replace(command, argv=[str(script), "serve", *command.argv[3:]])
    with server:
        yield server


# ---- the stock command ----


def test_sglang_serve_takes_the_policy(scout_server: Server) -> None:
    (state,) = states(scout_server)
    assert state["policy"] == "scout" and state["live"]
    assert state["unhooked"] == []
    assert state["counters"]["requests"] == 0, "neither health checks nor the warm-up are observed"
    info = get(scout_server.url, "/server_info")
    assert info["internal_states"][0]["radix_eviction_policy"] == "scout"


def test_a_second_identical_prompt_is_cached(scout_server: Server, generate: Generate) -> None:
    tokens = prompt(300, 1)
    first, second = (generate(scout_server.url, tokens) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 299
    assert first["output_ids"] == second["output_ids"]


def test_tags_are_counted_and_a_malformed_one_is_served(scout_server: Server, generate: Generate, post: Any) -> None:
    before = settled(scout_server)["counters"]
    tokens = prompt(200, 2)
    tagged = generate(scout_server.url, tokens, custom_params={"scout": {"agent": "planner", "session": "t1"}})
    broken = generate(scout_server.url, tokens, custom_params={"scout": "planner"})
    session = post(
        scout_server.url,
        "/generate",
        input_ids=tokens,
        session_id="t2",
        sampling_params={"temperature": 0, "max_new_tokens": 16},
    )
    chat = post(
        scout_server.url,
        "/v1/chat/completions",
        model="any",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        custom_params={"scout": {"agent": "chat", "session": "t3", "final": True}},
    )
    assert tagged["output_ids"] == broken["output_ids"] == session["output_ids"]
    assert chat["choices"]
    after = settled(scout_server)["counters"]
    change = {name: after[name] - before[name] for name in ("requests", "tagged", "tag_errors", "finished")}
    assert change == {"requests": 4, "tagged": 3, "tag_errors": 1, "finished": 4}


def test_outputs_are_lrus_under_eviction_pressure(
    scout_server: Server, lru_server: Server, generate: Generate, post: Any
) -> None:
    for server in (scout_server, lru_server):
        post(server.url, "/flush_cache?timeout=30")
    answers = {}
    for server in (scout_server, lru_server):
        answers[server.url] = [
            generate(server.url, tokens, 12, ignore_eos=True, custom_params={"scout": tag})["output_ids"]
            for tokens, tag in workload(sessions=24, turns=4)
        ]
    assert answers[scout_server.url] == answers[lru_server.url]
    state = assert_sound(scout_server)
    assert state["counters"]["device_calls"] > 5, "the pool was meant to be too small"
    assert state["mirror"]["owned"] > 0 and state["mirror"]["output"] > 0


def test_concurrent_aborted_and_streamed_requests_leave_nothing(
    scout_server: Server, generate: Generate, post: Any
) -> None:
    before = settled(scout_server)["counters"]

    def call(number: int) -> None:
        generate(scout_server.url, prompt(220, 300 + number % 4), 48, ignore_eos=True)

    def cut(number: int) -> None:
        body = {"input_ids": prompt(900, 700 + number), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        request = urllib.request.Request(
            scout_server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=0.3).close()

    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(call, n) for n in range(8)] + [pool.submit(cut, n) for n in range(6)]
        for job in jobs:
            job.result()
    post(scout_server.url, "/abort_request", rid="", abort_all=True)
    after = assert_sound(scout_server)["counters"]
    assert after["requests"] - before["requests"] >= 8
    assert after["aborted"] > before["aborted"]


def test_a_session_that_is_over_goes_first(scout_server: Server, generate: Generate, post: Any) -> None:
    post(scout_server.url, "/flush_cache?timeout=30")

    def call(session: str, seed: int, length: int, final: bool = False) -> int:
        tag = {"agent": "going-on", "session": session, "final": final}
        answer = generate(scout_server.url, prompt(length, seed), 4, custom_params={"scout": tag})
        return answer["meta_info"]["cached_tokens"]

    for turn in range(4):  # two sessions grow; the one that LRU would keep longer ends
        call("keeps", 41, 400 + 100 * turn)
        call("over", 42, 400 + 100 * turn, final=turn == 3)
    for number in range(4):  # a little more than fits
        call(f"new{number}", 50 + number, 700)
    assert call("keeps", 41, 720) >= 690, "its context was kept"
    assert call("again", 42, 720) < 690, "this one was not"
    assert_sound(scout_server)


# ---- refusals: before any model is loaded ----


def refused(model: Path, *flags: str, **env: str) -> tuple[int, str]:
    """Exit code and the last line that a stock start says."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--device",
            "cpu",
            *flags,
        ],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_bad_config_refuses_to_start(tiny_model: Path) -> None:
    flags = ("--radix-eviction-policy", "scout", "--radix-eviction-policy-config")
    code, said = refused(tiny_model, *flags, '{"max_agent": 3}')
    assert code == 2
    assert said.startswith(
        "sglang-scout: error: --radix-eviction-policy-config: unknown key 'max_agent' for policy 'scout'; known keys: "
    )


def test_an_unselected_plugin_leaves_the_name_unknown(tiny_model: Path) -> None:
    code, said = refused(tiny_model, "--radix-eviction-policy", "scout", SGLANG_PLUGINS="scout_cpu")
    assert code == 2 and "invalid choice: 'scout'" in said


def test_the_switch_gives_the_rust_core_and_lru(tiny_model: Path, generate: Generate) -> None:
    server = Server(
        tiny_model,
        "scout",
        policy_config='{"any": "thing"}',
        max_total_tokens=POOL,
        env={"SGLANG_SCOUT_DISABLE": "1"},
        log_path=LOGS / "policy-disabled.log",
    )
    with server:
        log = server.log_path.read_text(errors="replace")
        assert "Tree Core: RustUnifiedTreeCore" in log and "SGLANG_SCOUT_DISABLE is set" in log
        state = get(server.url, "/server_info")["internal_states"][0]
        assert "scout" not in state and state["radix_eviction_policy"] == "lru"
        tokens = prompt(100, 1)
        generate(server.url, tokens)
        assert generate(server.url, tokens)["meta_info"]["cached_tokens"] == 99


# ---- slow: the other ways to run ----


def drive(server: Server, generate: Generate, threads: int = 6, tokens: int = 24, **kw: int) -> None:
    """A workload at some concurrency; every answer has its length."""
    calls = workload(**{"sessions": 24, "turns": 4, **kw})

    def one(call: tuple[list[int], dict[str, Any]]) -> int:
        answer = generate(server.url, call[0], tokens, ignore_eos=True, custom_params={"scout": call[1]})
        return answer["meta_info"]["completion_tokens"]

    with ThreadPoolExecutor(threads) as pool:
        assert set(pool.map(one, calls)) == {tokens}


@pytest.mark.slow
def test_cachescout_by_launch_server(start_server: Any, generate: Generate) -> None:
    server = start_server("cachescout", policy_config='{"E_max": 4}', max_total_tokens=POOL, env=VERIFY)
    drive(server, generate)
    state = assert_sound(server)
    assert state["policy"] == "cachescout" and state["counters"]["device_calls"] > 0


@pytest.mark.slow
def test_two_tensor_parallel_ranks_agree(start_server: Any, generate: Generate) -> None:
    server = start_server(
        "scout",
        max_total_tokens=POOL,
        extra_args=["--tp", "2"],
        env={**VERIFY, "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"},
    )
    drive(server, generate, threads=4, tokens=8)
    state = assert_sound(server)
    assert state["counters"]["device_calls"] > 0
    log = server.log_path.read_text(errors="replace")
    assert "Rank consensus checker is enabled" in log and "Found rank divergence" not in log


@pytest.mark.slow
@pytest.mark.skipif(available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB free")
@pytest.mark.parametrize(("page_size", "core"), [("1", "python"), ("16", "rust")])
def test_host_tier(page_size: str, core: str, start_server: Any, generate: Generate) -> None:
    layout = "layer_first" if page_size == "1" else "page_first_direct"
    server = start_server(
        "scout",
        max_total_tokens=POOL,
        extra_args=[
            "--enable-hierarchical-cache",
            *("--hicache-ratio", "2", "--page-size", page_size, "--hicache-mem-layout", layout),
        ],
        env={**VERIFY, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core},
    )
    drive(server, generate)
    drive(server, generate, seed=1)
    state = assert_sound(server, {"rust": "RustScoutCore", "python": "ScoutTreeCore"}[core])
    assert state["counters"]["load_backs"] > 0
    if core == "python":  # the Rust core orders its host tier by itself, and what is there only is not mirrored
        assert state["mirror"]["host_only"] > 0 and state["counters"]["host_calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_and_chunked_prefill(overlap: bool, start_server: Any, generate: Generate) -> None:
    server = start_server(
        "scout",
        max_total_tokens=POOL,
        extra_args=["--chunked-prefill-size", "128"],
        env={**VERIFY, "SGLANG_TEST_RETRACT": "1", CPU_OVERLAP_ENV: str(int(overlap))},
    )
    drive(server, generate, threads=8, tokens=40)
    assert_sound(server)
    assert "Testing retraction" in server.log_path.read_text(errors="replace")
