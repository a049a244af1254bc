"""The travellers' requests: templates with slots that a seed fills."""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any


def task(rng: Random) -> str:
    """One request."""
    words = {name: values[int(rng.random() * len(values))] for name, values in _texts()["slots"].items()}
    first = 2 + int(rng.random() * 20)
    for name, day in (("a", first), ("b", first + 2 + int(rng.random() * 5))):
        words |= {name: str(day), f"{name}th": _ordinal(day)}
    words |= {name.capitalize(): words[name][0].upper() + words[name][1:] for name in ("people", "need")}
    text: str = templates()[int(rng.random() * len(templates()))]
    return text.format(**words)


def templates() -> list[str]:
    """The requests with their slots open."""
    found: list[str] = _texts()["templates"]
    return found


def _ordinal(day: int) -> str:
    ending = "th" if 10 <= day % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


@cache
def _texts() -> Any:
    return json.loads((Path(__file__).parent / "texts" / "tasks.json").read_text(encoding="utf-8"))
