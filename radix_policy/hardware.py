"""What a host hit is worth on a GPU: restoring KV over the host link against computing it again.

    OBR(n) = 1 - restore(n) / prefill(n)        (EfficientAgent, section 3.1 and appendix "Hardware cost")
    restore(n) = n x KV bytes per token and rank / bytes/s of the link, all ranks at once, each over its own link
    prefill(n) = FLOPs(n) / (peak FLOPS x utilisation x ranks)
    FLOPs(n) = 2 x active parameters x n + 2 x layers x heads x head size x n^2 (causal attention: QK and AV)

OBR is at most 1; at 0 a hit is worth nothing. It values a hit, it does not say whether the hit happens: that is the
curve's part (working_set.py), and EfficientAgent measured that offloading slows every run on H800, where OBR is
positive for most models, while it pays on RTX 3090 and H20. Hence both numbers here: OBR, and FLOP per link byte.
"""

import math
from dataclasses import dataclass


class HardwareError(ValueError):
    """A number that makes no sense; one line that names it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak figures of one GPU as published."""

    tflops: float  # dense BF16 with FP32 accumulation, 10^12 FLOP/s
    link_gbs: float  # host link, 10^9 bytes/s per direction
    memory_gb: float  # 10^9 bytes
    source: str

    @property
    def flop_per_byte(self) -> float:
        """Peak FLOP per byte of the host link."""
        return self.tflops * 1e3 / self.link_gbs


# PCIe x16 per direction: 64 GB/s Gen5, 32 GB/s Gen4 (vendors name the sum of both directions, 128 and 64).
_HOPPER = "dense BF16 is half of the 1,979 TFLOPS that the data sheet names with sparsity; PCIe Gen5 x16, 128 GB/s both"
GPUS = {
    "rtx3090": Gpu(71.0, 32.0, 24.0, "NVIDIA GA102 whitepaper, table of GeForce RTX 3090; PCIe Gen4 x16"),
    "h20": Gpu(148.0, 64.0, 96.0, "EfficientAgent, appendix Hardware cost (148 TFLOPS); 96 GB, PCIe Gen5 x16"),
    "h100": Gpu(989.4, 64.0, 80.0, f"NVIDIA H100 SXM data sheet: {_HOPPER}"),
    "h800": Gpu(989.4, 64.0, 80.0, "H100 SXM's figures: NVIDIA cut NVLink and FP64 only for the H800"),
    "h200": Gpu(989.4, 64.0, 141.0, f"NVIDIA H200 SXM data sheet: {_HOPPER}"),
}
# Restores reach a part of the link's peak: a median of 26.6 GiB/s of 64 GB/s over 71,872 retrievals on H20
# (EfficientAgent, appendix Hardware cost). Prefill is taken at peak, as there: that makes OBR a lower bound.
LINK_UTILISATION = 26.6 * 2**30 / 64e9
FLOPS_UTILISATION = 1.0
# Peak FLOP per host-link byte up to which offloading was measured to pay once hits survive, and from which on it slowed
# every run (EfficientAgent, section 5.7: 2.2K and 2.3K on RTX 3090 and H20, 6.7 to 7.0 times as many on H800).
PAID_UP_TO, SLOWED_FROM = GPUS["h20"].flop_per_byte, GPUS["h800"].flop_per_byte


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a transformer with full attention in every layer."""

    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    active_parameters: float  # that one token passes through
    number_bytes: float = 2.0  # of a number in the KV cache (BF16)
    source: str = "given"

    def kv_bytes(self, ranks: int = 1) -> int:
        """KV bytes per token and tensor-parallel rank; heads are repeated where there are fewer than ranks."""
        return math.ceil(2 * self.layers * math.ceil(self.kv_heads / ranks) * self.head_dim * self.number_bytes)

    def flops(self, tokens: int) -> float:
        """FLOPs to prefill so many tokens from nothing."""
        return 2 * self.active_parameters * tokens + 2 * self.layers * self.heads * self.head_dim * tokens**2


MODELS = {
    "qwen3-coder-30b-a3b": Model(48, 32, 4, 128, 3.3e9, source="Qwen3-Coder-30B-A3B-Instruct model card"),
    # without 1.5 billion of embedding and output layer: prefill looks up the one and needs the other once
    "qwen2.5-coder-32b": Model(64, 40, 8, 128, 31.0e9, source="Qwen2.5-Coder-32B-Instruct model card"),
}


@dataclass(frozen=True, slots=True)
class OffloadCost:
    """Times of a deployment. HardwareError where a number is not a finite positive one."""

    model: Model
    tflops: float  # peak, per rank
    link_gbs: float  # peak, per rank and direction
    ranks: int = 1  # tensor parallel
    flops_utilisation: float = FLOPS_UTILISATION
    link_utilisation: float = LINK_UTILISATION
    kv_bytes: float | None = None  # per token and rank, where it is not the model's (quantised KV, say)

    def __post_init__(self) -> None:
        named = {
            "TFLOPS": self.tflops,
            "GB/s of the link": self.link_gbs,
            "ranks": self.ranks,
            "utilisation of FLOPS": self.flops_utilisation,
            "utilisation of the link": self.link_utilisation,
            "active parameters": self.model.active_parameters,
            "KV bytes": 1.0 if self.kv_bytes is None else self.kv_bytes,
        }
        for name, value in named.items():
            if not (math.isfinite(value) and value > 0):
                raise HardwareError(f"{name} must be a finite number above 0, not {value}")

    @property
    def token_bytes(self) -> float:
        """KV bytes per token and rank."""
        return self.model.kv_bytes(self.ranks) if self.kv_bytes is None else self.kv_bytes

    @property
    def flop_per_byte(self) -> float:
        """Peak FLOP per byte of the host link."""
        return self.tflops * 1e3 / self.link_gbs

    def restore_s(self, tokens: int) -> float:
        """Seconds to bring back so many tokens from the host."""
        return tokens * self.token_bytes / (self.link_gbs * 1e9 * self.link_utilisation)

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute so many tokens from nothing."""
        return self.model.flops(tokens) / (self.tflops * 1e12 * self.flops_utilisation * self.ranks)

    def obr(self, tokens: int) -> float:
        """1 - restore / prefill of a prefix of so many tokens (>= 1): the share of its prefill that a hit saves."""
        return 1 - self.restore_s(tokens) / self.prefill_s(tokens)
