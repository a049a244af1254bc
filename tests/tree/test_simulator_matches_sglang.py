"""The simulator against SGLang itself: the same requests, through both, find the same cached tokens. Every time.

The real side is SGLang's own request life cycle on its own cache and allocator, without a model: `Req` looks its prompt
up and locks it, memory is allocated by the scheduler's functions (which evict), `checkpoint_kv_cache` inserts each
prefill chunk, and `release_kv_cache` inserts the output.
"""

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from radix_policy.events import RequestArrived, Tag, Tick
from radix_policy.prompts import TokenPrompt, cut, expand
from radix_policy.runtime import Runtime
from radix_policy.simulator import Engine, Loop, Run, spans_of
from radix_policy.workloads import Call, Workload, make
from tests.tree.trees import SglangTree

SGLANG = ("lru", "slru", "lfu", "fifo", "priority", "tlru")  # policies that stock SGLang has
OURS = ("cachescout", "scout")  # policies that the plug-in brings
CONFIG: dict[str, dict[str, Any]] = {"tlru": {"threshold": 600, "next_prompt_estimate": 40}}

Item = tuple[str, Call, Tag]


class RealRequest:
    """One request in the real engine."""

    def __init__(self, server: "RealServer", rid: str, call: Call) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.server = server
        self.output = array("q", expand(call.output))
        params = SamplingParams(max_new_tokens=len(self.output), ignore_eos=True)
        self.req = Req(rid, "", array("q", expand(call.prompt)), params)
        self.tokens = 0  # with KV

    def start(self) -> int:
        """Look up, lock, prefill chunk by chunk; returns the cached tokens."""
        import torch
        from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        server, req = self.server, self.req
        cache, rows = server.cache, server.rows
        req.init_next_round_input(cache)
        server.load_back(req)
        cached = req.prefix_len
        req.lock = cache.lock(req.last_node)
        end, prompt = 0, len(req.origin_input_ids)
        while end < prompt:
            begin = req.prefix_len
            end = min(prompt, begin + server.chunk)
            req.extend_end = end
            if req.kv.holds_kv:
                prefix = rows.req_to_token[req.kv.req_pool_idx, :begin].to(torch.int64)
            else:
                prefix = cache.prefix_device_indices(req) if begin else torch.empty(0, dtype=torch.int64)
            rows.alloc([req])
            if server.page == 1:
                slots = alloc_token_slots(cache, end - begin)
            else:
                first, last = torch.tensor([begin]), torch.tensor([end])
                before = prefix[-1:] if begin else torch.tensor([-1])
                slots = alloc_paged_token_slots_extend(cache, first, first, last, last, before, end - begin)
            row = req.kv.req_pool_idx
            rows.write((row, slice(0, begin)), prefix)
            rows.write((row, slice(begin, end)), slots)
            req.kv.kv_allocated_len = req.kv.kv_committed_len = end
            checkpoint_kv_cache(req, cache)
        self.tokens = end
        return cached

    def decode(self, steps: int) -> None:
        """So many decode steps: each makes room as the scheduler does, then allocates."""
        import torch
        from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode, alloc_token_slots

        server, req = self.server, self.req
        page, row = server.page, self.req.kv.req_pool_idx
        for _ in range(steps):
            at = self.tokens
            server.pool.check_decode_capacity(num_tokens=page * (at % page == 0), tree_cache=server.cache)
            if page == 1:
                slots = alloc_token_slots(server.cache, 1)
            else:
                length = torch.tensor([at + 1])
                last = server.rows.req_to_token[row, at - 1 : at].to(torch.int64)
                slots = alloc_paged_token_slots_decode(server.cache, length, length, last)
            server.rows.write((row, slice(at, at + 1)), slots)
            self.tokens = at + 1
            req.kv.kv_allocated_len = req.kv.kv_committed_len = self.tokens

    def finish(self) -> None:
        """The rest of the decode steps, then out: the last output token gets no KV."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req = self.req
        self.decode(len(req.origin_input_ids) + len(self.output) - 1 - self.tokens)
        req.output_ids = self.output
        req.finished_reason = FINISH_LENGTH(len(self.output))
        req.finished_len = len(self.output)
        release_kv_cache(req, self.server.cache, checkpoint=True)
        self.server.tree.settle()


class RealServer:
    """SGLang's cache; under our policies with the plug-in's tree core and a bridge that is told who asks."""

    def __init__(
        self,
        policy: str,
        capacity: int,
        page: int = 1,
        chunk: int = 8192,
        core: str = "python",
        host_tokens: int = 0,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.page, self.chunk = page, chunk
        config = CONFIG.get(policy) if config is None else config
        self.tree = SglangTree(page, capacity, policy, core, host_tokens, config)
        del self.tree.core.evict_device_leaf  # the watch on victims: not needed here, and the Rust core has no nodes
        self.cache, self.pool = self.tree.cache, self.tree.pool
        self.rows = self.cache.req_to_token_pool
        self.bridge = self.tree.bridge
        self.restored = 0  # tokens

    def start(self, item: Item) -> tuple[int, RealRequest]:
        rid, call, tag = item
        if self.bridge is not None:
            self.bridge.arrived(RequestArrived(rid, TokenPrompt(array("q", expand(call.prompt))), "", tag))
        request = RealRequest(self, rid, call)
        return request.start(), request

    def load_back(self, req: Any) -> None:
        """What the host tier has of the prompt comes back, as in `PrefillAdder.add_one_req`."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        if not self.tree.host or not req.needs_host_load_back():
            return
        with_host = InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
        req.host_loaded_length, req.last_node = self.cache.init_load_back(with_host)
        req.prefix_len += req.host_loaded_length
        req.kv.cache_protected_len = req.prefix_len
        self.cache.ready_to_load_host_cache()
        self.cache.check_hicache_events()
        self.restored += req.host_loaded_length

    def tick(self, step: int, seconds: float) -> None:
        if self.bridge is not None:
            self.bridge.tick(step, seconds)

    @property
    def free(self) -> int:
        return self.pool.available_size()


