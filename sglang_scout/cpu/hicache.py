"""HiCache's host tier on a plain CPU, for ``--hicache-io-backend direct``.

Stock SGLang lacks two things there: it pins host memory with ``cudaHostRegister``, and the three copy functions that
the ``direct`` backend uses are imported from sgl_kernel on CUDA and ROCm only. Copies here are plain torch indexing,
done when called: streams on a CPU are stand-ins, so nothing overlaps and the *time* of a copy says nothing about a
GPU. What is copied, when, and by which policy is the engine's own. The other io backends need device kernels and stay
unavailable.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from . import hooks

logger = logging.getLogger(__name__)

_POOL_MODULE = "sglang.srt.mem_cache.pool_host.mha"


def transfer_kv_direct(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy token rows ``src_indices`` of each source layer to rows ``dst_indices`` of the matching destination layer.

    Every layer is ``[tokens, ...]``; the indices are per token whatever the page size is.
    """
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from page-first host buffers ``[page, layer, page_size, ...]`` to device layers ``[tokens,
    ...]``."""
    page, offset = src_indices // page_size, src_indices % page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[page, layer_id, offset]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy all layers from device to page-first host buffers.

    ``src_ptrs`` are the K layers and then the V layers, each ``[tokens, ...]``; ``dst_ptrs`` is ``[K, V]``, each
    ``[page, layer, page_size, ...]``.
    """
    page, offset = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for which, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            dst[page, layer, offset] = src_ptrs[which * layers + layer][src_indices]


def _construct_unpinned(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # Pinning is for DMA to a device; without one there is no driver to register the memory with.
    kwargs["pin_memory"] = False
    original(self, *args, **kwargs)


def install() -> None:
    """Register the constructor hook and bind the copy functions that SGLang's own imports left unbound on a CPU."""
    usable = hooks.around(
        f"{_POOL_MODULE}.MHATokenToKVPoolHost.__init__",
        _construct_unpinned,
        parameters=("pin_memory",),
        purpose="--enable-hierarchical-cache dies at start on a CPU",
    )
    if not usable:
        return
    from sglang.srt.mem_cache.pool_host import mha

    for function in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
        if not hasattr(mha, function.__name__):
            setattr(mha, function.__name__, function)
