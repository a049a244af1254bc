"""Warmup on real servers: it helps a pipeline, changes no answer, and leaves no trace when things go wrong."""

import contextlib
import importlib.util
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.command import CPU_OVERLAP_ENV, HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.server import Server
from launch.tiny_model import ORDINARY_TOKENS

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

Generate = Callable[..., dict[str, Any]]
POOL = 900  # tokens; the pipeline's anchors alone take more
ANCHOR = 300
AGENTS = 4
VERIFY = {"SGLANG_SCOUT_VERIFY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
CONFIG = '{"warmup": true}'


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ORDINARY_TOKENS) for _ in range(length)]


def state_of(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/server_info", timeout=60) as response:
        (state,) = json.load(response)["internal_states"]
    found: dict[str, Any] = state["scout"]
    return found


def settled(server: Server) -> dict[str, Any]:
    """The plug-in's state once no request and no slice is in the engine."""
    deadline = time.monotonic() + 30
    while True:
        time.sleep(0.3)
        state = state_of(server)
        if state["counters"]["in_flight"] == state["warmup"]["in_flight"] == 0 or time.monotonic() > deadline:
            return state


def assert_sound(server: Server) -> dict[str, Any]:
    state = settled(server)
    assert state["live"] and state["faults"] == {} and state["unhooked"] == []
    assert state["mirror"]["differences"] == []
    warmup, counts = state["warmup"], state["counters"]
    assert warmup["on"] and warmup["in_flight"] == warmup["delayed"] == 0
    assert warmup["issued"] == warmup["finished"] + warmup["aborted"]
    assert counts["in_flight"] == 0 and counts["requests"] == counts["finished"] + counts["aborted"]
    log = server.log_path.read_text(errors="replace")
    for trouble in (
        "leak detected",
        "Scheduler hit an exception",
        "sglang-scout: fault",
        "Sanity check FAILED",
        "state was deleted in TokenizerManager",
    ):
        assert trouble not in log
    return state


def pipeline(sessions: int, turns: int = 8, pause: float = 1.0) -> list[tuple[list[int], dict[str, Any], float]]:
    """Sessions one after the other, agents in turn: (prompt, tag, seconds before it)."""
    anchors = [prompt(ANCHOR, 100 + agent) for agent in range(AGENTS)]
    calls = []
    for session in range(sessions):
        said = prompt(60, 1000 + session)
        for turn in range(turns):
            agent = turn % AGENTS
            tag = {"agent": f"agent{agent}", "session": f"s{session}", "final": turn == turns - 1}
            calls.append((anchors[agent] + said, tag, pause))
            said = said + prompt(20, 5000 + 100 * session + turn)
    return calls


def play(server: Server, generate: Generate, calls: list[tuple[list[int], dict[str, Any], float]]) -> list[Any]:
    answers = []
    for tokens, tag, pause in calls:
        time.sleep(pause)
        answers.append(generate(server.url, tokens, 4, ignore_eos=True, custom_params={"scout": tag}))
    return answers


def scraped(server: Server) -> dict[tuple[Any, ...], float]:
    """What Prometheus would scrape: (name, *(label, value)) without the labels that all samples of a server share."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found: dict[tuple[Any, ...], float] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = {name: value for name, value in sample.labels.items() if name in ("mode", "outcome")}
        key = (sample.name, *sorted(labels.items()))
        found[key] = found.get(key, 0.0) + sample.value
    return found


def test_it_helps_a_pipeline_and_changes_no_answer(start_server: Any, generate: Generate) -> None:
    """Off without the overlap schedule, on with it: not even that changes an answer."""
    calls = pipeline(sessions=4, pause=0.7)
    outputs, cached = [], []
    for config in (None, CONFIG):
        env = {**VERIFY, CPU_OVERLAP_ENV: str(int(config is not None))}
        server = start_server(
            "scout", policy_config=config, max_total_tokens=POOL, env=env, extra_args=["--enable-metrics"]
        )
        before = scraped(server)
        answers = play(server, generate, calls)
        outputs.append([answer["output_ids"] for answer in answers])
        cached.append(sum(answer["meta_info"]["cached_tokens"] for answer in answers))
        if config is None:
            assert "warmup" not in state_of(server)
            server.stop()
    assert outputs[0] == outputs[1]
    warmup = assert_sound(server)["warmup"]
    assert warmup["useful_tokens"] > 1000 and warmup["gate"] == "open"
    assert cached[1] > cached[0] + 1000, "what was useful shows in what the clients are told"
    log = server.log_path.read_text(errors="replace")
    assert "first warmup" in log and "used by requests" in log and "Warmup batch, #new-token: " in log

    def new(name: str, **labels: str) -> float:
        key = (name, *sorted(labels.items()))
        return after.get(key, 0.0) - before.get(key, 0.0)

    after = scraped(server)
    computed = sum(len(tokens) for tokens, *_ in calls) - cached[1]
    assert new("sglang:realtime_tokens_total", mode="prefill_compute") == computed, "no slice among clients' tokens"
    assert new("sglang:realtime_tokens_total", mode="prefill_cache") == cached[1]
    assert new("sglang:queue_time_seconds_count") == len(calls)
    assert new("sglang_scout:warmup_tokens_total", outcome="useful") == warmup["useful_tokens"]
    assert new("sglang_scout:warmup_requests_total", outcome="finished") == warmup["finished"]


def test_it_survives_what_clients_do(start_server: Any, generate: Generate, post: Any, tiny_model: Path) -> None:
    """Aborts, flushes, pauses, weights and look-alike ids, again and again in the middle of warmups."""
    server = start_server("scout", policy_config=CONFIG, max_total_tokens=POOL, env={**VERIFY, CPU_OVERLAP_ENV: "1"})
    calls = pipeline(sessions=9, pause=0.0)
    flushed = updated = 0
    for number, (tokens, tag, _) in enumerate(calls):
        answer = generate(server.url, tokens, 2, ignore_eos=True, custom_params={"scout": tag})
        assert len(answer["output_ids"]) == 2
        time.sleep(0.03 * (number % 5))  # into the warmup that follows, at different places
        match number % 6:
            case 1:
                post(server.url, "/abort_request", rid="", abort_all=True)
            case 2:
                post(server.url, "/abort_request", rid="scout-warmup-")
            case 3 if number % 4 == 3:
                with urllib.request.urlopen(server.url + "/flush_cache", timeout=60) as response:
                    flushed += response.status == 200  # raises on 400, which is what a busy server answers
            case 0 if number % 24 == 12:
                done = post(server.url, "/update_weights_from_disk", model_path=str(tiny_model))
                assert done["success"], done
                updated += 1
            case 4:
                post(server.url, "/pause_generation", mode="retract")
                post(server.url, "/continue_generation")
            case 5:
                body = {
                    "rid": f"scout-warmup-{number}",
                    "input_ids": tokens,
                    "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
                }
                assert len(post(server.url, "/generate", **body)["output_ids"]) == 3
    assert flushed > 0 and updated > 0
    state = assert_sound(server)
    assert state["warmup"]["issued"] > 10


def test_it_never_gets_in_the_way_of_concurrent_sessions(start_server: Any, generate: Generate) -> None:
    server = start_server(
        "scout",
        policy_config=CONFIG,
        max_total_tokens=POOL + 1024,
        extra_args=["--chunked-prefill-size", "256"],
        env={**VERIFY, CPU_OVERLAP_ENV: "1"},
    )
    by_session: dict[str, list[Any]] = {}
    for call in pipeline(sessions=8, turns=8, pause=0.1):
        by_session.setdefault(call[1]["session"], []).append(call)
    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(lambda calls: play(server, generate, calls), by_session.values()):
            assert all(len(answer["output_ids"]) == 4 for answer in answers)
    assert_sound(server)


def test_two_tensor_parallel_ranks_agree(start_server: Any, generate: Generate) -> None:
    server = start_server(
        "scout",
        policy_config=CONFIG,
        max_total_tokens=POOL,
        extra_args=["--tp", "2"],
        env={**VERIFY, CPU_OVERLAP_ENV: "1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"},
    )
    play(server, generate, pipeline(sessions=3, pause=1.5))
    assert assert_sound(server)["warmup"]["useful_tokens"] > 500
    log = server.log_path.read_text(errors="replace")
    assert "Rank consensus checker is enabled" in log and "Found rank divergence" not in log


@pytest.mark.skipif(available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB free")
def test_what_is_in_the_host_tier_comes_back_by_itself(start_server: Any, generate: Generate) -> None:
    server = start_server(
        "scout",
        policy_config=CONFIG,
        max_total_tokens=POOL,
        extra_args=["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-mem-layout", "layer_first"],
        env={**VERIFY, CPU_OVERLAP_ENV: "1"},
    )
    play(server, generate, pipeline(sessions=4, pause=0.7))
    state = assert_sound(server)
    assert state["warmup"]["issued"] > 0 and state["counters"]["load_backs"] > 0
    assert state["warmup"]["tokens"] < ANCHOR * AGENTS, "loaded back, not computed again"


def test_namespaces_and_skipped_polls_and_no_tokenizer(start_server: Any, post: Any) -> None:
    """Tenants are warmed apart, with the receiver skipping polls and without a tokenizer."""
    server = start_server(
        "scout",
        policy_config=CONFIG,
        max_total_tokens=POOL,
        extra_args=["--scheduler-recv-interval", "8", "--skip-tokenizer-init"],
        env={**VERIFY, CPU_OVERLAP_ENV: "0"},
    )
    for tokens, tag, _ in pipeline(sessions=5):
        time.sleep(0.7)
        with contextlib.suppress(urllib.error.HTTPError):
            answer = post(
                server.url,
                "/generate",
                input_ids=tokens,
                extra_key="tenant",
                cache_salt="salt",
                sampling_params={
                    "temperature": 0,
                    "max_new_tokens": 2,
                    "ignore_eos": True,
                    "custom_params": {"scout": tag},
                },
            )
    assert answer["meta_info"]["cached_tokens"] > 0
    warmup = assert_sound(server)["warmup"]
    assert warmup["useful_tokens"] > 1000
