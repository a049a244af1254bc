"""Agents and sessions from tokens: made-up conversations of every shape that has to be told apart."""

import hashlib
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.identity import Score, b_cubed
from radix_policy.anchors import LEARNED
from radix_policy.events import Tag
from radix_policy.identity import Identifier, Identity, IdentityConfig
from radix_policy.nodes import UNKNOWN
from radix_policy.prefix_tree import Node
from radix_policy.prompts import SpanPrompt, TokenPrompt

Call = tuple[int, int, list[int]]  # session, agent, prompt


class Text:
    """Seeded text: `words` repeat as words of a language do, `rare` never do."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def words(self, n: int) -> list[int]:
        return [1000 + min(1999, int(self.rng.paretovariate(0.7))) for _ in range(n)]

    def rare(self, n: int) -> list[int]:
        return [1_000_000 + self.rng.randrange(1_000_000) for _ in range(n)]


@dataclass
class Shape:
    """How a team of agents talks."""

    agents: int = 6
    template: int = 10
    anchor: tuple[int, int] = (400, 800)
    anchors: list[list[int]] = field(default_factory=list)  # instead
    task: tuple[int, int] = (15, 120)
    openings: list[list[int]] = field(default_factory=list)  # how tasks begin
    shared: bool = True  # everybody sees the whole conversation
    end: int = 0  # tokens of a fixed instruction at the end of every prompt
    inserted: int = 0  # tokens put in behind the task, in every other call
    turns: tuple[int, int] = (8, 20)


def team(seed: int, shape: Shape, sessions: int = 40, slots: int = 4) -> list[Call]:
    """The calls of `sessions` sessions, `slots` of them at a time, in the order of a busy server."""
    text = Text(seed)
    rng = text.rng
    template, generation = text.rare(shape.template), text.rare(4)
    anchors = shape.anchors or [text.rare(rng.randint(*shape.anchor)) for _ in range(shape.agents)]
    ends = [text.rare(shape.end) for _ in anchors]
    calls: list[Call] = []

    def play(session: int) -> Any:
        task = (rng.choice(shape.openings) if shape.openings else []) + text.words(rng.randint(*shape.task))
        seen: list[list[int]] = [[] for _ in anchors]
        agent = 0
        for turn in range(rng.randint(*shape.turns)):
            inserted = text.rare(shape.inserted) if turn % 2 else []
            body = task + inserted + seen[agent] + ends[agent]
            calls.append((session, agent, template + anchors[agent] + body + generation))
            message = text.rare(3) + text.words(rng.randint(10, 60))
            for who in range(len(anchors)) if shape.shared else (agent,):
                seen[who] = seen[who] + message
            agent = (agent + 1) % len(anchors) if rng.random() < 0.8 else rng.randrange(len(anchors))
            yield

    waiting = list(range(sessions))
    live = [play(waiting.pop(0)) for _ in range(min(slots, sessions))]
    while live:
        at = rng.randrange(len(live))
        if next(live[at], "over") == "over":
            live[at : at + 1] = [play(waiting.pop(0))] if waiting else []
    return calls


def identify(calls: Sequence[Call], identifier: Identifier | None = None, namespace: str = "") -> list[Identity]:
    """The identity of every call."""
    identifier = identifier or Identifier(IdentityConfig())
    return [identifier.resolve(TokenPrompt(array("q", prompt)), namespace, None) for _, _, prompt in calls]


def scores(calls: Sequence[Call], found: Sequence[Identity], skip: float = 0.25) -> tuple[Score, Score]:
    """Agents and sessions, the first quarter (cold start) left out."""
    first = int(skip * len(calls))
    agents = b_cubed([i.agent if i.agent > 0 else None for i in found[first:]], [c[1] for c in calls[first:]])
    sessions = b_cubed([i.session for i in found[first:]], [c[0] for c in calls[first:]])
    return agents, sessions


LONG = Text(99).rare(500)
SHAPES = {
    "group chat": Shape(),
    "private threads": Shape(shared=False),
    "long template": Shape(template=300),
    "no template": Shape(template=0),
    "anchors of 14 tokens": Shape(anchor=(14, 14)),
    "one agent": Shape(agents=1),
    "24 agents": Shape(agents=24, turns=(40, 60)),
    "rewritten ends": Shape(end=70, task=(10, 40)),
    "short anchors, rewritten ends": Shape(anchor=(14, 14), end=70),
    "short tasks": Shape(task=(4, 12)),
    "anchors with a long beginning in common": Shape(
        anchors=[LONG + Text(1).rare(300), LONG + Text(2).rare(300), Text(3).rare(300), LONG + Text(4).rare(20)]
    ),
    "tasks that begin with the same few words": Shape(agents=3, openings=[[5], [5, 6], [5, 6, 7, 8], [9]]),
    "tasks that begin with one of two sentences": Shape(
        agents=3, openings=[list(range(50, 62)), list(range(80, 92)), [1]]
    ),
    "text put in behind the task": Shape(agents=5, inserted=30, task=(40, 120)),
}
SESSION_RECALL = {"private threads": 0.8, "text put in behind the task": 0.7, "short tasks": 0.85}


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_agents_and_sessions_of_a_team_are_told_apart(name: str, slots: int) -> None:
    calls = team(1, SHAPES[name], slots=slots)
    agents, sessions = scores(calls, identify(calls))
    assert agents.precision >= 0.97 and agents.recall >= 0.9, agents
    assert sessions.precision >= 0.97 and sessions.recall >= SESSION_RECALL.get(name, 0.95), sessions


def test_the_anchor_is_where_the_task_begins() -> None:
    shape = Shape(anchors=[Text(i).rare(100 * (i + 1)) for i in range(4)])
    calls = team(5, shape)
    identifier = Identifier(IdentityConfig())
    found = identify(calls, identifier)
    late = [(c[1], i) for c, i in zip(calls, found)][len(calls) // 3 :]
    exact = [i.anchor_tokens == 10 + len(shape.anchors[agent]) for agent, i in late]
    assert sum(exact) >= 0.97 * len(exact)
    for agent, identity in late[-20:]:
        prompt = identifier.anchor(identity.agent)
        assert prompt is not None and list(prompt.ids(10, len(prompt))) == shape.anchors[agent]
    assert identifier.anchor(UNKNOWN) is None and identifier.anchor(9999) is None


def test_planner_and_coder_of_one_group_chat_are_one_session() -> None:
    calls = team(2, Shape(agents=2), slots=8)
    found = identify(calls)
    by_session: dict[int, set[str | None]] = {}
    for (session, _, _), identity in list(zip(calls, found))[len(calls) // 3 :]:
        by_session.setdefault(session, set()).add(identity.session)
    whole = [keys for session, keys in by_session.items() if session > 20]
    assert whole and all(len(keys) == 1 for keys in whole)


def talk(anchor: list[int], task: list[int], text: Text, turns: int) -> list[list[int]]:
    """Prompts of one agent's append-only session."""
    prompts, body = [], list(task)
    for _ in range(turns):
        prompts.append(anchor + body + [1, 2, 3])
        body = body + text.rare(40)
    return prompts


