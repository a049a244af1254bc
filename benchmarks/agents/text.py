"""The six-agent travel desk as text: real prompts for a live server, routed like the generator's workloads.

A prompt is the agent's anchor as the system message, then the whole conversation of the session: the traveller's
request, and turn by turn the desk's question (user) and the answer (assistant). All agents see the same conversation,
so with token ids a prompt of turn n + 1 holds turn n's conversation and the very tokens that the model wrote.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.agents.live import LiveCall, OutOfTurn
from benchmarks.agents.roster import AGENTS, Agent
from benchmarks.agents.tasks import task
from radix_policy.workloads import SessionScript, Workload, WorkloadError, make
from radix_policy.workloads.draws import stream

TOPOLOGIES = ("pipeline", "debate", "selector", "random")
_MARKS = ("qzxMarkA", "qzxMarkB", "qzxMarkC")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """The conversation as text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens written in it become themselves."""
        ...


class ChatPieces:
    """What a chat template puts around and between messages, as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Render a conversation with marks in place of the messages, and keep what stands between the marks."""
        self._tokenizer = tokenizer
        self._system = True
        try:
            text = self._render([("system", "qzxAnchor"), *self._turns()])
        except Exception as error:
            # A template may know no system role (it raises); the anchor then opens the first user message.
            if "system" not in str(error).lower():
                raise
            self._system = False
            text = self._render(self._turns())
        parts = [text]
        for mark in _MARKS:
            before, found, after = parts.pop().partition(mark)
            if not found:
                raise WorkloadError("the model's chat template leaves messages out; use a tokenizer with a plain one")
            parts += [before, after]
        _, _, self._between, self._header = parts
        self._heads: dict[str, list[int]] = {}

    def head(self, agent: Agent) -> list[int]:
        """From the start of the prompt to where the conversation starts."""
        if agent.name not in self._heads:
            if self._system:
                text = self._render([("system", agent.anchor()), ("user", _MARKS[0])]).partition(_MARKS[0])[0]
            else:
                text = self._render([("user", f"{agent.anchor()}\n\n{_MARKS[0]}")]).partition(_MARKS[0])[0]
            self._heads[agent.name] = self._encode(text)
        return self._heads[agent.name]

    def opening(self, question: str) -> list[int]:
        """The conversation's first user message, up to where the answer starts."""
        return self._encode(question + self._header)

    def turn(self, question: str) -> list[int]:
        """From the end of an answer to the start of the next one."""
        return self._encode(self._between + question + self._header)

    def _turns(self) -> list[tuple[str, str]]:
        return [("user", _MARKS[0]), ("assistant", _MARKS[1]), ("user", _MARKS[2])]

    def _render(self, messages: list[tuple[str, str]]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class TextSession:
    """One traveller's request on its way through the desk."""

    def __init__(self, script: SessionScript, turns: Sequence[Agent], request: str, pieces: ChatPieces | None) -> None:
        """`script` gives lengths and gaps, `turns` who speaks; `pieces`: None for chat messages."""
        self.key = script.key
        self.lane = 0
        self._script, self._turns, self._request, self._pieces = script, turns, request, pieces
        self._at = 0
        self._waiting = False
        self._conversation: list[int] = []
        self._messages: list[dict[str, str]] = []

    def next_call(self) -> LiveCall | None:
        """The next call: token ids where the workload has a tokenizer, else chat messages."""
        if self._waiting:
            raise OutOfTurn(f"session {self.key}: the previous output has not been fed")
        if self._at == len(self._turns):
            return None
        agent, scripted = self._turns[self._at], self._script.calls[self._at]
        question = agent.ask if self._at else f"{self._request}\n\n{agent.ask}"
        ids: list[int] | None = None
        messages: list[dict[str, str]] | None = None
        if self._pieces is not None:
            self._conversation += self._pieces.turn(question) if self._at else self._pieces.opening(question)
            ids = self._pieces.head(agent) + self._conversation
        else:
            self._messages.append({"role": "user", "content": question})
            messages = [{"role": "system", "content": agent.anchor()}, *self._messages]
        self._at += 1
        self._waiting = True
        final = self._at == len(self._turns)
        return LiveCall(agent.name, self.key, True, scripted.output_tokens, scripted.gap, final, ids, messages)

    def feed(self, output_ids: Sequence[int] = (), text: str | None = None) -> None:
        """The model's answer: its token ids where the workload has a tokenizer, else its text."""
        if not self._waiting:
            raise OutOfTurn(f"session {self.key}: no call is waiting for an output")
        if self._pieces is None and text is None:
            raise ValueError(f"session {self.key}: chat messages need the output's text")
        self._waiting = False
        if self._pieces is not None:
            self._conversation += output_ids
        else:
            self._messages.append({"role": "assistant", "content": text or ""})


class TextWorkload:
    """Sessions of the travel desk, routed by one of TOPOLOGIES: draws, lengths and gaps are the generator's."""

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        concurrency: int | None = None,
        sessions: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """With a `tokenizer` (one that has a chat template) calls carry token ids, else chat messages."""
        if name not in TOPOLOGIES:
            raise WorkloadError(f"unknown text workload {name!r}; known: {', '.join(TOPOLOGIES)}")
        self.name = f"text:{name}"
        self.script: Workload = make(name, seed=seed, concurrency=concurrency, sessions=sessions)
        self.agents = tuple(agent.name for agent in AGENTS)
        self.seed = seed
        self._pieces = None if tokenizer is None else ChatPieces(tokenizer)

    def anchor_tokens(self) -> dict[str, int]:
        """Tokens before the conversation, by agent; empty without a tokenizer."""
        return {} if self._pieces is None else {agent.name: len(self._pieces.head(agent)) for agent in AGENTS}

    def sessions(self) -> list[TextSession]:
        """Every session, fresh, in the order in which slots take them."""
        index = {name: agent for name, agent in zip(self.script.agents, AGENTS)}
        return [
            TextSession(script, [index[c.agent] for c in script.calls], self._task(number), self._pieces)
            for number, script in enumerate(self.script.sessions)
        ]

    def _task(self, number: int) -> str:
        return task(stream(self.seed, "tasks", number))
