"""What a stack-distance curve says about a deployment: the plan as JSON-ready numbers, and as text.

A size is that of the tier that holds most: the device's pool of G tokens, or a host tier of H tokens, in which
everything on the device has its copy, too (HiCache's write-through). So both together find what an LRU cache of
max(G, H) tokens finds, and restored is what that finds beyond the device.

    gamma_G = A x mean prompt / G     above 1 the device cannot hold the pool's context: there is something to restore
    gamma_H = working set / H         above 1 the host tier cannot hold what is used again before it is
                                      (both: EfficientAgent, section 3.2)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radix_policy.admission import published_working_set
from radix_policy.curves import Curve
from radix_policy.hardware import PAID_UP_TO, SLOWED_FROM, OffloadCost

GAIN = 0.01  # of all prompt tokens: what is too little to buy memory for
FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # sizes shown, in largest calls
HOST_FACTORS = (1.5, 2, 3, 4, 6, 8, 12)  # host sizes shown where none are asked for, in device pools
GIB = 1 << 30


class PlanError(ValueError):
    """What was asked for cannot be planned; one line."""


@dataclass(frozen=True)
class Deployment:
    """The server that is planned for, as far as it is known."""

    concurrency: int | None = None  # A, sessions at a time
    device_tokens: int | None = None  # G
    bytes_per_token: float | None = None  # KV, per rank
    host_tokens: tuple[int, ...] = ()  # H, sizes asked for
    cost: OffloadCost | None = None


def build(curve: Curve, deployment: Deployment, source: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """The plan. `source`: what else is known of the calls, put first; `largest`: tokens of the largest call."""
    device, size = deployment.device_tokens, deployment.bytes_per_token
    sizes = [int(factor * largest) for factor in FACTORS]
    sizes = [n for n in sizes if n < curve.tokens] + [curve.tokens]
    if device is not None:
        sizes = sorted({*sizes, device})
    enough = max(curve.enough(GAIN), largest)
    mean = curve.prompt_tokens / max(curve.calls, 1)
    published = None
    if deployment.concurrency is not None:
        published = round(published_working_set(deployment.concurrency, mean))
    report = {
        **source,
        "calls": curve.calls,
        "prompt_tokens": curve.prompt_tokens,
        "reachable_tokens": curve.reachable,
        "largest_call": largest,
        "mean_prompt_tokens": round(mean),
        "concurrency": deployment.concurrency,
        "bytes_per_token": size,
        "device_tokens": device,
        "curve": [
            {"tokens": n, "found_tokens": found, "computed_prefill_tokens": curve.prompt_tokens - found}
            for n, found in zip(sizes, curve.found(sizes))
        ],
        "working_set": {
            "published": published,
            "measured_median": curve.need(0.5),
            "measured_p90": curve.need(0.9),
        },
        "gamma_g": deployment.concurrency * mean / device if deployment.concurrency and device else None,
        "host": [],
        "offload": None if deployment.cost is None else _offload(deployment.cost, max(round(mean), 1)),
        "enough_tokens": enough,
    }
    if device is not None:
        wanted = deployment.host_tokens or _host_sizes(device, enough, curve.tokens)
        report["host"] = _host(curve, wanted, device, report["working_set"], size)
    return report | {"advice": _advice(report)}


def _host_sizes(device: int, enough: int, everything: int) -> list[int]:
    sizes = [int(factor * device) for factor in HOST_FACTORS]
    return sorted({*(n for n in sizes if n < everything), *([enough] if enough > device else ())})


def _host(
    curve: Curve, sizes: Sequence[int], device: int, sets: Mapping[str, Any], size: float | None
) -> list[dict[str, Any]]:
    on_device, *both = curve.found([device, *(max(device, host) for host in sizes)])
    return [
        {
            "tokens": host,
            "gib": None if size is None else host * size / GIB,
            "gamma_h": None if sets["published"] is None else sets["published"] / host,
            "gamma_h_measured": sets["measured_p90"] / host,
            "found_tokens": found,
            "restored_tokens": found - on_device,
            "computed_prefill_tokens": curve.prompt_tokens - found,
        }
        for host, found in zip(sizes, both)
    ]


def _offload(cost: OffloadCost, prompt: int) -> dict[str, Any]:
    obr, ratio = cost.obr(prompt), cost.flop_per_byte
    verdict = "no" if obr <= 0 else "yes" if ratio <= PAID_UP_TO else "measure"
    return {
        "obr": obr,
        "prefix_tokens": prompt,
        "restore_us_per_token": cost.restore_s(prompt) / prompt * 1e6,
        "prefill_us_per_token": cost.prefill_s(prompt) / prompt * 1e6,
        "flop_per_link_byte": ratio,
        "pays": verdict,
    }


def _advice(report: Mapping[str, Any]) -> str:
    enough, device, size = report["enough_tokens"], report["device_tokens"], report["bytes_per_token"]
    if report["reachable_tokens"] == 0:
        return "no prompt continues another one: no cache of any size helps"
    text = f"memory pays up to {enough:,} tokens (more finds less than {GAIN:.0%} more)"
    if device is None:
        return text + "; --device-tokens says whether that needs a host tier"
    if enough <= device:
        return text + ", which the device's pool holds: a host tier adds little"
    offload = report["offload"]
    if offload is not None and offload["pays"] == "no":
        return text + f", but no host tier: restoring takes longer than computing here (OBR {offload['obr']:.2f})"
    text += ", a host tier of that size: --enable-hierarchical-cache"
    if size is None:
        text += f" --hicache-ratio {math.ceil(100 * enough / device) / 100:.2f}"
    else:
        text += f" --hicache-size {-int(-enough * size // 10**9)} (GB per rank)"
    if offload is not None and offload["pays"] == "measure":
        return text + "; measure with and without it first, for the GPU computes fast against its host link"
    return text


# ---- text ----


def lines(report: Mapping[str, Any]) -> list[str]:
    """The plan as text."""
    prompt = report["prompt_tokens"]
    whose = f" of {report['sessions']:,} sessions" if report.get("sessions") else ""
    out = [
        f"{report['calls']:,} calls{whose}, {prompt:,} prompt tokens, the largest call "
        f"{report['largest_call']:,}; an endless cache finds {report['reachable_tokens'] / max(prompt, 1):.1%}"
    ]
    if report.get("sample"):
        sample = report["sample"]
        out.append(
            f"from a sample of {sample['entries']:,} chunks of {sample['chunk']} tokens, {sample['rate']:.2%} of all"
            + (
                f"; nothing is known of caches beyond {sample['depth_tokens']:,} tokens"
                if sample["depth_tokens"]
                else ""
            )
        )
    if report.get("calls_too_large"):
        out.append(f"{report['calls_too_large']:,} calls do not fit the device, where SGLang refuses them: left out")
    out += ["", *_curve_lines(report)]
    if report["host"]:
        out += ["", *_host_lines(report)]
    out += ["", *_set_lines(report)]
    if report["offload"] is not None:
        out.append(_offload_line(report["offload"]))
    if report.get("stability") is not None:
        out += _stability_lines(report["stability"])
    return [*out, "", report["advice"]]


def _share(tokens: int, report: Mapping[str, Any]) -> str:
    return f"{tokens / max(report['prompt_tokens'], 1):.1%}"


def _curve_lines(report: Mapping[str, Any]) -> list[str]:
    size = report["bytes_per_token"]
    out = [f"{'cache, tokens':>16} {'GiB/rank':>9} {'found':>7} {'computed prefill':>17}"]
    for point in report["curve"]:
        mark = "  <- device" if point["tokens"] == report["device_tokens"] else ""
        gib = f"{point['tokens'] * size / GIB:.1f}" if size else "-"
        share = _share(point["found_tokens"], report)
        out.append(f"{point['tokens']:>16,} {gib:>9} {share:>7} {point['computed_prefill_tokens']:>17,}{mark}")
    return out


def _host_lines(report: Mapping[str, Any]) -> list[str]:
    played = any("played_computed_prefill_tokens" in row for row in report["host"])
    out = [
        f"{'host, tokens':>16} {'GiB/rank':>9} {'found':>7} {'computed prefill':>17} {'restored':>15} "
        f"{'gamma_H':>8} {'measured':>8}" + (f" {'played: computed':>17} {'restored':>15}" if played else "")
    ]
    for row in report["host"]:
        gib = "-" if row["gib"] is None else f"{row['gib']:.1f}"
        gamma = "-" if row["gamma_h"] is None else f"{row['gamma_h']:.2f}"
        out.append(
            f"{row['tokens']:>16,} {gib:>9} {_share(row['found_tokens'], report):>7} "
            f"{row['computed_prefill_tokens']:>17,} {row['restored_tokens']:>15,} "
            f"{gamma:>8} {row['gamma_h_measured']:>8.2f}"
            + (f" {row['played_computed_prefill_tokens']:>17,} {row['played_restored_tokens']:>15,}" if played else "")
        )
    return out


def _set_lines(report: Mapping[str, Any]) -> list[str]:
    sets = report["working_set"]
    published = (
        "" if sets["published"] is None else f"{sets['published']:,} tokens as published, (A - 1) x mean prompt; "
    )
    out = [
        f"working set: {published}measured from call to call {sets['measured_median']:,} (median), "
        f"{sets['measured_p90']:,} (90 %)"
    ]
    if report["gamma_g"] is not None:
        need = "there is something to restore" if report["gamma_g"] > 1 else "the device holds the pool's context"
        out.append(f"gamma_G = A x mean prompt / device tokens = {report['gamma_g']:.2f}: {need}")
    return out


def _offload_line(offload: Mapping[str, Any]) -> str:
    text = (
        f"OBR {offload['obr']:.2f} at {offload['prefix_tokens']:,} tokens: restoring takes "
        f"{offload['restore_us_per_token']:.2f} us a token, computing at least {offload['prefill_us_per_token']:.2f}; "
        f"{offload['flop_per_link_byte']:,.0f} peak FLOP per host-link byte"
    )
    if offload["pays"] == "no":
        return text + ": a host hit is worth nothing"
    if offload["pays"] == "yes":
        return text + ": offloading pays where hits survive"
    return text + (
        f": EfficientAgent saw offloading pay at {PAID_UP_TO:,.0f} and slow every run at {SLOWED_FROM:,.0f}, "
        "whatever OBR says"
    )


def _stability_lines(kept: Mapping[str, Any]) -> list[str]:
    out = []
    if kept["kept"] is not None:
        out.append(
            f"prompts keep {kept['kept']:.1%} of themselves from the agent's last call, "
            f"{kept['kept_with_output']:.1%} with its output; {kept['broken_calls']:,} of {kept['calls']:,} calls "
            "rewrite what came before"
        )
    return out + [
        f"  {s['session']}: {s['broken_calls']} of {s['calls']} calls, {s['lost_tokens']:,} tokens lost"
        for s in kept["sessions_that_break_their_prefix"]
    ]
