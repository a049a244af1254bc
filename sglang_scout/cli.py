"""`sglang-scout`: what is installed, whether it fits the SGLang that is here, and what can be configured."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from radix_policy.config import ConfigError
from sglang_scout import __version__, config, headers, preflight, warmup_hooks, warmup_metrics
from sglang_scout import plan as planner

_DISTRIBUTIONS = ("sglang", "torch", "numpy")
_COLUMNS = ("key", "default", "allowed", "unit", "effect")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    parser = argparse.ArgumentParser(prog="sglang-scout", description="Agent-aware KV cache runtime for SGLang.")
    parser.add_argument("--version", action="version", version=f"sglang-scout {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="versions, every SGLang seam, and the configuration keys")
    doctor.add_argument("--json", action="store_true", help="print the result as JSON")
    planner.add_parser(commands)
    args = parser.parse_args(argv)
    if args.command == "plan":
        try:
            return planner.command(args)
        except planner.PlanError as error:
            print(f"sglang-scout plan: {error}", file=sys.stderr)
            return 2
    warnings.simplefilter("ignore")  # SGLang's imports warn of hardware that is not here
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(lines(report)))
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything that `doctor` knows, JSON-ready; `ok` says whether a server can start with our policies."""
    versions = {"sglang-scout": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "(not installed)"
    installed = versions["sglang"] != "(not installed)"
    seams, rust, warm = [], [], []
    if installed:
        _prepare()
        seams, rust, warm = map(
            _checked, (preflight.SEAMS, preflight.RUST_SEAMS, (*warmup_hooks.SEAMS, *warmup_metrics.SEAMS))
        )
    try:
        headers.header_map(os.environ.get(headers.ENV, ""))
        problem = None
    except ConfigError as error:
        problem = str(error)
    plugins = os.environ.get("SGLANG_PLUGINS", "")
    selected = not plugins or "scout" in [name.strip() for name in plugins.split(",")]
    return {
        "ok": installed
        and selected
        and not config.disabled()
        and problem is None
        and all(s["problem"] is None for s in seams),
        "versions": versions,
        "tested_with": list(preflight.TESTED),
        "disabled": config.disabled(),
        "selected": selected,
        "headers": problem,
        "policies": list(config.NAMES),
        "seams": seams,
        "rust_seams": rust,
        "warmup_seams": warm,
        "config": {name: [dict(zip(_COLUMNS, row)) for row in config.table(name)] for name in config.NAMES},
    }


def _checked(seams: Iterable[preflight.Seam]) -> list[dict[str, Any]]:
    return [{"name": f.path, "problem": f.problem} for f in preflight.check(seams)]


def _amiss(seams: Iterable[dict[str, Any]]) -> list[str]:
    return [f"  {seam['name']}: {seam['problem']}" for seam in seams if seam["problem"] is not None]


def _prepare() -> None:
    """SGLang's modules import only with its platform settled; without a GPU that is the CPU engine."""
    try:
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        from sglang.srt.utils import common  # noqa: F401  # settles the platform
    except Exception as error:
        print(f"sglang-scout: SGLang does not import here: {error}", file=sys.stderr)


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    versions = report["versions"]
    out = ["  ".join(f"{name} {version}" for name, version in versions.items())]
    if versions["sglang"] == "(not installed)":
        return [*out, "SGLang is not installed: pip install sglang==" + report["tested_with"][-1]]
    if versions["sglang"] not in report["tested_with"]:
        out.append(f"not tested with SGLang {versions['sglang']} (tested: {', '.join(report['tested_with'])})")
    if report["disabled"]:
        out.append(f"{config.DISABLE} is set: the policies mean plain LRU")
    if not report["selected"]:
        out.append("SGLANG_PLUGINS leaves out `scout`: SGLang will not load the plug-in")
    if report["headers"]:
        out.append(report["headers"])
    bad, rust, warm = (_amiss(report[kind]) for kind in ("seams", "rust_seams", "warmup_seams"))
    out += ["", f"seams: {len(report['seams']) - len(bad)} of {len(report['seams'])} as expected", *bad]
    core = "Python, for the Rust core is not as expected" if rust else "Rust, where SGLang can use it"
    out += [f"tree core: {core}", *rust, f"warmup: {'refused' if warm else 'can be turned on'}", *warm]
    for name, keys in report["config"].items():
        out += ["", f"{config.FLAG} {name}, keys of {config.CONFIG_FLAG}:"]
        width = max(len(row["key"]) for row in keys)
        for row in keys:
            unit = f" {row['unit']}" if row["unit"] else ""
            out.append(f"  {row['key']:<{width}}  {row['default']}{unit} ({row['allowed']}): {row['effect']}")
    return [*out, "", "ready" if report["ok"] else "not ready"]


if __name__ == "__main__":
    sys.exit(main())
