"""What the plug-in does to a process of SGLang's, each case in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

ROOT = Path(__file__).parents[2]

START = """
import json, sys
sys.path.insert(0, ".")
import tests.tree.conftest
answer = {}
"""

LOAD = """
import sglang.srt.mem_cache.unified_radix_cache  # as in a scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
load_plugins()
def build(policy, core=None, **kw):
    from tests.tree import trees
    trees._prepared = True
    try:
        tree = trees.SglangTree(policy=policy, core=core, **kw)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return type(tree.core).__name__ + "/" + type(getattr(tree.core, "eviction_strategy", None)).__name__
def patched():
    ours = lambda target: any(s and s.plugin_name == "scout" for _, _, s in HookRegistry._hooks[target])
    return sorted(filter(ours, HookRegistry._patched))
"""

END = "\nprint('ANSWER' + json.dumps(answer))\n"


def run(body: str, **env: str) -> dict[str, Any]:
    """Run the code in a fresh interpreter; what it put into `answer`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + body + END],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=180,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1][len("ANSWER") :])


def test_under_another_policy_nothing_hot_is_hooked() -> None:
    answer = run(
        LOAD
        + """
answer["before"] = patched()
answer["lru"] = build("lru")
answer["slru"] = build("slru")
answer["python"] = build("lru", core="python")
answer["after"] = patched()
answer["scout"] = build("scout")
answer["scout_python"] = build("scout", core="python")
answer["then"] = patched()
answer["lru_again"] = build("lru")
"""
    )
    cold = [
        "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
        "sglang.srt.mem_cache.unified_cache.tree_core_registry.select_tree_core_backend",
        "sglang.srt.server_args.prepare_server_args",
    ]
    assert answer["before"] == answer["after"] == cold
    assert answer["lru"].startswith("RustUnifiedTreeCore") and answer["slru"].startswith("RustUnifiedTreeCore")
    assert answer["python"] == "UnifiedTreeCore/LRUStrategy"
    assert answer["scout"].startswith("RustScoutCore")
    assert answer["scout_python"] == "ScoutTreeCore/ScoutStrategy"
    assert "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release" in answer["then"]
    assert answer["lru_again"].startswith("RustUnifiedTreeCore")


def test_the_switch_means_lru_on_the_default_core() -> None:
    answer = run(
        LOAD
        + """
from sglang.srt.server_args import ServerArgs
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES as choices
flags = dict(radix_eviction_policy="scout", radix_eviction_policy_config={"no": 1})
args = ServerArgs(model_path="dummy", device="cpu", **flags)
args.resolve_once()
view = resolving_view(args)
answer["policy"], answer["config"] = view.radix_eviction_policy, view.radix_eviction_policy_config
answer["choices"] = [c for c in choices if c in ("scout", "cachescout")]
answer["core"] = build(view.radix_eviction_policy)
answer["python"] = build("scout", core="python", config={"any": 1})
answer["patched"] = patched()
""",
        SGLANG_SCOUT_DISABLE="1",
    )
    assert (answer["policy"], answer["config"]) == ("lru", None)
    assert answer["choices"] == ["scout", "cachescout"]
    assert answer["core"].startswith("RustUnifiedTreeCore")
    assert answer["python"] == "UnifiedTreeCore/LRUStrategy"
    assert not any("select_tree_core_backend" in target for target in answer["patched"])


def test_plugins_that_are_not_selected_are_not_there() -> None:
    answer = run(
        LOAD
        + """
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES as choices
answer["choices"] = [c for c in choices if c in ("scout", "cachescout")]
answer["patched"] = patched()
answer["scout"] = build("scout", core="python")
""",
        SGLANG_PLUGINS="scout_cpu",
    )
    assert answer["choices"] == [] and answer["patched"] == []
    assert "Unknown eviction policy: scout" in answer["scout"]


