"""A stage for scout: a simulated engine whose sessions are called one by one, and whose runtime can be looked into."""

from collections.abc import Mapping
from typing import Any

from radix_policy.events import RequestArrived, RequestFinished, SessionClosed, Tag, Tick
from radix_policy.nodes import Node
from radix_policy.prompts import SpanPrompt, Spans
from radix_policy.runtime import Runtime
from radix_policy.sessions import Session
from radix_policy.simulator.engine import Engine, Run

OUTPUTS = 1_000_000  # token ids from here on are outputs


class Stage:
    """One engine of `capacity` tokens under one policy; time moves by `wait` alone."""

    def __init__(self, capacity: int = 100_000, policy: str = "scout", **config: Any) -> None:
        self.runtime = Runtime(policy, {"identity": "tags", **config})
        self.engine = Engine(self.runtime, capacity)
        self.world = self.runtime.world
        self._number = 0
        self._steps = 0
        self._running: dict[str, Run] = {}

    def wait(self, seconds: float) -> None:
        """The clock moves on."""
        self._steps += 1
        self.runtime.observe(Tick(self._steps, self.world.clock.seconds + seconds))

    def start(self, spans: Spans, agent: str | None, session: str | None, output: int = 3, **tag: Any) -> str | None:
        """A call arrives and is prefilled; None when it does not fit now."""
        self._number += 1
        rid = f"r{self._number}"
        prompt = sum(n for _, n in spans)
        run = Run(rid, spans, ((OUTPUTS + 1000 * self._number, output),), prompt, output)
        tagged = None if agent is None and session is None and not tag else Tag(agent, session, **tag)
        if not self.engine.fits(run):
            return None
        self.engine.arrive(run, tagged)
        if not self.engine.admit(run):
            self.runtime.observe(RequestFinished(rid, aborted=True))
            return None
        self._running[rid] = run
        return rid

    def finish(self, rid: str) -> None:
        """The call leaves the engine."""
        self.engine.finish(self._running.pop(rid))

    def call(self, spans: Spans, agent: str | None, session: str | None, gap: float = 1.0, **more: Any) -> None:
        """A whole call, `gap` seconds after now, that takes half a second."""
        self.wait(gap)
        rid = self.start(spans, agent, session, **more)
        self.wait(0.5)
        if rid is not None:
            self.finish(rid)

    def close(self, session: str) -> None:
        """The client says that the session is over."""
        self.runtime.observe(SessionClosed(session))

    def session(self, key: str) -> Session:
        """The session of that key; it must be known."""
        found = self.world.sessions.find("", key)
        assert found is not None
        return found

    def agent(self, name: str) -> int:
        """The agent's id."""
        return self.world.identifier.agents.find("", "tag:" + name)

    def refresh(self) -> None:
        """Bring the scores up to date, as an eviction call does."""
        self.runtime.begin_eviction()

    def nodes(self) -> list[Node]:
        """Every node but the root."""
        return [n for n in self.world.nodes if n.parent is not None]

    def leaves_of(self, session: str) -> list[Node]:
        """The leaves that the session ran over last."""
        known = self.session(session).id
        return [n for n in self.world.nodes.leaves() if n.session == known]

    def score(self, node: Node) -> float:
        """The node's score as of the last refresh."""
        return self.runtime.score(node.id)


class Calls:
    """The same without a tree: who calls, and nothing else."""

    def __init__(self, **config: Any) -> None:
        settings: Mapping[str, Any] = {"identity": "tags", "transition_decay": 1.0, **config}
        self.runtime = Runtime("scout", settings)
        self.runtime.reset(0)
        self.world = self.runtime.world
        self._number = 0

    def tick(self, seconds: float) -> None:
        """The clock moves on by so much."""
        self.runtime.observe(Tick(self.world.clock.step + 1, self.world.clock.seconds + seconds))

    def arrive(self, session: str | None, agent: str | None, **tag: Any) -> str:
        """A call arrives."""
        self._number += 1
        rid = f"r{self._number}"
        prompt = SpanPrompt(((7 * self._number, 5),))
        self.runtime.observe(RequestArrived(rid, prompt, "", Tag(agent, session, **tag)))
        return rid

    def finish(self, rid: str, output: int = 0) -> None:
        """It leaves, with an output of that many tokens (0: not known)."""
        self.runtime.observe(RequestFinished(rid, output))

    def call(self, session: str | None, agent: str | None, gap: float = 0.0, output: int = 0, **tag: Any) -> None:
        """A whole call that takes no time, `gap` seconds after now."""
        self.tick(gap)
        self.finish(self.arrive(session, agent, **tag), output)

    def close(self, session: str) -> None:
        """The client says that the session is over."""
        self.runtime.observe(SessionClosed(session))

    def session(self, key: str) -> Session:
        """The session of that key; it must be known."""
        found = self.world.sessions.find("", key)
        assert found is not None
        return found

    def counts(self) -> dict[str, float]:
        """Every count of transitions and ENDs by the names of agents, zeros left out."""
        agents, chain, ends = self.world.identifier.agents, self.world.transitions, self.world.ends
        found: dict[str, float] = {}
        for i in range(len(chain)):
            for j in range(len(chain)):
                found[f"{agents.name(i)}>{agents.name(j)}"] = chain.count(i, j)
            found[f"{agents.name(i)}>END"] = chain.ends(i)
            for turns in range(1, 40):
                for what, n in zip(("ends", "trials"), ends.counts(i, turns)):
                    found[f"{agents.name(i)} {what} {turns}"] = n
        return {k: n for k, n in found.items() if n}
