"""The closed loop: C slots play the sessions of a workload on one engine, on a simulated clock.

A slot takes the next session, waits, calls, waits for the answer, and so on (each lane of a workload has C slots of its
own); requests queue first come first served
until their memory is there. Times are seconds.

`fixed` service does not look at the cache: 10 ms + prefill of the last 30 % of the prompt + 10 ms per output token.
What is locked never depends on the policy either, so every policy sees the same requests in the same order and an
offline optimum exists; `Outcome.order` is a hash of that order to assert it. `cost` service prefills what really
missed, for time to first token; `serial` does too, one prefill after the other, as one GPU would.
"""

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from radix_policy.events import Tag, Tick
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.runtime import Runtime
from radix_policy.simulator.engine import CHUNK, Engine, Run
from radix_policy.simulator.tree import SimNode
from radix_policy.workloads.base import Workload

STEP = 0.01  # seconds per decode step, and per request on top
PREFILL = 1e-4  # seconds per prefilled token at position 0
FAR = 30_500.0  # position (tokens) at which a prefilled token costs twice as much
FIXED_MISS = 0.3  # share of the prompt that `fixed` service prefills
TOUCH_EVERY, TOUCH_MOST = 32, 128  # SGLang's refresh of waiting prefixes: scheduling calls, requests

IDENTITIES = ("tagged", "inferred", "scrambled", "scrambled-fresh")
SERVICES = ("fixed", "cost", "serial")


def prefill_seconds(begin: int, end: int) -> float:
    """Time to prefill tokens [begin, end)."""
    return PREFILL * ((end - begin) + (end * end - begin * begin) / (2 * FAR))


@dataclass
class Outcome:
    """What one simulation saw. Per-request arrays are in the order of admission."""

    policy: str
    capacity: int  # tokens
    concurrency: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    unserved: int = 0  # requests that no empty engine of this capacity could hold
    unserved_tokens: int = 0  # their prompt tokens, not counted above
    seconds: float = 0.0  # on the simulated clock
    evictions: int = 0  # eviction calls
    evicted_tokens: int = 0
    order: str = ""  # hash of the order of starts and finishes and of what was locked
    prompts: "array[int]" = field(default_factory=lambda: array("q"))  # prompt tokens
    cached: "array[int]" = field(default_factory=lambda: array("q"))  # cached tokens
    calls: "array[int]" = field(default_factory=lambda: array("q"))  # number of the call, see `call_numbers`
    ttft: "array[float]" = field(default_factory=lambda: array("d"))  # seconds from arrival to the first token
    log: "array[int]" = field(default_factory=lambda: array("q"))  # events: 2 * call + finish, then locked tokens
    snapshot: dict[str, Any] = field(default_factory=dict)  # the runtime's, at the end

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens; 0 when nothing was served."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Slot:
    __slots__ = ("call", "lane", "number", "session")

    def __init__(self, lane: Iterator[tuple[int, Any]]) -> None:
        self.lane = lane  # (number of the first call, session) of the sessions that the slot may still take
        self.session: Any = None
        self.call = 0  # index of the next call in its session
        self.number = 0  # of the session's first call, counted over the workload


