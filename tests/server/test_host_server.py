"""A real server with HiCache and admission answers what a server without any cache answers.

SGLANG_SCOUT_REQUESTS: requests per server (default 150).
"""

import importlib.util
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from launch.command import HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.server import Server
from tests.server.test_policy_server import VERIFY, assert_sound, prompt

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,  # a minute on two free cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.skipif(available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB free"),
]

REQUESTS = int(os.environ.get("SGLANG_SCOUT_REQUESTS", "150"))
POOL = 800  # tokens; eight sessions hold some 2,500


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Eight sessions in random order whose contexts grow, and begin anew; (prompt, tag)."""
    rng = random.Random(11)
    contexts: dict[int, tuple[int, list[int]]] = {}
    made = []
    for number in range(REQUESTS):
        lane = rng.randrange(8)
        life, context = contexts.get(lane, (0, []))
        if len(context) > 500 or not context:
            life, context = number, prompt(60, 10 + lane % 2)
        context = context + prompt(rng.randint(20, 90), 1000 + number)
        contexts[lane] = (life, context)
        made.append((context, {"agent": f"a{lane % 2}", "session": f"{lane}-{life}"}))
    return made


def answers(server: Server, generate: Callable[..., Any]) -> list[tuple[list[int], int]]:
    """(output, cached tokens) of every request."""
    out = []
    for tokens, tag in requests():
        answer = generate(server.url, tokens, 3, ignore_eos=True, custom_params={"scout": tag})
        out.append((answer["output_ids"], answer["meta_info"]["cached_tokens"]))
    return out


def test_same_answers_as_without_a_cache(start_server: Callable[..., Server], generate: Callable[..., Any]) -> None:
    with_tiers = start_server(
        "scout",
        max_total_tokens=POOL,
        extra_args=[
            *("--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--hicache-write-policy", "write_through"),
            *("--radix-eviction-policy-config", json.dumps({"admission_chunk": 16, "admission_kappa": 6})),
        ],
        env=VERIFY,
    )
    found = answers(with_tiers, generate)
    state = assert_sound(with_tiers)
    host = state["host"]
    assert host["declined"] > REQUESTS / 50 and host["evicted_tokens"] > POOL and state["counters"]["load_backs"] > 3
    with_tiers.stop()
    without = answers(start_server("lru", max_total_tokens=4096, extra_args=["--disable-radix-cache"]), generate)
    assert sum(cached for _, cached in without) == 0 < sum(cached for _, cached in found)
    wrong = [n for n, ((ours, _), (theirs, _)) in enumerate(zip(found, without)) if ours != theirs]
    assert not wrong, f"{len(wrong)} answers differ, the first is request {wrong[0]}"
