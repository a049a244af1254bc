"""Who may write to the host tier: the paper's Lemma 1 and Proposition 1, the rule, and what it never does."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.admission import EVICTING, MODES, PROMPTS, WINDOW, Admission, AdmissionConfig, Tier
from radix_policy.config import ConfigError, build
from radix_policy.events import RequestArrived, RequestFinished, Tag, Tick
from radix_policy.prompts import SpanPrompt
from radix_policy.runtime import Request, Runtime
from radix_policy.simulator import Run
from radix_policy.simulator.tiered_loop import TieredLoop
from radix_policy.simulator.tiers import TieredEngine
from radix_policy.workloads import Workload, make

# ---- the theory ----


class LruTier:
    """The paper's reference model (appendix, Reference model): K chunks in recency order, some misses declined."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[int, None] = OrderedDict()

    def reference(self, chunk: int, declined: bool) -> bool:
        """One reference; returns whether it hits."""
        if chunk in self.held:
            self.held.move_to_end(chunk)
            return True
        if not declined:
            if len(self.held) == self.capacity:
                self.held.popitem(last=False)
            self.held[chunk] = None
        return False


def play(stream: Sequence[int], capacity: int, declined: set[int]) -> tuple[list[bool], list[bool]]:
    """Per reference: whether it hits, and whether it promotes its chunk."""
    tier, hits, promotes = LruTier(capacity), [], []
    for at, chunk in enumerate(stream):
        hits.append(tier.reference(chunk, at in declined))
        promotes.append(hits[-1] or at not in declined)
    return hits, promotes


def after(stream: Sequence[int], at: int) -> int | None:
    """The next reference to the same chunk."""
    return next((i for i in range(at + 1, len(stream)) if stream[i] == stream[at]), None)


STREAMS = st.lists(st.integers(0, 7), min_size=1, max_size=40)
PLACES = st.sets(st.integers(0, 39))


@given(STREAMS, st.integers(1, 8), PLACES)
def test_lemma_1_a_promoted_chunk_stays_while_fewer_others_are_promoted(
    stream: list[int], capacity: int, declined: set[int]
) -> None:
    hits, promotes = play(stream, capacity, declined)
    for at, promoted in enumerate(promotes):
        again = after(stream, at)
        if promoted and again is not None:
            others = {stream[i] for i in range(at + 1, again) if promotes[i]}
            assert hits[again] == (len(others) < capacity)


@given(STREAMS, st.integers(1, 8), PLACES)
def test_proposition_1_declining_what_comes_back_too_late_loses_no_hit(
    stream: list[int], capacity: int, places: set[int]
) -> None:
    def is_late(at: int) -> bool:
        again = after(stream, at)
        return again is None or len({*stream[at + 1 : again]}) >= capacity

    full, _ = play(stream, capacity, set())
    restricted, _ = play(stream, capacity, {at for at in places if at < len(stream) and is_late(at)})
    assert all(better or not hit for hit, better in zip(full, restricted))


class Listed(Admission):
    """Declines the requests that it was told to."""

    def __init__(self, runtime: Runtime, declined: set[int]) -> None:
        super().__init__(runtime.world, AdmissionConfig())
        self.places = declined

    def admits(self, request: Any, prompt_tokens: int, host_tokens: int, tier: Tier) -> bool:
        self.asked += 1
        return self.asked - 1 not in self.places


@settings(max_examples=60)
@given(STREAMS, st.integers(2, 8), PLACES)
def test_the_simulated_host_tier_is_that_model(stream: list[int], capacity: int, declined: set[int]) -> None:
    size = 20
    # one after the other, no chunk twice in a row, on a device that holds one: what is found is found on the host
    stream = [chunk for at, chunk in enumerate(stream) if at == 0 or stream[at - 1] != chunk]
    runtime = Runtime("lru")
    engine = TieredEngine(runtime, size + 5, capacity * size, load_least=1)
    engine.admission = Listed(runtime, declined)
    hits = []
    for at, chunk in enumerate(stream):
        run = Run(f"r{at}", ((1000 * chunk, size),), ((10**6 + at, 1),), size, 1)
        engine.arrive(run)
        before = engine.tree.restored
        assert engine.admit(run)
        hits.append(engine.tree.restored > before)
        engine.finish(run)
    assert hits == play(stream, capacity, declined)[0]


