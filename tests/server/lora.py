"""Adapters of the tiny model, and what SGLang's LoRA lacks on a CPU."""

import json
import os
from pathlib import Path

import numpy as np

from launch.tiny_model import _SUM, CODE_BITS, HEAD_DIM, HEADS, WIDTH, turn

# SGLang copies a batch's adapter numbers through pinned memory, which torch has on no machine without an accelerator.
_UNPINNED = """
import torch


def load():
    torch.Tensor.pin_memory = lambda self, *args, **keys: self
    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, without(getattr(torch, name)))


def without(make):
    def made(*args, pin_memory=False, **keys):
        return make(*args, **keys)

    return made
"""


def adapter(folder: Path, bit: int) -> Path:
    """An adapter of rank 1: the first head of the first layer brings one bit of each code turned over.

    So the codes that enter the later layers are others, by a whole bit: no token's KV there is as without the adapter
    or with that of another bit, and the margins of the outputs are as large as ever.
    """
    from safetensors.numpy import save_file

    down, up = np.zeros((1, HEADS * HEAD_DIM), np.float32), np.zeros((WIDTH, 1), np.float32)
    down[0, bit] = 1
    up[_SUM[0] + (bit + turn(0, 0)) % CODE_BITS, 0] = -2
    folder.mkdir(parents=True, exist_ok=True)
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_"
    save_file({f"{name}A.weight": down, f"{name}B.weight": up}, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def unpinned(folder: Path) -> dict[str, str]:
    """The environment in which a server does without pinned memory: a plug-in of SGLang's, made in this folder."""
    metadata = folder / "unpinned-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (folder / "unpinned.py").write_text(_UNPINNED)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: unpinned\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nunpinned = unpinned:load\n")
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
