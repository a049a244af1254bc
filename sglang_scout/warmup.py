"""Warmup on a server: the planner's slices become requests of the scheduler's own, which leave no trace outside it.

In: rank 0 decides where it broadcasts what clients sent (`around_broadcast`), and only when they sent nothing and the
server is fully idle. The request rides that broadcast, so every rank runs it like any other, and knows its id: ids have
a prefix drawn at start and are recognised by the set of those in the engine, so no client's can be taken for one.
What would be lost for a slice is asked the same way (`Look`), since asking brings the policy up to date, which all
ranks must do at the same point.

Out: finished ones are dropped where outputs are streamed, aborted ones where aborts are sent. They are not observed
(`scheduler._is_own`), so nothing is learned from them.

While a slice runs, what clients send is served as ever, except for control requests (flush, weights, LoRA, pause): some
of them fail on a server that is not idle, so they wait until the slice is done, with what came after them.

A fault here switches warmup off; what is in the engine is still kept from clients.
"""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from radix_policy.warm_anchors import Anchor
from radix_policy.warmup import Held, Look, Planner, Slice, WarmupConfig, peek
from sglang_scout.bridge import Bridge
from sglang_scout.scheduler import ClockTick
from sglang_scout.warmup_requests import Space, is_work, make_request

logger = logging.getLogger(__name__)

PATIENCE = 64  # polls after which a slice that is still in the engine is taken back
SETTLE = 3  # polls after the end of a slice until SGLang calls itself idle (with overlap its batch outlives it by two)
GIVEN_UP = 1024  # polls after which nothing waits for it any more


class Injected(NamedTuple):
    """A warmup request on its way to all ranks."""

    request: Any


