"""The adapter of warmup, hook by hook, on SGLang's real tree and its real request types."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from radix_policy.config import build
from radix_policy.events import Tick
from radix_policy.warmup import Look, Slice, WarmupConfig
from sglang_scout import scheduler
from sglang_scout import warmup as module
from sglang_scout import warmup_hooks as hooks
from sglang_scout.scheduler import ClockTick
from sglang_scout.warmup import GIVEN_UP, PATIENCE, SETTLE, Warmup
from sglang_scout.warmup_requests import Space, make_request
from tests.tree.conformance import blocks
from tests.tree.test_faults import finish, request
from tests.tree.trees import SglangTree

pytest.importorskip("sglang")

ANCHOR = 120
PLAIN = {
    "multimodal_inputs": None,
    "input_embeds": None,
    "positional_embed_overrides": None,
    "token_type_ids": None,
    "session": None,
}
LORA = "adapter-1"


def anchor(agent: int) -> list[int]:
    return list(range(1000 * (1 + agent), 1000 * (1 + agent) + ANCHOR))


class Rank:
    """One rank of a server: a tree, a warmup, and as much of a scheduler as the hooks use."""

    def __init__(self, core: str | None = "python", **keys: Any) -> None:
        self.tree = SglangTree(capacity=1024, core=core)
        assert self.tree.bridge is not None
        self.bridge = self.tree.bridge
        self.warmup = Warmup(build({"warmup": True, "warmup_rate": 1e6, **keys}, WarmupConfig)[0], self.bridge)
        self.loras = {LORA: object()}
        self.free = 10_000
        self.engine = SimpleNamespace(
            tree_cache=self.tree.cache,
            forward_ct=7,
            chunked_prefill_size=None,
            is_generation=True,
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: self.free),
            model_config=SimpleNamespace(vocab_size=32_000),
            is_fully_idle=lambda: True,
            _engine_paused=False,
            _deferred_input_requests=[],
            dllm_config=None,
            weight_updater=SimpleNamespace(offload_tags=set()),
            flush_wrapper=SimpleNamespace(_pending=None),
            max_queued_requests=None,
            waiting_queue=[],
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(lora_manager=SimpleNamespace(loras=self.loras)),
            ),
        )
        self._number = 0

    def call(self, name: str, agent: int, final: bool = False, **changes: Any) -> None:
        """A client's request, from the queue to its end."""
        self._number += 1
        tag = {"agent": f"a{agent}", "session": name, "final": final}
        req = request(
            f"r{self._number}",
            custom_params={"scout": tag},
            origin_input_ids=array("q", [*anchor(agent), 9000 + self._number]),
            **{**PLAIN, **changes},
        )
        hooks.on_ingest(self.engine)
        scheduler.on_queued(self.engine, req)
        hooks.on_added(None, self.engine, req)
        self.bridge.tick(self._number, float(self._number))
        scheduler.on_released(None, self.tree.cache, done(req), checkpointed=True)

    def learn(self, agents: int = 3, **changes: Any) -> "Rank":
        """Agents in turn; the last session waits after the last agent."""
        self.poll()  # this rank decides
        for session in range(4):
            for turn in range(2 * agents):
                self.call(f"s{session}", turn % agents, final=session < 3 and turn == 2 * agents - 1, **changes)
        return self

    def poll(self, clients: list[Any] | None = None, sends: bool = True) -> list[Any]:
        """One iteration: what the scheduler gets. `sends` False: another rank, which receives `clients`."""
        hooks.on_ingest(self.engine)
        got: list[Any] = []

        def broadcast(receiver: Any, recv_reqs: Any, local_reqs: Any) -> list[Any]:
            got[:] = [*(recv_reqs if sends else clients or ()), *(local_reqs or ())]
            return got

        found = hooks.around_broadcast(broadcast, None, (clients or []) if sends else None, None)
        self.sent = list(got)
        return found

    def queue(self, item: Any) -> SimpleNamespace:
        """The request that SGLang makes of the item, in the waiting queue."""
        key = (item.extra_key or "") + item.lora_id if item.lora_id is not None else item.extra_key
        req = request(
            item.rid,
            origin_input_ids=item.input_ids,
            extra_key=key,
            cache_salt=item.cache_salt,
            lora_id=item.lora_id,
            sampling_params=item.sampling_params,
            finished_output=False,
            cached_tokens=0,
            **PLAIN,
        )
        req.finished = lambda: req.finished_reason is not None
        scheduler.on_queued(self.engine, req)
        hooks.on_added(None, self.engine, req)
        return req


