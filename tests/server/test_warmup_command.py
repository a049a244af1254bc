"""`warmup --servers` on real SGLang servers."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.results import read

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,  # +2 min, most of it the start of two servers
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]


def test_off_and_on_answer_the_same(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w.json"
    words = ["--points", "1:1.3", "--workload", "pipeline", "--sessions", "1", "--rounds", "1", "--modes", "off,on"]
    words += ["--seed", "57", "--time-scale", "0.3", "--model-path", str(tiny_model), "--json", str(out)]
    assert main(["warmup", "--servers", *words]) == 0
    printed = capsys.readouterr().out
    assert "identical in all 1 comparisons" in printed and "against warmup off" in printed
    document = read(out)
    assert document["complete"] and document["outputs"] == {"checked": 1, "different": []}
    off, on = document["points"]
    assert (off["mode"], off["warmup"]) == ("off", None) and off["server"]["policy_config"] is None
    assert on["mode"] == "on" and on["server"]["policy_config"] == {"warmup": True}
    # one session teaches too little for a warmup to be sure to come: that they help, test_warmup_server.py tests
    assert on["warmup"]["on"] and on["warmup"]["gate"] == "open" and sum(on["warmup"]["refused"].values()) > 0
    assert off["faults"] == on["faults"] == {}
    for point in document["points"]:
        assert point["calls"] == off["calls"] > 0 and point["prompt_tokens"] == off["prompt_tokens"]
        assert point["computed_prefill_tokens"] == point["prompt_tokens"] - point["cached_tokens"]
        assert 0 < point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"] and point["wall_s"] > 0 < point["start_s"]
