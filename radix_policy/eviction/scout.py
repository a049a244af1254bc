"""`scout`: hazard-scored reuse. What a node is worth is the discounted chance that it is hit again.

    private node    p(s, a) * q        p: the next call of agent a in session s (hazard.py); q: that the call
                                       really runs over the node (reuse.py); 0 once the session ended
    shared node     1 - Q(a) ^ q_n     Q: no call of agent a comes, over all live sessions and new ones (hazard.py)
                                       q_n = min(1, (hits + 1) / (c - c_created + 1), 2 / (c - c_last) if above 2)
                                       with c the calls of agent a so far
    no session      the same chance by age and kind (ages.py); LRU order inside a kind

A node is private until a second session runs over it. No size and no recomputation cost: freeing |b| tokens that are
hit with chance p loses p |b| of them, so the knapsack ratio is p. Scores are real numbers; ties go in LRU order.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_policy.ages import AgeModel, StampClock
from radix_policy.config import key
from radix_policy.depths import AnchorDepths, DeadTails
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.grouped_index import Gauge, GroupedIndex
from radix_policy.guard import Guard, GuardConfig, Mark, mark_at, mark_of
from radix_policy.hazard import HazardConfig, HazardModel
from radix_policy.identity import POOLED
from radix_policy.nodes import UNKNOWN, Node
from radix_policy.reuse import ReuseTable, kind_of

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World
    from radix_policy.sessions import Session

_OLD = -1  # stands for every visit three or more calls back
_OLD_AFTER = 3
_NEVER = 1 << 62
_NOTHING = -7  # the group of nodes that no request is known to have made; -1..-6 are the kinds without a session
_SHARED = -8
_DEAD_WORTH = 0.05  # what is left of the worth of a part that is expected not to be taken up


@dataclass(frozen=True)
class ScoutConfig(HazardConfig, GuardConfig):
    """Keys of scout."""

    learn_reuse: bool = key(True, "learn q; false: every call of the right agent reuses")
    cut: bool = key(True, "learn where anchors end, and keep the head of a trimmed node for other sessions")
    ages: bool = key(True, "calls without a session: worth by age and kind; false: LRU order below all that is known")
    dead_tails: bool = key(True, "learn which end of a prompt the next call does not take up, and lose it first")
    trim: bool = key(True, "cut the last victim down to what is needed")
    trim_least: int = key(
        16,
        "least that is cut off at once, so that decoding does not evict token by token",
        low=1,
        high=65536,
        unit="tokens",
    )


class NodeNote:
    """What scout keeps of a node."""

    __slots__ = ("agent", "created", "cut", "dead", "last", "mark", "seconds", "tail_mark", "visit")

    def __init__(self, agent: int, visit: int, calls: int, cut: int = 0) -> None:
        self.agent = agent  # of the last touch by a known session
        self.visit = visit  # v(s, a) at the last touch
        self.created = calls  # c of that agent when the node was made, or taken over from another agent
        self.last = calls  # c at the last touch
        self.cut = cut  # tokens from the root to the end of the agent's anchor, as known when the node was made
        self.seconds = 0.0  # the clock at the last touch
        self.mark: Mark | None = None  # what the guard recognises it by
        self.tail_mark: Mark | None = None  # the same for what begins at `dead`: whether it really is, the guard sees
        self.dead = _NEVER  # tokens from the root to where the part begins that the next call will not take up

    def copy(self) -> "NodeNote":
        note = NodeNote(self.agent, self.visit, self.created, self.cut)
        note.last, note.dead, note.mark, note.seconds = self.last, self.dead, self.mark, self.seconds
        note.tail_mark = self.tail_mark
        return note


class ScoutPolicy(EvictionPolicy):
    """Score by session, agent and kind."""

    name = "scout"
    Config = ScoutConfig

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self.trims = self.config.trim
        self.trim_least = self.config.trim_least
        self.reuse = ReuseTable()
        self.hazard = self.make_model()
        self.depths = AnchorDepths()
        self.tails = DeadTails()
        self.guard = Guard(self.config, world.nodes.get)
        self.ages = AgeModel()
        self.stamps = StampClock()
        self._swept = -1  # sweeps of the hazard model that the index knows of
        self._aged = -1  # events of `ages` at its last refresh
        self._calls: list[int] = []  # c by agent
        self._counted: list[int] = []  # c as of the last sweep: between two, no shared node's score moves by itself
        self._counted_at = -1

    def make_model(self) -> HazardModel:
        """The model behind p."""
        return HazardModel(self.world, self.config, self.reuse.rates)

    def make_index(self) -> GroupedIndex | None:
        return GroupedIndex(self)

    # ---- events ----

    def on_step(self, session: "Session", agent: int) -> None:
        if session.calls > 0:
            self.hazard.router.observe(session.trail, session.agent, agent)

    def on_request(self, request: "Request") -> None:
        session = request.session
        if session is None:
            return
        agent = session.agent
        self.hazard.moved(session)
        while len(self._calls) <= agent:
            self._calls.append(0)
        self._calls[agent] += 1
        request.state = (agent, session.visits[agent], self._calls[agent])

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        if self.config.guard:
            root = self.world.nodes.root
            known = request.session.id if request.session is not None else UNKNOWN
            self.guard.matched(request.prompt, path, root.id if root is not None else -1, known, request.tagged)
        if request.state is None or request.session is None:
            self._match_alone(request, path)
            return
        agent, visit, calls = request.state
        session, now = request.session.id, self.world.clock.seconds
        if visit == 1 and path and path[-1].children > 0 and path[-1].session != session:
            self.depths.parted(agent, path[-1].start + path[-1].length)
        if visit > 1 and self.config.dead_tails:
            self._look_back(request.session, agent, visit, path)
        for node in path:
            note: NodeNote | None = node.state
            if note is None:
                note = node.state = NodeNote(agent, visit, calls)
            elif note.agent != agent:
                note.agent, note.created = agent, calls - node.hits
            elif node.session == session and not node.shared and visit > note.visit:
                self.reuse.hit(agent, kind_of(node.output, node.hits), visit - 1 - note.visit)
            note.visit, note.last, note.dead, note.seconds = visit, calls, _NEVER, now
            if note.mark is None:
                self._mark(node, note, request)
        self._prompts(request.session)[agent] = request.prompt_tokens

    def on_insert(self, node: Node, request: "Request | None") -> None:
        if node.resident:
            self.guard.added(node)
        self.stamps.note(node.stamp, self.world.clock.seconds)
        if request is None:
            return
        page = self.world.page_size
        if request.state is None:
            note = NodeNote(POOLED, 0, 0)
        else:
            agent, visit, calls = request.state
            cut = self.depths.of(agent) if self.config.cut else 0
            note = NodeNote(agent, visit, calls, -(-cut // page) * page)
            # an engine that only drops whole leaves would lose a leaf for the sake of its end
            dead = self.tails.of(agent) if self.trims else 0
            if dead and not node.output:
                note.dead = -(-(request.prompt_tokens - dead) // page) * page
                if self.config.guard and note.dead < request.prompt_tokens:
                    note.tail_mark = mark_at(request.prompt, note.dead, request.prompt_tokens)
        note.seconds = self.world.clock.seconds
        node.state = note
        self._mark(node, note, request)

    def on_split(self, prefix: Node, suffix: Node) -> None:
        note: NodeNote | None = suffix.state
        if note is not None:
            prefix.state = note.copy()
            if note.mark is not None:
                # the part without the mark has none until a prompt shows it
                holder = prefix.state if note.mark.at >= suffix.start else note
                holder.mark = None
        self.guard.split(prefix, suffix)

    def on_evict(self, node: Node) -> None:
        self.hazard.evicted += node.length
        note: NodeNote | None = node.state
        if note is None:
            self.guard.dropped(node, None)
        else:
            self.guard.dropped(node, note.tail_mark if node.start >= note.dead else note.mark)
        if note is None or self._is_common(node, note):
            return
        if node.session == UNKNOWN:
            self.ages.lost(kind_of(node.output, node.hits), self._age(node))
            return
        session = self.world.sessions.get(node.session)
        if session is not None:
            passed = session.visits.get(note.agent, 0) - note.visit
            self.reuse.lost(note.agent, kind_of(node.output, node.hits), passed)

    def on_restore(self, node: Node) -> None:
        self.guard.added(node)
        self.stamps.note(node.stamp, self.world.clock.seconds)

    def on_finish(self, request: "Request") -> None:
        if request.session is not None:
            self.hazard.moved(request.session)

    def on_session(self, session: "Session") -> None:
        self.hazard.moved(session)
        self.world.regroup(session)

    def on_reset(self) -> None:
        self.guard.reset()
        self.stamps.clear()

    def holds(self) -> bool:
        return not self.config.guard or self.guard.begin(self.world.nodes)

    def refresh(self) -> None:
        self.hazard.refresh(self.guard.held)
        if self._counted_at != self.hazard.sweeps:
            self._counted_at = self.hazard.sweeps
            self._counted = self._calls.copy()
        if self.ages.events > self._aged + 64 or (self._aged < 0 < self.ages.events):
            self._aged = self.ages.events
            self.ages.refresh(self.hazard.gamma, self.world.gaps.cycle)
            self.hazard.sweep()

    # ---- scores: GroupedPolicy ----

    def place_of(self, node: Node) -> tuple[int, Hashable]:
        """(group, class): the group is a session's id; -1 - kind where the session is unknown; or _SHARED - agent.

        The class of a session's node: (session, agent, kind, visit of the last touch, whether its end is dead).
        """
        note: NodeNote | None = node.state
        if note is None:
            return _NOTHING, ()
        end = node.start + node.length
        if node.shared or end <= note.cut:
            return _SHARED - note.agent, (node.id,)
        hits, session = node.hits, node.session
        kind = (3 if node.output else 0) + (hits if hits < 2 else 2)
        if session == UNKNOWN:
            return -1 - kind, ()
        known = self.world.sessions.get(session)
        if known is None:
            return session, ()
        visit = note.visit
        if known.visits.get(note.agent, 0) - visit >= _OLD_AFTER:
            visit = _OLD
        return session, (session, note.agent, kind, visit, end > note.dead)

    def class_of(self, node: Node) -> Hashable | None:
        group, key = self.place_of(node)
        return (group, key)

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        assert isinstance(group, int)
        if group < 0:
            if group == _NOTHING:
                return 0.0
            return self._proven(node, node.state) if group <= _SHARED else node.stamp
        view = self.hazard.view(group)
        session = self.world.sessions.get(group)
        if session is None or view is None:
            return 0.0
        assert isinstance(key, tuple)
        _, agent, kind, visit, dead = key
        passed = _OLD_AFTER if visit == _OLD else min(session.visits.get(agent, 0) - visit, _OLD_AFTER)
        known = view.weights.get((agent, kind, passed))
        if known is None:
            known = view.reach[agent] if agent < len(view.reach) else 0.0
            if self.config.learn_reuse:
                known *= view.frozen.q(agent, kind, passed)
            view.weights[agent, kind, passed] = known
        worth: float = known
        return worth * _DEAD_WORTH if dead else worth

    def weight(self, node: Node) -> float:
        """The node's weight inside its group."""
        return self.weigh(*self.place_of(node), node)

    def gauge(self, group: Hashable) -> Gauge | None:
        assert isinstance(group, int)
        return self.hazard.view(group) if group >= 0 else None

    def value(self, group: Hashable, weight: float) -> float:
        assert isinstance(group, int)
        if group >= 0:
            view = self.hazard.view(group)
            return view.factor * weight if view is not None else 0.0
        if group == _NOTHING:
            return 0.0
        if group > _SHARED:
            if not self.config.ages:
                return 0.0
            return self.ages.value(-1 - group, self.hazard.swept_at - self.stamps.seconds(weight))
        none = self.hazard.none
        agent = _SHARED - group
        return 1.0 - none[agent] ** weight if 0 <= agent < len(none) else 0.0

    def version(self, group: Hashable) -> int:
        assert isinstance(group, int)
        if group >= 0:
            view = self.hazard.view(group)
            return view.version if view is not None else 0
        return self.hazard.sweeps

    def changes(self) -> tuple[int, Iterable[Hashable]]:
        hazard = self.hazard
        changed: dict[Hashable, None] = hazard.changed  # type: ignore[assignment]
        hazard.changed = {}
        if self._swept != hazard.sweeps:
            self._swept = hazard.sweeps
            for group in range(_SHARED - len(hazard.none) + 1, 0):  # what no one session's clock drives
                changed[group] = None
        return hazard.lost_track, changed

    def is_dead(self, group: Hashable) -> bool:
        if not isinstance(group, int) or group < 0:
            return False
        session = self.world.sessions.get(group)
        return session is None or session.ended

    def score(self, node: Node) -> float:
        group, key = self.place_of(node)
        if group >= 0 and self.hazard.view(group) is None:
            return 0.0  # ended
        return self.value(group, self.weigh(group, key, node))

    def passing(self) -> list[object]:
        return [*self.guard.passing(), *self.hazard.passing()]

    def snapshot(self) -> dict[str, Any]:
        return {"live_sessions": len(self.world.sessions.live), "epoch": self.hazard.epoch, **self.guard.snapshot()}

    def tail(self, node: Node) -> int:
        """Not the anchor at its head."""
        note: NodeNote | None = node.state
        end = node.start + node.length
        if note is None or self._is_common(node, note):
            return node.length
        if end > note.dead:
            return min(end - max(note.dead, note.cut), node.length)
        return end - max(note.cut, node.start)

    def _mark(self, node: Node, note: NodeNote, request: "Request") -> None:
        if self.config.guard:
            note.mark = mark_of(request.prompt, node, request.prompt_tokens, note.cut)

    @staticmethod
    def _is_common(node: Node, note: NodeNote) -> bool:
        """Whether the node serves every session: two ran over it, or it is part of its agent's anchor."""
        return node.shared or node.start + node.length <= note.cut

    @staticmethod
    def _prompts(session: "Session") -> dict[int, int]:
        """Length of the session's last prompt, by agent."""
        if session.state is None:
            session.state = {}
        assert isinstance(session.state, dict)
        return session.state

    def _age(self, node: Node) -> float:
        """Seconds since the last access."""
        return self.world.clock.seconds - self.stamps.seconds(node.stamp)

    def _match_alone(self, request: "Request", path: Sequence[Node]) -> None:
        """A call without a session ran over these nodes."""
        now = self.world.clock.seconds
        for node in path:
            note: NodeNote | None = node.state
            if note is None:
                note = node.state = NodeNote(POOLED, 0, 0)
            elif node.session == UNKNOWN and not node.shared:
                self.ages.hit(kind_of(node.output, node.hits), now - note.seconds)
            note.seconds, note.dead = now, _NEVER
            if note.mark is None:
                self._mark(node, note, request)

    def _look_back(self, session: "Session", agent: int, visit: int, path: Sequence[Node]) -> None:
        """Learn how much of the prompt before this call takes up."""
        before = self._prompts(session).get(agent, 0)
        last = path[-1] if path else None
        if not before or last is None:
            return
        end = last.start + last.length
        if end >= before:
            self.tails.saw(agent, 0)
            return
        note: NodeNote | None = last.state
        if note is None or last.children == 0 or last.session != session.id:
            return
        if (note.agent, note.visit) == (agent, visit - 1):
            self.tails.saw(agent, before - end)

    def _proven(self, node: Node, note: NodeNote) -> float:
        """q_n of a shared node."""
        if not self.config.learn_reuse:
            return 1.0
        # an agent or a node of after the last sweep counts no calls yet
        calls = max(self._counted[note.agent] if note.agent < len(self._counted) else 0, note.created)
        q = min(1.0, (node.hits + 1.0) / (calls - note.created + 1.0))
        return min(q, 2.0 / (calls - note.last)) if calls - note.last > 2 else q
