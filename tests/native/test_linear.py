"""Linear layers by kernels: the product of the definition, and bits that do not depend on what is
read with it, on threads, nor, in 8 bits, on the processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftproof.errors import BadInput
from draftproof.native.build import BUILDS, able, opened
from draftproof.native.kernels import Kernels
from draftproof.native.structures import Native, interleaved, linear, pad_to_strip

SHAPES = [(32, 16), (33, 50), (70, 511), (288, 513), (1200, 48), (32, 2100), (100, 4224)]
DICE = torch.Generator()


@pytest.fixture(scope="module", params=list(BUILDS))
def library(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of each build that this processor can run."""
    if request.param not in able():
        pytest.skip(f"needs {request.param}")
    try:
        return Kernels(opened(request.param))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def in_16_bits(outputs: int, size: int) -> tuple[Native, object, Tensor, int]:
    """A layer, what it reads, its weight, and how many inputs are rounded together: none."""
    weight = torch.randn(outputs, size, generator=DICE).bfloat16()
    held = interleaved(weight, 2)
    return linear(held, None, None, size, outputs), held, weight.double(), 0


def in_8_bits(outputs: int, size: int) -> tuple[Native, object, Tensor, int]:
    """Codes up to the largest, where sums of 16 bits would not do; scales are of 127ths."""
    codes = torch.randint(-128, 128, (outputs, size), generator=DICE, dtype=torch.int8)
    codes[1], codes[2] = 127, -128
    scale = torch.rand(outputs, generator=DICE) / 100
    held = interleaved(codes, 4).view(torch.uint8).bitwise_xor(128), pad_to_strip(scale)
    return linear(*held, None, size, outputs), held, 127 * codes.double() * scale[:, None], size


def in_codes(inputs: Tensor, together: int) -> Tensor:
    """Inputs as the kernels round them, so many together."""
    if not together:
        return inputs.double()
    parts = pad(inputs.float(), (0, -inputs.shape[1] % together)).view(len(inputs), -1, together)
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    codes = (parts * (127 / largest) + 128.5).floor() - 128
    return (codes * (largest.double() / 127)).view(len(inputs), -1)[:, : inputs.shape[1]]


@pytest.mark.parametrize(("outputs", "size"), SHAPES)
@pytest.mark.parametrize("kind", [in_16_bits, in_8_bits])
def test_products_are_those_of_the_definition_whatever_is_read_next_to(
    library: Kernels, kind: Callable[..., tuple[Native, object, Tensor, int]], outputs: int,
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    DICE.manual_seed(outputs)
    layer, _held, dense, together = kind(outputs, size)
    inputs = torch.randn(130, size, generator=DICE).bfloat16()
    inputs[4], inputs[5], inputs[6, size // 2] = 1, -1, 1000        # of which one is loud
    whole, read = library.multiply(layer, inputs), in_codes(inputs, together)
    wanted, spread = read @ dense.t(), read.norm(dim=1, keepdim=True) * dense.norm(dim=1)
    assert bool(((whole.double() - wanted).abs() <= wanted.abs() / 250 + spread / 1000).all())
    if together:
        assert torch.equal(whole, Kernels(opened(able()[0])).multiply(layer, inputs))
    for start, many in ((0, 1), (5, 2), (3, 4), (7, 8), (3, 9), (17, 12), (40, 13), (1, 64),
                        (20, 110)):
        sample = slice(start, start + many)
        assert torch.equal(library.multiply(layer, inputs[sample]), whole[sample]), many
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(library.multiply(layer, inputs[:30]), whole[:30]), threads


@pytest.mark.parametrize(("outputs", "size"), SHAPES)
def test_sums_of_whole_numbers_are_exact(library: Kernels, outputs: int, size: int) -> None:
    """Small whole numbers, whose sums single precision holds exactly in any order: only the
    last rounding is left."""
    DICE.manual_seed(0)
    weight = torch.randint(-4, 5, (outputs, size), generator=DICE).float()
    bias = torch.randint(-9, 10, (outputs,), generator=DICE).float()
    held, added = interleaved(weight.bfloat16(), 2), pad_to_strip(bias.bfloat16())
    for rows in (0, 1, 2, 11, 12, 13, 16, 17, 25, 60, 97, 121, 145):
        inputs = torch.randint(-4, 5, (rows, size), generator=DICE).float()
        for padded, ours in ((None, None), (added, bias)):
            layer = linear(held, None, padded, size, outputs)
            wanted = torch.nn.functional.linear(inputs, weight, ours).bfloat16()
            assert torch.equal(library.multiply(layer, inputs.bfloat16()), wanted), rows


def test_inputs_that_are_not_the_layers_are_refused(library: Kernels) -> None:
    layer, _held, *_ = in_16_bits(32, 64)
    for inputs in (torch.zeros(2, 64), torch.zeros(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(BadInput, match="64 inputs in bfloat16"):
            library.multiply(layer, inputs)
