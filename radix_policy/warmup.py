"""When and what to prefetch: the anchor of the agent that is called next, while the server has nothing to do.

An anchor is prefilled in slices, shorter ones the more sessions wait, since a call that comes meanwhile waits for one.
Each slice is a request of its own and decided anew: only if all of this holds.

    predictable   R_i >= r_min for the agent i that a waiting session called last, R_i = 1 - H(next | i) / H(next)
    likely        P(j) >= p_min, P(j) = 1 - prod over those sessions (1 - alive * P(next is j | i)); a client's `next`
                  is mixed in with the trust that such hints have earned
    missing       the device does not hold the whole anchor of j
    worth it      it fits into free memory, or every leaf that it would push out has a score below 1 - Q(j), the worth
                  of an anchor of j by the policy's own model (`peek`)
    affordable    the budget of tokens per second, the rate of anchors, and the gate (radix_policy.warm_account)
    once          what was warmed for one state of the sessions is not warmed again before a real request came

Warmed tokens belong to nobody until a real request runs over them, so they are the first to go: a wrong guess costs
later requests nothing. The planner only says what to do; the engine's adapter does it, and says when it is idle.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from radix_policy.config import key
from radix_policy.events import Prompt
from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.grouped_index import GroupedIndex
from radix_policy.identity import POOLED
from radix_policy.nodes import UNKNOWN, Node
from radix_policy.runtime import Request, Runtime
from radix_policy.sessions import Session
from radix_policy.tree_view import NodeId
from radix_policy.warm_account import Accounting
from radix_policy.warm_anchors import Anchor, Anchors, Key

LEAST = 32  # missing tokens below which a forward pass is not worth it
SHORTEST = 64  # tokens of a slice however many sessions wait
SESSIONS = 64  # waiting sessions that are asked, those that came to life last first
CANDIDATES = 4  # likeliest agents that are looked at
VICTIMS = 256  # leaves that a look takes in at most
_AGAIN = 0.1  # seconds until the next try when nothing happened meanwhile, doubled with every try
_AGAIN_MOST = 1.6
_LEARNED = 8  # transitions between two looks at an agent's successors, fewer at first
_RARE = 0.01  # chance below which a successor is left out
_KNOWN = 256  # agents whose successors are kept at hand
_FADES = 4096  # calls after which those of each agent count half


@dataclass(frozen=True)
class WarmupConfig:
    """Keys of warmup."""

    warmup: bool = key(False, "prefill the predicted next agent's anchor while the server is idle")
    warmup_r_min: float = key(0.3, "least predictability R of the agent that a session called last", low=0, high=1)
    warmup_p_min: float = key(0.5, "least chance that the agent is called next", low=0, high=1)
    warmup_value: bool = key(True, "push out only what is worth less than the anchor; false: whatever goes first")
    warmup_budget: float = key(8192.0, "most that warmups prefill", low=1, high=1e9, unit="tokens/s")
    warmup_rate: float = key(10.0, "most anchors begun", low=0.001, high=1e6, unit="anchors/s")
    warmup_slice: int = key(
        512,
        "prefilled by one warmup request, so the longest that a real one waits for it",
        low=16,
        high=512,
        unit="tokens",
    )
    warmup_share: float = key(
        0.3, "useful part of the warmed tokens below which warmup pauses; 0: never", low=0, high=1
    )
    warmup_window: int = key(16, "warmed anchors that this part is taken of", low=1, high=4096, unit="anchors")
    warmup_probe: float = key(30.0, "while paused one anchor is tried this often", low=0.1, high=86400, unit="s")
    warmup_anchors: int = key(
        64, "anchors kept; the agent called longest ago goes first", low=1, high=1024, unit="agents"
    )
    warmup_tokens: int = key(32768, "kept of one anchor", low=64, high=1048576, unit="tokens")


class Slice(NamedTuple):
    """One warmup request: prefill `prompt`, the first `end` tokens of an anchor, of which `begin` are on the device."""

    key: Key
    space: object
    prompt: Prompt
    begin: int
    end: int


class Look(NamedTuple):
    """Before a slice can be decided on: what would be lost for so many tokens? Answer with `Planner.looked`."""

    tokens: int
    keep: NodeId | None  # the node at which what is there of the anchor ends: the slice will hold it


class Held(NamedTuple):
    """How much of an anchor is on the device."""

    tokens: int
    node: NodeId | None = None  # the last node of it


class Victim(NamedTuple):
    """One leaf that would be lost."""

    score: float
    tokens: int
    owned: bool  # some request ran over it


def peek(runtime: Runtime, look: Look) -> list[Victim] | None:
    """The leaves that would be lost for so many tokens; None where their scores are no chances of a hit.

    It brings the policy up to date as an eviction does, and like one it must happen on every rank at the same point.
    """
    policy, index = runtime.policy, runtime.index
    if not isinstance(policy, ScoutPolicy) or not isinstance(index, GroupedIndex):
        return None
    policy.refresh()
    lru = policy.config.guard and not policy.guard.in_control
    drain = index.drain(lru=lru)
    tokens = look.tokens
    seen: list[Node] = []
    found: list[Victim] = []
    gone: dict[NodeId, int] = {}  # children that would be lost, by parent
    bared: list[tuple[float, float, NodeId, Node]] = []  # nodes that would be leaves by then: (score, stamp, id, node)
    try:
        while tokens > 0 and len(found) < VICTIMS:
            node = drain.next()
            worth = policy.score(node) if node is not None else 0.0
            if bared and (node is None or bared[0][:3] < (0.0 if lru else worth, node.stamp, node.id)):
                node = heapq.heappop(bared)[3]
                worth = policy.score(node)
            elif node is None:
                break
            else:
                index.drop(node.id)
                seen.append(node)
                if node.id == look.keep:
                    continue
            tokens -= node.length
            found.append(Victim(worth, node.length, node.agent != UNKNOWN or node.session != UNKNOWN))
            above = node.parent
            if above is not None and above.parent is not None:
                gone[above.id] = gone.get(above.id, 0) + 1
                if gone[above.id] == above.children and not above.locks and above.resident and above.id != look.keep:
                    score = 0.0 if lru else policy.score(above)
                    heapq.heappush(bared, (score, above.stamp, above.id, above))
    finally:
        for node in seen:
            index.file(node)
        drain.end()
    return found


def _stale(then: int, now: int) -> bool:
    """Whether enough transitions were counted between two versions of them to look again."""
    return now - then >= min(_LEARNED, 1 + then // 8)


class _Known(NamedTuple):
    """An agent's successors, as of one version of the transitions."""

    version: int
    r: float  # predictability
    row: dict[int, float]  # P(next), the rare left out