def test_the_same_task_again_is_a_new_session() -> None:
    text = Text(7)
    anchor, task = text.rare(300), text.rare(100)
    identifier = Identifier(IdentityConfig())

    def sessions(prompts: list[list[int]]) -> list[str | None]:
        return [identifier.resolve(TokenPrompt(array("q", p)), "", None).session for p in prompts]

    for _ in range(12):
        sessions(talk(anchor, text.rare(80), text, 4))
    first = sessions(talk(anchor, task, text, 5))
    second = sessions(talk(anchor, task, text, 5))
    assert len(set(first)) == 1 and len(set(second)) == 1 and set(first) != set(second)
    # two at a time: each goes on with its own words
    left, right = talk(anchor, task, text, 6), talk(anchor, task, text, 6)
    for session in (sessions(left[:2]), sessions(right[:2])):
        assert len(set(session)) == 1
    keys = [(sessions([p])[0], sessions([q])[0]) for p, q in zip(left[2:], right[2:])]
    assert len(set(keys)) == 1 and keys[0][0] != keys[0][1]


def test_tasks_that_share_a_paragraph_are_two_sessions() -> None:
    text = Text(8)
    anchor, paragraph = text.rare(300), text.rare(40)
    identifier = Identifier(IdentityConfig())
    for _ in range(12):
        for prompt in talk(anchor, text.rare(80), text, 4):
            identifier.resolve(TokenPrompt(array("q", prompt)), "", None)
    keys = []
    for _ in range(2):
        prompts = talk(anchor, paragraph + text.rare(60), text, 4)
        keys.append({identifier.resolve(TokenPrompt(array("q", p)), "", None).session for p in prompts})
    assert len(keys[0]) == len(keys[1]) == 1 and keys[0] != keys[1]


