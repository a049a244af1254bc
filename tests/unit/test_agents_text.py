"""Live sessions: fed outputs stand in later prompts exactly, and the travel desk's texts are what they should be."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.agents import OutOfTurn, ScriptedSession, TextSession, TextWorkload, live_sessions
from benchmarks.agents.roster import AGENTS
from benchmarks.agents.tasks import task, templates
from benchmarks.agents.text import TOPOLOGIES, ChatPieces
from radix_policy.prompts import expand
from radix_policy.workloads import SessionScript, WorkloadError, make, make_call, materialise

VOCAB, RESERVED = 5000, 10


class CharTokenizer:
    """One token per character, ChatML, or a template that knows no system role or trims what it is given."""

    def __init__(self, style: str = "chatml") -> None:
        self.style = style

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        roles = [m["role"] for m in conversation]
        if self.style == "gemma" and "system" in roles:
            raise ValueError("System role not supported")
        if self.style == "forgetful":
            conversation = conversation[-1:]
        parts = [f"<{m['role']}>\n{m['content'].strip()}<end>\n" for m in conversation]
        return "<s>" + "".join(parts) + ("<assistant>\n" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]


def play(session: ScriptedSession | TextSession, rng: random.Random, longer: int = 0) -> list[tuple[Any, list[int]]]:
    """(call, output) of a session whose model writes anything."""
    played = []
    while (call := session.next_call()) is not None:
        output = [rng.randrange(VOCAB, 2 * VOCAB) for _ in range(call.max_new_tokens + longer)]
        session.feed(output)
        played.append((call, output))
    return played


@pytest.mark.parametrize("name", ["selector", "selector:private", "swe", "gaia"])
def test_fed_outputs_stand_in_later_prompts(name: str) -> None:
    workload = make(name, seed=1, sessions=2)
    for script, session in zip(workload.sessions, live_sessions(workload, VOCAB, RESERVED)):
        written: dict[int, int] = {}
        for (call, output), scripted in zip(play(session, random.Random(1)), script.calls):
            ids = list(expand(scripted.prompt))
            plain = materialise(scripted.prompt, VOCAB, RESERVED)
            assert call.input_ids is not None and call.messages is None
            assert list(call.input_ids) == [written.get(i, t) for i, t in zip(ids, plain)]
            assert (call.agent, call.max_new_tokens, call.gap) == (scripted.agent, scripted.output_tokens, scripted.gap)
            written |= dict(zip(expand(scripted.output), output))
        assert call.final and session.next_call() is None


def test_the_next_prompt_of_an_agent_is_the_last_one_its_output_and_more() -> None:
    script = SessionScript("s", tuple(make_call("a", ((0, 30 + 20 * n),), ((30 + 20 * n, 8),), 0.0) for n in range(4)))
    session = ScriptedSession(script, VOCAB, RESERVED)
    before: list[int] = []
    for call, output in play(session, random.Random(2)):
        assert list(call.input_ids)[: len(before)] == before
        before = [*call.input_ids, *output]


def test_outputs_of_other_lengths() -> None:
    prompts = (
        make_call("a", ((0, 10),), ((10, 4), (50, 2)), 0.0),
        make_call("a", ((0, 14), (50, 2), (90, 3)), ((99, 1),), 0.0),
    )
    plain = materialise(prompts[1].prompt, VOCAB, RESERVED)
    for output in ([], [9001], [9001, 9002, 9003, 9004, 9005], list(range(9001, 9012))):
        session = ScriptedSession(SessionScript("s", prompts), VOCAB, RESERVED)
        session.next_call()
        session.feed(output)
        second = session.next_call()
        assert second is not None and second.input_ids is not None
        kept = output[:6]
        assert list(second.input_ids) == [*plain[:10], *kept, *plain[10 + len(kept) :]]


def test_prompts_can_stay_as_scripted() -> None:
    workload = make("debate", seed=1, sessions=1)
    session = live_sessions(workload, VOCAB, RESERVED, replace=False, salt=3)[0]
    for (call, _), scripted in zip(play(session, random.Random(1)), workload.sessions[0].calls):
        assert call.input_ids == materialise(scripted.prompt, VOCAB, RESERVED, salt=3)


def test_an_output_that_a_block_holds_in_part_is_replaced_in_part() -> None:
    # a later prompt holds the first five tokens of the output, then goes another way
    calls = (make_call("a", ((0, 10),), ((10, 8),), 0.0), make_call("a", ((0, 15), (70, 5)), ((80, 1),), 0.0))
    session = ScriptedSession(SessionScript("s", calls, tagged=False), VOCAB, RESERVED)
    first = session.next_call()
    assert first is not None and not first.tagged and not first.final
    session.feed(range(6000, 6008))
    second = session.next_call()
    assert second is not None and list(second.input_ids or ())[10:15] == list(range(6000, 6005))
    assert list(second.input_ids or ())[15:] == list(materialise(((70, 5),), VOCAB, RESERVED))


def test_turns_must_alternate() -> None:
    sessions: list[Any] = [live_sessions(make("selector", seed=1, sessions=1), VOCAB)[0]]
    sessions += TextWorkload("selector", seed=1, sessions=1, tokenizer=CharTokenizer()).sessions()
    for session in sessions:
        with pytest.raises(OutOfTurn):
            session.feed([1])
        session.next_call()
        with pytest.raises(OutOfTurn):
            session.next_call()


@pytest.mark.parametrize("style", ["chatml", "gemma"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_text_prompts_are_anchor_then_one_conversation(name: str, style: str) -> None:
    workload = TextWorkload(name, seed=4, sessions=3, tokenizer=CharTokenizer(style))
    heads = workload.anchor_tokens()
    for session, script in zip(workload.sessions(), workload.script.sessions):
        conversation: list[int] | None = None
        fixed: dict[str, Sequence[int]] = {}
        played = play(session, random.Random(3))
        assert [c.max_new_tokens for c, _ in played] == [c.output_tokens for c in script.calls]
        assert [c.gap for c, _ in played] == [c.gap for c in script.calls]
        order = {agent: n for n, agent in enumerate(workload.script.agents)}
        assert [c.agent for c, _ in played] == [workload.agents[order[c.agent]] for c in script.calls]
        for call, output in played:
            head, rest = list(call.input_ids)[: heads[call.agent]], list(call.input_ids)[heads[call.agent] :]
            assert fixed.setdefault(call.agent, head) == head
            if conversation is not None:
                assert rest[: len(conversation)] == conversation, "the conversation so far, and the fed output"
            conversation = rest + output
        assert [c.final for c, _ in played] == [False] * (len(played) - 1) + [True]


def test_text_prompts_read_as_the_chat_template_writes_them() -> None:
    tokenizer = CharTokenizer()
    session = TextWorkload("selector", seed=4, sessions=1, tokenizer=tokenizer).sessions()[0]
    chat = TextWorkload("selector", seed=4, sessions=1).sessions()[0]
    for _ in range(5):
        call, said = session.next_call(), chat.next_call()
        assert call is not None and said is not None and said.input_ids is None
        rendered = tokenizer.apply_chat_template(said.messages, tokenize=False, add_generation_prompt=True)
        assert "".join(map(chr, call.input_ids or ())) == rendered
        session.feed([ord(c) for c in "Fine with me."])
        chat.feed(text="Fine with me.")


def test_chat_messages_alternate_and_need_text() -> None:
    session = TextWorkload("debate", seed=1, sessions=1).sessions()[0]
    for turn in range(4):
        call = session.next_call()
        assert call is not None and call.messages is not None
        assert [m["role"] for m in call.messages] == ["system", *(["user", "assistant"] * turn), "user"]
        if turn == 0:
            with pytest.raises(ValueError, match="text"):
                session.feed([1, 2])
        session.feed(text=f"answer {turn}")
    assert call.messages[2]["content"] == "answer 0"


def test_templates_that_leave_messages_out_are_refused() -> None:
    with pytest.raises(WorkloadError, match="chat template"):
        ChatPieces(CharTokenizer("forgetful"))


def test_unknown_text_workload() -> None:
    for name in ("pipelines", "selector:private", "swe"):
        with pytest.raises(WorkloadError, match="known: pipeline, debate, selector, random"):
            TextWorkload(name, seed=1)


def test_text_sessions_are_the_same_each_time_and_differ_from_each_other() -> None:
    def first_prompts(seed: int) -> list[list[int]]:
        workload = TextWorkload("pipeline", seed=seed, sessions=20, tokenizer=CharTokenizer())
        return [list(s.next_call().input_ids) for s in workload.sessions()]  # type: ignore[union-attr, arg-type]

    assert first_prompts(1) == first_prompts(1)
    assert first_prompts(1) != first_prompts(2)
    assert len({tuple(p) for p in first_prompts(1)}) == 20


def test_agents_have_prompts_tools_and_examples() -> None:
    assert [a.name for a in AGENTS] == ["Planner", "Travel", "Hotel", "Restaurant", "Critic", "Summarizer"]
    anchors = [a.anchor() for a in AGENTS]
    # 482 to 765 tokens with a BPE of 65,000 tokens, which takes 3.7 to 4.1 characters per token here
    assert all(1600 <= len(text) <= 3200 for text in anchors)
    assert len({text[:40] for text in anchors}) == 6
    for agent, text in zip(AGENTS, anchors):
        assert text.startswith(f"You are {agent.name}") or text.startswith(f"You are the {agent.name}")
        assert "# Tools" in text and "# Examples" in text and "{tools}" not in text
        names = set()
        for tool in agent.tools:
            assert json.dumps(tool, separators=(",", ":")) in text
            parameters: Any = tool["parameters"]
            assert set(parameters["required"]) <= set(parameters["properties"])
            names.add(tool["name"])
        used = [json.loads(line) for line in text.splitlines() if line.startswith('{"name":') and '"arguments"' in line]
        assert used, "at least one example calls a tool"
        for call in used:
            schema: Any = next(t for t in agent.tools if t["name"] == call["name"])["parameters"]
            assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])


def test_requests_fill_their_slots() -> None:
    assert len(templates()) >= 12 and len(set(templates())) == len(templates())
    requests = [task(random.Random(n)) for n in range(400)]
    assert all("{" not in r and "}" not in r for r in requests)
    assert all(80 <= len(r) <= 500 for r in requests)
    assert len(set(requests)) > 390
    assert not [r for r in requests for bad in ("1th ", "2th ", "3th ") if f" {bad}" in r]
