"""`python -m benchmarks.curve_cost`: what the server's sampled curve costs per request, and how much memory it holds.

The plug-in's own `OnlineCurve` with its default keys, its sample full, fed with requests that run one by one: nine
tenths of each prompt were there before. This decides the default of the key `curve`.
"""

import gc
import statistics
import time
import tracemalloc
from array import array

import numpy as np

from radix_policy.prompts import TokenPrompt
from sglang_scout.curve import CurveConfig, OnlineCurve

PROMPTS = (2_000, 10_000, 100_000)  # tokens
_FILL = 24_000_000  # tokens of other prompts before, more than `curve_depth`
_REPEATS = 200
_VOCABULARY = 150_000


def request(rng: np.random.Generator, tokens: int, before: "array[int] | None" = None) -> "array[int]":
    """A prompt of so many tokens that continues `before`."""
    kept = array("q") if before is None else before[: tokens * 9 // 10]
    new = array("q", rng.integers(0, _VOCABULARY, tokens - len(kept)).tolist())
    return kept + new


def cost(tokens: int) -> tuple[float, float, int]:
    """Microseconds per request (its start and end), median and 95 %, and bytes that the curve holds when full."""
    rng = np.random.default_rng(1)
    tracemalloc.start()
    curve = OnlineCurve(CurveConfig(), 1)
    recent: list[array[int]] = []
    held = 0
    for number in range(_FILL // tokens):
        recent = [*recent, request(rng, tokens)][-8:]
        curve.started("r", TokenPrompt(recent[-1]), "")
        curve.finished("r")
        if number == _FILL // tokens - 1:
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - sum(len(prompt) * 8 for prompt in recent)
    tracemalloc.stop()
    times = []
    for number in range(_REPEATS):
        prompt = TokenPrompt(request(rng, tokens, recent[number % len(recent)]))
        started = time.perf_counter()
        curve.started("r", prompt, "")
        curve.finished("r")
        times.append((time.perf_counter() - started) * 1e6)
    times.sort()
    return statistics.median(times), times[len(times) * 95 // 100], held


def main() -> None:
    """Print the table."""
    print(f"{'prompt, tokens':>14} {'us median':>10} {'us 95 %':>9} {'us per 1K':>10} {'MB held':>8}")
    for tokens in PROMPTS:
        median, high, held = cost(tokens)
        print(f"{tokens:>14,} {median:>10.0f} {high:>9.0f} {median / tokens * 1000:>10.1f} {held / 1e6:>8.1f}")


if __name__ == "__main__":
    main()
