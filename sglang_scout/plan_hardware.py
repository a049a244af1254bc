"""Options of `sglang-scout plan` that say what a host hit is worth: presets, and numbers in their place."""

import argparse
import math
from typing import Any

from radix_policy.hardware import FLOPS_UTILISATION, GPUS, LINK_UTILISATION, MODELS, Gpu, Model, OffloadCost
from sglang_scout.plan_report import PlanError

MOST = 1e9  # of any number given: more is a slip, and would overflow further on
_SHAPE = {"layers": "layers", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim"}


def add_options(parser: Any) -> None:
    """The options."""
    group = parser.add_argument_group("what a host hit is worth (OBR)")
    group.add_argument("--gpu", metavar="NAME", help=f"peak figures of one of {', '.join(GPUS)}")
    group.add_argument("--tflops", type=float, metavar="X", help="dense BF16 TFLOPS of a GPU, in place of the preset's")
    group.add_argument("--link-gbs", type=float, metavar="X", help="GB/s of its host link, per direction")
    group.add_argument("--model", metavar="NAME", help=f"shape of one of {', '.join(MODELS)}")
    group.add_argument("--active-parameters", type=float, metavar="X", help="billions that one token passes through")
    group.add_argument("--layers", type=int, metavar="N", help="layers, all of full attention")
    group.add_argument("--heads", type=int, metavar="N", help="query heads")
    group.add_argument("--kv-heads", type=int, metavar="N", help="KV heads")
    group.add_argument("--head-dim", type=int, metavar="N", help="numbers per head")
    group.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks (default: 1, or the server's)")
    group.add_argument(
        "--flops-utilisation",
        type=float,
        default=FLOPS_UTILISATION,
        metavar="X",
        help="share of the peak that prefill reaches (default: 1, which makes OBR a lower bound)",
    )
    group.add_argument(
        "--link-utilisation",
        type=float,
        default=LINK_UTILISATION,
        metavar="X",
        help=f"share of the link's peak that restoring reaches (default: {LINK_UTILISATION:.2f}, measured on H20)",
    )


def flag(name: str) -> str:
    """The option of an attribute."""
    return "--" + name.replace("_", "-")


def check(args: argparse.Namespace) -> None:
    """PlanError, naming the option, on a number that makes no sense."""
    for name in ("tflops", "link_gbs", "active_parameters"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise PlanError(f"{flag(name)} must be a finite number above 0, not {value:g}")
        if value is not None and not 1 / MOST <= value <= MOST:
            raise PlanError(f"{flag(name)} must be in {1 / MOST:g}..{MOST:g}, not {value:g}")
    for name in (*_SHAPE, "tp"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PlanError(f"{flag(name)} must be at least 1, not {value}")
        if value is not None and value > 1_000_000:
            raise PlanError(f"{flag(name)} must be at most 1,000,000")
    for name in ("flops_utilisation", "link_utilisation"):
        if not 1e-6 <= getattr(args, name) <= 1:
            raise PlanError(f"{flag(name)} must be above 0 and at most 1, not {getattr(args, name):g}")
    for name, known in (("gpu", GPUS), ("model", MODELS)):
        value = getattr(args, name)
        if value is not None and value.lower() not in known:
            raise PlanError(f"{flag(name)} {value}: unknown; known: {', '.join(known)}")


def model_of(args: argparse.Namespace) -> Model | None:
    """The model's shape; None where nothing is said of it, PlanError where not enough is."""
    preset = None if args.model is None else MODELS[args.model.lower()]
    given = {name: getattr(args, name) for name in (*_SHAPE, "active_parameters")}
    if preset is None and all(value is None for value in given.values()):
        return None
    if given["active_parameters"] is not None:
        given["active_parameters"] *= 1e9
    if preset is not None:
        given = {name: getattr(preset, name) if value is None else value for name, value in given.items()}
    missing = [flag(name) for name, value in given.items() if value is None]
    if missing:
        raise PlanError(f"without --model the shape needs {', '.join(missing)}, too")
    return Model(**given)


def cost_of(args: argparse.Namespace, model: Model | None, ranks: int, kv_bytes: float | None) -> OffloadCost | None:
    """Times of the deployment; None where nothing is said of the GPU."""
    gpu: Gpu | None = None if args.gpu is None else GPUS[args.gpu.lower()]
    tflops = gpu.tflops if args.tflops is None and gpu is not None else args.tflops
    link = gpu.link_gbs if args.link_gbs is None and gpu is not None else args.link_gbs
    if tflops is None and link is None:
        return None
    if tflops is None or link is None:
        raise PlanError(
            f"OBR needs --gpu, or --tflops and --link-gbs: {'--tflops' if tflops is None else '--link-gbs'} is missing"
        )
    if model is None:
        raise PlanError(
            "OBR needs the model's shape: --model, or --layers, --heads, --kv-heads, --head-dim and --active-parameters"
        )
    return OffloadCost(model, tflops, link, ranks, args.flops_utilisation, args.link_utilisation, kv_bytes)
