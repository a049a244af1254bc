"""Every generated workload by name."""

from collections.abc import Callable, Mapping

from radix_policy.workloads import topologies as topo
from radix_policy.workloads.base import Workload, WorkloadError
from radix_policy.workloads.facts import measure
from radix_policy.workloads.generator import Group, group_sessions, varied

SPEC_R = {"pipeline": 1.0, "debate": 0.75, "selector": 0.51, "random": 0.11}

GROUPS: Mapping[str, Callable[[], Group]] = {
    "pipeline": lambda: Group("pipeline", topo.cycle(6)),
    "debate": lambda: Group("debate", topo.debate()),
    "selector": lambda: Group("selector", topo.selector()),
    "random": lambda: Group("random", topo.random_rows(), first=None),
}


def make(
    name: str, *, seed: int, concurrency: int | None = None, sessions: int | None = None, **variant: bool
) -> Workload:
    """The workload called `name`, e.g. `selector` or `selector:large`; a variant may also be given as large=True.

    50 sessions, or 160 when `concurrency` is 64 or more, unless `sessions` says otherwise.
    """
    base, *given = name.split(":")
    wanted = set(given) | {key for key, on in variant.items() if on}
    if base not in GROUPS or wanted - {"large", "private"}:
        raise WorkloadError(f"unknown workload {name!r}")
    count = sessions if sessions is not None else 160 if concurrency is not None and concurrency >= 64 else 50
    full = ":".join([base, *sorted(wanted)])
    group = varied(GROUPS[base](), large="large" in wanted, private="private" in wanted)
    scripts = tuple(group_sessions(group, full, seed, count))
    facts = measure(scripts) | {"R_spec": SPEC_R.get(base)}
    return Workload(full, scripts, group.agents, seed, group.rows, group.end, facts)
