"""What is left to know: `scout`'s formulas told ever more of the future, on generated workloads.

`informed` knows the generator's law. `who` is told, for every live session, whether it calls again and which agent, as
the session's script has it; `who and when` also the think time before that call. The generator draws both
independently of everything that happened before, so what they add to `informed` no online policy can have.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.results import progress
from benchmarks.study_plan import CEILING, Plan
from benchmarks.study_tables import rate, signed, table
from radix_policy.eviction.informed import informed
from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.hazard import HazardModel, View
from radix_policy.sessions import Session
from radix_policy.simulator import Study
from radix_policy.workloads import Call, Workload, make

WHO, WHEN = "who", "who and when"
COLUMNS = ("lru", "scout", CEILING, WHO, WHEN, "opt")
POLICIES = ("lru", "scout", "informed", "opt")  # whose code the figures depend on


def told(workload: Workload, when: bool) -> type[ScoutPolicy]:
    """`informed` that is told each session's next call, and with `when` its time; ValueError without a true law."""
    scripts = {script.key: script.calls for script in workload.sessions}
    base = informed(workload)

    def next_call(session: Session) -> Call | None:
        calls = scripts[session.key]
        return calls[session.calls] if session.calls < len(calls) else None

    class ToldPolicy(base):  # type: ignore[misc, valid-type]
        """See the module."""

        name = "told"

        def make_model(self) -> HazardModel:
            law = type(super().make_model())

            class ToldModel(law):  # type: ignore[misc, valid-type]
                """The session's own next call in place of the law's first step."""

                def _end_rate(self, session: Session) -> float:
                    return 0.999 if next_call(session) is None else 0.0

                def _reach_of(self, session: Session) -> Any:
                    self._owner[self._views[session.id].slot] = session
                    call = next_call(session)
                    agent = -1
                    if call is not None:
                        agent = self.world.identifier.agents.find(session.namespace, "tag:" + call.agent)
                    if not 0 <= agent < self._agents:
                        return super()._reach_of(session) * (call is not None)
                    onward = self._onward(self._step(session.entry, session.calls + 1), agent) * self.gamma
                    onward[agent] = 1.0
                    return onward

                def _reaches_of(self, sessions: Sequence[Session]) -> Any:
                    return [self._reach_of(session) for session in sessions]

                @property
                def _owner(self) -> dict[int, Session]:
                    return self.__dict__.setdefault("_sessions_by_slot", {})

                def _weigh(self) -> None:
                    super()._weigh()
                    if when:
                        for number, view in self._views.items():
                            self._time(view)
                            self.changed[number] = None
                        self._combine()

                def _weigh_one(self, view: View) -> None:
                    super()._weigh_one(view)
                    if when:
                        self._time(view)

                def _time(self, view: View) -> None:
                    session = self._owner[view.slot]
                    call, cycle = next_call(session), self.world.gaps.cycle
                    worth = 0.0
                    if call is not None and cycle > 0:
                        theta = (1.0 - self.gamma) / cycle
                        if session.running > 0:
                            left = self._calls.at(max(self._now - session.started_at, 0.0))[1]
                            worth = left * math.exp(-theta * call.gap)
                        else:
                            worth = math.exp(-theta * max(session.finished_at + call.gap - self._now, 0.0))
                    view.factor = self._c[view.slot] = worth

            return ToldModel(self.world, self.config, self.reuse.rates)

    return ToldPolicy


def measure_foresight(plan: Plan) -> dict[str, Any]:
    """Hit rates at a part of the grid; the same requests in the same order for all."""
    rows = []
    for place in plan.subset():
        study = Study(make(place.source, seed=place.seed, sessions=place.sessions))
        capacity = int(float(place.capacity.rstrip("F")) * study.workload.largest)
        rates: dict[str, float] = {}
        for column in COLUMNS:
            kind = told(study.workload, column == WHEN) if column in (WHO, WHEN) else column
            config = {"guard": False} if column in (WHO, WHEN) else None  # as in the ceiling
            outcome = study.run(kind, capacity, place.concurrency, config=config)
            rates[column] = round(100 * outcome.hit_rate, 4)
        rows.append({"workload": place.name, "concurrency": place.concurrency, "capacity": place.capacity} | rates)
        progress(f"foresight: {place.name} C={place.concurrency} {place.capacity}")
    return {"seed": plan.seeds[0], "places": rows}


def foresight(figures: dict[str, Any] | None) -> list[str]:
    """The table, and what of the gap is chance."""
    if figures is None:
        return []
    rows: list[list[object]] = []
    for p in figures["places"]:
        rows.append([f"{p['workload']} C={p['concurrency']} {p['capacity']}", *(rate(p[c]) for c in COLUMNS)])
    mean = {c: fmean(p[c] for p in figures["places"]) for c in COLUMNS}
    rows.append(["**mean**", *(rate(mean[c]) for c in COLUMNS)])
    steps = [signed(mean[b] - mean[a]) for a, b in pairwise(COLUMNS[1:])]
    return [
        f"A part of the grid, seed {figures['seed']}. `{CEILING}` knows the generator's law; `{WHO}` is told of every "
        "live session whether it calls again and which agent, as its script has it; "
        f"`{WHEN}` also the think time before that call. The generator draws both independently of all that happened "
        "before, so no online policy can have them.",
        "",
        *table(["", *COLUMNS], rows),
        f"On the way from scout to opt: the law {steps[0]} points, who comes next {steps[1]}, when {steps[2]}; the "
        f"other {steps[3]} are the future beyond the next call, and what an optimum cuts that a score cannot.",
        "",
    ]
