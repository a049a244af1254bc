"""Extend attention that costs what a cache hit should cost.

Stock ``torch_native`` attention pads the query with one dummy row per cached prefix token, so that a request with
1,999 of 2,000 tokens in the cache pays the attention of all 2,000: on this path a hit would be as slow as a miss, and
no hit rate could show in a latency. Here only the new tokens attend. The result is the same function of the same
inputs (equal up to float rounding), decode is untouched, and whatever this does not cover (cross attention,
encoder-only, sliding windows) goes to the stock function.
"""

from collections.abc import Callable
from typing import Any

from . import hooks

_TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
_PARAMETERS = (
    "query",
    "output",
    "k_cache",
    "v_cache",
    "req_to_token",
    "req_pool_indices",
    "seq_lens",
    "extend_prefix_lens",
    "extend_seq_lens",
    "encoder_lens",
    "scaling",
    "enable_gqa",
    "causal",
    "is_cross_attn",
    "sliding_window_size",
)
# Queries per masked call: bounds the mask (rows x context) where a large chunk follows a long prefix, and lets each
# block skip the keys after its own last query.
BLOCK = 512


def extend(
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    scaling: float | None,
    enable_gqa: bool,
) -> Any:
    """Causal attention of the new tokens of each request over its whole context; fills and returns ``output``.

    ``query`` and ``output`` are ``[new tokens of all requests, heads, head size]``, the caches ``[slots, kv heads, head
    size]``; request i owns ``extend_seq_lens[i]`` queries and attends ``seq_lens[i] = extend_prefix_lens[i] +
    extend_seq_lens[i]`` cached tokens, whose slots are the first ones of its row in ``req_to_token``.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    begin = 0
    rows = req_pool_indices.tolist()
    for row, total, prefix, new in zip(
        rows, seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        slots = req_to_token[row, :total]
        q = query[begin : begin + new].movedim(0, 1)[None]
        k = k_cache[slots].movedim(0, 1)[None].to(q.dtype)
        v = v_cache[slots].movedim(0, 1)[None].to(q.dtype)
        if prefix == 0:
            out = sdpa(q, k, v, is_causal=True, scale=scaling, enable_gqa=enable_gqa)
            output[begin : begin + new] = out[0].movedim(1, 0)
        else:
            for first in range(0, new, BLOCK):
                last = min(first + BLOCK, new)
                seen = prefix + last
                mask = None
                if last - first > 1:  # a single query sees everything up to itself
                    mask = torch.ones(last - first, seen, dtype=torch.bool).tril(prefix + first)
                out = sdpa(
                    q[:, :, first:last],
                    k[:, :, :seen],
                    v[:, :, :seen],
                    attn_mask=mask,
                    scale=scaling,
                    enable_gqa=enable_gqa,
                )
                output[begin + first : begin + last] = out[0].movedim(1, 0)
        begin += new
    return output


def _replacement(
    original: Callable[..., Any],
    self: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    windowed = sliding_window_size is not None and sliding_window_size > -1
    lists = (req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens)
    if encoder_lens is not None or is_cross_attn or not causal or windowed:
        return original(
            self,
            query,
            output,
            k_cache,
            v_cache,
            *lists,
            encoder_lens,
            scaling,
            enable_gqa,
            causal,
            is_cross_attn,
            sliding_window_size,
        )
    return extend(query, output, k_cache, v_cache, *lists, scaling, enable_gqa)


def install() -> None:
    """Register the replacement; without it answers stay right and hits are as slow as misses."""
    hooks.around(
        _TARGET,
        _replacement,
        parameters=_PARAMETERS,
        purpose="a cache hit costs as much attention as a miss on this CPU",
    )
