"""Products with the block formats of GGUF files: those of the definition, with bits that depend
neither on other rows, nor on threads, nor on the processor."""

from __future__ import annotations

import pytest
import torch
from blocks import in_codes, random_blocks

from draftproof.gguf.blocks import dequantize
from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.build import BUILDS, able, opened
from draftproof.native.formats import FORMATS
from draftproof.native.kernels import Kernels
from draftproof.native.structures import (
    block_linear,
    interleaved,
    joint_linear,
    linear,
    pad_to_strip,
)
from draftproof.weights.block_linear import pack_blocks


@pytest.fixture(scope="module", params=list(BUILDS))
def library(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of each build that this processor can run."""
    if request.param not in able():
        pytest.skip(f"needs {request.param}")
    try:
        return Kernels(opened(request.param))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def sizes(format: str) -> list[tuple[int, int]]:
    """Outputs and inputs: ragged in both where the format allows it."""
    if BLOCK_SIZES[format].weights == 32:
        return [(33, 32), (70, 352), (32, 1056), (160, 256)]
    return [(33, 256), (70, 768), (160, 1280)]


@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_the_blocks_whatever_is_read_next_to(
    library: Kernels, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outputs, size in sizes(format):
        tensor = random_blocks(format, outputs, size)
        records = pack_blocks(tensor, library)
        layer = block_linear(format, records, None, size, outputs)
        inputs = torch.randn(150, size).bfloat16()
        inputs[4], inputs[5], inputs[6, size // 2], inputs[7] = 1, -1, 1000, 0
        whole, dense = library.multiply(layer, inputs), dequantize(tensor).double()
        exact, spread = in_codes(inputs), in_codes(inputs).norm(dim=1, keepdim=True)
        wanted = exact @ dense.T
        error = (whole.double() - wanted).abs()
        assert bool((error <= wanted.abs() / 250 + spread * dense.norm(dim=1) / 1000).all())
        assert torch.equal(whole, Kernels(opened(able()[0])).multiply(layer, inputs))
        for start, many in ((0, 1), (5, 2), (3, 3), (7, 5), (4, 8), (17, 9), (40, 16), (1, 64),
                            (12, 130)):
            rows = slice(start, start + many)
            assert torch.equal(library.multiply(layer, inputs[rows]), whole[rows]), many
        for threads in (1, 2, 3, 7):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert torch.equal(library.multiply(layer, inputs[:30]), whole[:30]), threads
        monkeypatch.undo()


@pytest.mark.parametrize("format", FORMATS)
def test_row_values_equal_the_file(library: Kernels, format: str) -> None:
    for outputs, size in sizes(format):
        tensor = random_blocks(format, outputs, size, seed=1)
        records = pack_blocks(tensor, library)
        layer = block_linear(format, records, None, size, outputs)
        numbers = torch.tensor([0, outputs - 1, 3, 1, 2, -5, outputs + 9, *range(outputs)])
        values = torch.empty(len(numbers), size)
        library("block_rows", layer, numbers, len(numbers), values)
        wanted = dequantize(tensor)[numbers.clamp(0, outputs - 1)]
        assert torch.equal(values, wanted)


def test_parts_of_different_formats_are_one_layer(library: Kernels) -> None:
    size, parts, held, layers = 512, [("Q4_K", 70), ("Q6_K", 32), ("Q8_0", 5)], [], []
    bias = torch.randn(70 + 32 + 5 + 40).bfloat16()
    biases = [pad_to_strip(part) for part in torch.split(bias, [70, 32, 5, 40])]
    for number, (format, outputs) in enumerate(parts):
        held.append(pack_blocks(random_blocks(format, outputs, size, seed=number), library))
        layers.append(block_linear(format, held[-1], biases[number], size, outputs))
    held.append(interleaved(torch.randn(40, size).bfloat16(), 2))
    layers.append(linear(held[-1], None, biases[-1], size, 40))
    joint = joint_linear(layers)
    for rows in (1, 7, 33, 200):
        inputs = torch.randn(rows, size).bfloat16()
        alone = torch.cat([library.multiply(layer, inputs) for layer in layers], 1)
        assert torch.equal(library.multiply(joint, inputs), alone)


def test_nan_activations_affect_their_row_only(library: Kernels) -> None:
    tensor = random_blocks("Q4_K", 64, 512)
    records = pack_blocks(tensor, library)
    layer = block_linear("Q4_K", records, None, 512, 64)
    inputs = torch.randn(9, 512).bfloat16()
    good = library.multiply(layer, inputs)
    inputs[3, 100] = torch.nan
    spoilt = library.multiply(layer, inputs)
    assert bool(spoilt[3].isnan().all())
    rest = [0, 1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(spoilt[rest], good[rest])
