"""What the study runs: its parts, each a list of points."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.simulate import GRID, GRID_WORKLOADS
from benchmarks.study_keys import has_guard, switches, variations

SEEDS = (100, 101, 102)  # never tuned on
# Who knows the law needs no guard: with one it would be no bound.
CEILING = "informed-guard" if has_guard() else "informed"
CEILING_WHOLE = f"{CEILING}-trim"
# Policies that are compared closely run on every seed; for the rest one seed says enough.
CLOSE = ("lru", "lru+trim", "lhd+trim", "cachescout", "kvflow+END", "scout-trim", "scout", CEILING, "opt")
REST = ("lfu", "slru", "s3fifo", "gdsf", "ttl", "lhd", "kvflow", CEILING_WHOLE, "belady", "beladyP")
# As a table lists them: worse first, knowing more last.
ORDER = (
    *("lfu", "slru", "s3fifo", "gdsf", "ttl", "lhd", "lhd+trim", "lru", "lru+trim", "kvflow", "kvflow+END"),
    *("cachescout", "scout-trim", "scout", CEILING_WHOLE, CEILING, "belady", "beladyP", "opt"),
)
ON_TRACES = ("lru", "lru+trim", "lhd+trim", "kvflow+END", "cachescout", "scout-trim", "scout", "opt")
ELSEWHERE = ("lru", "lru+trim", "lhd+trim", "kvflow+END", "cachescout", "scout", CEILING, "opt")

# (file, half, whether anything was tuned on it)
TRACES = (
    ("tau_airline.jsonl.gz", None, True),
    ("magentic_one.jsonl.gz", None, True),
    ("ag2_groupchat.jsonl.gz", 1, True),
    ("ag2_groupchat.jsonl.gz", 2, False),
    ("coding_agents.jsonl.gz", None, False),
    ("magentic_one_timed.jsonl.gz", None, False),
    ("swe_agent.jsonl.gz", None, False),
)
ANONYMOUS = "chat.jsonl.gz"  # nobody says who calls
BIG = "coding_agents.jsonl.gz"  # left out where many variants run
PRESSURE = ((4, "1.15F"), (4, "2F"), (16, "4F"), (16, "6F"))
SUBSET = ((4, "2F"), (4, "4F"), (16, "4F"), (16, "8F"))  # of the grid, for all four topologies
FEW, FEW_PRESSURE = ((4, "4F"), (16, "8F")), ((4, "2F"), (16, "4F"))  # where very many variants run
IDENTITIES = ("tagged", "inferred", "scrambled", "scrambled-fresh")
OTHERS = (
    *("drift", "drift:reversed", "pollution", "pollution:shared", "chain12", "chain24", "supervisor", "geometric"),
    *("swe", "gsm8k", "mtbench", "gaia", "swebench"),
    *("pipeline:large", "selector:large", "random:large", "pipeline:private", "selector:private", "random:private"),
)
OTHER_POINTS, SWE_POINTS = FEW, ((4, "2F"), (16, "6F"))
NO_LAW = ("drift", "drift:reversed")  # nothing true holds throughout, so `informed` cannot run

CURVE_AT = (4, "4F")  # where the hit rate over time is kept
CURVE_POLICIES = ("lru", "scout", CEILING, "opt")
CURVE_STEP = 50  # calls

PARTS = {
    "grid": "the frozen 64-point grid",
    "traces": "recorded traces under pressure",
    "identity": "tagged, inferred and scrambled identity",
    "guard": "the guard on and off",
    "ablation": "each ingredient of scout removed",
    "sensitivity": "every number of scout lower and higher",
    "others": "drift, pollution, other topologies, profiles",
    "foresight": "what knowing the future would add",
    "cost": "speed of the simulator, cost and state of the policy",
}


class Place(NamedTuple):
    """What policies are compared at: they see the same requests in the same order."""

    source: str  # a workload, or a trace's file name
    concurrency: int
    capacity: str
    seed: int = SEEDS[0]
    half: int | None = None
    sessions: int | None = None

    @property
    def is_trace(self) -> bool:
        """Whether the source is a file."""
        return self.source.endswith(".gz")

    @property
    def name(self) -> str:
        """The source in words."""
        base = self.source.split(".")[0] if self.is_trace else self.source
        return base if self.half is None else f"{base}, half {self.half}"


class Point(NamedTuple):
    """One run."""

    place: Place
    policy: str
    identity: str = "tagged"

    def key(self) -> dict[str, Any]:
        """What tells the point from others in a result file."""
        place = self.place
        key: dict[str, Any] = {"trace" if place.is_trace else "workload": place.source}
        if place.half is not None:
            key["half"] = place.half
        key |= {"seed": place.seed, "capacity": place.capacity, "concurrency": place.concurrency}
        if place.sessions is not None:
            key["sessions"] = place.sessions
        key["policy"] = self.policy
        if self.identity != "tagged":
            key["identity"] = self.identity
        return key

    @property
    def has_curve(self) -> bool:
        """Whether hits are kept over time."""
        at = (self.place.concurrency, self.place.capacity) == CURVE_AT
        return at and self.place.source in GRID_WORKLOADS and self.policy in CURVE_POLICIES


def point_of(key: dict[str, Any]) -> Point:
    """The point with this key; KeyError when it is none."""
    place = Place(
        key["trace"] if "trace" in key else key["workload"],
        key["concurrency"],
        key["capacity"],
        key["seed"],
        key.get("half"),
        key.get("sessions"),
    )
    return Point(place, key["policy"], key.get("identity", "tagged"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every point. `quick`: a small version of everything, to see that it works."""

    quick: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the grid."""
        return SEEDS[:2] if self.quick else SEEDS

    @property
    def sessions(self) -> int | None:
        """Limit of sessions."""
        return 6 if self.quick else None

    def grid_places(self, seeds: Sequence[int] | None = None) -> list[Place]:
        """The frozen grid."""
        seeds = self.seeds if seeds is None else seeds
        at = [(c, f"{f:g}F") for c, fs in GRID.items() for f in fs]
        if self.quick:
            at = [(4, "2F"), (4, "4F"), (16, "8F")]
        names = GRID_WORKLOADS[1:3] if self.quick else GRID_WORKLOADS
        return [Place(n, c, f, seed, None, self.sessions) for seed in seeds for n in names for c, f in at]

    def subset(self, few: bool = False) -> list[Place]:
        """A fixed part of the grid, on the first seed."""
        at = FEW if few or self.quick else SUBSET
        names = GRID_WORKLOADS[1:3] if self.quick else GRID_WORKLOADS
        places = [Place(n, c, f, SEEDS[0], None, self.sessions) for n in names for c, f in at]
        if few and not self.quick:  # every topology once, the less predictable ones twice
            places = [p for p in places if (p.concurrency, p.capacity) == at[0] or p.source in names[2:]]
        return places

    def trace_places(self, held_out_only: bool = False, big: bool = True, few: bool = False) -> list[Place]:
        """The recorded traces under pressure."""
        at = FEW_PRESSURE if few or self.quick else PRESSURE
        return [
            Place(name, c, f, SEEDS[0], half, self.sessions)
            for name, half, tuned in TRACES
            if not (held_out_only and tuned) and (big or name != BIG)
            for c, f in at
        ]

    def other_places(self) -> list[Place]:
        """Everything else; traffic without names last."""
        names = ("drift", "pollution", "swe") if self.quick else OTHERS
        places = [
            Place(n, c, f, SEEDS[0], None, self.sessions)
            for n in names
            for c, f in (SWE_POINTS if n == "swe" else OTHER_POINTS)
        ]
        sessions = 200 if self.quick else None
        return places + [Place(ANONYMOUS, c, f, SEEDS[0], None, sessions) for c, f in FEW_PRESSURE]

    def other_policies(self, place: Place) -> list[str]:
        """Those of ELSEWHERE that can run there."""
        return [p for p in ELSEWHERE if p != CEILING or not (place.is_trace or place.source in NO_LAW)]

    def ablation_places(self) -> list[Place]:
        """Where ingredients are removed."""
        return [*self.subset(), *self.trace_places(held_out_only=True, big=False)]

    def sensitivity_places(self) -> list[Place]:
        """Where numbers are changed."""
        return [*self.subset(few=True), *self.trace_places(held_out_only=True, big=False, few=True)]

    def identity_places(self) -> list[Place]:
        """Where identity is taken away."""
        return [*self.subset(), *self.trace_places()]

    def points(self, part: str) -> list[Point]:
        """The points of a part, none for `foresight` and `cost`; one point may stand in several parts."""
        return list(dict.fromkeys(getattr(self, f"_{part}")()))

    def _grid(self) -> Iterator[Point]:
        first = set(self.grid_places(SEEDS[:1]))
        for place in self.grid_places():
            yield from (Point(place, p) for p in CLOSE)
            if place in first:
                yield from (Point(place, p) for p in REST)

    def _traces(self) -> Iterator[Point]:
        return (Point(place, p) for place in self.trace_places() for p in ON_TRACES)

    def _identity(self) -> Iterator[Point]:
        for place in self.identity_places():
            yield Point(place, "lru")
            yield from (Point(place, "scout", identity) for identity in IDENTITIES)

    def _guard(self) -> Iterator[Point]:
        if not has_guard():
            return
        for place in self.identity_places():
            yield Point(place, "lru")
            for identity in ("tagged", "scrambled"):
                yield from (Point(place, p, identity) for p in ("scout", "scout-guard"))

    def _ablation(self) -> Iterator[Point]:
        for place in self.ablation_places():
            yield from (Point(place, p) for p in ("lru", "scout", *(name for name, _, _ in switches())))

    def _sensitivity(self) -> Iterator[Point]:
        for place in self.sensitivity_places():
            yield from (Point(place, "scout", identity) for identity in IDENTITIES[:2])
            for key, _, policy in variations():
                yield Point(place, policy, "inferred" if key.part == "identity" else "tagged")

    def _others(self) -> Iterator[Point]:
        return (Point(place, p) for place in self.other_places() for p in self.other_policies(place))

    def _foresight(self) -> Iterator[Point]:
        yield from ()

    def _cost(self) -> Iterator[Point]:
        return iter(())
