"""Result files of the study: one per part, one line per point, thrown away where the code behind them has changed.

A policy's code is its own module with all it imports, the runtime, the simulator and the workloads, without comments
and docstrings; what the runtime learns is left out for policies that look at the tree alone. A point whose policy has
other code now than in the file's `code` is not loaded, so it is run again.
"""

import ast
import io
import json
import os
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import radix_policy
from benchmarks.results import UsageError, check_points, machine, versions
from benchmarks.study_plan import SEEDS, Point, point_of
from radix_policy.eviction import POLICIES
from radix_policy.simulator.run import INFORMED, ORACLES, PINNED, parse_spec

_NEEDED = ("policy", "prompt_tokens", "cached_tokens")
_ROOT = Path(radix_policy.__file__).parent
_CUT = "eviction/__init__.py"  # imports every policy
_NAMES = "simulator/run.py"  # imports policies by name
_FACTS = "workloads/facts.py"  # only measures
_RUNTIME = "runtime.py"  # imports all that is learned
_TREE = ("leaf_index.py", "nodes.py", "prompts.py", "events.py")
# What a policy that looks at the tree alone never reads: its figures do not depend on how any of it is learned.
_LEARNED = frozenset(
    [
        "agent",
        "agents",
        "end_mark",
        "ends",
        "gaps",
        "hints",
        "identifier",
        "services",
        "session",
        "sessions",
        "shared",
        "starts",
        "transitions",
    ]
)

# ---- code ----


def code_of(policy: str, root: Path = _ROOT) -> str:
    """A short hash of the code behind a policy name without ingredients."""
    if policy in ORACLES:
        own = "simulator/optimum.py"
    elif policy in (PINNED, INFORMED):
        own = f"eviction/{'lru' if policy == PINNED else 'informed'}.py"
    else:
        own = f"eviction/{POLICIES[policy].__module__.rpartition('.')[2]}.py"
    tree_only = policy in ORACLES or not _attributes(root / own) & _LEARNED
    start = [own, _NAMES, _RUNTIME, *_TREE, "simulator/loop.py", "workloads/catalogue.py", "workloads/traces.py"]
    files = _closure(root, start, {_NAMES, _FACTS, *([_RUNTIME] if tree_only else [])})
    text = "\n".join(f"{name}\n{_bare(_text(root / name))}" for name in sorted(files))
    return blake2b(text.encode(), digest_size=6).hexdigest()


def _attributes(path: Path) -> set[str]:
    return {n.attr for n in ast.walk(ast.parse(_text(path))) if isinstance(n, ast.Attribute)}


def _closure(root: Path, start: Iterable[str], unfollowed: set[str]) -> set[str]:
    """The files and all they import, except through those that are `unfollowed`."""
    todo, seen = list(start), set(start)
    while todo:
        name = todo.pop()
        for other in _imports(root, name) if name not in unfollowed else ():
            if other not in seen and other != _CUT:
                seen.add(other)
                todo.append(other)
    return seen


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _imports(root: Path, name: str) -> list[str]:
    """Files of the package that a file imports; packages themselves count for nothing."""
    return [path for path in _imported(_text(root / name)) if (root / path).is_file()]


