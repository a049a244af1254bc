"""`sglang-scout plan --url` on a real server: the plan of what it was sent, and what the engine really computes."""

import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.command import HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.server import Server
from launch.tiny_model import ORDINARY_TOKENS
from sglang_scout import cli

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

POOL = 16384  # that of `lru_server`
SESSIONS, TURNS, SHARED, NEW, OUTPUT = 24, 6, 300, 150, 8  # tokens; 24 sessions of up to 1,240 do not fit
SIZES = "8192,16384,20000,24576,40000"

Generate = Callable[..., dict[str, Any]]
Ask = Callable[[list[int]], dict[str, Any]]
Sent = list[tuple[list[int], list[int], int]]  # prompt, output, tokens that were found


def conversation(ask: Ask) -> Sent:
    """Sessions that grow, one call after the other, in another order each turn."""
    rng = random.Random(7)

    def some(count: int) -> list[int]:
        return [rng.randrange(ORDINARY_TOKENS) for _ in range(count)]

    shared = some(SHARED)
    prompts = [shared + some(NEW) for _ in range(SESSIONS)]
    sent: Sent = []
    for _ in range(TURNS):
        for session in rng.sample(range(SESSIONS), SESSIONS):
            answer = ask(prompts[session])
            output = answer["output_ids"]
            sent.append((prompts[session], output, answer["meta_info"]["cached_tokens"]))
            prompts[session] = prompts[session] + output + some(NEW)
    return sent


def as_trace(sent: Sent, path: Path) -> Path:
    """The calls in their order, as one session: a block per token, its id that of everything up to it."""
    ids: dict[tuple[int, int], int] = {}  # (id of what stands before, token) -> id

    def runs(tokens: list[int]) -> Iterator[list[int]]:
        before, run = 0, [0, 0]
        for token in tokens:
            before = ids.setdefault((before, token), len(ids) + 1)
            if run[1] and before == run[0] + run[1]:
                run[1] += 1
                continue
            if run[1]:
                yield run
            run = [before, 1]
        yield run

    with gzip.open(path, "wt") as file:
        for step, (prompt, output, _) in enumerate(sent):
            line = {"session": 0, "step": step, "agent": "a", "t": None, "block_size": 1, "input_len": len(prompt)}
            blocks = list(runs(prompt + output))
            file.write(json.dumps(line | {"output_len": len(output), "blocks_rle": blocks}) + "\n")
    return path


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def plan(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main(["plan", *words, "--host-tokens", SIZES, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


def test_the_plan_of_a_server_is_the_plan_of_what_it_was_sent(
    start_server: Callable[..., Server],
    lru_server: Server,
    generate: Generate,
    post: Callable[..., dict[str, Any]],
    planned: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """By token (`curve_chunk` 1): the two differ by no more than the outputs, which a server meets one prompt later.

    At the pool's size the plan is within 10 % of the prefill that stock SGLang under LRU computes.
    """
    server = start_server("scout", policy_config='{"curve_chunk": 1}', max_total_tokens=POOL)
    assert cli.main(["plan", "--url", server.url]) == 2, "too few calls"
    sent = conversation(lambda prompt: generate(server.url, prompt, OUTPUT, ignore_eos=True))
    watched = planned("--url", server.url)
    trace = str(as_trace(sent, tmp_path / "t.jsonl.gz"))
    recorded = planned("--trace", trace, "--concurrency", "1", "--device-tokens", str(POOL))
    outputs = sum(len(output) for _, output, _ in sent)
    assert watched["sample"]["rate"] < 1 and watched["device_tokens"] == POOL
    for name in ("calls", "prompt_tokens"):
        assert watched[name] == recorded[name]
    error = 0.01 * recorded["prompt_tokens"]  # of the sample
    for mine, theirs in zip(watched["host"], recorded["host"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert -outputs - error <= mine["found_tokens"] - theirs["found_tokens"] <= error

    post(lru_server.url, "/flush_cache?timeout=30")
    again = conversation(lambda prompt: generate(lru_server.url, prompt, OUTPUT, ignore_eos=True))
    assert [(prompt, output) for prompt, output, _ in again] == [(prompt, output) for prompt, output, _ in sent]
    computed = sum(len(prompt) - cached for prompt, _, cached in again)
    at = next(point for point in recorded["curve"] if point["tokens"] == POOL)
    assert at["computed_prefill_tokens"] == pytest.approx(computed, rel=0.1)


@pytest.mark.skipif(available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB free")
@pytest.mark.parametrize("ratio", [3])
def test_the_host_tier_computes_what_is_predicted(
    ratio: int,
    start_server: Callable[..., Server],
    generate: Generate,
    planned: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Stock SGLang with HiCache and LRU: computed prefill and restored tokens within 5 % of the plan."""
    pool, restored = 8192, 0
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", str(ratio), "--hicache-write-policy", "write_through"]
    server = start_server("lru", max_total_tokens=pool, extra_args=flags)

    def ask(prompt: list[int]) -> dict[str, Any]:
        nonlocal restored
        answer = generate(server.url, prompt, OUTPUT, ignore_eos=True)
        restored += (answer["meta_info"]["cached_tokens_details"] or {}).get("host", 0)
        return answer

    sent = conversation(ask)
    trace = str(as_trace(sent, tmp_path / "t.jsonl.gz"))
    report = planned("--trace", trace, "--concurrency", "1", "--device-tokens", str(pool))
    row = next(row for row in report["host"] if row["tokens"] == ratio * pool)
    assert row["computed_prefill_tokens"] == pytest.approx(sum(len(p) - found for p, _, found in sent), rel=0.05)
    assert row["restored_tokens"] == pytest.approx(restored, rel=0.05)
    assert restored > 20_000, "the device alone was meant to be too small"
