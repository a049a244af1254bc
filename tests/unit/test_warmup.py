"""When warmup acts: each condition of the gate alone, the look at victims, and the same planner in the closed loop."""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.config import ConfigError, build
from radix_policy.events import RequestArrived, RequestFinished, Tag, Tick
from radix_policy.prompts import SpanPrompt, TokenPrompt
from radix_policy.runtime import Runtime
from radix_policy.simulator.loop import Loop, Outcome
from radix_policy.simulator.warm import UNGATED, WarmLoop, held
from radix_policy.warm_anchors import Anchor
from radix_policy.warmup import SHORTEST, Held, Look, Planner, Slice, Victim, WarmupConfig, peek
from radix_policy.workloads import SessionScript, Workload, make, make_call
from tests.unit.small_workloads import workloads

ANCHOR = 600


class Bench:
    """A runtime whose sessions call agents in turn, and a planner; memory is free unless told otherwise."""

    def __init__(self, policy: str = "scout", **keys: Any) -> None:
        self.runtime = Runtime(policy, {"identity": "tags"})
        self.runtime.reset(0)
        self.planner = Planner(build({"warmup": True, **keys}, WarmupConfig)[0], self.runtime)
        self.now = 0.0
        self.device: dict[int, int] = {}  # tokens of each agent's anchor on the device
        self._number = 0

    def call(
        self,
        session: str,
        agent: int,
        gap: float = 1.0,
        after: str | None = None,
        system: int = 0,
        final: bool = False,
    ) -> None:
        self._number += 1
        rid = f"r{self._number}"
        self.now += gap
        self.runtime.observe(Tick(self._number, self.now))
        ids = [*range((1 + system) * 100_000 + 1000 * agent, (1 + system) * 100_000 + 1000 * agent + ANCHOR)]
        prompt = TokenPrompt(array("q", [*ids, 7_000_000 + self._number]))
        self.runtime.observe(RequestArrived(rid, prompt, "", Tag(f"a{agent}", session, final, after)))
        self.planner.arrived(self.runtime.requests[rid])
        self.now += 0.1
        self.runtime.observe(Tick(self._number, self.now))
        self.runtime.observe(RequestFinished(rid, 5))
        self.planner.left()

    def rounds(self, sessions: int = 3, calls: int = 9, agents: int = 3) -> "Bench":
        """Sessions one after the other, the last one still open after agent 2's turn."""
        for session in range(sessions):
            for turn in range(calls):
                self.call(f"s{session}", turn % agents, final=session < sessions - 1 and turn == calls - 1)
        return self

    def held(self, anchor: Anchor) -> Held:
        agent = int(self.runtime.world.identifier.agents.name(anchor.key[1]).removeprefix("tag:a"))
        return Held(self.device.get(agent, 0))

    def plan(self, free: int = 100_000, wait: float = 0.0) -> Slice | Look | None:
        self.now += wait
        return self.planner.plan(self.now, free, self.held)

    def why(self) -> list[str]:
        return [*self.planner.refused]


def agent_of(bench: Bench, plan: Slice | Look | None) -> str:
    assert isinstance(plan, Slice)
    return bench.runtime.world.identifier.agents.name(plan.key[1])


# ---- the conditions ----


def test_the_next_agents_anchor_is_warmed_slice_by_slice() -> None:
    bench = Bench().rounds()
    first = bench.plan()
    assert agent_of(bench, first) == "tag:a0" and isinstance(first, Slice)
    assert (first.begin, first.end) == (0, 512)
    assert list(first.prompt.ids(0, 3)) == [100_000, 100_001, 100_002]
    assert bench.plan() is None and not bench.planner.due(bench.now), "one slice at a time"
    bench.planner.finished(0, bench.now + 0.05)
    bench.device[0] = 512
    second = bench.plan()
    assert isinstance(second, Slice) and (second.begin, second.end) == (512, ANCHOR)
    bench.planner.finished(512, bench.now + 0.06)
    bench.device[0] = ANCHOR
    assert bench.plan() is None and bench.why() == ["held"]


