"""The frozen generator against notes/workload-spec.md, and span ids as engine tokens."""

import hashlib
import math
import statistics
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from radix_policy.prompts import SpanPrompt, expand
from radix_policy.workloads import Workload, WorkloadError, make, materialise
from radix_policy.workloads import topologies as topo
from radix_policy.workloads.catalogue import GROUPS, SPEC_R, names
from radix_policy.workloads.generator import LARGE, TEMPLATE, anchor_span
from radix_policy.workloads.profiles import _GAIA, _GSM8K, _MTBENCH, _SWEBENCH


def calls(workload: Workload) -> list:
    return [c for s in workload.sessions for c in s.calls]


def stationary_r(rows: topo.Rows) -> float:
    p = np.array(rows)
    pi = np.full(len(p), 1 / len(p))
    for _ in range(5000):
        pi = 0.5 * pi + 0.5 * pi @ p
    entropy = lambda q: -sum(x * math.log(x) for x in q if x > 0)  # noqa: E731
    return 1 - sum(w * entropy(row) for w, row in zip(pi, p)) / entropy(pi)


@pytest.mark.parametrize("name", SPEC_R)
def test_predictability_is_the_specs(name: str) -> None:
    assert stationary_r(GROUPS[name]().rows) == pytest.approx(SPEC_R[name], abs=0.006)
    assert make(name, seed=2, sessions=1000).facts["R"] == pytest.approx(SPEC_R[name], abs=0.03)


@pytest.mark.parametrize("name", names())
def test_every_workload_keeps_the_contract(name: str) -> None:
    workload = make(name, seed=5, sessions=6)
    assert workload.name == name
    assert len({s.key for s in workload.sessions}) == len(workload.sessions)
    for session in workload.sessions:
        assert session.calls
        for call in session.calls:
            assert call.prompt_tokens == sum(n for _, n in call.prompt) > call.anchor_tokens
            assert call.output_tokens == sum(n for _, n in call.output) >= 4
            assert call.gap >= 0
            assert call.agent in workload.agents or not session.tagged
    if workload.transitions is not None:
        assert len(workload.transitions) == len(workload.agents)
        for row in workload.transitions:
            assert sum(row) == pytest.approx(1) and min(row) >= 0
    assert workload.facts["largest"] == workload.largest


def test_lengths_follow_the_spec() -> None:
    for name, scale in (("selector", "plain"), ("selector:large", "large")):
        workload = make(name, seed=1, sessions=400)
        tasks = [s.calls[0].prompt_tokens - s.calls[0].anchor_tokens for s in workload.sessions]
        messages = [c.output_tokens for c in calls(workload)]
        task, message = (300, 200) if scale == "large" else (80, 40)
        assert statistics.mean(tasks) == pytest.approx(task, rel=0.1)
        assert statistics.mean(messages) == pytest.approx(message, rel=0.02)
        assert statistics.pstdev([math.log(n) for n in messages]) == pytest.approx(0.6, abs=0.02)
        assert min(messages) >= 4
    turns = Counter(len(s.calls) for s in make("pipeline", seed=1, sessions=900).sessions)
    assert set(turns) == set(range(20, 29)) and min(turns.values()) > 70


def test_anchors_are_six_fixed_draws() -> None:
    plain, large = [anchor_span(a)[1] for a in range(6)], [anchor_span(a, LARGE)[1] for a in range(6)]
    assert all(400 <= n <= 800 for n in plain) and len(set(plain)) == 6
    assert all(1000 <= n <= 4000 for n in large) and len(set(large)) == 6
    for name in ("pipeline", "debate", "selector", "random", "gsm8k"):
        workload = make(name, seed=9)
        seen = {c.agent: c.anchor_tokens - TEMPLATE for c in calls(workload)}
        assert all(plain[workload.agents.index(agent)] == n for agent, n in seen.items())


def test_gaps_follow_the_spec() -> None:
    workload = make("pipeline", seed=3, sessions=400)
    assert {s.calls[0].gap for s in workload.sessions} == {0.5}
    later = [c.gap for s in workload.sessions for c in s.calls[1:]]
    # mean: median 0.2 at sigma 0.5, and 2 s of tool three times in ten
    assert statistics.mean(later) == pytest.approx(0.2 * math.exp(0.125) + 0.6, rel=0.05)
    assert statistics.median(later) == pytest.approx(0.28, abs=0.04)


