"""What the scheduler hooks make of requests, of the clock, and of waiting requests."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from radix_policy.events import RequestArrived
from radix_policy.prompts import TokenPrompt
from sglang_scout import bridge as bridge_module
from sglang_scout import scheduler
from sglang_scout.scheduler import ClockTick, namespace
from tests.tree.conformance import blocks
from tests.tree.test_faults import finish, request
from tests.tree.trees import SglangTree

pytest.importorskip("sglang")


@pytest.fixture
def tree() -> SglangTree:
    return SglangTree()


@pytest.fixture
def engine(tree: SglangTree) -> SimpleNamespace:
    return SimpleNamespace(tree_cache=tree.cache, forward_ct=7)


def counts(tree: SglangTree) -> dict[str, int]:
    assert tree.bridge is not None
    return tree.bridge.counters


# ---- requests ----


def test_a_request_is_observed_once(tree: SglangTree, engine: Any) -> None:
    req = request(custom_params={"scout": {"agent": "planner", "session": "s1"}}, priority=3, extra_key="tenant")
    scheduler.on_queued(engine, req)
    scheduler.on_queued(engine, req)
    known = tree.runtime.requests["r1"]
    assert (known.tagged, known.priority, known.namespace, known.prompt_tokens) == (
        True,
        3,
        namespace("tenant", None, None),
        200,
    )
    assert counts(tree)["requests"] == counts(tree)["tagged"] == 1


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_a_retraction_does_not_repeat_it(how: str, tree: SglangTree, engine: Any) -> None:
    scheduler.on_queued(engine, request(is_retracted=how == "attribute"), how == "argument")
    assert counts(tree)["requests"] == 0


def test_a_session_id_alone_is_a_tag(tree: SglangTree, engine: Any) -> None:
    scheduler.on_queued(engine, request(session_id="abc"))
    assert tree.runtime.world.sessions.find("", "abc") is not None


@pytest.mark.parametrize(
    "tag", ["text", 3, ["a"], {"agent": ""}, {"agent": 1.5}, {"final": "yes"}, {"agent": "x" * 300}]
)
def test_a_malformed_tag_is_counted_and_the_request_is_untagged(tag: Any, tree: SglangTree, engine: Any) -> None:
    scheduler.on_queued(engine, request(custom_params={"scout": tag}))
    assert counts(tree)["tag_errors"] == counts(tree)["requests"] == 1
    assert not tree.runtime.requests["r1"].tagged


def test_other_custom_params_are_nobodys_tag(tree: SglangTree, engine: Any) -> None:
    for number, params in enumerate([None, {}, {"other": 1}, "text", 7]):
        scheduler.on_queued(engine, request(f"r{number}", custom_params=params))
    assert counts(tree)["tag_errors"] == counts(tree)["tagged"] == 0


def test_health_checks_and_the_warmup_are_not_observed(tree: SglangTree, engine: Any) -> None:
    scheduler.on_queued(engine, request("HEALTH_CHECK_1"))
    warmup = request("w1", origin_input_ids=array("q", [10, 11, 12]))
    warmup.sampling_params.max_new_tokens = 8
    scheduler.on_queued(engine, warmup)
    text = request("w2", origin_input_ids=array("q", [1, 2]))
    text.sampling_params.max_new_tokens = 8
    text.tokenizer = SimpleNamespace(decode=lambda ids: "<s>" + scheduler.WARMUP_TEXT)
    scheduler.on_queued(engine, text)
    assert not tree.runtime.requests
    scheduler.on_queued(engine, request("r1"))
    scheduler.on_queued(engine, warmup)
    assert set(tree.runtime.requests) == {"r1", "w1"}, "after the first real request nothing is taken for a warm-up"


def test_requests_that_are_over_before_they_begin_are_not_observed(tree: SglangTree, engine: Any) -> None:
    scheduler.on_queued(engine, request(to_finish=finish("abort")))
    scheduler.on_queued(engine, request(finished_reason=finish("abort")))
    assert not tree.runtime.requests


@pytest.mark.parametrize(
    ("kind", "counter"), [("stop", "finished"), ("length", "finished"), ("abort", "aborted"), (None, None)]
)
def test_a_release_ends_a_finished_request_and_no_other(
    kind: str | None, counter: str | None, tree: SglangTree, engine: Any
) -> None:
    scheduler.on_queued(engine, request())
    req = request(finished_reason=finish(kind) if kind else None, finished_len=2)
    scheduler.on_released(None, tree.cache, req, checkpointed=True)
    scheduler.on_released(None, tree.cache, req, checkpointed=True)
    assert ("r1" in tree.runtime.requests) is (kind is None), "a retracted request stays"
    assert {k: v for k, v in counts(tree).items() if k in ("finished", "aborted") and v} == (
        {counter: 1} if counter else {}
    )


def test_aborts_end_requests(tree: SglangTree, engine: Any) -> None:
    for rid in ("r1", "r2", "r3"):
        scheduler.on_queued(engine, request(rid))
    scheduler.on_aborted(None, engine, request("r1"))
    scheduler.on_abort_sent(None, engine, object(), request("r1"))
    scheduler.on_abort_sent(None, engine, object(), request("r2"))
    scheduler.on_claimed(True, tree.cache, request("r3", finished_reason=finish("stop")))
    assert not tree.runtime.requests
    assert counts(tree)["aborted"] == 2 and counts(tree)["finished"] == 1


def test_requests_that_never_end_do_not_pile_up(tree: SglangTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "MAX_REQUESTS", 10)
    assert tree.bridge is not None
    for number in range(50):
        tree.bridge.arrived(RequestArrived(f"r{number}", TokenPrompt(blocks(0))))
    assert list(tree.runtime.requests) == [f"r{n}" for n in range(40, 50)]
    assert counts(tree)["overflowed"] == 40


def test_nodes_belong_to_the_request_that_inserts_them(tree: SglangTree, engine: Any) -> None:
    scheduler.on_queued(engine, request(custom_params={"scout": {"agent": "planner", "session": "s1"}}))

    def checkpoint(cache: Any, req: Any, *, up_to: int) -> str:
        assert tree.bridge is not None and tree.bridge.inserting == req.rid
        rid = tree.bridge.inserting
        tree.insert(blocks(0), rid)
        return f"{up_to}"

    assert scheduler.around_checkpoint(checkpoint, tree.cache, request(), up_to=16) == "16"
    assert tree.bridge is not None and tree.bridge.inserting is None
    (node,) = (tree.runtime.world.nodes[i] for i in tree.truth())
    assert tree.runtime.world.identifier.agents.name(node.agent) == "tag:planner"


def test_namespaces_never_collide() -> None:
    parts = [None, "", "a", "b", "ab", "-", "1:a", "0:"]
    seen = {namespace(x, y, z) for x in parts for y in parts for z in parts}
    assert len(seen) == len(parts) ** 3
    assert namespace(None, None, None) == ""


# ---- clock ----


def echo(receiver: Any, reqs: Any, local: Any = None) -> list[Any]:
    return [*(reqs or ()), *(local or ())]


def test_the_clock_rides_with_requests_and_is_taken_out(tree: SglangTree, engine: Any, monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(scheduler._Clock, "sent", float("-inf"))
    sent: list[Any] = []

    def broadcast(receiver: Any, reqs: Any, local: Any = None) -> list[Any]:
        sent[:] = echo(receiver, reqs, local)
        return list(sent)

    scheduler.on_ingest(engine)
    assert scheduler.around_broadcast(broadcast, None, ["req"], None) == ["req"]
    assert sent == ["req", ClockTick(100.0)]
    clock = tree.runtime.world.clock
    assert (clock.step, clock.seconds) == (7, 100.0)
    now[0] = 100.01
    assert scheduler.around_broadcast(broadcast, None, [], []) == []
    assert sent == [], "nothing to ride on, and it is too early for one of its own"
    now[0] = 100.2
    assert scheduler.around_broadcast(broadcast, None, [], []) == []
    assert sent == [ClockTick(100.2)] and clock.seconds == 100.2
    engine.forward_ct = 8
    scheduler.on_ingest(engine)
    assert clock.step == 8


def test_a_rank_that_only_receives_takes_the_time_it_is_sent(tree: SglangTree, engine: Any) -> None:
    scheduler.on_ingest(engine)
    received = ["req", ClockTick(5.0)]
    assert scheduler.around_broadcast(lambda *a: received, None, None, None) == ["req"]
    assert tree.runtime.world.clock.seconds == 5.0
    assert scheduler.around_broadcast(lambda *a: ["x", ClockTick(4.0)], None, None, None) == ["x"]
    assert tree.runtime.world.clock.seconds == 5.0, "it never goes back"


def test_without_our_core_the_hooks_pass_through() -> None:
    stock = SglangTree(policy="lru", core="python")
    engine = SimpleNamespace(tree_cache=stock.cache, forward_ct=1)
    scheduler.on_ingest(engine)
    asked: list[Any] = []

    def broadcast(*args: Any) -> list[Any]:
        asked.append(args)
        return ["x"]

    assert scheduler.around_broadcast(broadcast, "receiver", ["x"], []) == ["x"]
    assert asked == [("receiver", ["x"], [])]
    scheduler.on_queued(engine, request())
    scheduler.on_aborted(None, engine, request())
    state = SimpleNamespace(internal_state={})
    scheduler.on_internal_state(state, engine, None)
    assert state.internal_state == {}


def test_internal_state(tree: SglangTree, engine: Any) -> None:
    state = SimpleNamespace(internal_state={})
    scheduler.on_internal_state(state, engine, None)
    assert state.internal_state["scout"]["policy"] == "scout"


# ---- waiting requests ----


@pytest.mark.parametrize("policy", ["lru", "scout"])
def test_prefixes_of_waiting_requests_are_refreshed_as_under_lru(policy: str) -> None:
    from sglang.srt.managers import schedule_policy

    from tests.tree.trees import publish

    tree = SglangTree(policy=policy, core="python")
    publish(radix_eviction_policy=policy)
    hook = next(h for h in scheduler.HOOKS if h.name.endswith("_touch_waiting_prefixes"))
    assert policy == "lru" or hook.module in __import__("sys").modules
    schedule = schedule_policy.SchedulePolicy("fcfs", tree.cache, False, False, False)
    for number in range(4):
        tree.insert(blocks(number))
    waiting = [
        SimpleNamespace(
            origin_input_ids=array("q", blocks(number)), output_ids=array("q"), extra_key=None, cache_salt=None
        )
        for number in (1, 0)
    ]
    calls = schedule_policy.SchedulePolicy._touch_waiting_prefixes
    touch = getattr(calls, "__wrapped__", calls)
    for _ in range(schedule_policy.WAITING_PREFIX_REFRESH_INTERVAL + 1):
        scheduler.around_touch_waiting(touch, schedule, schedule.policy, waiting)
    assert [v.sequence for v in tree.evict(10_000)] == [blocks(n) for n in (2, 3, 0, 1)]
    assert schedule._waiting_prefix_refresh_calls == schedule_policy.WAITING_PREFIX_REFRESH_INTERVAL + 1
