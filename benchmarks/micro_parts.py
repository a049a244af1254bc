"""Where `observe` spends its time: each step of a tagged request alone, beside an empty Python call on this machine."""

import timeit
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.micro import _PROMPT, Point, Populated, _point
from radix_policy.events import PrefixMatched, RequestFinished, Tag
from radix_policy.runtime import Request

_CALLS = 5000


def part_points(policy: str, repeats: int) -> Iterator[Point]:
    """One point per step, `op` "part"; us, the least of the repeats, the timing loop's own call taken off."""
    populated = Populated(policy, 1000)
    runtime = populated.runtime
    world = runtime.world
    runtime.policy.refresh()
    tag = Tag("agent3", "live")
    session = world.sessions.open("", "live")
    for agent in (1, 2):
        world.sessions.called(session, agent, 0.0)
        world.sessions.finished(session, 0.0)
    request = Request("r", 3, session, "", _PROMPT)
    match, end = PrefixMatched("r", (), 0), RequestFinished("r", 10)

    def matched() -> None:
        runtime.requests["r"], request.matched = request, False
        runtime.observe(match)

    def finished() -> None:
        runtime.requests["r"] = request
        runtime.observe(end)

    parts: list[tuple[str, Callable[[], Any]]] = [
        ("an empty call", lambda: _nothing()),
        ("who calls (identity)", lambda: world.identifier.resolve(_PROMPT, "", tag)),
        ("session looked up", lambda: world.sessions.open("", "live")),
        ("request record", lambda: Request("r", 3, session, "", _PROMPT)),
        ("transition counted", lambda: world.transitions.add(3, 4)),
        ("END trial counted", lambda: world.ends.called_again(2, 3, 5, 6)),
        ("gap counted", lambda: world.gaps.add(0.5)),
        ("cycle counted", lambda: world.gaps.add_cycle(0.5)),
        ("policy: step", lambda: runtime.policy.on_step(session, 3)),
        ("policy: request", lambda: runtime.policy.on_request(request)),
        ("match", matched),
        ("end", finished),
        ("session moved on", lambda: world.sessions.called(session, 3, 0.0)),
    ]
    empty = _us(lambda: None, repeats)
    for name, step in parts:
        yield _point("part", policy, populated, max(_us(step, repeats) - empty, 0.0)) | {"part": name}


def _nothing() -> None: ...


def _us(step: Callable[[], Any], repeats: int) -> float:
    return min(timeit.repeat(step, number=_CALLS, repeat=max(repeats, 3))) / _CALLS * 1e6