# ---- the rule ----


class Stage:
    """An Admission, and sessions that call it."""

    def __init__(self, mode: str, **keys: Any) -> None:
        self.runtime = Runtime("lru")
        self.admission = Admission(self.runtime.world, build({"admission": mode, **keys}, AdmissionConfig)[0])
        self.count = 0
        self.evicted = 0

    def call(
        self, session: str | None, prompt: int, host: int = 0, capacity: int = 1000, evicts: bool = True, used: int = -1
    ) -> bool:
        """A call of so many tokens; the host tier is full and has evicted since the last one, unless said otherwise."""
        self.count += 1
        rid = f"r{self.count}"
        tag = Tag(None, session) if session is not None else None
        self.runtime.observe(RequestArrived(rid, SpanPrompt(((self.count << 24, prompt),)), "", tag))
        request: Request = self.runtime.requests[rid]
        self.evicted += evicts
        answer = self.admission.admits(
            request, prompt, host, Tier(capacity, capacity if used < 0 else used, self.evicted)
        )
        self.runtime.observe(RequestFinished(rid, 1))
        return answer

    def tick(self, seconds: float) -> None:
        self.runtime.observe(Tick(self.count, seconds))


@pytest.mark.parametrize(
    ("prompt", "host", "admitted"),
    [(8 * 16, 0, True), (9 * 16, 0, False), (9 * 16, 16, True), (9 * 16, 15, False), (9 * 16 - 1, 0, True)],
)
def test_eight_new_chunks_are_written_nine_are_not(prompt: int, host: int, admitted: bool) -> None:
    stage = Stage("fixed", admission_chunk=16)
    assert stage.call("a", prompt, host) == admitted
    assert stage.admission.declined == (not admitted)


def test_chunks_are_whole_pages_and_follow_the_mean_prompt() -> None:
    stage = Stage("fixed", admission_chunk=0)
    stage.call("a", 3200)
    assert stage.admission.chunk == 100
    stage.admission.page = 64
    assert stage.admission.chunk == 64
    stage.admission.page = 128
    assert stage.admission.chunk == 128, "never less than a page"


def pressed(mode: str, **keys: Any) -> Stage:
    """Four sessions of 500 tokens call in turn on a tier of 1000."""
    stage = Stage(mode, admission_chunk=16, **keys)
    for turn in range(3):
        for session in "abcd":
            stage.call(session, 500, 500 if turn else 0)
    return stage


@pytest.mark.parametrize("mode", MODES)
def test_a_refill_under_pressure(mode: str) -> None:
    assert pressed(mode).call("a", 500) == (mode == "none")
    assert pressed(mode).call("a", 500, 400), "few new chunks keep a resident context whole"


@pytest.mark.parametrize("mode", ["conditioned", "measured"])
@pytest.mark.parametrize(
    "no_pressure",
    [
        lambda stage: stage.call("a", 500, capacity=2500),  # the tier holds the working set
        lambda stage: stage.call("a", 500, capacity=1000, used=400),  # there is room
        lambda stage: (
            [stage.call("x", 1, evicts=False) for _ in range(EVICTING)] and stage.call("a", 500, evicts=False)
        ),
    ],
)
def test_without_pressure_everything_is_written(mode: str, no_pressure: Callable[[Stage], bool]) -> None:
    assert no_pressure(pressed(mode))


def test_published_sessions_count_while_they_call() -> None:
    stage = pressed("conditioned")
    assert stage.admission.sessions == 4
    stage.tick(WINDOW + 1)
    assert stage.call("a", 500), "the others have not called for a minute: one session is live"
    assert stage.admission.sessions == 1


def test_measured_distance_is_what_the_others_hold() -> None:
    stage = pressed("measured")
    assert stage.admission.reuse_distance == pytest.approx(1500)
    assert stage.admission.working_set == stage.admission.reuse_distance