def test_a_prompt_is_template_anchor_and_the_whole_conversation() -> None:
    for session in make("selector", seed=4, sessions=5).sessions:
        conversation = list(expand(session.calls[0].prompt[2:]))
        for call in session.calls:
            ids = list(expand(call.prompt))
            assert ids[:TEMPLATE] == list(range(TEMPLATE))
            assert ids[call.anchor_tokens :] == conversation
            conversation += expand(call.output)
    first, second = make("selector", seed=4, sessions=2).sessions
    shared = {i for c in first.calls for i in expand(c.prompt)} & {i for c in second.calls for i in expand(c.prompt)}
    assert max(shared) < 1 << 40, "sessions share the template and anchors only"


def test_calls_of_one_agent_in_a_session_extend_each_other() -> None:
    for session in make("random", seed=4, sessions=5).sessions:
        last: dict[str, list[int]] = {}
        for call in session.calls:
            ids = list(expand(call.prompt))
            before = last.get(call.agent, [])
            assert ids[: len(before)] == before
            last[call.agent] = ids + list(expand(call.output))


def test_private_threads_hold_the_task_and_own_messages_only() -> None:
    public, private = make("selector", seed=4, sessions=5), make("selector", seed=4, sessions=5, private=True)
    assert private.name == "selector:private"
    for a, b in zip(public.sessions, private.sessions):
        assert [(c.agent, c.output_tokens, c.gap) for c in a.calls] == [
            (c.agent, c.output_tokens, c.gap) for c in b.calls
        ]
        task = list(expand(b.calls[0].prompt))[b.calls[0].anchor_tokens :]
        threads: dict[str, list[int]] = {}
        for call in b.calls:
            thread = threads.setdefault(call.agent, list(task))
            assert list(expand(call.prompt))[call.anchor_tokens :] == thread
            thread += expand(call.output)


def test_sessions_by_concurrency() -> None:
    assert len(make("debate", seed=1).sessions) == 50
    assert len(make("debate", seed=1, concurrency=16).sessions) == 50
    assert len(make("debate", seed=1, concurrency=64).sessions) == 160
    assert make("debate", seed=1, concurrency=64).sessions[:50] == make("debate", seed=1).sessions


def test_first_agent() -> None:
    assert {s.calls[0].agent for s in make("selector", seed=1).sessions} == {"planner"}
    assert len({s.calls[0].agent for s in make("random", seed=1).sessions}) == 6


def test_measured_transitions_are_the_true_rows() -> None:
    for name in ("selector", "chain12", "supervisor", "gaia"):
        workload = make(name, seed=8, sessions=1500)
        rows = workload.transitions
        assert rows is not None
        index = {agent: i for i, agent in enumerate(workload.agents)}
        seen = Counter(
            (index[a.agent], index[b.agent]) for s in workload.sessions for a, b in zip(s.calls, s.calls[1:])
        )
        for i, row in enumerate(rows):
            total = sum(seen[i, j] for j in range(len(rows)))
            assert all(abs(seen[i, j] / total - p) < 0.06 for j, p in enumerate(row))


