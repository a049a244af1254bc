"""The CPU engine: inert unless asked for, right where it replaces something, and a real server on top of it."""

import inspect
import logging
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.command import HOST_TIER_MIN_FREE_GIB, available_memory_gib
from launch.tiny_model import ORDINARY_TOKENS
from sglang_scout.cpu import hicache, hooks

NEW_TOKENS = 24


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ORDINARY_TOKENS) for _ in range(length)]


def run_python(code: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- inert unless asked for ----


@pytest.mark.parametrize("env", [{}, {"SGLANG_USE_CPU_ENGINE": "0"}, {"SGLANG_USE_CPU_ENGINE": "true"}])
def test_does_nothing_unless_the_cpu_engine_is_asked_for(env: dict[str, str]) -> None:
    code = """
import sys
before = set(sys.modules)
import sglang_scout.cpu as cpu
assert cpu.activate() is None
cpu.load()
new = set(sys.modules) - before
print(sorted(m for m in new if m.split('.')[0] in ('torch', 'sglang', 'sgl_kernel', 'torchvision', 'numpy')))
print(sorted(m for m in new if m.startswith('sglang_scout.')))
"""
    assert run_python(code, **env).split("\n")[:2] == ["[]", "['sglang_scout.cpu']"]


def test_stand_in_refuses_calls_and_submodules() -> None:
    code = """
import sglang_scout.cpu as cpu
cpu.activate(); cpu.activate()
import sgl_kernel
from sgl_kernel import assign_req_to_token_pool_cpu
try:
    assign_req_to_token_pool_cpu()
except NotImplementedError as error:
    print('sgl_kernel.assign_req_to_token_pool_cpu' in str(error))
try:
    import sgl_kernel.flash_attn
except ImportError:
    print('no submodule')
import torchvision
print('torchvision', bool(torchvision.__version__))
"""
    assert run_python(code, SGLANG_USE_CPU_ENGINE="1").split("\n")[:3] == ["True", "no submodule", "torchvision True"]


# ---- hooks are checked ----


def test_missing_hook_targets_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert hooks.missing_parts("json.dumps", ("obj", "indent")) is None
    assert "json.dumb" in str(hooks.missing_parts("json.dumb"))
    assert "no_such_module" in str(hooks.missing_parts("no_such_module.f"))
    assert "no longer takes speed" in str(hooks.missing_parts("json.dumps", ("obj", "speed")))
    with caplog.at_level(logging.ERROR):
        assert not hooks.around("json.dumb", lambda original: None, parameters=(), purpose="nothing is dumb")
    assert "json.dumb" in caplog.text and "nothing is dumb" in caplog.text


# ---- copies of the host tier ----


def test_host_tier_copies_are_inverse_to_each_other() -> None:
    torch = pytest.importorskip("torch")
    layers, page, pages, heads, dim = 3, 4, 5, 2, 6
    slots = torch.randperm(32)[: page * 3]
    host_pages = torch.tensor([4, 0, 2])
    host_slots = (host_pages[:, None] * page + torch.arange(page)).flatten()
    device = [torch.randn(32, heads, dim) for _ in range(2 * layers)]
    back = [torch.zeros_like(layer) for layer in device]

    host = [torch.zeros(pages, layers, page, heads, dim) for _ in "kv"]
    hicache.transfer_kv_all_layer_direct_lf_pf(device, host, slots, host_slots, page)
    for layer in range(layers):
        into = [back[layer], back[layers + layer]]
        hicache.transfer_kv_per_layer_direct_pf_lf(host, into, host_slots, slots, layer, page)
    assert all(torch.equal(a[slots], b[slots]) for a, b in zip(device, back, strict=True))
    assert torch.equal(host[0][4, 1, 2], device[1][slots[2]])

    flat = [torch.zeros(pages * page, heads, dim) for _ in device]
    again = [torch.zeros_like(layer) for layer in device]
    hicache.transfer_kv_direct(device, flat, slots, host_slots, page)
    hicache.transfer_kv_direct(flat, again, host_slots, slots, page)
    assert all(torch.equal(a[slots], b[slots]) for a, b in zip(device, again, strict=True))


# ---- attention equals the stock function ----


@pytest.fixture(scope="module")
def stock_backend() -> Any:
    import sglang.srt.utils  # noqa: F401  (activates the platform plug-in)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend


@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (8, 2), (6, 1)]),
    block=st.sampled_from([1, 7, 512]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_extend_attention_equals_stock(
    stock_backend: Any, requests: list[tuple[int, int]], heads: tuple[int, int], block: int, seed: int
) -> None:
    import torch

    from sglang_scout.cpu import attention

    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads
    dim, capacity = 16, 400
    prefix, new = (torch.tensor(column) for column in zip(*requests, strict=True))
    total = prefix + new
    # Every token of every request has a slot of its own, in no order: the kernel may not rely on neighbours.
    slots = torch.randperm(capacity, generator=generator)
    table = torch.zeros(len(requests) + 2, 128, dtype=torch.int32)
    rows = torch.randperm(len(requests) + 2, generator=generator)[: len(requests)]
    taken = 0
    for row, length in zip(rows.tolist(), total.tolist(), strict=True):
        table[row, :length] = slots[taken : taken + length].to(torch.int32)
        taken += length
    keys = torch.randn(capacity, kv_heads, dim, generator=generator)
    values = torch.randn(capacity, kv_heads, dim, generator=generator)
    query = torch.randn(int(new.sum()), query_heads, dim, generator=generator)
    common = (keys, values, table, rows, total, prefix, new)
    stock = inspect.unwrap(stock_backend._run_sdpa_forward_extend)
    options: dict[str, Any] = {"scaling": 0.3, "enable_gqa": query_heads != kv_heads}

    expected = stock(None, query, torch.empty_like(query), *common, causal=True, **options)
    original = attention.BLOCK
    try:
        attention.BLOCK = block
        got = attention._replacement(stock, None, query, torch.empty_like(query), *common, causal=True, **options)
    finally:
        attention.BLOCK = original
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_other_kinds_of_attention_go_to_the_stock_function() -> None:
    from sglang_scout.cpu import attention

    seen = []

    def stock(self: Any, *arguments: Any) -> str:
        seen.append(arguments[-6:])
        return "stock"

    tensors = [SimpleNamespace() for _ in range(9)]
    for options in (
        {"causal": False},
        {"causal": True, "is_cross_attn": True},
        {"causal": True, "encoder_lens": 3},
        {"causal": True, "sliding_window_size": 4},
    ):
        assert attention._replacement(stock, None, *tensors, scaling=0.5, **options) == "stock"
    assert [arguments[1] for arguments in seen] == [0.5] * 4


# ---- a real server ----


@pytest.mark.server
def test_second_identical_prompt_is_cached_and_answers_alike(lru_server: Any, post: Any, generate: Any) -> None:
    post(lru_server.url, "/flush_cache?timeout=30")
    for length, seed in ((300, 1), (1500, 2), (5000, 3)):  # the last one is prefilled in more than one chunk
        ids = prompt(length, seed)
        miss = generate(lru_server.url, ids, NEW_TOKENS)
        hit = generate(lru_server.url, ids, NEW_TOKENS)
        longer = generate(lru_server.url, ids + miss["output_ids"] + prompt(7, seed), NEW_TOKENS)
        assert miss["meta_info"]["cached_tokens"] == 0
        assert hit["meta_info"]["cached_tokens"] == length - 1
        assert longer["meta_info"]["cached_tokens"] >= length
        assert hit["output_ids"] == miss["output_ids"]
        post(lru_server.url, "/flush_cache?timeout=30")
        recomputed = generate(lru_server.url, ids + miss["output_ids"] + prompt(7, seed), NEW_TOKENS)
        assert recomputed["meta_info"]["cached_tokens"] == 0
        assert recomputed["output_ids"] == longer["output_ids"]


@pytest.mark.server
def test_batches_answer_like_single_requests(lru_server: Any, post: Any, generate: Any) -> None:
    post(lru_server.url, "/flush_cache?timeout=30")
    shared = prompt(200, 10)
    prompts = [shared + prompt(20 + 13 * n, 11 + n) for n in range(8)]
    alone = [generate(lru_server.url, ids, NEW_TOKENS)["output_ids"] for ids in prompts]
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda ids: generate(lru_server.url, ids, NEW_TOKENS)["output_ids"], prompts))
        assert together == alone
        post(lru_server.url, "/flush_cache?timeout=30")


