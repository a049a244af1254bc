"""What scout must not lose again: hit rates on fixed seeds of the generator, small enough to be played in seconds."""

from functools import cache

import pytest

from radix_policy.simulator import Outcome, Study
from radix_policy.workloads import make

# workload, concurrency, capacity in units of the largest request
POINTS = (
    ("pipeline", 4, 4.0),
    ("selector", 4, 4.0),
    ("gsm8k", 4, 4.0),
    ("random", 4, 2.0),
    ("supervisor", 2, 3.0),
    ("drift", 4, 4.0),
    ("pollution", 4, 8.0),
)
POLICIES = ("lru", "scout", "opt")


@cache
def played(name: str, concurrency: int, factor: float) -> dict[str, Outcome]:
    workload = make(name, seed=11, concurrency=concurrency, sessions=16)
    study, capacity = Study(workload), int(factor * workload.largest)
    return {policy: study.run(policy, capacity, concurrency) for policy in POLICIES}


def points(name: str, concurrency: int, factor: float) -> dict[str, float]:
    """Hit rates in percent."""
    return {policy: 100 * outcome.hit_rate for policy, outcome in played(name, concurrency, factor).items()}


@pytest.mark.parametrize(("name", "gain"), [("pipeline", 15.0), ("selector", 5.0)])
def test_scout_gains_on_lru_where_agents_are_predictable(name: str, gain: float) -> None:
    rates = points(name, 4, 4.0)
    assert rates["scout"] >= rates["lru"] + gain


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}-C{p[1]}-{p[2]:g}F")
def test_scout_is_nowhere_worse_than_lru_by_half_a_point_and_nobody_beats_the_optimum(
    point: tuple[str, int, float],
) -> None:
    rates = points(*point)
    assert rates["scout"] > rates["lru"] - 0.5
    assert max(rates["lru"], rates["scout"]) <= rates["opt"] + 1e-9
    assert 0 < rates["opt"] < 100


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}-C{p[1]}-{p[2]:g}F")
def test_every_policy_is_asked_the_same_requests_in_the_same_order(point: tuple[str, int, float]) -> None:
    outcomes = played(*point)
    assert len({o.order for o in outcomes.values()}) == 1
    assert len({tuple(o.calls) for o in outcomes.values()}) == 1
    assert len({tuple(o.prompts) for o in outcomes.values()}) == 1
    assert outcomes["lru"].requests > 50


@pytest.mark.parametrize("name", ["pipeline", "selector"])
def test_the_guard_costs_nothing_with_good_identity_and_wrong_identity_costs_little(name: str) -> None:
    workload = make(name, seed=11, concurrency=4, sessions=16)
    study, capacity = Study(workload), 4 * workload.largest
    free = study.run("scout", capacity, 4, config={"guard": False}).hit_rate
    assert points(name, 4, 4.0)["scout"] >= 100 * free - 0.5
    for identity in ("scrambled", "scrambled-fresh"):
        wrong = study.run("scout", capacity, 4, identity=identity)
        assert 100 * wrong.hit_rate >= points(name, 4, 4.0)["lru"] - 3.0
        assert wrong.order == played(name, 4, 4.0)["lru"].order
