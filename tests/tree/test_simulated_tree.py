"""The simulator's tree under the same suite as SGLang's, and both side by side."""

import random

import pytest

from tests.tree.conformance import Conformance, blocks, machine
from tests.tree.trees import SglangTree, SimulatedTree, assert_mirror


class TestSimulatedTree(Conformance):
    def make(self, page_size: int, capacity: int = 256, policy: str = "scout") -> SimulatedTree:
        return SimulatedTree(page_size, capacity, policy)


TestSimulatedMachine = machine(SimulatedTree, examples=40).TestCase


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_simulated_tree_is_sglangs(page_size: int) -> None:
    pytest.importorskip("sglang")
    real, simulated = SglangTree(page_size, 512, "scout"), SimulatedTree(page_size, 512)
    rng = random.Random(3)
    for _ in range(300):
        tokens = blocks(*(rng.randint(0, 2) for _ in range(rng.randint(1, 5))))
        tokens = tokens[: rng.randint(1, len(tokens))]
        what = rng.random()
        if what < 0.5:
            assert real.insert(tokens) == simulated.insert(tokens)
        elif what < 0.8:
            assert real.match(tokens) == simulated.match(tokens)
        else:
            need = rng.randint(1, 100)
            assert real.evict(need) == simulated.evict(need)
        assert shape(real) == shape(simulated)
    assert_mirror(real)
    assert_mirror(simulated)


def shape(tree: SglangTree | SimulatedTree) -> list[tuple[int, int, int]]:
    """(place in LRU order, start, length) of every node: ids and the clocks' values may differ."""
    nodes = sorted(tree.truth().values(), key=lambda n: n.stamp)
    return [(place, n.start, n.length) for place, n in enumerate(nodes)]
