"""One call for everything the simulator can run: `simulate(workload, "scout-guard", capacity=..., concurrency=...)`.

A policy is named NAME, then ingredients added or removed (`+trim`, `-guard`), then keys (`:gamma=0.9`). An ingredient
is a true-or-false key of the policy. Two work for every policy: `trim`, and `+END` (clients say which call is a
session's last). `opt`, `belady` and `beladyP` (with trimming) know the future: they need the order of a first run, so
they need fixed service. `informed` is `scout` told the generator's true law. `ttl-pin` is LRU with hard pins; requests
wait for them, so its order is its own.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from radix_policy.config import ConfigError, build
from radix_policy.eviction import POLICIES
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.eviction.informed import informed
from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.eviction.ttl import TtlConfig
from radix_policy.identity import IdentityConfig
from radix_policy.runtime import RuntimeConfig
from radix_policy.simulator.engine import CHUNK
from radix_policy.simulator.loop import Loop, Outcome
from radix_policy.simulator.optimum import Oracle, Plan, belady, optimal
from radix_policy.workloads.base import Workload

ORACLES = ("opt", "belady", "beladyP")
PINNED = "ttl-pin"  # lru with Continuum's hard pin
INFORMED = "informed"  # scout with the generator's true law

_SPEC = re.compile(r"(ttl-pin|[A-Za-z_]\w*)((?:[+-]\w+)*)((?::[A-Za-z_]\w*=[^:]+)*)")


class Spec(NamedTuple):
    """A policy by name, with its configuration and whether it trims (None: as the policy says)."""

    name: str
    config: dict[str, Any]
    trims: bool | None
    ends: bool = False  # clients say which call is a session's last


def known_policies() -> list[str]:
    """Every policy name that `simulate` takes, without ingredients."""
    return sorted([*POLICIES, *ORACLES, PINNED, INFORMED])


def parse_spec(text: str) -> Spec:
    """Read `name+ingredient-ingredient:key=value`; ConfigError in one line when it cannot be meant."""
    found = _SPEC.fullmatch(text)
    if found is None or found[1] not in known_policies():
        raise ConfigError(f"unknown policy {text!r}; known: {', '.join(known_policies())}")
    name, ingredients, keys = found.groups()
    config: dict[str, Any] = {}
    trims, ends = None, False
    kind = ScoutPolicy if name == INFORMED else POLICIES.get(name)
    parts: tuple[Any, ...] = (kind.Config, RuntimeConfig, IdentityConfig) if kind is not None else ()
    own = {f.name for part in parts for f in dataclasses.fields(part) if isinstance(f.default, bool)}
    for sign, word in re.findall(r"([+-])(\w+)", ingredients):
        if word == "END" and sign == "+":
            ends = True
        elif word == "trim" and "trim" not in own:
            trims = sign == "+"
        elif word not in own:
            raise ConfigError(f"policy {name!r} has no ingredient {word!r}")
        else:
            config[word] = sign == "+"
    for key, value in re.findall(r":(\w+)=([^:]+)", keys):
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    if name in ORACLES and (config or ends or trims is not None):
        raise ConfigError(f"policy {name!r} takes no ingredients or keys")
    return Spec(name, config, trims, ends)


class Study:
    """Simulations of one workload: the order and the optimum's plan are worked out once and shared."""

    def __init__(self, workload: Workload, page_size: int = 1, chunk: int = CHUNK) -> None:
        self.workload = workload
        self.page_size = page_size
        self.chunk = chunk
        self._plan: Plan | None = None
        self._orders: dict[tuple[int, int], Outcome] = {}

    def plan(self) -> Plan:
        """The workload as segments of one static tree."""
        if self._plan is None:
            self._plan = Plan(self.workload, self.page_size)
        return self._plan

    def order(self, capacity: int, concurrency: int) -> Outcome:
        """A run under LRU with fixed service: the order that every policy sees."""
        key = (capacity, concurrency)
        if key not in self._orders:
            self._orders[key] = Loop(
                self.workload,
                "lru",
                capacity=capacity,
                concurrency=concurrency,
                page_size=self.page_size,
                chunk=self.chunk,
            ).run()
        return self._orders[key]

    def run(
        self,
        policy: str | type[EvictionPolicy],
        capacity: int,
        concurrency: int,
        *,
        config: Mapping[str, Any] | None = None,
        identity: str = "tagged",
        service: str = "fixed",
        trims: bool | None = None,
    ) -> Outcome:
        """One simulation. `config` adds keys to those in the name; ConfigError when something does not fit."""
        kind: str | type[EvictionPolicy] = policy
        keys = dict(config or {})
        ends, pin = False, None
        if isinstance(policy, str):
            spec = parse_spec(policy)
            kind = spec.name
            keys = {**spec.config, **keys}
            trims = spec.trims if trims is None else trims
            ends = spec.ends
            if kind == PINNED:
                kind, pin = "lru", build(keys, TtlConfig, policy=PINNED)[0].ttl
                keys = {}
            elif kind == INFORMED:
                require_law(self.workload)
                kind = informed(self.workload)
            elif kind == "kvflow" and "graph" not in keys:
                keys["graph"] = declared_graph(self.workload)
            if spec.name in ORACLES:
                if service != "fixed":
                    raise ConfigError(f"policy {policy!r} needs fixed service: with another the order is not fixed")
                reference = self.order(capacity, concurrency)
                if spec.name == "opt":
                    return optimal(self.plan(), reference)
                kind = belady(Oracle(self.plan(), reference.calls), spec.name == "beladyP")
                keys = {}
            elif spec == Spec("lru", {}, None, False) and not keys and service == "fixed" and trims is None:
                return self.order(capacity, concurrency)
        outcome = Loop(
            self.workload,
            kind,
            capacity=capacity,
            concurrency=concurrency,
            config=keys,
            page_size=self.page_size,
            identity=identity,
            service=service,
            chunk=self.chunk,
            trims=trims,
            ends=ends,
            pin=pin,
        ).run()
        if isinstance(policy, str):
            outcome.policy = policy
        return outcome


def require_law(workload: Workload) -> None:
    """ConfigError when `informed` cannot run on the workload."""
    if workload.transitions is None or workload.end_probability is None:
        raise ConfigError(f"policy {INFORMED!r} needs a generated workload with one true law, not {workload.name!r}")


def declared_graph(workload: Workload) -> dict[str, dict[str, float]]:
    """Agent -> successor -> probability: the generator's own, or for a trace what happened in it."""
    if workload.transitions is not None:
        return {a: dict(zip(workload.agents, row)) for a, row in zip(workload.agents, workload.transitions)}
    counts: dict[str, dict[str, float]] = {}
    for session in workload.sessions:
        for call, after in pairwise(session.calls):
            row = counts.setdefault(call.agent, {})
            row[after.agent] = row.get(after.agent, 0.0) + 1.0
    return {a: {b: n / sum(row.values()) for b, n in row.items()} for a, row in counts.items()}


def simulate(
    workload: Workload, policy: str | type[EvictionPolicy], *, capacity: int, concurrency: int, **options: Any
) -> Outcome:
    """Play a workload once under one policy. `options`: those of `Study` and `Study.run`."""
    shared = {name: options.pop(name) for name in ("page_size", "chunk") if name in options}
    return Study(workload, **shared).run(policy, capacity, concurrency, **options)
