"""What the policy costs: speed of the simulator, time of the runtime per request, size of its state."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from benchmarks.results import progress
from radix_policy.runtime import Runtime
from radix_policy.simulator import Loop
from radix_policy.workloads import Workload, make

SPEED_AT = ("selector", 16, 8)  # workload, concurrency, capacity in F
EVENTS_AT = ("chain24", 64, 32)  # 24 agents
POLICIES = ("lru", "cachescout", "scout")
WHOLE = "scout-trim"  # scout that evicts whole leaves
_TOLD = ("added", "split", "touched", "counted", "locked", "unlocked", "removed", "observe")


def measure_cost(seed: int, quick: bool = False) -> dict[str, Any]:
    """Everything, in CPU time of this process, the best of three runs."""
    runs = 1 if quick else 3
    name, concurrency, factor = SPEED_AT
    workload = make(name, seed=seed, concurrency=concurrency, sessions=6 if quick else None)
    speed = {}
    for policy in POLICIES:
        seconds = min(_speed(workload, policy, concurrency, int(factor * workload.largest)) for _ in range(runs))
        speed[policy] = round(workload.requests / seconds)
        progress(f"cost: {name} C={concurrency} {policy}: {speed[policy]:,} requests/s")
    name, concurrency, factor = EVENTS_AT
    workload = make(name, seed=seed, concurrency=concurrency, sessions=8 if quick else 96)
    runtime: dict[str, Any] = {}
    for policy in (*POLICIES, WHOLE):
        runtime[policy] = _per_request(workload, policy, concurrency, int(factor * workload.largest), runs)
        progress(f"cost: {name} C={concurrency} {policy}: {runtime[policy]['us_per_request']} us/request")
    return {
        "speed": {"workload": SPEED_AT[0], "concurrency": SPEED_AT[1], "capacity": f"{SPEED_AT[2]}F"}
        | {"requests_per_s": speed},
        "runtime": {"workload": name, "concurrency": concurrency, "capacity": f"{factor}F", "agents": 24}
        | {"requests": workload.requests, "policies": runtime},
    }


def _speed(workload: Workload, policy: str, concurrency: int, capacity: int) -> float:
    loop = Loop(workload, policy, capacity=capacity, concurrency=concurrency)
    began = time.process_time()
    loop.run()
    return time.process_time() - began


def _per_request(workload: Workload, policy: str, concurrency: int, capacity: int, runs: int) -> dict[str, Any]:
    """What the runtime alone does: its calls are recorded in one run and repeated without the tree.

    What it takes to repeat them on something that does nothing is left out.
    """
    config = {"trim": False} if policy == WHOLE else {}
    name = policy.partition("-")[0]
    loop = Loop(workload, name, capacity=capacity, concurrency=concurrency, config=config)
    tape = Tape(loop.runtime)
    loop.runtime = loop.engine.runtime = loop.engine.tree.listener = tape  # type: ignore[assignment]
    loop.run()
    best, runtime = float("inf"), Runtime(name, config)
    idle = min(tape.idle() for _ in range(runs))
    for _ in range(runs):
        runtime = Runtime(name, config)
        seconds = tape.play(runtime, loop.engine.tree.root.id)
        best = min(best, seconds)
    nodes = size_of(runtime.world.nodes)
    return {
        "us_per_request": round(1e6 * (best - idle) / workload.requests, 1),
        "events_per_request": round(len(tape.calls) / workload.requests, 1),
        "victims_per_request": round(sum(name == "next" for name, _ in tape.calls) / workload.requests, 2),
        "nodes": len(runtime.world.nodes),
        "node_bytes": nodes,
        "other_bytes": size_of(runtime) - nodes,
    }


class Tape:
    """Stands for a runtime, passes every call on and keeps it."""

    def __init__(self, runtime: Runtime) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._runtime = runtime
        for name in _TOLD:
            setattr(self, name, self._keeping(name, getattr(runtime, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def _keeping(self, name: str, told: Callable[..., None]) -> Callable[..., None]:
        keep = self.calls.append

        def call(*args: Any) -> None:
            keep((name, args))
            told(*args)

        return call

    @contextmanager
    def evicting(self) -> Iterator["_Drain"]:
        """An eviction call, its victims kept too."""
        self.calls.append(("evicting", ()))
        with self._runtime.evicting() as drain:
            yield _Drain(self, drain)
        self.calls.append(("evicted", ()))

    def idle(self) -> float:
        """CPU seconds of the same without a runtime."""
        nothing = _Nothing()
        methods = dict.fromkeys(_TOLD, nothing)
        with _cpu_seconds() as spent:
            for name, args in self.calls:
                method = methods.get(name)
                if method is not None:
                    method(*args)
                elif name == "next":
                    nothing.next()
        return spent[0]

    def play(self, runtime: Runtime, root: int) -> float:
        """Repeat every call on a fresh runtime; CPU seconds. RuntimeError when it chooses another victim."""
        runtime.reset(root)
        methods = {name: getattr(runtime, name) for name in _TOLD}
        context: Any = None
        drain: Any = None
        with _cpu_seconds() as spent:
            for name, args in self.calls:
                method = methods.get(name)
                if method is not None:
                    method(*args)
                elif name == "next":
                    node = drain.next()
                    if (None if node is None else node.id) != args[0]:
                        raise RuntimeError(
                            f"victim {node and node.id} instead of {args[0]}: the policy is not repeatable"
                        )
                elif name == "evicting":
                    context = runtime.evicting()
                    drain = context.__enter__()
                else:
                    context.__exit__(None, None, None)
        return spent[0]


@contextmanager
def _cpu_seconds() -> Iterator[list[float]]:
    """Where the CPU seconds inside will stand; what exists before is hidden from the collector, which would walk it."""
    spent: list[float] = []
    gc.collect()
    gc.freeze()
    began = time.process_time()
    try:
        yield spent
    finally:
        spent.append(time.process_time() - began)
        gc.unfreeze()


class _Nothing:
    def __call__(self, *args: Any) -> None: ...

    def next(self) -> None: ...


class _Drain:
    def __init__(self, tape: Tape, drain: Any) -> None:
        self._keep, self._drain = tape.calls.append, drain

    def next(self) -> Any:
        node = self._drain.next()
        self._keep(("next", (None if node is None else node.id,)))
        return node


_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def size_of(thing: Any) -> int:
    """Bytes of an object and all that it holds; classes, modules and functions count for nothing."""
    seen: set[int] = set()
    todo, total = [thing], 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _SHARED):
            continue
        total += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return total
