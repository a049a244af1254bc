"""Who is calling: the agent and the session of a request.

A tag that the client sent wins. Else the agent is a fingerprint of a fixed window of the prompt, as in CacheScout
(section 4: skip the chat template, take the next blocks), and the session is unknown. Unknown is a proper answer:
it gets LRU treatment. Namespace (extra_key, cache_salt, LoRA) is part of every identity.

State is capped: agents beyond `max_agents` share the id POOLED and are not told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from radix_policy.config import key
from radix_policy.events import Prompt, Tag
from radix_policy.nodes import UNKNOWN

POOLED = 0  # every agent beyond the cap
MAX_NAME = 256  # characters of a tag that are kept; a longer name is malformed


class Identity(NamedTuple):
    """The answer: an interned agent and the session's own key, each possibly unknown."""

    agent: int  # >= 1 an agent, POOLED, or UNKNOWN
    session: str | None
    namespace: str
    tagged: bool  # the agent came from the client, not from tokens


class TagError(ValueError):
    """A tag that cannot be used; the request is served untagged."""


def parse_tag(params: Any, session_id: Any = None) -> Tag | None:
    """The tag in `custom_params` (key `scout`) and the top-level session id; None when nobody tagged.

    Unknown keys are ignored. TagError on a wrong type, an empty or an over-long name.
    """
    raw = params.get("scout") if isinstance(params, Mapping) else None
    if raw is None and session_id is None:
        return None
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise TagError(f"scout tag is {type(raw).__name__}, not an object")
    names = {name: raw.get(name) for name in ("agent", "session", "next")}
    if names["session"] is None:
        names["session"] = session_id
    for name, value in names.items():
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            names[name] = value = str(value)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            raise TagError(f"scout tag key {name!r} must be 1 to {MAX_NAME} characters of text")
    final = raw.get("final", False)
    if not isinstance(final, bool):
        raise TagError("scout tag key 'final' must be true or false")
    return Tag(names["agent"], names["session"], final, names["next"])


@dataclass(frozen=True)
class IdentityConfig:
    """Keys of the identity part."""

    fingerprint_skip: int = key(64, "prompt tokens skipped before the fingerprint window", low=0, unit="tokens")
    fingerprint_take: int = key(64, "tokens in the fingerprint window; 0 turns it off", low=0, unit="tokens")
    max_agents: int = key(64, "agents told apart; the rest share one pooled identity", low=1, high=1024, unit="agents")


class AgentTable:
    """Interns (namespace, name) to small ints in the order of first sight; state is bounded by the cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._ids: dict[tuple[str, str], int] = {}
        self._names: list[tuple[str, str]] = [("", "(pooled)")]

    def __len__(self) -> int:
        """Ids in use, POOLED included."""
        return len(self._names)

    def intern(self, namespace: str, name: str) -> int:
        """The agent's id; POOLED when the table is full and the name is new."""
        known = self._ids.get((namespace, name))
        if known is not None:
            return known
        if len(self._ids) >= self.cap:
            return POOLED
        self._ids[namespace, name] = len(self._names)
        self._names.append((namespace, name))
        return len(self._names) - 1

    def find(self, namespace: str, name: str) -> int:
        """The agent's id, or UNKNOWN when it was never seen."""
        return self._ids.get((namespace, name), UNKNOWN)

    def name(self, agent: int) -> str:
        """The name to show."""
        return "(unknown)" if agent < 0 else self._names[agent][1]

    def namespace(self, agent: int) -> str:
        """The namespace that the agent belongs to."""
        return "" if agent < 0 else self._names[agent][0]


class Identifier:
    """Resolves requests to identities. `resolve` mutates only the agent table."""

    def __init__(self, config: IdentityConfig) -> None:
        self.config = config
        self.agents = AgentTable(config.max_agents)

    def resolve(self, prompt: Prompt, namespace: str, tag: Tag | None) -> Identity:
        """The identity of one request, in O(window)."""
        session = tag.session if tag is not None else None
        if tag is not None and tag.agent is not None:
            return Identity(self.agents.intern(namespace, "tag:" + tag.agent), session, namespace, True)
        return Identity(self._fingerprint(prompt, namespace), session, namespace, False)

    def _fingerprint(self, prompt: Prompt, namespace: str) -> int:
        skip, take = self.config.fingerprint_skip, self.config.fingerprint_take
        if take == 0 or len(prompt) < skip + take:
            return UNKNOWN
        return self.agents.intern(namespace, f"prefix:{prompt.fingerprint(skip, skip + take):016x}")