class SimulatedServer:
    """The same in the simulator."""

    def __init__(self, policy: str, capacity: int, page: int = 1, chunk: int = 8192) -> None:
        self.runtime = Runtime(policy, CONFIG.get(policy), page_size=page)
        self.engine = self.make_engine(capacity, page, chunk)

    def make_engine(self, capacity: int, page: int, chunk: int) -> Engine:
        return Engine(self.runtime, capacity, page, chunk)

    def start(self, item: Item) -> tuple[int, Run]:
        rid, call, tag = item
        run = Run(rid, call.prompt, call.output, call.prompt_tokens, call.output_tokens)
        self.engine.arrive(run, tag)
        assert self.engine.admit(run)
        return run.cached, run

    def finish(self, run: Run) -> None:
        """One decode step at a time, as in the engine: how much is trimmed depends on what a step needs."""
        while run.allocated < run.kv:
            self.engine.grow([(run, 1)])
        self.engine.finish(run)

    def tick(self, step: int, seconds: float) -> None:
        self.runtime.observe(Tick(step, seconds))

    @property
    def free(self) -> int:
        return self.engine.free


def stream(name: str, seed: int, concurrency: int, count: int) -> tuple[Workload, list[Item]]:
    """The first calls of a workload in the order in which a closed loop starts them."""
    workload = make(name, seed=seed, concurrency=concurrency)
    calls = [(session.key, call) for session in workload.sessions for call in session.calls]
    order = Loop(workload, "lru", capacity=50 * workload.largest, concurrency=concurrency).run().calls
    chosen = [calls[i] for i in order[:count]]
    return workload, [(f"r{i}", call, Tag(call.agent, session)) for i, (session, call) in enumerate(chosen)]


def differences(real: RealServer, simulated: SimulatedServer, items: Sequence[Item]) -> tuple[list[str], int]:
    """One request after the other through both; what differed, and the tokens that were hit."""
    found, hit = [], 0
    for number, item in enumerate(items):
        for server in (real, simulated):
            server.tick(40 * number, 0.4 * number)
        cached, request = real.start(item)
        expected, run = simulated.start(item)
        request.finish()
        simulated.finish(run)
        hit += cached
        if cached != expected or real.free != simulated.free:
            found.append(f"{item[0]}: cached {cached} against {expected}, free {real.free} against {simulated.free}")
    return found, hit


def assert_same_tree(real: RealServer, simulated: SimulatedServer) -> None:
    """Same nodes at the same places, the same access order (to the tick where nothing was trimmed), the same counts."""
    truth, nodes = real.tree.truth(), simulated.engine.tree.nodes
    table = simulated.runtime.world.nodes
    here = {
        (n.end - n.length, *cut(n.spans, 0, n.length)): (n.stamp, table[n.id].counts, n.locks)
        for n in nodes.values()
        if n.parent is not None
    }
    there = {}
    for node_id, node in truth.items():
        tokens = real.tree.core.node_by_id(node_id).key.token_ids
        there[(node.start, *spans_of(tokens))] = (node.stamp, node.counts, node.locks)
    assert set(here) == set(there)
    if simulated.runtime.policy.trims:  # each trim takes a tick of SGLang's clock, none of the simulator's
        ours, theirs = (sorted(each, key=lambda key: (each[key][0], key)) for each in (here, there))
        assert ours == theirs, "another order of access"
    else:
        ticks = {round(there[key][0] - here[key][0], 3) for key in here}
        assert len(ticks) <= 1, "stamps differ by more than where the clocks began"
    assert {key: value[1:] for key, value in here.items()} == {key: value[1:] for key, value in there.items()}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("policy", [*SGLANG, *OURS])
