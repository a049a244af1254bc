"""`warmup --servers` on real SGLang servers."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.results import read

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,  # a minute, most of it the server's start
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]


def test_a_run_is_measured(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That off and on answer the same, test_warmup_server.py tests."""
    out = tmp_path / "w.json"
    words = ["--points", "1:1.3", "--workload", "pipeline", "--sessions", "1", "--rounds", "1", "--modes", "on"]
    words += ["--seed", "57", "--time-scale", "0.3", "--model-path", str(tiny_model), "--json", str(out)]
    assert main(["warmup", "--servers", *words]) == 0
    assert "median of 1 round(s)" in capsys.readouterr().out
    document = read(out)
    (point,) = document["points"]
    assert document["complete"] and document["outputs"] == {"checked": 0, "different": []}
    assert point["mode"] == "on" and point["server"]["policy_config"] == {"warmup": True}
    # one session teaches too little for a warmup to be sure to come
    assert point["warmup"]["on"] and point["warmup"]["gate"] == "open" and sum(point["warmup"]["refused"].values()) > 0
    assert point["faults"] == {} and point["calls"] > 0
    assert point["computed_prefill_tokens"] == point["prompt_tokens"] - point["cached_tokens"]
    assert 0 < point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"] and point["wall_s"] > 0 < point["start_s"]