class _Called:
    """How often each agent was called after another: the columns of the transitions, summed up as they come."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0
        self._entropy: tuple[int, float] = (-1, 0.0)  # (version, bits)

    def add(self, agent: int) -> None:
        """A session called the agent, not as its first."""
        self._counts[agent] = self._counts.get(agent, 0.0) + 1.0
        self._total += 1.0
        if self._total > _FADES:
            self._counts = {j: n / 2 for j, n in self._counts.items() if n > 1.0}
            self._total = sum(self._counts.values())

    def entropy(self, version: int) -> float:
        """Of the next agent, in bits; `version`: of the transitions, now."""
        at, found = self._entropy
        if at < 0 or _stale(at, version):
            found = _entropy([*self._counts.values()])
            self._entropy = (version, found)
        return found


class Planner:
    """Decides. One per tree, on the rank that injects; it reads the runtime and writes nothing of it."""

    def __init__(self, config: WarmupConfig, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        self.world = runtime.world
        self.anchors = Anchors(config.warmup_anchors, config.warmup_tokens)
        self.slice = config.warmup_slice  # tokens; an engine that prefills less at once lowers it
        self.account = Accounting(config.warmup_share, config.warmup_window, config.warmup_probe)
        self.refused: dict[str, int] = {}  # why nothing was done, counted
        self._flight: tuple[Slice, float] | None = None  # the slice in the engine, and when it began
        self._tried: dict[Key, int] = {}  # tokens issued since the last real request
        self._victims: tuple[int, list[Victim] | None] | None = None  # (tokens asked for, what would go)
        self._next = 0.0  # seconds on the clock before which there is nothing to decide
        self._pause = _AGAIN
        self._tokens = config.warmup_budget  # left to spend, negative when overdrawn
        self._filled = 0.0  # seconds on the clock when it was last filled up
        self._began = -math.inf  # seconds on the clock when an anchor was last begun
        self._active: Key | None = None  # the anchor being warmed
        self._called = _Called()
        self._successors: dict[int, _Known] = {}  # by agent
        self._waiting = 0.0  # sessions that are expected to call, at the last forecast
        self._flushed = False  # the device was emptied, and nobody has called since

    # ---- what happened ----

    def arrived(self, request: Request, space: object = None, *, plain: bool = True) -> None:
        """A real request entered the queue; the runtime has taken it in. `plain`: its tokens alone can be prefilled."""
        self._stir()
        self._flushed = False
        self._tried.clear()
        self._active = None
        agent = request.agent
        if request.session is not None and request.call > 1:
            self._called.add(max(agent, POOLED))
        if plain and agent > POOLED:
            session = request.session.id if request.session is not None else UNKNOWN
            self.anchors.seen(request.namespace, agent, session, request.prompt, space)

    def matched(self, request: Request, cached: int, now: float) -> None:
        """A real request found so many tokens of its prompt on the device."""
        if self.account.waiting:
            self.account.read(request.namespace, request.prompt, cached, now)

    def left(self) -> None:
        """A real request left the engine."""
        self._stir()

    def reset(self) -> None:
        """The device was emptied. It stays empty until a real request comes: the weights may be about to change."""
        self._flushed = True
        self.account.forget()
        self._tried.clear()
        self._stir()

    def finished(self, cached: int, now: float) -> None:
        """The slice was prefilled; `cached` tokens of it had been on the device."""
        flight, self._flight = self._flight, None
        if flight is not None:
            done, since = flight
            self._tokens -= max(done.end - cached, 0)
            self.account.done(done.key, done.prompt, cached, done.end, now, now - since)
        self._stir()

    def aborted(self) -> None:
        """The slice was dropped."""
        if self._flight is not None:
            self._flight = None
            self.account.aborted += 1
        self._stir()

    @property
    def busy(self) -> bool:
        """Whether a slice is in the engine."""
        return self._flight is not None

    def _stir(self) -> None:
        self._next, self._pause, self._victims = 0.0, _AGAIN, None

    # ---- what to do ----

    def due(self, now: float) -> bool:
        """Whether it is worth asking for a plan."""
        return self._flight is None and not self._flushed and now >= self._next

    def plan(self, now: float, free: int, held: Callable[[Anchor], Held]) -> Slice | Look | None:
        """The engine is idle: what to do. `free`: tokens of memory that nobody owns; `held`: how many of an anchor's
        first tokens the device holds, without touching them."""
        if self._flight is not None or self._flushed:
            return None
        why = self._closed(now)
        if why is None:
            found = self._candidate(now, held)
            if not isinstance(found, str):
                return self._affordable(now, free, *found)
            why = found
        self._refuse(now, why)
        return None

    def looked(self, asked: Look, victims: list[Victim] | None) -> None:
        """The answer to a Look."""
        self._victims = (asked.tokens, victims)

    def _closed(self, now: float) -> str | None:
        config, account = self.config, self.account
        account.age(now)
        self._tokens = min(self._tokens + max(now - self._filled, 0.0) * config.warmup_budget, config.warmup_budget)
        self._filled = max(self._filled, now)
        if self._tokens <= 0:
            return "budget"
        if self._active is None:  # an anchor that was begun is finished, as long as nothing happens
            if now - self._began < 1.0 / config.warmup_rate:
                return "rate"
            if not account.may_begin(now):
                return "gate"
        return None

    def _candidate(self, now: float, held: Callable[[Anchor], Held]) -> tuple[Anchor, Held, int] | str:
        """The anchor to work on, the tokens of it on the device and where the slice ends; or why there is none."""
        page, size = self.world.page_size, self.slice
        why = "unpredictable"
        for (namespace, agent), _ in self.forecast(now):
            anchor = self.anchors.get(namespace, agent)
            whole = anchor.length - anchor.length % page if anchor is not None else 0
            if anchor is None or whole < LEAST:
                why = "no anchor"
                continue
            there = held(anchor)
            begin = min(there.tokens, whole)
            begin -= begin % page
            self.account.lost(anchor.key, begin, now)
            if whole - begin < min(LEAST, page if page > 1 else LEAST):
                why = "held"
                continue
            if self._tried.get(anchor.key, 0) >= whole + size:  # one slice may be aborted
                why = "tried"
                continue
            step = max(
                int(size / max(self._waiting, 1.0)), SHORTEST
            )  # the more sessions wait, the sooner one of them calls
            step = max(min(step, size) // page * page, page)
            return anchor, Held(begin, there.node), min(begin + step, whole)
        return why

    def _affordable(self, now: float, free: int, anchor: Anchor, there: Held, end: int) -> Slice | Look | None:
        begin, page = there.tokens, self.world.page_size
        need = end - begin + page
        if free < need and self.config.warmup_value:
            if self._victims is None or self._victims[0] < need:
                return Look(need, there.node)
            victims, self._victims = self._victims[1], None
            room = free + self._cheap(victims or (), anchor) - page
            least = min(LEAST, end - begin)
            end = min(end, begin + room - room % page)
            if end - begin < least:
                self._refuse(now, "worth")
                return None
        first = self._active != anchor.key
        if first:
            self._active, self._began = anchor.key, now
            self.account.begun(now)
        self._tried[anchor.key] = self._tried.get(anchor.key, 0) + end - begin
        self.account.issued += 1
        slice_ = Slice(anchor.key, anchor.space, anchor.head.slice(0, end), begin, end)
        self._flight = (slice_, now)
        return slice_

    def _cheap(self, victims: Sequence[Victim], anchor: Anchor) -> int:
        """Tokens in the leaves that would go first and are worth less than the anchor."""
        worth, tokens = self.worth(anchor.key[1]), 0
        for victim in victims:
            if victim.score >= worth or (not victim.owned and self.account.waiting):
                break  # the other may be a warmed anchor that its agent has not come for yet
            tokens += victim.tokens
        return tokens

    def worth(self, agent: int) -> float:
        """What a node of the agent's anchor is worth to the policy; 0 where that is not known."""
        policy = self.runtime.policy
        none = policy.hazard.none if isinstance(policy, ScoutPolicy) else []
        return 1.0 - none[agent] if 0 <= agent < len(none) else 0.0

    def _refuse(self, now: float, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1
        self._next = now + self._pause
        self._pause = min(2 * self._pause, _AGAIN_MOST)
        self._victims = None

    # ---- predictions ----

    def forecast(self, now: float) -> list[tuple[Key, float]]:
        """(namespace, agent) by the chance to be called next, likeliest first; only those that pass R and P."""
        missed: dict[Key, float] = {}  # chance that no session calls it
        nobody, waiting, asked = 1.0, 0.0, 0  # chance that none calls again; those expected to; those asked
        tables = self.world.gaps.tables(0.85)  # the survival does not depend on gamma
        for session in reversed(self.world.sessions.live.values()):
            if asked >= SESSIONS:
                nobody = 0.0
                break
            if session.running > 0 or session.calls == 0:
                continue
            asked += 1
            alive = self._alive(session, now, tables)
            for agent, p in self._next_of(session).items():
                at = (session.namespace, agent)
                missed[at] = missed.get(at, 1.0) * (1.0 - alive * p)
            nobody *= 1.0 - alive
            waiting += alive
        starts = self.world.starts.counts
        if self.predictability_of([*starts.values()]) >= self.config.warmup_r_min:
            agents, total = self.world.identifier.agents, sum(starts.values())
            for agent, n in starts.items():  # where no session is left, the next call opens one
                if agent > POOLED:
                    at = (agents.namespace(agent), agent)
                    missed[at] = missed.get(at, 1.0) * (1.0 - nobody * n / total)
        self._waiting = waiting
        likely = [(at, 1.0 - q) for at, q in missed.items() if 1.0 - q >= self.config.warmup_p_min]
        likely.sort(key=lambda pair: (-pair[1], pair[0]))
        return likely[:CANDIDATES]

    def _next_of(self, session: Session) -> dict[int, float]:
        """P(next) of one session by agent; empty where R is too small."""
        known = self._known(session.agent)
        hint, trust = session.next_agent, self.world.hints.trust
        chances = {**known.row} if known.r >= self.config.warmup_r_min else {}
        if hint > POOLED:
            chances = {agent: (1.0 - trust) * p for agent, p in chances.items()}
            chances[hint] = chances.get(hint, 0.0) + trust
        chances.pop(POOLED, None)
        return chances

    def _alive(self, session: Session, now: float, tables: Any) -> float:
        """The chance that the session calls again."""
        end = self.world.ends.rate(session.agent, session.entry, session.calls, session.length_kind)
        survival, _ = tables.at(max(now - session.finished_at, 0.0))
        stays = (1.0 - end) * survival
        return float(stays / (stays + end)) if end > 0.0 else 1.0

    def predictability(self, agent: int) -> float:
        """R_i: how much less uncertain the next agent is once the present one is known; 0 when nothing was seen."""
        return self._known(agent).r

    def _known(self, agent: int) -> "_Known":
        """What is known of the agent's successors, worked out anew when enough was counted since."""
        transitions = self.world.transitions
        if not 0 <= agent < len(transitions):
            return _Known(0, 0.0, {})
        known = self._successors.get(agent)
        if known is None or _stale(known.version, transitions.version):
            counts = transitions.counts(agent)
            row = {j: p for j, p in enumerate(transitions.row(agent)) if p >= _RARE}
            known = self._successors[agent] = _Known(transitions.version, self.predictability_of(counts), row)
            if len(self._successors) > _KNOWN:
                del self._successors[next(iter(self._successors))]
        return known

    def predictability_of(self, counts: list[float]) -> float:
        """The same for what happened in one situation."""
        entropy = self._called.entropy(self.world.transitions.version)
        return 1.0 - _entropy(counts) / entropy if entropy > 0.0 and sum(counts) > 0.0 else 0.0

    # ---- looking in ----

    def snapshot(self) -> dict[str, Any]:
        """Numbers for status and metrics, JSON-ready."""
        account = self.account
        return {
            **account.totals()._asdict(),
            "gate": "open" if account.open else "closed",
            "useful_share": account.useful_share(),
            "longest_slice_s": account.longest,
            "anchors": len(self.anchors),
            "waiting_tokens": sum(s.end - s.begin for s in account.waiting),
            "refused": dict(self.refused),
        }


def _entropy(counts: list[float]) -> float:
    """Of the distribution that the counts make, in bits."""
    total = sum(counts)
    return -sum(n / total * math.log2(n / total) for n in counts if n > 0) if total > 0 else 0.0
