"""`python -m benchmarks study`: what it plans, what it keeps and throws away, and what it writes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import radix_policy
from benchmarks import study, study_run
from benchmarks.__main__ import main
from benchmarks.results import UsageError
from benchmarks.study_cost import Tape, size_of
from benchmarks.study_keys import keys, switches, variations
from benchmarks.study_plan import ORDER, PARTS, TRACES, Place, Plan, Point, point_of
from benchmarks.study_run import measure
from benchmarks.study_store import Store, code_of
from benchmarks.study_tables import Found, interval, signed
from radix_policy.config import build
from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.identity import IdentityConfig
from radix_policy.runtime import Runtime, RuntimeConfig
from radix_policy.simulator import Loop, parse_spec
from radix_policy.workloads import make
from tests.unit import commands

PACKAGE = Path(radix_policy.__file__).parent
SMALL = [Place("selector", 4, "2F", 100, None, 2), Place("drift", 4, "2F", 100, None, 2)]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part `others` is two places."""
    monkeypatch.setattr(Plan, "other_places", lambda self: SMALL)


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return commands.ran(capsys, "study", *words)


# ---- the plan ----


def test_the_grid_is_the_frozen_one_and_every_name_can_be_run() -> None:
    plan = Plan()
    places = plan.grid_places()
    assert len([p for p in places if p.seed == 100]) == 64 and len(places) == 3 * 64
    points = {p for part in PARTS for p in plan.points(part)}
    for point in points:
        spec = parse_spec(point.policy)
        if spec.name == "scout":
            Runtime("scout", spec.config)
    assert {p.policy for p in plan.points("grid")} == set(ORDER)
    assert all(point_of(json.loads(json.dumps(p.key()))) == p for p in points)


def test_every_number_and_switch_of_scout_is_varied() -> None:
    names = {k.name for k in keys()}
    for part in (ScoutPolicy.Config, RuntimeConfig, IdentityConfig):
        build({}, part)
        assert {f.metadata["name"] or f.name for f in part.__dataclass_fields__.values()} <= names
    numbers = {k.name for k in keys() if isinstance(k.default, int | float) and not isinstance(k.default, bool)}
    assert numbers - {key.name for key, _, _ in variations()} <= {"fingerprint_skip", "fingerprint_take"}
    for key, value, policy in variations():
        assert value != key.default
        build(parse_spec(policy).config, RuntimeConfig, IdentityConfig, ScoutPolicy.Config)
    flags = {k.name for k in keys() if isinstance(k.default, bool)}
    assert flags <= {changed.split("=")[0] for _, changed, _ in switches()}


# ---- what is thrown away ----


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Path]:
    """A copy of the package's source, to be edited."""
    root = tmp_path / "radix_policy"
    shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
    yield root


def test_comments_and_docstrings_change_no_code(copied: Path) -> None:
    before = code_of("scout", copied)
    path = copied / "hazard.py"
    text = path.read_text()
    path.write_text('"""Another docstring."""\n# a comment\n\n' + text[text.index('"""', 3) + 3 :])
    assert code_of("scout", copied) == before
    path.write_text(text + "\nEXTRA = 1\n")
    assert code_of("scout", copied) != before


@pytest.mark.parametrize(
    "file, changed, unchanged",
    [
        ("hazard.py", ("scout", "informed"), ("lru", "lhd", "cachescout", "opt", "kvflow")),
        ("sessions.py", ("scout", "kvflow", "ttl"), ("lru", "lhd", "opt", "gdsf")),
        ("eviction/lhd.py", ("lhd",), ("lru", "scout", "opt")),
        ("simulator/engine.py", ("lru", "scout", "opt", "belady"), ()),
        ("workloads/topologies.py", ("lru", "scout", "opt"), ()),
        ("simulator/optimum.py", ("opt", "belady"), ("lru", "scout")),
    ],
)
def test_only_what_depends_on_a_file_is_run_again(
    copied: Path, file: str, changed: tuple[str, ...], unchanged: tuple[str, ...]
) -> None:
    before = {p: code_of(p, copied) for p in (*changed, *unchanged)}
    path = copied / file
    path.write_text(path.read_text() + "\nEXTRA = 1\n")
    assert all(code_of(p, copied) != before[p] for p in changed)
    assert all(code_of(p, copied) == before[p] for p in unchanged)


