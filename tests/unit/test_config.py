"""Bad configuration is refused by name; good configuration arrives typed."""

from dataclasses import dataclass

import pytest

from radix_policy.config import ConfigError, build, key, rows
from radix_policy.eviction import POLICIES
from radix_policy.runtime import Runtime


@dataclass(frozen=True)
class Keys:
    share: float = key(0.5, "a share", low=0, high=1)
    count: int = key(3, "a count", low=1)
    loud: bool = key(False, "a switch")
    mode: str = key("a", "a mode", choices=("a", "b"))
    cap: int = key(None, "a cap", low=1, optional=True)
    lambda_: float = key(0.1, "a decay", low=0, name="lambda")


def test_values_arrive_with_their_type() -> None:
    (keys,) = build({"share": 1, "count": 4.0, "mode": "b", "cap": None, "lambda": 2}, Keys)
    assert keys == Keys(share=1.0, count=4, mode="b", cap=None, lambda_=2.0)
    assert isinstance(keys.share, float) and isinstance(keys.count, int)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shares": 1}, ["unknown key 'shares'", "share"]),
        ({"lambda_": 1}, ["unknown key 'lambda_'", "lambda"]),
        ({"share": 1.5}, ["'share'", "1.5", "number in [0, 1]"]),
        ({"share": float("nan")}, ["'share'", "number in [0, 1]"]),
        ({"share": "x"}, ["'share'", "'x'"]),
        ({"share": True}, ["'share'", "True"]),
        ({"share": None}, ["'share'", "None"]),
        ({"count": 2.5}, ["'count'", "whole number >= 1"]),
        ({"count": 0}, ["'count'", "whole number >= 1"]),
        ({"count": float("inf")}, ["'count'"]),
        ({"loud": 1}, ["'loud'", "true or false"]),
        ({"mode": "c"}, ["'mode'", "one of a, b"]),
        ({"cap": 0}, ["'cap'", "or null"]),
        ({"lambda": -1}, ["'lambda'", "number >= 0"]),
    ],
)
def test_refusal_names_the_key_and_what_is_allowed(given: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(given, Keys)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_refuses_an_unknown_key_and_documents_its_own(policy: str) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Runtime(policy, {"nonsense": 1})
    for name, default, allowed, _, doc in rows(POLICIES[policy].Config):
        assert name and default and allowed and doc


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'mystery'"):
        Runtime("mystery")


def test_every_default_is_in_its_own_range() -> None:
    for policy in POLICIES.values():
        instance = policy.Config()
        given = {n: getattr(instance, n if hasattr(instance, n) else n + "_") for n, *_ in rows(policy.Config)}
        build(given, policy.Config)
