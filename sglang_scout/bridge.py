"""The link between one SGLang tree cache and its Runtime: told what happens, asked what to lose, never raises.

A fault in our code must not hurt the engine:
- in what is observed of the tree: the mirror cannot be trusted any more, so the runtime is cut off, and eviction is
  plain LRU, until the tree is empty again (`reset`);
- in what is observed of requests: the same, for good;
- in a score: that one eviction call is plain LRU;
- in the sampled curve, which nothing but `sglang-scout plan` reads: the curve ends.
Each kind of fault is logged once with its traceback, and counted.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from radix_policy.admission import AdmissionConfig
from radix_policy.events import Event, PrefixMatched, RequestArrived, RequestFinished, Tick
from radix_policy.grouped_index import GroupedDrain, GroupedIndex
from radix_policy.leaf_index import Drain
from radix_policy.nodes import Node
from radix_policy.runtime import Runtime
from sglang_scout.curve import OnlineCurve
from sglang_scout.host_index import HostIndex

logger = logging.getLogger(__name__)

MAX_REQUESTS = 65536  # requests in flight that are remembered; SGLang ends every one, so this only bounds a bug
# Set: /server_info also checks the hooks and the mirror, and shows the last events.
# "2": the mirror is compared with the tree after every eviction call, too, at O(nodes) each.
VERIFY = "SGLANG_SCOUT_VERIFY"
LOGGED = 65536  # of those
TREE_EVENTS = ("split", "counted", "locked", "unlocked", "demoted", "restored", "removed")

Priority = tuple[float, float, int]


class Host(Protocol):
    """Who may write to the host tier (hicache.HostAdmission)."""

    evicted: int

    def looked_up(self, rid: str, path: Sequence[int], tokens: int) -> None: ...
    def left(self, rid: str) -> None: ...
    def refuses(self, tokens: int) -> bool: ...
    def snapshot(self) -> dict[str, Any]: ...


def _ignore(*_: Any) -> None:
    """The listener after a fault."""


class Follower(Protocol):
    """Who else wants to know (warmup). None of these raises."""

    def matched(self, rid: str, tokens: int) -> None:
        """A request found so many tokens of its prompt."""
        ...

    def left(self, rid: str) -> None:
        """A request left the engine."""
        ...

    def emptied(self) -> None:
        """The tree was reset."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Numbers for status and metrics, JSON-ready."""
        ...


