"""The closed loop on two tiers: `loop.Loop` on a `TieredEngine`, with times that depend on what is restored."""

from collections.abc import Mapping
from typing import Any

from radix_policy.admission import AdmissionConfig
from radix_policy.hardware import OffloadCost
from radix_policy.simulator.engine import CHUNK
from radix_policy.simulator.loop import STEP, TOUCH_EVERY, TOUCH_MOST, Loop, prefill_seconds
from radix_policy.simulator.tiers import TieredEngine
from radix_policy.workloads.base import Workload


class Costs:
    """Seconds that the engine takes; here those of the other simulations (`loop.prefill_seconds`), and no copy's."""

    def prefill_s(self, begin: int, end: int) -> float:
        """To compute the prompt's tokens [begin, end)."""
        return prefill_seconds(begin, end)

    def restore_s(self, tokens: int) -> float:
        """To copy so many tokens from the host."""
        return 0.0


class HardwareCosts(Costs):
    """A GPU with a host link instead of the simulator's own prefill."""

    def __init__(self, cost: OffloadCost) -> None:
        self.cost = cost

    def prefill_s(self, begin: int, end: int) -> float:
        """See Costs."""
        return self.cost.prefill_s(end) - self.cost.prefill_s(begin)

    def restore_s(self, tokens: int) -> float:
        """See Costs."""
        return self.cost.restore_s(tokens)


class TieredLoop(Loop):
    """The closed loop on a `TieredEngine`; one prefill after the other, as long as what it computes and restores."""

    engine: TieredEngine

    def __init__(
        self,
        workload: Workload,
        policy: str,
        *,
        capacity: int,
        host_capacity: int,
        concurrency: int,
        admission: AdmissionConfig | None = None,
        costs: Costs | None = None,
        page_size: int = 1,
        chunk: int = CHUNK,
        trims: bool | None = None,
        config: Mapping[str, Any] | None = None,
        threshold: int = 1,
        forgets: bool = False,
        ordered: bool = False,
        ends: bool = False,
        identity: str = "tagged",
    ) -> None:
        """Options as in `Loop` and `TieredEngine`."""
        super().__init__(
            workload,
            policy,
            capacity=capacity,
            concurrency=concurrency,
            config=config,
            page_size=page_size,
            chunk=chunk,
            ends=ends,
            identity=identity,
            service="serial",
        )
        self.costs = costs if costs is not None else Costs()
        self.engine = TieredEngine(
            self.runtime,
            capacity,
            host_capacity,
            page_size,
            chunk,
            trims,
            admission=admission,
            threshold=threshold,
            forgets=forgets,
            ordered=ordered,
        )

    def _schedule(self) -> None:
        waiting, engine, outcome, costs = self._waiting, self.engine, self.outcome, self.costs
        if waiting:
            if self._touches % TOUCH_EVERY == 0:
                for _, run, _ in reversed([*waiting][:TOUCH_MOST]):
                    engine.touch(run)
            self._touches += 1
        while waiting:
            slot, run, since = waiting[0]
            before = engine.tree.restored
            if not engine.admit(run):
                return
            waiting.popleft()
            restored = engine.tree.restored - before
            outcome.calls.append(run.number)
            outcome.prompts.append(run.prompt)
            outcome.cached.append(run.cached)
            work = costs.prefill_s(run.cached, run.prompt) + costs.restore_s(restored)
            self._prefilled = run.started = max(self.now, self._prefilled) + STEP + work
            outcome.ttft.append(run.started + STEP - since)
            self._push(run.started + STEP * run.output, slot, run)