def done(req: SimpleNamespace, kind: str = "length") -> SimpleNamespace:
    req.finished_reason = finish(kind)
    return req


def streamed(rank: Rank, *reqs: Any) -> list[str]:
    """The ids whose output leaves the scheduler."""
    left: list[str] = []

    def stream(streamer: Any, reqs: Any, return_logprob: bool, skip_req: Any, is_idle_batch: bool) -> None:
        left.extend(req.rid for req in reqs)

    hooks.around_stream(stream, None, list(reqs), False)
    return left


@pytest.fixture
def rank() -> Rank:
    return Rank().learn()


def injected(rank: Rank) -> Any:
    (item,) = rank.poll()
    assert item.rid in rank.warmup.own
    return item


# ---- in ----


@pytest.mark.parametrize("core", ["python", "rust"])
def test_an_idle_server_prefills_the_next_agents_anchor(core: str) -> None:
    rank = Rank(core).learn()
    item = injected(rank)
    assert list(item.input_ids) == anchor(0)
    assert item.sampling_params.max_new_tokens == 0 and not item.stream
    req = rank.queue(item)
    assert item.rid not in rank.tree.runtime.requests, "nothing is learned from it"
    assert rank.bridge.counters["requests"] == rank.bridge.counters["finished"] == 24
    assert streamed(rank, done(req)) == [] and req.finished_output
    assert rank.warmup.snapshot()["finished"] == 1 and not rank.warmup.own


def test_what_the_device_holds_is_not_prefilled_again() -> None:
    rank = Rank().learn()
    rank.tree.insert(tuple(anchor(0)))
    assert rank.poll() == []
    assert rank.warmup.snapshot()["refused"]["held"] == 1


@pytest.mark.parametrize("core", ["python", "rust"])
def test_asking_what_the_device_holds_changes_nothing(core: str) -> None:
    rank = Rank(core)
    trees = [SglangTree(core=core), rank.tree]
    for tree in trees:
        for number in range(6):
            tree.insert(blocks(number))
    before = rank.tree.truth()
    for _ in range(3):
        rank.warmup.scheduler = rank.engine
        rank.warmup.planner.anchors.seen("", 1, 1, prompt_of(blocks(0)), Space(None, None, None, None))
        rank.warmup.planner.anchors.seen("", 1, 2, prompt_of(blocks(0)), Space(None, None, None, None))
        known = rank.warmup.planner.anchors.get("", 1)
        assert known is not None
        assert rank.warmup._on_device(known).tokens == len(blocks(0))
    assert rank.tree.truth() == before
    assert [v.sequence for v in trees[0].evict(40)] == [v.sequence for v in rank.tree.evict(40)]


def prompt_of(tokens: tuple[int, ...]) -> Any:
    from radix_policy.prompts import TokenPrompt

    return TokenPrompt(array("q", tokens))


def test_every_rank_runs_the_same_and_only_the_first_decides(rank: Rank) -> None:
    other = Rank()
    item = injected(rank)
    assert other.poll(rank.sent, sends=False) == [item]
    assert set(other.warmup.own) == {item.rid} and not other.warmup.decides
    other.queue(item)
    assert streamed(other, done(rank.queue(item))) == []
    assert not other.warmup.own