@pytest.mark.server
def test_greedy_choices_are_far_from_float_noise(lru_server: Any, post: Any) -> None:
    options = {
        "return_logprob": True,
        "top_logprobs_num": 2,
        "sampling_params": {"temperature": 0, "max_new_tokens": 64},
    }
    for length, seed in ((3, 30), (100, 31), (700, 32), (3000, 33)):
        answer = post(lru_server.url, "/generate", input_ids=prompt(length, seed), **options)
        pairs = [(best[0], second[0]) for best, second in answer["meta_info"]["output_top_logprobs"]]
        assert min(best - second for best, second in pairs) > 0.5
        assert len(set(answer["output_ids"])) > 50
        assert max(answer["output_ids"]) < ORDINARY_TOKENS  # no special token, so nothing ends early


@pytest.mark.server
def test_chat_goes_through_the_models_template(lru_server: Any, post: Any) -> None:
    messages = [{"role": "user", "content": "Which way to the harbour?"}]
    answer = post(lru_server.url, "/v1/chat/completions", model="tiny", messages=messages, max_tokens=5, temperature=0)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] > len(messages[0]["content"]) // 4


@pytest.mark.server
def test_every_hook_really_applied(lru_server: Any) -> None:
    log = lru_server.log_path.read_text(errors="replace")
    assert "sglang-scout CPU engine:" not in log, "a hook's target is missing"
    assert "Failed to apply hooks" not in log


@pytest.mark.server
@pytest.mark.skipif(available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="the host tier needs 12 GiB of free memory")
@pytest.mark.parametrize(
    "layout",
    [
        ("--page-size", "1", "--hicache-mem-layout", "layer_first"),
        pytest.param(("--page-size", "16", "--hicache-mem-layout", "page_first_direct"), marks=pytest.mark.slow),
    ],
    ids=["layer_first", "page_first_direct"],
)
def test_host_tier_brings_back_what_the_device_lost(start_server: Any, generate: Any, layout: tuple[str, ...]) -> None:
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through")
    server = start_server("lru", max_total_tokens=1536, extra_args=(*flags, *layout))
    ids = prompt(320, 20)
    first = generate(server.url, ids, NEW_TOKENS)
    assert generate(server.url, ids, NEW_TOKENS)["output_ids"] == first["output_ids"]
    for seed in range(21, 27):  # 6 x 320 tokens push it out of a device pool of 1,536
        generate(server.url, prompt(320, seed), NEW_TOKENS)
    restored = generate(server.url, ids, NEW_TOKENS)
    assert restored["meta_info"]["cached_tokens_details"]["host"] >= 256
    assert restored["output_ids"] == first["output_ids"]
