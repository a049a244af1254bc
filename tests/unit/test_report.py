"""The report: one page that needs nothing else, for every kind of result, honest about what is missing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks.__main__ import main
from benchmarks.report import write_report

AGENTS = ["Planner", "Coder"]


def served_point(policy: str, hit: float, **more: Any) -> dict[str, Any]:
    prompt = 100_000
    cached = round(hit * prompt)
    return {
        "workload": "pipeline",
        "policy": policy,
        "capacity_tokens": 4096,
        "capacity_F": 2.0,
        "concurrency": 1,
        "time_scale": 0.1,
        "tags": "agent,session",
        "sessions": 2,
        "calls": 40,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": hit,
        "computed_prefill_tokens": prompt - cached,
        "ttft_ms": {"mean": 500 - 300 * hit, "p50": 480.0, "p99": 900.0},
        "turn_ms": {"mean": 900 - 300 * hit, "p50": 880.0, "p99": 1300.0},
        "turns_per_s": 1.1,
        "wall_s": 36.0,
        "segments": 1,
        "agents": {a: {"calls": 20, "prompt_tokens": prompt // 2, "cached_tokens": cached // 2} for a in AGENTS},
        "ttft_samples_ms": [100.0, 200.0, 900.0],
        "start_s": 30.0,
        **more,
    }


def document(kind: str, points: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "command": f"python -m benchmarks {kind} --workload <b>&",
        "date": "2026-01-01T00:00:00+00:00",
        "seed": 1,
        "versions": {"python": "3.11", "sglang": "0.5.23"},
        "machine": {"cpu": "a cpu", "cores": 2, "memory_gib": 8.0, "os": "Linux"},
        "complete": True,
        "points": points,
        **more,
    }


def compared(**more: Any) -> dict[str, Any]:
    learned = {"agents": AGENTS, "rows": [[0.1, 0.9], [1.0, 0.0]], "predictability": 0.8, "source": "recomputed"}
    points = [served_point("lru", 0.3), served_point("scout", 0.6, learned=learned, scout=[{"faults": {}}])]
    source = {"workload": "pipeline", "agents": AGENTS, "transitions": [[0, 1], [1, 0]], "sessions": 2, "F": 2048}
    return document("compare", points, source=source, outputs={"checked": 1, "different": []}, **more)


def page(folder: Path, *documents: dict[str, Any]) -> str:
    return write_report(documents, folder).read_text(encoding="utf-8")


def test_a_comparison_is_told_in_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    html = page(tmp_path, compared(seconds={"starting servers": 60.0}))
    # no reference to anything outside the page; xmlns names are no references
    assert not re.findall(r'(?:src|href|url\()\s*=?\s*["\']?(?!#)(?:https?:|//|/|\.)', html.replace('xmlns="http', ""))
    assert html.count("<svg ") == 5
    for text in ("30.0 → 60.0 %", "identical", "Who is called next", "Where the time went", "a cpu", "sglang 0.5.23"):
        assert text in html
    assert "&lt;b&gt;&amp;" in html and "<b>&" not in html
    names = {p.name for p in tmp_path.iterdir()}
    assert {"report.html", "hit-rate.png", "ttft.png", "ttft-distribution.png", "transitions.png"} <= names


def test_ids_of_the_plots_do_not_clash(tmp_path: Path) -> None:
    html = page(tmp_path, compared(), compared())
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'xlink:href="#([^"]+)"', html)) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)


def test_a_loss_and_partial_results_and_changed_outputs_are_not_hidden(tmp_path: Path) -> None:
    points = [served_point("lru", 0.6), served_point("scout", 0.3, partial=True, refused_calls=1, refusals={"long": 1})]
    html = page(tmp_path, document("compare", points, complete=False, outputs={"checked": 1, "different": ["call 7"]}))
    for text in ("Partial results", "Outputs differ", "call 7", "scout (partial)", "cut short", 'class="card bad"'):
        assert text in html
    assert "identical" not in html


def test_a_matrix_of_unknown_agents_is_shown_without_a_true_one(tmp_path: Path) -> None:
    one = compared()
    one["source"]["agents"] = ["Somebody"]
    html = page(tmp_path, one)
    assert "Who is called next" in html


def test_many_settings_and_many_policies_are_drawn(tmp_path: Path) -> None:
    points = [
        served_point(policy, 0.1 * n, concurrency=c, capacity_tokens=size)
        for n, policy in enumerate(("lru", "lfu", "cachescout", "scout", "slru"))
        for c in (1, 4)
        for size in (4096, 8192)
    ]
    assert page(tmp_path, document("compare", points)).count("<svg ") == 4


def test_a_replay_of_one_policy_is_told_as_it_is(tmp_path: Path) -> None:
    html = page(tmp_path, document("replay", [served_point("lru", 0.0, learned={"agents": [], "rows": []})]))
    assert "0.0 %" in html and "→" not in html and "Who is called next" not in html


def test_simulated_hit_rates_are_drawn_against_capacity(tmp_path: Path) -> None:
    points = [
        {
            "workload": "selector",
            "policy": policy,
            "capacity": f"{f}F",
            "capacity_tokens": 1000 * f,
            "concurrency": c,
            "hit_rate": 0.1 * f,
        }
        for policy in ("lru", "scout", "opt")
        for f in (2, 4)
        for c in (1, 4)
    ]
    html = page(tmp_path, document("simulate", points))
    assert html.count("<svg ") == 1 and "offline optimum" in html and "20.00 %" in html


def test_micro_and_host_results_have_a_page(tmp_path: Path) -> None:
    micro = [
        {"op": op, "core": core, "policy": "lru", "leaves": n, "classes": 1, "us": 1.5 * n}
        for op in ("evict", "score", "observe")
        for core in ("python", "rust")
        for n in (1000, 5000)
    ]
    host = [
        {"mode": mode, "size": size, "computed_prefill_tokens": 1000, "written_tokens": 5}
        for mode in ("none", "measured")
        for size in ("0.5", "1")
    ]
    state = [{"policy": "scout", "policy_bytes": 1, "world_bytes": 2, "identity_bytes": 3, "bytes": 6, "limit": 9}]
    html = page(tmp_path, document("micro", micro, state_bytes=state), document("host", host))
    assert "Hot-path costs" in html and "Learned state" in html and "Host tier" in html and html.count("<svg ") == 2


def warm_point(mode: str, mean: float, **more: Any) -> dict[str, Any]:
    return {
        **{"workload": "pipeline", "policy": "scout", "concurrency": 1, "factor": 1.3, "mode": mode, "seed": 1},
        **{"ttft_ms": {"mean": mean, "p50": mean, "p99": mean}, "hit_rate": 0.5, "computed_prefill_tokens": 1000},
        "warmup": None if mode == "off" else {"tokens": 2000, "useful_tokens": 1500},
        **more,
    }


def test_warmup_results_have_a_page_even_when_they_are_not_complete(tmp_path: Path) -> None:
    simulated = [warm_point("off", 100.0), warm_point("on", 80.0), warm_point("off", 90.0, seed=2)]
    about = {"refused_calls": 0, "refusals": {}, "short_calls": 0, "segments": 1, "faults": {"warmup": 1}}
    servers = [warm_point("off", 200.0, round=1, **about), warm_point("on", 150.0, round=1, **about)]
    html = page(tmp_path, document("warmup", simulated), document("warmup", servers))
    assert "In the simulator." in html and "On real servers." in html
    assert "-20.00" in html and "-25.00" in html and "75.00" in html
    assert "beyond the noise: none" in html and "faults of the plug-in" in html


# ---- the command ----


def test_the_command_writes_beside_the_result_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    out.write_text(json.dumps(compared()))
    assert main(["report", str(out), "--title", "A <title>"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a-report" / "report.html")
    assert "A &lt;title&gt;" in (tmp_path / "a-report" / "report.html").read_text()
    assert main(["report", str(out), str(out), "--report", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both" / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "no result file"),
        ('{"points": []}', "does not know"),
        ('{"kind": "compare", "points": []}', "no points yet"),
        ('{"kind": "spells", "points": [{}]}', "'spells'"),
    ],
)
def test_a_file_that_is_no_result_is_one_line_and_status_2(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and str(path) in line