def test_a_look_is_taken_on_every_rank() -> None:
    ranks = [Rank(), Rank()]
    for rank in ranks:
        rank.learn()
        rank.tree.insert(blocks(1))
        rank.free = 0
    asked = []
    for rank in ranks:
        rank.bridge.runtime.policy.refresh = lambda r=rank: asked.append(r)  # type: ignore[method-assign]
    assert ranks[0].poll() == []
    (look,) = ranks[0].sent
    assert isinstance(look, Look)
    assert ranks[1].poll([look], sends=False) == []
    assert asked == ranks


@pytest.mark.parametrize(
    "why", ["client", "busy", "paused", "deferred", "memory given away", "flush waits", "flight", "dead", "off"]
)
def test_it_keeps_out_of_the_way(why: str, rank: Rank) -> None:
    client = [make_request("c1", prompt_of((1, 2, 3)), Space(None, None, None, None))]
    if why == "busy":
        rank.engine.is_fully_idle = lambda: False
    elif why == "paused":
        rank.engine._engine_paused = True
    elif why == "deferred":
        rank.engine._deferred_input_requests.append(object())
    elif why == "memory given away":
        rank.engine.weight_updater.offload_tags.add("kv_cache")
    elif why == "flush waits":
        rank.engine.flush_wrapper._pending = (object(), 1.0)
    elif why == "flight":
        injected(rank)
    elif why == "dead":
        rank.bridge.live = False
    elif why == "off":
        rank.warmup.on = False
    sleeps = hooks.around_sleep(lambda sleeper: "slept", None) == "slept"
    assert sleeps or why in ("client", "busy"), "nor does it keep the server awake"
    assert rank.poll(client if why == "client" else []) == (client if why == "client" else [])


def test_a_chunk_is_never_exceeded(rank: Rank) -> None:
    rank.engine.chunked_prefill_size = 64
    assert len(injected(rank).input_ids) == 64


def test_the_namespace_is_the_clients() -> None:
    rank = Rank().learn(extra_key="tenant" + LORA, cache_salt="salt", lora_id=LORA)
    item = injected(rank)
    assert (item.extra_key, item.cache_salt, item.lora_id) == ("tenant", "salt", LORA)
    rank.queue(item)
    assert rank.warmup.on
    rank = Rank().learn(extra_key=LORA, lora_id=LORA)
    assert injected(rank).extra_key is None


def test_an_adapter_that_was_unloaded_is_not_warmed() -> None:
    rank = Rank().learn(extra_key=LORA, lora_id=LORA)
    rank.loras.clear()
    assert rank.poll() == [] and rank.warmup.on


def test_a_namespace_that_sglang_changes_is_a_fault(rank: Rank) -> None:
    item = injected(rank)
    item.extra_key = "elastic"
    rank.queue(item)
    assert not rank.warmup.on and rank.bridge.faults == {"warmup": 1}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_more_than_tokens_is_not_learned(name: str) -> None:
    rank = Rank().learn(**{name: object()})
    assert rank.poll() == [] and len(rank.warmup.planner.anchors) == 0


def test_ids_outside_the_vocabulary_are_not_injected() -> None:
    rank = Rank()
    rank.engine.model_config.vocab_size = 1000
    assert rank.learn().poll() == [] and rank.warmup.on


# ---- out ----


def test_clients_ids_are_never_taken_for_ours(rank: Rank) -> None:
    item = injected(rank)
    alike = request(item.rid[:-1] + "999", finished_output=False)
    assert streamed(rank, rank.queue(item), alike) == [alike.rid]
    sent: list[Any] = []
    hooks.around_abort(lambda s, a, r: sent.append(r.rid), rank.engine, None, alike)
    assert sent == [alike.rid]
    assert Rank().warmup._prefix != rank.warmup._prefix