def test_unpredictable_agents_are_left_alone() -> None:
    bench = Bench(warmup_r_min=0.3)
    for session in range(6):
        for turn in range(9):
            bench.call(
                f"s{session}", (turn * turn + session * 5 + turn // 2 * session) % 3, final=turn == 8 and session < 5
            )
    assert max(bench.planner.predictability(agent) for agent in (1, 2, 3)) < 0.3
    assert bench.plan() is None and bench.why() == ["unpredictable"]


def test_a_hint_of_the_client_makes_up_for_it() -> None:
    bench = Bench(warmup_r_min=0.999)
    for session in range(6):
        for turn in range(9):
            bench.call(
                f"s{session}", (turn * turn + session * 5 + turn // 2 * session) % 3, final=turn == 8 and session < 5
            )
    bench.call("s5", 1, after="a2")
    assert agent_of(bench, bench.plan()) == "tag:a2"
    bench = Bench(warmup_r_min=0.999, warmup_p_min=0.95)
    bench.call("s0", 2)
    for turn in range(40):  # hints that never come true
        bench.call(f"s{turn // 8}", turn % 2, after="a2")
    bench.call("s4", 2)
    bench.call("s4", 0, after="a2")
    assert bench.runtime.world.hints.trust < 0.9
    assert bench.plan() is None


def test_several_sessions_add_up() -> None:
    bench = Bench(warmup_p_min=0.75, warmup_r_min=0.0)
    for number in range(24):  # after agent 0 comes agent 1 or agent 2
        bench.call(f"s{number}", 0)
        bench.call(f"s{number}", 1 + number % 2, final=True)
    assert not bench.runtime.world.sessions.live
    bench.call("x", 0)
    assert bench.plan() is None, "half a chance is not enough"
    bench.call("y", 0, gap=0.01)
    bench.call("z", 0, gap=0.01)
    assert agent_of(bench, bench.plan()) in ("tag:a1", "tag:a2")


def test_memory_is_taken_from_what_is_worth_less() -> None:
    bench = Bench().rounds()
    look = bench.plan(free=100)
    assert isinstance(look, Look) and look.tokens >= 512
    bench.planner.looked(look, None)
    assert bench.plan(free=0) is None and bench.why() == ["worth"], "nothing is known of what would go"
    bench = Bench(warmup_value=False).rounds()
    assert isinstance(bench.plan(free=0), Slice)
    bench = Bench("cachescout").rounds()
    assert peek(bench.runtime, Look(10, None)) is None
    assert isinstance(bench.plan(), Slice), "free memory costs nobody anything"


def test_short_slices_are_warmed_in_a_full_pool_too() -> None:
    bench = Bench(warmup_slice=16).rounds()
    look = bench.plan(free=0)
    assert isinstance(look, Look)
    bench.planner.looked(look, [Victim(-1.0, 100, True)])
    plan = bench.plan(free=0)
    assert isinstance(plan, Slice) and plan.end - plan.begin == 16
    bench = Bench().rounds()
    look = bench.plan(free=0)
    assert isinstance(look, Look)
    bench.planner.looked(look, [Victim(-1.0, 20, True)])
    assert bench.plan(free=0) is None and bench.why() == ["worth"], "but not what is left of a long one"


def test_the_budget_holds() -> None:
    bench = Bench(warmup_budget=100.0, warmup_rate=1000.0).rounds()
    bench.planner._tokens, bench.planner._filled = 100.0, bench.now
    spent, began = 0, bench.now
    while bench.now < began + 60:
        plan = bench.plan(wait=0.5)
        if isinstance(plan, Slice):
            spent += plan.end - plan.begin
            bench.planner.finished(plan.begin, bench.now)
        bench.planner._tried.clear()
    assert 5000 <= spent <= 100.0 * 60.5 + 100 + 512
    assert "budget" in bench.why()


def test_anchors_are_begun_at_a_rate() -> None:
    bench = Bench(warmup_rate=0.1, warmup_budget=1e9).rounds()
    plan = bench.plan()
    assert isinstance(plan, Slice)
    bench.planner.finished(0, bench.now)
    bench.call("s2", 0)
    assert bench.plan() is None and bench.why() == ["rate"]
    assert agent_of(bench, bench.plan(wait=11.0)) == "tag:a1"


def test_a_request_ends_the_work_on_an_anchor() -> None:
    bench = Bench().rounds()
    assert agent_of(bench, bench.plan()) == "tag:a0"
    bench.planner.finished(0, bench.now)
    bench.call("s2", 0)
    bench.device[0] = 512
    assert agent_of(bench, bench.plan()) == "tag:a1", "a0 was just called: what is left of its anchor is there now"


def test_nothing_is_warmed_over_and_over() -> None:
    bench = Bench(warmup_budget=1e9, warmup_rate=1e6).rounds()
    spent = 0
    for _ in range(50):  # what is warmed does not stay
        plan = bench.plan(wait=0.01)
        if isinstance(plan, Slice):
            spent += plan.end - plan.begin
            bench.planner.aborted()
    assert ANCHOR <= spent <= ANCHOR + 2 * 512 and "tried" in bench.why()


def test_a_new_system_prompt_is_not_warmed_as_the_old_one() -> None:
    bench = Bench().rounds()
    for agent in range(3):
        bench.call("s3", agent, system=5)
    assert bench.plan() is None and bench.why() == ["no anchor"]


def test_the_more_sessions_wait_the_shorter_a_slice() -> None:
    bench = Bench().rounds()
    for number in range(7):
        bench.call(f"w{number}", 2, gap=0.01)
    plan = bench.plan()
    assert isinstance(plan, Slice) and SHORTEST <= plan.end <= 512 // 7 + 1


def test_the_first_agent_of_a_new_session_is_foreseen_where_none_is_left() -> None:
    bench = Bench().rounds(sessions=4)
    bench.call("s3", 0, final=True)
    assert not bench.runtime.world.sessions.live
    assert agent_of(bench, bench.plan()) == "tag:a0"


def test_an_idle_server_is_asked_less_and_less() -> None:
    bench = Bench()
    asked = 0
    for _ in range(1000):
        bench.now += 0.01
        if bench.planner.due(bench.now):
            asked += 1
            assert bench.plan() is None
    assert asked <= 12
    bench.call("s", 1, gap=0.0)
    assert bench.planner.due(bench.now)


@pytest.mark.parametrize(
    ("key", "value"), [("warmup", 1), ("warmup_slice", 513), ("warmup_p_min", 1.5), ("warmup_budget", 0)]
)
def test_bad_keys_are_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}': got {value}"):
        build({key: value}, WarmupConfig)


# ---- the look ----


@settings(max_examples=60)
@given(workloads(), st.integers(40, 90), st.integers(1, 60), st.integers(0, 8))
def test_a_look_names_what_an_eviction_then_takes(work: Workload, capacity: int, tokens: int, stop: int) -> None:
    loop = Loop(work, "scout", capacity=capacity, concurrency=2, service="serial", trims=False)
    stopped = []

    def finish(slot: Any, run: Any) -> None:
        Loop._finish(loop, slot, run)
        if len(stopped) <= stop and not loop.engine.running:
            stopped.append(1)
            look_and_evict(loop, tokens)

    loop._finish = finish  # type: ignore[method-assign]
    loop.run()


def look_and_evict(loop: Loop, tokens: int) -> None:
    runtime, tree = loop.runtime, loop.engine.tree
    for keep in (None, next(iter(tree.nodes))):
        seen = peek(runtime, Look(tokens, keep))
        assert seen is not None
        again = peek(runtime, Look(tokens, keep))
        assert seen == again, "looking changes nothing"
    if not runtime.policy.guard.in_control:  # type: ignore[attr-defined]
        return
    taken = []
    short = tokens
    with runtime.evicting() as drain:
        while short > 0 and (node := drain.next()) is not None:
            taken.append((runtime.policy.score(node), node.length))
            short -= tree.evict(node.id)
    assert [(v.score, v.tokens) for v in seen] == taken


def test_what_is_kept_is_no_victim() -> None:
    loop = Loop(make("pipeline", seed=1, sessions=2), "scout", capacity=4000, concurrency=1, service="serial")
    loop.run()
    everything = peek(loop.runtime, Look(1 << 40, None))
    assert everything is not None and sum(v.tokens for v in everything) == loop.engine.tree.used
    leaf = next(node for node in loop.engine.tree.nodes.values() if not node.children)
    kept = peek(loop.runtime, Look(1 << 40, leaf.id))
    assert kept is not None and sum(v.tokens for v in kept) <= loop.engine.tree.used - leaf.end


@settings(max_examples=60)
@given(workloads(), st.integers(40, 200), st.integers(1, 4))
def test_held_is_what_a_lookup_finds(work: Workload, capacity: int, page: int) -> None:
    loop = Loop(work, "lru", capacity=capacity, concurrency=1, service="serial", page_size=page)
    loop.run()
    tree = loop.engine.tree
    for session in work.sessions:
        for call in session.calls:
            before = len(tree.nodes)
            found = held(tree, SpanPrompt(call.prompt), call.prompt_tokens)
            assert len(tree.nodes) == before, "nothing is split"
            assert found.node in tree.nodes
            assert found.tokens == tree.match(call.prompt, call.prompt_tokens).tokens


# ---- in the closed loop ----


def mean(outcome: Outcome) -> float:
    return sum(outcome.ttft) / len(outcome.ttft)


def both(name: str, factor: float, concurrency: int, seed: int = 1, keys: Mapping[str, Any] | None = None) -> Any:
    work = make(name, seed=seed, sessions=16)
    where = {"capacity": int(factor * work.largest), "concurrency": concurrency}
    off = Loop(work, "scout", service="serial", **where).run()  # type: ignore[arg-type]
    on = WarmLoop(work, "scout", warmup=keys or {"warmup": True}, **where).run()
    assert len(off.ttft) == len(on.ttft) and sorted(off.calls) == sorted(on.calls)
    return off, on, on.snapshot["warmup"]


def test_one_session_at_a_time_waits_a_seventh_less() -> None:
    off, on, warmup = both("pipeline", 1.3, 1)
    assert mean(on) < 0.85 * mean(off) and on.hit_rate > off.hit_rate + 0.1
    assert on.cached_tokens - off.cached_tokens > 0.5 * warmup["useful_tokens"]
    assert warmup["useful_tokens"] > 0.8 * warmup["tokens"] and warmup["gate"] == "open"
    assert warmup["longest_wait_s"] < 0.1, "one slice at most"


@pytest.mark.parametrize("name", ["selector", "debate"])
def test_a_selector_gains_and_a_debate_loses_nothing(name: str) -> None:
    off, on, _ = both(name, 1.3, 1)
    assert mean(on) < (0.92 if name == "selector" else 1.005) * mean(off)


@pytest.mark.parametrize("name", ["pipeline", "selector", "random"])
@pytest.mark.parametrize(("factor", "concurrency"), [(4, 4), (12, 16)])
def test_several_sessions_lose_nothing(name: str, factor: float, concurrency: int) -> None:
    off, on, _ = both(name, factor, concurrency)
    assert mean(on) <= 1.01 * mean(off) and on.hit_rate >= off.hit_rate - 0.005


def test_a_cache_that_holds_everything_is_left_alone() -> None:
    off, on, warmup = both("pipeline", 60, 1)
    assert warmup["issued"] == 0 and list(on.cached) == list(off.cached)


def test_without_its_gate_it_does_harm() -> None:
    off, on, _ = both("selector", 1.3, 1, keys=UNGATED)
    assert mean(on) > mean(off)


def test_a_wrong_guess_closes_the_gate() -> None:
    """Agents whose anchors are never called again after they are learned: every warmup is in vain."""
    keys = {"warmup": True, "warmup_r_min": 0.0, "warmup_p_min": 0.0, "warmup_value": False, "warmup_window": 2}
    off, on, warmup = both("random", 1.3, 1, keys=keys)
    assert warmup["gate_closed"] >= 1 and warmup["refused"]["gate"] > 0
    assert mean(on) < 1.1 * mean(off)


@settings(max_examples=40)
@given(workloads(), st.integers(40, 120), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_whatever_happens_the_books_are_right(
    work: Workload, capacity: int, page: int, concurrency: int, gated: bool
) -> None:
    keys = {"warmup": True, "warmup_r_min": 0.0, "warmup_slice": 16} if gated else UNGATED
    loop = WarmLoop(work, "scout", warmup=keys, capacity=capacity, concurrency=concurrency, page_size=page)
    outcome = loop.run()
    warmup = outcome.snapshot["warmup"]
    assert outcome.requests + outcome.unserved == work.requests
    assert warmup["issued"] == warmup["finished"] + warmup["aborted"]
    assert not loop.engine.running and loop.engine.private == 0 and loop.engine.tree.protected == 0
    assert not any(rid.startswith("warm") for rid in loop.runtime.requests)


def test_learning_never_sees_a_warmup() -> None:
    work = long_anchors()
    on = WarmLoop(work, "scout", warmup={"warmup": True}, capacity=1000, concurrency=1)
    off = Loop(work, "scout", capacity=1000, concurrency=1, service="serial")
    assert on.run().snapshot["warmup"]["useful_tokens"] > 0
    off.run()
    for loop in (on, off):
        world = loop.runtime.world
        assert world.calls == work.requests
    assert [on.runtime.world.transitions.counts(i) for i in range(4)] == [
        off.runtime.world.transitions.counts(i) for i in range(4)
    ]


def long_anchors(sessions: int = 6, turns: int = 8, agents: int = 4) -> Workload:
    """Anchors that do not all fit, sessions with a second between calls."""
    scripts = []
    for session in range(sessions):
        base, end, calls = (1 << 40) + (session << 20), 60, []
        for turn in range(turns):
            agent = turn % agents
            calls.append(make_call(f"a{agent}", ((1 + agent << 20, 300), (base, end)), ((base + end, 4),), 1.0, 300))
            end += 24
        scripts.append(SessionScript(f"s{session}", tuple(calls)))
    return Workload("long", tuple(scripts))


def test_fixed_service_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing saves time"):
        WarmLoop(long_anchors(), "scout", warmup={"warmup": True}, capacity=1000, concurrency=1, service="fixed")


# ---- what is known of an agent's successors ----


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_predictability_is_that_of_the_counts(calls: list[tuple[int, int]]) -> None:
    """By hand from all transitions so far, none faded; what is kept at hand may be a few transitions old."""
    bench = Bench()
    bench.runtime = Runtime("scout", {"identity": "tags", "transition_decay": 1.0, "max_agents": 3})
    bench.runtime.reset(0)
    bench.planner = Planner(build({"warmup": True}, WarmupConfig)[0], bench.runtime)
    for session, agent in calls:
        bench.call(f"s{session}", agent)
    transitions = bench.runtime.world.transitions
    rows = [transitions.counts(i) for i in range(len(transitions))]
    columns = [sum(column) for column in zip(*rows)]
    assert sum(bench.planner._called._counts.values()) == pytest.approx(sum(columns))
    assert all(bench.planner._called._counts.get(j, 0.0) == pytest.approx(n) for j, n in enumerate(columns))
    bench.planner._called._entropy = (-1, 0.0)
    bench.planner._successors.clear()
    entropy = bits(columns)
    for agent, row in enumerate(rows):
        expected = 1.0 - bits(row) / entropy if entropy > 0 and sum(row) > 0 else 0.0
        assert bench.planner.predictability(agent) == pytest.approx(expected)


def bits(counts: list[float]) -> float:
    total = sum(counts)
    return -sum(n / total * math.log2(n / total) for n in counts if n) if total else 0.0


def test_what_is_kept_of_successors_is_bounded_and_stays_fresh() -> None:
    bench = Bench()
    bench.runtime = Runtime("scout", {"identity": "tags", "max_agents": 1024})
    bench.runtime.reset(0)
    bench.planner = Planner(build({"warmup": True}, WarmupConfig)[0], bench.runtime)
    for turn in range(700):
        bench.call("s", turn % 600)
        bench.plan()
        bench.planner.aborted()
    assert len(bench.planner._successors) <= 256
    agent = bench.runtime.world.identifier.agents.intern("", "tag:a0")
    before = bench.planner.predictability(agent)
    for turn in range(40):  # what follows agent 0 is anyone's guess now
        bench.call("s", 0)
        bench.call("s", 1 + 7 * turn)
    assert before == pytest.approx(1.0) and bench.planner.predictability(agent) < 0.9