def test_an_agents_id_stays_when_its_branch_point_is_found_to_lie_higher_up() -> None:
    text = Text(3)
    anchor, opening = text.rare(200), text.rare(50)
    identifier = Identifier(IdentityConfig())

    def agent(task: list[int]) -> Identity:
        return identifier.resolve(TokenPrompt(array("q", anchor + task)), "", None)

    early = [agent(opening + text.rare(60)) for _ in range(6)]  # so far all tasks begin alike
    assert early[-1].anchor_tokens == 250 and early[-1].agent > 0
    later = [agent(text.rare(100)) for _ in range(12)]
    assert later[-1].anchor_tokens == 200
    assert later[-1].agent == early[-1].agent == agent(opening + text.rare(60)).agent
    assert len(identifier.agents) == 2


def test_a_template_taken_for_an_agent_gives_way_and_merges_are_recorded() -> None:
    text = Text(4)
    anchor = text.rare(200)
    identifier = Identifier(IdentityConfig())
    openings = [text.rare(50) for _ in range(2)]
    first = [
        identifier.resolve(TokenPrompt(array("q", anchor + opening + text.rare(60))), "", None).agent
        for opening in openings
        for _ in range(5)
    ]
    assert first[4] > 0 and first[9] > 0 and first[4] != first[9]  # two agents, as far as one knows
    for _ in range(40):
        last = identifier.resolve(TokenPrompt(array("q", anchor + text.rare(60))), "", None)
    again = [
        identifier.resolve(TokenPrompt(array("q", anchor + opening + text.rare(60))), "", None).agent
        for opening in openings
    ]
    assert again == [last.agent, last.agent]
    assert {identifier.canonical(a) for a in (first[4], first[9])} == {last.agent}


def test_a_new_version_of_a_prompt_is_a_new_agent_and_leaves_the_others_alone() -> None:
    text = Text(11)
    shape = Shape(agents=4, anchors=[text.rare(300) for _ in range(4)])
    changed = Shape(anchors=[shape.anchors[0][:150] + text.rare(150), *shape.anchors[1:]])
    identifier = Identifier(IdentityConfig())
    before = team(12, shape, sessions=20)
    ids = {a: i.agent for (_, a, _), i in zip(before, identify(before, identifier))}
    after = [(s, a, before[0][2][:10] + p[10:]) for s, a, p in team(13, changed, sessions=20)]
    late = list(zip(after, identify(after, identifier)))[len(after) // 2 :]
    new = {i.agent for (_, a, _), i in late if a == 0}
    assert len(new) == 1 and new.isdisjoint(ids.values())
    assert all(i.agent == ids[a] for (_, a, _), i in late if a)


def test_anonymous_chat_is_harmless() -> None:
    """No template in common: nobody is an agent. With one: one agent at most, and sessions stay apart."""
    text = Text(21)
    for template in ([], text.rare(200)):
        identifier = Identifier(IdentityConfig())
        calls: list[Call] = []
        for session in range(300):
            calls += [(session, 0, p) for p in talk(template, text.rare(60), text, text.rng.choice((1, 1, 2, 3)))]
        text.rng.shuffle(calls)
        calls.sort(key=lambda call: len(call[2]))  # turns of many sessions mixed, each session in order
        found = identify(calls, identifier)
        sessions = b_cubed([i.session for i in found], [c[0] for c in calls])
        assert len(identifier.agents) - 1 <= bool(template)
        assert sessions.precision > 0.99 and sessions.recall > 0.99


def test_agents_are_learned_amid_anonymous_traffic() -> None:
    calls = team(31, Shape(), sessions=80)
    text = Text(32)
    template = calls[0][2][:10]
    mixed = [c for call in calls for c in (call, (-1, -1, template + text.rare(text.rng.randint(100, 400))))]
    found = identify(mixed)
    pairs = [(c, i) for c, i in zip(mixed, found) if c[1] >= 0]
    agents, sessions = scores([c for c, _ in pairs], [i for _, i in pairs], skip=0.4)
    assert agents.precision >= 0.97 and agents.recall >= 0.95, agents
    assert sessions.precision >= 0.97 and sessions.recall >= 0.95, sessions


def test_tokens_and_spans_give_the_same_identities() -> None:
    calls = team(41, Shape(agents=3), sessions=12)

    def spans(prompt: list[int]) -> SpanPrompt:
        cut: list[tuple[int, int]] = []
        for token in prompt:
            if cut and cut[-1][0] + cut[-1][1] == token:
                cut[-1] = (cut[-1][0], cut[-1][1] + 1)
            else:
                cut.append((token, 1))
        return SpanPrompt(tuple(cut))

    tokens, runs, lists = (Identifier(IdentityConfig()) for _ in range(3))
    for _, _, prompt in calls:
        one = tokens.resolve(TokenPrompt(array("q", prompt)), "", None)
        assert runs.resolve(spans(prompt), "", None)[:4] == one[:4]
        assert lists.resolve(TokenPrompt(prompt), "", None) == one


def test_every_rank_finds_the_same() -> None:
    code = (
        "import sys, random; from radix_policy.identity import *; from radix_policy.prompts import *\n"
        "r = random.Random(3); i = Identifier(IdentityConfig(identity_threads=64)); base = [r.randrange(99) "
        "for _ in range(300)]\n"
        "for _ in range(600):\n"
        "    n = r.choice((20, 60, 200)); p = base[:n] + [r.randrange(4) for _ in range(r.randrange(90))] + [7]\n"
        "    print(i.resolve(TokenPrompt(p), r.choice('ab'), None))\n"
    )
    outs = {
        hashlib.sha256(
            subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
            ).stdout
        ).hexdigest()
        for seed in ("1", "2")
    }
    assert len(outs) == 1