def test_a_session_that_ended_makes_room() -> None:
    stage = pressed("measured")
    assert not stage.call("a", 500)
    for session in "bcd":
        stage.runtime._end(stage.runtime.world.sessions.find("", session))  # type: ignore[arg-type]
    assert stage.call("a", 500), "it alone is live, and fits"


def test_who_got_in_stays_and_the_next_waits_for_room() -> None:
    found = {}
    for mode in ("none", "measured"):
        stage, tier = Stage(mode, admission_chunk=16), LruTier(2)  # 1100 tokens hold two contexts of 500
        found[mode], lost = 0, False
        for _ in range(100):
            for session in range(4):
                held, before = session in tier.held, set(tier.held)
                found[mode] += held
                admitted = stage.call(f"s{session}", 500, 490 if held else 0, capacity=1100, evicts=lost)
                tier.reference(session, not admitted)
                lost = not before <= set(tier.held)
    assert found["none"] == 0, "each is lost before it comes back"
    assert found["measured"] > 180, "two of four stay, but for a try every 64 requests that lost nothing"


def test_requests_of_nobody_are_written() -> None:
    stage = Stage("measured", admission_chunk=16)
    assert all(stage.call(None, 900) for _ in range(50))


def test_state_is_bounded() -> None:
    stage = Stage("measured")
    cap = stage.runtime.world.sessions.cap = 10
    for number in range(3 * PROMPTS):
        stage.call(f"s{number}", 100 + number)
    assert len(stage.admission._contexts) <= cap and len(stage.admission._prompts) == PROMPTS
    assert stage.admission.mean_prompt == pytest.approx(100 + 3 * PROMPTS - (PROMPTS + 1) / 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("admission", "sometimes"),
        ("admission", None),
        ("admission_kappa", -1),
        ("admission_theta", 1.5),
        ("admission_theta", float("nan")),
        ("admission_chunk", "big"),
    ],
)
def test_a_bad_key_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        build({key: value}, AdmissionConfig)


# ---- in the loop ----


def tiered(workload: Workload, mode: str, size: float, policy: str = "lru") -> TieredLoop:
    calls = [call for session in workload.sessions for call in session.calls]
    working_set = 7 * sum(call.prompt_tokens for call in calls) / len(calls)
    loop = TieredLoop(
        workload,
        policy,
        capacity=int(0.6 * working_set),
        host_capacity=int(size * working_set),
        concurrency=8,
        admission=AdmissionConfig(mode),
    )
    loop.run()
    return loop


@pytest.mark.parametrize("policy", ["lru", "scout"])
def test_a_tier_that_holds_the_working_set_sees_no_decline(policy: str) -> None:
    workload = make("swe", seed=4, sessions=24 if policy == "lru" else 12)  # scout takes ten times as long
    for size in (2.0, 3.0) if policy == "lru" else (2.0,):
        plain = tiered(workload, "none", size, policy)
        for mode in ("conditioned", "measured"):
            other = tiered(workload, mode, size, policy)
            assert other.engine.declined_requests == 0
            assert other.outcome.cached == plain.outcome.cached
            assert other.outcome.seconds == plain.outcome.seconds


def computed(loop: TieredLoop) -> int:
    return loop.outcome.prompt_tokens - loop.outcome.cached_tokens


def test_below_the_working_set_less_is_computed_and_written_and_above_it_fixed_loses() -> None:
    workload = make("swe", seed=4, sessions=24)
    plain, fixed, measured = (tiered(workload, mode, 0.7) for mode in ("none", "fixed", "measured"))
    assert computed(measured) < 0.7 * computed(plain)
    assert measured.engine.tree.written < 0.3 * plain.engine.tree.written
    assert computed(fixed) < computed(plain)
    assert computed(tiered(workload, "fixed", 3)) > 1.5 * computed(tiered(workload, "none", 3))


def test_in_the_transition_measured_beats_the_published_rule() -> None:
    workload = make("swe", seed=4, sessions=24)
    published = sum(computed(tiered(workload, "conditioned", size)) for size in (0.85, 1.0, 1.15))
    assert sum(computed(tiered(workload, "measured", size)) for size in (0.85, 1.0, 1.15)) < 0.9 * published
