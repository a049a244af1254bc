"""Sessions as a live client plays them: it asks for the next call, sends it, and feeds back what the model wrote.

while (call := session.next_call()) is not None:
    ...wait call.gap seconds, send call.input_ids or call.messages with max_new_tokens and ignore_eos...
    session.feed(output_ids, text)
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from radix_policy.workloads import SessionScript, Workload, materialise


@dataclass(frozen=True, slots=True)
class LiveCall:
    """One call to send. Exactly one of `input_ids` and `messages` is set."""

    agent: str  # "" for anonymous traffic
    session: str
    tagged: bool  # whether a client that tags would tag it
    max_new_tokens: int  # to be forced with ignore_eos
    gap: float  # seconds to wait before sending it
    final: bool  # the session's last call
    input_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None


class LiveSession(Protocol):
    """What the client needs of a session, scripted or text."""

    @property
    def key(self) -> str:
        """The session's name."""
        ...

    @property
    def lane(self) -> int:
        """Which slots play it (radix_policy.workloads.base)."""
        ...

    def next_call(self) -> LiveCall | None:
        """The call to send now; None when the session is over. Each call must be fed before the next is asked for."""
        ...

    def feed(self, output_ids: Sequence[int] = (), text: str | None = None) -> None:
        """What the model wrote in answer to the last call."""
        ...


class OutOfTurn(RuntimeError):
    """A client asked for a call before it fed the previous output, or fed an output that nobody asked for."""


class ScriptedSession:
    """A script of spans as token ids for an engine.

    The script says which tokens of later prompts are an earlier output, and the engine writes what it likes there. So
    by default the fed tokens take the place of the script's in every later prompt of the session, one by one in order,
    and a later prompt reuses the output exactly as far as the script says. An output shorter than its script keeps the
    script's tokens at its end; what is longer is dropped. With `replace=False` prompts stay as scripted, the same for
    every model.
    """

    def __init__(
        self, script: SessionScript, vocab: int, reserved: int = 0, *, salt: int = 0, replace: bool = True
    ) -> None:
        """Ids are in [reserved, vocab); see `materialise`."""
        self.script = script
        self.key = script.key
        self.lane = script.lane
        self._vocab, self._reserved, self._salt, self._replace = vocab, reserved, salt, replace
        self._at = 0
        self._waiting = False
        self._written: list[tuple[int, array[int]]] = []  # (first span id, the tokens that stand there), in order

    def next_call(self) -> LiveCall | None:
        """The next call, with its prompt as token ids."""
        if self._waiting:
            raise OutOfTurn(f"session {self.key}: the previous output has not been fed")
        if self._at == len(self.script.calls):
            return None
        call = self.script.calls[self._at]
        self._at += 1
        self._waiting = True
        return LiveCall(
            call.agent,
            self.key,
            self.script.tagged,
            call.output_tokens,
            call.gap,
            self._at == len(self.script.calls),
            input_ids=self._prompt(call.prompt),
        )

    def feed(self, output_ids: Sequence[int] = (), text: str | None = None) -> None:
        """The output's token ids; `text` is not needed."""
        if not self._waiting:
            raise OutOfTurn(f"session {self.key}: no call is waiting for an output")
        self._waiting = False
        at = 0
        for first, count in self.script.calls[self._at - 1].output if self._replace else ():
            if part := output_ids[at : at + count]:
                self._written.append((first, array("q", part)))
            at += count

    def _prompt(self, spans: Sequence[tuple[int, int]]) -> "array[int]":
        ids = materialise(spans, self._vocab, self._reserved, self._salt)
        at = 0
        for first, count in spans:
            for start, tokens in self._written:
                low, high = max(first, start), min(first + count, start + len(tokens))
                if low < high:
                    ids[at + low - first : at + high - first] = tokens[low - start : high - start]
            at += count
        return ids


def live_sessions(
    workload: Workload, vocab: int, reserved: int = 0, *, salt: int = 0, replace: bool = True
) -> list[ScriptedSession]:
    """Every session of the workload, fresh, in the order in which slots take them."""
    return [ScriptedSession(s, vocab, reserved, salt=salt, replace=replace) for s in workload.sessions]
