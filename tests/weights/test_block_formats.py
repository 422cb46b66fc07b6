"""Quantising to block formats: which matrix gets which, and how far the values are."""

from __future__ import annotations

import pytest
import torch

from draftproof.gguf.blocks import dequantize
from draftproof.native.kernels import kernels
from draftproof.weights import block_formats
from draftproof.weights.block_formats import (
    QUANTIZED,
    format_of,
    quantize_blocks,
    quantized_blocks,
)

BITS = {"Q8_0": 0.006, "Q5_0": 0.043, "Q4_K": 0.075, "Q6_K": 0.019}
"""Relative errors of normally distributed weights."""


def test_sensitive_matrices_get_more_bits() -> None:
    def formats(module: str, inputs: int = 512) -> str:
        names = [f"model.layers.{number}.{module}" for number in range(16)]
        return " ".join(format_of(name, "int4", inputs, 16)[1] for name in names)

    assert formats("self_attn.q_proj") == " ".join("4" * 16)
    assert formats("mlp.down_proj") == "6 6 4 4 6 4 4 6 4 4 6 4 4 6 6 6"
    assert formats("self_attn.v_proj", 576) == formats("mlp.down_proj").replace(
        "4", "5").replace("6", "8")
    assert format_of("lm_head", "int4", 512) == "Q6_K"
    assert {format_of(name, "int8", 512) for name in ("lm_head", "a.1.v_proj")} == {"Q8_0"}


@pytest.mark.parametrize("format", BITS)
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "numpy"])
def test_values_are_as_near_as_the_bits_allow(
    format: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and kernels() is None:
        pytest.skip("there are no kernels here")
    if not native:
        monkeypatch.setattr(block_formats, "kernels", lambda: None)
    weight = torch.randn(70, 768, generator=torch.Generator().manual_seed(0)) / 50
    weight[1], weight[2], weight[3] = 0, 0.25, weight[3].abs() + 0.01
    blocks = quantize_blocks(weight.bfloat16(), format)
    assert blocks.shape == (70, 768)
    values, weight = dequantize(blocks), weight.bfloat16().float()
    assert torch.equal(values[1], weight[1])
    error = (values - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-9)
    assert float(error[4:].mean()) < BITS[format] and float(error[:4].max()) < 2 * BITS[format]


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
def test_large_blocks_are_searched_for_the_least_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer than scales that just cover each group."""
    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(1))
    groups = weight.view(32, -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    covered = ((groups - low) / step).round() * step + low
    error = (dequantize(quantize_blocks(weight, "Q4_K")) - weight).norm()
    assert float(error) < float((covered - groups).norm())


def test_any_number_of_inputs_is_quantised() -> None:
    weight = torch.randn(40, 50)
    layer = quantized_blocks(["gate"], [weight], None, "int8")
    assert layer.in_features == 50 and layer.dense().shape == (40, 50)
    torch.testing.assert_close(layer.dense().float(), weight, rtol=0.01, atol=0.02)
    inputs = torch.randn(3, 50).bfloat16()
    torch.testing.assert_close(layer(inputs).float(), inputs.float() @ weight.T, rtol=0.02,
                               atol=0.2)


def test_adjacent_matrices_of_one_format_are_merged() -> None:
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    weights = [torch.randn(outputs, 256) for outputs in (64, 32, 32)]
    parts = quantized_blocks(names, weights, None, "int4", 8).parts
    assert [part.outputs for part in parts] == [96, 32]


@pytest.mark.skipif(kernels() is None, reason="kernels quantise bfloat16 as it lies in a file")
@pytest.mark.parametrize("format", QUANTIZED)
def test_blocks_are_the_same_from_bfloat16_and_from_single_precision(format: str) -> None:
    weight = torch.randn(37, 512).bfloat16()
    weight[3], weight[4, 7], weight[5] = 0, torch.inf, 1e-7
    ours, wanted = quantize_blocks(weight, format), quantize_blocks(weight.float(), format)
    assert torch.equal(ours.data, wanted.data)


@pytest.mark.skipif(kernels() is None, reason="without kernels the package writes blocks")
def test_q8_0_matches_its_definition() -> None:
    from gguf import GGMLQuantizationType, quants

    weight = torch.randn(64, 96) * torch.logspace(-9, 3, 64)[:, None]
    weight[0], weight[1, :32] = 0, torch.arange(32) / 2         # ties go to even numbers here
    scale = (weight.view(64, 3, 32).abs().amax(-1) / 127).half().float()
    codes = (weight.view(64, 3, 32) / torch.where(scale > 0, scale, 1)[..., None]).round()
    codes = torch.where(scale[..., None] > 0, codes, 0).clamp(-127, 127)
    values = quants.dequantize(quantize_blocks(weight, "Q8_0").data.numpy(),
                               GGMLQuantizationType.Q8_0)
    assert torch.equal(torch.from_numpy(values), (codes * scale[..., None]).view(64, 96))