@lru_cache(maxsize=256)
def _imported(text: str) -> tuple[str, ...]:
    """Paths that the imports in this source may mean."""
    found: list[str] = []
    for node in _statements(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("radix_policy"):
            parts = str(node.module).split(".")[1:]
            found += ["/".join(parts) + ".py", *("/".join([*parts, a.name]) + ".py" for a in node.names)]
    return tuple(found)


def _statements(tree: ast.AST) -> Iterable[ast.AST]:
    """Every node that is not there for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _statements(node)


@lru_cache(maxsize=256)
def _bare(text: str) -> str:
    """The source without comments, docstrings and layout."""
    kept: list[str] = []
    fresh = True  # at the start of a statement
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type != tokenize.COMMENT]
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]]):
        if token.type == tokenize.NL:
            continue
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            kept.append(f"\n{token.type}")
            fresh = True
            continue
        if not (fresh and token.type == tokenize.STRING and after.type in (tokenize.NEWLINE, tokenize.NL)):
            kept.append(token.string)
        fresh = False
    return " ".join(kept)


# ---- files ----


class Store:
    """Every point that is known and still true."""

    def __init__(self, folder: Path, command: str, quick: bool) -> None:
        """UsageError when a file there is no result file."""
        self.folder = folder
        self.points: dict[Point, dict[str, Any]] = {}
        self.headers: dict[str, dict[str, Any]] = {}
        self.stale = 0  # points left behind because the code changed
        self._part: dict[Point, str] = {}
        self._codes: dict[str, str] = {}
        self._dirty: set[str] = set()
        self._common = {"kind": "study", "command": command, "quick": quick}

    def load(self, parts: Iterable[str]) -> None:
        """Read what is there."""
        for part in parts:
            path = self.folder / f"{part}.json"
            if not path.exists():
                continue
            document = _read(path)
            if document.get("quick") != self._common["quick"]:
                raise UsageError(f"{path}: results of a study {'without' if self._common['quick'] else 'with'} --quick")
            code, old = document.get("code") or {}, document.pop("points")
            self.headers[part] = document
            for number, given in enumerate(old, 1):
                try:
                    point = point_of(given)
                    hash(point)
                except (KeyError, TypeError) as error:
                    raise UsageError(f"{path}: point {number} is not one of the study ({error})") from None
                name = parse_name(point.policy)
                if name is not None and code.get(name) == self.code(name):
                    self.points[point] = given
                    self._part[point] = part
                else:
                    self.stale += 1
            if "figures" in document and any(self.code(name) != value for name, value in code.items()):
                document.pop("figures", None)
            kept = self.owned(part) / len(old) if old else 1.0
            document["cpu_seconds"] = kept * document.get("cpu_seconds", 0.0)

    def code(self, name: str) -> str:
        """The present code of a policy."""
        if name not in self._codes:
            self._codes[name] = code_of(name)
        return self._codes[name]

    def changed(self) -> bool:
        """Whether code that was asked for is another one by now."""
        return any(code_of(name) != code for name, code in self._codes.items())

    def owned(self, part: str) -> int:
        """How many points the part's file holds."""
        return sum(p == part for p in self._part.values())

    def add(self, part: str, point: Point, figures: Mapping[str, Any], seconds: float) -> None:
        """Keep a point; `save` writes it."""
        self.points[point] = {**point.key(), **figures}
        self._part[point] = part
        header = self._header(part)
        header["cpu_seconds"] = header.get("cpu_seconds", 0.0) + seconds

    def add_figures(self, part: str, figures: Mapping[str, Any], names: Iterable[str], seconds: float) -> None:
        """Keep figures that are no points; `names`: the policies whose code they depend on."""
        header = self._header(part)
        header |= {"figures": dict(figures), "code": {n: self.code(n) for n in names}, "cpu_seconds": seconds}

    def figures(self, part: str) -> dict[str, Any] | None:
        """What `add_figures` kept; None when there is nothing or it is out of date."""
        return self.headers.get(part, {}).get("figures")

    def save(self, order: Mapping[Point, int] | None = None) -> None:
        """Write the files that changed, points in this order."""
        for part in sorted(self._dirty):
            own = [p for p, owner in self._part.items() if owner == part]
            if order is not None:
                own.sort(key=lambda p: order.get(p, len(order)))
            header = self.headers[part]
            if own:
                names = {parse_name(p.policy) for p in own} - {None}
                header["code"] = {str(n): self.code(str(n)) for n in sorted(names, key=str)}
            header["cpu_seconds"] = round(header.get("cpu_seconds", 0.0), 1)
            _write(self.folder / f"{part}.json", header, [self.points[p] for p in own])
        self._dirty.clear()

    def _header(self, part: str) -> dict[str, Any]:
        header = self.headers.setdefault(part, {})
        if part not in self._dirty:
            self._dirty.add(part)
            header |= {**self._common, "part": part, "seed": list(SEEDS)}
            header |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
            header["versions"] = versions()
        return header


def parse_name(policy: str) -> str | None:
    """A policy's name without ingredients; None when this version does not know it."""
    try:
        return parse_spec(policy).name
    except ValueError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None
    if not isinstance(document, dict) or document.get("kind") != "study":
        raise UsageError(f"{path}: no result file of the study")
    if not isinstance(document.get("points"), list):
        raise UsageError(f"{path}: no list `points`")
    check_points(path, document["points"], _NEEDED)
    for name, kind in (("code", dict), ("figures", dict), ("cpu_seconds", int | float)):
        if not isinstance(document.get(name, kind() if kind is dict else 0), kind):
            raise UsageError(f"{path}: {name!r} cannot be used")
    return document


def _write(path: Path, header: Mapping[str, Any], points: list[dict[str, Any]]) -> None:
    """The header over several lines, each point on one."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in header.items()]
    rows = ",\n".join("  " + json.dumps(p, separators=(",", ":")) for p in points)
    text = "\n".join(["{", *lines, ' "points": [' + ("\n" + rows if rows else "") + "]", "}", ""])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
