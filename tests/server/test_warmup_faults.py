"""Warmup on real servers when things go wrong: nothing leaks, hangs, or answers a client with a warmup's output."""

import contextlib
import http.client
import importlib.util
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launch.command import CPU_OVERLAP_ENV
from launch.server import Server
from tests.server.conftest import _starter
from tests.server.lora import adapter, unpinned
from tests.server.warm_traffic import (
    CONFIG,
    EAGER,
    POOL,
    VERIFY,
    Generate,
    Post,
    assert_all_sound,
    assert_sound,
    await_slice,
    await_wait,
    flush,
    log_of,
    pipeline,
    play,
    prompt,
    provoke,
    say,
    settled,
    slices,
    state_of,
    waiting,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

LONG = 2000  # tokens of an anchor that takes several slices
ROOM = 8192  # tokens; more than two of them
SHOWN = ["--log-level", "debug"]  # says when a slice is sent


def learned(server: Server, generate: Generate, anchor: int = LONG) -> Server:
    """Two agents take turns: when the first has called, the anchor of the second is warmed."""
    play(server, generate, waiting(pipeline(sessions=3, turns=3, pause=0.0, anchor=anchor, agents=2)))
    return server


@pytest.fixture(scope="module")
def server(tiny_model: Path, generate: Generate) -> Iterator[Server]:
    """A server that has learned; the tests leave it as it was."""
    with contextlib.ExitStack() as stack:
        start = _starter(stack, tiny_model, "warmup-faults")
        env = {**VERIFY, CPU_OVERLAP_ENV: "1"}
        options = {"policy_config": EAGER % 64, "max_total_tokens": ROOM, "extra_args": SHOWN, "env": env}
        yield learned(start("scout", **options), generate)


def test_it_survives_what_clients_do(start_server: Any, generate: Generate, post: Post, tiny_model: Path) -> None:
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
                flush(server)
                flushed += 1
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


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_generation_is_paused_in_the_middle_of_a_warmup(
    server: Server, generate: Generate, post: Post, mode: str
) -> None:
    provoke(server, generate)
    logged = len(log_of(server))
    post(server.url, "/pause_generation", mode=mode)
    if mode != "abort":  # which pauses nothing but what takes requests in
        await_wait(server, "PauseGenerationReqInput", logged)
        time.sleep(0.5)
        sent = slices(server)
        time.sleep(1)
        assert slices(server) == sent
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server.url, prompt(40, 1), 4, ignore_eos=True)
        time.sleep(0.5)
        assert not answer.done()
        post(server.url, "/continue_generation")
        assert len(answer.result(30)["output_ids"]) == 4
    before = assert_sound(server)["warmup"]["finished"]
    provoke(server, generate)
    assert assert_sound(server)["warmup"]["finished"] > before, "and goes on"


def test_clients_leave_while_a_warmup_runs(server: Server, generate: Generate) -> None:
    before = settled(server)[0]["counters"]
    for number in range(4):
        provoke(server, generate)
        client = http.client.HTTPConnection(server.command.host, server.command.port, timeout=30)
        body = {
            "input_ids": prompt(40, number),
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
            "stream": True,
        }
        client.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(0.05 * (number + 1))
        client.close()
        time.sleep(0.5)
    after = assert_sound(server)["counters"]
    assert after["requests"] - before["requests"] - 4 in (3, 4), "the first may leave before it is heard"
    assert after["aborted"] >= before["aborted"] + 2


def test_health_checks_while_a_warmup_runs(server: Server, generate: Generate) -> None:
    provoke(server, generate)
    before = settled(server)[0]
    for _ in range(3):
        provoke(server, generate)
        began = time.monotonic()
        with urllib.request.urlopen(server.url + "/health_generate", timeout=30) as response:
            assert response.status == 200
        assert time.monotonic() - began < 20
    after = assert_sound(server)
    assert after["counters"]["requests"] == before["counters"]["requests"] + 3, "not learned from"
    assert after["warmup"]["anchors"] == before["warmup"]["anchors"]


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_server_stops_in_the_middle_of_a_warmup(start_server: Any, generate: Generate, overlap: str) -> None:
    """SGLang asks its schedulers to stop up to 5 s after the signal; slices go on until then."""
    server = start_server(
        "scout",
        policy_config=EAGER % 16,
        max_total_tokens=20480,
        extra_args=SHOWN,
        env={**VERIFY, CPU_OVERLAP_ENV: overlap},
        stop_grace_s=40,
    )
    learned(server, generate, anchor=6000)
    pids = server.pids
    provoke(server, generate)
    sent, began = slices(server), time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 35 and slices(server) > sent
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_full_queue(start_server: Any, generate: Generate, post: Post) -> None:
    """One runs, one waits: a client is turned away where it is without warmups, and a warmup takes nobody's place."""
    limits = ["--max-running-requests", "1", "--max-queued-requests", "1"]
    server = start_server(
        "scout",
        policy_config=CONFIG,
        max_total_tokens=ROOM,
        extra_args=[*SHOWN, *limits],
        env={**VERIFY, CPU_OVERLAP_ENV: "1"},
    )
    learned(server, generate)

    def client(number: int, delay: float, tokens: int) -> int:
        time.sleep(delay)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        try:
            answer = post(server.url, "/generate", input_ids=prompt(40, number), sampling_params=sampling)
        except urllib.error.HTTPError as error:
            assert "queue is full" in error.read().decode()
            return error.code
        assert len(answer["output_ids"]) == tokens
        return 200

    told: dict[int, list[int]] = {}
    with ThreadPoolExecutor(4) as pool:
        for clients, trials, tokens in ((2, 6, 30), (4, 2, 150)):
            for trial in range(trials):
                provoke(server, generate)
                numbers, delays = [10 * trial + n for n in range(clients)], [0.05 * n for n in range(clients)]
                told.setdefault(clients, []).extend(pool.map(client, numbers, delays, [tokens] * clients))
    # two that come in one poll, with no slice running, are one too many for SGLang
    assert told[2].count(503) <= 1 and set(told[4]) == {200, 503}
    state = assert_sound(server)
    assert state["counters"]["aborted"] == told[2].count(503) + told[4].count(503), "and nobody else was"
    issued = state["warmup"]["issued"]
    provoke(server, generate)
    assert assert_sound(server)["warmup"]["issued"] > issued


