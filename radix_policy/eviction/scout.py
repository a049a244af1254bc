"""`scout`: hazard-scored reuse. What a node is worth is the discounted chance that it is hit again.

    private node    p(s, a) * q        p: the next call of agent a in session s (hazard.py); q: that the call
                                       really runs over the node (reuse.py); 0 once the session ended
    shared node     1 - Q(a) ^ q_n     Q: no call of agent a comes, over all live sessions and new ones (hazard.py)
                                       q_n = min(1, (hits + 1) / (c - c_created + 1), 2 / (c - c_last) if above 2)
                                       with c the calls of agent a so far
    no session      LRU order, below everything that is known to be alive

A node is private until a second session runs over it. No size and no recomputation cost: freeing |b| tokens that are
hit with chance p loses p |b| of them, so the knapsack ratio is p. Scores are real numbers; ties go in LRU order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_policy.config import key
from radix_policy.depths import AnchorDepths, DeadTails
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.grouped_index import GroupedIndex
from radix_policy.hazard import HazardConfig, HazardModel
from radix_policy.nodes import UNKNOWN, Node
from radix_policy.reuse import ReuseTable, kind_of

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World
    from radix_policy.sessions import Session

_OLD = -1  # stands for every visit three or more calls back
_OLD_AFTER = 3
_NEVER = 1 << 62
_DEAD_WORTH = 0.05  # what is left of the worth of a part that is expected not to be taken up


@dataclass(frozen=True)
class ScoutConfig(HazardConfig):
    """Keys of scout."""

    learn_reuse: bool = key(True, "learn q; false: every call of the right agent reuses")
    cut: bool = key(True, "learn where anchors end, and keep the head of a trimmed node for other sessions")
    dead_tails: bool = key(True, "learn which end of a prompt the next call does not take up, and lose it first")
    trim: bool = key(True, "cut the last victim down to what is needed")


class NodeNote:
    """What scout keeps of a node."""

    __slots__ = ("agent", "created", "cut", "dead", "last", "visit")

    def __init__(self, agent: int, visit: int, calls: int, cut: int = 0) -> None:
        self.agent = agent  # of the last touch by a known session
        self.visit = visit  # v(s, a) at the last touch
        self.created = calls  # c of that agent when the node was made, or taken over from another agent
        self.last = calls  # c at the last touch
        self.cut = cut  # tokens from the root to the end of the agent's anchor, as known when the node was made
        self.dead = _NEVER  # tokens from the root to where the part begins that the next call will not take up

    def copy(self) -> "NodeNote":
        note = NodeNote(self.agent, self.visit, self.created, self.cut)
        note.last, note.dead = self.last, self.dead
        return note


class ScoutPolicy(EvictionPolicy):
    """Score by session, agent and kind."""

    name = "scout"
    Config = ScoutConfig

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self.trims = self.config.trim  # type: ignore[misc]
        self.hazard = self.make_model()
        self.reuse = ReuseTable()
        self.depths = AnchorDepths()
        self.tails = DeadTails()
        self._calls: list[int] = []  # c by agent
        self._weights: dict[int, tuple[int, dict[Hashable, float]]] = {}  # by session: (version, class weights)

    def make_model(self) -> HazardModel:
        """The model behind p."""
        return HazardModel(self.world, self.config)

    def make_index(self) -> GroupedIndex | None:
        return GroupedIndex(self)

    # ---- events ----

    def on_step(self, session: "Session", agent: int) -> None:
        if session.calls > 0:
            self.hazard.router.observe(session.trail[1], session.agent, agent)

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
        if request.state is None or request.session is None:
            return
        agent, visit, calls = request.state
        session = request.session.id
        if visit == 1 and path and path[-1].children > 0 and path[-1].session != session:
            self.depths.parted(agent, path[-1].start + path[-1].length)
        if visit > 1 and self.config.dead_tails:
            self._look_back(request.session, agent, visit, path)
        for node in path:
            note: NodeNote | None = node.state
            if note is None:
                node.state = NodeNote(agent, visit, calls)
                continue
            if note.agent != agent:
                note.agent, note.created = agent, calls - node.hits
            elif node.session == session and not node.shared and visit > note.visit:
                self.reuse.hit(agent, kind_of(node.output, node.hits), visit - 1 - note.visit)
            note.visit, note.last, note.dead = visit, calls, _NEVER
        self._prompts(request.session)[agent] = request.prompt_tokens

    def on_insert(self, node: Node, request: "Request | None") -> None:
        self.hazard.resident += node.length
        if request is not None and request.state is not None:
            agent = request.state[0]
            note = node.state = NodeNote(*request.state, self.depths.of(agent) if self.config.cut else 0)
            dead = self.tails.of(agent)
            if dead and not node.output:
                note.dead = request.prompt_tokens - dead

    def on_split(self, prefix: Node, suffix: Node) -> None:
        if suffix.state is not None:
            prefix.state = suffix.state.copy()

    def on_evict(self, node: Node) -> None:
        self.hazard.resident -= node.length
        self.hazard.evicted += node.length
        note: NodeNote | None = node.state
        if note is None or self._is_common(node, note):
            return
        session = self.world.sessions.get(node.session)
        if session is not None:
            passed = session.visits.get(note.agent, 0) - note.visit
            self.reuse.lost(note.agent, kind_of(node.output, node.hits), passed)

    def on_finish(self, request: "Request") -> None:
        if request.session is not None:
            self.hazard.moved(request.session)

    def on_session(self, session: "Session") -> None:
        self.hazard.moved(session)
        if session.ended:
            self._weights.pop(session.id, None)
        self.world.regroup(session)

    def refresh(self) -> None:
        self.hazard.refresh()

    # ---- scores: GroupedPolicy ----

    def group_of(self, node: Node) -> int:
        """A session's id; UNKNOWN; or -2 - agent for the shared nodes of an agent."""
        if node.session == UNKNOWN or node.state is None:
            return UNKNOWN
        return -2 - node.state.agent if self._is_common(node, node.state) else node.session

    def class_of(self, node: Node) -> Hashable | None:
        if node.session == UNKNOWN or node.state is None:
            return ()
        note = node.state
        if self._is_common(node, note):
            return (node.id,)
        session = self.world.sessions.get(node.session)
        if session is None:
            return ()
        visit = note.visit if session.visits.get(note.agent, 0) - note.visit < _OLD_AFTER else _OLD
        dead = node.start + node.length > note.dead
        return (node.session, note.agent, kind_of(node.output, node.hits), visit, dead)

    def weight(self, node: Node) -> float:
        group = self.group_of(node)
        if group == UNKNOWN:
            return 0.0
        note: NodeNote = node.state
        if group < 0:
            return self._proven(node, note)
        session = self.world.sessions.get(group)
        view = self.hazard.view(session) if session is not None else None
        if session is None or view is None:
            return 0.0
        known = self._weights.get(group)
        if known is None or known[0] != view.version:
            known = self._weights[group] = (view.version, {})
        passed = min(session.visits.get(note.agent, 0) - note.visit, _OLD_AFTER)
        kind = kind_of(node.output, node.hits)
        weight = known[1].get((note.agent, kind, passed))
        if weight is None:
            reach = view.reach[note.agent] if note.agent < len(view.reach) else 0.0
            weight = reach * (self.reuse.q(note.agent, kind, passed) if self.config.learn_reuse else 1.0)
            known[1][note.agent, kind, passed] = weight
        return weight * _DEAD_WORTH if node.start + node.length > note.dead else weight

    def value(self, group: Hashable, weight: float) -> float:
        assert isinstance(group, int)
        if group >= 0:
            view = self.hazard.view_of(group)
            return view.coefficient * weight if view is not None else 0.0
        none = self.hazard.none
        agent = -2 - group
        return 1.0 - none[agent] ** weight if 0 <= agent < len(none) else 0.0

    def version(self, group: Hashable) -> Hashable:
        assert isinstance(group, int)
        if group >= 0:
            view = self.hazard.view_of(group)
            return view.version if view is not None else None
        return self.hazard.epoch

    def is_dead(self, group: Hashable) -> bool:
        if not isinstance(group, int) or group < 0:
            return False
        session = self.world.sessions.get(group)
        return session is None or session.ended

    def score(self, node: Node) -> float:
        group = self.group_of(node)
        if self.is_dead(group):
            return 0.0
        return self.value(group, self.weight(node))

    def snapshot(self) -> dict[str, Any]:
        return {"live_sessions": len(self.world.sessions.live), "epoch": self.hazard.epoch}

    def tail(self, node: Node) -> int:
        """Tokens at the node's end that its score speaks for: not the anchor at its head."""
        note: NodeNote | None = node.state
        end = node.start + node.length
        if note is None or self._is_common(node, note):
            return node.length
        if end > note.dead:
            return min(end - max(note.dead, note.cut), node.length)
        return end - max(note.cut, node.start)

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

    def _look_back(self, session: "Session", agent: int, visit: int, path: Sequence[Node]) -> None:
        """Learn how much of the prompt before this call takes up."""
        before = self._prompts(session).get(agent, 0)
        last = path[-1] if path else None
        if not before or last is None:
            return
        end = last.start + last.length
        if end >= before:
            self.tails.saw(agent, 0)
        elif last.children > 0 and last.session == session.id and last.state is not None:
            if last.state.agent == agent and last.state.visit == visit - 1:
                self.tails.saw(agent, before - end)

    def _proven(self, node: Node, note: NodeNote) -> float:
        """q_n of a shared node."""
        if not self.config.learn_reuse:
            return 1.0
        calls = self._calls[note.agent]
        q = min(1.0, (node.hits + 1.0) / (calls - note.created + 1.0))
        return min(q, 2.0 / (calls - note.last)) if calls - note.last > 2 else q
