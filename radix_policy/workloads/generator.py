"""The frozen generator: group chats with known routing, ends and lengths.

Token ids: every message has ids of its own that no other session uses; anchors are shared by all sessions, and the
first TEMPLATE tokens (the chat template's) by all agents. A session's messages are numbered through, so a whole
conversation is one span.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random

from radix_policy.prompts import Span, Spans
from radix_policy.workloads.base import Call, SessionScript, make_call
from radix_policy.workloads.draws import between, pick, stream, think_gap, tokens
from radix_policy.workloads.topologies import SIX, EndLaw, Rows, uniform_turns

TEMPLATE = 10  # tokens that the chat template puts before every prompt
START_GAP = 0.5  # seconds between a slot becoming free and a session's first call
_ANCHOR_ROOM = 1 << 20  # ids per anchor


@dataclass(frozen=True)
class Scale:
    """Lengths in tokens. Anchors are uniform in [low, high]; messages have these means."""

    name: str = "plain"
    anchor_low: int = 400
    anchor_high: int = 800
    task: float = 80
    message: float = 40


PLAIN = Scale()
LARGE = Scale("large", 1000, 4000, 300, 200)


@dataclass(frozen=True)
class Group:
    """A group chat: routing, ends, lengths, times."""

    base: str  # names the random streams: variants with the same base route alike
    rows: Rows
    agents: tuple[str, ...] = SIX
    scale: Scale = PLAIN
    end: EndLaw = field(default_factory=lambda: uniform_turns(20, 28))
    first: int | None = 0  # the agent that opens a session; None: uniform
    private: bool = False  # each agent sees the task and its own messages only
    tool_probability: float = 0.3
    tool_mean: float = 2.0  # seconds
    tool_tokens: float = 0.0  # mean length of a tool's result in the conversation; 0: results are not shown
    follow_up: tuple[int, int] | None = None  # a second task message after this many turns (uniform); first agent again
    follow_up_tokens: float = 60.0


def anchor_span(agent: int, scale: Scale = PLAIN) -> Span:
    """The anchor of an agent: the draws come from one fixed seed and are the same in every workload."""
    rng = stream("anchors", 21)
    for _ in range(agent):
        rng.random()
    first = _ANCHOR_ROOM * (1 + agent + (256 if scale.name == "large" else 0))
    return (first, between(rng, scale.anchor_low, scale.anchor_high))


def content_base(*key: object) -> int:
    """The first of 2^22 token ids that belong to the session with this key alone."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=5).digest()
    return 1 << 62 | int.from_bytes(digest, "little") << 22


def group_sessions(group: Group, name: str, seed: int, count: int, start: int = 0) -> list[SessionScript]:
    """`count` sessions of the group chat, numbered from `start`."""
    anchors = [anchor_span(a, group.scale) for a in range(len(group.agents))]
    return [_session(group, anchors, name, seed, start + k) for k in range(count)]


def route(group: Group, rng: Random) -> Iterator[tuple[int, bool]]:
    """(agent, whether a follow-up task came first) of each turn of one session."""
    agents = len(group.agents)
    opener = between(rng, 0, agents - 1) if group.first is None else group.first
    again = between(rng, *group.follow_up) if group.follow_up else -1
    agent, turn, asked = opener, 1, False
    while True:
        yield agent, asked
        if rng.random() < group.end(turn, agent):
            return
        asked = turn == again
        agent = opener if asked else pick(rng, group.rows[agent])
        turn += 1


def _session(group: Group, anchors: list[Span], name: str, seed: int, number: int) -> SessionScript:
    routing, lengths, times = (stream(seed, group.base, number, part) for part in ("route", "lengths", "times"))
    base = content_base(seed, name, number)
    end = tokens(lengths, group.scale.task)  # tokens of the conversation so far
    task = (base, end)
    threads: dict[int, list[Span]] = {}
    calls: list[Call] = []
    for agent, asked in route(group, routing):
        gap, tool = think_gap(times, group.tool_probability, group.tool_mean)
        seen = threads.setdefault(agent, [task])
        at = end
        if asked:
            end += tokens(lengths, group.follow_up_tokens)
        if group.tool_tokens and tool and calls:
            end += tokens(lengths, group.tool_tokens)
        if end > at:
            seen.append((base + at, end - at))
        output = (base + end, tokens(lengths, group.scale.message))
        said: Spans = tuple(seen) if group.private else ((base, end),)
        anchor = anchors[agent]
        calls.append(
            make_call(
                group.agents[agent],
                ((0, TEMPLATE), anchor, *said),
                (output,),
                gap if calls else START_GAP,
                TEMPLATE + anchor[1],
            )
        )
        end += output[1]
        seen.append(output)
    return SessionScript(f"{name}-{seed}-{number}", tuple(calls))


def varied(group: Group, *, large: bool = False, private: bool = False) -> Group:
    """The group with the `large` lengths, or with private threads, or both."""
    if large:
        group = replace(group, scale=LARGE)
    return replace(group, private=True) if private else group
