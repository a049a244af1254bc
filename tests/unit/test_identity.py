"""Tags, fingerprints, namespaces and caps."""

import contextlib
import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.identity import b_cubed
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
    identifier = Identifier(IdentityConfig(identity="window", fingerprint_skip=2, fingerprint_take=4))
    prompt = TokenPrompt(range(10))
    untagged = identifier.resolve(prompt, "", None)
    tagged = identifier.resolve(prompt, "", Tag("Planner", "s"))
    assert untagged.agent > 0 and not untagged.tagged and untagged.session is None
    assert tagged.agent > 0 and tagged.agent != untagged.agent and tagged.session == "s"


def test_window_decides_the_agent_and_short_prompts_are_unknown() -> None:
    identifier = Identifier(IdentityConfig(identity="window", fingerprint_skip=2, fingerprint_take=4))

    def agent(tokens: list[int]) -> int:
        return identifier.resolve(TokenPrompt(tokens), "", None).agent

    base = agent([0, 0, 1, 2, 3, 4, 99])
    assert agent([7, 7, 1, 2, 3, 4, 55]) == base
    assert agent([0, 0, 1, 2, 3, 5, 99]) not in (base, UNKNOWN)
    assert agent([0, 0, 1, 2, 3]) == UNKNOWN
    assert (
        Identifier(IdentityConfig(identity="window", fingerprint_take=0))
        .resolve(TokenPrompt(range(500)), "", None)
        .agent
        == UNKNOWN
    )


def test_namespaces_never_share_an_agent() -> None:
    identifier = Identifier(IdentityConfig(identity="window", fingerprint_skip=0, fingerprint_take=2))
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


def test_only_a_forgotten_learned_agent_leaves_its_id() -> None:
    table = AgentTable(cap=2)
    tagged, learned = table.intern("", "tag:a"), table.intern("", "anchor:1")
    assert not table.vacant and table.intern("", "anchor:2") == POOLED
    table.release(tagged)
    table.release(POOLED)
    assert table.intern("", "anchor:2") == POOLED
    table.release(learned)
    assert table.vacant and table.intern("", "anchor:1") == learned  # it came back in time
    assert not table.vacant
    table.release(learned)
    assert table.intern("n", "anchor:2") == learned and table.name(learned) == "anchor:2"
    assert table.namespace(learned) == "n" and table.find("", "anchor:1") == UNKNOWN and len(table) == 3


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


@given(spans, spans, st.integers(0, 60))
def test_prompts_of_both_kinds_compare_cut_and_join_alike(s: tuple, t: tuple, at: int) -> None:
    mine, theirs = list(expand(s)), list(expand(t))
    agree = 0
    while agree < min(len(theirs), len(mine) - at) and mine[at + agree] == theirs[agree]:
        agree += 1
    for make in (
        lambda spans, tokens: SpanPrompt(spans),
        lambda spans, tokens: TokenPrompt(tokens),
        lambda spans, tokens: TokenPrompt(array("q", tokens)),
    ):
        one, two = make(s, mine), make(t, theirs)
        assert one.agree(two, at) == agree
        both = one.join(two)
        assert list(both.ids(0, len(both))) == mine + theirs
        part = both.slice(at // 2, at)
        assert list(part.ids(0, len(part))) == (mine + theirs)[at // 2 : at] and len(part) == len(part.ids(0, 99))
        if at < len(mine):
            assert one.token(at) == mine[at]


def test_long_prompts_are_compared_to_the_token() -> None:
    tokens = array("q", range(5000))
    for at in (0, 17, 1500, 4999):
        other = array("q", tokens)
        other[at] = -1
        assert TokenPrompt(tokens).agree(TokenPrompt(other), 0) == at
        assert TokenPrompt(list(tokens)).agree(TokenPrompt(list(other)), 0) == at
    assert TokenPrompt(tokens).agree(TokenPrompt(tokens[2000:]), 2000) == 3000


@given(spans)
def test_fingerprint_sees_tokens_not_spans(s: tuple) -> None:
    ones = tuple((t, 1) for t in expand(s))
    n = len(ones)
    assert SpanPrompt(s).fingerprint(0, n) == SpanPrompt(ones).fingerprint(0, n)
    assert len(SpanPrompt(s)) == n


def test_b_cubed_by_hand() -> None:
    # clusters: x = {a, a, b}, y = {b}; one a is unknown
    score = b_cubed(["x", "x", "x", "y", None], ["a", "a", "b", "b", "a"])
    assert score.precision == pytest.approx((2 / 3 + 2 / 3 + 1 / 3 + 1) / 4)
    assert score.recall == pytest.approx((2 / 3 + 2 / 3 + 1 / 2 + 1 / 2 + 0) / 5)
    assert (score.unknown, score.clusters, score.truths) == (pytest.approx(0.2), 2, 2)
    assert b_cubed([None], ["a"]).f1 == 0 and b_cubed([], []).recall == 0


def test_the_identity_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "identity.json"
    argv = ["identity", "--workload", "selector", "--sessions", "24", "--points", "4:2", "--json", str(out)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    document = json.loads(out.read_text())
    scores, *costs = document["points"]
    assert document["complete"] and scores["agent_later"]["f1"] > 0.95 and scores["session"]["f1"] > 0.9
    assert [(p["policy"], p["identity"]) for p in costs] == [
        ("lru", "tagged"),
        ("scout", "tagged"),
        ("scout", "inferred"),
        ("scout", "scrambled"),
    ]
    assert "selector" in text and "scrambled" in text
    assert main(argv) == 0  # everything is there already
    capsys.readouterr()
    more = (["--points", "4"], ["--points", "4:inf"], ["--policy", "lru"], ["--policy", "scout:x=1"])
    for bad in ([], *(["--workload", "selector", *words] for words in more)):
        assert main(["identity", *bad]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
