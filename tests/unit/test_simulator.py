"""The closed loop: one order for all policies, the times of the specification, and input that must not crash it."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.config import ConfigError
from radix_policy.eviction import POLICIES, LruPolicy
from radix_policy.runtime import Request
from radix_policy.simulator import IDENTITIES, SERVICES, Loop, Study, call_numbers, known_policies, parse_spec, simulate
from radix_policy.simulator.loop import prefill_seconds
from radix_policy.simulator.run import declared_graph
from radix_policy.workloads import Call, SessionScript, Workload, make, make_call
from tests.unit.small_workloads import workloads


def script(*calls: Call, key: str = "s", **more: object) -> SessionScript:
    return SessionScript(key, calls, **more)  # type: ignore[arg-type]


def load(*sessions: Sequence[Call]) -> Workload:
    return Workload("made", tuple(script(*calls, key=f"s{i}") for i, calls in enumerate(sessions)))


def call(first: int, length: int, output: int = 5, gap: float = 0.0, agent: str = "a") -> Call:
    return make_call(agent, ((first, length),), ((first + length, output),), gap)


# ---- order and determinism ----


@pytest.mark.parametrize(("concurrency", "factor"), [(1, 1.3), (4, 2.0), (16, 4.0)])
def test_every_policy_sees_one_order(concurrency: int, factor: float) -> None:
    workload = make("selector", seed=4, concurrency=concurrency, sessions=6)
    study = Study(workload)
    capacity = int(factor * workload.largest)
    orders = {
        study.run(policy, capacity, concurrency, identity=identity).order
        for policy in (*POLICIES, "scout-trim", "lru+trim", "belady", "beladyP", "opt")
        for identity in (IDENTITIES if policy in ("scout", "cachescout") else ("tagged",))
    }
    assert len(orders) == 1


def test_the_order_is_another_at_another_capacity() -> None:
    workload = make("selector", seed=4, concurrency=16, sessions=16)
    study = Study(workload)
    assert study.order(2 * workload.largest, 16).order != study.order(8 * workload.largest, 16).order


@settings(max_examples=40, deadline=None)
@given(workloads(), st.integers(1, 4), st.floats(0.5, 3), st.sampled_from((1, 4)), st.sampled_from(SERVICES))
def test_everything_is_played_once(
    workload: Workload, concurrency: int, factor: float, page: int, service: str
) -> None:
    capacity = int(factor * workload.largest)
    loop = Loop(workload, "lru", capacity=capacity, concurrency=concurrency, page_size=page, service=service)
    outcome = loop.run()
    assert outcome.requests + outcome.unserved == workload.requests
    assert len(set(outcome.calls)) == outcome.requests
    numbers = call_numbers(workload)
    calls = [workload.sessions[s].calls[c] for s, c in numbers]
    assert outcome.prompt_tokens == sum(calls[i].prompt_tokens for i in outcome.calls)
    assert all(0 <= hit < prompt for hit, prompt in zip(outcome.cached, outcome.prompts))
    assert not loop.engine.running and loop.engine.private == 0
    by_session = [numbers[i] for i in outcome.calls]
    for session in range(len(workload.sessions)):
        own = [c for s, c in by_session if s == session]
        assert own == sorted(own)


def test_twice_the_same() -> None:
    workload = make("random", seed=9, concurrency=4, sessions=8)
    a, b = (simulate(workload, "scout", capacity=3 * workload.largest, concurrency=4) for _ in range(2))
    assert (a.order, a.cached, a.ttft) == (b.order, b.cached, b.ttft)


# ---- times ----


def test_the_times_of_the_specification() -> None:
    workload = load([call(0, 1000, 50, gap=0.5), call(0, 1000, 50, gap=2.0)])
    fixed = simulate(workload, "lru", capacity=10_000, concurrency=1)
    share = prefill_seconds(700, 1000)
    assert list(fixed.ttft) == pytest.approx([0.02 + share] * 2)
    assert fixed.seconds == pytest.approx(0.5 + 2.0 + 2 * (0.01 + share + 0.5))
    cost = simulate(workload, "lru", capacity=10_000, concurrency=1, service="cost")
    assert list(cost.ttft) == pytest.approx([0.02 + prefill_seconds(0, 1000), 0.02 + prefill_seconds(999, 1000)])


def test_serial_prefills_queue() -> None:
    workload = load(*([call(1000 * i, 500)] for i in range(3)))
    each = 0.01 + prefill_seconds(0, 500)
    times = {s: simulate(workload, "lru", capacity=9999, concurrency=3, service=s).ttft for s in ("cost", "serial")}
    assert list(times["cost"]) == pytest.approx([0.01 + each] * 3)
    assert list(times["serial"]) == pytest.approx([0.01 + each, 0.01 + 2 * each, 0.01 + 3 * each])


def test_a_prefilled_token_costs_more_further_out() -> None:
    assert prefill_seconds(0, 1000) == pytest.approx(0.1 * (1 + 500 / 30_500))
    assert prefill_seconds(30_500, 30_501) == pytest.approx(2e-4, rel=1e-3)


def test_requests_wait_for_memory_first_come_first_served() -> None:
    workload = load(*([call(1000 * i, 100, 10)] for i in range(3)))
    outcome = simulate(workload, "lru", capacity=150, concurrency=3)
    assert list(outcome.calls) == [0, 1, 2]
    service = 0.01 + prefill_seconds(70, 100) + 0.1
    first = outcome.ttft[0]
    assert list(outcome.ttft) == pytest.approx([first, first + service, first + 2 * service])


def test_a_lane_has_slots_of_its_own() -> None:
    long = [call(0, 50, 5, gap=100.0)]
    side = script(call(5000, 50, 5, gap=1.0), key="side", lane=1)
    workload = Workload("lanes", (script(*long, key="a"), script(*long, key="b"), side))
    assert list(simulate(workload, "lru", capacity=1000, concurrency=1).calls) == [2, 0, 1]


# ---- input that must not crash it ----


def test_a_giant_request_is_not_served_and_its_session_goes_on() -> None:
    workload = load([call(0, 50), call(0, 5000), call(0, 60)])
    for policy in (*POLICIES, "opt", "belady", "ttl-pin"):
        outcome = simulate(workload, policy, capacity=200, concurrency=1)
        assert (outcome.requests, outcome.unserved, outcome.unserved_tokens) == (2, 1, 5000)
        assert outcome.prompt_tokens == 110


@pytest.mark.parametrize("capacity", [0, 1])
def test_no_memory_at_all(capacity: int) -> None:
    workload = load([call(0, 50), call(0, 60)])
    for policy in ("lru", "scout", "opt", "belady"):
        outcome = simulate(workload, policy, capacity=capacity, concurrency=2)
        assert (outcome.requests, outcome.unserved, outcome.hit_rate) == (0, 2, 0.0)


def test_identical_prompts_only() -> None:
    workload = load(*([call(0, 100), call(0, 100)] for _ in range(10)))
    for policy in (*POLICIES, "opt", "belady", "beladyP"):
        for concurrency in (1, 5):
            outcome = simulate(workload, policy, capacity=800, concurrency=concurrency)
            assert outcome.requests == 20
            assert outcome.cached_tokens == 19 * 99


def test_a_session_that_never_ends() -> None:
    calls, said = [], 100
    for _ in range(200):
        calls.append(make_call("a", ((0, said),), ((said, 7),), 0.1))
        said += 7
    workload = load(calls)
    rates = {p: simulate(workload, p, capacity=1800, concurrency=1).hit_rate for p in ("lru", "scout", "opt")}
    assert 0.9 < rates["lru"] <= rates["opt"]
    assert 0.9 < rates["scout"] <= rates["opt"]


def test_nothing_to_play() -> None:
    assert simulate(Workload("empty", ()), "lru", capacity=100, concurrency=4).hit_rate == 0
    assert simulate(Workload("hollow", (script(),)), "opt", capacity=100, concurrency=4).requests == 0


def test_anonymous_sessions_carry_no_tag() -> None:
    tagged = []

    class Watch(LruPolicy):
        def on_request(self, request: Request) -> None:
            tagged.append(request.tagged)

    quiet, loud = (script(call(0, 200), key=f"s{said}", tagged=said) for said in (False, True))
    Loop(Workload("both", (quiet, loud)), Watch, capacity=1000, concurrency=1).run()
    assert tagged == [False, True]


def test_identities() -> None:
    workload = load([call(0, 200), call(0, 220)], [call(0, 200), call(0, 230)])
    seen = {}
    for identity in IDENTITIES:
        loop = Loop(workload, "lru", capacity=2000, concurrency=1, identity=identity)
        loop.run()
        seen[identity] = len({s.key for s in loop.runtime.world.sessions})
    assert (seen["tagged"], seen["scrambled"], seen["scrambled-fresh"]) == (2, 1, 4)


def test_wrong_options_are_refused() -> None:
    workload = load([call(0, 10)])
    with pytest.raises(ValueError, match="identity 'nobody'"):
        Loop(workload, "lru", capacity=10, concurrency=1, identity="nobody")
    with pytest.raises(ValueError, match="service 'slow'"):
        Loop(workload, "lru", capacity=10, concurrency=1, service="slow")
    with pytest.raises(ConfigError, match="needs fixed service"):
        simulate(workload, "opt", capacity=100, concurrency=1, service="cost")


# ---- names ----


@pytest.mark.parametrize(
    "name", ["nothing", "lru+", "lru-guard", "opt+trim", "belady:x=1", "", "lru;trim", "ttl:ttl=-1"]
)
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ConfigError):
        simulate(load([call(0, 10)]), name, capacity=100, concurrency=1)


def test_names_with_ingredients_and_keys() -> None:
    assert parse_spec("lru+trim") == ("lru", {}, True, False)
    assert parse_spec("cachescout:delta=0.1:lambda=0.01") == (
        "cachescout",
        {"delta": 0.1, "lambda": 0.01},
        None,
        False,
    )
    assert parse_spec("kvflow+END").ends
    assert parse_spec("ttl-pin:ttl=3").name == "ttl-pin"
    assert {"lru", "opt", "belady", "beladyP", "scout", "cachescout", "ttl-pin"} <= set(known_policies())


def test_trimming_never_takes_more_than_dropping() -> None:
    workload = make("selector", seed=4, concurrency=1, sessions=8)
    study = Study(workload)
    whole, cut = (study.run(p, int(1.3 * workload.largest), 1) for p in ("lru", "lru+trim"))
    assert cut.evicted_tokens < whole.evicted_tokens
    assert cut.cached_tokens > whole.cached_tokens


# ---- policies of the simulator ----


def test_a_pinned_session_outlives_pressure_and_a_soft_pin_does_not() -> None:
    """While a session pauses, others push its prefix out under LRU; a hard pin keeps it, and they wait or make do."""
    mine = [call(0, 100, 5), call(0, 120, 5, gap=3.0)]
    others = [[call(10_000 * i + 1000 * j, 90, 5, gap=0.05) for j in range(6)] for i in range(1, 3)]
    workload = load(mine, *others)
    options = {"capacity": 520, "concurrency": 3}
    lru, hard = (simulate(workload, p, **options) for p in ("lru", "ttl-pin:ttl=10"))
    assert lru.cached_tokens == 0
    assert hard.cached_tokens >= 100
    assert hard.requests == lru.requests == 14


def test_pins_do_not_deadlock() -> None:
    workload = load(*([call(1000 * i, 100, 5)] for i in range(4)))
    outcome = simulate(workload, "ttl-pin:ttl=1000", capacity=150, concurrency=2)
    assert outcome.requests == 4


def test_the_declared_graph() -> None:
    workload = make("pipeline", seed=1, concurrency=1, sessions=2)
    graph = declared_graph(workload)
    assert graph["planner"]["researcher"] == 1.0
    trace = Workload("trace", (script(call(0, 9, agent="x"), call(0, 9, agent="y"), call(0, 9, agent="x")),))
    assert declared_graph(trace) == {"x": {"y": 1.0}, "y": {"x": 1.0}}


def test_knowing_the_end_helps() -> None:
    workload = make("pipeline", seed=6, concurrency=4, sessions=16)
    study = Study(workload)
    rates = [study.run(p, 3 * workload.largest, 4).hit_rate for p in ("lru", "kvflow", "kvflow+END", "opt")]
    assert rates == sorted(rates)


def test_arrays_are_what_they_say() -> None:
    outcome = simulate(load([call(0, 50)]), "lru", capacity=100, concurrency=1)
    assert outcome.prompts == array("q", [50])
    assert outcome.cached == array("q", [0])