class Bridge:
    """One per tree cache. The methods named as in `tree_view.TreeListener` are what the tree core calls."""

    split: Callable[[int, int, int, float, float], None]
    counted: Callable[[int], None]
    locked: Callable[[int], None]
    unlocked: Callable[[int], None]
    demoted: Callable[[int], None]
    restored: Callable[[int], None]
    removed: Callable[[int], None]

    def __init__(
        self, runtime: Runtime, admission: AdmissionConfig | None = None, curve: OnlineCurve | None = None
    ) -> None:
        self.runtime = runtime
        self.admission = admission
        self.host: Host | None = None  # once the cache has a host tier
        self.curve = curve  # None: off, or after a fault in it
        self.shortfall: Callable[[], int] | None = None  # tokens that the eviction in progress still has to free
        self.live = True  # False after a fault in what was observed
        self.mendable = True  # False after one that an empty tree does not undo
        self.inserting: str | None = None  # rid of the request whose KV is being inserted
        self.warmup: Follower | None = None
        self.own: Collection[str] = ()  # rids of the requests that warmup has in the engine
        self.step = 0
        self.seconds = 0.0
        self.faults: dict[str, int] = {}
        # (step, seconds) of a tick, (rid,) of an arrival, (rid, output tokens) of an end
        self.log: deque[tuple[Any, ...]] | None = deque(maxlen=LOGGED) if os.environ.get(VERIFY) else None
        self.checks = os.environ.get(VERIFY) == "2"
        self.counters = dict.fromkeys(
            (
                "requests",
                "tagged",
                "tag_errors",
                "finished",
                "aborted",
                "overflowed",
                "device_calls",
                "core_calls",
                "host_calls",
                "lru_calls",
                "rescued_calls",
                "trims",
                "load_backs",
            ),
            0,
        )
        self._scores: dict[int, float] | None = {}  # of the eviction call that runs; None: LRU
        self._outer: list[dict[int, float] | None] = []
        self._drain: Drain | GroupedDrain | None = None  # of the device call that runs
        self._last: int | None = None  # its latest victim
        self._plain = False  # a score failed: what is left of the call goes by LRU
        self._host: HostIndex | None = None  # leaves of the host tier, where the core feeds and asks it
        self._listen()

    def _listen(self) -> None:
        for name in TREE_EVENTS:
            setattr(self, name, self._guarded(name))

    def _guarded(self, name: str) -> Callable[..., None]:
        call = getattr(self.runtime, name)

        def tell(*args: Any) -> None:
            try:
                call(*args)
            except Exception:
                self.fail(name)

        return tell

    # ---- faults ----

    def count_fault(self, where: str) -> None:
        """Call inside `except`: count a fault, and log the first of its kind with its traceback."""
        first = where not in self.faults
        self.faults[where] = self.faults.get(where, 0) + 1
        if first:
            logger.exception("sglang-scout: fault in %s; SGLang goes on without it", where)

    def fail(self, where: str, mendable: bool = True) -> None:
        """Call inside `except`: what was observed is incomplete now, so observation and scoring end here.

        `mendable`: only of the tree, so that both begin again with an empty one.
        """
        self.count_fault(where)
        self.mendable = self.mendable and mendable
        if self.live:
            until = "the mirror is made anew or the tree is reset" if self.mendable else "the server is started again"
            logger.error("sglang-scout: after a fault in %s plain LRU decides until %s", where, until)
        self.live = False
        self._drain = None
        for name in TREE_EVENTS:
            setattr(self, name, _ignore)

    # ---- the tree ----

    def reset(self, root: int) -> None:
        """The tree is empty; `root` is its new root."""
        if not self.live and self.mendable:
            logger.warning("sglang-scout: the policy decides again")
            self.live = True
            self._listen()
            for rid in [*self.runtime.requests]:  # nobody told how they ended
                self._gone(RequestFinished(rid, aborted=True))
        if not self.live:
            return
        try:
            self.runtime.reset(root)
        except Exception:
            self.fail("reset", mendable=False)
        self._on_curve(OnlineCurve.clear)
        if self.warmup is not None:
            self.warmup.emptied()

    def added(self, node: int, parent: int, length: int, stamp: float, on_host: bool = False) -> None:
        """A leaf was inserted below `parent`, by the request that `inserting` names; `on_host`: only into that tier."""
        if not self.live:
            return
        try:
            above = self.runtime.world.nodes[parent]
            start = above.start + above.length
            if on_host:
                self.runtime.added_host(node, parent, length, start, stamp)
            else:
                self.runtime.added(node, parent, length, start, stamp, self.inserting)
        except Exception:
            self.fail("added")

    def grown(self, node: int, parent: int, length: int, start: int, stamp: float) -> None:
        """`added`, by a core that says where the node starts."""
        if not self.live:
            return
        try:
            self.runtime.added(node, parent, length, start, stamp, self.inserting)
        except Exception:
            self.fail("added")

    def reached(self, node: int, stamp: float) -> None:
        """A match or an insert walked from the root to the node: for every lookup, so without a detour."""
        if self.live:
            try:
                self.runtime.reached(node, stamp)
            except Exception:
                self.fail("reached")

    def walked(self, path: Sequence[tuple[int, float]]) -> None:
        """A match or an insert walked over these (node, stamp)."""
        if not self.live:
            return
        touched = self.runtime.touched
        try:
            for node, stamp in path:
                touched(node, stamp)
        except Exception:
            self.fail("touched")

    def is_unmatched(self, rid: str) -> bool:
        """Whether the first lookup of the request is still to come."""
        request = self.runtime.requests.get(rid)
        return request is not None and not request.matched

    # ---- requests ----

    def observe(self, event: Event) -> None:
        """Hand one event to the runtime."""
        if not self.live:
            return
        try:
            self.runtime.observe(event)
        except Exception:
            self.fail(type(event).__name__, mendable=False)

    def arrived(self, event: RequestArrived) -> None:
        """A new request; the oldest is given up where more are in flight than SGLang can hold."""
        requests = self.runtime.requests
        while self.live and len(requests) >= MAX_REQUESTS:
            self.counters["overflowed"] += 1
            self._gone(RequestFinished(next(iter(requests)), aborted=True))
        self.counters["requests"] += 1
        self.counters["tagged"] += event.tag is not None
        if self.log is not None:
            self.log.append((event.rid,))
        self.observe(event)

    def _on_curve(self, do: Callable[..., Any], *args: Any) -> Any:
        if self.curve is None:
            return None
        try:
            return do(self.curve, *args)
        except Exception:
            self.count_fault("curve")
            self.curve = None
            return None

    def matched(self, rid: str, path: Sequence[int], tokens: int, on_device: int) -> None:
        """A request's prompt was looked up: so many tokens found, and on the device; only the first time is told."""
        if self.live and self.is_unmatched(rid):
            request = self.runtime.requests[rid]
            self._on_curve(OnlineCurve.started, rid, request.prompt, request.namespace)
            self.observe(PrefixMatched(rid, path, tokens))
            if self.host is not None:
                self.host.looked_up(rid, path, tokens)
            if self.warmup is not None:
                self.warmup.matched(rid, on_device)

    def finished(self, rid: str, output_tokens: int, aborted: bool, stopped: bool) -> None:
        """A request left the engine; told once however often SGLang says so."""
        if self.live and rid in self.runtime.requests:
            self.counters["aborted" if aborted else "finished"] += 1
            if self.log is not None:
                self.log.append((rid, output_tokens))
            self._gone(RequestFinished(rid, output_tokens, aborted, stopped))

    def _gone(self, event: RequestFinished) -> None:
        """A request is over, for everybody who keeps something of it."""
        self._on_curve(OnlineCurve.finished, event.rid)
        self.observe(event)
        if self.host is not None:
            self.host.left(event.rid)
        if self.warmup is not None:
            self.warmup.left(event.rid)

    def tick(self, step: int, seconds: float) -> None:
        """The shared clock may have moved."""
        if step != self.step or seconds != self.seconds:
            self.step, self.seconds = step, seconds
            if self.log is not None:
                self.log.append((step, seconds))
            self.observe(Tick(step, seconds))

    # ---- victims ----

    def begin_walk(self) -> bool:
        """A device eviction call begins: whether `victim` will name the leaves to lose, from the index, one by one."""
        self._drain, self._last = None, None
        if not self.live:
            return False
        try:
            runtime = self.runtime
            holds = runtime.begin_eviction()
            index = runtime.index
            self._drain = index.drain(lru=not holds) if isinstance(index, GroupedIndex) else index.drain()
        except Exception:
            self._give_up()
            return False
        self.counters["device_calls"] += 1
        self.counters["lru_calls"] += not holds
        return True

    def victim(self) -> int | None:
        """The leaf to lose next; None when none is left, or the index gives up this call (see `walking`)."""
        if self._drain is None:
            return None
        try:
            node = self._drain.next()
        except Exception:
            self._give_up()
            return None
        if node is None:
            return None
        if node.id == self._last:
            self.end_walk()  # SGLang could not lose it (no room on the host, say): the index would name it for ever
            return None
        self._last = node.id
        return node.id

    def cut(self, node: int, least: int = 0) -> int | None:
        """Tokens that this victim loses, from its end, whole pages, and at least `least`; None: all of it.

        Where `shortfall` is not known, it loses all that its score speaks for.
        """
        try:
            runtime = self.runtime
            record, page = runtime.world.nodes[node], runtime.world.page_size
            short = record.length if self.shortfall is None else self.shortfall()
            if short <= 0:
                return None  # SGLang asks for one more victim before it looks whether it needs one
            drop = runtime.policy.cut(record, max(short, least), page)
        except Exception:
            self.count_fault("cut")
            return None
        return drop if 0 < drop < record.length and drop % page == 0 else None

    def _give_up(self) -> None:
        """Call inside `except`: the rest of this call goes by LRU; the index, maybe half done, is filled anew."""
        self.count_fault("score")
        self._plain = True
        self._drain = None
        try:
            index, nodes = self.runtime.index, self.runtime.world.nodes
            index.clear()
            for node in nodes.leaves():
                index.file(node)
        except Exception:
            self.fail("index")

    def mistaken(self, node: int | None) -> None:
        """The index named a node that SGLang would not lose, or none where there are leaves: the mirror is wrong."""
        try:
            raise AssertionError(f"victim {node} is no evictable leaf of the tree")
        except AssertionError:
            self.fail("victim")
        self._drain = None

    def compare(self, differences: Callable[[], Sequence[str]]) -> None:
        """Compare the mirror with the tree (`differences` says where they differ), and the index with the mirror."""
        if not self.live:
            return
        try:
            index, leaves = self.runtime.index, [*self.runtime.world.nodes.leaves()]
            lines = [*differences(), *(f"leaf {n.id} is not in the index" for n in leaves if n.id not in index)]
            if len(index) != len(leaves):
                lines.append(f"{len(leaves)} leaves, {len(index)} in the index")
            if lines:
                raise AssertionError("; ".join(lines[:5]))
        except Exception:
            self.fail("mirror")

    @property
    def walking(self) -> bool:
        """Whether the index still names the victims of the call that runs."""
        return self._drain is not None

    def end_walk(self) -> None:
        """The index names no more victims in this call."""
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.end()

    # ---- the host tier ----

    def host_reset(self) -> None:
        """The host tier is empty. From the first time on its leaves are told by `host_leaf`."""
        index, policy = self.runtime.index, self.runtime.policy
        self._host = HostIndex(policy, alone=False) if isinstance(index, GroupedIndex) else None  # type: ignore[arg-type]

    def host_leaf(self, node: int, is_leaf: bool = True) -> None:
        """The node is a leaf of the host tier now (or was touched as one), or is none any more."""
        if self._host is None or not self.live:
            return
        try:
            record = self.runtime.world.nodes.get(node) if is_leaf else None
            if record is not None:
                self._host.file(record)
            else:  # or a node that is made just now: it is told again
                self._host.drop(node)
        except Exception:
            self.fail("host_leaf")

    def host_victims(self, tokens: int) -> list[int] | None:
        """The leaves of the host tier that hold at least so many tokens together and are to be lost first, in order.

        None: the index cannot tell.
        """
        index = self._host
        if index is None or not self.live:
            return None
        try:
            drain = index.drain(lru=not self.runtime.begin_eviction())
            chosen: list[Node] = []
            while tokens > 0 and (node := drain.next()) is not None:
                tokens -= node.length
                chosen.append(node)
                index.drop(node.id)
            for node in chosen:
                index.file(node)
        except Exception:
            self.count_fault("host_index")
            self._host = None  # every leaf of the host tier is scored from here on
            return None
        return [node.id for node in chosen]

    # ---- scores ----

    def begin_call(self, leaves: Iterable[Any], kind: str) -> None:
        """An eviction call begins on these nodes: score each once. Calls nest: a device call may need host room."""
        self._outer.append(self._scores)
        self._scores = None
        self.counters[kind] += 1
        plain, self._plain = self._plain, False
        if plain or not self.live:
            return
        runtime = self.runtime
        try:
            if not runtime.begin_eviction():
                self.counters["lru_calls"] += 1
                return
            score, nodes = runtime.policy.score, runtime.world.nodes
            self._scores = {node.id: score(nodes[node.id]) for node in leaves}
        except Exception:
            self.count_fault("score")

    def end_call(self) -> None:
        """The eviction call is over."""
        self._scores = self._outer.pop() if self._outer else {}

    def priority(self, node: Any) -> Priority:
        """What the node is worth: (score, last access, id), smallest goes first; LRU's own order after a fault."""
        scores = self._scores
        if scores is None or not self.live:
            return (0.0, node.last_access_time, node.id)
        score = scores.get(node.id)
        if score is None:  # became a leaf during the call, or nobody began one
            try:
                score = self.runtime.score(node.id)
            except Exception:
                self.count_fault("score")
                score = 0.0
        return (score, node.last_access_time, node.id)

    # ---- looking in ----

    def snapshot(self) -> dict[str, Any]:
        """The runtime's numbers, with ours; JSON-ready."""
        inside: dict[str, Any] = {}
        try:
            inside = self.runtime.snapshot()
        except Exception:
            self.count_fault("snapshot")
        counts = {**self.counters, "in_flight": len(self.runtime.requests)}
        if self.host is not None:
            inside["host"] = self.host.snapshot()
        if self.warmup is not None:
            inside["warmup"] = self.warmup.snapshot()
        curve = self._on_curve(OnlineCurve.snapshot)
        return {**inside, "live": self.live, "counters": counts, "curve": curve, "faults": dict(self.faults)}
