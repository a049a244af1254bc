"""The keys of `scout`, by introspection: what can be switched, what can be moved."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.identity import IdentityConfig
from radix_policy.runtime import RuntimeConfig

# Ingredients that a number switches off
OFF_VALUES: dict[str, float] = {"transition_decay": 1, "adapt": 0, "backoff": 0, "odds_cap": 1}
OTHER_MODE = "identity window:"  # keys that work in a mode that is not the default


class Key(NamedTuple):
    """One configuration key."""

    name: str
    default: Any
    low: float | None
    high: float | None
    doc: str
    part: str  # scout, runtime, identity

    def neighbours(self) -> list[float]:
        """A lower and a higher value: half and double, or half and double the distance to 1; inside what is allowed."""
        x = self.default
        if x == 0:
            tries: Sequence[float] = (1,)
        elif isinstance(x, int):
            tries = (x // 2, 2 * x)
        elif 0.5 < x < 1 and self.high is not None and self.high <= 1:
            tries = (1 - 2 * (1 - x), 1 - (1 - x) / 2)
        else:
            tries = (x / 2, 2 * x)
        low = self.low if self.low is not None else -float("inf")
        high = self.high if self.high is not None else float("inf")
        clipped = [min(max(round(t, 6), low), high) for t in tries]
        return [t for t in clipped if t != x]


def keys() -> list[Key]:
    """Every key that `scout` takes."""
    found = []
    for part, config in (("scout", ScoutPolicy.Config), ("runtime", RuntimeConfig), ("identity", IdentityConfig)):
        for field in dataclasses.fields(config):
            meta = field.metadata
            if field.default is dataclasses.MISSING or "doc" not in meta:
                continue
            name = meta["name"] or field.name
            found.append(Key(name, field.default, meta["low"], meta["high"], meta["doc"], part))
    return found


def switches() -> list[tuple[str, str, str]]:
    """(policy name, what is changed, the key's text) of every ingredient that can be switched."""
    found = []
    for key in keys():
        if isinstance(key.default, bool):
            sign = "-" if key.default else "+"
            found.append((f"scout{sign}{key.name}", f"{key.name}={str(not key.default).lower()}", key.doc))
        elif key.name in OFF_VALUES and key.default != OFF_VALUES[key.name]:
            value = f"{OFF_VALUES[key.name]:g}"
            found.append((f"scout:{key.name}={value}", f"{key.name}={value}", key.doc))
    return found


def variations() -> list[tuple[Key, float, str]]:
    """(key, value, policy name) for every number, lower and higher."""
    numbers = [k for k in keys() if isinstance(k.default, int | float) and not isinstance(k.default, bool)]
    numbers = [k for k in numbers if not k.doc.startswith(OTHER_MODE)]
    return [(k, v, f"scout:{k.name}={v:g}") for k in numbers for v in k.neighbours()]


def has_guard() -> bool:
    """Whether this version of scout has a guard to switch off."""
    return any(k.name == "guard" and k.default is True for k in keys())
