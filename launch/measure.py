"""``python -m launch.tiny_model --measure OUT``: what the tiny model promises, measured.

On the real server: margins and float noise of greedy tokens computed three ways (nothing cached, all cached, 8 at
a time), and the time to the first token of a miss and a hit. In process, with transformers: what one wrong KV row does.
"""

import http.client
import json
import os
import platform
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launch import tiny_model
from launch.server import Server

PROMPTS = 64
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 80
AT_ONCE = 8
TIMED = 20
CORRUPTED_ROWS = 24


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request with the log probabilities of the best two candidates of each step."""

    tokens: list[int]
    top: list[tuple[float, float]]
    cached_tokens: int


def _request(url: str, prompt: list[int], tokens: int, **more: Any) -> http.client.HTTPResponse:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}, **more}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"/generate answered {response.status}: {response.read(300)!r}")
    return response


def _answer(url: str, prompt: list[int]) -> Answer:
    response = _request(url, prompt, OUTPUT_TOKENS, return_logprob=True, top_logprobs_num=2)
    result = json.load(response)
    top = [(step[0][0], step[1][0]) for step in result["meta_info"]["output_top_logprobs"]]
    return Answer(result["output_ids"], top, result["meta_info"]["cached_tokens"])


def _flush(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/flush_cache?timeout=30")
    status = connection.getresponse().status
    if status != 200:
        raise RuntimeError(f"/flush_cache answered {status}")


def _first_token_ms(url: str, prompt: list[int]) -> float:
    begin = time.perf_counter()
    response = _request(url, prompt, 4, stream=True)
    response.readline()
    elapsed = time.perf_counter() - begin
    response.read()
    return 1e3 * elapsed


def measure_server(model: Path) -> dict[str, float]:
    """Margins, noise and times on a real server; takes 2 to 3 minutes."""
    rng = random.Random(1)

    def prompt() -> list[int]:
        return [rng.randrange(tiny_model.ORDINARY_TOKENS) for _ in range(PROMPT_TOKENS)]

    prompts = [prompt() for _ in range(PROMPTS)]
    with Server(model, max_total_tokens=2 * PROMPTS * (PROMPT_TOKENS + OUTPUT_TOKENS)) as server:
        alone = [_answer(server.url, p) for p in prompts]
        cached = [_answer(server.url, p) for p in prompts]
        _flush(server.url)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            batched = list(pool.map(lambda p: _answer(server.url, p), prompts))
        misses, hits = [], []
        for _ in range(TIMED):
            p = prompt()
            misses.append(_first_token_ms(server.url, p))
            hits.append(_first_token_ms(server.url, p))
        begin = time.perf_counter()
        _request(server.url, prompts[0], OUTPUT_TOKENS).read()
        decode = (time.perf_counter() - begin - statistics.median(hits) / 1e3) / OUTPUT_TOKENS
    if any(a.cached_tokens for a in alone) or any(c.cached_tokens < PROMPT_TOKENS - 1 for c in cached):
        raise RuntimeError("the runs that were to miss or hit the cache did not")
    margins = [first - second for a in alone for first, second in a.top]
    noise = max(
        abs(x - y)
        for a, *others in zip(alone, cached, batched, strict=True)
        for other in others
        for own, theirs in zip(a.top, other.top, strict=True)
        for x, y in zip(own, theirs, strict=True)
    )
    written = [token for a in alone for token in a.tokens]
    return {
        "greedy_tokens": len(margins),
        "different_greedy_tokens": sum(
            x != y
            for a, *others in zip(alone, cached, batched, strict=True)
            for other in others
            for x, y in zip(a.tokens, other.tokens, strict=True)
        ),
        "distinct_tokens_written": len(set(written)),
        "min_margin": min(margins),
        "median_margin": statistics.median(margins),
        "max_noise": noise,
        "margin_over_noise": min(margins) / noise if noise else float("inf"),
        "miss_ttft_ms": statistics.median(misses),
        "hit_ttft_ms": statistics.median(hits),
        "miss_over_hit": statistics.median(misses) / statistics.median(hits),
        "best_miss_ttft_ms": min(misses),
        "best_hit_ttft_ms": min(hits),
        "best_miss_over_hit": min(misses) / min(hits),
        "decode_ms_per_token": 1e3 * decode,
    }


def measure_corruption(model: Path) -> dict[str, float]:
    """Effect of one wrong KV row (the row of another token in all layers), each old row of a prompt in turn."""
    import torch

    import sglang_scout.cpu.torchvision_ops as torchvision_ops

    torchvision_ops.declare()  # transformers imports torchvision too
    from transformers import AutoModelForCausalLM, DynamicCache

    # Spinning OpenMP threads on a busy machine would make this take minutes.
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, tiny_model.ORDINARY_TOKENS, (1, PROMPT_TOKENS), generator=generator)

    def run(bad_row: int | None) -> tuple[Any, list[int]]:
        cache = DynamicCache()
        network(prompt[:, :-1], past_key_values=cache, use_cache=True)
        if bad_row is not None:
            for layer in cache.layers:
                for rows in (layer.keys, layer.values):
                    rows[:, :, bad_row] = rows[:, :, (bad_row + 100) % (PROMPT_TOKENS - 1)]
        token, written, first = prompt[:, -1:], [], None
        for _ in range(OUTPUT_TOKENS):
            logits = network(token, past_key_values=cache, use_cache=True).logits[0, -1]
            first = logits if first is None else first
            token = logits.argmax().reshape(1, 1)
            written.append(int(token))
        return first, written

    with torch.no_grad():
        right, right_tokens = run(None)
        changes, changed_outputs = [], 0
        for index in range(CORRUPTED_ROWS):
            logits, tokens = run(index * (PROMPT_TOKENS - 1) // CORRUPTED_ROWS)
            changes.append(float((logits - right).abs().max()))
            changed_outputs += tokens != right_tokens
    return {
        "wrong_row_min_logit_change": min(changes),
        "wrong_row_median_logit_change": statistics.median(changes),
        "wrong_row_outputs_changed": changed_outputs / CORRUPTED_ROWS,
    }


def main(model: Path) -> None:
    """Print all figures, one a line."""
    figures = measure_corruption(model) | measure_server(model)
    for name, value in figures.items():
        print(f"{name:32s}{value:.6g}")
    print(f"{'machine':32s}{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}")
