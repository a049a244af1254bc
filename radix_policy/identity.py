"""Who is calling: the agent and the session of a request.

A tag that the client sent wins. What it leaves open is learned from tokens: the agent from where prompts of different
sessions part (radix_policy.anchors), the session from what the prompt continues (radix_policy.lineage). Unknown is a
proper answer: it gets LRU treatment. Namespace (extra_key, cache_salt, LoRA) is part of every identity.

State is capped: agents beyond `max_agents` share the id POOLED and are not told apart; a learned agent whose anchor
was forgotten leaves its id to a new one. Per kept prompt (`identity_threads`, 4,096 by default) there are at most one
leaf, 4 threads with 64 + 48 tokens each, 4 runs of the session index, and on average 256 tokens: about 30 MB in all,
whatever comes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from radix_policy.anchors import LEARNED, AnchorForest
from radix_policy.config import key
from radix_policy.events import Prompt, Tag
from radix_policy.lineage import Sessions
from radix_policy.nodes import UNKNOWN
from radix_policy.prefix_tree import Node

POOLED = 0  # every agent beyond the cap
MAX_NAME = 256  # characters of a tag that are kept; a longer name is malformed


class Identity(NamedTuple):
    """The answer: an interned agent and the session's own key, each possibly unknown."""

    agent: int  # >= 1 an agent, POOLED, or UNKNOWN
    session: str | None
    namespace: str
    tagged: bool  # the agent came from the client, not from tokens
    anchor_tokens: int = 0  # tokens at the start of the prompt that are the learned anchor's; 0: none is known


_identity = tuple.__new__  # Identity(...) at a third of its cost, for the call that every tagged request makes


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

    identity: str = key(
        "learned",
        "who is calling: tags and what tokens tell (learned), tags and a fixed window as in CacheScout (window), "
        "tags alone (tags), nobody (off)",
        choices=("learned", "window", "tags", "off"),
    )
    anchor_forks: int = key(
        3, "different continuations that make a shared prefix an agent's anchor", low=2, high=1024, unit="sessions"
    )
    anchor_window: int = key(
        32768, "start of a prompt in which anchors are looked for", low=64, high=1048576, unit="tokens"
    )
    session_window: int = key(
        64, "tokens behind an anchor that are kept to tell its sessions apart", low=16, high=4096, unit="tokens"
    )
    identity_threads: int = key(
        4096, "recent prompts kept apart while learning; the oldest go first", low=16, high=1048576, unit="prompts"
    )
    fingerprint_skip: int = key(
        64, "identity window: prompt tokens skipped before the fingerprint", low=0, unit="tokens"
    )
    fingerprint_take: int = key(64, "identity window: tokens in the fingerprint; 0: no agent", low=0, unit="tokens")
    max_agents: int = key(64, "agents told apart; the rest share one pooled identity", low=1, high=1024, unit="agents")


class AgentTable:
    """Interns (namespace, name) to small ints in the order of first sight; state is bounded by the cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._ids: dict[tuple[str, str], int] = {}
        self._names: list[tuple[str, str]] = [("", "(pooled)")]
        self._free: dict[int, None] = {}  # ids whose agent is forgotten, the one forgotten first in front
        self.handed_on: list[int] = []  # ids that went to another agent; whoever reads it clears it

    def __len__(self) -> int:
        """Ids in use, POOLED included."""
        return len(self._names)

    def intern(self, namespace: str, name: str) -> int:
        """The agent's id; POOLED when the table is full, nobody in it is forgotten and the name is new."""
        known = self._ids.get((namespace, name))
        if known is not None:
            if self._free:
                self._free.pop(known, None)
            return known
        if len(self._ids) >= self.cap:
            if not self._free:
                return POOLED
            agent = next(iter(self._free))
            del self._free[agent]
            del self._ids[self._names[agent]]
            self._ids[namespace, name], self._names[agent] = agent, (namespace, name)
            self.handed_on.append(agent)
            return agent
        self._ids[namespace, name] = len(self._names)
        self._names.append((namespace, name))
        return len(self._names) - 1

    @property
    def vacant(self) -> bool:
        """Whether a new name would get an id of its own."""
        return len(self._ids) < self.cap or bool(self._free)

    def release(self, agent: int) -> None:
        """A learned agent is forgotten: another may have its id once the table is full."""
        if agent > POOLED and self._names[agent][1].startswith(LEARNED):
            self._free[agent] = None

    def find(self, namespace: str, name: str) -> int:
        """The agent's id, or UNKNOWN when it was never seen."""
        return self._ids.get((namespace, name), UNKNOWN)

    def name(self, agent: int) -> str:
        """The name to show."""
        return "(unknown)" if agent < 0 else self._names[agent][1]

    def namespace(self, agent: int) -> str:
        """The namespace that the agent belongs to."""
        return "" if agent < 0 else self._names[agent][0]


