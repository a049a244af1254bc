"""Tags, fingerprints, namespaces and caps."""

import contextlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_policy.events import Tag
from radix_policy.identity import POOLED, AgentTable, Identifier, IdentityConfig, TagError, parse_tag
from radix_policy.nodes import UNKNOWN
from radix_policy.prompts import SpanPrompt, TokenPrompt, cut, expand


def test_tag_fields() -> None:
    tag = parse_tag({"scout": {"agent": "Planner", "session": "s1", "final": True, "next": "Critic", "other": [1]}})
    assert tag == Tag("Planner", "s1", True, "Critic")


def test_no_tag_is_none_and_a_session_id_alone_is_a_tag() -> None:
    assert parse_tag(None) is None
    assert parse_tag({"other": 1}) is None
    assert parse_tag("text") is None
    assert parse_tag(None, "abc") == Tag(None, "abc")
    assert parse_tag({"scout": {"session": "own"}}, "abc") == Tag(None, "own")
    assert parse_tag({"scout": {"session": 7}}) == Tag(None, "7")


@pytest.mark.parametrize(
    "raw",
    [
        "Planner",
        3,
        ["a"],
        {"agent": ["x"]},
        {"agent": ""},
        {"agent": "x" * 257},
        {"session": 1.5},
        {"session": True},
        {"final": "yes"},
        {"final": 1},
        {"next": {}},
    ],
)
def test_malformed_tags_are_refused_by_one_error(raw: object) -> None:
    with pytest.raises(TagError):
        parse_tag({"scout": raw})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_no_input_raises_anything_but_a_tag_error(raw: object) -> None:
    for params in (raw, {"scout": raw}):
        with contextlib.suppress(TagError):
            parse_tag(params)


def test_a_tag_wins_over_the_tokens() -> None:
    identifier = Identifier(IdentityConfig(fingerprint_skip=2, fingerprint_take=4))
    prompt = TokenPrompt(range(10))
    untagged = identifier.resolve(prompt, "", None)
    tagged = identifier.resolve(prompt, "", Tag("Planner", "s"))
    assert untagged.agent > 0 and not untagged.tagged and untagged.session is None
    assert tagged.agent > 0 and tagged.agent != untagged.agent and tagged.session == "s"


def test_window_decides_the_agent_and_short_prompts_are_unknown() -> None:
    identifier = Identifier(IdentityConfig(fingerprint_skip=2, fingerprint_take=4))

    def agent(tokens: list[int]) -> int:
        return identifier.resolve(TokenPrompt(tokens), "", None).agent

    base = agent([0, 0, 1, 2, 3, 4, 99])
    assert agent([7, 7, 1, 2, 3, 4, 55]) == base
    assert agent([0, 0, 1, 2, 3, 5, 99]) not in (base, UNKNOWN)
    assert agent([0, 0, 1, 2, 3]) == UNKNOWN
    assert Identifier(IdentityConfig(fingerprint_take=0)).resolve(TokenPrompt(range(500)), "", None).agent == UNKNOWN


def test_namespaces_never_share_an_agent() -> None:
    identifier = Identifier(IdentityConfig(fingerprint_skip=0, fingerprint_take=2))
    ids = {
        identifier.resolve(TokenPrompt([1, 2, 3]), ns, tag).agent for ns in ("", "a", "b") for tag in (None, Tag("A"))
    }
    assert len(ids) == 6


def test_a_million_names_pool_at_the_cap() -> None:
    table = AgentTable(cap=8)
    ids = [table.intern("", str(i)) for i in range(10_000)]
    assert ids[:8] == list(range(1, 9)) and set(ids[8:]) == {POOLED}
    assert len(table) == 9 and table.intern("", "3") == 4
    assert table.find("", "9999") == UNKNOWN


def test_fingerprints_do_not_depend_on_the_process() -> None:
    code = "from radix_policy.prompts import TokenPrompt; print(TokenPrompt(list(range(99))).fingerprint(3, 77))"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outs == {f"{TokenPrompt(list(range(99))).fingerprint(3, 77)}\n"}


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=8).map(tuple)


@given(spans, st.integers(0, 40), st.integers(0, 40))
def test_cut_is_slicing(s: tuple, a: int, b: int) -> None:
    start, stop = sorted((a, b))
    assert list(expand(cut(s, start, stop))) == list(expand(s))[start:stop]


@given(spans)
def test_fingerprint_sees_tokens_not_spans(s: tuple) -> None:
    ones = tuple((t, 1) for t in expand(s))
    n = len(ones)
    assert SpanPrompt(s).fingerprint(0, n) == SpanPrompt(ones).fingerprint(0, n)
    assert len(SpanPrompt(s)) == n
