"""The model behind scout's p: G against walks and against the sum step by step, c and Q against their formulas."""

from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from radix_policy.hazard import HazardModel
from radix_policy.survival import first_passage
from tests.unit.stage import Calls

Matrix = NDArray[np.float64]
GAMMA = 0.85
PLAIN: dict[str, Any] = {"adapt": 0, "every": 1, "soft_end": False, "tend": 1000.0}


def model_of(stage: Calls) -> HazardModel:
    found = stage.runtime.policy.hazard  # type: ignore[attr-defined]
    assert isinstance(found, HazardModel)
    return found


def chat(calls: int, seed: int = 1, ends: bool = True, live: int = 6, **config: Any) -> Calls:
    """Sessions that walk a chain of four agents, and close after a call with a chance that the agent has."""
    stage, random = Calls(**{**PLAIN, **config}), Random(seed)
    at = dict[str, int]()
    rows = ((0.1, 0.6, 0.3, 0.0), (0.0, 0.2, 0.4, 0.4), (0.7, 0.0, 0.1, 0.2), (0.25, 0.25, 0.25, 0.25))
    over = (0.02, 0.1, 0.05, 0.3)
    number = 0
    for _ in range(calls):
        while len(at) < live:
            number += 1
            at[f"s{number}"] = -1
        key = random.choice(sorted(at))
        agent = random.choices(range(4), rows[at[key]])[0] if at[key] >= 0 else random.choice((0, 0, 1))
        stage.tick(random.expovariate(1.0))
        rid = stage.arrive(key, f"a{agent}")
        stage.tick(random.expovariate(4.0))
        stage.finish(rid)
        at[key] = agent
        if ends and random.random() < over[agent]:
            stage.close(key)
            del at[key]
    model_of(stage).refresh(0)
    return stage


def chain(stage: Calls) -> Matrix:
    """P(next | agent, no END) as the router has it; public, so that the rest can be worked out from it."""
    return model_of(stage).router.matrix(len(stage.world.transitions))


def end_rates(stage: Calls) -> Matrix:
    return np.array([stage.world.ends.agent_rate(i) for i in range(len(stage.world.transitions))])


def live(stage: Calls) -> list[Any]:
    return [s for s in stage.world.sessions.live.values() if s.calls > 0]


# ---- G ----


def walked(p: Matrix, end: Matrix, start: int, walks: int, steps: int = 24) -> Matrix:
    """The mean worth of the first visit of each agent, of sessions that go on after this call for sure."""
    rng = np.random.default_rng(3)
    agents = len(p)
    edges = np.cumsum(p, axis=1)
    at, alive = np.full(walks, start), np.ones(walks, dtype=bool)
    worth, seen = np.zeros(agents), np.zeros((walks, agents), dtype=bool)
    for k in range(steps):
        if k > 0:
            alive &= rng.random(walks) >= end[at]
        at = np.minimum((rng.random(walks)[:, None] >= edges[at]).sum(axis=1), agents - 1)
        fresh = alive & ~seen[np.arange(walks), at]
        seen[np.arange(walks), at] |= alive
        worth += GAMMA**k * np.bincount(at[fresh], minlength=agents)
    return worth / walks


def test_g_is_the_mean_worth_of_the_first_visit_of_simulated_walks() -> None:
    stage = chat(1500, live=20, by_turn=False, pairs=False)
    p, end = chain(stage), end_rates(stage)
    assert p.sum(axis=1) == pytest.approx(np.ones(len(p))) and end[1:].max() > 4 * end[1:].min() > 0
    known = set()
    for session in live(stage):
        view = model_of(stage).view(session.id)
        assert view is not None
        if session.agent not in known:
            known.add(session.agent)
            assert view.reach == pytest.approx(walked(p, end, session.agent, 60_000), abs=0.01)
    assert len(known) >= 3


