"""q: whether a call really runs over what the call before left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.reuse import ReuseTable, kind_of

LEAF = kind_of(False, 0)
OUTPUT = kind_of(True, 0)


def test_kinds_tell_output_from_prompt_and_no_hit_from_one_and_more() -> None:
    assert [kind_of(o, h) for o in (False, True) for h in (0, 1, 2)] == [0, 1, 2, 3, 4, 5]
    assert kind_of(True, 99) == 5


def test_an_unknown_kind_is_taken_to_be_reused() -> None:
    assert ReuseTable().rates().q(3, LEAF, 0) == ReuseTable().rates().q(-1, OUTPUT, 7) == 1.0


def test_q_by_hand() -> None:
    table = ReuseTable()
    table.hit(1, LEAF, 0)  # trial and hit at bypass 0
    table.lost(1, LEAF, 2)  # trials at bypasses 0 and 1, no hit
    pooled = [(1 + 1) / (2 + 1), (0 + 1) / (1 + 1), 1.0, 1.0]
    assert [table.rates().q(-1, LEAF, b) for b in range(4)] == pytest.approx(pooled)
    own = [(1 + 2 * pooled[0]) / (2 + 2), (0 + 2 * pooled[1]) / (1 + 2), 1.0, 1.0]
    assert [table.rates().q(1, LEAF, b) for b in range(4)] == pytest.approx(own)
    assert table.rates().q(0, LEAF, 0) == pytest.approx(pooled[0])  # agent 0 has a row but no counts: the pooled ratio
    assert table.rates().q(1, OUTPUT, 0) == 1.0  # another kind learns nothing from it


def test_a_hit_after_bypasses_counts_a_trial_for_each() -> None:
    table = ReuseTable()
    table.hit(0, LEAF, 5)  # passed by at 0, 1, 2, 3 and 4, hit at 5; 3, 4 and 5 are one bucket
    pooled = [(0 + 1) / (1 + 1)] * 3 + [(1 + 1) / (3 + 1)]
    assert [table.rates().q(-1, LEAF, b) for b in range(4)] == pytest.approx(pooled)
    assert table.rates().q(-1, LEAF, 3) == table.rates().q(-1, LEAF, 50)


def test_a_node_evicted_before_its_next_chance_teaches_nothing() -> None:
    table = ReuseTable()
    for bypass in (0, -1):
        table.lost(0, LEAF, bypass)
    assert table.rates().q(0, LEAF, 0) == 1.0


def test_an_append_only_thread_comes_to_be_trusted_after_a_bad_start() -> None:
    table = ReuseTable()
    for _ in range(20):
        table.lost(2, LEAF, 1)
    assert table.rates().q(2, LEAF, 0) < 0.1
    for _ in range(2000):
        table.hit(2, LEAF, 0)
    assert table.rates().q(2, LEAF, 0) > 0.98


def test_a_stale_branch_falls_below_the_fresh_leaf_after_one_bypass() -> None:
    """An agent that appends most of the time; what it once passes by it never takes up again."""
    table = ReuseTable()
    for _ in range(40):
        for _ in range(4):
            table.hit(1, LEAF, 0)
        table.lost(1, LEAF, 3)
    fresh = table.rates().q(1, LEAF, 0)
    assert fresh == pytest.approx(0.8, abs=0.02)
    assert all(table.rates().q(1, LEAF, m) < 0.1 * fresh for m in (1, 2))


def test_agents_differ_and_a_new_one_starts_from_all_of_them() -> None:
    table = ReuseTable()
    for _ in range(300):
        table.hit(1, LEAF, 0)
        table.lost(2, LEAF, 1)
    assert table.rates().q(1, LEAF, 0) > 0.99
    assert table.rates().q(2, LEAF, 0) < 0.01
    assert table.rates().q(7, LEAF, 0) == pytest.approx(0.5, abs=0.01)


def test_halving_keeps_the_ratio_and_lets_a_change_through() -> None:
    table = ReuseTable()
    for _ in range(20_000):
        table.hit(0, LEAF, 0)
        table.lost(0, LEAF, 1)
    assert table.rates().q(0, LEAF, 0) == pytest.approx(0.5, abs=0.01)
    for _ in range(20_000):
        table.hit(0, LEAF, 0)
    assert table.rates().q(0, LEAF, 0) > 0.97


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 5), st.integers(-2, 9)), max_size=80))
def test_q_is_a_probability_and_never_zero(moves: list[tuple[bool, int, int, int]]) -> None:
    table = ReuseTable()
    for hit, agent, kind, bypass in moves:
        if hit:
            table.hit(agent, kind, max(bypass, 0))
        else:
            table.lost(agent, kind, bypass)
    for agent in range(-1, 5):
        for kind in range(6):
            assert all(0 < table.rates().q(agent, kind, b) <= 1 for b in range(6))
