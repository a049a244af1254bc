"""A real server under random traffic: aborts, chunks, retraction, flushes, trims. Nothing leaks, the mirror is exact.

SGLANG_SCOUT_SOAK: seconds of traffic per server (default 20).
"""

import contextlib
import importlib.util
import json
import os
import random
import threading
import time
import urllib.request
from collections import Counter
from typing import Any

import pytest

from launch.command import HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.server import Server
from tests.server.test_policy_server import POOL, VERIFY, assert_sound, prompt

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,  # +3 min, all four
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

SECONDS = float(os.environ.get("SGLANG_SCOUT_SOAK", "20"))
CLIENTS = 6


class Client(threading.Thread):
    """Sessions one after the other; some are cut off, some are never tagged, some say when they end."""

    def __init__(self, url: str, seed: int, until: float, pause: float = 0.0, agents: int = 4) -> None:
        """`pause`: seconds before a call, at most."""
        super().__init__(daemon=True)
        self.pause, self.agents = pause, agents
        self.url, self.until = url, until
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        rng = self.random
        while time.monotonic() < self.until:
            name, tagged = f"{self.name}-{rng.random()}", rng.random() < 0.7
            context = prompt(rng.randint(20, 300), rng.randrange(10**6))
            for turn in range(turns := rng.randint(1, 8)):
                if time.monotonic() > self.until:
                    return
                time.sleep(rng.uniform(0.0, self.pause))
                agent = rng.randrange(self.agents)
                tag = {"agent": f"a{agent}", "session": name, "final": turn == turns - 1 and rng.random() < 0.5}
                tokens = prompt(160, 100 + agent) + context
                self.call(tokens, {"scout": tag} if tagged else None)
                context = context + prompt(rng.randint(1, 120), rng.randrange(10**6))

    def call(self, tokens: list[int], params: dict[str, Any] | None) -> None:
        rng = self.random
        long = rng.random() < 0.15
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": 200 if long else rng.randint(1, 40),
            "ignore_eos": True,
        }
        if params is not None:
            sampling["custom_params"] = params
        body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling}
        if rng.random() < 0.1:
            body["extra_key"] = "apart"
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=rng.uniform(0.05, 0.4) if long else 120) as response:
                answer = json.load(response)
        except OSError:
            self.seen["cut off" if long else "failed"] += 1
            return
        self.seen["wrong"] += answer["meta_info"]["completion_tokens"] != sampling["max_new_tokens"]
        self.seen["cached"] += answer["meta_info"]["cached_tokens"] > 0
        self.seen["answered"] += 1


CASES = {
    "page 1, chunks, retraction": (["--chunked-prefill-size", "128"], {"SGLANG_TEST_RETRACT": "1"}),
    "page 16, chunks": (["--page-size", "16", "--chunked-prefill-size", "128"], {}),
    "host tier": (["--enable-hierarchical-cache", "--hicache-ratio", "2"], {}),
    "warmup": (["--chunked-prefill-size", "128"], {}),
}
# Eager: whatever is missing is warmed at every idle moment, and the gate never closes.
CONFIGS = {
    "warmup": json.dumps(
        {"warmup": True, "warmup_r_min": 0, "warmup_p_min": 0, "warmup_value": False, "warmup_share": 0}
    )
}


@pytest.mark.parametrize("case", CASES)
def test_random_traffic(case: str, start_server: Any, post: Any) -> None:
    flags, env = CASES[case]
    if case == "host tier" and available_memory_gib() < HOST_TIER_MIN_FREE_GIB:
        pytest.skip("SGLang's host tier wants 10 GiB free")
    server: Server = start_server(
        "scout",
        policy_config=CONFIGS.get(case),
        max_total_tokens=POOL,
        extra_args=flags,
        # SGLang looks this often whether the client of an answer in one piece is still there: in seconds, 4 by default
        env={**VERIFY, "SGLANG_SCOUT_VERIFY": "2", "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1", **env},
    )
    until = time.monotonic() + SECONDS
    if case == "warmup":  # needs a server that is idle now and then, and more anchors than fit
        clients = [Client(server.url, seed, until, pause=0.5, agents=24) for seed in range(2)]
    else:
        clients = [Client(server.url, seed, until) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    while time.monotonic() < until:
        time.sleep(SECONDS / 4)
        with contextlib.suppress(OSError):  # refused while requests run
            post(server.url, "/flush_cache")
    for client in clients:
        client.join(timeout=180)
        assert not client.is_alive(), "a client waits for ever"
    seen = sum((client.seen for client in clients), Counter[str]())
    state = assert_sound(server)
    assert not seen["failed"] and not seen["wrong"] and seen["answered"] > len(clients) and seen["cached"] > 0
    if case != "warmup":  # two clients' answers can be done before SGLang looks
        assert seen["cut off"] == 0 or state["counters"]["aborted"] > 0
    assert state["counters"]["device_calls"] > 10
    assert case == "host tier" or state["counters"]["trims"] > 0
    if case == "warmup":
        assert state["warmup"]["on"] and state["warmup"]["issued"] > 0
        assert state["warmup"]["issued"] == state["warmup"]["finished"] + state["warmup"]["aborted"]