@pytest.mark.parametrize("cap", [1.0, 4.0])
def test_g_follows_the_formula_where_the_odds_of_turns_differ(cap: float) -> None:
    """Sessions end after their fifth call, or not at all. Steps that share a weight cost a little exactness."""
    stage, random = Calls(pairs=False, odds_cap=cap, **PLAIN), Random(2)
    for number in range(150):
        for _ in range(5 if number % 2 else 12):
            stage.call(f"s{number}", f"a{random.randrange(3)}", gap=1.0)
        stage.close(f"s{number}")
    for turns in range(1, 9):
        for _ in range(turns):
            stage.call(f"open{turns}", f"a{turns % 3}", gap=1.0)
    model = model_of(stage)
    model.refresh(0)
    p, end, ends = chain(stage), end_rates(stage), stage.world.ends
    h = first_passage(p * (1 - end)[:, None], 24).astype(np.float64)
    spread = []
    for session in live(stage):
        odds = ends.odds_of(session.entry, session.calls, 24)
        ratio = np.minimum(np.cumprod([1.0, *odds[1:]]), cap)
        weights = GAMMA ** np.arange(24) * ratio
        exact = np.minimum((weights[:, None] * h[:, session.agent]).sum(axis=0) / (1 - end[session.agent]), 1.0)
        view = model.view(session.id)
        assert view is not None
        assert view.reach == pytest.approx(exact, abs=0.03)
        assert view.end == pytest.approx(ends.rate(session.agent, session.entry, session.calls, session.length_kind))
        spread.append(view.end)
    assert max(spread) > 0.3 > 0.1 > min(spread)


def test_with_the_last_two_agents_the_next_one_is_known_where_one_is_not_enough() -> None:
    """0 asks 1 and 2 by turns, after 1 comes 4 and after 2 comes 3."""
    reach = {}
    for pairs in (True, False):
        stage, random = Calls(pairs=pairs, **PLAIN), Random(1)
        for number in range(40):
            for _ in range(6):
                who = random.choice((1, 2))
                for agent in (who, 0, 5 - who, 0):
                    stage.call(f"s{number}", f"a{agent}", gap=1.0)
                model_of(stage).refresh(0)
        for who in (1, 2):
            for agent in (0, who, 0):
                stage.call(f"asks{who}", f"a{agent}", gap=1.0)
        model_of(stage).refresh(0)
        agents = stage.world.identifier.agents
        for who in (1, 2):
            view = model_of(stage).view(stage.session(f"asks{who}").id)
            assert view is not None
            reach[pairs, who] = [view.reach[agents.find("", f"tag:a{n}")] for n in range(5)]
    assert reach[True, 1][4] > reach[True, 1][3] + 0.2 and reach[True, 2][3] > reach[True, 2][4] + 0.2
    assert reach[False, 1] == pytest.approx(reach[False, 2], abs=0.02)
    assert all(0 <= g <= 1 for row in reach.values() for g in row)


def test_g_of_a_context_is_the_mean_worth_of_the_first_visit_of_walks_that_remember() -> None:
    """Walks over (agent, longest known context), drawn step by step from the router's own rows."""
    stage = chat(1500, live=12, by_turn=False, pairs=True)
    model = model_of(stage)
    for agent in ("a0", "a1", "a2"):
        stage.call("mine", agent, gap=0.1)
    model.router.scores = [-5.0, -9.0, -9.0, -5.5, -5.0]
    model.refresh(0)
    p, end, session = chain(stage), end_rates(stage), stage.session("mine")
    contexts = model.router.contexts(len(p))
    assert {len(c) for c in contexts} == {2, 3}

    def longest(trail: tuple[int, ...]) -> tuple[int, ...]:
        return next(c for c in (trail[-3:], trail[-2:], trail[-1:]) if c in contexts or len(c) == 1)

    edges: dict[tuple[int, ...], Any] = {}
    for context in [*contexts, *((i,) for i in range(len(p)))]:
        base = p[context[-1]]
        edges[context] = np.cumsum(model.router.row_of(context, base) if len(context) > 1 else base).tolist()
    walks, worth, random = 20_000, np.zeros(len(p)), Random(4)
    began = (*session.trail, session.agent)
    assert len(longest(began)) == 3
    for _ in range(walks):
        at, seen = longest(began), set[int]()
        for k in range(24):
            if k > 0 and random.random() < end[at[-1]]:
                break
            draw = random.random()
            step = next((j for j, edge in enumerate(edges[at]) if draw < edge), len(p) - 1)
            if step not in seen:
                seen.add(step)
                worth[step] += GAMMA**k
            at = longest((*at, step))
    view = model.view(session.id)
    assert view is not None
    assert view.reach == pytest.approx(worth / walks, abs=0.015)


