"""What could have been hit: the offline optimum, and a whole-leaf cache with an oracle.

`opt` is a true upper bound for every policy that sees the same order. Each token (each page, when pages are larger)
that a prompt could hit and that was there before is an interval, from the moment when the last request that held it
finished to the moment when the next one starts. Keeping it takes one unit of memory all along and earns one unit, so
the most that can be kept is found by one sweep: when more is kept than fits beside what running requests hold, the
intervals that end last are dropped (interval packing with time-varying capacity; the exchange argument needs unit
sizes and unit values only). A parent's next use is never later than its child's, so the kept set is a tree by itself.

Tokens with the same history form a segment: the nodes of the radix tree of the whole workload, never evicted.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node
from radix_policy.simulator.loop import Outcome
from radix_policy.simulator.tree import SimNode, SimTree
from radix_policy.workloads.base import Workload

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World

NEVER = 1e18  # position of a use that does not come


class Plan:
    """Every request of a workload as segments of one static tree. Depends on the page size alone: keep it."""

    def __init__(self, workload: Workload, page_size: int = 1) -> None:
        self.page_size = page_size
        tree = SimTree(page_size=page_size)
        calls = [call for session in workload.sessions for call in session.calls]
        bounds = []
        for call in calls:
            spans = call.prompt + call.output
            kv = call.prompt_tokens + call.output_tokens - 1
            tree.insert(spans, kv)
            tree.insert(spans, call.prompt_tokens)
            tree.match(spans, call.prompt_tokens - 1)
            bounds.append((spans, kv))
        number: dict[int, int] = {}
        lengths = array("q")
        self.paths: list[array[int]] = []  # by call: its segments, shallow first
        self.ends: list[array[int]] = []  # by call: where each segment ends, in tokens
        self.hittable: list[int] = []  # by call: how many segments a match may return
        self.prompts: list[int] = []  # by call: how many segments the prompt fills
        for call, (spans, kv) in zip(calls, bounds):
            path: list[SimNode] = []
            node = tree.match(spans, kv).node
            while node is not tree.root:
                path.append(node)
                node = node.parent  # type: ignore[assignment]
            path.reverse()
            ids = array("q")
            for node in path:
                if node.id not in number:
                    number[node.id] = len(number)
                    lengths.append(node.length)
                ids.append(number[node.id])
            ends = array("q", [node.end for node in path])
            whole = (call.prompt_tokens - 1) // page_size * page_size
            self.paths.append(ids)
            self.ends.append(ends)
            self.hittable.append(bisect_left(ends, whole + 1))
            self.prompts.append(bisect_left(ends, call.prompt_tokens // page_size * page_size + 1))
        self.lengths = lengths

    def optimum(self, log: Sequence[int], capacity: int) -> "array[int]":
        """Cached tokens of each request, in the order of starts, under the optimum for this order.

        `log` is `Outcome.log`: per event 2 * call + (1 when it finishes) and the tokens locked at that moment.
        """
        capacity -= capacity % self.page_size
        events = len(log) // 2
        held = array("l", bytes(array("l").itemsize * len(self.lengths)))  # running requests with it in their prompt
        since = array("q", [-1]) * len(self.lengths)  # event at which nobody held it any more
        begins: list[list[tuple[int, int]]] = [[] for _ in range(events)]  # (end event, tokens) by first event
        free = array("q", bytes(8 * events))  # hits on what runs anyway, by event
        lengths, paths = self.lengths, self.paths
        for event in range(events):
            call, finish = divmod(log[2 * event], 2)
            path, prompt = paths[call], self.prompts[call]
            if finish:
                for s in path[:prompt]:
                    held[s] -= 1
                    if not held[s]:
                        since[s] = event
                for s in path[prompt:]:
                    if not held[s]:
                        since[s] = event
                continue
            wanted: dict[int, int] = {}
            for s in path[: self.hittable[call]]:
                if held[s]:
                    free[event] += lengths[s]
                elif since[s] >= 0:
                    wanted[since[s]] = wanted.get(since[s], 0) + lengths[s]
            for begin, tokens in wanted.items():
                begins[begin].append((event, tokens))
            for s in path[:prompt]:
                held[s] += 1
        kept = array("q", bytes(8 * events))  # tokens kept that are next used at this event
        total = 0
        latest: list[int] = []  # events with something kept, latest first
        cached = array("q")
        for event in range(events):
            total -= kept[event]
            if not log[2 * event] % 2:
                cached.append(free[event] + kept[event])
            over = total - (capacity - log[2 * event + 1])
            while over > 0:
                end = -latest[0]
                gone = min(over, kept[end])
                kept[end] -= gone
                total -= gone
                over -= gone
                if not kept[end]:
                    heapq.heappop(latest)
            for end, tokens in begins[event]:
                if not kept[end]:
                    heapq.heappush(latest, -end)
                kept[end] += tokens
                total += tokens
        return cached


def optimal(plan: Plan, reference: Outcome) -> Outcome:
    """The optimum for the order of a `reference` run with fixed service, as an Outcome."""
    cached = plan.optimum(reference.log, reference.capacity)
    return Outcome(
        "opt",
        reference.capacity,
        reference.concurrency,
        prompt_tokens=reference.prompt_tokens,
        cached_tokens=sum(cached),
        requests=reference.requests,
        unserved=reference.unserved,
        unserved_tokens=reference.unserved_tokens,
        seconds=reference.seconds,
        order=reference.order,
        prompts=reference.prompts,
        cached=cached,
        calls=reference.calls,
        log=reference.log,
    )


class Oracle:
    """When each segment is used next, for one order of requests."""

    def __init__(self, plan: Plan, calls: Sequence[int]) -> None:
        self.plan = plan
        self.position = {call: i for i, call in enumerate(calls)}
        self._uses: list[array[int]] = [array("q") for _ in plan.lengths]
        for i, call in enumerate(calls):
            for s in plan.paths[call][: plan.hittable[call]]:
                self._uses[s].append(i)

    def next_use(self, segment: int, now: int) -> float:
        """Position of the first request at or after `now` that could hit the segment; NEVER when there is none."""
        uses = self._uses[segment]
        i = bisect_left(uses, now)
        return uses[i] if i < len(uses) else NEVER


def belady(oracle: Oracle, trim: bool = False) -> type[EvictionPolicy]:
    """A policy class that drops the leaf whose next use is farthest away; with `trim`, from the far end of a leaf."""

    class Belady(EvictionPolicy):
        """Furthest next use on whole leaves (a leaf is used when its first token is), or on the tails of leaves."""

        name = "beladyP" if trim else "belady"
        trims = trim

        def __init__(self, world: "World", config: Any = None) -> None:
            super().__init__(world, config)
            self.now = 0  # requests before this one have started

        def on_insert(self, node: Node, request: "Request | None") -> None:
            if request is None:
                node.state = ()
                return
            call = int(request.rid[1:])
            self._started(call)
            plan = oracle.plan
            ends, path = plan.ends[call], plan.paths[call]
            i, at, parts = bisect_left(ends, node.start + 1), node.start, []
            while at < node.start + node.length:
                parts.append((path[i], min(ends[i], node.start + node.length) - at))
                at, i = ends[i], i + 1
            node.state = tuple(parts)

        def on_split(self, prefix: Node, suffix: Node) -> None:
            parts, head, room = list(suffix.state), [], prefix.length
            while room > 0 and parts:
                segment, tokens = parts.pop(0)
                step = min(tokens, room)
                head.append((segment, step))
                room -= step
                if step < tokens:
                    parts.insert(0, (segment, tokens - step))
            prefix.state, suffix.state = tuple(head), tuple(parts)

        def on_finish(self, request: "Request") -> None:
            self._started(int(request.rid[1:]))

        def score(self, node: Node) -> float:
            return -self._next(node)

        def class_of(self, node: Node) -> str | None:
            return "dead" if self._next(node) == NEVER else None

        def tail(self, node: Node) -> int:
            """Tokens at the node's end that are all used next at the same time."""
            tokens, use = 0, None
            for segment, length in reversed(node.state):
                when = oracle.next_use(segment, self.now)
                if use not in (None, when):
                    break
                use = when
                tokens += length
            return tokens

        def _next(self, node: Node) -> float:
            return oracle.next_use(node.state[-1 if trim else 0][0], self.now) if node.state else NEVER

        def _started(self, call: int) -> None:
            position = oracle.position.get(call, -1)
            if position >= self.now:
                self.now = position + 1

    return Belady