def test_another_plugin_on_the_same_functions() -> None:
    answer = run(
        """
import sglang.srt.mem_cache.unified_radix_cache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
called = []
CHECKPOINT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"
RELEASE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release"
SELECT = "sglang.srt.mem_cache.unified_cache.tree_core_registry.select_tree_core_backend"
def around(original, *args, **kwargs):
    called.append("around")
    return None
def after(result, *args, **kwargs):
    called.append("after")
HookRegistry.register(CHECKPOINT, around, HookType.AROUND)
HookRegistry.register(RELEASE, after, HookType.AFTER)
HookRegistry.register(SELECT, after, HookType.AFTER)
from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.evict_policy import LRUStrategy
class Theirs(LRUStrategy):
    pass
utils._EVICTION_POLICY_FACTORIES["cachescout"] = Theirs
"""
        + LOAD
        + """
answer["scout"] = build("scout")
from sglang_scout import scheduler
answer["applied"] = {h.name: scheduler.is_applied(h) for h in scheduler.HOOKS if h.module in sys.modules}
answer["selected"] = list(called)
answer["cachescout"] = build("cachescout")
from tests.tree import trees
from types import SimpleNamespace
tree = trees.SglangTree()
called.clear()
tree.cache.checkpoint_into_tree(SimpleNamespace(rid="r"), up_to=1)
tree.cache.on_release(SimpleNamespace(rid="r", finished_reason=None), checkpointed=True)
answer["called"] = called
answer["installed_twice"] = scheduler.install()
answer["hooks"] = [len(HookRegistry._hooks[t]) for t in (CHECKPOINT, RELEASE)]
"""
    )
    assert answer["scout"].startswith("RustScoutCore")
    assert len(answer["applied"]) >= 3 and all(answer["applied"].values())
    assert answer["selected"] == ["after"]
    assert "another plug-in's, not sglang-scout's" in answer["cachescout"]
    assert answer["called"] == ["around", "after"], "the other plug-in's hooks run, each once"
    assert answer["installed_twice"] == [] and answer["hooks"] == [2, 2]


def test_a_missing_seam_refuses_by_name() -> None:
    answer = run(
        """
import sglang.srt.mem_cache.unified_radix_cache as urc
import sglang.srt.mem_cache.unified_cache.tree_core_registry as registry
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
stock = [registry.select_tree_core_backend]  # SGLang patches module variables that hold a hooked function
"""
        + LOAD
        + """
from unittest import mock
with mock.patch.object(registry, "select_tree_core_backend", stock[0]), \\
     mock.patch.object(urc, "select_tree_core_backend", stock[0]):
    answer["select"] = build("scout")
touch = UnifiedTreeCore._touch_node
del UnifiedTreeCore._touch_node
answer["touch"] = build("scout")
UnifiedTreeCore._touch_node = touch
with mock.patch.object(UnifiedTreeCore, "_split_node", lambda self, key, child: None):
    answer["split"] = build("scout")
checkpoint = urc.UnifiedRadixCache.checkpoint_into_tree
del urc.UnifiedRadixCache.checkpoint_into_tree
answer["checkpoint"] = build("scout")
urc.UnifiedRadixCache.checkpoint_into_tree = checkpoint
with mock.patch.object(HookRegistry, "_apply_target", classmethod(lambda cls, target, hooks: None)):
    answer["hook"] = build("scout")
"""
    )
    named = {
        "select": "another cache or tree core is being built",
        "touch": "unified_tree_core.UnifiedTreeCore._touch_node missing",
        "split": "UnifiedTreeCore._split_node takes (self, key, child)",
        "checkpoint": "UnifiedRadixCache.checkpoint_into_tree missing",
        "hook": "did not take the hook on sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release",
    }
    for case, text in named.items():
        assert "sglang-scout" in answer[case] and "0.5.23" in answer[case] and text in answer[case], answer[case]
        assert "\n" not in answer[case]