def test_namespaces_share_nothing() -> None:
    calls = team(51, Shape(agents=2), sessions=12)
    identifier = Identifier(IdentityConfig())
    left, right = identify(calls, identifier, "a"), identify(calls, identifier, "b")
    assert {i.agent for i in left if i.agent > 0}.isdisjoint(i.agent for i in right if i.agent > 0)
    assert {i.session for i in left}.isdisjoint(i.session for i in right)
    assert [i.anchor_tokens for i in left] == [i.anchor_tokens for i in right]


def test_tags_and_tokens_complete_each_other() -> None:
    calls = team(61, Shape(agents=3), sessions=30)
    identifier = Identifier(IdentityConfig())
    tagged = [identifier.resolve(TokenPrompt(array("q", p)), "", Tag(f"agent {a}", None)) for _, a, p in calls]
    assert all(i.tagged and identifier.agents.name(i.agent) == f"tag:agent {a}" for (_, a, _), i in zip(calls, tagged))
    assert scores(calls, tagged)[1].recall > 0.95
    # the anchors took the names that clients gave, so that an untagged call of the same agent is known by it
    assert len(identifier.agents) == 4
    _, agent, prompt = calls[-1]
    untagged = identifier.resolve(TokenPrompt(array("q", prompt)), "", None)
    assert identifier.agents.name(untagged.agent) == f"tag:agent {agent}" and not untagged.tagged
    assert identifier.anchor(untagged.agent) is not None
    # the other way round
    other = Identifier(IdentityConfig())
    named = [other.resolve(TokenPrompt(array("q", p)), "", Tag(None, f"s{s}")) for s, _, p in calls]
    assert all(i.session == f"s{s}" and not i.tagged for (s, _, _), i in zip(calls, named))
    assert scores(calls, named)[0].recall > 0.95


@pytest.mark.parametrize("mode", ["tags", "window", "off"])
def test_modes_that_learn_nothing(mode: str) -> None:
    calls = team(71, Shape(), sessions=6)
    identifier = Identifier(IdentityConfig(identity=mode))
    found = identify(calls, identifier)
    assert {i.session for i in found} == {None} and len(identifier.anchors) == 0
    assert ({i.agent for i in found} == {UNKNOWN}) == (mode != "window")
    tagged = identifier.resolve(TokenPrompt([1, 2, 3]), "", Tag("a", "s"))
    assert (tagged.agent > 0, tagged.session) == ((False, None) if mode == "off" else (True, "s"))


# ---- bounds ----


