"""Configuration: one frozen dataclass per part, each field a key with its range, unit and effect.

The same metadata validates the JSON of `--radix-eviction-policy-config`, and prints the table in the README.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and what is allowed, in one line."""


def key(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    choices: Sequence[str] = (),
    optional: bool = False,
    name: str = "",
) -> Any:
    """A dataclass field that is a configuration key: [low, high] inclusive, `unit` for people; `optional`: or null.

    `name` is the key in JSON where it cannot be the field's name (`lambda`).
    """
    metadata = {"doc": doc, "low": low, "high": high, "unit": unit, "choices": tuple(choices), "optional": optional}
    metadata["name"] = name
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def allowed(field: "dataclasses.Field[Any]") -> str:
    """What a key takes, in words, e.g. `number in [0, 1]`."""
    meta, kind = field.metadata, _kind(field)
    if meta["choices"]:
        text = "one of " + ", ".join(meta["choices"])
    else:
        text = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "object"}[kind]
        low, high = meta["low"], meta["high"]
        if low is not None and high is not None:
            text += f" in [{low:g}, {high:g}]"
        elif low is not None:
            text += f" >= {low:g}"
        elif high is not None:
            text += f" <= {high:g}"
    return text + (" or null" if meta["optional"] else "")


def build(given: Mapping[str, Any], *parts: type[T], policy: str = "scout") -> tuple[T, ...]:
    """One instance of each dataclass in `parts` from the flat `given`; ConfigError on a bad key or value."""
    fields = {_name(f): f for part in parts for f in dataclasses.fields(part)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in fields:
            raise ConfigError(f"unknown key {name!r} for policy {policy!r}; known keys: {', '.join(sorted(fields))}")
        _check(fields[name], value)
    made = []
    for part in parts:
        own = [f for f in dataclasses.fields(part) if _name(f) in given]  # type: ignore[arg-type]
        made.append(part(**{f.name: _convert(f, given[_name(f)]) for f in own}))
    return tuple(made)


def rows(part: type) -> list[tuple[str, str, str, str, str]]:
    """(key, default, allowed, unit, effect) of every key in the dataclass, for the README and for `doctor`."""
    instance = part()
    return [
        (_name(f), _show(getattr(instance, f.name)), allowed(f), f.metadata["unit"], f.metadata["doc"])
        for f in dataclasses.fields(part)
    ]


def _name(field: "dataclasses.Field[Any]") -> str:
    return field.metadata["name"] or field.name


def _kind(field: "dataclasses.Field[Any]") -> type:
    text = str(field.type if isinstance(field.type, str) else field.type.__name__)
    for kind in (bool, int, float, str, dict):
        if text.startswith(kind.__name__):
            return kind
    raise TypeError(f"config key {field.name}: unsupported type {field.type}")


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    meta, kind = field.metadata, _kind(field)
    good = True
    if value is None:
        good = bool(meta["optional"])
    elif kind is bool or kind is str or kind is dict:
        good = isinstance(value, kind) and (not meta["choices"] or value in meta["choices"])
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        good = good and abs(value) != float("inf")
        if good and kind is int:
            good = value == int(value)
        if good:
            low, high = meta["low"], meta["high"]
            good = (low is None or value >= low) and (high is None or value <= high)
    if not good:
        raise ConfigError(f"key {_name(field)!r}: got {value!r}, allowed: {allowed(field)}")


def _convert(field: "dataclasses.Field[Any]", value: Any) -> Any:
    kind = _kind(field)
    return value if value is None or kind in (dict, str, bool) else kind(value)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def markdown(parts: Mapping[str, type]) -> str:
    """The README's table of keys: one row per key, grouped by the part (given as heading -> dataclass)."""
    lines = ["| part | key | default | allowed | unit | effect |", "|---|---|---|---|---|---|"]
    for heading, part in parts.items():
        for name, default, what, unit, doc in rows(part):
            lines.append(f"| {heading} | `{name}` | {default} | {what} | {unit} | {doc} |")
    return "\n".join(lines)
