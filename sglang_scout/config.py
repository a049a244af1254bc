"""What a user can set: the policy's name, its JSON config, and the switch that turns everything off.

    --radix-eviction-policy scout|cachescout
    --radix-eviction-policy-config '{"key": value}'    keys of RuntimeConfig, IdentityConfig, the policy itself, and of
                                                       what the plug-in does beside eviction (PARTS)
    SGLANG_SCOUT_DISABLE=1                             plain LRU on SGLang's default core, whatever the flags say

Nothing here imports SGLang.
"""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from radix_policy.admission import AdmissionConfig
from radix_policy.config import ConfigError, build, rows
from radix_policy.eviction import POLICIES
from radix_policy.identity import IdentityConfig
from radix_policy.runtime import Runtime, RuntimeConfig
from radix_policy.warmup import WarmupConfig
from sglang_scout.curve import CurveConfig

T = TypeVar("T")

NAMES = ("scout", "cachescout")
# what the plug-in does beside eviction, under either policy
PARTS: tuple[type, ...] = (AdmissionConfig, CurveConfig, WarmupConfig)
FLAG = "--radix-eviction-policy"
CONFIG_FLAG = "--radix-eviction-policy-config"
DISABLE = "SGLANG_SCOUT_DISABLE"


def is_ours(policy: Any) -> bool:
    """Whether the value of --radix-eviction-policy names one of our policies (SGLang lower-cases it)."""
    return isinstance(policy, str) and policy.lower() in NAMES


def disabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether the switch is thrown; unset, empty, 0, false, no and off mean that it is not."""
    value = (os.environ if env is None else env).get(DISABLE, "")
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def make_runtime(policy: str, config: Any, page_size: int = 1) -> Runtime:
    """The runtime of one tree, whose leaf index names the victims.

    ConfigError names the flag, the key and what is allowed.
    """
    name, given = policy.lower(), _given(policy, config)
    own = {key for part in PARTS for key, *_ in rows(part)}
    return Runtime(name, {key: value for key, value in given.items() if key not in own}, page_size=page_size)


def make_part(part: type[T], policy: str, config: Any) -> T:
    """The configuration of one of PARTS; ConfigError as in `make_runtime`."""
    given, own = _given(policy, config), {key for key, *_ in rows(part)}
    return build({key: value for key, value in given.items() if key in own}, part)[0]


def _given(policy: str, config: Any) -> Mapping[str, Any]:
    """The whole JSON object, every key of it known and in range."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{CONFIG_FLAG} must be a JSON object, not {type(config).__name__}")
    try:
        build(config or {}, *_parts(policy.lower()), policy=policy.lower())
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_FLAG}: {error}") from None
    return config or {}


def _parts(policy: str) -> tuple[type, ...]:
    return (RuntimeConfig, IdentityConfig, POLICIES[policy].Config, *PARTS)


def check(policy: Any, config: Any) -> None:
    """ConfigError when `policy` is ours and its config cannot be used."""
    if is_ours(policy):
        make_runtime(policy, config)


def table(policy: str) -> list[tuple[str, str, str, str, str]]:
    """(key, default, allowed, unit, effect) of every key that the policy takes."""
    return [row for part in _parts(policy) for row in rows(part)]
