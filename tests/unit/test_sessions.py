"""Sessions: how many are kept, when one is over, how it comes back, and that they do not disturb each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.nodes import UNKNOWN
from radix_policy.sessions import Session, SessionTable
from tests.unit.stage import Calls

# ---- the table ----


def test_beyond_the_cap_the_session_called_longest_ago_is_dropped() -> None:
    dropped: list[Session] = []
    table = SessionTable(3, dropped.append)
    first, second, third = (table.open("", key) for key in "abc")
    assert table.open("", "a") is first  # called again: now the latest
    fourth = table.open("", "d")
    assert dropped == [second] and table.dropped == 1
    assert [s.key for s in table] == ["c", "a", "d"] and len(table) == 3
    assert table.get(second.id) is None and table.find("", "b") is None
    again = table.open("", "b")
    assert again is not second and again.id not in (first.id, second.id, third.id, fourth.id)
    assert dropped == [second, third]
    assert set(table.live) == {first.id, fourth.id, again.id}


def test_equal_keys_of_two_namespaces_are_two_sessions() -> None:
    table = SessionTable(8)
    assert table.open("x", "s") is not table.open("y", "s")
    assert table.find("", "s") is None


def test_a_call_moves_the_trail_the_visits_and_the_entry() -> None:
    table = SessionTable(8)
    session = table.open("", "s")
    assert (session.agent, session.entry, session.trail, session.calls) == (UNKNOWN, UNKNOWN, (UNKNOWN, UNKNOWN), 0)
    for at, agent in enumerate((4, 2, 4, 7)):
        table.called(session, agent, float(at))
        table.finished(session, at + 0.5)
    assert (session.agent, session.entry, session.trail, session.calls) == (7, 4, (2, 4), 4)
    assert session.visits == {4: 2, 2: 1, 7: 1}
    assert (session.started_at, session.finished_at, session.running) == (3.0, 3.5, 0)


def test_silent_sessions_are_those_that_run_nothing_and_finished_before() -> None:
    table = SessionTable(8)
    a, b, c = (table.open("", key) for key in "abc")
    for at, session in enumerate((a, b, c)):
        table.called(session, 0, 0.0)
        table.finished(session, float(at))
    assert table.silent_since(0.0) == []
    assert table.silent_since(1.5) == [a, b]
    table.called(a, 0, 2.0)
    assert table.silent_since(9.0) == [b, c]
    table.finished(a, 3.0)
    assert table.silent_since(9.0) == [b, c, a]
    table.end(b)
    assert table.silent_since(9.0) == [c, a]


def test_a_session_dropped_while_it_runs_leaves_no_trace_when_it_finishes() -> None:
    calls = Calls(max_sessions=1)
    rid = calls.arrive("a", "x", final=True)
    old = calls.session("a")
    calls.call("b", "x")
    assert old.ended and len(calls.world.sessions) == 1
    before = calls.counts()
    calls.finish(rid)
    assert calls.counts() == before  # a dropped session taught no END, and its `final` teaches none either
    calls.tick(1e6)
    assert [s.key for s in calls.world.sessions] == ["b"]
    assert old.id not in calls.world.sessions.live


# ---- when it is over ----


def paced(calls: Calls, gap: float = 1.0, times: int = 40) -> None:
    """Let the runtime learn that gaps are this long, from a session that is closed then."""
    for _ in range(times):
        calls.call("pacer", "p", gap)
    calls.close("pacer")


def test_a_session_silent_for_three_of_the_longest_usual_gaps_is_over() -> None:
    calls = Calls()
    paced(calls)
    calls.call("s", "a")
    limit = 3 * calls.world.gaps.quantile(0.95)
    assert 3.0 <= limit <= 3.6
    calls.tick(limit - 0.01)
    assert not calls.session("s").ended
    calls.tick(0.02)
    assert calls.session("s").ended
    assert calls.counts()["tag:a>END"] == 1.0
    calls.tick(100)
    assert calls.counts()["tag:a>END"] == 1.0  # once


def test_the_limit_follows_its_key() -> None:
    calls = Calls(tend=10.0)
    paced(calls)
    calls.call("s", "a")
    calls.tick(9.9)
    assert not calls.session("s").ended
    calls.tick(3.0)
    assert calls.session("s").ended


def test_nothing_ends_by_silence_before_gaps_are_known() -> None:
    calls = Calls()
    for n in range(20):
        calls.call(f"s{n}", "a", 1.0)
    calls.tick(1e9)
    assert not any(s.ended for s in calls.world.sessions)


def test_a_running_call_keeps_its_session_alive_however_long_it_takes() -> None:
    calls = Calls()
    paced(calls)
    rid = calls.arrive("s", "a")
    calls.tick(1000.0)
    assert not calls.session("s").ended
    calls.finish(rid)
    calls.tick(1.0)
    assert not calls.session("s").ended
    calls.tick(10.0)
    assert calls.session("s").ended


def test_final_ends_the_session_when_its_call_finishes_and_closing_ends_it_at_once() -> None:
    calls = Calls()
    rid = calls.arrive("s", "a", final=True)
    assert not calls.session("s").ended
    calls.finish(rid)
    assert calls.session("s").ended and calls.counts()["tag:a>END"] == 1.0
    running = calls.arrive("t", "b")
    calls.close("t")
    assert calls.session("t").ended and calls.counts()["tag:b>END"] == 1.0
    calls.finish(running)
    calls.close("t")
    calls.close("nobody")
    assert calls.counts()["tag:b>END"] == 1.0


# ---- several calls of one session at a time ----


def test_a_session_waits_only_when_its_last_running_call_has_finished() -> None:
    calls = Calls()
    paced(calls)
    seen = calls.world.gaps.seen
    one = calls.arrive("s", "a")
    calls.tick(1.0)
    two = calls.arrive("s", "b")
    assert calls.session("s").running == 2
    assert calls.world.gaps.seen == seen  # no gap: the first call still runs
    assert calls.counts()["tag:a>tag:b"] == 1.0
    calls.finish(one)
    calls.tick(100.0)
    assert not calls.session("s").ended
    calls.finish(two)
    calls.tick(100.0)
    assert calls.session("s").ended and calls.counts()["tag:b>END"] == 1.0


def test_a_call_that_finishes_after_its_session_ended_does_not_bring_it_back() -> None:
    calls = Calls()
    paced(calls)
    one, two = calls.arrive("s", "a"), calls.arrive("s", "a", final=True)
    calls.finish(two)
    assert calls.session("s").ended
    calls.finish(one)
    calls.tick(1000.0)
    assert calls.session("s").ended and calls.session("s").running == 0
    assert calls.counts()["tag:a>END"] == 1.0


# ---- coming back, and not disturbing each other ----

agents = st.sampled_from("abc")
walks = st.lists(agents, min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(walks, walks, st.sampled_from(("close", "final", "silence")))
def test_a_session_that_comes_back_was_never_over(before: list[str], after: list[str], how: str) -> None:
    calls, twin = Calls(), Calls()
    for each in (calls, twin):
        paced(each)
        for n, agent in enumerate(before):
            each.call("s", agent, final=each is calls and how == "final" and n == len(before) - 1)
    if how == "close":
        calls.close("s")
    elif how == "silence":
        calls.tick(1000.0)
    assert calls.session("s").ended
    assert calls.counts() != twin.counts()
    for agent in after:
        calls.call("s", agent)
        twin.call("s", agent)
        assert not calls.session("s").ended
    assert calls.counts() == twin.counts()
    assert calls.session("s").visits == twin.session("s").visits
    assert calls.session("s").id in calls.world.sessions.live


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(agents, st.booleans()), min_size=1, max_size=30))
def test_no_count_is_ever_negative_however_often_a_session_ends_and_comes_back(steps: list[tuple[str, bool]]) -> None:
    calls = Calls(transition_decay=0.9)
    for agent, ends in steps:
        calls.call("s", agent)
        if ends:
            calls.close("s")
        assert all(n > 0 for n in calls.counts().values())
    total = sum(n for k, n in calls.counts().items() if k.endswith(">END"))
    assert total == pytest.approx(1.0 if steps[-1][1] else 0.0, abs=1e-9)  # only the last END may still stand


@settings(max_examples=80, deadline=None)
@given(st.lists(walks, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_interleaved_sessions_teach_what_they_teach_one_after_the_other(sessions: list[list[str]], random) -> None:  # type: ignore[no-untyped-def]
    apart, mixed = Calls(), Calls()
    for n, walk in enumerate(sessions):
        for agent in walk:
            apart.call(f"s{n}", agent)
        apart.close(f"s{n}")
    left = {n: list(walk) for n, walk in enumerate(sessions)}
    running: list[tuple[int, str]] = []
    while left:
        n = random.choice(sorted(left))
        running.append((n, mixed.arrive(f"s{n}", left[n].pop(0))))
        if not left[n]:
            del left[n]
        while running and random.random() < 0.6:
            mixed.finish(running.pop(random.randrange(len(running)))[1])
    for _, rid in running:
        mixed.finish(rid)
    for n in range(len(sessions)):
        mixed.close(f"s{n}")
    assert mixed.counts() == apart.counts()