def test_an_aborted_slice_answers_nobody(rank: Rank) -> None:
    req = rank.queue(injected(rank))
    sent: list[Any] = []
    hooks.around_abort(lambda *_: sent.append(1), rank.engine, None, req)
    assert sent == [] and not rank.warmup.own
    assert rank.warmup.snapshot()["aborted"] == 1
    req = rank.queue(injected(rank))
    assert streamed(rank, done(req, "abort")) == []
    assert rank.warmup.snapshot()["aborted"] == 2


def test_control_waits_for_the_slice_and_nothing_else_does(rank: Rank) -> None:
    from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

    flush, abort = FlushCacheReqInput(), AbortReq(rid="c0")
    first, second = (make_request(f"c{n}", prompt_of((1, 2, 3)), Space(None, None, None, None)) for n in (1, 2))
    assert rank.poll([flush]) == [flush], "nothing runs"
    req = rank.queue(injected(rank))
    assert rank.poll([first, abort]) == [first, abort]
    assert rank.poll([flush, second]) == [], "what comes after it must not overtake it"
    tick = ClockTick(1.0)
    assert rank.poll([tick]) == [tick]
    assert hooks.around_sleep(lambda sleeper: "slept", None) is None
    assert streamed(rank, done(req)) == []
    polls = [rank.poll() for _ in range(SETTLE)]
    assert polls == [*([[]] * (SETTLE - 1)), [flush, second]]
    assert rank.warmup.snapshot()["delayed"] == 0


def test_a_full_queue_is_full_of_clients_only(rank: Rank) -> None:
    """The request that a running slice alone would have turned away waits for it, with what came after it."""
    from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedGenerateReqInput

    rank.engine.max_queued_requests = 1
    first, second, third = (
        make_request(f"c{n}", prompt_of((1, 2, 3)), Space(None, None, None, None)) for n in range(3)
    )
    both, abort = BatchTokenizedGenerateReqInput(batch=[second, third]), AbortReq(rid="c1")
    req = rank.queue(injected(rank))
    assert rank.poll([first]) == [first]
    rank.engine.waiting_queue.append(object())
    assert rank.poll([both, abort]) == [] and rank.warmup.snapshot()["delayed"] == 2
    assert streamed(rank, done(req)) == []
    polls = [rank.poll() for _ in range(SETTLE)]
    assert polls == [*([[]] * (SETTLE - 1)), [both, abort]], "and then the queue says how many it takes"
    rank.engine.max_queued_requests = 0
    rank.engine.waiting_queue.clear()
    rank.call("s3", 2)
    assert injected(rank), "a slice itself is not held back"


