"""Warmup on real servers: it helps a pipeline and changes no answer, alone, with many sessions, ranks and tiers."""

import contextlib
import importlib.util
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.command import CPU_OVERLAP_ENV, HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.server import Server
from tests.server.warm_traffic import (
    AGENTS,
    ANCHOR,
    CONFIG,
    POOL,
    VERIFY,
    Generate,
    assert_sound,
    pipeline,
    play,
    state_of,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]


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

    for _ in range(20):
        after, warmup = scraped(server), assert_sound(server)["warmup"]
        if new("sglang_scout:warmup_requests_total", outcome="finished") == warmup["finished"]:
            break  # else one more slice in between
    computed = sum(len(tokens) for tokens, *_ in calls) - cached[1]
    assert new("sglang:realtime_tokens_total", mode="prefill_compute") == computed, "no slice among clients' tokens"
    assert new("sglang:realtime_tokens_total", mode="prefill_cache") == cached[1]
    assert new("sglang:queue_time_seconds_count") == len(calls)
    assert new("sglang_scout:warmup_tokens_total", outcome="useful") == warmup["useful_tokens"]
    assert new("sglang_scout:warmup_requests_total", outcome="finished") == warmup["finished"]


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
