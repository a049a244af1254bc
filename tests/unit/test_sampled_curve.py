"""The sampled stack-distance curve against the exact one, its bounds, and its JSON form."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_policy.prompts import Spans
from radix_policy.sampled_curve import ChunkKeys, CurveError, SampledCounts, SampledCurve, ids_of
from radix_policy.simulator import Study, spans_of
from radix_policy.working_set import ReuseCurve
from radix_policy.workloads import Workload, make
from radix_policy.workloads.base import Call

Tokens = tuple[int, ...]
numbers = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
GOLDEN = [7218836133322848140, 13627604573644454929]  # 64-bit keys
streams = st.lists(st.tuples(numbers, numbers), max_size=14)


def ids(*tokens: int) -> "np.ndarray":
    return np.array(tokens, dtype=np.int64)


def played(workload: Workload, concurrency: int) -> list[Call]:
    calls = [call for session in workload.sessions for call in session.calls]
    return [calls[number] for number in Study(workload).order(10**9, concurrency).calls]


def exact(calls: Sequence[Call], page_size: int) -> ReuseCurve:
    curve = ReuseCurve(page_size)
    for call in calls:
        curve.call(call.prompt, call.prompt_tokens, call.output, call.output_tokens)
    return curve


def sampled(calls: Sequence[Call], curve: SampledCurve, namespace: str = "") -> SampledCounts:
    for call in calls:
        curve.call(ids_of(call.prompt), ids_of(call.output), namespace)
    return curve.counts()


# ---- against the exact curve ----


@given(streams, st.integers(1, 3))
def test_with_room_for_every_chunk_it_is_the_exact_curve_of_pages(calls: list[tuple[Tokens, Tokens]], b: int) -> None:
    curve, twin = SampledCurve(b, 10_000), ReuseCurve(b)
    for prompt, output in calls:
        curve.call(ids(*prompt), ids(*output))
        twin.call(spans_of(prompt), len(prompt), spans_of(output), len(output))
    counts, sizes = curve.counts(), range(60)
    assert counts.rate == 1.0 and counts.found(sizes) == twin.found(sizes)
    assert (counts.calls, counts.prompt_tokens) == (twin.calls, twin.prompt_tokens)
    assert (counts.reachable, counts.tokens) == (twin.reachable, twin.tokens)
    assert [counts.need(share) for share in (0.0, 0.5, 1.0)] == [twin.need(share) for share in (0.0, 0.5, 1.0)]
    assert counts.enough(0.1) == twin.enough(0.1)


@given(st.lists(st.tuples(numbers, numbers), max_size=12), st.lists(st.integers(0, 30), max_size=30), st.integers(1, 3))
def test_it_is_the_exact_curve_of_calls_that_run_together(
    calls: list[tuple[Tokens, Tokens]], choices: list[int], b: int
) -> None:
    """Calls begin in order and end in any."""
    curve, twin = SampledCurve(b, 10_000), ReuseCurve(b)
    running: list[int] = []
    waiting = [*range(len(calls))]
    for choice in [*choices, *range(2 * len(calls))]:
        if waiting and (choice % 2 or not running):
            number = waiting.pop(0)
            running.append(number)
            curve.start(number, ids(*calls[number][0]))
            twin.start(number, spans_of(calls[number][0]), len(calls[number][0]))
        elif running:
            number = running.pop(choice // 2 % len(running))
            whole = calls[number][0] + calls[number][1]
            curve.finish(number, ids(*whole))
            twin.finish(number, spans_of(whole), len(whole))
    counts = curve.counts()
    assert counts.found(range(80)) == twin.found(range(80)) and counts.tokens == twin.tokens
    assert [counts.need(share) for share in (0.0, 0.5, 1.0)] == [twin.need(share) for share in (0.0, 0.5, 1.0)]


def test_long_distances_are_kept_to_one_in_64() -> None:
    calls = played(make("selector", seed=5, concurrency=16, sessions=60), 16)
    counts, twin = sampled(calls, SampledCurve(16, 10**6)), exact(calls, 16)
    assert counts.rate == 1.0 and counts.reachable == twin.reachable
    for size in (2000, 5000, 20_000, 50_000, 200_000):
        low, high = twin.found([int(size * (1 - 1 / 64)), int(size * (1 + 1 / 64)) + 1])
        assert low <= counts.found([size])[0] <= high


@pytest.mark.parametrize("name", ["selector", "pipeline"])
def test_a_sample_of_a_tenth_is_close_to_the_exact_curve(name: str) -> None:
    """Within 5 % of the prompt tokens from twice the largest call on, three hash functions out of three.

    These are hard: their prompts are short and a few anchors, used by all, carry most of what is found.
    """
    workload = make(name, seed=5, concurrency=16, sessions=120)
    calls = played(workload, 16)
    twin = exact(calls, 16)
    sizes = [int(factor * workload.largest) for factor in (2, 4, 8, 16, 32)]
    for namespace in "abc":
        counts = sampled(calls, SampledCurve(16, 4096), namespace)
        assert counts.entries <= 4096 and 0.05 < counts.rate < 0.2
        for got, wanted in zip(counts.found(sizes), twin.found(sizes)):
            assert got == pytest.approx(wanted, abs=0.05 * twin.prompt_tokens)
        assert counts.tokens == pytest.approx(twin.tokens, rel=0.05)
        assert counts.need(0.9) == pytest.approx(twin.need(0.9), rel=0.1)


def test_depth_forgets_only_what_lies_deeper() -> None:
    calls = played(make("selector", seed=5, concurrency=16, sessions=40), 16)
    whole, cut = sampled(calls, SampledCurve(16, 10**6)), sampled(calls, SampledCurve(16, 10**6, depth=20_000))
    sizes = [4000, 10_000, 16_000, 19_900]  # the last bucket reaches beyond the depth
    assert cut.found(sizes) == whole.found(sizes) and cut.tokens <= 20_000 < whole.tokens
    assert cut.found([10**6])[0] < whole.found([10**6])[0]


def test_where_nothing_comes_again_nothing_is_found() -> None:
    """What the sample happens to hold too little of is not taken for tokens that are found."""
    curve = SampledCurve(1, 16)
    for number in range(50):
        curve.call(np.arange(100 * number, 100 * number + 100, dtype=np.int64))
        assert curve.counts().reachable == 0 and curve.counts().found([10**6]) == [0]
    assert curve.rate < 0.01


# ---- bounds ----


@given(streams, st.integers(1, 12), st.sampled_from([None, 2, 5]))
def test_never_more_than_n_chunks(calls: list[tuple[Tokens, Tokens]], n: int, depth: int | None) -> None:
    curve = SampledCurve(1, n, depth)
    for prompt, output in calls:
        before = curve.rate
        curve.call(ids(*prompt), ids(*output))
        counts = curve.counts()
        assert len(curve) == counts.entries <= n and curve.rate <= before
        found = counts.found([0, 5, 10, 10**6])
        assert found == sorted(found) and found[-1] == counts.reachable <= counts.looked_up
        if depth is not None:
            assert counts.tokens <= depth


def test_a_process_that_runs_for_ever_keeps_its_rate() -> None:
    curve = SampledCurve(4, 256, depth=4 * 1024)
    for number in range(2000):
        curve.call(np.arange(number * 1000, number * 1000 + 400, dtype=np.int64))
        if number == 400:
            early = curve.rate
    assert len(curve) <= 256 and curve.rate > early / 2 > 0.05
    assert len(curve.counts().to_json()["hits"]) == 0, "no prompt came twice"


def test_the_order_of_chunks_with_one_key_does_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision inside one prompt, which nobody should see."""
    curve = SampledCurve(1, 100)
    monkeypatch.setattr(
        curve, "_hash", type("Same", (), {"chunk": 1, "__call__": lambda *_: np.full(5, 7, np.uint64)})()
    )
    for _ in range(3):
        curve.call(ids(1, 2, 3, 4, 5))
    assert len(curve) == 1 and curve.counts().entries == 1


