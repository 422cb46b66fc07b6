"""Layers in 8 and 4 bits: the bits of a token, the error, the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.model import quantized_linear
from draftproof.model.quantized_linear import Int4Linear, Int8Linear
from draftproof.native.build import BUILDS, LEVELS, able, opened
from draftproof.native.kernels import Kernels, kernels

LAYERS = [
    pytest.param(layer, marks=pytest.mark.skipif(not quantized_linear.works(layer), reason="no such kernel here"))
    for layer in (Int8Linear, Int4Linear)
]
needs_int8 = pytest.mark.skipif(not quantized_linear.works(Int8Linear), reason="no such kernel here")
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(896, 128), (64, 1216), (288, 768), (48, 32)]


def weights(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a bias, and inputs with a token that is much louder than the others."""
    dice = torch.Generator().manual_seed(seed)
    weight, bias, rows = (torch.randn(*size, generator=dice) for size in ((outputs, inputs), (outputs,), (40, inputs)))
    rows[7] *= 1000
    return weight.to(dtype), bias.to(dtype), rows.to(dtype)


# One layer ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(
    layer: Callable[..., nn.Module], dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias, rows = weights(outputs, inputs, dtype)
    made = layer(weight, bias)
    whole = made(rows)
    assert whole.dtype == dtype
    for width in (*range(1, 17), 24, 32):
        for start in (0, 3, 8):
            assert torch.equal(made(rows[start : start + width]), whole[start : start + width]), (width, start)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_reads_any_layout(layer: Callable[..., nn.Module]) -> None:
    weight, bias, rows = weights(64, 96)
    made, grid = layer(weight, bias), rows.view(8, 5, 96)
    whole = made(rows).view(8, 5, 64)
    assert torch.equal(made(grid), whole)
    assert torch.equal(made(grid[:, -1:]), whole[:, -1:])
    assert torch.equal(made(grid.transpose(0, 1)), whole.transpose(0, 1))


@needs_int8
def test_eight_bits_are_the_integer_product() -> None:
    """Against the definition, in integers: the largest code of a row is 127, and sums do not overflow."""
    weight, bias, rows = weights(64, 512)
    scale, most = weight.abs().amax(1) / 127, rows.abs().amax(1, keepdim=True)
    sums = (rows * (127 / most)).round().long() @ (weight / scale[:, None]).round().long().t()
    wanted = sums.double() * scale * most / 127 + bias
    torch.testing.assert_close(Int8Linear(weight, bias)(rows).double(), wanted, rtol=1e-5, atol=2e-4)
    loudest = Int8Linear(torch.ones(64, 4096))(torch.cat([torch.ones(1, 4096), -torch.ones(1, 4096)]))
    torch.testing.assert_close(loudest, torch.tensor([[4096.0], [-4096.0]]).expand(2, 64))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_error_is_that_of_the_bits(layer: Callable[..., nn.Module]) -> None:
    weight, bias, rows = weights(128, 512)
    truth = F.linear(rows, weight, bias)
    error = (layer(weight, bias)(rows) - truth).norm(dim=1) / truth.norm(dim=1)          # of every token, the loud one too
    low, high = (0.004, 0.03) if layer is Int8Linear else (0.04, 0.12)
    assert low < float(error.min()) and float(error.max()) < high


@needs_int8
def test_a_silent_token_is_silent_and_nan_stays_in_its_token() -> None:
    weight, bias, rows = weights(64, 96)
    rows[1], rows[2, 5] = 0, torch.nan
    outputs = Int8Linear(weight, bias)(rows)
    assert torch.equal(outputs[1], bias)
    assert outputs[2].isnan().all() and not outputs[[0, 1, *range(3, 40)]].isnan().any()


class _Saturates(Int8Linear):
    """Sums as some processors do: pairs of products in 16 bits."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).clamp(max=100)


class _Crawls(Int8Linear):
    """The reference kernel."""

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(5000):
            torch.zeros(1)
        return super().forward(inputs)


class _Waits(Int8Linear):
    """Quick, but something else ran when it was first called."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        _Waits.calls += 1
        if _Waits.calls < 12:
            time.sleep(0.02)
        return super().forward(inputs)


@needs_int8
def test_a_machine_that_was_busy_for_a_moment_has_its_kernels_still() -> None:
    assert quantized_linear.works(_Waits)


@needs_int8
def test_kernels_are_judged_by_one_thread() -> None:
    """Several wait for each other while something else runs, as no user of the kernel would see it on a quiet machine."""
    seen: list[int] = []

    class Tells(Int8Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(inputs)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert quantized_linear.works(Tells)
        assert seen[-1] == 1 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_int8
def test_wrong_and_slow_kernels_are_found_out() -> None:
    assert quantized_linear.works(Int8Linear)
    assert not quantized_linear.works(_Saturates) and not quantized_linear.works(_Crawls)
    assert not quantized_linear.works(lambda weight: torch.ops.onednn.no_such_operator(weight))


# Our kernels ----------------------------------------------------------------------------------------------------------------

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no compiler here")


@needs_kernels
@needs_int8
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (33, 50), (864, 272)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_kernels_and_the_operators_agree(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, biased: bool
) -> None:
    """Ours alone, ours around oneDNN's product, operators alone: the same integers, hence at most a rounding apart."""
    weight, bias, rows = weights(outputs, inputs, torch.bfloat16)
    whole = Int8Linear(weight, bias if biased else None)
    around = Int8Linear(weight, bias if biased else None, own=False)
    monkeypatch.setattr(quantized_linear, "kernels", lambda: None)
    without = Int8Linear(weight, bias if biased else None)
    assert not around.native is not None and around.kernels is not None and without.kernels is None
    wanted = without(rows).float()
    loud = rows.float().norm(dim=1, keepdim=True) * weight.float().norm(dim=1).mean()
    for layer in (whole, around):
        assert bool(((layer(rows).float() - wanted).abs() <= 0.01 * loud).all())
        assert float((layer(rows) == without(rows)).float().mean()) > 0.95
        assert torch.equal(layer(rows[:0]), rows.new_empty(0, outputs))


@needs_kernels
@needs_int8
@pytest.mark.parametrize("build", list(BUILDS))
def test_each_processors_product_is_that_of_integers(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    """Small whole numbers, whose sums bfloat16 holds exactly, with the loudest input 127: codes are the numbers."""
    found = Kernels(opened(build)) if build in able(LEVELS[-1]) else None
    if found is None or not found.int8:
        pytest.skip(f"no such product by {build} here")
    monkeypatch.setattr(quantized_linear, "kernels", lambda: found)
    dice = torch.Generator().manual_seed(0)
    for rows in (1, 2, 7, 12, 13, 29):
        numbers = torch.randint(-3, 4, (rows, 40), generator=dice)
        numbers[:, 0], numbers[:, 1] = 127, numbers[:, 1].sign()
        weight = torch.randint(-2, 3, (70, 40), generator=dice)
        weight[:, :2] = torch.tensor([0, 127])
        product = numbers @ weight.t()
        assert int(product.abs().max()) < 256
        assert torch.equal(Int8Linear(weight.bfloat16())(numbers.bfloat16()), product.bfloat16()), rows
