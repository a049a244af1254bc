"""The agent runtime: observe what happens, score what is cached, predict who comes next, act off the critical path.

The four verbs are those of "A Policy-Driven Runtime Layer for Agentic LLM Serving" (section 2.1). One Runtime serves
one radix tree. It is the tree's listener and the engine's observer; every choice (eviction, later admission and
warmup) is a policy that reads `World` and is asked through `score`. Data path: event in, state updated, score out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radix_policy.config import ConfigError, build, key
from radix_policy.ends import EndModel
from radix_policy.events import (
    Effect,
    Event,
    PrefixMatched,
    Prompt,
    RequestArrived,
    RequestFinished,
    SessionClosed,
    Tick,
)
from radix_policy.eviction import POLICIES
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.gaps import GapHistogram
from radix_policy.grouped_index import GroupedDrain, GroupedIndex
from radix_policy.identity import POOLED, Identifier, IdentityConfig
from radix_policy.leaf_index import Drain, LeafIndex
from radix_policy.lengths import UNKNOWN_LENGTH, length_kind
from radix_policy.nodes import UNKNOWN, Node, NodeTable
from radix_policy.sessions import Session, SessionTable
from radix_policy.starts import Starts
from radix_policy.transitions import TransitionCounts
from radix_policy.tree_view import NodeId

_SHOWN = 32  # agents in the snapshot's matrix
_SILENCE_EVERY = 32  # gaps between two looks at their quantile


@dataclass(frozen=True)
class RuntimeConfig:
    """Keys of the runtime itself."""

    max_sessions: int = key(4096, "live sessions kept; the one idle for longest goes first", low=1, unit="sessions")
    transition_decay: float = key(0.98, "factor on an agent's row before each update", low=0.5, high=1)
    tend: float = key(3.0, "a session silent for this many 95 % gap quantiles is over", low=1, high=1000, unit="q95")


@dataclass
class Clock:
    """The rank-agreed clock; moved by Tick only."""

    step: int = 0  # scheduler steps
    seconds: float = 0.0


class Request:
    """A request in the engine, and who sent it. `state` is for the eviction policy alone."""

    __slots__ = (
        "agent",
        "call",
        "final",
        "matched",
        "namespace",
        "next_agent",
        "priority",
        "prompt",
        "prompt_tokens",
        "rid",
        "session",
        "state",
        "tagged",
    )

    def __init__(
        self,
        rid: str,
        agent: int,
        session: Session | None,
        namespace: str,
        prompt: Prompt,
        tagged: bool = False,
        final: bool = False,
        priority: int = 0,
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.agent = agent
        self.session = session
        self.namespace = namespace
        self.prompt_tokens = len(prompt)
        self.tagged = tagged
        self.final = final
        self.next_agent = UNKNOWN  # the client's forecast, UNKNOWN when none or never seen
        self.priority = priority
        self.matched = False
        self.call = 0  # which call of its session it is, from 1
        self.state: Any = None


class Forecast(NamedTuple):
    """One agent's chance to be called next."""

    agent: int
    probability: float


class Hints:
    """How often clients' forecasts of the next agent came true; they are trusted from the start, and less when not."""

    __slots__ = ("all", "right")

    def __init__(self) -> None:
        self.right, self.all = 9.0, 10.0

    @property
    def trust(self) -> float:
        """The chance that a forecast comes true."""
        return self.right / self.all


@dataclass
class World:
    """What policies may read. They write none of it, except `state` slots, `refile` and `regroup`."""

    clock: Clock
    identifier: Identifier
    sessions: SessionTable
    transitions: TransitionCounts
    nodes: NodeTable
    gaps: GapHistogram  # end of a call to the session's next one
    services: GapHistogram  # arrival of a call to its end
    ends: EndModel
    refile: Callable[[Node], None]
    regroup: Callable[[Session], None]  # the session ended or came back: all its leaves change worth
    starts: Starts = field(default_factory=Starts)
    hints: Hints = field(default_factory=Hints)
    calls: int = 0  # calls whose session is known
    page_size: int = 1


