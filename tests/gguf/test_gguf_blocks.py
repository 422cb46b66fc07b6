"""Stored tensors: sizes of blocks, and the numbers they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from draftproof.gguf.blocks import PLAIN, BlockTensor, block_tensor, dequantize
from draftproof.gguf.types import BLOCK_SIZES, TYPE_NAMES


def stored(type: str, rows: int, width: int) -> BlockTensor:
    """Random weights as the package `gguf` quantises them, or random bytes where it cannot."""
    numbers = np.random.default_rng(5).normal(size=(rows, width)).astype(np.float32)
    try:
        data = quants.quantize(numbers, GGMLQuantizationType[type])
    except NotImplementedError:
        size = BLOCK_SIZES[type]
        data = np.random.default_rng(5).integers(
            0, 60, (rows, width // size.weights * size.nbytes), dtype=np.uint8
        )
    data = np.ascontiguousarray(data).view(np.uint8)
    return block_tensor(type, (rows, width), torch.from_numpy(data))


def test_block_sizes_and_type_numbers_are_those_of_ggml() -> None:
    for number, name in TYPE_NAMES.items():
        assert GGMLQuantizationType(number).name == name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == BLOCK_SIZES[name]
    assert set(TYPE_NAMES.values()) == set(BLOCK_SIZES)


@pytest.mark.parametrize("type", sorted(set(BLOCK_SIZES) - set(PLAIN)))
def test_blocks_dequantise_as_in_ggml(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftproof.gguf.blocks._CHUNK", 512)       # several chunks, one smaller
    tensor = stored(type, 7, 256)
    wanted = quants.dequantize(tensor.data.numpy(), GGMLQuantizationType[type])
    assert torch.equal(dequantize(tensor), torch.from_numpy(wanted))
    assert torch.equal(dequantize(tensor, torch.bfloat16), torch.from_numpy(wanted).bfloat16())


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_plain_numbers_are_kept(type: str) -> None:
    numbers = torch.randn(3, 4, 5).to(PLAIN[type])
    tensor = block_tensor(type, (3, 4, 5), numbers.view(torch.uint8))
    assert tensor.data.shape == (12, 5 * numbers.itemsize)
    assert torch.equal(dequantize(tensor), numbers.float())
    scalar = block_tensor("F32", (), torch.tensor([2.5]).view(torch.uint8))
    assert torch.equal(dequantize(scalar), torch.tensor(2.5))


def test_rows_are_chosen_without_unpacking() -> None:
    tensor = stored("Q4_0", 6, 64)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(dequantize(tensor.rows(order)), dequantize(tensor)[order])
    part = tensor.rows(slice(2, 4))
    assert torch.equal(dequantize(part), dequantize(tensor)[2:4])
    assert part.data.data_ptr() == tensor.data[2:].data_ptr()


def test_blocks_are_unpacked_in_inference_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.gguf.blocks._CHUNK", 512)
    tensor = stored("Q8_0", 40, 64)
    wanted = dequantize(tensor)
    with torch.inference_mode():
        assert torch.equal(dequantize(tensor), wanted)