class Loop:
    """One simulation; `run` plays it to the end."""

    def __init__(
        self,
        workload: Workload,
        policy: str | type[EvictionPolicy],
        *,
        capacity: int,
        concurrency: int,
        config: Mapping[str, Any] | None = None,
        page_size: int = 1,
        identity: str = "tagged",
        service: str = "fixed",
        chunk: int = CHUNK,
        trims: bool | None = None,
        ends: bool = False,
        pin: float | None = None,
    ) -> None:
        """With `ends` clients say which call is a session's last.

        With `pin` a session's last path stays locked for that many seconds or until its next call starts (Continuum's
        hard pin); requests wait for it while anything runs, so the order then depends on it.
        """
        if identity not in IDENTITIES:
            raise ValueError(f"identity {identity!r}; known: {', '.join(IDENTITIES)}")
        if service not in SERVICES:
            raise ValueError(f"service {service!r}; known: {', '.join(SERVICES)}")
        self.workload = workload
        self.concurrency = concurrency
        self.identity = identity
        self.fixed = service == "fixed"
        self._serial = service == "serial"
        self._prefilled = 0.0  # when the last prefill ends, if they are serial
        self.runtime = Runtime(policy, config, page_size=page_size)
        self.engine = Engine(self.runtime, capacity, page_size, chunk, trims)
        self.outcome = Outcome(self.runtime.policy.name, capacity, concurrency)
        self.now = 0.0
        self._ends = ends
        self._pin = pin
        self._pins: OrderedDict[str, SimNode] = OrderedDict()  # by session, in the order in which they expire
        self._busy = 0.0  # seconds with a request running
        self._heap: list[
            tuple[float, int, Any, Any]
        ] = []  # (time, sequence, slot, its run or None) or (.., session, its pin)
        self._sequence = 0
        self._waiting: deque[tuple[_Slot, Run, float]] = deque()
        self._touches = 0

    def run(self) -> Outcome:
        """Play every session; returns what happened."""
        for lane in self._lanes():
            for _ in range(self.concurrency):
                self._take_session(_Slot(lane))
        heap, engine, runtime = self._heap, self.engine, self.runtime
        running = engine.running
        while heap:
            time, _, slot, run = heapq.heappop(heap)
            if time > self.now:
                if running:
                    self._busy += time - self.now
                    self.now = time
                    self._decode(time)
                self.now = time
                runtime.observe(Tick(int(self._busy / STEP + 1e-6), time))
            if run is None:
                self._arrive(slot)
            elif isinstance(run, SimNode):
                if self._pins.get(slot) is run:
                    self._unpin(slot)
                    self._schedule()
            else:
                self._finish(slot, run)
        outcome = self.outcome
        outcome.seconds = self.now
        outcome.evictions, outcome.evicted_tokens = engine.evictions, engine.evicted
        outcome.prompt_tokens, outcome.cached_tokens = sum(outcome.prompts), sum(outcome.cached)
        outcome.requests = len(outcome.prompts)
        outcome.order = blake2b(outcome.log.tobytes(), digest_size=8).hexdigest()
        outcome.snapshot = runtime.snapshot()
        return outcome

    # ---- events ----

    def _arrive(self, slot: _Slot) -> None:
        session, index = slot.session, slot.call
        call, number = session.calls[index], slot.number + index
        run = Run(f"r{number}", call.prompt, call.output, call.prompt_tokens, call.output_tokens)
        run.number = number
        slot.call += 1
        if not self.engine.fits(run):
            self.outcome.unserved += 1
            self.outcome.unserved_tokens += call.prompt_tokens
            self._next_call(slot)
            return
        self.engine.arrive(run, self._tag(session, call, number))
        self._waiting.append((slot, run, self.now))
        self._schedule()

    def _finish(self, slot: _Slot, run: Run) -> None:
        engine = self.engine
        engine.settle(run)
        self.outcome.log.extend((2 * run.number + 1, engine.locked))
        engine.finish(run)
        if self._pin is not None:
            key = slot.session.key
            self._unpin(key)
            self._pins[key] = run.at.node
            engine.tree.lock(run.at.node)
            self._push(self.now + self._pin, key, run.at.node)
        if self._waiting:
            self._schedule()
        self._next_call(slot)

    def _schedule(self) -> None:
        waiting, engine, outcome = self._waiting, self.engine, self.outcome
        if waiting:
            if self._touches % TOUCH_EVERY == 0:
                for _, run, _ in reversed([*waiting][:TOUCH_MOST]):
                    engine.touch(run)
            self._touches += 1
        while waiting:
            slot, run, since = waiting[0]
            if not engine.admit(run):
                if engine.running or not self._pins:
                    return
                self._unpin(next(iter(self._pins)))
                continue
            waiting.popleft()
            self._unpin(slot.session.key)
            now, prompt = self.now, run.prompt
            outcome.calls.append(run.number)
            outcome.prompts.append(prompt)
            outcome.cached.append(run.cached)
            outcome.log.extend((2 * run.number, engine.locked))
            begin = prompt - int(FIXED_MISS * prompt) if self.fixed else run.cached
            run.started = max(now, self._prefilled) + STEP + prefill_seconds(begin, prompt)
            if self._serial:
                self._prefilled = run.started
            outcome.ttft.append(run.started + STEP - since)
            self._push(run.started + STEP * run.output, slot, run)

    def _decode(self, time: float) -> None:
        """Give running requests the KV of the decode steps up to now."""
        steps = []
        for run in self.engine.running.values():
            done = int((time - run.started) / STEP + 1e-6)
            if done > 0:
                n = run.prompt + done - run.allocated
                most = run.kv - run.allocated
                if n > most:
                    n = most
                if n > 0:
                    steps.append((run, n))
        if steps:
            self.engine.grow(steps)

    def _unpin(self, session: str) -> None:
        node = self._pins.pop(session, None)
        if node is not None:
            self.engine.tree.unlock(node)

    # ---- sessions ----

    def _lanes(self) -> list[Iterator[tuple[int, Any]]]:
        lanes: dict[int, list[tuple[int, Any]]] = {}
        number = 0
        for session in self.workload.sessions:
            lanes.setdefault(session.lane, []).append((number, session))
            number += len(session.calls)
        return [iter(lanes[lane]) for lane in sorted(lanes)]

    def _take_session(self, slot: _Slot) -> None:
        for number, session in slot.lane:
            if session.calls:
                slot.number, slot.session, slot.call = number, session, 0
                self._next_call(slot)
                return

    def _next_call(self, slot: _Slot) -> None:
        calls = slot.session.calls
        if slot.call < len(calls):
            self._push(self.now + max(0.0, calls[slot.call].gap), slot, None)
        else:
            self._take_session(slot)

    def _push(self, time: float, slot: "_Slot | str", run: "Run | SimNode | None") -> None:
        heapq.heappush(self._heap, (time, self._sequence, slot, run))
        self._sequence += 1

    def _tag(self, session: Any, call: Any, number: int) -> Tag | None:
        if self.identity == "inferred" or not session.tagged:
            return None
        final = self._ends and call is session.calls[-1]
        if self.identity == "tagged":
            return Tag(call.agent or None, session.key, final)
        return Tag(call.agent or None, "everyone" if self.identity == "scrambled" else f"call {number}", final)


def call_numbers(workload: Workload) -> list[tuple[int, int]]:
    """(session, call) by call number: calls are counted session by session."""
    return [(s, c) for s, session in enumerate(workload.sessions) for c in range(len(session.calls))]
