"""What a running server says for `sglang-scout plan --url`: its curve, its pool, and its flags."""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from radix_policy.sampled_curve import CurveError, SampledCounts
from sglang_scout.plan_report import GIB, PlanError

MIN_CALLS = 50  # fewer say too little of what comes next
_TIMEOUT = 30.0  # seconds
_MIN_GIB = 0.05  # of KV pool: SGLang names it in thousandths of a GiB, so that bytes per token are known to 1 %


@dataclass(frozen=True)
class Running:
    """One server; where it runs several replicas, their curves are added up and sizes are those of one."""

    curve: SampledCounts
    device_tokens: int
    bytes_per_token: float | None  # KV, per rank; None: the pool is too small to tell
    host_tokens: int | None  # of the host tier, where it has one
    ranks: int


def ask(url: str, api_key: str | None = None) -> Running:
    """GET /server_info; PlanError in one line."""
    info = _get(url, api_key)
    states = info.get("internal_states")
    if not isinstance(states, list) or not states or "max_total_num_tokens" not in info:
        raise PlanError(f"--url {url}: answers, but not as an SGLang server does")
    scouts: list[dict[str, Any]] = [state["scout"] for state in states if isinstance(state, dict) and "scout" in state]
    if len(scouts) < len(states):
        raise PlanError(f"--url {url}: runs without a policy of sglang-scout (--radix-eviction-policy scout)")
    if not all(isinstance(scout, dict) for scout in scouts):
        raise PlanError(f"--url {url}: answers, but not as the plug-in does")
    if not all(scout.get("live", True) for scout in scouts):
        raise PlanError(f"--url {url}: the plug-in observes nothing any more, after a fault which its log shows")
    if any("curve" in (scout.get("faults") or {}) for scout in scouts):
        raise PlanError(f"--url {url}: the curve ended with a fault, which its log shows")
    if any(scout.get("curve") is None for scout in scouts):
        raise PlanError(f"--url {url}: its curve is off (key curve of --radix-eviction-policy-config)")
    try:
        curve = SampledCounts.merged([SampledCounts.from_json(scout["curve"]) for scout in scouts])
    except CurveError as error:
        raise PlanError(f"--url {url}: {error}") from None
    if curve.calls < MIN_CALLS:
        raise PlanError(f"--url {url}: has seen {curve.calls} calls, a plan needs at least {MIN_CALLS}")
    try:
        device = int(info["max_total_num_tokens"])
        size = _bytes_per_token(states[0])
        ranks = int(info.get("tp_size") or 1)
        made = Running(curve, device, size, _host_tokens(info, device, size), ranks)
        if not (device > 0 and ranks > 0 and (made.host_tokens is None or made.host_tokens > 0)):
            raise ValueError("a size below 1")
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(f"--url {url}: /server_info names a size that makes no sense ({error})") from None
    return made


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise PlanError(f"--url {url}: must begin with http:// or https://")
    try:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(url.rstrip("/") + "/server_info", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            info = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PlanError(f"--url {url}: refused ({error.code}); --api-key gives the key") from None
        raise PlanError(f"--url {url}: /server_info answers {error.code} {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # a URLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise PlanError(f"--url {url}: cannot be asked ({' '.join(str(reason).split())})") from None
    if not isinstance(info, dict):
        raise PlanError(f"--url {url}: answers, but not as an SGLang server does")
    return info


def _bytes_per_token(state: Any) -> float | None:
    usage = state.get("memory_usage") or {}
    pool, tokens = usage.get("kvcache") or 0.0, usage.get("token_capacity") or 0
    return pool * GIB / tokens if pool >= _MIN_GIB and tokens > 0 else None


def _host_tokens(info: dict[str, Any], device: int, size: float | None) -> int | None:
    """As SGLang sizes it: --hicache-size in GB per rank, or else --hicache-ratio times the device's pool."""
    if not info.get("enable_hierarchical_cache"):
        return None
    gb, ratio = info.get("hicache_size") or 0, info.get("hicache_ratio")
    if gb > 0:
        return None if size is None else int(gb * 1e9 / size)
    return None if ratio is None else int(ratio * device)