def test_e_follows_the_length_of_the_last_output_and_only_once_it_is_known() -> None:
    """Sessions close with a long answer; the same with by_length off."""
    for on in (True, False):
        stage, random = Calls(by_length=on, by_turn=False, **PLAIN), Random(2)
        for number in range(60):
            while random.random() < 0.7:
                stage.call(f"s{number}", "a", gap=1.0, output=40)
            stage.call(f"s{number}", "a", gap=1.0, output=500)
            stage.close(f"s{number}")
        model, ends = model_of(stage), {}
        for key, output in (("short", 40), ("long", 500), ("unknown", 0)):
            stage.call(key, "a", gap=0.1, output=output)
            model.refresh(0)
            view = model.view(stage.session(key).id)
            assert view is not None
            ends[key] = view.end
        if not on:
            assert ends["short"] == pytest.approx(ends["long"], abs=0.02)
            continue
        assert ends["short"] < 0.1 < ends["unknown"] < 0.6 < ends["long"]
        rid = stage.arrive("long", "a")  # it went on: what its answer said no longer counts
        model.refresh(0)
        assert model.view(stage.session("long").id).end == pytest.approx(ends["unknown"], abs=0.05)  # type: ignore[union-attr]
        version = model.view(stage.session("long").id).version  # type: ignore[union-attr]
        stage.finish(rid, 500)
        model.refresh(0)
        view = model.view(stage.session("long").id)
        assert view is not None and view.end > 0.6 and view.version == version  # G did not change


# ---- c ----


def test_c_of_a_session_that_moved_is_right_at_once() -> None:
    stage = chat(600, every=10_000, grain=10)
    model, gaps, services = model_of(stage), stage.world.gaps, stage.world.services
    sweeps = model.sweeps
    stage.call("mine", "a2", gap=0.1)
    stage.tick(2.0)
    model.refresh(0)
    view, tables = model.view(stage.session("mine").id), gaps.tables(model.gamma)
    assert view is not None and view.end > 0.01
    s, d = tables.at(2.0)
    assert view.factor == pytest.approx((1 - view.end) * s / ((1 - view.end) * s + view.end) * d, rel=0.01)
    stage.arrive("mine", "a1")
    stage.tick(0.3)
    model.refresh(0)
    left = services.tables(model.gamma, gaps.cycle).at(0.3)[1]
    assert view.factor == pytest.approx((1 - view.end) * left * tables.first, rel=0.01)
    assert model.sweeps == sweeps


def test_c_of_a_silent_session_is_that_it_lives_times_what_the_wait_leaves() -> None:
    stage = chat(600, grain=0)
    model, gaps = model_of(stage), stage.world.gaps
    for wait in (0.0, 0.5, 3.0, 40.0, 400.0):
        stage.tick(wait)
        model.refresh(0)
        tables, now = gaps.tables(GAMMA), stage.world.clock.seconds
        for session in live(stage):
            view = model.view(session.id)
            assert view is not None and session.running == 0
            s, d = tables.at(now - session.finished_at)
            alive = (1 - view.end) * s / ((1 - view.end) * s + view.end)
            # a change of less than two hundredths need not be told
            assert view.factor == pytest.approx(alive * d, rel=0.021)


def test_c_of_a_running_session_does_not_doubt_it_by_its_silence_and_discounts_what_is_left_of_the_call() -> None:
    stage = chat(600, grain=0)
    model, gaps, services = model_of(stage), stage.world.gaps, stage.world.services
    stage.arrive("runs", "a0")
    session = stage.session("runs")
    for wait in (0.0, 0.1, 0.4, 5.0):
        stage.tick(wait)
        model.refresh(0)
        view = model.view(session.id)
        assert view is not None
        left = services.tables(GAMMA, gaps.cycle).at(stage.world.clock.seconds - session.started_at)[1]
        assert view.factor == pytest.approx((1 - view.end) * left * gaps.tables(GAMMA).first, rel=0.021)
    flat = chat(600, timing=False)
    flat.arrive("runs", "a0")
    flat.tick(1000.0)
    model_of(flat).refresh(0)
    for session in live(flat):
        view = model_of(flat).view(session.id)
        assert view is not None and view.factor == pytest.approx((1 - view.end) * GAMMA)


# ---- Q ----


def test_q_is_that_no_live_session_and_no_new_one_calls() -> None:
    stage = chat(900, by_turn=False, pairs=False, grain=0)
    model, world = model_of(stage), stage.world
    model.sweep()
    p, end = chain(stage), end_rates(stage)
    h = first_passage(p * (1 - end)[:, None], 24).astype(np.float64)
    onward = (GAMMA ** np.arange(1, 25)[:, None, None] * h).sum(axis=0)
    np.fill_diagonal(onward, 1.0)
    starts = world.starts.counts
    new = sum(n / sum(starts.values()) * np.minimum(onward[i], 1.0) for i, n in starts.items())
    theta = (1 - GAMMA) / world.gaps.cycle
    rate = world.starts.rate(world.clock.seconds)
    sessions = live(stage)
    missed = np.ones(len(p))
    for session in sessions:
        view = model.view(session.id)
        assert view is not None
        missed *= 1 - view.factor * np.array(view.reach)
    assert model.none == pytest.approx(missed * theta / (theta + rate * new), rel=0.05)
    assert all(0 <= q <= 1 for q in model.none) and len(sessions) >= 4