def test_every_policy_on_the_python_core(policy: str, page: int) -> None:
    on_core("python", policy, page)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("core", ["rust", "twin"])
def test_our_policies_behind_the_mirror(core: str, policy: str, page: int) -> None:
    on_core(core, policy, page)


def on_core(core: str, policy: str, page: int) -> None:
    workload, items = stream("selector", 5, 4, 130)
    capacity = 4 * workload.largest // page * page
    real, simulated = RealServer(policy, capacity, page, core=core), SimulatedServer(policy, capacity, page)
    found, hit = differences(real, simulated, items)
    assert not found, found[:5]
    assert hit > 0
    if core == "python":
        assert_same_tree(real, simulated)
    if real.bridge is not None:
        assert real.bridge.live and not real.bridge.faults
        assert real.tree.core.differences() == []


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_the_rust_core_that_servers_run_by_default(policy: str, page: int) -> None:
    workload, items = stream("debate", 6, 4, 130)
    capacity = 3 * workload.largest // page * page
    found, hit = differences(
        RealServer(policy, capacity, page, core="rust"), SimulatedServer(policy, capacity, page), items
    )
    assert not found, found[:5]
    assert hit > 0


@pytest.mark.parametrize("page", [1, 16])
def test_chunked_prefill_inserts_chunk_by_chunk(page: int) -> None:
    workload, items = stream("random", 7, 16, 130)
    capacity = 2 * workload.largest // page * page
    real = RealServer("lru", capacity, page, chunk=256, core="python")
    simulated = SimulatedServer("lru", capacity, page, chunk=256)
    found, hit = differences(real, simulated, items)
    assert not found, found[:5]
    assert hit > 0
    assert_same_tree(real, simulated)


def test_identical_prompts_and_outputs() -> None:
    _, items = stream("selector", 5, 1, 1)
    call, tag = items[0][1], items[0][2]
    same = [(f"r{i}", call, tag) for i in range(12)]
    for page in (1, 16):
        capacity = 2 * (call.prompt_tokens + call.output_tokens) // page * page
        real, simulated = RealServer("lru", capacity, page, core="python"), SimulatedServer("lru", capacity, page)
        found, _ = differences(real, simulated, same)
        assert not found, found[:5]
        assert_same_tree(real, simulated)


@pytest.mark.parametrize(
    ("policy", "core"),
    [*((p, "python") for p in ("lru", "slru", "cachescout", "scout")), ("cachescout", "rust"), ("scout", "rust")],
)
def test_requests_that_overlap(policy: str, core: str) -> None:
    workload, items = stream("selector", 8, 4, 150)
    capacity = int(5.3 * workload.largest)
    real, simulated = RealServer(policy, capacity, core=core), SimulatedServer(policy, capacity)
    rng, running, waiting = Random(3), [], list(items)
    while waiting or running:
        for server in (real, simulated):
            server.tick(len(items) - len(waiting), 0.1 * (len(items) - len(waiting)))
        move = rng.random()
        if waiting and len(running) < 4 and (move < 0.4 or not running):
            item = waiting.pop(0)
            cached, request = real.start(item)
            expected, run = simulated.start(item)
            assert cached == expected, item[0]
            running.append((request, run))
        elif move < 0.7:
            request, run = rng.choice(running)
            steps = min(rng.randint(1, 20), run.kv - run.allocated)
            request.decode(steps)
            for _ in range(steps):
                simulated.engine.grow([(run, 1)])
        else:
            request, run = running.pop(rng.randrange(len(running)))
            request.finish()
            simulated.finish(run)
        assert real.free == simulated.free
    if core == "python":
        assert_same_tree(real, simulated)


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    ("policy", "core"),
    [*((p, "python") for p in ("lru", "slru", "cachescout", "scout")), ("cachescout", "rust"), ("scout", "rust")],
)
def test_five_thousand_requests(policy: str, core: str, page: int) -> None:
    for name, concurrency, factor in (("pipeline", 4, 4.0), ("selector", 16, 8.0)):
        workload, items = stream(name, 11, concurrency, 210)
        capacity = int(factor * workload.largest) // page * page
        real, simulated = RealServer(policy, capacity, page, core=core), SimulatedServer(policy, capacity, page)
        found, _ = differences(real, simulated, items)
        assert not found, found[:5]
        if core == "python":
            assert_same_tree(real, simulated)
