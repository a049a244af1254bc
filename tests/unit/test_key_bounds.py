"""Every key of scout at the ends of what it may be: no division by zero, no overflow, scores stay chances."""

import math

import pytest

from benchmarks.study_keys import Key, keys
from radix_policy.simulator import Loop
from radix_policy.workloads import make

_WORKLOAD = make("selector", seed=5, sessions=5)


def ends() -> list[tuple[Key, float]]:
    found = []
    for key in keys():
        if isinstance(key.default, bool):
            found.append((key, not key.default))
        elif isinstance(key.default, int | float):
            found += [(key, end) for end in (key.low, key.high) if end is not None and math.isfinite(end)]
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("key", "value"), ends(), ids=lambda x: x.name if isinstance(x, Key) else str(x))
def test_a_key_may_be_all_that_it_may_be(key: Key, value: float) -> None:
    config = {key.name: type(key.default)(value)}
    loop = Loop(_WORKLOAD, "scout", capacity=2 * _WORKLOAD.largest, concurrency=3, config=config)
    outcome = loop.run()
    assert outcome.requests == _WORKLOAD.requests and outcome.evicted_tokens > 0
    runtime = loop.runtime
    runtime.policy.refresh()
    assert all(0.0 <= runtime.policy.score(node) <= 1.0 for node in runtime.world.nodes)
