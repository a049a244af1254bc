"""The closed loop with warmup: the same Planner as on a server, in the gaps in which the simulated engine is idle.

A slice is a request of the engine that no session sent: it is looked up, locked, prefilled and inserted like any other,
takes the time of its prefill (`serial` service: a real request waits for it), and is not told to the runtime.
"""

from collections.abc import Mapping
from typing import Any

from radix_policy.config import build
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.prompts import SpanPrompt
from radix_policy.simulator.engine import Run
from radix_policy.simulator.loop import STEP, Loop, Outcome, _Slot, prefill_seconds
from radix_policy.simulator.tree import SimTree, common
from radix_policy.warm_anchors import Anchor
from radix_policy.warmup import Held, Look, Planner, Slice, WarmupConfig, peek
from radix_policy.workloads.base import Workload

# Every condition away but an idle server and an anchor that is missing: what the gate is compared with.
UNGATED: Mapping[str, Any] = {
    "warmup": True,
    "warmup_r_min": 0.0,
    "warmup_p_min": 0.0,
    "warmup_value": False,
    "warmup_budget": 1e9,
    "warmup_rate": 1e6,
    "warmup_share": 0.0,
}


def held(tree: SimTree, prompt: SpanPrompt, tokens: int) -> Held:
    """How much of the prompt's first `tokens` tokens the tree holds, in whole pages; nothing is touched or split."""
    limit = tokens - tokens % tree.page_size
    spans = prompt.spans
    node, pos, i, off = tree.root, 0, 0, 0
    while pos < limit:
        child = node.children.get(tree._key(spans, i, off))
        if child is None:
            break
        n, i, off = common(child.spans, spans, i, off, min(child.length, limit - pos))
        pos += n
        node = child
        if n < child.length:
            break
    return Held(pos - pos % tree.page_size, node.id)


class WarmLoop(Loop):
    """A Loop whose engine warms anchors."""

    def __init__(
        self,
        workload: Workload,
        policy: str | type[EvictionPolicy],
        *,
        warmup: Mapping[str, Any],
        service: str = "serial",
        **options: Any,
    ) -> None:
        """`warmup`: keys of WarmupConfig; the rest as Loop. ValueError with `fixed` service: nothing saves time."""
        if service == "fixed":
            raise ValueError("warmup needs service cost or serial: with fixed service nothing saves time")
        super().__init__(workload, policy, service=service, **options)
        self.planner = Planner(build(warmup, WarmupConfig)[0], self.runtime)
        self.longest = 0.0  # seconds that a real request waited for a slice, at most
        self._warm = _Slot(iter(()))  # whose requests are warmups
        self._warming: Slice | None = None
        self._number = 0

    def run(self) -> Outcome:
        """See Loop; the snapshot holds what the planner counted under `warmup`."""
        outcome = super().run()
        outcome.snapshot["warmup"] = self.planner.snapshot() | {"longest_wait_s": self.longest}
        return outcome

    def _arrive(self, slot: _Slot) -> None:
        call, number = slot.session.calls[slot.call], slot.number + slot.call
        before = len(self.outcome.calls)
        if self._warming is not None:
            self.longest = max(self.longest, self._prefilled - self.now)
        super()._arrive(slot)
        request = self.runtime.requests.get(f"r{number}")
        if request is not None:
            self.planner.arrived(request)
            if len(self.outcome.calls) > before and self.outcome.calls[-1] == number:
                self.planner.matched(request, self.outcome.cached[-1], self.now)
        assert call.prompt_tokens >= 1

    def _finish(self, slot: _Slot, run: Run) -> None:
        if slot is self._warm:
            self._warming = None
            self.engine.finish(run)
            self.planner.finished(run.cached, self.now)
            if self._waiting:
                self._schedule()
        else:
            super()._finish(slot, run)
            self.planner.left()
        self._idle()

    def _idle(self) -> None:
        """Warm something while there is nothing else to do."""
        engine, planner = self.engine, self.planner
        if engine.running or self._waiting:
            return
        plan = planner.plan(self.now, engine.free, self._held)
        if isinstance(plan, Look):
            planner.looked(plan, peek(self.runtime, plan))
            plan = planner.plan(self.now, engine.free, self._held)
        if not isinstance(plan, Slice):
            return
        assert isinstance(plan.prompt, SpanPrompt)
        run = Run(f"warm{self._number}", plan.prompt.spans, (), plan.end, 1)
        self._number += 1
        if not engine.fits(run) or not engine.admit(run):
            planner.aborted()
            return
        self._warming = plan
        run.started = max(self.now, self._prefilled) + STEP + prefill_seconds(run.cached, run.prompt)
        if self._serial:
            self._prefilled = run.started
        self._push(run.started, self._warm, run)

    def _held(self, anchor: Anchor) -> Held:
        assert isinstance(anchor.head, SpanPrompt)
        return held(self.engine.tree, anchor.head, anchor.length)
