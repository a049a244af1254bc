"""The stack-distance curve against a cache that really evicts, and `sglang-scout plan`."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_policy.prompts import Spans
from radix_policy.simulator import Study, spans_of
from radix_policy.working_set import ReuseCurve, published_working_set, stability
from radix_policy.workloads import make
from radix_policy.workloads.base import SessionScript, make_call
from sglang_scout import cli, plan

Tokens = tuple[int, ...]


class NaiveLru:
    """Prefixes in the order of use, each standing for its last token: the naive twin, at any size of cache."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stack: list[Tokens] = []  # latest first

    def call(self, prompt: Tokens, output: Tokens) -> int:
        kept = set(self.stack)
        found = 0
        while found < len(prompt) - 1 and prompt[: found + 1] in kept:
            found += 1
        whole = (prompt + output)[:-1]
        used = [whole[: n + 1] for n in range(len(whole))]
        rest = set(used)
        self.stack = [*used, *(p for p in self.stack if p not in rest)][: self.capacity]
        return found


numbers = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@given(st.lists(st.tuples(numbers, numbers), max_size=14), st.integers(0, 40))
def test_the_curve_is_what_an_lru_cache_of_any_size_finds(calls: list[tuple[Tokens, Tokens]], more: int) -> None:
    largest = max((len(p) + len(o) for p, o in calls), default=1)
    curve, naive = ReuseCurve(), NaiveLru(largest + more)
    found = 0
    for prompt, output in calls:
        curve.call(spans_of(prompt), len(prompt), spans_of(output), len(output))
        found += naive.call(prompt, output)
        assert curve.found([naive.capacity]) == [found]
    assert curve.found([10**6]) == [curve.reachable]
    assert curve.found([curve.tokens, 0]) == [curve.reachable, 0]
    assert len(curve.needs) == curve.calls == len(calls)


@pytest.mark.parametrize("name", ["selector", "pipeline"])
@pytest.mark.parametrize(("concurrency", "factor"), [(1, 1.3), (1, 2), (1, 8), (4, 4), (4, 8), (16, 16), (16, 24)])
def test_the_curve_predicts_what_the_simulated_engine_computes(name: str, concurrency: int, factor: float) -> None:
    """Less exact where the curve is steep and sessions are few: SGLang keeps dead ends a little longer."""
    workload = make(name, seed=5, concurrency=concurrency, sessions=40)
    curve, calls = ReuseCurve(), [call for session in workload.sessions for call in session.calls]
    study = Study(workload)
    for number in study.order(10**9, concurrency).calls:
        call = calls[number]
        curve.call(call.prompt, call.prompt_tokens, call.output, call.output_tokens)
    capacity = int(factor * workload.largest)
    outcome = study.run("lru+trim", capacity, concurrency)
    computed = outcome.prompt_tokens - outcome.cached_tokens
    assert curve.prompt_tokens - curve.found([capacity])[0] == pytest.approx(computed, rel=0.05)


def test_ten_prompts_in_turn_are_found_all_or_not_at_all() -> None:
    curve = ReuseCurve()
    for number in range(400):
        curve.call(((1000 * (number % 10), 101),), 101, ((10**6 + number, 1),), 1)
    assert curve.found([909, 1009, 959]) == [0, 39_000, 19_500]
    assert curve.enough(0.0) == 1009 and curve.enough(1.0) == 0
    assert curve.found([curve.enough(0.01)])[0] >= 39_000 - 404 > curve.found([curve.enough(0.01) - 1])[0]


def test_the_published_working_set() -> None:
    assert published_working_set(8, 1000.0) == 7000.0
    assert published_working_set(0, 1000.0) == published_working_set(1, 1000.0) == 0.0


def script(*prompts: Spans, agents: str = "") -> SessionScript:
    calls = [
        make_call(agents[i] if agents else "a", prompt, ((10**6 + i, 5),), 1.0) for i, prompt in enumerate(prompts)
    ]
    return SessionScript("s", tuple(calls))


def test_stability_counts_what_is_kept_and_what_is_rewritten() -> None:
    kept = stability(script(((0, 100),), ((0, 100), (10**6, 5), (500, 20)), ((0, 40), (900, 60))))
    assert (kept.calls, kept.prompt_tokens) == (2, 225)
    assert (kept.kept, kept.kept_with_output) == (100 + 40, 105 + 40)
    assert (kept.broken, kept.lost) == (1, 85)
    other = stability(script(((0, 100),), ((700, 50),), ((0, 100), (1, 9)), agents="aba"))
    assert (other.calls, other.broken, other.lost) == (1, 0, 0), "agent by agent"


# ---- the command ----


def trace(path: Path, sessions: int = 6, turns: int = 8) -> Path:
    lines = []
    for turn in range(turns):
        for session in range(sessions):
            blocks = [[0, 4], [1000 * (session + 1), turn + 1]]
            lines.append(
                {
                    "trace": "t",
                    "session": session,
                    "step": turn,
                    "agent": "a",
                    "t": 10.0 * turn + session,
                    "blocks_rle": blocks,
                    "block_size": 16,
                    "input_len": 16 * (turn + 5),
                    "output_len": 4,
                }
            )
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_plan_prints_a_curve_and_one_line_of_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--trace", str(trace(tmp_path / "t.jsonl.gz")), "--concurrency", "6", "--device-tokens", "400"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calls"] == 48 and report["working_set"]["published"] == 5 * 136
    points = report["curve"]
    assert [p["tokens"] for p in points] == sorted(p["tokens"] for p in points) and 400 in [p["tokens"] for p in points]
    assert points[-1]["found_tokens"] == report["reachable_tokens"] > points[0]["found_tokens"]
    assert all(p["found_tokens"] + p["computed_prefill_tokens"] == report["prompt_tokens"] for p in points)
    assert report["stability"]["kept"] > 0.8 and report["stability"]["sessions_that_break_their_prefix"] == []
    assert "--hicache-ratio" in report["advice"]
    assert cli.main([*words, "--bytes-per-token", "131072"]) == 0
    printed = capsys.readouterr().out
    assert "<- device" in printed and "--hicache-size" in printed.splitlines()[-1]


def test_plan_says_when_a_host_tier_is_not_needed(tmp_path: Path) -> None:
    workload = plan.read_trace(trace(tmp_path / "t.jsonl.gz"), seed=0)
    assert "a host tier adds little" in plan.plan(workload, 6, device_tokens=10**6)["advice"]
    alone = make("selector", seed=1, concurrency=1, sessions=1)
    first = SessionScript("s", alone.sessions[0].calls[:1])
    nothing = plan.plan(type(alone)("one", (first,)), 1)
    assert nothing["advice"].startswith("no prompt continues another one") and nothing["stability"]["kept"] is None
    assert plan.lines(nothing)[-1] == nothing["advice"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "nowhere.gz"], "--trace nowhere.gz: no such file"),
        (["--trace", "TRACE", "--concurrency", "0"], "--concurrency must be at least 1, not 0"),
        (["--trace", "TRACE", "--bytes-per-token", "-5"], "--bytes-per-token must be at least 1, not -5"),
        (["--trace", "TRACE", "--device-tokens", "0"], "--device-tokens must be at least 1, not 0"),
        (["--trace", "BAD"], "line 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = trace(tmp_path / "t.jsonl.gz"), tmp_path / "bad.jsonl.gz"
    with gzip.open(bad, "wt") as file:
        file.write("{not json\n")
    words = [{"TRACE": str(good), "BAD": str(bad)}.get(word, word) for word in words]
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