class Runtime:
    """Owns the state of one tree. Implements `tree_view.TreeListener`; see `observe` for the other half."""

    def __init__(
        self,
        policy: str | type[EvictionPolicy] = "lru",
        config: Mapping[str, Any] | None = None,
        *,
        page_size: int = 1,
        index: bool = True,
    ) -> None:
        """ConfigError names the first bad key. `index=False` for engines that keep their own set of leaves."""
        kind = POLICIES.get(policy) if isinstance(policy, str) else policy
        if kind is None:
            raise ConfigError(f"unknown policy {policy!r}; known: {', '.join(sorted(POLICIES))}")
        runtime_config, identity_config, policy_config = build(
            config or {}, RuntimeConfig, IdentityConfig, kind.Config, policy=kind.name
        )
        self.config: RuntimeConfig = runtime_config  # type: ignore[assignment]
        self.requests: dict[str, Request] = {}
        self.effects: list[Effect] = []
        self._mixed: dict[NodeId, int] = {}  # nodes that hold prompt and output, and where the output begins
        transitions = TransitionCounts(decay=self.config.transition_decay)
        self.world = World(
            clock=Clock(),
            identifier=Identifier(identity_config),  # type: ignore[arg-type]
            sessions=SessionTable(self.config.max_sessions, self._dropped),
            transitions=transitions,
            nodes=NodeTable(),
            gaps=GapHistogram(),
            services=GapHistogram(),
            ends=EndModel(transitions),
            refile=self._refile,
            regroup=self._regroup,
            page_size=page_size,
        )
        self.policy = kind(self.world, policy_config)
        own = self.policy.make_index()
        self.index: LeafIndex | GroupedIndex = (
            own if own is not None else LeafIndex(self.policy.class_of, self.policy.score)
        )
        if index:
            self.world.nodes.on_leaf = self.index.file
        self._silence = 0.0  # seconds after which a silent session is over; 0 while unknown
        self._silence_at = 0  # gaps seen when it was set
        self._sink: Callable[[Effect], None] | None = None
        self._verbs: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._arrived,
            PrefixMatched: self._matched,
            RequestFinished: self._finished,
            SessionClosed: self._closed,
            Tick: self._tick,
        }

    # ---- observe: requests ----

    def observe(self, event: Event) -> None:
        """Take one event in. TypeError on anything that is no event."""
        try:
            verb = self._verbs[type(event)]
        except KeyError:
            raise TypeError(f"not an event: {event!r}") from None
        verb(event)

    def _arrived(self, event: RequestArrived) -> None:
        world = self.world
        rid, prompt, namespace, tag, priority = event
        agent, key, _, tagged, _ = world.identifier.resolve(prompt, namespace, tag)
        handed_on = world.identifier.agents.handed_on
        if handed_on:
            for other in handed_on:
                world.ends.forget(other)
            handed_on.clear()
        session = world.sessions.open(namespace, key) if key is not None else None
        final = tag is not None and tag.final
        request = self.requests[rid] = Request(rid, agent, session, namespace, prompt, tagged, final, priority)
        if tag is not None and tag.next_agent is not None:
            request.next_agent = world.identifier.agents.find(namespace, "tag:" + tag.next_agent)
        if session is not None:
            self._called(session, request)
        self.policy.on_request(request)

    def _called(self, session: Session, request: Request) -> None:
        world, now = self.world, self.world.clock.seconds
        agent = request.agent if request.agent >= 0 else POOLED
        if session.ended:
            if session.end_mark is not None:
                world.ends.undo(session.end_mark)
            world.sessions.revive(session)
            self.policy.on_session(session)
        self.policy.on_step(session, agent)
        if session.calls == 0:
            world.starts.add(agent, now)
        else:
            world.transitions.add(session.agent, agent)
            world.ends.called_again(session.agent, session.entry, session.calls, session.length_kind)
            if session.running == 0:
                world.gaps.add(now - session.finished_at)
            world.gaps.add_cycle(now - session.started_at)
            if session.next_agent >= 0:
                world.hints.all += 1.0
                world.hints.right += session.next_agent == agent
        world.calls += 1
        session.next_agent = request.next_agent
        world.sessions.called(session, agent, now)
        request.call = session.calls

    def _matched(self, event: PrefixMatched) -> None:
        request = self.requests.get(event.rid)
        if request is None or request.matched:
            return
        request.matched = True
        nodes = self.world.nodes
        path = [nodes[i] for i in event.path]
        self.policy.on_match(request, path)
        for node in path:
            self._own(node, request)
            node.hits += 1
            node.step = self.world.clock.step
            self._refile(node)

    def _finished(self, event: RequestFinished) -> None:
        request = self.requests.pop(event.rid, None)
        if request is None:
            return
        session = request.session
        if session is not None:
            now = self.world.clock.seconds
            if session.running == 1:
                self.world.services.add(now - session.started_at)
            length = None
            if request.call == session.calls:  # the latest one
                length = UNKNOWN_LENGTH if event.aborted else length_kind(event.output_tokens)
            self.world.sessions.finished(session, now, length)
            if request.final:
                self._end(session)
        self.policy.on_finish(request)

    def _closed(self, event: SessionClosed) -> None:
        session = self.world.sessions.find(event.namespace, event.session)
        if session is not None:
            self._end(session)

    def _end(self, session: Session) -> None:
        if session.ended:
            return
        world = self.world
        if session.calls > 0:
            session.end_mark = world.ends.end(session.agent, session.entry, session.calls, session.length_kind)
        world.sessions.end(session)
        self.policy.on_session(session)

    def _dropped(self, session: Session) -> None:
        session.ended = True
        self.policy.on_session(session)

    def _tick(self, event: Tick) -> None:
        clock = self.world.clock
        clock.step = max(clock.step, event.step)
        clock.seconds = max(clock.seconds, event.seconds)
        gaps = self.world.gaps
        if gaps.seen >= self._silence_at + _SILENCE_EVERY:
            self._silence, self._silence_at = self.config.tend * gaps.quantile(0.95), gaps.seen
        if self._silence > 0:
            for session in self.world.sessions.silent_since(clock.seconds - self._silence):
                self._end(session)

    def _own(self, node: Node, request: Request) -> None:
        session = request.session.id if request.session is not None else UNKNOWN
        if node.session not in (UNKNOWN, session) and session != UNKNOWN:
            node.shared = True
        if session == UNKNOWN and node.shared:
            return  # an anonymous call says nothing about whose anchor it is
        node.agent, node.session = request.agent, session

    # ---- observe: the tree (tree_view.TreeListener) ----

    def reset(self, root: NodeId) -> None:
        """See TreeListener. Requests and what was learned about agents stay."""
        self.index.clear()
        self._mixed.clear()
        self.policy.on_reset()
        self.world.nodes.reset(root)

    def added(self, node: NodeId, parent: NodeId, length: int, start: int, stamp: float, rid: str | None) -> None:
        """See TreeListener."""
        request = self.requests.get(rid) if rid is not None else None
        record = self.world.nodes.add(node, parent, length, start, stamp, self.world.clock.step)
        if request is not None:
            self._own(record, request)
            record.priority = request.priority
            # a node is output when it starts at or past the last page that the prompt fills
            boundary = request.prompt_tokens - request.prompt_tokens % self.world.page_size
            record.output = start >= boundary
            if start < boundary < start + length:
                self._mixed[node] = boundary
        self.policy.on_insert(record, request)
        self._refile(record)

    def added_host(self, node: NodeId, parent: NodeId, length: int, start: int, stamp: float) -> None:
        """A leaf was read from storage into the host tier: like `added`, but not on the device and nobody's yet."""
        record = self.world.nodes.add(node, parent, length, start, stamp, self.world.clock.step)
        self.world.nodes.demote(node)
        self.policy.on_insert(record, None)

    def split(self, prefix: NodeId, suffix: NodeId, at: int, prefix_stamp: float, suffix_stamp: float) -> None:
        """See TreeListener."""
        nodes = self.world.nodes
        accessed = suffix_stamp != nodes[suffix].stamp  # a trim splits too, and is no access
        record = nodes.split(prefix, suffix, at, prefix_stamp, suffix_stamp)
        boundary = self._mixed.pop(suffix, None)
        if boundary is not None:
            cut = nodes[suffix].start
            nodes[suffix].output = cut >= boundary
            if cut != boundary:
                self._mixed[prefix if cut > boundary else suffix] = boundary
        if accessed:
            # SGLang stamps both halves of a split as accessed; the step goes with the stamp, or LRU's order is lost
            record.step = nodes[suffix].step = self.world.clock.step
        self.policy.on_split(record, nodes[suffix])
        self._refile(nodes[suffix])

    def touched(self, node: NodeId, stamp: float) -> None:
        """See TreeListener."""
        self.world.nodes.touch(node, stamp, self.world.clock.step)

    def reached(self, node: NodeId, stamp: float) -> None:
        """See TreeListener."""
        self.world.nodes.touch_path(node, stamp, self.world.clock.step)

    def counted(self, node: NodeId) -> None:
        """See TreeListener."""
        record = self.world.nodes[node]
        record.counts += 1
        if not record.locks:
            self._refile(record)  # for policies whose classes are counts

    def locked(self, node: NodeId) -> None:
        """See TreeListener."""
        self.world.nodes.lock(node)

    def unlocked(self, node: NodeId) -> None:
        """See TreeListener."""
        self.world.nodes.unlock(node)

    def demoted(self, node: NodeId) -> None:
        """See TreeListener."""
        self.policy.on_evict(self.world.nodes[node])
        self.world.nodes.demote(node)

    def restored(self, node: NodeId) -> None:
        """See TreeListener."""
        self.policy.on_restore(self.world.nodes.restore(node))

    def removed(self, node: NodeId) -> None:
        """See TreeListener."""
        record = self.world.nodes[node]
        if record.resident:
            self.policy.on_evict(record)
        self._mixed.pop(node, None)
        self.world.nodes.remove(node)

    # ---- score ----

    def score(self, node: NodeId) -> float:
        """The policy's score of one node: the lowest is lost first. KeyError when the tree does not hold it."""
        return self.policy.score(self.world.nodes[node])

    def evicting(self) -> "Eviction":
        """One eviction call: `with runtime.evicting() as drain: ... drain.next()`."""
        return Eviction(self)

    def begin_eviction(self) -> bool:
        """For engines that order leaves themselves: call it once per eviction call, before any score is read.

        Returns whether the scores hold for this call; if not, the guard has found LRU better of late: use LRU's order.
        """
        self.policy.refresh()
        return self.policy.holds()

    # ---- predict ----

    def predict(self, session: Session, horizon: int = 1) -> list[Forecast]:
        """Agents by their chance to be the session's `horizon`-th call from now, likeliest first, zeros left out."""
        transitions = self.world.transitions
        if session.agent < 0:
            return []
        p = transitions.row(session.agent)
        for _ in range(horizon - 1):
            rows = [(q, transitions.row(i)) for i, q in enumerate(p) if q > 0]
            p = [sum(q * row[j] for q, row in rows) for j in range(len(transitions))]
        return sorted((Forecast(j, q) for j, q in enumerate(p) if q > 0), key=lambda f: (-f.probability, f.agent))

    # ---- act ----

    def act(self, effect: Effect) -> None:
        """Hand an effect to the engine, at once when it attached a sink, else at its next `attach`."""
        if self._sink is not None:
            self._sink(effect)
        else:
            self.effects.append(effect)

    def attach(self, sink: Callable[[Effect], None]) -> None:
        """The engine's executor of effects; effects that waited are handed over in order."""
        self._sink = sink
        waiting, self.effects = self.effects, []
        for effect in waiting:
            sink(effect)

    # ---- bookkeeping ----

    def snapshot(self) -> dict[str, Any]:
        """Numbers for status and metrics, JSON-ready."""
        world = self.world
        return {
            "policy": self.policy.name,
            "agents": len(world.identifier.agents) - 1,
            "sessions": len(world.sessions),
            "nodes": len(world.nodes),
            "leaves": len(self.index),
            "classes": self.index.classes,
            "predictability": world.transitions.predictability(),
            "step": world.clock.step,
            "transitions": self._learned(),
            **self.policy.snapshot(),
        }

    def _learned(self) -> dict[str, Any]:
        """P(next | agent) between the first agents, at most 32 of them, pooled and unknown ones left out."""
        agents, transitions = self.world.identifier.agents, self.world.transitions
        shown = range(1, min(len(agents), _SHOWN + 1))
        rows = [transitions.row(i) for i in shown]
        return {
            "agents": [agents.name(i) for i in shown],
            "rows": [[round(row[j], 4) if j < len(row) else 0.0 for j in shown] for row in rows],
        }

    def _regroup(self, session: Session) -> None:
        if isinstance(self.index, GroupedIndex):
            if session.ended:
                self.index.bury(session.id)
            else:
                self.index.exhume(session.id)

    def _refile(self, node: Node) -> None:
        nodes = self.world.nodes
        if nodes.on_leaf is not None and not (node.children or node.locks) and nodes.is_leaf(node):
            self.index.file(node)


class Eviction:
    """One eviction call, as a context: what it gives hands out the victims (`next`)."""

    __slots__ = ("_drain", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __enter__(self) -> Drain | GroupedDrain:
        runtime = self._runtime
        index, holds = runtime.index, runtime.begin_eviction()
        self._drain = index.drain(lru=not holds) if isinstance(index, GroupedIndex) else index.drain()
        return self._drain

    def __exit__(self, *_: object) -> None:
        self._drain.end()