def test_a_start_that_does_not_fit_is_refused() -> None:
    answer = run(
        LOAD
        + """
import os
answer["config"] = build("scout", config={"nope": 1})
answer["range"] = build("cachescout", config={"tau": 2})
answer["core"] = build("scout", core="lua")
answer["rust"] = build("scout", core="rust")
answer["python"] = build("scout", core="python")
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "lua"
answer["env"] = build("scout")
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "rust"
answer["env_rust"] = build("scout")
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
answer["env_python"] = build("scout")
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "scout"
answer["env_scout"] = build("scout")
answer["ours_for_lru"] = build("lru")
del os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"]
from sglang.srt.mem_cache.utils import get_eviction_strategy
try:
    get_eviction_strategy("scout", {})
except ValueError as error:
    answer["alone"] = str(error)
from sglang.srt.server_args import ServerArgs
try:
    flags = dict(radix_eviction_policy="scout", radix_eviction_policy_config={"nope": 1})
    ServerArgs(model_path="dummy", **flags).resolve_once()
except ValueError as error:
    answer["arguments"] = str(error)
"""
    )
    unknown = "--radix-eviction-policy-config: unknown key 'nope' for policy 'scout'; known keys: "
    assert unknown in answer["config"] and unknown in answer["arguments"]
    assert "key 'tau': got 2, allowed: number in [0, 1]" in answer["range"]
    assert "remove CacheInitParams.tree_core_backend=lua" in answer["core"]
    assert "remove SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=lua" in answer["env"]
    for case in ("rust", "env_rust", "env_scout"):
        assert answer[case].startswith("RustScoutCore"), case
    assert answer["python"] == answer["env_python"] == "ScoutTreeCore/ScoutStrategy"
    assert answer["ours_for_lru"].startswith("RustUnifiedTreeCore")
    assert "cannot run on SGLang 0.5.23: another cache or tree core is being built" in answer["alone"]


def test_where_the_rust_core_is_not_as_expected_the_python_core_is_used() -> None:
    answer = run(
        LOAD
        + """
import logging
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
said = []
class Listen(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("sglang_scout.tree").addHandler(Listen())
logging.getLogger("sglang_scout.tree").setLevel(logging.INFO)
answer["stock"] = build("scout")
collect = RustUnifiedTreeCore.collect_path_info
RustUnifiedTreeCore.collect_path_info = lambda self, nodes: collect(self, nodes)
answer["other"] = build("scout")
answer["said"] = said
"""
    )
    assert answer["stock"].startswith("RustScoutCore")
    assert answer["other"] == "ScoutTreeCore/ScoutStrategy"
    first, why, second = answer["said"]
    assert "Rust tree core" in first and "Python tree core" in second
    assert "collect_path_info takes (self, nodes), expected (self, end_node_ids)" in why


def test_loading_is_light_where_no_tree_is_built() -> None:
    answer = run(
        """
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_scout import plugin
plugin.load()
plugin.load()
HookRegistry.apply_hooks()
heavy = ("prometheus_client", "sglang.srt.managers.scheduler", "sglang.srt.mem_cache.unified_radix_cache",
         "sglang.srt.entrypoints.http_server")
answer["modules"] = [m for m in heavy if m in sys.modules]
answer["hooks"] = [len(h) for h in HookRegistry._hooks.values()]
"""
    )
    assert answer["modules"] == []
    assert answer["hooks"] == [1, 1]


def test_doctor_finds_everything_in_place() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_scout.cli", "doctor", "--json"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("SGLANG")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    report = json.loads(done.stdout)
    assert [seam for seam in report["seams"] if seam["problem"] is not None] == []
    for kind in ("rust_seams", "warmup_seams"):
        assert report[kind] and all(seam["problem"] is None for seam in report[kind])
    assert done.returncode == 0 and report["ok"] and len(report["seams"]) > 50
    assert report["versions"]["sglang"] in report["tested_with"]
    assert {row["key"] for row in report["config"]["cachescout"]} >= {"E_max", "lambda", "max_agents"}