class Warmup:
    """One per tree cache whose config turns warmup on."""

    def __init__(self, config: WarmupConfig, bridge: Bridge) -> None:
        self.bridge = bridge
        self.planner = Planner(config, bridge.runtime)
        self.on = True
        self.decides = False  # this rank broadcasts what clients send
        self.scheduler: Any = None
        self.own: set[str] = set()  # rids of the slices in the engine
        self.recent: deque[str] = deque(maxlen=4)  # rids of the latest, which SGLang reports on after their end
        self.exporter: Any = None  # sglang_scout.warmup_metrics
        self.exports = True
        self._prefix = f"scout-warmup-{secrets.token_hex(16)}-"
        self._number = 0
        self._sent: Space | None = None  # of the slice in the engine, on the rank that decides
        self._held: list[Any] = []  # control requests that wait for the slice, and what came after them
        self._polls = 0  # since the slice was sent
        self._settling = 0  # polls until control requests need not wait any more
        self._told_closed = 0  # times that the gate's closing was logged
        self._told_useful = 0  # useful stretches when that was last logged
        bridge.warmup = self
        bridge.own = self.own

    def fail(self) -> None:
        """Call inside `except`."""
        self.bridge.count_fault("warmup")
        if self.on:
            logger.error("sglang-scout: after a fault warmup is off until the server is started again")
        self.on = False

    # ---- bridge.Follower ----

    def matched(self, rid: str, tokens: int) -> None:
        """A request found so many tokens of its prompt."""
        if not (self.on and self.decides):
            return
        try:
            request = self.bridge.runtime.requests.get(rid)
            if request is not None:
                self.planner.matched(request, tokens, time.monotonic())
        except Exception:
            self.fail()

    def left(self, rid: str) -> None:
        """A request left the engine."""
        self.planner.left()

    def emptied(self) -> None:
        """The tree was reset."""
        self.planner.reset()

    def snapshot(self) -> dict[str, Any]:
        """The planner's numbers, with ours."""
        found: dict[str, Any] = {}
        try:
            found = self.planner.snapshot()
        except Exception:
            self.fail()
        return {"on": self.on, "in_flight": len(self.own), "delayed": len(self._held), **found}

    # ---- in ----

    def queued(self, req: Any, is_retracted: bool) -> None:
        """A request is in the waiting queue, or was turned away from it."""
        if req.rid in self.own:
            space = self._sent
            if space is not None and (req.extra_key, req.cache_salt, req.lora_id) != (
                space.whole_key,
                space.cache_salt,
                space.lora_id,
            ):
                raise AssertionError("SGLang changed the namespace of a warmup")
            return
        if not (self.on and self.decides) or is_retracted or req.is_retracted:
            return
        request = self.bridge.runtime.requests.get(req.rid)
        if request is None:
            return
        key, lora = req.extra_key, req.lora_id
        plain = (
            req.multimodal_inputs is None
            and req.input_embeds is None
            and req.positional_embed_overrides is None
            and req.token_type_ids is None
            and req.session is None
        )
        own_key = key.removesuffix(lora) or None if lora is not None and key is not None else key
        self.planner.arrived(request, Space(own_key, req.cache_salt, lora, key), plain=plain)

    def decide(self, recv_reqs: Sequence[Any]) -> Injected | Look | None:
        """Rank 0, just before it broadcasts: what to add."""
        self.decides = True
        if recv_reqs or self.own or self._held or not (self.on and self.bridge.live):
            return None
        now = time.monotonic()
        if not self.planner.due(now) or not self._is_idle():
            return None
        scheduler = self.scheduler
        odd = self._odd_model()
        if odd is not None:
            logger.warning("sglang-scout: warmup is off: %s", odd)
            self.on = False
            return None
        chunk = scheduler.chunked_prefill_size
        if chunk is not None and 0 < chunk < self.planner.slice:
            self.planner.slice = chunk
        plan = self.planner.plan(now, scheduler.token_to_kv_pool_allocator.available_size(), self._on_device)
        return self._injected(plan) if isinstance(plan, Slice) else plan

    def _odd_model(self) -> str | None:
        if not self.scheduler.is_generation:
            return "an embedding model's outputs leave where none is kept back"
        if self.scheduler.dllm_config is not None:
            return "a diffusion model generates where others only prefill"
        return None

    def _may_run(self) -> bool:
        """Whether the engine takes work at all: not paused, its memory not given away, nobody waiting for idleness."""
        scheduler = self.scheduler
        return (
            scheduler is not None
            and not scheduler._engine_paused
            and not scheduler._deferred_input_requests
            and not scheduler.weight_updater.offload_tags
            and scheduler.flush_wrapper._pending is None
        )

    def _is_idle(self) -> bool:
        return self._may_run() and self.scheduler.is_fully_idle()

    def _on_device(self, anchor: Anchor) -> Held:
        """How much of the anchor the device holds; all of it when it must not be warmed."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        space = anchor.space
        assert isinstance(space, Space)
        ids = anchor.head.ids(0, anchor.length)
        numbers = np.frombuffer(ids, dtype=np.int64)
        known = space.lora_id is None or space.lora_id in self.scheduler.tp_worker.model_runner.lora_manager.loras
        if not known or int(numbers.max()) >= self.scheduler.model_config.vocab_size or int(numbers.min()) < 0:
            self.planner.anchors.drop(anchor.key)
            return Held(anchor.length)
        key = RadixKey(ids, extra_key=space.whole_key, cache_salt=space.cache_salt)
        tokens, node, _ = self.scheduler.tree_cache.tree_core.match_full_device_prefix(key)
        return Held(tokens, node)

    def _injected(self, plan: Slice) -> Injected:
        assert isinstance(plan.space, Space)
        self._sent = plan.space
        self._number += 1
        if self._number == 1:
            agents = self.bridge.runtime.world.identifier.agents
            logger.info(
                "sglang-scout: first warmup: tokens %d to %d of the anchor of %s",
                plan.begin,
                plan.end,
                agents.name(plan.key[1]),
            )
        logger.debug("sglang-scout: warmup %d: tokens %d to %d", self._number, plan.begin, plan.end)
        return Injected(make_request(f"{self._prefix}{self._number}", plan.prompt, plan.space))

    def received(self, received: list[Any]) -> list[Any]:
        """Every rank, just after the broadcast: what goes on to the scheduler."""
        passed = []
        for item in received:
            if isinstance(item, Injected):
                self._register(item.request)
                self._polls = 0
                passed.append(item.request)
            elif isinstance(item, Look):
                self._look(item)
            else:
                passed.append(item)
        if self.own and self._polls < GIVEN_UP:
            self._polls += 1
            self._settling = SETTLE
            if self._polls == GIVEN_UP:
                self._lost()
            if self._polls % PATIENCE == 0:
                return [*self._take_back(), *self._hold(passed)]
        elif self._settling:
            self._settling -= 1
        return self._hold(passed)

    @property
    def listens(self) -> bool:
        """Whether `received` must be called even if nothing was received."""
        return bool(self.own or self._held or self._settling)

    def _look(self, look: Look) -> None:
        try:
            victims = peek(self.bridge.runtime, look) if self.bridge.live else None
            if self.decides:
                self.planner.looked(look, victims)
        except Exception:
            self.fail()

    def _lost(self) -> None:
        """The slice neither ended nor could be aborted: nothing waits for it any more, and it is the last one."""
        self._settling = 0
        try:
            raise RuntimeError(f"a warmup request is in the engine after {GIVEN_UP} polls")
        except RuntimeError:
            self.fail()

    def _take_back(self) -> list[Any]:
        """The slice does not get on: every rank aborts it, in the same poll."""
        from sglang.srt.managers.io_struct import AbortReq

        return [AbortReq(rid=rid) for rid in self.own]

    def _hold(self, items: list[Any]) -> list[Any]:
        """Let pass what a running slice does not disturb; the rest waits, in order, until it is done."""
        waiting = [*self._held, *items]
        passing = self._passing(waiting) if self._settling else len(waiting)
        if passing < len(waiting) and not self._held:
            logger.debug("sglang-scout: %s waits for a warmup", type(waiting[passing]).__name__)
        passed, rest = waiting[:passing], waiting[passing:]
        self._held = [item for item in rest if not isinstance(item, ClockTick)]
        return [*passed, *(item for item in rest if isinstance(item, ClockTick))]

    def _passing(self, items: Sequence[Any]) -> int:
        """How many of the first items a running slice does not disturb."""
        room = self._room()
        for at, item in enumerate(items):
            room -= self._requests(item)
            if room < 0 or not is_work(item):
                return at
        return len(items)

    def released(self, received: Sequence[Any]) -> list[Any]:
        """After a fault in `received` nothing waits any more; a slice runs all the same, as on the other ranks."""
        waiting, self._held = self._held, []
        for item in received:
            if isinstance(item, Injected):
                self._register(item.request)
                waiting.append(item.request)
            elif not isinstance(item, Look):
                waiting.append(item)
        return waiting

    def _register(self, request: Any) -> None:
        self.own.add(request.rid)
        self.recent.append(request.rid)

    def _room(self) -> float:
        """Requests that SGLang would still let wait (--max-queued-requests); one more, and it turns clients away.

        Without the slice the first of them would run already, so it must not be the slice that fills the queue.
        """
        scheduler = self.scheduler
        limit = scheduler.max_queued_requests
        return math.inf if limit is None else max(limit - len(scheduler.waiting_queue), 0)

    def _requests(self, item: Any) -> int:
        """How many requests of clients an item is."""
        if hasattr(item, "batch"):
            return len(item.batch)
        return int(hasattr(item, "sampling_params") and item.rid not in self.own)

    # ---- out ----

    def streamed(self, req: Any) -> None:
        """An output of a slice, which goes nowhere."""
        if not req.finished() or req.finished_output:
            return
        req.finished_output = True
        if req.finished_len is None:
            req.finished_len = len(req.output_ids)
        self.own.discard(req.rid)
        if req.finished_reason.to_json()["type"] == "abort":
            self.planner.aborted()
        else:
            self.planner.finished(req.cached_tokens, time.monotonic())
        self._tell()

    def dropped(self, req: Any) -> None:
        """A slice was aborted before it ran."""
        self.own.discard(req.rid)
        self.planner.aborted()

    def _tell(self) -> None:
        """Into the log: when the gate closes, and how it goes, at every doubling."""
        account = self.planner.account
        if account.useful >= max(2 * self._told_useful, 1):
            self._told_useful = account.useful
            logger.info(
                "sglang-scout: warmup: %d tokens so far, %d of them used by requests, %.1f s of prefill saved",
                account.tokens,
                account.useful_tokens,
                account.seconds_saved,
            )
        if account.closings != self._told_closed:
            self._told_closed = account.closings
            logger.info(
                "sglang-scout: warmup pauses: of %d tokens warmed so far %d were used",
                account.tokens,
                account.useful_tokens,
            )

    @property
    def eager(self) -> bool:
        """Whether the scheduler should look again at once instead of sleeping."""
        if self._held:
            return True
        waits = self.on and self.decides and self.bridge.live and not self.own and self._may_run()
        return waits and self.planner.due(time.monotonic())
