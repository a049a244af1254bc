"""The guard: its shadow is a cache that LRU could have, its account is near the truth, and what a trial may lose."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.guard import Guard, GuardConfig
from radix_policy.prompts import SpanPrompt
from radix_policy.simulator import Study
from radix_policy.workloads import make
from tests.unit.test_scout import Player, moves


@settings(max_examples=80, deadline=None)
@given(moves, st.integers(90, 200))
def test_the_shadow_drops_leaves_only_and_is_as_large_as_the_cache(steps: list[Any], capacity: int) -> None:
    player = Player(capacity=capacity, every=1, guard_budget=1e6, guard_stake=1e6)
    policy, nodes = player.stage.runtime.policy, player.stage.world.nodes
    assert isinstance(policy, ScoutPolicy)
    guard = policy.guard
    for step in steps:
        player.play(*step)
        ghosts, marked = guard._ghosts, guard._marked
        assert not marked.keys() & guard._at.keys(), "the shadow dropped what a ghost hangs on"
        assert sum(g.tokens for g in ghosts.values()) == guard._ghost_tokens
        assert sum(marked.values()) == guard._marked_tokens == sum(nodes[n].length for n in marked)
        assert Counter(g.attached for g in ghosts.values()) == {n: len(held) for n, held in guard._at.items()}
        below = Counter(g.head for g in ghosts.values())
        assert all(g.below == below[n] for n, g in ghosts.items())


@pytest.mark.parametrize("identity", ["tagged", "scrambled"])
@pytest.mark.parametrize("name", ["random", "debate", "selector"])
def test_no_loss_is_hidden_from_the_guard_even_when_what_is_called_dead_is_alive(name: str, identity: str) -> None:
    study = Study(make(name, seed=11, concurrency=4, sessions=16))
    capacity = 4 * study.workload.largest
    lru = study.run("lru", capacity, 4)
    free = study.run("scout", capacity, 4, identity=identity, config={"guard_budget": 1e6, "guard_stake": 1e6})
    account = free.snapshot["guard_gained_tokens"] - free.snapshot["guard_lost_tokens"]
    assert free.snapshot["guard_trials"] == 1
    assert account <= free.cached_tokens - lru.cached_tokens + 0.01 * lru.prompt_tokens


class Losing(Guard):
    """A guard that is told what each call loses."""

    loss = 0

    def _ask(self, prompt: Any, hanging: list[int], session: int) -> int:
        return self.loss

    def lose(self, tokens: int) -> bool:
        """One call of 100 tokens loses so many; whether the policy is still in control."""
        self.loss = tokens
        self._at = {0: [1]}
        self.matched(SpanPrompt(((1, 100),)), [], 0, 1)
        return self.in_control


def test_a_trial_may_lose_its_stake_and_once_it_has_gained_as_much_the_budget() -> None:
    fresh = Losing(GuardConfig(guard_stake=1.0, guard_budget=3.0), lambda _: None)
    assert fresh.lose(100)
    assert not fresh.lose(1)
    proven = Losing(GuardConfig(guard_stake=1.0, guard_budget=3.0), lambda _: None)
    proven.regret = -110.0
    assert proven.lose(10)
    assert proven.lose(400)
    assert not proven.lose(1)


def test_a_stake_above_the_budget_counts_as_the_budget() -> None:
    guard = Losing(GuardConfig(guard_stake=5.0, guard_budget=2.0), lambda _: None)
    assert guard.lose(200)
    assert not guard.lose(1)


def test_failures_in_a_row_lower_the_stake_down_to_a_quarter() -> None:
    guard = Losing(GuardConfig(guard_stake=1.0, guard_budget=3.0), lambda _: None)
    for stake in (100, 69, 48, 34, 25, 25):
        assert guard.lose(stake)
        assert not guard.lose(2)
        guard._resting = 0.0
        assert guard.begin(())


def test_rests_grow_threefold_until_a_trial_gains_a_whole_budget() -> None:
    guard = Losing(GuardConfig(guard_stake=1.0, guard_budget=3.0, guard_rest=0.5), lambda _: None)
    guard.held, rests = 1000, []
    for gain in (0, 0, 0, 0, 0, 0, 310, 0):
        guard.regret = -float(gain)
        if gain:
            guard.lose(1)
        guard.lose(1000)
        rests.append(guard._resting)
        guard._resting = 0.0
        assert guard.begin(())
    assert rests == [500, 1500, 4500, 13500, 32000, 32000, 500, 1500]