def test_an_adapter_goes_and_another_one_comes_by_its_name(start_server: Any, post: Post, tmp_path: Path) -> None:
    paths = {name: adapter(tmp_path / name, bit) for name, bit in (("one", 0), ("two", 3), ("new", 5))}
    server = start_server(
        "scout",
        policy_config=EAGER % 16,
        max_total_tokens=POOL,
        extra_args=[
            *SHOWN,
            *("--lora-backend", "torch_native", "--max-loras-per-batch", "4"),
            *("--lora-paths", f"one={paths['one']}", f"two={paths['two']}"),
        ],
        env={**VERIFY, CPU_OVERLAP_ENV: "1", **unpinned(tmp_path / "plugin")},
    )

    def useful() -> int:
        return int(state_of(server)["warmup"]["useful_tokens"])

    def talk(adapter: str, name: str, sessions: int = 3) -> list[list[int]]:
        outputs = []
        for call in pipeline(sessions=sessions, turns=4, anchor=500, agents=2, name=name):
            time.sleep(0.4)
            outputs.append(say(server, post, call, lora_path=adapter)["output_ids"])
        return outputs

    def cold(adapter: str) -> list[list[int]]:
        calls = pipeline(sessions=1, turns=4, anchor=500, agents=2)
        return [
            post(
                server.url,
                "/generate",
                input_ids=text,
                lora_path=adapter,
                cache_salt=f"cold {adapter} {number}",
                sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            )["output_ids"]
            for number, (text, _, _) in enumerate(calls)
        ]

    talk("two", "b")
    of_two = useful()
    assert of_two > 0
    old = talk("one", "a")[:4]
    assert useful() > of_two, "each adapter's agents are warmed"
    assert old == cold("one") != cold("two")

    (call,) = pipeline(sessions=1, turns=1, anchor=500, agents=2, name="waits")
    say(server, post, (call[0], {**call[1], "final": False}, 0.0), lora_path="one")
    before = settled(server)[0]["warmup"]
    flush(server)
    since = server.log_path.stat().st_size
    say(server, post, (call[0][:40], {**call[1], "final": False, "session": "again"}, 0.0), lora_path="one")
    await_slice(server, since)
    began = time.monotonic()
    assert post(server.url, "/unload_lora_adapter", lora_name="one")["success"]
    assert time.monotonic() - began < 20
    await_wait(server, "UnloadLoRAAdapterReqInput")
    say(server, post, call, lora_path="two")
    deadline = time.monotonic() + 10
    while (anchors := assert_sound(server)["warmup"]["anchors"]) >= before["anchors"]:
        assert time.monotonic() < deadline, f"{anchors} anchors: that of an adapter which is gone was never dropped"
    assert len(say(server, post, call, lora_path="two")["output_ids"]) == 4

    assert post(server.url, "/load_lora_adapter", lora_name="one", lora_path=str(paths["new"]))["success"]
    earlier = useful()
    new = talk("one", "c")[:4]
    assert useful() > earlier
    assert new == cold("one") != old
    assert_sound(server)


def test_two_data_parallel_ranks_warm_on_their_own(start_server: Any, post: Post) -> None:
    server = start_server(
        "scout",
        policy_config=CONFIG,
        max_total_tokens=POOL,
        extra_args=[*SHOWN, "--dp-size", "2"],
        env={**VERIFY, CPU_OVERLAP_ENV: "1"},
    )

    def talk(rank: int) -> None:
        for call in pipeline(sessions=3, turns=4, anchor=500, agents=2, name=f"rank{rank}-"):
            time.sleep(0.5)
            assert len(say(server, post, call, routed_dp_rank=rank)["output_ids"]) == 4

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(talk, range(2)))
    states = assert_all_sound(server)
    assert len(states) == 2
    for state in states:
        assert state["warmup"]["useful_tokens"] > 0
        assert state["counters"]["requests"] == 12
