"""The simulator's two tiers against SGLang's own HiCache: the same requests find, restore and write the same tokens."""

from collections.abc import Sequence
from typing import Any

import pytest

from radix_policy.admission import AdmissionConfig
from radix_policy.simulator.tiers import LOAD_LEAST, TieredEngine
from tests.tree.test_simulator_matches_sglang import OURS, Item, RealServer, SimulatedServer, stream

CORES = ("python", "rust")
SMALL = {"admission_chunk": 16, "admission_kappa": 8}  # the workloads here have short prompts


class TieredServer(SimulatedServer):
    """The simulator with a host tier."""

    engine: TieredEngine

    def __init__(self, policy: str, capacity: int, page: int, core: str, host: int, admission: AdmissionConfig) -> None:
        self.core, self.host, self.admission = core, host, admission
        super().__init__(policy, capacity, page)

    def make_engine(self, capacity: int, page: int, chunk: int) -> TieredEngine:
        rust, ours = self.core == "rust", self.runtime.policy.name in OURS
        return TieredEngine(
            self.runtime,
            capacity,
            self.host,
            page,
            chunk,
            admission=self.admission,
            forgets=rust and ours,
            ordered=ours and not rust,
        )


def pair(policy: str, core: str, page: int, capacity: int, host: int, mode: str) -> tuple[RealServer, TieredServer]:
    keys: dict[str, Any] = {"admission": mode, **SMALL}
    real = RealServer(policy, capacity, page, core=core, host_tokens=host, config=keys if policy in OURS else {})
    real.cache.load_back_threshold = LOAD_LEAST  # SglangTree sets it to 0
    room = real.cache.cache_controller.mem_pool_host.available_size()
    return real, TieredServer(policy, capacity, page, core, room, AdmissionConfig(**keys))


def differences(real: RealServer, simulated: TieredServer, items: Sequence[Item]) -> list[str]:
    """One request after the other through both; what differed."""
    found = []
    pool, tree = real.cache.cache_controller.mem_pool_host, simulated.engine.tree
    for number, item in enumerate(items):
        for server in (real, simulated):
            server.tick(40 * number, 0.4 * number)
        cached, request = real.start(item)
        expected, run = simulated.start(item)
        request.finish()
        simulated.finish(run)
        theirs = (cached, real.restored, real.free, pool.size - pool.available_size())
        ours = (expected, tree.restored, simulated.free, tree.host_used)
        if theirs != ours:
            found.append(f"{item[0]}: cached, restored, free, used on the host: SGLang {theirs}, simulator {ours}")
    return found


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", ["lru", *OURS])
def test_host_tier(policy: str, core: str, page: int) -> None:
    workload, items = stream("selector", 5, 4, 130)
    capacity = 2 * workload.largest // page * page
    real, simulated = pair(policy, core, page, capacity, 2 * capacity // page * page, "none")
    found = differences(real, simulated, items)
    assert not found, found[:3]
    assert real.restored > capacity and simulated.engine.tree.host_evicted > capacity, "no pressure"


@pytest.mark.parametrize("mode", ["fixed", "conditioned", "measured"])
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", OURS)
def test_admission(policy: str, core: str, mode: str) -> None:
    workload, items = stream("selector", 9, 16, 160)
    capacity = 2 * workload.largest
    real, simulated = pair(policy, core, 1, capacity, 2 * capacity, mode)
    found = differences(real, simulated, items)
    assert not found, found[:3]
    assert real.bridge is not None and real.bridge.live and not real.bridge.faults
    host = real.bridge.snapshot()["host"]
    assert host["asked"] == len(items)
    assert host["declined"] == simulated.engine.admission.declined > 0
    assert host["refused_tokens"] > 0


@pytest.mark.parametrize("core", CORES)
def test_a_host_tier_smaller_than_the_device_or_than_one_request(core: str) -> None:
    workload, items = stream("debate", 6, 4, 100)
    capacity = 2 * workload.largest
    for host in (capacity // 2, workload.largest // 3):
        for mode in ("none", "measured"):
            real, simulated = pair("scout", core, 1, capacity, host, mode)
            found = differences(real, simulated, items)
            assert not found, (host, mode, found[:3])
