"""`informed`: scout's formulas fed with the generator's true transition and END probabilities. Simulator only.

The ceiling for an online policy of this form: what it still loses to the offline optimum is chance, not learning.
It knows P(next | agent) and P(END | turn, agent), not what will happen; gaps and reuse it learns as scout does.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.hazard import HazardModel
from radix_policy.routing import Context
from radix_policy.sessions import Session
from radix_policy.workloads.base import Workload


def informed(workload: Workload) -> type[ScoutPolicy]:
    """The policy that knows this workload's law; ValueError when the workload has none."""
    law, true_rows, names = workload.end_probability, workload.transitions, workload.agents
    if law is None or true_rows is None:
        raise ValueError(f"workload {workload.name!r} has no true law: informed cannot run on it")
    rows: Sequence[Sequence[float]] = true_rows
    by_name = {f"tag:{name}": i for i, name in enumerate(names)}

    class InformedModel(HazardModel):
        """True rows, true END."""

        def _numbers(self, agents: int) -> list[int]:
            """The workload's number of each interned agent, -1 for others."""
            return [by_name.get(self.world.identifier.agents.name(i), -1) for i in range(agents)]

        def _probabilities(self, agents: int) -> NDArray[np.float64]:
            p = np.zeros((agents, agents))
            numbers = self._numbers(agents)
            for i, a in enumerate(numbers):
                row: Sequence[float] = rows[a] if a >= 0 else ()
                for j, b in enumerate(numbers):
                    p[i, j] = row[b] if row and b >= 0 else 0.0
            return p

        def _contexts(self, agents: int) -> list[Context]:
            return []

        def _agent_end(self, agent: int) -> float:
            return 0.0

        def _odds(self, entry: int, turns: int, steps: int) -> NDArray[np.float64]:
            return np.array([1.0 - law(n) for n in range(turns, turns + steps)])

        def _end_rate(self, session: Session) -> float:
            return min(law(session.calls, self._numbers(session.agent + 1)[-1]), 0.999)

    class InformedPolicy(ScoutPolicy):
        """See the module."""

        name = "informed"

        def make_model(self) -> HazardModel:
            return InformedModel(self.world, self.config, self.reuse.rates)

    return InformedPolicy
