"""Recorded traces: block ids to tokens, gaps, bad input, and the real files where they are at hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from radix_policy.prompts import expand
from radix_policy.workloads import Call, Workload, WorkloadError, read_trace
from radix_policy.workloads.records import nominal_service

REAL = Path(__file__).resolve().parents[3] / "shared" / "traces"


def row(**changes: Any) -> dict[str, Any]:
    base = {"trace": "x", "session": 0, "step": 0, "agent": "a", "t": None, "blocks_rle": [[1, 3]], "block_size": 4}
    return base | {"input_len": 10, "sys_len": 5, "output_len": 3} | changes


def write(path: Path, *rows: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


def read(folder: Path, *rows: Any, **options: Any) -> Workload:
    return read_trace(write(folder / "demo.jsonl.gz", *rows), seed=1, **options)


def tokens(call: Call) -> tuple[list[int], list[int]]:
    return list(expand(call.prompt)), list(expand(call.output))


def test_blocks_become_tokens_and_the_end_is_private(tmp_path: Path) -> None:
    workload = read(tmp_path, row(), row(step=1))
    first, second = workload.sessions[0].calls
    prompt, output = tokens(first)
    assert prompt == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert output[:2] == [14, 15] and len(output) == 3
    assert output[2] > 1 << 60 and output[2] != tokens(second)[1][2], "no block covers it"
    assert (first.agent, first.anchor_tokens, first.prompt_tokens, first.output_tokens) == ("a", 5, 10, 3)


def test_an_output_stands_again_in_later_prompts_as_ids_agree(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        row(blocks_rle=[[1, 4]], input_len=9, output_len=7),
        row(step=1, blocks_rle=[[1, 4], [9, 2]], input_len=21, output_len=3),
        row(step=2, blocks_rle=[[1, 3], [20, 2]], input_len=20, output_len=1),
    )
    first, second, third = workload.sessions[0].calls
    before = [*tokens(first)[0], *tokens(first)[1]]
    assert tokens(second)[0][:16] == before
    assert tokens(third)[0][:12] == before[:12] and tokens(third)[0][12] != before[12]
    assert workload.facts["blocks_over_output"] == 2
    assert workload.facts["shared_share"] == pytest.approx((16 + 12) / 50)


def test_a_tail_without_a_block_is_private(tmp_path: Path) -> None:
    workload = read(
        tmp_path, row(blocks_rle=[[1, 2]]), row(step=1, blocks_rle=[[1, 2]]), row(session=1, blocks_rle=[[1, 2]])
    )
    prompts = [tokens(c)[0] for s in workload.sessions for c in s.calls]
    assert all(p[:8] == prompts[0][:8] for p in prompts)
    assert len({tuple(p[8:]) for p in prompts}) == 3
    assert all(len(p) == 10 for p in prompts)


def test_a_partial_last_block_is_the_prompts_and_says_nothing_of_outputs(tmp_path: Path) -> None:
    # as in chat: ceil(input_len / block_size) blocks everywhere, seen by a file with more blocks than tokens
    short = row(blocks_rle=[[1, 3]], input_len=9, output_len=1)
    workload = read(
        tmp_path, short, row(step=1, blocks_rle=[[1, 3]], input_len=9, output_len=9), short | {"session": 1}
    )
    calls = [c for s in workload.sessions for c in s.calls]
    assert all(tokens(c)[0] == list(range(4, 13)) for c in calls)
    assert all(min(tokens(c)[1]) > 1 << 60 for c in calls)
    assert workload.facts["blocks_over_output"] == 0


def test_ids_local_to_a_session_never_meet(tmp_path: Path) -> None:
    scoped = row(block_scope="session")
    a, b = read(tmp_path, scoped, scoped | {"session": "other"}).sessions
    assert not set(tokens(a.calls[0])[0]) & set(tokens(b.calls[0])[0])
    c, d = read(tmp_path, row(), row(session=1)).sessions
    assert tokens(c.calls[0])[0] == tokens(d.calls[0])[0]


def test_recorded_times_become_gaps(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        row(t=0.0, api_s=2.0),
        row(step=1, t=5.0, api_s=10.0),
        row(step=2, t=6.0, api_s=1.0),
        row(step=3, t=20.0),
        row(step=4, t=19.0, api_s=0.5),
        row(step=5, t=300.0),
        max_gap=100,
    )
    gaps = [c.gap for c in workload.sessions[0].calls]
    # the third ran beside the second (a sub-agent), and the fifth starts before the one written before it
    assert gaps[1:] == pytest.approx([3.0, 0.0, 5.0, 0.0, 100.0])
    facts = workload.facts
    assert (facts["overlaps"], facts["backward_times"], facts["times"]) == (2, 1, "recorded")
    without = read(tmp_path, row(t=0.0), row(step=1, t=5.0)).sessions[0].calls[1].gap
    assert without == pytest.approx(5 - nominal_service(10, 3))


def test_think_time_alone_is_used(tmp_path: Path) -> None:
    calls = read(tmp_path, row(), row(step=1, think_s=7.5)).sessions[0].calls
    assert calls[1].gap == 7.5


def test_drawn_gaps_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "demo.jsonl.gz", *(row(session=s, step=n) for s in range(40) for n in range(20)))
    a, b = read_trace(path, seed=1), read_trace(path, seed=1)
    assert a == b and a.facts["times"] == "drawn"
    assert a.sessions != read_trace(path, seed=2).sessions
    starts = [s.calls[0].gap for s in a.sessions]
    assert 0.3 < sum(starts) / 40 < 0.8 and len(set(starts)) == 40, "Poisson arrivals"
    later = [c.gap for s in a.sessions for c in s.calls[1:]]
    assert 0.6 < sum(later) / len(later) < 1.1
    # a slice plays as it does in the whole
    assert read_trace(path, seed=1, half=2).sessions == a.sessions[20:]


def test_slices(tmp_path: Path) -> None:
    path = write(tmp_path / "demo.jsonl.gz", *(row(session=s, step=n) for s in range(5) for n in range(3)))
    keys = [s.key for s in read_trace(path, seed=1).sessions]
    assert keys == [f"demo-{s}" for s in range(5)]
    assert [s.key for s in read_trace(path, seed=1, half=1).sessions] == keys[:3]
    assert [s.key for s in read_trace(path, seed=1, half=2).sessions] == keys[3:]
    assert [s.key for s in read_trace(path, seed=1, max_sessions=2).sessions] == keys[:2]
    assert [len(s.calls) for s in read_trace(path, seed=1, max_calls=7).sessions] == [3, 3, 1]
    for options in ({"half": 3}, {"max_calls": 0}, {"max_sessions": 0}):
        with pytest.raises(WorkloadError):
            read_trace(path, seed=1, **options)


def test_anonymous_single_turns_and_unknown_fields(tmp_path: Path) -> None:
    anonymous = [row(session=s, agent=None, t=float(s), new_field={"x": [1]}) for s in range(3)]
    workload = read(tmp_path, *anonymous)
    assert [len(s.calls) for s in workload.sessions] == [1, 1, 1]
    assert not any(s.tagged for s in workload.sessions) and workload.agents == ()


def test_missing_prompts_are_left_out_and_their_time_kept(tmp_path: Path) -> None:
    gone = row(step=1, agent="b", t=4.0, api_s=1.0, blocks_rle=[], input_len=None)
    workload = read(tmp_path, row(t=0.0, api_s=1.0), gone, row(step=2, t=9.0))
    assert [c.gap for c in workload.sessions[0].calls][1:] == pytest.approx([4.0])
    assert workload.facts["missing_prompts"] == 1 and workload.facts["calls"] == 2


def test_plain_json_lines_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps(row()) + "\n\n" + json.dumps(row(step=1)) + "\n")
    assert read_trace(path, seed=1).requests == 2


BAD: list[tuple[str, Any, str]] = [
    ("not json", '{"trace": ', "not JSON"),
    ("not an object", [1], "expected an object, got list"),
    ("missing", {k: v for k, v in row().items() if k != "session"}, "field 'session' is missing"),
    ("missing t", {k: v for k, v in row().items() if k != "t"}, "field 't' is missing"),
    ("missing length", {k: v for k, v in row().items() if k != "input_len"}, "field 'input_len' is missing"),
    ("type", row(step="one"), "field 'step': got str, allowed: int"),
    ("bool", row(step=True), "field 'step': got bool, allowed: int"),
    ("agent", row(agent=3), "field 'agent': got int, allowed: str or null"),
    ("time", row(t="now"), "field 't': got str"),
    ("infinite", row(t=float("inf")), "finite number"),
    ("not a number", row(t=float("nan")), "finite number"),
    ("empty prompt", row(input_len=0), "field 'input_len': got 0, allowed: >= 1"),
    ("empty output", row(output_len=0), "field 'output_len': got 0, allowed: >= 1"),
    ("no length", row(input_len=None), "field 'input_len': got null, allowed: int"),
    ("size", row(block_size=0), "field 'block_size': got 0, allowed: >= 1"),
    ("other size", row(block_size=8), "block_size 8 differs from 4 before it"),
    ("runs", row(blocks_rle=[[1, 0]]), "field 'blocks_rle': got [1, 0]"),
    ("run", row(blocks_rle=[7]), "field 'blocks_rle': got 7"),
    ("no runs", row(blocks_rle=None), "field 'blocks_rle': got null, allowed: list"),
    ("short", row(blocks_rle=[[1, 1]]), "blocks_rle covers 4 of 10 prompt tokens"),
    ("scope", row(block_scope="planet"), "field 'block_scope': got 'planet'"),
]


@pytest.mark.parametrize(("what", "bad", "message"), BAD, ids=[what for what, _, _ in BAD])
def test_bad_lines_name_file_and_line(tmp_path: Path, what: str, bad: Any, message: str) -> None:
    path = write(tmp_path / "demo.jsonl.gz", row(), row(step=1), bad)
    with pytest.raises(WorkloadError) as caught:
        read_trace(path, seed=1)
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(WorkloadError) as caught:
            read_trace(path, seed=1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    missing = tmp_path / "none.jsonl.gz"
    assert message(missing) == f"{missing}: cannot be read (No such file or directory)"
    assert "cannot be read" in message(tmp_path)
    empty = tmp_path / "empty.jsonl.gz"
    empty.write_bytes(b"")
    assert message(empty) == f"{empty}: no calls in the file"
    whole = write(tmp_path / "whole.jsonl.gz", *(row(session=n, trace=str(n) * 50) for n in range(2000))).read_bytes()
    cut_off = tmp_path / "cut.jsonl.gz"
    cut_off.write_bytes(whole[: len(whole) // 2])
    text = message(cut_off)
    assert "gzip file truncated or damaged" in text and 1 < int(text.split(":")[1]) < 2000
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(whole[:100] + b"\0" * 50 + whole[150:])
    assert "damaged" in message(damaged) or "UTF-8" in message(damaged) or "JSON" in message(damaged)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\xfd\n")
    assert message(binary).startswith(f"{binary}:1: not UTF-8")


# calls, sessions, agents, mean prompt, largest request, R
KNOWN = {
    "ag2_groupchat": (5030, 400, 4, 995, 4153, 0.37),
    "magentic_one": (1083, 29, 4, 7417, 44520, 0.16),
    "magentic_one_timed": (693, 25, 3, 2285, 20485, 0.11),
    "tau_airline": (3944, 200, 2, 3728, 13679, 0.31),
    "swe_agent": (230, 21, 2, 4894, 13803, 1.0),
    "coding_agents": (8199, 99, 4, 121179, 881443, 0.63),
    "chat": (4000, 2663, 0, 13312, 124741, 0.0),
}


@pytest.mark.skipif(not REAL.is_dir(), reason="the recorded traces are not beside this checkout")
@pytest.mark.parametrize("name", KNOWN)
def test_real_files(name: str) -> None:
    workload = read_trace(REAL / f"{name}.jsonl.gz", seed=1)
    facts = workload.facts
    assert (facts["calls"], facts["sessions"], facts["agents"], round(facts["mean_prompt"]), workload.largest) == KNOWN[
        name
    ][:5]
    assert facts["R"] == pytest.approx(KNOWN[name][5], abs=0.01)
    assert 0.3 < facts["shared_share"] < 1
    if name == "magentic_one_timed":
        assert facts["missing_prompts"] == 53
    # AG2 renders an agent's own message anew, with its name; chat and coding agents record prompts only
    least = {"magentic_one": 0.4, "magentic_one_timed": 0.15, "tau_airline": 0.7, "swe_agent": 0.8}
    assert name not in least or reused_outputs(workload) >= least[name], "outputs stand again in later prompts"


def reused_outputs(workload: Workload) -> float:
    """Share of output tokens that a later prompt of the session holds."""
    written, again = 0, 0
    for session in workload.sessions[:10]:
        later: set[int] = set()
        for call in reversed(session.calls):
            output = set(expand(call.output))
            written += len(output)
            again += len(output & later)
            later |= set(expand(call.prompt))
    return again / written
