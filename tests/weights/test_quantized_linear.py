"""Quantised layers: the bits of a token, the error, the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.native.kernels import kernels
from draftproof.weights import block_formats, block_linear, packed_linear, quantized_linear
from draftproof.weights.block_formats import quantized_blocks
from draftproof.weights.quantize import Quantization
from draftproof.weights.quantized_linear import Int8Linear, slow_because


def in_blocks(kind: str) -> Callable[[Tensor, Tensor | None], nn.Module]:
    """Layers of this kind, with our kernels."""
    return lambda weight, bias=None: quantized_blocks(["up_proj"], [weight], bias, kind)


def by_torch(kind: str) -> Callable[[Tensor, Tensor | None], nn.Module]:
    """The same where there are no kernels."""

    def make(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        with pytest.MonkeyPatch.context() as patch:
            for module in (packed_linear, block_linear, block_formats):
                patch.setattr(module, "kernels", lambda: None)
            return quantized_blocks(["up_proj"], [weight], bias, kind)

    return make


LAYERS = [Int8Linear, in_blocks("int8"), in_blocks("int4"), by_torch("int8"), by_torch("int4")]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(896, 128), (64, 1216), (48, 32)]


def weights(
    outputs: int, inputs: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a bias, and inputs with a token that is much louder than the others."""
    dice = torch.Generator().manual_seed(seed)
    sizes = ((outputs, inputs), (outputs,), (40, inputs))
    weight, bias, rows = (torch.randn(*size, generator=dice) for size in sizes)
    rows[7] *= 1000
    return weight.to(dtype), bias.to(dtype), rows.to(dtype)


# One layer ---


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_results_are_bitwise_independent_of_other_tokens(
    layer: Callable[..., nn.Module], dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias, rows = weights(outputs, inputs, dtype)
    made = layer(weight, bias)
    whole = made(rows)
    assert whole.dtype == dtype
    for width in (*range(1, 17), 24, 32):
        for start in (0, 3, 8):
            sample = slice(start, start + width)
            assert torch.equal(made(rows[sample]), whole[sample]), (width, start)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_reads_any_layout(layer: Callable[..., nn.Module]) -> None:
    weight, bias, rows = weights(64, 96)
    made, grid = layer(weight, bias), rows.view(8, 5, 96)
    whole = made(rows).view(8, 5, 64)
    assert torch.equal(made(grid), whole)
    assert torch.equal(made(grid[:, -1:]), whole[:, -1:])
    assert torch.equal(made(grid.transpose(0, 1)), whole.transpose(0, 1))


def test_eight_bits_are_the_integer_product() -> None:
    """Against the definition, in integers: the largest code of a row is 127, and sums do not
    overflow, nor saturate where those of some processors do."""
    weight, bias, rows = weights(64, 512)
    scale, most = weight.abs().amax(1) / 127, rows.abs().amax(1, keepdim=True)
    sums = (rows * (127 / most)).round().long() @ (weight / scale[:, None]).round().long().t()
    wanted = sums.double() * scale * most / 127 + bias
    result = Int8Linear(weight, bias)(rows).double()
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=2e-4)
    for inputs in (256, 1024, 3000, 4096):          # torch's own 8-bit product gives 2.02 for 256
        ones = torch.ones(1, inputs)
        loudest = Int8Linear(ones.expand(64, -1))(torch.cat([ones, -ones]))
        sums = torch.tensor([[inputs], [-inputs]]).float()
        torch.testing.assert_close(loudest, sums.expand(2, 64))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_error_is_that_of_the_bits(layer: Callable[..., nn.Module]) -> None:
    weight, bias, rows = weights(128, 512)
    truth = F.linear(rows, weight, bias)
    # of each token, the loud one too
    error = (layer(weight, bias)(rows) - truth).norm(dim=1) / truth.norm(dim=1)
    assert float(error.max()) < (0.03 if LAYERS.index(layer) in (0, 1, 3) else 0.1)


def test_zero_input_gives_zero_output_and_nan_stays_in_its_row() -> None:
    weight, bias, rows = weights(64, 96)
    rows[1], rows[2, 5] = 0, torch.nan
    outputs = Int8Linear(weight, bias)(rows)
    assert torch.equal(outputs[1], bias)
    assert outputs[2].isnan().all() and not outputs[[0, 1, *range(3, 40)]].isnan().any()


def test_layers_that_are_not_quicker_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "kernels", lambda: None)
    assert "no 8-bit kernel" in str(slow_because("int8", torch.bfloat16))
    assert "no 4-bit kernel" in str(slow_because("int4", torch.bfloat16))
    lost = Quantization("int8", 0.1, 0.9, 5, 100, 50, "reason")
    assert str(lost).endswith("not quicker than the original here: reason")
    assert "reason" not in str(lost._replace(slow=None))


# Our kernels ---

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels for 8 bits here")


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (33, 50), (864, 272)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_kernel_and_torchs_operators_agree(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, biased: bool
) -> None:
    """The same integers, hence at most a rounding apart."""
    weight, bias, rows = weights(outputs, inputs, torch.bfloat16)
    whole = Int8Linear(weight, bias if biased else None)
    monkeypatch.setattr(packed_linear, "kernels", lambda: None)
    without = Int8Linear(weight, bias if biased else None)
    assert whole.native is not None and without.native is None
    wanted = without(rows).float()
    loud = rows.float().norm(dim=1, keepdim=True) * weight.float().norm(dim=1).mean()
    assert bool(((whole(rows).float() - wanted).abs() <= 0.01 * loud).all())
    assert float((whole(rows) == without(rows)).float().mean()) > 0.95
    assert all(torch.equal(item(rows[:0]), rows.new_empty(0, outputs)) for item in (whole, without))
