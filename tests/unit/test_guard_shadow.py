"""The guard in a running policy, beside a plain LRU cache that runs too: its shadow, its account, who is in control."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radix_policy.events import Tag, Tick
from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.grouped_index import Gauge
from radix_policy.guard import Guard
from radix_policy.nodes import Node
from radix_policy.prompts import Spans
from radix_policy.runtime import Runtime
from radix_policy.simulator import Study
from radix_policy.simulator.engine import Engine, Run
from radix_policy.workloads import make
from tests.unit.stage import Stage
from tests.unit.test_scout import Player, moves

if TYPE_CHECKING:
    from radix_policy.runtime import Request

OUTPUTS = 10_000_000  # token ids from here on are outputs


# ---- policies that are known to be bad, or good ----


class Newest(ScoutPolicy):
    """The most recently used goes first: for most traffic the opposite of right."""

    name = "newest"

    def place_of(self, node: Node) -> tuple[int, Hashable]:
        return -1, (node.id,)

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        return -node.stamp

    def gauge(self, group: Hashable) -> Gauge | None:
        return None

    def value(self, group: Hashable, weight: float) -> float:
        return weight

    def version(self, group: Hashable) -> int:
        return 0

    def changes(self) -> tuple[int, Iterable[Hashable]]:
        return 0, [-1]


class Shuffled(Newest):
    """Any leaf goes first."""

    name = "shuffled"

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        return float(node.id * 2_654_435_761 % 1_000_003)


class Oldest(Newest):
    """LRU by another way."""

    name = "oldest"

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        return node.stamp


# ---- a policy and plain LRU side by side ----


class Side:
    """One engine that drops whole leaves."""

    def __init__(self, policy: str | type[ScoutPolicy], capacity: int, page: int, **config: Any) -> None:
        self.runtime = Runtime(policy, {"identity": "tags", **config}, page_size=page)
        self.engine = Engine(self.runtime, capacity, page, trims=False)
        self.number = 0

    def start(self, spans: Spans, agent: str, session: str, output: int) -> Run:
        self.number += 1
        written = (OUTPUTS + 1000 * self.number, output)
        run = Run(f"r{self.number}", spans, (written,), sum(n for _, n in spans), output)
        self.runtime.observe(Tick(self.number, float(self.number)))
        self.engine.arrive(run, Tag(agent, session))
        assert self.engine.admit(run)
        return run


class Twins:
    """The same calls, in the same order, on the policy's engine and on LRU's."""

    def __init__(self, policy: type[ScoutPolicy], capacity: int = 1504, page: int = 1, **config: Any) -> None:
        self.ours, self.lru = Side(policy, capacity, page, **config), Side("lru", capacity, page)
        self.guard: Guard = self.ours.runtime.policy.guard  # type: ignore[attr-defined]
        self.cached = [0, 0]  # ours, LRU's
        self.really_lost = self.really_gained = 0  # against LRU, call by call

    def play(self, calls: Iterable[tuple[Spans, str, str, int]], overlap: int = 1) -> "Twins":
        """At most `overlap` calls run at a time."""
        running: list[tuple[Run, Run]] = []
        for call in calls:
            ours, theirs = self.ours.start(*call), self.lru.start(*call)
            assert self.ours.engine.locked == self.lru.engine.locked
            self.cached[0] += ours.cached
            self.cached[1] += theirs.cached
            self.really_lost += max(theirs.cached - ours.cached, 0)
            self.really_gained += max(ours.cached - theirs.cached, 0)
            running.append((ours, theirs))
            if len(running) >= overlap:
                ours, theirs = running.pop(0)
                self.ours.engine.finish(ours)
                self.lru.engine.finish(theirs)
            assert self.guard.held == self.ours.engine.tree.used
        return self

    @property
    def deficit(self) -> int:
        """Tokens that LRU hit and the policy did not."""
        return self.cached[1] - self.cached[0]


def talk(seed: int, calls: int, sessions: int = 8, agents: int = 3) -> Iterator[tuple[Spans, str, str, int]]:
    """Sessions that append, agents that are shared, threads that start over, and strangers that come once."""
    random, said = Random(seed), dict[int, list[tuple[int, int]]]()
    for number in range(calls):
        session = random.randrange(sessions) if random.random() < 0.9 else -1
        thread = said.setdefault(session, [])
        if session < 0 or len(thread) > 12 or random.random() < 0.03:
            thread = said[session] = []
        agent = random.randrange(agents)
        thread.append((1_000_000 + 1000 * number, random.randint(5, 40)))
        output = random.randint(1, 20)
        yield ((1000 * agent + 1, 20 + 10 * agent), *thread), f"a{agent}", f"s{session}", output
        thread.append((OUTPUTS + 1000 * (number + 1), output))


# A shadow of whole nodes sees a little less than what is lost: where a dropped node's head was made again by another
# prompt, it no longer knows what hung behind. So it counts at most 2 % too much, and up to 12 % too little.
LEAST, MOST = 0.88, 1.02
ALWAYS: dict[str, Any] = {"guard_budget": 1e6, "guard_stake": 1e6}  # never yields


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("overlap", [1, 3])
@pytest.mark.parametrize("policy", [Newest, Shuffled, ScoutPolicy])
def test_what_is_counted_as_lost_and_gained_is_what_lru_beside_it_really_hit(
    policy: type[ScoutPolicy], overlap: int, page: int
) -> None:
    twins = Twins(policy, page=page, **ALWAYS).play(talk(7, 500), overlap)
    guard = twins.guard
    assert guard.in_control and guard.trials == 1
    assert twins.really_lost > 2000
    assert LEAST * twins.really_lost <= guard.lost <= MOST * twins.really_lost
    # gains are few here, so the tolerance is in tokens: 5 % of what was lost
    assert guard.gained == pytest.approx(twins.really_gained, abs=0.1 * twins.really_gained + 0.05 * guard.lost)
    assert twins.deficit - (guard.lost - guard.gained) == pytest.approx(0, abs=0.04 * twins.cached[1])
    assert guard.regret == guard.lost - guard.gained, "the budget is far away on both sides"


@pytest.mark.parametrize("overlap", [1, 3])
@pytest.mark.parametrize("page", [1, 16])
def test_a_policy_that_does_what_lru_does_neither_loses_nor_gains(page: int, overlap: int) -> None:
    twins = Twins(Oldest, page=page).play(talk(3, 400), overlap)
    assert twins.ours.engine.evicted > 15 * 1504 and twins.deficit == 0
    assert (twins.guard.lost, twins.guard.gained, twins.guard.regret, twins.guard.trials) == (0, 0, 0.0, 1)


@settings(max_examples=80, deadline=None)
@given(moves, st.integers(90, 200))
@example(
    [*(("call", *c, 0.1) for c in ((0, "a"), (0, "b"), (1, "a"))), ("alone", 0, "b", 0.1), ("call", 0, "a", 0.1)], 90
)
def test_the_shadow_drops_leaves_only_and_is_as_large_as_the_cache(steps: list[Any], capacity: int) -> None:
    player = Player(capacity=capacity, every=1, guard_budget=1e6, guard_stake=1e6)
    policy, nodes = player.stage.runtime.policy, player.stage.world.nodes
    assert isinstance(policy, ScoutPolicy)
    guard = policy.guard
    for step in steps:
        player.play(*step)
        ghosts, marked = guard._ghosts, guard._marked
        assert not marked.keys() & guard._at.keys(), "the shadow dropped what a ghost hangs on"
        assert sum(g.tokens for g in ghosts.values()) == guard._ghost_tokens
        assert sum(marked.values()) == guard._marked_tokens == sum(nodes[n].length for n in marked)
        assert Counter(g.attached for g in ghosts.values()) == {n: len(held) for n, held in guard._at.items()}
        below = Counter(g.head for g in ghosts.values())
        assert all(g.below == below[n] for n, g in ghosts.items())


@pytest.mark.parametrize("identity", ["tagged", "scrambled"])
@pytest.mark.parametrize("name", ["random", "debate", "selector"])
def test_no_loss_is_hidden_from_the_guard_even_when_what_is_called_dead_is_alive(name: str, identity: str) -> None:
    study = Study(make(name, seed=11, concurrency=4, sessions=16))
    capacity = 4 * study.workload.largest
    lru = study.run("lru", capacity, 4)
    free = study.run("scout", capacity, 4, identity=identity, config={"guard_budget": 1e6, "guard_stake": 1e6})
    account = free.snapshot["guard_gained_tokens"] - free.snapshot["guard_lost_tokens"]
    assert free.snapshot["guard_trials"] == 1
    assert account <= free.cached_tokens - lru.cached_tokens + 0.01 * lru.prompt_tokens


@pytest.mark.parametrize("at_once", [16, 30])
@pytest.mark.parametrize(("goes_on", "session", "lost"), [(True, "s", 0), (False, "s", 29), (False, "t", 29)])
def test_a_part_taken_for_dead_is_a_loss_when_it_is_taken_up_after_all(
    goes_on: bool, session: str, lost: int, at_once: int
) -> None:
    """A closing instruction of 30 tokens moved on with every call; then one repeats the whole prompt before."""
    stage = Stage(every=1, **ALWAYS)
    policy = stage.runtime.policy
    assert isinstance(policy, ScoutPolicy)
    stage.call(((900_000, 500),), "b", "z")  # LRU would lose this one first
    spans: Spans = ()
    for turn in range(8):
        spans = ((1, 20), *((1000 * (m + 1), 40) for m in range(turn)), (500_000, 30))
        stage.call(spans, "a", "s", output=1)
    stage.refresh()
    while (leaf := max(stage.leaves_of("s"), key=lambda n: n.start + n.length)).start + leaf.length > 300:
        assert policy.tail(leaf) == leaf.start + leaf.length - 300
        stage.engine.tree.trim(leaf.id, max(leaf.length - at_once, 300 - leaf.start))
    stage.call((*spans[:-1], (8000, 40), (500_000, 30)) if goes_on else spans, "a", session)
    assert policy.guard.lost == lost


def round_trip(prompts: int, calls: int) -> Iterator[tuple[Spans, str, str, int]]:
    """The same prompts over and over."""
    for number in range(calls):
        which = number % prompts
        yield ((1000 * which, 60),), "a", f"s{which}", 1


def test_a_good_policy_keeps_control_and_what_it_gains_is_counted() -> None:
    """A round of 40 prompts through a cache for 20 of them: LRU drops each one just before it is asked for."""
    twins = Twins(Newest, capacity=1200).play(round_trip(40, 800))
    guard = twins.guard
    assert twins.cached[1] == 0 and twins.cached[0] > 0.4 * 800 * 60
    assert guard.in_control and guard.trials == 1
    assert guard.gained == pytest.approx(twins.cached[0], rel=0.05)
    assert guard.lost < 0.02 * guard.gained
    assert guard.regret == pytest.approx(-3.0 * guard.mean_prompt)  # clipped: no credit beyond one budget


@pytest.mark.parametrize("policy", [Newest, Shuffled])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_bad_policy_loses_a_stake_per_trial_and_trials_get_rarer(policy: type[ScoutPolicy], seed: int) -> None:
    calls = 1200
    twins, free = Twins(policy).play(talk(seed, calls)), Twins(policy, guard=False).play(talk(seed, calls))
    guard, engine = twins.guard, twins.ours.engine
    largest = 40 * 13 + 20 * 12 + 40
    stake = 170  # the mean prompt is never above 170 tokens
    assert guard.mean_prompt < stake
    assert guard.lost - guard.gained <= guard.trials * (stake + largest), "one prompt may overshoot"
    # really, with what is lost until the two caches are alike again: some stakes more
    assert 0 < twins.deficit <= 4 * stake * guard.trials
    assert free.guard.trials == 1 and free.deficit > 6 * twins.deficit
    # no more trials than rests fit into what was evicted; a lucky budget in between starts a new row, at most once
    row = [0.5 * 1504 * min(3**k, 64) for k in range(20)]
    fit = next(n for n in range(20) if sum(row[:n]) > engine.evicted)
    assert 4 <= guard.trials <= 2 * fit


# ---- who is in control: the docstring's rule, replayed from what is lost and gained ----


class Umpire:
    """The rule alone: it is told what is lost and gained, and says who is in control."""

    def __init__(self, budget: float, stake: float, rest: float) -> None:
        self.budget, self.stake, self.rest = budget, stake, rest
        self.times, self.share = 1, 1.0  # of the first rest and stake
        self.in_control, self.proven, self.trials, self.left = True, False, 1, 0.0
        self.mean = self.regret = 0.0
        self.yields = self.rows = self.proofs = 0

    def matched(self, prompt: int, lost: int, gained: int, held: int) -> None:
        self.mean = prompt if self.mean == 0 else 0.98 * self.mean + 0.02 * prompt
        if not self.in_control:
            assert lost == gained == 0, "nothing is counted at rest"
        elif lost or gained:
            budget, stake = self.budget * self.mean, self.stake * self.share * self.mean
            self.regret = max(self.regret + lost - gained, -budget)
            if self.regret <= -min(stake, budget) and not self.proven:
                self.proven = True
                self.proofs += 1
            if self.regret > (budget if self.proven else min(stake, budget)):
                self.in_control, self.left = False, self.rest * self.times * held
                self.times, self.share = min(3 * self.times, 64), max(0.7 * self.share, 0.25)
                self.yields += 1
            elif self.regret <= -budget:
                self.times, self.share = 1, 1.0
                self.rows += 1

    def evicted(self, tokens: int) -> None:
        self.left -= tokens

    def asked(self) -> bool:
        if not self.in_control and self.left <= 0:
            self.in_control, self.proven, self.regret = True, False, 0.0
            self.trials += 1
        return self.in_control


class Umpired(Shuffled):
    """A policy whose guard is checked against the umpire at every step."""

    name = "umpired"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.umpire = Umpire(self.config.guard_budget, self.config.guard_stake, self.config.guard_rest)

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        # good and bad by turns, so that rows of failures also end
        return -node.stamp if self.world.calls % 400 < 200 else node.stamp

    def version(self, group: Hashable) -> int:
        return self.world.calls

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        guard = self.guard
        lost, gained = guard.lost, guard.gained
        held = sum(n.length for n in self.world.nodes)
        super().on_match(request, path)
        self.umpire.matched(request.prompt_tokens, guard.lost - lost, guard.gained - gained, held)
        self.check()

    def on_evict(self, node: Node) -> None:
        super().on_evict(node)
        self.umpire.evicted(node.length)

    def holds(self) -> bool:
        found = super().holds()
        assert found == self.umpire.asked()
        self.check()
        return found

    def check(self) -> None:
        guard, umpire = self.guard, self.umpire
        assert (guard.in_control, guard.trials, guard.proven) == (umpire.in_control, umpire.trials, umpire.proven)
        assert guard.mean_prompt == pytest.approx(umpire.mean)
        if guard.in_control:
            assert guard.regret == pytest.approx(umpire.regret, abs=1e-6)


def mixed(seed: int, calls: int) -> Iterator[tuple[Spans, str, str, int]]:
    """Talk, which LRU serves well, and rounds, which it serves badly."""
    rounds = round_trip(40, calls)
    for number, call in enumerate(talk(seed, calls)):
        yield call if number % 500 < 250 else next(rounds)


@pytest.mark.parametrize(
    ("budget", "stake", "rest"), [(3.0, 1.0, 0.5), (0.5, 0.2, 0.3), (8.0, 4.0, 0.1), (2.0, 9.0, 2.0)]
)
def test_who_is_in_control_follows_the_rule(budget: float, stake: float, rest: float) -> None:
    twins = Twins(Umpired, guard_budget=budget, guard_stake=stake, guard_rest=rest).play(mixed(5, 1200))
    umpire: Umpire = twins.ours.runtime.policy.umpire  # type: ignore[attr-defined]
    assert umpire.yields >= 2 and umpire.trials >= 2 and umpire.rows >= 1 and umpire.proofs >= 1


def test_while_it_rests_the_victims_are_those_of_lru() -> None:
    twins = Twins(Newest, guard_rest=1000.0)
    seen = 0
    for call in talk(1, 400):
        twins.play([call])
        runtime = twins.ours.runtime
        with runtime.evicting() as drain:
            first = drain.next()
        oldest = min(runtime.world.nodes.leaves(), key=lambda n: (n.stamp, n.id))
        if twins.guard.in_control:
            assert seen == 0, "a rest of a thousand caches does not end here"
        else:
            assert first is oldest
            seen += 1
    assert seen > 200
    snapshot = twins.ours.runtime.snapshot()
    assert (snapshot["in_control"], snapshot["guard_trials"]) == ("lru", 1)
    assert snapshot["guard_lost_tokens"] == twins.guard.lost > snapshot["guard_gained_tokens"]


def test_without_the_guard_the_scores_always_hold() -> None:
    twins = Twins(Newest, guard=False)
    twins.play(talk(1, 400))
    assert twins.guard.lost == 0 < twins.deficit
    assert not twins.guard.in_control, "nobody watches"
    assert twins.ours.runtime.begin_eviction() and twins.ours.runtime.snapshot()["in_control"] == "scout"
