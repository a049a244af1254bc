"""What counts as useful, and when the gate closes and opens."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from radix_policy.prompts import TokenPrompt
from radix_policy.warm_account import OPEN_RECORDS, PATIENCE, PROBES, Accounting

KEY = ("", 1)
ANCHOR = TokenPrompt(array("q", range(1000)))


def account(share: float = 0.3, window: int = 4, probe: float = 30.0) -> Accounting:
    return Accounting(share, window, probe)


def warm(accounts: Accounting, begin: int, end: int, key: tuple[str, int] = KEY, now: float = 0.0) -> None:
    accounts.done(key, ANCHOR.slice(0, end), begin, end, now, 0.1)


def test_only_what_was_absent_and_is_read_is_useful() -> None:
    accounts = account()
    warm(accounts, 200, 600)
    accounts.read("", TokenPrompt(array("q", [*range(500), 7, 7])), 450, 1.0)
    totals = accounts.totals()
    assert (totals.tokens, totals.useful_tokens, totals.wasted_tokens) == (400, 250, 150)
    accounts.read("", ANCHOR, 600, 2.0)
    assert accounts.totals().useful_tokens == 250, "it is read once"


def test_slices_of_one_anchor_are_one_stretch() -> None:
    accounts = account()
    warm(accounts, 0, 512)
    warm(accounts, 512, 800)
    accounts.read("", ANCHOR, 800, 1.0)
    assert accounts.totals().settled == 1 and accounts.totals().useful_tokens == 800


def test_another_namespace_or_another_prompt_reads_nothing() -> None:
    accounts = account()
    warm(accounts, 100, 300)
    accounts.read("tenant", ANCHOR, 300, 1.0)
    accounts.read("", TokenPrompt(array("q", [*range(100), 9999, 9999])), 101, 1.0)
    assert accounts.totals().settled == 0 and len(accounts.waiting) == 1


def test_what_is_lost_is_wasted() -> None:
    accounts = account()
    warm(accounts, 100, 300)
    accounts.lost(KEY, 250, 1.0)
    assert accounts.totals().wasted_tokens == 50 and accounts.totals().settled == 0
    accounts.lost(KEY, 100, 1.0)
    assert accounts.totals().wasted_tokens == 200 and accounts.totals().settled == 1
    warm(accounts, 0, 100)
    accounts.age(PATIENCE + 1.0)
    assert accounts.totals().wasted_tokens == 300
    warm(accounts, 0, 100)
    accounts.forget()
    assert accounts.totals().wasted_tokens == 400 and accounts.totals().settled == 2, "a flush is nobody's fault"


def test_the_gate_closes_and_a_probe_at_a_time_opens_it() -> None:
    accounts = account(window=4, probe=30.0)
    now = 0.0
    for _ in range(4):
        assert accounts.may_begin(now)
        warm(accounts, 0, 100, now=now)
        accounts.lost(KEY, 0, now)
    assert not accounts.open and accounts.totals().gate_closed == 1
    assert not accounts.may_begin(now + 29.0)
    for number in range(PROBES):
        now += 30.0
        assert accounts.may_begin(now)
        accounts.begun(now)
        assert not accounts.may_begin(now + 1.0), "one probe at a time"
        warm(accounts, 0, 100, now=now)
        accounts.read("", ANCHOR, 100 if number else 0, now)
    assert accounts.open and accounts.may_begin(now)


def test_bad_probes_keep_it_closed() -> None:
    accounts = account(window=1, probe=1.0)
    for second in range(3 * PROBES):
        if accounts.may_begin(second):
            accounts.begun(second)
            warm(accounts, 0, 100, now=second)
            accounts.lost(KEY, 0, second)
    assert not accounts.open and accounts.totals().gate_closed == 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("warm"), st.integers(1, 4), st.integers(0, 900), st.integers(0, 300)),
        st.tuples(st.just("read"), st.integers(0, 1000), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("lost"), st.integers(1, 4), st.integers(0, 1000), st.just(0)),
    ),
    max_size=80,
)


@given(steps)
def test_every_token_is_useful_wasted_or_waiting(script: list[tuple[str, int, int, int]]) -> None:
    accounts = account(share=0.0)
    for now, (what, a, b, c) in enumerate(script):
        if what == "warm":
            warm(accounts, b, min(b + c, 1000), ("", a), float(now))
        elif what == "read":
            accounts.read("", ANCHOR.slice(0, max(a, 1)), min(b, a), float(now))
        else:
            accounts.lost(("", a), b, float(now))
        totals = accounts.totals()
        waiting = sum(s.end - s.begin for s in accounts.waiting)
        assert totals.tokens == totals.useful_tokens + totals.wasted_tokens + waiting
        assert len(accounts.waiting) <= OPEN_RECORDS
        assert accounts.open
