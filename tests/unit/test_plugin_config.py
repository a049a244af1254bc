"""Names, config, kill switch, refusals: the parts of the plug-in that need no engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from radix_policy.config import ConfigError
from sglang_scout import cli, config, hicache, plugin, preflight, scheduler, warmup_hooks


def test_our_names() -> None:
    assert config.is_ours("scout") and config.is_ours("CacheScout")
    assert not config.is_ours("lru") and not config.is_ours(None)


@pytest.mark.parametrize("value", ["1", "true", "yes", "ON", " 1 "])
def test_the_switch_is_thrown(value: str) -> None:
    assert config.disabled({config.DISABLE: value})


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_the_switch_is_not_thrown(value: str) -> None:
    assert not config.disabled({config.DISABLE: value})
    assert not config.disabled({})


@pytest.mark.parametrize("policy", config.NAMES)
def test_every_policy_runs_without_config(policy: str) -> None:
    assert config.make_runtime(policy, None, 16).world.page_size == 16
    assert config.make_runtime(policy, {}, 16).world.page_size == 16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_agent": 3}, "unknown key 'max_agent' for policy 'scout'; known keys: "),
        ({"max_agents": 0}, "key 'max_agents': got 0, allowed: whole number in [1, 1024]"),
        ({"max_agents": "many"}, "key 'max_agents': got 'many', allowed: whole number in [1, 1024]"),
        ({"max_agents": True}, "key 'max_agents': got True, allowed: whole number in [1, 1024]"),
        ({"transition_decay": 2}, "key 'transition_decay': got 2, allowed: number in [0.5, 1]"),
        ([1], "--radix-eviction-policy-config must be a JSON object, not list"),
        ("text", "--radix-eviction-policy-config must be a JSON object, not str"),
    ],
)
def test_bad_config_names_the_flag_the_key_and_what_is_allowed(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.check("scout", given)
    message = str(caught.value)
    assert message.startswith("--radix-eviction-policy-config") and said in message
    assert "\n" not in message


def test_keys_of_another_policy_are_unknown() -> None:
    config.check("cachescout", {"E_max": 4, "lambda": 0.5})
    with pytest.raises(ConfigError, match="unknown key 'E_max' for policy 'scout'"):
        config.check("scout", {"E_max": 4})


def test_other_policies_are_not_our_business() -> None:
    config.check("lru", {"anything": 1})
    assert plugin.refusal(arguments(radix_eviction_policy="slru", pp_size=4)) is None


def arguments(**changes: Any) -> SimpleNamespace:
    """SGLang's record of arguments as far as it is read here."""
    return SimpleNamespace(**{"radix_eviction_policy": "scout", "radix_eviction_policy_config": None, **changes})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm EAGLE3"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
        ({"radix_cache_backend": "mine"}, "--radix-cache-backend mine"),
        ({"hicache_host_memory_mode": "buffer_only"}, "--hicache-host-memory-mode buffer_only"),
    ],
)
def test_what_is_not_supported_is_refused_by_flag(flags: dict[str, Any], named: str) -> None:
    why = plugin.refusal(arguments(**flags))
    assert why == f"--radix-eviction-policy scout does not support {named} yet"


def test_plain_flags_are_fine() -> None:
    plain = arguments(
        disaggregation_mode="null", pp_size=1, speculative_algorithm=None, hicache_host_memory_mode="cache"
    )
    assert plugin.refusal(plain) is None
    assert plugin.refusal(arguments(speculative_algorithm="NGRAM")) is None


def test_the_switch_lifts_every_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = arguments(radix_eviction_policy_config={"nope": 1}, pp_size=2)
    assert plugin.refusal(bad) is not None
    monkeypatch.setenv(config.DISABLE, "1")
    assert plugin.refusal(bad) is None


def test_a_bad_command_line_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plugin.after_command_line(arguments(radix_eviction_policy_config={"nope": 1}), [])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("sglang-scout: error: --radix-eviction-policy-config: unknown key 'nope'")
    assert said.count("\n") == 1
    plugin.after_command_line(arguments(), [])


def test_a_missing_seam_is_named() -> None:
    gone = preflight.Seam("json", "JSONDecoder.decode_it")
    other = preflight.Seam("json", "loads", ("text",))
    silent = preflight.Seam("json", "JSONDecoder.__init__", None, ("strict", "colour"))
    problems = {f.path: f.problem or "" for f in preflight.check([gone, other, silent])}
    assert problems["json.JSONDecoder.decode_it"].startswith("missing (AttributeError")
    assert problems["json.loads"].startswith("takes (s, ") and problems["json.loads"].endswith("expected (text)")
    assert problems["json.JSONDecoder.__init__"] == "no longer sets colour"


def test_every_hook_is_a_seam() -> None:
    seams = {seam.path for seam in preflight.SEAMS}
    assert {hook.target for hook in scheduler.HOOKS + hicache.HOOKS} <= seams
    assert len(seams) == len(preflight.SEAMS)


def test_the_table_lists_every_key() -> None:
    for policy in config.NAMES:
        keys = [row[0] for row in config.table(policy)]
        assert "max_sessions" in keys and len(keys) == len(set(keys))


def test_only_commands_that_work_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "doctor" in capsys.readouterr().out
    for unknown in (["top"], []):
        with pytest.raises(SystemExit) as caught:
            cli.main(unknown)
        assert caught.value.code == 2


def test_the_doctor_reads_the_headers_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_prepare", lambda: None)
    monkeypatch.setattr(preflight, "check", lambda seams=(): [])
    monkeypatch.setenv("SGLANG_SCOUT_HEADERS", "{bad")
    report = cli.examine()
    assert not report["ok"] and "SGLANG_SCOUT_HEADERS: got '{bad'" in "\n".join(cli.lines(report))
    monkeypatch.setenv("SGLANG_SCOUT_HEADERS", "default")
    assert cli.examine()["headers"] is None
    assert "tree core: Rust, where SGLang can use it" in cli.lines(cli.examine())
    gone = preflight.Finding("rust.collect", "missing")
    monkeypatch.setattr(preflight, "check", lambda seams=(): [gone] if seams is preflight.RUST_SEAMS else [])
    said = "\n".join(cli.lines(cli.examine()))
    assert "tree core: Python, for the Rust core is not as expected\n  rust.collect: missing" in said
    assert "warmup: can be turned on" in said
    monkeypatch.setattr(preflight, "check", lambda seams=(): [gone] if warmup_hooks.SEAMS[0] in seams else [])
    assert "warmup: refused\n  rust.collect: missing" in "\n".join(cli.lines(cli.examine()))
