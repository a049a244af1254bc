"""What warmup takes for an agent's anchor."""

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from radix_policy.nodes import UNKNOWN
from radix_policy.prompts import TokenPrompt
from radix_policy.warm_anchors import COMPARED, Anchors


def prompt(*parts: "tuple[int, int]") -> TokenPrompt:
    """(first id, count) each."""
    return TokenPrompt(array("q", [first + i for first, count in parts for i in range(count)]))


OLD, NEW, SAID = (1000, 300), (2000, 280), 10_000


def call(anchors: Anchors, session: int, system: tuple[int, int] = OLD, said: int = 50, agent: int = 1) -> None:
    anchors.seen("", agent, session, prompt(system, (SAID + 1000 * session, said)))


def tokens(anchors: Anchors, agent: int = 1, namespace: str = "") -> list[int]:
    anchor = anchors.get(namespace, agent)
    assert anchor is not None
    return list(anchor.head.ids(0, anchor.length))


def test_it_is_what_two_sessions_share() -> None:
    anchors = Anchors(8, 4096)
    call(anchors, 1)
    assert tokens(anchors) == [], "one session says nothing about the next"
    call(anchors, 1, said=90)
    assert tokens(anchors) == [], "its own conversation is no anchor"
    call(anchors, 2)
    assert tokens(anchors) == list(range(1000, 1300))


def test_sessions_that_begin_alike_do_not_make_it_longer_for_long() -> None:
    anchors = Anchors(8, 4096)
    for session in (1, 1, 2):
        anchors.seen("", 1, session, prompt(OLD, (SAID, 40), (SAID + 1000 * (1 + session), 9)))
    assert len(tokens(anchors)) == 340
    call(anchors, 3)
    assert len(tokens(anchors)) == 300


def test_a_new_system_prompt_is_never_warmed_as_the_old_one() -> None:
    anchors = Anchors(8, 4096)
    for session in range(4):
        call(anchors, session)
    for session in range(4, 4 + COMPARED):
        call(anchors, session, NEW)
        assert tokens(anchors) == [], "the old one is gone at once, the new one is not yet trusted"
    call(anchors, 99, NEW)
    assert tokens(anchors) == list(range(2000, 2280))


def test_one_that_changes_inside_a_session_is_noticed() -> None:
    anchors = Anchors(8, 4096)
    for session in (1, 2):
        call(anchors, session)
    call(anchors, 2, NEW)
    assert tokens(anchors) == []


def test_it_is_bounded() -> None:
    anchors = Anchors(3, 100)
    for agent in range(1, 6):
        for session in (1, 2):
            call(anchors, session, agent=agent)
    assert len(anchors) == 3
    assert anchors.get("", 1) is None
    assert tokens(anchors, agent=5) == list(range(1000, 1100))


def test_calls_of_nobody_knows_whom_count_as_sessions_of_their_own() -> None:
    anchors = Anchors(8, 4096)
    for said in (SAID, SAID + 500):
        anchors.seen("", 1, UNKNOWN, prompt(OLD, (said, 20)))
    assert tokens(anchors) == list(range(1000, 1300))


calls = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b"]),
        st.integers(1, 3),
        st.integers(-1, 3),
        st.lists(st.integers(0, 2), min_size=1, max_size=12),
    ),
    max_size=60,
)


@given(calls)
def test_an_anchor_is_a_prefix_of_the_latest_prompts_of_its_own_namespace(
    seen: list[tuple[str, int, int, list[int]]],
) -> None:
    anchors = Anchors(4, 8)
    history: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
    order: list[tuple[str, int]] = []
    for namespace, agent, session, ids in seen:
        anchors.seen(namespace, agent, session, TokenPrompt(array("q", ids)))
        key = (namespace, agent)
        if key in order:
            order.remove(key)
        order.append(key)
        for gone in order[:-4]:
            history.pop(gone, None)
        del order[:-4]
        history.setdefault(key, []).append((session, ids))
        assert len(anchors) <= 4
        for at, prompts in history.items():
            anchor = anchors.get(*at)
            assert anchor is not None and len(anchor.head) <= 8
            found = list(anchor.head.ids(0, anchor.length))
            assert prompts[-1][1][: len(found)] == found, "of this namespace's latest prompt"
            changes = [n for n, (a, b) in enumerate(pairwise(prompts)) if a[0] != b[0] or a[0] == UNKNOWN]
            if not changes:
                assert found == [] or any(a[1][: len(found)] == found for a in prompts)