def test_the_prompt_is_only_read_and_can_grow_again() -> None:
    prompt = array("q", range(100))
    curve = SampledCurve(8, 100)
    curve.call(np.frombuffer(prompt, dtype=np.int64))
    prompt.append(5)  # a view that is still held would forbid this
    assert list(prompt) == [*range(100), 5]


def test_clear_begins_anew() -> None:
    curve, fresh = SampledCurve(1, 4), SampledCurve(1, 4)
    for number in range(9):
        curve.call(ids(*range(number, number + 6)))
    curve.clear()
    for each in (curve, fresh):
        each.call(ids(1, 2, 3))
    assert curve.counts() == fresh.counts() and len(curve) == 3


@pytest.mark.parametrize("arguments", [(0, 5, None), (1, 0, None), (16, 5, 15)])
def test_sizes_that_make_no_sense_are_refused(arguments: tuple[int, int, int | None]) -> None:
    with pytest.raises(ValueError, match="each at least 1"):
        SampledCurve(*arguments)


# ---- keys ----


def test_keys_are_the_same_in_every_process() -> None:
    assert ChunkKeys(4)(np.arange(10, dtype=np.int64), "tenant").tolist() == GOLDEN


def test_a_key_stands_for_everything_before_it() -> None:
    keys = ChunkKeys(4)
    base = np.arange(1000, dtype=np.int64)
    mine = keys(base)
    assert len(mine) == 250 and len(set(mine.tolist())) == 250
    assert keys(base[:999]).tolist() == mine[:249].tolist() and keys(base[:3]).tolist() == []
    for at in (0, 7, 500, 999):
        changed = base.copy()
        changed[at] += 1
        assert (keys(changed) == mine).tolist() == [n < at // 4 for n in range(250)]
    swapped = base.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert not (keys(swapped) == mine).any()
    assert not (keys(base, "tenant") == mine).any()
    same = keys(np.zeros(400, dtype=np.int64))
    assert len(set(same.tolist())) == 100, "equal chunks at different places differ"


def test_ids_of_spans() -> None:
    spans: Spans = ((5, 3), (1 << 62, 2))
    assert ids_of(spans).tolist() == [5, 6, 7, 1 << 62, (1 << 62) + 1] and ids_of(()).tolist() == []


def test_namespaces_share_nothing() -> None:
    curve = SampledCurve(1, 100)
    for namespace in ("a", "b", "a"):
        curve.call(ids(1, 2, 3, 4), namespace=namespace)
    assert curve.counts().reachable == 3


# ---- JSON ----


def counted() -> SampledCounts:
    calls = played(make("selector", seed=5, concurrency=4, sessions=10), 4)
    return sampled(calls, SampledCurve(16, 512, depth=10**5))


def test_json_and_back() -> None:
    counts = counted()
    again = SampledCounts.from_json(counts.to_json())
    sizes = [1000, 5000, 20_000]
    assert again.found(sizes) == pytest.approx(counts.found(sizes), abs=len(counts.hits))  # whole tokens per bucket
    assert (again.tokens, again.need(0.5), again.largest) == (counts.tokens, counts.need(0.5), counts.largest)


@pytest.mark.parametrize(
    "change",
    [
        {"hits": None},
        {"hits": [[1]]},
        {"hits": [[10**9, 5]]},
        {"rate": 0},
        {"rate": "x"},
        {"chunk": 0},
        {"needs": [[-1, 1]]},
    ],
)
def test_json_that_is_no_curve_is_refused_in_one_line(change: dict[str, object]) -> None:
    with pytest.raises(CurveError) as caught:
        SampledCounts.from_json(counted().to_json() | change)
    assert "\n" not in str(caught.value) and "not a sampled curve" in str(caught.value)
    with pytest.raises(CurveError):
        SampledCounts.from_json([])


def test_replicas_are_added_up() -> None:
    one = counted()
    two = SampledCounts.merged([one, one])
    assert two.found([4000]) == pytest.approx([2 * one.found([4000])[0]], abs=1)
    assert (two.calls, two.tokens, two.need(0.5)) == (2 * one.calls, one.tokens, one.need(0.5))
    with pytest.raises(CurveError, match="different sizes"):
        SampledCounts.merged([one, SampledCurve(8, 5).counts()])