def test_q_falls_with_each_session_that_may_call_and_rises_when_it_is_over() -> None:
    stage = chat(600, every=10_000, grain=0)
    model = model_of(stage)
    agent = stage.world.identifier.agents.find("", "tag:a0")
    before = model.none[agent]
    for n in range(4):
        stage.call(f"more{n}", "a2", gap=0.01)
    model.refresh(0)
    assert model.none[agent] < before
    crowded = model.none[agent]
    for n in range(4):
        stage.close(f"more{n}")
    stage.tick(0.01)
    model.refresh(0)
    assert model.none[agent] > crowded


# ---- who has numbers ----


def test_only_a_live_session_that_called_has_numbers() -> None:
    stage = chat(300)
    model = model_of(stage)
    stage.call("mine", "a1", gap=1.0)
    session = stage.session("mine")
    model.refresh(0)
    view = model.view(session.id)
    assert view is not None
    assert model.view(10**6) is None
    stage.close("mine")
    model.refresh(0)
    assert model.view(session.id) is None
    stage.call("mine", "a2", gap=1.0)
    model.refresh(0)
    again = model.view(session.id)
    assert again is not None and again.factor > 0 and again.version != view.version


def test_a_version_changes_with_the_session_s_calls_and_stays_while_it_is_silent() -> None:
    stage = chat(300, every=10_000)
    model = model_of(stage)
    stage.call("mine", "a1", gap=1.0)
    model.refresh(0)
    view = model.view(stage.session("mine").id)
    assert view is not None
    versions = [view.version]
    stage.tick(5.0)
    model.refresh(0)
    assert view.version == versions[0]
    stage.call("mine", "a2", gap=1.0)
    model.refresh(0)
    assert view.version != versions[0]


def test_sessions_that_ended_count_for_nothing_however_many_there_were() -> None:
    """Places in the tables are used again: what a session leaves there must not speak for the next one."""
    stage, twin = chat(200, live=40), chat(200, live=40)
    for n in range(300):
        stage.call(f"gone{n}", "a0")
        stage.close(f"gone{n}")
        if n % 7 == 0:
            model_of(stage).refresh(0)
    for key in [s.key for s in live(stage)][:20]:
        stage.close(key)
        twin.close(key)
    for each in (stage, twin):
        model_of(each).refresh(0)
    model = model_of(stage)
    model.sweep()
    missed = np.ones(len(model.none))
    for session in live(stage):
        view = model.view(session.id)
        assert view is not None
        missed *= 1 - view.factor * np.array(view.reach)
    assert (np.array(model.none) <= missed * 1.05 + 1e-12).all()
    assert [s.key for s in live(stage)] == [s.key for s in live(twin)]


# ---- gamma, and the same again ----


def test_gamma_follows_the_turnover_between_its_bounds() -> None:
    for evicted, expected in ((0, GAMMA), (10**9, 0.5), (1, 0.9), (None, 0.7)):
        stage = chat(60, adapt=0.8)
        model = model_of(stage)
        cycle = stage.world.gaps.cycle
        seconds = stage.world.clock.seconds
        # held tokens that stay for so many cycles
        stays = 0.8 / 0.3
        model.evicted = round(100_000 * seconds / (stays * cycle)) if evicted is None else evicted
        model = _fresh(stage, model.evicted)
        assert model.gamma == pytest.approx(expected, abs=0.02), evicted


def _fresh(stage: Calls, evicted: int) -> HazardModel:
    """A model of the same world that looks at it for the first time."""
    model = HazardModel(stage.world, model_of(stage).config)
    model.evicted = evicted
    model.refresh(100_000)
    return model


def test_the_same_events_give_the_same_bits() -> None:
    one, two = chat(400, soft_end=True, every=8), chat(400, soft_end=True, every=8)
    assert model_of(one).none == model_of(two).none
    for a, b in zip(live(one), live(two), strict=True):
        left, right = model_of(one).view(a.id), model_of(two).view(b.id)
        assert left is not None and right is not None
        assert (left.reach, left.factor, left.end) == (right.reach, right.factor, right.end)