_LESSONS = 32
_LESSON_EVERY = 64
_TOKENS_PER_THREAD = 256  # tokens kept at most, on average over all threads


class Identifier:
    """Resolves requests to identities. What it knows is changed by `resolve` alone."""

    def __init__(self, config: IdentityConfig) -> None:
        self.config = config
        self.agents = AgentTable(config.max_agents)
        self.anchors = AnchorForest(
            self.agents,
            window=config.anchor_window,
            forks=config.anchor_forks,
            tail=config.session_window,
            leaves=config.identity_threads,
            budget=max(config.identity_threads * _TOKENS_PER_THREAD, 4 * config.anchor_window),
        )
        self._anchor_of: dict[int, Node] = {}  # by agent: at most max_agents and POOLED
        self._lessons: dict[int, tuple[int, str]] = {}  # by agent without an anchor: walks, and the last one's session
        self._skipped = 0
        self._tagged: dict[tuple[str, str], int] = {}  # agents by namespace and tag: such an id is never given back
        self._sessions = Sessions(self.anchors, 4 * config.identity_threads)

    def resolve(self, prompt: Prompt, namespace: str, tag: Tag | None) -> Identity:
        """The identity of one request. A prompt costs O(anchor_window) at most, and is learned from."""
        mode = self.config.identity
        if tag is not None and mode == "learned" and tag.agent is not None and tag.session is not None:
            # all is said: the call of nearly every client that tags
            name = (namespace, tag.agent)
            agent = self._tagged.get(name, POOLED)
            if agent == POOLED:
                agent = self.agents.intern(namespace, "tag:" + tag.agent)
                if agent > POOLED:
                    self._tagged[name] = agent
            if agent > POOLED and not self._teaches(agent, tag.session):
                known = self._anchor_of.get(agent)
                end = known.end if known is not None and known.end <= len(prompt) else 0
                return _identity(Identity, (agent, tag.session, namespace, True, end))
            return self._learn(prompt, namespace, agent, tag.session, True)
        if mode == "off":
            return Identity(UNKNOWN, None, namespace, False)
        agent, tagged = UNKNOWN, False
        session: str | None = None
        if tag is not None:
            session = tag.session
            if tag.agent is not None:
                agent, tagged = self.agents.intern(namespace, "tag:" + tag.agent), True
        if mode == "window" and not tagged:
            agent = self._fingerprint(prompt, namespace)
        if mode != "learned":
            return Identity(agent, session, namespace, tagged)
        return self._learn(prompt, namespace, agent, session, tagged)

    def _learn(self, prompt: Prompt, namespace: str, agent: int, session: str | None, tagged: bool) -> Identity:
        """Complete what was said with what the tokens tell, and learn from them."""
        if len(prompt) == 0:
            return Identity(agent, session, namespace, tagged)
        landing = self.anchors.walk(prompt, namespace, agent if agent > POOLED else None)
        anchor = landing.anchor
        if anchor is not None and anchor.agent is not None:
            agent = agent if tagged else anchor.agent
            self._anchor_of[agent] = anchor
        if session is None:
            who = agent if agent > POOLED or anchor is None else -anchor.seq
            session = self._sessions.resolve(prompt, namespace, landing, who)
        return Identity(agent, session, namespace, tagged, anchor.end if anchor is not None else 0)

    def _teaches(self, agent: int, session: str) -> bool:
        """Whether a call that tells all should still be walked, for the anchors' sake: it is not needed for identity.

        Up to 32 times while the agent's anchor is unknown, when another session calls it than last time; and every
        64th call of all.
        """
        lessons, caller = self._lessons.get(agent, (0, ""))
        if agent in self._anchor_of or lessons >= _LESSONS:
            self._skipped += 1
            return self._skipped % _LESSON_EVERY == 0
        if caller == session:
            return False
        self._lessons[agent] = (lessons + 1, session)
        return True

    def anchor(self, agent: int) -> Prompt | None:
        """The tokens of the agent's learned anchor (part of every prompt of it), or None while there is none."""
        node = self._anchor_of.get(agent)
        return self.anchors.prefix(node) if node is not None and node.agent is not None else None

    def canonical(self, agent: int) -> int:
        """The id that the agent goes by now: two learned agents may turn out to be one."""
        for _ in range(len(self.anchors.merged)):
            if agent not in self.anchors.merged:
                break
            agent = self.anchors.merged[agent]
        return agent

    def _fingerprint(self, prompt: Prompt, namespace: str) -> int:
        skip, take = self.config.fingerprint_skip, self.config.fingerprint_take
        if take == 0 or len(prompt) < skip + take:
            return UNKNOWN
        return self.agents.intern(namespace, f"prefix:{prompt.fingerprint(skip, skip + take):016x}")