def test_points_of_other_code_are_left_behind(tmp_path: Path) -> None:
    store = Store(tmp_path, "python -m benchmarks study", False)
    points = [Point(SMALL[0], p) for p in ("lru", "scout")]
    for point in points:
        store.add("others", point, {"prompt_tokens": 10, "cached_tokens": 5}, 1.0)
    store.save()
    path = tmp_path / "others.json"
    document = json.loads(path.read_text())
    assert document["kind"] == "study" and len(document["points"]) == 2
    assert {"versions", "machine", "date", "seed", "command", "code"} <= set(document)
    again = Store(tmp_path, "python -m benchmarks study", False)
    again.load(PARTS)
    assert set(again.points) == set(points) and again.stale == 0
    document["code"]["scout"] = "0"
    path.write_text(json.dumps(document))
    other = Store(tmp_path, "python -m benchmarks study", False)
    other.load(PARTS)
    assert set(other.points) == {points[0]} and other.stale == 1
    quick = Store(tmp_path, "python -m benchmarks study", True)
    with pytest.raises(UsageError, match="without --quick"):
        quick.load(PARTS)


# ---- the command ----


def test_a_part_is_run_once_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--only", "others", "--jobs", "1", "--out", str(tmp_path)]
    status, out, err = ran(capsys, *words)
    assert status == 0 and out.strip() == str(tmp_path / "RESULTS.md") and "left" in err
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| selector C=4 2F |" in text and "`python -m benchmarks study --only grid`" in text
    assert str(tmp_path) not in text and str(tmp_path) not in (tmp_path / "others.json").read_text()
    for point in json.loads((tmp_path / "others.json").read_text())["points"]:
        needed = {"workload", "policy", "capacity_tokens", "concurrency", "prompt_tokens", "cached_tokens", "hit_rate"}
        assert needed <= set(point)
        assert point["hit_rate"] == pytest.approx(point["cached_tokens"] / point["prompt_tokens"], abs=1e-6)
    monkeypatch.setattr(study_run, "measure", lambda *args: pytest.fail("run again"))
    assert ran(capsys, *words)[0] == 0
    (tmp_path / "RESULTS.md").unlink()
    assert ran(capsys, "--quick", "--render", "--out", str(tmp_path))[0] == 0
    assert (tmp_path / "RESULTS.md").read_text() == text, "the text comes from the files alone"


def test_a_stopped_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Point] = []

    def stopping(point: Point, traces: Path | None) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(point)
        return measure(point, traces)

    monkeypatch.setattr(study_run, "measure", stopping)
    words = ["--quick", "--only", "others", "--jobs", "1", "--out", str(tmp_path)]
    status, _, err = ran(capsys, *words)
    assert status == 130 and "goes on from there" in err
    assert len(json.loads((tmp_path / "others.json").read_text())["points"]) == 3
    monkeypatch.setattr(study_run, "measure", lambda p, t: done.append(p) or measure(p, t))
    assert ran(capsys, *words)[0] == 0
    assert len(done) == len(set(done)) == sum(len(Plan(True).other_policies(p)) for p in SMALL)


def test_orders_that_differ_are_an_error(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run, "measure", lambda p, t: measure(p, t)._replace(order=p.policy))
    with pytest.raises(RuntimeError, match="another order"):
        main(["study", "--quick", "--only", "others", "--jobs", "1", "--out", str(tmp_path)])