@pytest.mark.parametrize("name", ["selector", "geometric", "supervisor", "swe"])
def test_the_end_law_is_true(name: str) -> None:
    workload = make(name, seed=8, sessions=1500)
    index = {agent: i for i, agent in enumerate(workload.agents)}
    ends: Counter[tuple[int, int]] = Counter()
    reached: Counter[tuple[int, int]] = Counter()
    for session in workload.sessions:
        for turn, call in enumerate(session.calls, 1):
            reached[turn, index[call.agent]] += 1
        ends[len(session.calls), index[session.calls[-1].agent]] += 1
    for (turn, agent), n in reached.items():
        p = workload.end_probability(turn, agent)
        assert abs(ends[turn, agent] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1e-9


def test_session_lengths_of_the_others() -> None:
    assert statistics.mean(len(s.calls) for s in make("geometric", seed=1, sessions=3000).sessions) == pytest.approx(
        25, rel=0.06
    )
    assert {len(s.calls) for s in make("chain24", seed=1).sessions} <= set(range(40, 61))
    supervised = make("supervisor", seed=1, sessions=500)
    assert {len(s.calls) for s in supervised.sessions} <= set(range(6, 41))
    for session in supervised.sessions:
        assert all((c.agent == "supervisor") == (i % 2 == 0) for i, c in enumerate(session.calls))


def test_swe_grows_to_sixty_thousand_tokens() -> None:
    workload = make("swe", seed=1)
    last = [s.calls[-1].prompt_tokens for s in workload.sessions]
    assert all(30 <= len(s.calls) <= 56 for s in workload.sessions)
    assert statistics.mean(last) == pytest.approx(60_000, rel=0.05)
    assert workload.facts["mean_prompt"] == pytest.approx(33_000, rel=0.05)
    gaps = [c.gap for s in workload.sessions for c in s.calls[1:]]
    assert statistics.median(gaps) == pytest.approx(3 * math.exp(-0.5), rel=0.1)
    for session in workload.sessions[:3]:
        for a, b in zip(session.calls, session.calls[1:]):
            before = list(expand((*a.prompt, *a.output)))
            assert list(expand(b.prompt))[: len(before)] == before


def test_drift_changes_its_matrix_half_way() -> None:
    for name, rows in (("drift", topo.random_rows()), ("drift:reversed", topo.cycle(6, -1))):
        workload = make(name, seed=1)
        (half, first), (rest, second) = workload.facts["phases"]
        assert (half, rest, first, second) == (25, 25, topo.cycle(6), rows)
        index = {agent: i for i, agent in enumerate(workload.agents)}
        for number, session in enumerate(workload.sessions):
            true = first if number < half else second
            assert all(true[index[a.agent]][index[b.agent]] > 0 for a, b in zip(session.calls, session.calls[1:]))


def test_pollution_is_selector_and_as_many_anonymous_one_shots() -> None:
    clean = make("selector", seed=6, sessions=8)
    for name, extra in (("pollution", 0), ("pollution:shared", 200)):
        workload = make(name, seed=6, sessions=8)
        scripted, anonymous = workload.lanes
        assert [[(c.agent, c.gap, c.output_tokens) for c in s.calls] for s in scripted] == [
            [(c.agent, c.gap, c.output_tokens) for c in s.calls] for s in clean.sessions
        ]
        assert len(anonymous) == clean.requests and not any(s.tagged for s in anonymous)
        assert all(len(s.calls) == 1 and s.calls[0].agent == "" for s in anonymous)
        lengths = [s.calls[0].prompt_tokens - TEMPLATE - extra for s in anonymous]
        assert min(lengths) >= 200 and max(lengths) <= 1500
        starts = [list(expand(s.calls[0].prompt))[: TEMPLATE + 200] for s in anonymous]
        assert (starts[0] == starts[1]) == bool(extra)
        # with slots of their own the one-shots last about as long as the scripts
        assert sum(s.calls[0].gap for s in anonymous) == pytest.approx(sum(c.gap for c in calls(clean)), rel=0.3)


def test_profiles_differ_by_27_to_47_points_on_single_edges() -> None:
    rows = [topo.preferring(first) for first in (_GSM8K, _MTBENCH, _GAIA, _SWEBENCH)]
    for a in range(4):
        for b in range(a):
            differences = [abs(x - y) for p, q in zip(rows[a], rows[b]) for x, y in zip(p, q)]
            assert 0.27 <= max(differences) <= 0.4701
            wrong = [i for i, (p, q) in enumerate(zip(rows[a], rows[b])) if p.index(max(p)) != q.index(max(q))]
            assert len(wrong) >= 3, "a matrix learned on one predicts the wrong agent on another"
            assert all(0.2699 <= max(abs(x - y) for x, y in zip(rows[a][i], rows[b][i])) <= 0.4701 for i in wrong)
    facts = {name: make(name, seed=1).facts for name in ("gsm8k", "mtbench", "gaia", "swebench")}
    assert facts["gsm8k"]["mean_turns"] < facts["mtbench"]["mean_turns"] < facts["gaia"]["mean_turns"]
    assert facts["gaia"]["mean_turns"] < facts["swebench"]["mean_turns"]


def digest(names: tuple[str, ...]) -> str:
    text = repr([[make(n, seed=7, sessions=4).sessions, make(n, seed=7, sessions=4).facts] for n in names])
    return hashlib.sha256(text.encode()).hexdigest()


def test_same_seed_same_bytes_in_another_process() -> None:
    chosen = ("pipeline", "selector:large:private", "random", "swe", "pollution:shared", "gaia", "drift")
    code = (
        "import hashlib\nfrom radix_policy.workloads import make\n"
        f"names = {chosen!r}\n"
        "text = repr([[make(n, seed=7, sessions=4).sessions, make(n, seed=7, sessions=4).facts] for n in names])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(chosen)
    assert make("pipeline", seed=7).sessions != make("pipeline", seed=8).sessions


def test_variants_keep_the_routing() -> None:
    paths = [
        [[c.agent for c in s.calls] for s in make(f"debate{v}", seed=3).sessions] for v in ("", ":large", ":private")
    ]
    assert paths[0] == paths[1] == paths[2]


def test_bad_names() -> None:
    for name in ("nothing", "selector:huge", "pipeline:reversed", "gsm8k:large", ""):
        with pytest.raises(WorkloadError, match="known: pipeline, pipeline:large") as caught:
            make(name, seed=1)
        assert "\n" not in str(caught.value)
    with pytest.raises(WorkloadError, match="at least 1"):
        make("selector", seed=1, sessions=0)
    with pytest.raises(WorkloadError, match="selector:larg"):
        make("selector", seed=1, larg=True)


def splitmix(state: int) -> int:
    word = (state + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_materialise_is_one_function_of_the_id() -> None:
    spans = ((5, 1000), (1 << 62, 2000), (5, 10))
    ids = materialise(spans, 2048, 8)
    assert ids.typecode == "q" and len(ids) == 3010
    assert min(ids) >= 8 and max(ids) < 2048
    assert ids[:10] == ids[3000:]
    assert materialise(((500, 7),), 2048, 8) == ids[495:502], "however it is cut"
    assert list(materialise(((0, 3), (1 << 62, 1)), 32000, 3)) == [splitmix(i) % 31997 + 3 for i in (0, 1, 2, 1 << 62)]
    assert list(materialise(((0, 4),), 32000, 3)) == [24715, 2847, 15687, 10722], "fixed for all time"
    assert materialise(spans, 2048, 8, salt=1) != ids
    assert len(materialise((), 10)) == 0
    for vocab, reserved in ((8, 8), (8, 9), (8, -1)):
        with pytest.raises(ValueError, match="reserved"):
            materialise(spans, vocab, reserved)


def test_materialise_collides_only_by_chance() -> None:
    vocab = 2000
    for step in (0, 1 << 22, 1 << 62):
        a, b = np.array(materialise(((0, 100_000),), vocab)), np.array(materialise(((step + 1, 100_000),), vocab))
        assert np.mean(a == b) == pytest.approx(1 / vocab, rel=0.4)
    counts = np.bincount(materialise(((0, 400_000),), vocab), minlength=vocab)
    assert abs(((counts - 200) ** 2 / 200).sum() - (vocab - 1)) < 6 * math.sqrt(2 * vocab), "chi-squared"


def test_materialised_prompts_share_prefixes_as_spans_do() -> None:
    a, b = make("selector", seed=1, sessions=2).sessions
    x, y = a.calls[0], b.calls[0]
    assert x.agent == y.agent
    same = materialise(x.prompt, 50_000, 10), materialise(y.prompt, 50_000, 10)
    assert same[0][: x.anchor_tokens] == same[1][: x.anchor_tokens]
    assert same[0][x.anchor_tokens :] != same[1][x.anchor_tokens :]
    assert SpanPrompt(x.prompt).fingerprint(0, 100) == SpanPrompt(y.prompt).fingerprint(0, 100)
