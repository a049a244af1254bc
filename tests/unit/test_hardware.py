"""What a host hit is worth: the presets and the cost model against the numbers that EfficientAgent gives."""

import math

import pytest

from radix_policy.hardware import (
    FLOPS_UTILISATION,
    GPUS,
    LINK_UTILISATION,
    MODELS,
    PAID_UP_TO,
    SLOWED_FROM,
    HardwareError,
    Model,
    OffloadCost,
)

MOE, DENSE = MODELS["qwen3-coder-30b-a3b"], MODELS["qwen2.5-coder-32b"]


def cost(gpu: str, model: Model = MOE, ranks: int = 1, **changes: float) -> OffloadCost:
    preset = GPUS[gpu]
    return OffloadCost(model, **{"tflops": preset.tflops, "link_gbs": preset.link_gbs, "ranks": ranks, **changes})  # type: ignore[arg-type]


def test_presets_reproduce_the_papers_ratios() -> None:
    """Section 5.7: 2.2K and 2.3K peak FLOP per host-link byte, and 6.7 to 7.0 times as many on H800."""
    low, h20, h800 = (GPUS[name].flop_per_byte for name in ("rtx3090", "h20", "h800"))
    assert round(low, -2) == 2200 and round(h20, -2) == 2300
    assert round(h800 / h20, 1) == 6.7 and round(h800 / low, 1) == 7.0
    assert h20 == PAID_UP_TO and h800 == SLOWED_FROM
    assert GPUS["h20"].tflops == 148 and all(gpu.source and gpu.memory_gb > 0 for gpu in GPUS.values())


def test_kv_bytes_are_the_papers() -> None:
    """Appendix "Tensor-parallel footprint", and 24 KiB a rank at TP8, where the MoE model repeats its heads."""
    assert MOE.kv_bytes() == 98_304 and DENSE.kv_bytes() == 262_144
    assert MOE.kv_bytes(8) == 24 * 1024 == MOE.kv_bytes(4) and DENSE.kv_bytes(8) == 32 * 1024


def test_obr_on_h20_is_the_papers_bound() -> None:
    """Appendix "Hardware cost": 0.86 us to restore, at least 5.6 us of linear layers, so OBR > 0.84 for large n."""
    h20 = cost("h20", ranks=8)
    assert h20.restore_s(1) * 1e6 == pytest.approx(0.86, abs=0.005)
    assert h20.prefill_s(1) * 1e6 == pytest.approx(5.6, abs=0.05)
    assert h20.obr(1) > 0.84
    assert h20.obr(33_000) > h20.obr(1), "attention makes long prefixes dearer to compute, not to restore"


def test_obr_falls_with_compute_and_rises_with_the_link() -> None:
    prompt = 33_000
    assert cost("h800").obr(prompt) < cost("h20").obr(prompt)
    assert cost("h800", link_gbs=128).obr(prompt) > cost("h800").obr(prompt)
    assert cost("h800", ranks=8).obr(1) < 0 < cost("h800", ranks=2).obr(1)
    assert cost("h20", kv_bytes=98_304 / 2).restore_s(prompt) == pytest.approx(cost("h20").restore_s(prompt) / 2)
    assert cost("h20", flops_utilisation=0.5).prefill_s(prompt) == pytest.approx(2 * cost("h20").prefill_s(prompt))
    assert FLOPS_UTILISATION == 1 and 0.4 < LINK_UTILISATION < 0.5


def test_flops_are_the_sum_over_positions() -> None:
    """Token p of a causal prefill looks at p + 1 keys: 2 FLOP per number for QK, and as many for AV."""
    model = Model(layers=3, heads=4, kv_heads=2, head_dim=8, active_parameters=1000.0)
    brute = sum(2 * 1000 + 3 * 4 * 8 * 4 * (p + 1) for p in range(500))
    assert model.flops(500) == pytest.approx(brute, rel=0.003)  # n^2 for n(n + 1)


@pytest.mark.parametrize("name", ["tflops", "link_gbs", "ranks", "flops_utilisation", "link_utilisation", "kv_bytes"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_nonsense_is_refused_in_one_line(name: str, value: float) -> None:
    with pytest.raises(HardwareError, match="must be a finite number above 0") as caught:
        cost("h20", **{name: value})
    assert "\n" not in str(caught.value)