def test_without_traces_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "TRACES", ())
    status, _, err = ran(capsys, "--quick", "--only", "traces", "--out", str(tmp_path))
    assert status == 0 and "--traces DIR" in err
    assert "not measured with the present code" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "grid,nonsense"], "--only"),
        (["--traces", "/nowhere"], "no such folder"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str) -> None:
    status, out, err = ran(capsys, *words, "--out", str(tmp_path))
    assert (status, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_a_file_that_is_none_of_ours_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text("{}")
    status, _, err = ran(capsys, "--render", "--out", str(tmp_path))
    assert status == 2 and "no result file of the study" in err and len(err.splitlines()) == 1
    for points in ("null", "[null]", '[{"x": 1}]', '[{"policy": "lru", "prompt_tokens": "a", "cached_tokens": 1}]'):
        (tmp_path / "grid.json").write_text(f'{{"kind": "study", "quick": false, "points": {points}}}')
        status, _, err = ran(capsys, "--render", "--out", str(tmp_path))
        assert status == 2 and str(tmp_path / "grid.json") in err and len(err.splitlines()) == 1


def test_quick_and_full_results_are_never_mixed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    part = tmp_path / "grid.json"
    part.write_text('{"kind": "study", "quick": false, "points": []}')
    for more in ([], ["--render"]):
        status, _, err = ran(capsys, "--quick", *more, "--only", "others", "--out", str(tmp_path))
        assert (status, err) == (2, f"python -m benchmarks study: {part}: results of a study without --quick\n")
    assert [path.name for path in tmp_path.iterdir()] == ["grid.json"]


def test_places_are_checked_before_anything_is_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_run, "measure", lambda *args: pytest.fail("was run"))
    (tmp_path / "file").write_text("")
    for words in (["--out", str(tmp_path / "file")], ["--out", str(tmp_path), "--markdown", str(tmp_path)]):
        status, _, err = ran(capsys, "--quick", *words)
        assert status == 2 and str(tmp_path) in err and len(err.splitlines()) == 1
    status, _, err = ran(capsys, "--render", "--out", str(tmp_path))
    assert status == 2 and "no result files of the study" in err and not (tmp_path / "RESULTS.md").exists()


# ---- numbers ----


def test_gap_worst_and_interval() -> None:
    rates = {"lru": (40, 90), "scout": (55, 89), "opt": (60, 90)}
    found = Found(
        {
            Point(place, policy): {"prompt_tokens": 100, "cached_tokens": values[i]}
            for policy, values in rates.items()
            for i, place in enumerate(SMALL)
        }
    )
    assert found.closed(SMALL, "scout") == pytest.approx(100 * 14 / 20)
    assert found.closed(SMALL[1:], "scout") is None
    worst = found.differences(SMALL, "scout")[0]
    assert (worst.place, worst.points) == (SMALL[1], -1) and str(worst) == "-1.00 (drift C=4 2F)"
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert interval([1.0]) is None
    assert [signed(x) for x in (0.001, -0.001, 1.0, -0.35)] == ["0.00", "0.00", "+1.00", "-0.35"]


@pytest.mark.parametrize("policy", ["lru", "scout"])
def test_a_recorded_run_can_be_repeated_without_the_tree(policy: str) -> None:
    workload = make("selector", seed=3, sessions=4)
    loop = Loop(workload, policy, capacity=2 * workload.largest, concurrency=4)
    tape = Tape(loop.runtime)
    loop.runtime = loop.engine.runtime = loop.engine.tree.listener = tape  # type: ignore[assignment]
    outcome = loop.run()
    assert outcome.cached == Loop(workload, policy, capacity=2 * workload.largest, concurrency=4).run().cached
    fresh = Runtime(policy)
    assert tape.play(fresh, loop.engine.tree.root.id) > 0
    assert len(fresh.world.nodes) == len(loop.engine.tree.nodes)
    assert size_of(fresh) > size_of(fresh.world.nodes) > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_study_measures_every_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, _ = ran(capsys, "--quick", "--out", str(tmp_path))
    assert status == 0
    text = (tmp_path / "RESULTS.md").read_text()
    traces = study._traces(None)
    if traces is not None and all((traces / name).is_file() for name, _, _ in TRACES):
        assert "not measured" not in text
    for heading in ("Figures to reach", "The 64-point grid", "Cold start", "Cost", "Where scout does not help"):
        assert heading in text
    assert sum(p.stat().st_size for p in tmp_path.glob("*.json")) < 1 << 20
    assert all(p.stat().st_size < 100_000 for p in tmp_path.glob("*.png"))