def audit(identifier: Identifier) -> None:
    """Everything that the forest counts, counted again."""
    forest = identifier.anchors
    leaves: list[Node] = []
    tokens = 0
    for namespace, root in forest._roots.items():
        assert root.kids and forest._spaces[root.seq] == namespace
        todo = [root]
        while todo:
            node = todo.pop()
            for first, kid in node.kids.items():
                assert kid.parent is node and kid.edge is not None and kid.edge.token(0) == first
                assert kid.end == node.end + len(kid.edge) <= forest.window
                tokens += len(kid.edge)
            assert node.recent is None or node.recent in node.kids.values()
            assert node.inside == (node.agent is not None) + sum(k.inside for k in node.kids.values())
            assert node.agent is None or node in forest._holders[node.agent]
            assert len(node.threads) <= 4 and (not node.kids or node.edge is None or len(node.kids) >= 1)
            if not node.kids:
                leaves.append(node)
            todo += node.kids.values()
    assert {n.seq for n in leaves} == set(forest._leaves)
    assert tokens == forest.tokens and len(leaves) <= forest.max_leaves
    assert sum(len(h) for h in forest._holders.values()) == sum(r.inside for r in forest._roots.values())


prompts = st.lists(
    st.tuples(
        st.integers(0, 40),  # how much of a common beginning
        st.lists(st.integers(0, 2), max_size=30),
        st.sampled_from(["", "x"]),
        st.sampled_from([None, Tag("a", None), Tag(None, "s"), Tag("b", "t")]),
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(2, 4), st.integers(16, 40))
def test_whatever_comes_the_books_are_right(given_prompts: Any, forks: int, threads: int) -> None:
    identifier = Identifier(
        IdentityConfig(anchor_forks=forks, anchor_window=64, session_window=16, identity_threads=threads, max_agents=4)
    )
    for common, rest, namespace, tag in given_prompts:
        identity = identifier.resolve(TokenPrompt(list(range(100, 100 + common)) + rest), namespace, tag)
        assert (identity.anchor_tokens <= common + len(rest) and 0 <= identity.agent <= 4) or identity.agent == UNKNOWN
        audit(identifier)
    assert len(identifier.agents) <= 5


def crowd(n: int, identifier: Identifier, namespaces: bool = False) -> None:
    text = Text(81)
    template = text.rare(10)
    for i in range(n):
        prompt = TokenPrompt(array("q", (template if i % 2 else []) + text.rare(120)))
        identifier.resolve(prompt, f"n{i}" if namespaces else "", None)


@pytest.mark.parametrize("namespaces", [False, True])
def test_one_off_agents_do_not_pile_up(namespaces: bool) -> None:
    identifier = Identifier(IdentityConfig(identity_threads=256))
    crowd(5000, identifier, namespaces)
    audit(identifier)
    forest = identifier.anchors
    assert len(forest) <= 256 and forest.tokens <= forest.budget + forest.window
    assert len(identifier.agents) <= 3
    assert len(identifier._sessions._runs) <= 4 * 256


@pytest.mark.slow
def test_four_hundred_thousand_one_off_agents_do_not_pile_up() -> None:
    import resource

    identifier = Identifier(IdentityConfig())
    crowd(50_000, identifier)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crowd(350_000, identifier)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(identifier.anchors) <= 4096 and grown_kib < 32 * 1024
    audit(identifier)


def test_learned_agents_beyond_the_cap_take_the_ids_of_forgotten_ones() -> None:
    identifier = Identifier(IdentityConfig(max_agents=4, identity_threads=64))
    text = Text(91)
    for version in range(30):
        anchor = text.rare(100)
        for _ in range(60):
            last = identifier.resolve(TokenPrompt(array("q", anchor + text.rare(50))), "", None)
        assert 1 <= last.agent <= 4, version
        assert identifier.agents.name(last.agent).startswith(LEARNED)
    assert len(identifier.agents) <= 5
    audit(identifier)


def test_a_prompt_that_ever_branches_one_token_later_stays_cheap_and_legal() -> None:
    identifier = Identifier(IdentityConfig(identity_threads=4096))
    for depths in (range(1, 3000), range(6000, 3000, -1)):
        for depth in depths:
            identifier.resolve(TokenPrompt(array("q", [5] * depth + [9, depth, 1, 2, 3])), "", None)
    audit(identifier)


@pytest.mark.parametrize("prompt", [[], [1], [1] * 100_000])
def test_odd_prompts(prompt: list[int]) -> None:
    identifier = Identifier(IdentityConfig())
    found = {identifier.resolve(TokenPrompt(array("q", prompt)), "", None) for _ in range(50)}
    assert {i.agent for i in found} == {UNKNOWN} and len(found) <= 2
    audit(identifier)