def test_after_a_fault_nothing_waits(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    flush = FlushCacheReqInput()
    rank.queue(injected(rank))
    assert rank.poll([flush]) == []
    monkeypatch.setattr(rank.warmup, "received", broken)
    assert rank.poll() == [flush] and not rank.warmup.on and not rank.warmup.snapshot()["delayed"]


def test_a_fault_on_the_way_loses_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited goes on, and so does the slice, which other ranks run too; its output stays here."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    first, second = FlushCacheReqInput(), FlushCacheReqInput()
    req = rank.queue(injected(rank))
    assert rank.poll([first]) == []
    monkeypatch.setattr(module, "is_work", broken)
    assert rank.poll([second]) == [first, second] and not rank.warmup.on
    assert streamed(rank, done(req)) == []
    rank = Rank().learn()
    monkeypatch.setattr(rank.warmup, "_hold", broken)
    (item,) = rank.poll()
    assert item.rid in rank.warmup.own and streamed(rank, done(rank.queue(item))) == []


def test_a_slice_that_does_not_get_on_is_taken_back_and_then_ignored(rank: Rank) -> None:
    from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

    item = injected(rank)
    flush = FlushCacheReqInput()
    rank.poll([flush])
    got = [thing for _ in range(PATIENCE) for thing in rank.poll()]
    assert [type(thing) for thing in got] == [AbortReq] and got[0].rid == item.rid
    got = [thing for _ in range(GIVEN_UP) for thing in rank.poll()]
    assert flush in got, "clients do not wait for ever"
    assert item.rid in rank.warmup.own, "and still get no output of it"
    assert not rank.warmup.on, "nor is another one sent"


@pytest.mark.parametrize("odd", [{"is_generation": False}, {"dllm_config": object()}])
def test_an_odd_model_is_not_warmed(odd: dict[str, Any]) -> None:
    rank = Rank().learn()
    vars(rank.engine).update(odd)
    assert rank.poll() == [] and not rank.warmup.on and not rank.warmup.own


# ---- faults ----


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize("where", ["plan", "arrived", "matched", "finished", "due"])
def test_a_fault_switches_warmup_off_and_nothing_else(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank().learn()
    running = rank.queue(injected(rank)) if where == "finished" else None
    monkeypatch.setattr(rank.warmup.planner, where, broken)
    client = make_request("c1", prompt_of((1, 2, 3)), Space(None, None, None, None))
    rank.call("s9", 0)
    rank.bridge.runtime.requests["m"] = object()  # type: ignore[assignment]
    rank.warmup.matched("m", 5)
    if running is not None:
        assert streamed(rank, done(running)) == []
    assert rank.poll() == []
    assert not rank.warmup.on and rank.bridge.faults["warmup"] >= 1 and rank.bridge.live
    assert rank.poll([client]) == [client]
    assert rank.warmup.snapshot()["on"] is False


def test_a_fault_in_a_look_is_one_of_warmup(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peek", broken)
    rank.free = 0
    assert rank.poll() == [] and not rank.warmup.on


def test_an_emptied_tree_forgets_what_was_warmed(rank: Rank) -> None:
    req = rank.queue(injected(rank))
    streamed(rank, done(req))
    assert rank.warmup.snapshot()["waiting_tokens"] == ANCHOR
    rank.tree.reset()
    assert rank.warmup.snapshot()["waiting_tokens"] == 0 and rank.warmup.snapshot()["wasted_tokens"] == ANCHOR


def test_an_emptied_tree_stays_empty_until_someone_calls(rank: Rank) -> None:
    """An operator flushes and then loads other weights: nothing may be prefilled with the old ones in between."""
    rank.tree.reset()
    assert rank.poll() == [] and not rank.warmup.planner.due(1e9)
    rank.call("s3", 0)
    assert list(injected(rank).input_ids) == anchor(1)


# ---- at start ----


def test_it_is_there_only_when_it_is_asked_for() -> None:
    for keys, there in (({}, False), ({"warmup": False, "warmup_slice": 64}, False), ({"warmup": True}, True)):
        bridge = SglangTree(config=keys).bridge
        assert bridge is not None
        assert (bridge.warmup is not None) is there and ("warmup" in bridge.snapshot()) is there


def test_this_sglang_has_all_that_it_needs() -> None:
    assert hooks.problems() == []


def test_without_warmup_every_hook_does_nothing() -> None:
    engine = SimpleNamespace(tree_cache=SglangTree().cache)
    hooks.on_ingest(engine)
    assert hooks.around_broadcast(lambda r, a, b: (a, b), None, [1], None) == ([1], None)
    assert hooks.around_abort(lambda *_: "sent", None, None, request()) == "sent"
    assert hooks.around_sleep(lambda _: "slept", None) == "slept"
    assert hooks.around_stream(lambda *a: a, 1, [request()], True)[3:] == (None, False)
    assert hooks.on_added(None, engine, request()) is None


def test_look_and_tick_apart_nothing_of_ours_reaches_the_scheduler(rank: Rank) -> None:
    rank.bridge.runtime.observe(Tick(99, 99.0))
    for _ in range(5):
        for item in rank.poll():
            assert not isinstance(item, (Look, Slice, module.Injected))
