"""When will this session call this agent again: the model behind `scout`.

Everything is one scale, the discounted chance of a visit, E[exp(-theta T)] for the time T until it (0 when it never
comes), where one cycle (a call and the silence after it) is worth the factor gamma.

    P(i, j)  = (1 - e_i) * P(next is j | i)      by the mixture of predictors of routing.py; i is the agent that was
               called last or, where that tells more, a context: the last two or three (`_state_of`)
    H_k      = first passage at step k of P (survival.first_passage), k = 1..K
    G(s, j)  = min(1, sum_k gamma^(k-1) * odds(n + k - 1) / odds(n) * H_k(i, j) / (1 - e_i))
               the visit's worth once the session calls again; odds from ends.py, their ratio at most `odds_cap`
    c(s)     = alive * D(t)   while the session is silent for t, S and D from gaps.py
               alive = (1 - e) S(t) / ((1 - e) S(t) + e)
               (1 - e) * D'(t) * D(0)   while a call of it has run for t, D' from the law of service times
    p(s, j)  = c(s) * G(s, j)

A forecast that the client sent mixes in with the weight that forecasts have earned (hint). For agent j over all
sessions, new ones included, the chance that no visit comes:

    Q(j)     = theta / (theta + lambda * G_new(j)) * prod over live s of (1 - p(s, j))

with lambda new sessions per second and G_new(j) the worth of a visit by one that starts now.

Tables are rebuilt when a 32nd of all evidence is new, at the latest after `every` calls for each 8 live sessions, so
that the cost per call stays. Between rebuilds only sessions that called move, and every `grain` of a cycle the clock.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from radix_policy.config import key
from radix_policy.ends import Share
from radix_policy.grouped_index import Gauge
from radix_policy.lengths import UNKNOWN_LENGTH
from radix_policy.routing import Context, Router
from radix_policy.sessions import Session
from radix_policy.survival import first_passage

if TYPE_CHECKING:
    from radix_policy.runtime import World


_GROWTH = 32  # a rebuild waits for this part of all evidence to be new
_MOST_DIRTY = 64  # sessions that moved and were not looked at yet


@dataclass(frozen=True)
class HazardConfig:
    """Keys of the model."""

    gamma: float = key(0.85, "worth of a visit one cycle later", low=0.01, high=0.999)
    adapt: float = key(0.8, "how far gamma follows the turnover; 0: fixed gamma", low=0, high=10)
    gamma_least: float = key(0.5, "lowest adapted gamma", low=0.01, high=0.999)
    gamma_most: float = key(0.9, "highest adapted gamma", low=0.01, high=0.999)
    horizon: int = key(24, "K, steps of first passage", low=1, high=256, unit="steps")
    pairs: bool = key(True, "predict from the last two or three agents where that is better")
    backoff: float = key(0.5, "beta, weight of the overall agent shares in a row", low=0, high=1000, unit="counts")
    odds_cap: float = key(4.0, "most that turn evidence may raise a later step", low=1, high=1000)
    end_prior: float = key(2.0, "weight of the pooled END rate in an agent's own", low=0, high=1000, unit="counts")
    turn_prior: float = key(3.0, "weight of the means in a turn's END rate", low=0, high=1000, unit="counts")
    soft_end: bool = key(True, "count waiting sessions as shares of an END (censoring correction)")
    learn_end: bool = key(True, "learn when sessions end")
    by_turn: bool = key(True, "END depends on entry agent and turn")
    by_length: bool = key(True, "END depends on the length of the last output, as far as that proves to tell")
    timing: bool = key(True, "a silent session loses worth with time")
    grain: float = key(0.2, "how often silence is looked at anew", low=0, high=10, unit="cycles")
    every: int = key(16, "calls per 8 live sessions between rebuilds of the tables", low=1, high=10_000, unit="calls")


def blocks_of(horizon: int) -> NDArray[np.intp]:
    """First steps (from 0) of the blocks that share a weight: 4 of one step, then two each of 2, 4, 8, ...; the end.

    Inside a block only the turn odds are taken as equal, the discount is exact: 24 steps need 9 tables, not 24.
    """
    starts, at = [*range(min(4, horizon))], 4
    widths = (width for power in count(1) for width in (2**power,) * 2)
    while at < horizon:
        starts.append(at)
        at += next(widths)
    return np.array([*starts, horizon])


class View(Gauge):
    """What the model keeps of one live session: `factor` is c, `version` changes with `reach`."""

    __slots__ = ("calls", "end", "epoch", "frozen", "hint", "reach", "slot", "weights")

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.slot = slot
        self.epoch = -1
        self.calls = -1
        self.hint = -1
        self.end = 0.0  # e
        self.reach: list[float] = []  # G by agent
        self.weights: dict[tuple[int, int, int], float] = {}  # for the policy; emptied with every version
        self.frozen: Any = None  # what the policy froze at that version


class HazardModel:
    """Reads the world's counts, clock and sessions; gives p."""

    def __init__(self, world: "World", config: HazardConfig, freeze: Callable[[], Any] = lambda: None) -> None:
        """`freeze` gives what the policy wants to keep with each version of the tables (`View.frozen`)."""
        self.world = world
        self.config = config
        self._freeze = freeze
        self._frozen: Any = freeze()
        self.epoch = 0
        self.none: list[float] = []  # Q by agent
        self._built_at = -1
        self._agents = 0
        self.router = Router(world.transitions, light=config.backoff)
        self._views: dict[int, View] = {}
        self._free: list[int] = []
        self._dirty: dict[int, Session] = {}
        self._versions = 0
        self.sweeps = 0  # times that every number may have changed
        self.changed: dict[int, None] = {}  # sessions whose numbers changed; whoever reads it clears it
        self.lost_track = 0  # times that `changed` was given up because nobody read it
        self.swept_at = -math.inf  # seconds on the clock at the last sweep
        self._h = np.zeros((1, 0, 0), dtype=np.float32)  # by block of steps, discounted to its first
        self._stay: list[float] = []  # 1 - e_i
        self._states: dict[Context, int] = {}  # rows of `_h` after those of the agents
        self._steps: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.gamma = config.gamma  # as adapted to the turnover
        self._held = 0  # tokens in the tree
        self.evicted = 0  # tokens evicted so far
        self._evicted_before, self._evicted_at, self._turnover = 0, 0.0, 0.0
        self._discounts = np.ones(config.horizon + 1)
        self._starts = blocks_of(config.horizon)
        self._middles = (self._starts[:-1] + self._starts[1:] - 1) // 2
        self._new_none: list[float] = []
        self._waits = self._calls = world.gaps.tables(config.gamma)
        self._now = 0.0
        # by slot; a free slot has e = 1 and G = 0, so that it counts for nothing
        self._finished = self._going = self._c = np.zeros(0)
        self._end = np.ones(0)
        self._reach = np.zeros((0, 0))
        self._grow(16)

    def _grow(self, size: int) -> None:
        n = len(self._end)
        more = size - n
        self._finished = np.concatenate([self._finished, np.zeros(more)])
        self._going = np.concatenate([self._going, np.zeros(more)])
        self._end = np.concatenate([self._end, np.ones(more)])
        self._c = np.concatenate([self._c, np.zeros(more)])
        self._reach = np.concatenate([self._reach, np.zeros((more, self._agents))])
        self._free = [*range(size - 1, n - 1, -1), *self._free]

    # ---- events ----

    def moved(self, session: Session) -> None:
        """The session was opened, called, finished a call, ended or came back."""
        self._dirty[session.id] = session
        if len(self.changed) > _MOST_DIRTY + len(self._views):
            self.changed.clear()
            self.lost_track += 1
        if len(self._dirty) > _MOST_DIRTY:
            self._file_dirty()
            self.swept_at = -math.inf

    def view(self, session: int) -> View | None:
        """The numbers of the session with that id; None when it is not live."""
        return self._views.get(session)

    def passing(self) -> list[object]:
        """State by live session."""
        return [self._views, self._dirty, self.changed, self._steps, self._free, self._reach]

    # ---- refresh ----

    def refresh(self, held: int) -> None:
        """Bring everything up to the present; `held`: tokens in the tree.

        Sessions that moved are always reviewed. That time passes for the others is looked at every `grain` of a cycle.
        """
        self._held = held
        world = self.world
        world.transitions.ensure(len(world.identifier.agents))
        agents = len(world.transitions)
        now, calls = world.clock.seconds, world.calls
        if agents != self._agents or calls - self._built_at >= self._interval():
            self._now = now
            self._file_dirty()
            self._rebuild(agents)
            self._built_at = calls
            self._review_all()
            self.sweep()
        elif self.swept_at + self.config.grain * world.gaps.cycle < now:
            self._now = now
            self._file_dirty()
            self.sweep()
        elif self._dirty:
            self._now = now
            for view in self._file_dirty():
                self._weigh_one(view)

    def sweep(self) -> None:
        """Time has passed for every session."""
        self._now = self.swept_at = self.world.clock.seconds
        self._weigh()
        self.sweeps += 1

    def _interval(self) -> int:
        """Calls between two rebuilds: every call at first, when each one teaches much."""
        return max(1, min(self.world.calls // _GROWTH, self.config.every * max(1, len(self._views) // 8)))

    def _file_dirty(self) -> list[View]:
        """Take in the sessions that moved; returns their views."""
        live, found = self.world.sessions.live, []
        for session in self._dirty.values():
            self.changed[session.id] = None
            if session.id not in live or session.calls == 0:
                view = self._views.pop(session.id, None)
                if view is not None:
                    self._free.append(view.slot)
                    self._going[view.slot] = 0.0
                    self._end[view.slot] = 1.0
                    self._reach[view.slot] = 0.0
                    self._c[view.slot] = 0.0
                continue
            view = self._views.get(session.id)
            if view is None:
                if not self._free:
                    self._grow(2 * len(self._end))
                view = self._views[session.id] = View(self._free.pop())
            self._finished[view.slot] = session.started_at if session.running > 0 else session.finished_at
            self._going[view.slot] = session.running > 0
            self._review(session)
            found.append(view)
        self._dirty.clear()
        return found

    def _rebuild(self, agents: int) -> None:
        world, config = self.world, self.config
        ends, gaps = world.ends, world.gaps
        self.epoch += 1
        self._frozen = self._freeze()
        self._adapt()
        # Python's own power: numpy's differs in the last bit from one kind of CPU to the next
        self._discounts = np.array([self.gamma**k for k in range(config.horizon + 1)])
        self._waits = gaps.tables(self.gamma)
        self._calls = world.services.tables(self.gamma, gaps.cycle)
        if config.learn_end:
            ends.refresh(self._shares() if config.soft_end else (), config.end_prior, config.turn_prior)
        self._stay = [1.0 - self._agent_end(i) for i in range(agents)]
        self._h = self._in_blocks(self._passage(agents))
        self._steps.clear()
        if agents != self._agents:
            self._agents = agents
            self._reach = np.zeros((len(self._end), agents))
        self._start(agents)

    def _adapt(self) -> None:
        """gamma from the turnover: how many cycles a token stays, at the present rate of eviction."""
        config, now = self.config, self.world.clock.seconds
        self.gamma = config.gamma
        elapsed, cycle = now - self._evicted_at, self.world.gaps.cycle
        if elapsed > 0:
            rate = (self.evicted - self._evicted_before) / elapsed
            weight = 0.2 if self._turnover > 0 else 1.0
            self._turnover += weight * (rate - self._turnover)
            self._evicted_before, self._evicted_at = self.evicted, now
        if config.adapt > 0 and self._turnover > 0 and cycle > 0:
            stay = self._held / (self._turnover * cycle)
            self.gamma = min(max(1.0 - config.adapt / max(stay, 1e-9), config.gamma_least), config.gamma_most)

    def _passage(self, agents: int) -> NDArray[np.float32]:
        """First passage from every agent and context."""
        rows = self._probabilities(agents)
        contexts = self._contexts(agents)
        self._states = {context: agents + n for n, context in enumerate(contexts)}
        if not contexts:
            return first_passage(rows * np.array(self._stay)[:, None], self.config.horizon)
        states: list[Context] = [*((i,) for i in range(agents)), *contexts]
        p = np.zeros((len(states), len(states)))
        for at, context in enumerate(states):
            i = context[-1]
            row = rows[i] if at < agents else self.router.row_of(context, rows[i])
            for j, chance in enumerate((row * self._stay[i]).tolist()):
                p[at, self._state_of((*context[-2:], j))] += chance
        return first_passage(p, self.config.horizon, [context[-1] for context in states])

    def _state_of(self, trail: Context) -> int:
        """The row of `_h` for a walk that came along these agents: the longest context that has one."""
        for known in (trail[-3:], trail[-2:]):
            state = self._states.get(known)
            if state is not None:
                return state
        return trail[-1]

    def _contexts(self, agents: int) -> list[Context]:
        """Contexts that are states of their own."""
        return self.router.contexts(agents) if self.config.pairs else []

    def _probabilities(self, agents: int) -> NDArray[np.float64]:
        """P(next | current, no END)."""
        return self.router.matrix(agents)

    def _agent_end(self, agent: int) -> float:
        return self.world.ends.agent_rate(agent) if self.config.learn_end else 0.0

    def _odds(self, entry: int, turns: int, steps: int) -> NDArray[np.float64]:
        """The odds of going on after turns `turns`, `turns` + 1, ..."""
        if not (self.config.learn_end and self.config.by_turn):
            return np.ones(steps)
        return self.world.ends.odds_of(entry, turns, steps)

    def _end_rate(self, session: Session) -> float:
        """e."""
        config = self.config
        if not config.learn_end:
            return 0.0
        entry = session.entry if config.by_turn else -1
        kind = session.length_kind if config.by_length else UNKNOWN_LENGTH
        return self.world.ends.rate(session.agent, entry, session.calls, kind)

    def _shares(self) -> list[Share]:
        """Of sessions that wait: how much of an END each is by now."""
        waiting = [
            (s, v)
            for s in self.world.sessions.live.values()
            if s.running == 0 and s.calls > 0 and (v := self._views.get(s.id)) is not None
        ]
        if not waiting:
            return []
        idle = np.array([max(self._now - s.finished_at, 0.0) for s, _ in waiting])
        survival, _ = self._waits.lookup(idle)
        shares = []
        for (session, view), s in zip(waiting, survival.tolist(), strict=True):
            stays = (1.0 - view.end) * s
            dead = view.end / (stays + view.end) if view.end > 0 else 0.0
            shares.append(Share(session.agent, session.entry, session.calls, dead * (1.0 - s), session.length_kind))
        return shares

    def _in_blocks(self, h: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sum over the k of each block of gamma^(k - first) H_k."""
        starts, discounts = self._starts.tolist(), self._discounts.astype(np.float32)
        return np.stack([np.einsum("k,kij->ij", discounts[: b - a], h[a:b]) for a, b in pairwise(starts)])

    def _step(self, entry: int, turns: int) -> NDArray[np.float32]:
        """What the blocks of steps weigh for sessions of that type and turn."""
        known = self._steps.get((entry, turns))
        if known is None:
            known = self._steps[entry, turns] = self._new_step(entry, turns)
        return known

    def _new_step(self, entry: int, turns: int) -> NDArray[np.float32]:
        """w_k = gamma^(k-1) * odds(n + k - 1) / odds(n) as running products, capped, at the start of each block."""
        odds = self._odds(entry, turns, self.config.horizon + 1)
        ratios = np.ones(len(odds))
        ratios[1:] = np.minimum(np.multiply.accumulate(odds[1:]), self.config.odds_cap)
        weights: NDArray[np.float32] = (self._discounts[self._starts[:-1]] * ratios[self._middles]).astype(np.float32)
        return weights

    def _review(self, session: Session) -> None:
        """Recompute e and G of one session where its state changed."""
        view = self._views.get(session.id)
        if view is None or session.agent >= self._agents:
            return
        view.end = self._end[view.slot] = self._end_rate(session)
        if view.epoch != self.epoch or view.calls != session.calls or view.hint != session.next_agent:
            self._renew(view, session, self._reach_of(session))

    def _review_all(self) -> None:
        """Recompute e and G of every live session: the tables are new."""
        sessions, views = [], []
        for number, view in self._views.items():
            session = self.world.sessions.get(number)
            if session is not None and session.agent < self._agents:
                view.end = self._end[view.slot] = self._end_rate(session)
                sessions.append(session)
                views.append(view)
        if sessions:
            for view, session, reach in zip(views, sessions, self._reaches_of(sessions), strict=True):
                self._renew(view, session, reach)

    def _renew(self, view: View, session: Session, reach: NDArray[np.float64]) -> None:
        """Set G; the weights that were read off the old one are void."""
        view.epoch, view.calls, view.hint = self.epoch, session.calls, session.next_agent
        if session.next_agent >= 0:
            reach = self._hinted(reach, session)
        reach = np.minimum(reach, 1.0)
        view.reach = reach.tolist()
        self._reach[view.slot] = reach
        self._versions += 1
        view.version = self._versions
        view.weights = {}
        view.frozen = self._frozen

    def _reach_of(self, session: Session) -> NDArray[np.float64]:
        """G before its cap."""
        weights, state = self._step(session.entry, session.calls), self._state_of((*session.trail, session.agent))
        return self._onward(weights, state) / max(self._stay[session.agent], 1e-3)

    def _reaches_of(self, sessions: Sequence[Session]) -> Iterable[NDArray[np.float64]]:
        """The same of many."""
        weights = np.array([self._step(s.entry, s.calls) for s in sessions])
        states = np.array([self._state_of((*s.trail, s.agent)) for s in sessions])
        going_on = np.array([max(self._stay[s.agent], 1e-3) for s in sessions])
        reach = np.zeros((len(sessions), self._agents), dtype=np.float32)
        for block, h in enumerate(self._h):
            reach += weights[:, block, None] * h[states]
        return reach / going_on[:, None]

    def _onward(self, weights: NDArray[np.float32], state: int) -> NDArray[np.float64]:
        """The worth of every agent to a walk that stands at `state`: sum over k of w_k H_k(state, j)."""
        return np.einsum("k,kj->j", weights, self._h[:, state]).astype(np.float64)

    def _hinted(self, reach: NDArray[np.float64], session: Session) -> NDArray[np.float64]:
        trust = self.world.hints.trust
        j = session.next_agent
        if j >= self._agents:
            return reach
        state = self._state_of((session.trail[1], session.agent, j))
        onward = self._onward(self._step(session.entry, session.calls + 1), state) * self.gamma
        onward[j] = 1.0
        return trust * onward + (1.0 - trust) * reach

    def _start(self, agents: int) -> None:
        """G_new and the chance that no new session visits an agent in time."""
        world = self.world
        starts = world.starts.counts
        total = sum(starts.values())
        worth = np.zeros(agents)
        if total > 0:
            for i, n in starts.items():
                if i < agents:
                    onward = self._onward(self._new_step(i, 1), i) * self.gamma
                    onward[i] = 1.0
                    worth += n / total * np.minimum(onward, 1.0)
        cycle = world.gaps.cycle
        rate = world.starts.rate(self._now) * cycle / (1.0 - self.gamma)  # lambda / theta
        self._new_none = (1.0 / (1.0 + rate * worth)).tolist()

    def _weigh(self) -> None:
        """c of every session, Q of every agent."""
        end, going = self._end, self._going
        if self.config.timing:
            idle = np.maximum(self._now - self._finished, 0.0)
            survival, discount = self._waits.lookup(idle)
            stays = (1.0 - end) * survival
            waits = stays / (stays + end + 1e-12) * discount
            _, left = self._calls.lookup(idle)
            self._c = np.where(going > 0, (1.0 - end) * left * self._waits.discount[0], waits)
        else:
            self._c = (1.0 - end) * self.gamma
        values = self._c.tolist()
        for session, view in self._views.items():
            view.factor = values[view.slot]
            self.changed[session] = None
        self._combine()

    def _weigh_one(self, view: View) -> None:
        """c of one session."""
        stay = 1.0 - view.end
        if self.config.timing:
            idle = max(self._now - float(self._finished[view.slot]), 0.0)
            if self._going[view.slot]:
                view.factor = stay * self._calls.at(idle)[1] * self._waits.first
            else:
                survival, discount = self._waits.at(idle)
                view.factor = stay * survival / (stay * survival + view.end + 1e-12) * discount
        else:
            view.factor = stay * self.gamma
        self._c[view.slot] = view.factor

    def _combine(self) -> None:
        """Q of every agent."""
        missed = np.multiply.reduce(1.0 - self._c[:, None] * self._reach, axis=0)
        self.none = [a * b for a, b in zip(missed.tolist(), self._new_none)]
