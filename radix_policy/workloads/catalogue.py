"""Every generated workload by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from radix_policy.workloads import profiles
from radix_policy.workloads import topologies as topo
from radix_policy.workloads.base import Workload, WorkloadError
from radix_policy.workloads.facts import measure
from radix_policy.workloads.generator import LARGE, Group, group_sessions, varied
from radix_policy.workloads.others import SWE_END, polluted, swe_sessions

# CacheScout eq. 2 on the true rows at their stationary distribution. Short sessions that all open with agent 0 measure
# a little more.
SPEC_R: Mapping[str, float] = {"pipeline": 1.0, "debate": 0.75, "selector": 0.51, "random": 0.11}


def _numbered(agents: int) -> tuple[str, ...]:
    return tuple(f"agent{i:02d}" for i in range(agents))


GROUPS: Mapping[str, Callable[[], Group]] = {
    "pipeline": lambda: Group("pipeline", topo.cycle(6)),
    "debate": lambda: Group("debate", topo.debate()),
    "selector": lambda: Group("selector", topo.selector()),
    "random": lambda: Group("random", topo.random_rows(), first=None),
    "chain12": lambda: Group("chain12", topo.chain(12), _numbered(12)),
    "chain24": lambda: Group("chain24", topo.chain(24), _numbered(24), end=topo.uniform_turns(40, 60)),
    "supervisor": lambda: Group(
        "supervisor",
        topo.supervisor(),
        ("supervisor", "searcher", "browser", "coder", "analyst", "critic"),
        scale=LARGE,
        end=topo.uniform_turns(6, 40, agent=0, after=6, early=0.5),
    ),
    "geometric": lambda: Group("geometric", topo.selector(), end=topo.geometric_turns(24)),
    "gsm8k": profiles.gsm8k,
    "mtbench": profiles.mtbench,
    "gaia": profiles.gaia,
    "swebench": profiles.swebench,
}
_SCALED = ("pipeline", "debate", "selector", "random")  # these also come `large` and `private`
_VARIANTS: Mapping[str, tuple[str, ...]] = {
    **{name: ("large", "private") if name in _SCALED else () for name in GROUPS},
    "drift": ("reversed",),
    "pollution": ("shared",),
    "swe": (),
}


def names() -> list[str]:
    """Every name that `make` takes; variants of one workload can be combined (`selector:large:private`)."""
    return [name for base, variants in _VARIANTS.items() for name in (base, *(f"{base}:{v}" for v in variants))]


def make(
    name: str, *, seed: int, concurrency: int | None = None, sessions: int | None = None, **variant: bool
) -> Workload:
    """The workload called `name`, e.g. `selector` or `selector:large`; a variant may also be given as large=True.

    50 sessions, or 160 when `concurrency` is 64 or more, unless `sessions` says otherwise.
    """
    base, *given = name.split(":")
    wanted = {*given, *(key for key, on in variant.items() if on)}
    if base not in _VARIANTS or wanted - set(_VARIANTS[base]):
        asked = ":".join([base, *sorted(wanted)])
        raise WorkloadError(f"unknown workload {asked!r}; known: {', '.join(names())}")
    if sessions is not None and sessions < 1:
        raise WorkloadError(f"workload {name!r}: sessions must be at least 1, got {sessions}")
    count = sessions if sessions is not None else 160 if concurrency is not None and concurrency >= 64 else 50
    full = ":".join([base, *(v for v in _VARIANTS[base] if v in wanted)])
    if base == "drift":
        return _drift(full, seed, count, "reversed" in wanted)
    if base == "swe":
        scripts = tuple(swe_sessions(full, seed, count))
        return Workload(full, scripts, ("coder",), seed, ((1.0,),), SWE_END, measure(scripts))
    if base == "pollution":
        group = GROUPS["selector"]()
        clean = group_sessions(group, full, seed, count)
        scripts = tuple(polluted(clean, full, seed, "shared" in wanted))
        facts = measure(scripts) | {"scripted_sessions": len(clean), "R_spec": SPEC_R["selector"]}
        return Workload(full, scripts, group.agents, seed, group.rows, group.end, facts)
    group = varied(GROUPS[base](), large="large" in wanted, private="private" in wanted)
    scripts = tuple(group_sessions(group, full, seed, count))
    facts = measure(scripts) | ({"R_spec": SPEC_R[base]} if base in SPEC_R else {})
    return Workload(full, scripts, group.agents, seed, group.rows, group.end, facts)


def _drift(name: str, seed: int, count: int, back: bool) -> Workload:
    """The first half of the sessions is a pipeline; the rest is random, or the pipeline backwards.

    No one matrix is true: `transitions` is None, and facts["phases"] holds (sessions, rows) of each half.
    """
    first = GROUPS["pipeline"]()
    second = replace(first, base="reversed", rows=topo.cycle(6, -1)) if back else GROUPS["random"]()
    half = (count + 1) // 2
    scripts = (*group_sessions(first, name, seed, half), *group_sessions(second, name, seed, count - half, half))
    facts = measure(scripts) | {"phases": ((half, first.rows), (count - half, second.rows))}
    return Workload(name, scripts, first.agents, seed, None, first.end, facts)
