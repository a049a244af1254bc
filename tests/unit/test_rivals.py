"""Each rival policy does what its source says, on a tree small enough to see."""

from collections.abc import Iterable

import pytest

from radix_policy.config import ConfigError
from radix_policy.events import PrefixMatched, RequestArrived, RequestFinished, Tag, Tick
from radix_policy.eviction import POLICIES
from radix_policy.prompts import SpanPrompt
from radix_policy.runtime import Runtime
from radix_policy.simulator import Engine, Run, Study
from radix_policy.workloads import make


class Tree:
    """A runtime whose tree is told by hand: letters are nodes."""

    def __init__(self, policy: str, **config: object) -> None:
        self.runtime = Runtime(policy, config)
        self.runtime.reset(0)
        self.ids: dict[str, int] = {}
        self.stamp = 0.0
        self.requests = 0

    def request(self, *path: str, agent: str = "a", session: str = "s", priority: int = 0, prompt: int = 10) -> str:
        """A request that finds `path` cached."""
        rid = f"r{self.requests}"
        self.requests += 1
        tag = Tag(agent, session)
        self.runtime.observe(RequestArrived(rid, SpanPrompt(((0, prompt),)), "", tag, priority))
        self.runtime.observe(PrefixMatched(rid, [self.ids[p] for p in path], 0))
        for name in path:
            self.touch(name)
        return rid

    def add(self, name: str, rid: str | None = None, parent: str = "", length: int = 10) -> None:
        node, above = len(self.ids) + 1, self.ids.get(parent, 0)
        self.ids[name] = node
        start = 0
        if parent:
            upper = self.runtime.world.nodes[above]
            start = upper.start + upper.length
        self.stamp += 1
        self.runtime.added(node, above, length, start, self.stamp, rid)
        self.runtime.counted(node)

    def touch(self, name: str) -> None:
        self.stamp += 1
        self.runtime.touched(self.ids[name], self.stamp)

    def count(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.runtime.counted(self.ids[name])

    def finish(self, rid: str) -> None:
        self.runtime.observe(RequestFinished(rid))

    def victims(self, most: int = 100) -> str:
        """Evict; the names in order."""
        names = {node: name for name, node in self.ids.items()}
        gone: list[str] = []
        with self.runtime.evicting() as drain:
            while len(gone) < most and (node := drain.next()) is not None:
                gone.append(names[node.id])
                self.runtime.removed(node.id)
        return "".join(gone)


def filled(policy: str, names: Iterable[str] = "abcd", **config: object) -> Tree:
    tree = Tree(policy, **config)
    for name in names:
        tree.add(name, tree.request())
    return tree


def test_lfu_evicts_what_was_inserted_over_least() -> None:
    tree = filled("lfu")
    tree.count("a", 2)
    tree.count("c")
    assert tree.victims() == "bdca"


def test_slru_protects_from_the_threshold_on() -> None:
    tree = filled("slru", protected_threshold=3)
    tree.count("a", 2)
    tree.count("b")
    assert tree.victims() == "bcda"
    tree = filled("slru")
    tree.count("b")
    assert tree.victims() == "acdb"


def test_fifo_goes_by_age_whatever_was_used_since() -> None:
    tree = filled("fifo")
    tree.touch("a")
    assert tree.victims() == "abcd"


def test_both_halves_of_a_split_keep_their_age() -> None:
    tree = filled("fifo", "ab")
    tree.ids["A"] = 9
    tree.runtime.split(9, tree.ids["a"], 4, 50.0, 51.0)
    assert tree.victims() == "aAb"


def test_priority_takes_the_lowest_and_outputs_before_prompts() -> None:
    tree = Tree("priority")
    low, high = tree.request(priority=0), tree.request(priority=5)
    tree.add("h", high)
    tree.add("H", high, "h")
    tree.add("l", low)
    tree.add("L", low, "l")
    assert tree.victims() == "LlHh"


def test_a_more_important_request_lifts_what_it_shares() -> None:
    tree = Tree("priority")
    tree.add("a", tree.request(priority=1))
    tree.add("b", tree.request(priority=2))
    tree.request("a", priority=3)
    assert tree.victims() == "ba"


def test_tlru_gives_up_the_tail_that_a_prefill_can_afford() -> None:
    tree = Tree("tlru", threshold=12)
    tree.add("a")
    tree.add("b", parent="a")
    tree.add("c", parent="b")  # 30 tokens deep: 18 must stay cached, so only the last node may go early
    tree.add("x")
    assert tree.victims(1) == "c"
    # the branch once was 30 tokens deep: trimming does not lower the budget
    assert tree.victims() == "xba"


def test_tlru_is_lru_by_default() -> None:
    assert filled("tlru").victims() == "abcd"


def test_gdsf_counts_uses_and_forgets_old_fame() -> None:
    tree = filled("gdsf")
    tree.request("b")
    tree.request("b")
    assert tree.victims(3) == "acd"
    tree.add("e", tree.request())  # enters at the level that evictions have reached
    tree.request("e")
    tree.request("e")
    assert tree.victims(1) == "b"


def test_ttl_keeps_sessions_that_may_be_back() -> None:
    tree = Tree("ttl", ttl=5)
    first = tree.request(session="first")
    tree.add("a", first)
    tree.finish(first)
    tree.runtime.observe(Tick(1, 4.0))
    second = tree.request(session="second")
    tree.add("b", second)
    tree.finish(second)
    tree.runtime.observe(Tick(2, 4.5))
    tree.touch("a")
    assert tree.runtime.score(tree.ids["a"]) == 1
    tree.runtime.observe(Tick(3, 6.0))
    assert tree.victims() == "ab"


def test_ttl_keeps_what_runs() -> None:
    tree = Tree("ttl", ttl=0)
    running = tree.request(session="running")
    tree.add("a", running)
    idle = tree.request(session="idle")
    tree.add("b", idle)
    tree.finish(idle)
    assert tree.victims() == "ba"


GRAPH = {"plan": ["code"], "code": ["test"], "test": ["plan", "code"]}


def flow(**config: object) -> Tree:
    tree = Tree("kvflow", graph=GRAPH, **config)
    for agent in ("test", "code", "plan"):
        rid = tree.request(agent=agent)
        tree.add(agent[0], rid)
        tree.finish(rid)
    return tree


def test_kvflow_counts_steps_to_execution() -> None:
    tree = flow()  # at `plan` now: code in 1 step, test in 2, plan again in 3
    assert tree.victims() == "ptc"


def test_kvflow_takes_the_nearest_session_for_what_is_shared() -> None:
    tree = flow()
    rid = tree.request("p", agent="plan", session="other")
    tree.finish(rid)
    tree.finish(tree.request(agent="test", session="other"))  # the other session is one step before `plan`
    assert tree.runtime.world.nodes[tree.ids["p"]].shared
    tree.runtime.policy.refresh()
    assert tree.runtime.score(tree.ids["p"]) == pytest.approx(1 / 2)


def test_kvflow_lets_a_finished_session_go() -> None:
    tree = flow()
    rid = tree.request(agent="plan", session="done")
    tree.add("x", rid)
    tree.finish(rid)
    tree.runtime.observe(RequestArrived("last", SpanPrompt(((0, 9),)), "", Tag("code", "done", final=True)))
    tree.finish("last")
    assert tree.victims(1) == "x"


def test_kvflow_reads_probabilities() -> None:
    tree = Tree("kvflow", graph={"a": {"b": 0.96, "c": 0.04}, "b": {"a": 1.0}})
    assert tree.runtime.policy._steps == {"a": {"b": 1.0, "a": 2.0}, "b": {"a": 1.0, "b": 2.0}}  # type: ignore[attr-defined]


@pytest.mark.parametrize("graph", [{"a": "b"}, {"a": [1]}, {"a": 3}])
def test_kvflow_refuses_what_is_no_graph(graph: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="successors of 'a'"):
        Runtime("kvflow", {"graph": graph})


def test_lhd_learns_which_kind_comes_back() -> None:
    """Prompts are hit at once, outputs never: outputs go first, however young."""
    tree = Tree("lhd", window=16)
    for turn in range(64):
        rid = tree.request()
        tree.add(f"p{turn}", rid)
        tree.add(f"o{turn}", rid, length=10)
        tree.runtime.world.nodes[tree.ids[f"o{turn}"]].output = True
        tree.request(f"p{turn}")
        if turn >= 4:
            tree.runtime.removed(tree.ids[f"o{turn - 4}"])
            tree.runtime.removed(tree.ids[f"p{turn - 4}"])
    tree.add("old prompt", tree.request())
    tree.add("young output", tree.request())
    tree.runtime.world.nodes[tree.ids["young output"]].output = True
    nodes = tree.runtime.world.nodes
    score = tree.runtime.policy.score
    assert score(nodes[tree.ids["young output"]]) < score(nodes[tree.ids["old prompt"]])


def test_lhd_is_lru_without_evidence() -> None:
    assert filled("lhd").victims() == "abcd"


def test_s3fifo_drops_one_hit_wonders_and_keeps_what_is_used_twice() -> None:
    tree = filled("s3fifo", "abcdef")
    tree.request("b")
    tree.request("b")
    assert tree.victims(3) == "acd"
    tree.runtime.policy.refresh()  # b is at the head of the small queue now, and moves on
    assert tree.runtime.policy.snapshot() == {"small_tokens": 20, "main_tokens": 10}


def test_s3fifo_gives_used_leaves_of_the_main_queue_another_round() -> None:
    tree = filled("s3fifo", "ab", small=1.0)
    for name in "aabb":
        tree.request(name)
    tree.runtime.policy.config = type(tree.runtime.policy.config)(small=0.0)
    tree.runtime.policy.refresh()  # both move to the main queue
    tree.request("a")
    tree.runtime.policy.config = type(tree.runtime.policy.config)(small=1.0)
    assert tree.victims() == "ba"


def test_s3fifo_remembers_what_it_dropped() -> None:
    tree = filled("s3fifo", "a")
    assert tree.victims() == "a"
    tree.add("b", tree.request())
    assert tree.runtime.policy.snapshot() == {"small_tokens": 0, "main_tokens": 10}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_lives_through_every_operation(policy: str) -> None:
    """Splits, trims, locks, unknown requests, identical prompts: scores stay finite and nothing is left behind."""
    engine = Engine(Runtime(policy), 300, chunk=40, trims=True)
    for number in range(40):
        prompt = ((0, 20), (1000 * (number % 7), 10 + number % 50))
        run = Run(f"r{number}", prompt, ((7, 1 + number % 9),), sum(n for _, n in prompt), 1 + number % 9)
        tag = Tag(f"a{number % 3}", f"s{number % 5}", number % 11 == 0) if number % 4 else None
        engine.runtime.observe(Tick(number, 0.3 * number))
        engine.arrive(run, tag)
        assert engine.admit(run)
        engine.runtime.policy.refresh()
        for node in list(engine.runtime.world.nodes.leaves()):
            assert abs(engine.runtime.score(node.id)) < 1e15
        engine.finish(run)
        engine.runtime.snapshot()
    assert engine.evictions > 0
    assert engine.free >= 0


def test_who_wins_where() -> None:
    """The order of the study on one point: frequency and recency alone are far below what knowing the routing gives."""
    workload = make("pipeline", seed=7, concurrency=4)
    study = Study(workload)
    capacity = 4 * workload.largest
    rate = {p: 100 * study.run(p, capacity, 4).hit_rate for p in ("lru", "fifo", "ttl", "lhd", "kvflow+END", "opt")}
    assert abs(rate["lru"] - 40.3) < 1.5
    assert abs(rate["fifo"] - rate["lru"]) < 1.0
    assert abs(rate["ttl"] - rate["lru"]) < 1.0
    assert rate["lru"] + 5 < rate["lhd"] < rate["kvflow+END"] < rate["opt"]
