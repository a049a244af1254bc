"""The observe stream: what an engine tells the runtime about requests.

Events are plain tuples. They carry no wall time of their own: `Tick` moves the one clock, which an adapter feeds from
values that every tensor-parallel rank shares (a step counter, and a time that rank 0 took and broadcast).
What happens to the radix tree is told through `tree_view.TreeListener` instead, since it is far more frequent.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Prompt(Protocol):
    """A prompt as identity needs it: cheap stable fingerprints and comparisons, not a list that must be copied.

    Prompts of one runtime are all of one kind: `join` and `agree` take only their own.
    """

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def fingerprint(self, start: int, stop: int) -> int:
        """A stable hash of tokens [start, stop), the same on every rank and in every process; 0 <= start <= stop."""
        ...

    def token(self, at: int) -> int:
        """The token id at a position; IndexError past the end."""
        ...

    def ids(self, start: int, stop: int) -> "array[int]":
        """The token ids of [start, stop)."""
        ...

    def slice(self, start: int, stop: int) -> "Prompt":
        """A copy of [start, stop) that does not keep this prompt alive."""
        ...

    def join(self, other: Any) -> "Prompt":
        """This prompt, then the other."""
        ...

    def agree(self, other: Any, at: int) -> int:
        """How many of the first tokens of `other` stand in this prompt from position `at` on."""
        ...


class Tag(NamedTuple):
    """What a client said about its call. A hint about value, never about access."""

    agent: str | None = None
    session: str | None = None
    final: bool = False  # the session ends with this call
    next_agent: str | None = None  # the client's own forecast of the agent called next


class RequestArrived(NamedTuple):
    """A request entered the waiting queue (once per request: a retraction does not repeat it)."""

    rid: str
    prompt: Prompt
    namespace: str = ""  # extra_key, cache_salt and LoRA id joined; identities never cross it
    tag: Tag | None = None
    priority: int = 0


class PrefixMatched(NamedTuple):
    """The engine looked the prompt up for running it. Only the first match of a request is learned from."""

    rid: str
    path: Sequence[int]  # ids of the matched nodes, root excluded, shallow first
    tokens: int  # matched tokens


class RequestFinished(NamedTuple):
    """The request left the engine: finished, or aborted."""

    rid: str
    output_tokens: int = 0
    aborted: bool = False
    stopped: bool = True  # ended by a stop token rather than by its length limit


class SessionClosed(NamedTuple):
    """A client said that a session is over."""

    session: str
    namespace: str = ""


class Tick(NamedTuple):
    """The rank-agreed clock moved."""

    step: int  # scheduler steps (forward batches) so far, never decreasing
    seconds: float  # rank 0's clock; a value below the last one is ignored


Event = RequestArrived | PrefixMatched | RequestFinished | SessionClosed | Tick


class Warmup(NamedTuple):
    """An effect for the engine: prefill this agent's anchor while idle."""

    agent: int
    namespace: str
    probability: float


Effect = Warmup
