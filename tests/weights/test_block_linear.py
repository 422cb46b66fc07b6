"""Layers and token tables in the block formats of GGUF files."""

from __future__ import annotations

import pytest
import torch
from blocks import in_codes, random_blocks

from draftproof.errors import BadInput
from draftproof.gguf.blocks import BlockTensor, dequantize
from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.formats import FORMATS
from draftproof.native.kernels import kernels
from draftproof.weights import block_linear
from draftproof.weights.block_linear import BlockLinear, BlockTable


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With our kernels, and without."""
    if request.param and kernels() is None:
        pytest.skip("there are no kernels here")
    if not request.param:
        monkeypatch.setattr(block_linear, "kernels", lambda: None)
        monkeypatch.setattr("draftproof.weights.packed_linear.kernels", lambda: None)
    return bool(request.param)


def numbers(type: str, weight: torch.Tensor) -> BlockTensor:
    return BlockTensor(type, tuple(weight.shape), weight.contiguous().view(torch.uint8))


def test_parts_of_any_formats_are_multiplied_side_by_side(native: bool) -> None:
    plain = torch.randn(48, 512)
    parts = [random_blocks("Q4_K", 70, 512), random_blocks("Q6_K", 32, 512, seed=1),
             numbers("F32", plain), numbers("F16", plain.half())]
    bias = torch.randn(70 + 32 + 48 + 48).bfloat16()
    layer = BlockLinear.from_blocks(parts, bias)
    dense = [dequantize(part) for part in parts[:2]] + [plain.bfloat16().float(),
                                                        plain.half().bfloat16().float()]
    assert torch.equal(layer.dense(), torch.cat(dense).bfloat16())
    inputs = torch.randn(3, 5, 512).bfloat16()
    rows = inputs.view(15, 512)
    read = in_codes(rows) if native else rows.double()
    wanted = torch.cat([read @ torch.cat(dense[:2]).double().T,
                        rows.double() @ torch.cat(dense[2:]).double().T], 1) + bias.double()
    outputs = layer(inputs)
    assert outputs.dtype == torch.bfloat16 and outputs.shape == (3, 5, 198)
    torch.testing.assert_close(outputs.double().view(15, -1), wanted, rtol=0.01, atol=0.05)
    assert torch.equal(layer(inputs[1, 2]), outputs[1, 2])
    assert torch.equal(BlockLinear.restored(layer.state)(inputs), outputs)
    stored = sum(part.nbytes for part in parts[:2])
    assert layer.nbytes <= stored * 1.4 + 2 * 64 * 512 * 2 + 4096


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", "F16", "F32"])
def test_token_embeddings_are_looked_up_in_blocks(native: bool, format: str) -> None:
    weight = torch.randn(100, 512)
    table = (numbers(format, weight.to(torch.float16 if format == "F16" else torch.float32))
             if format[0] == "F" else random_blocks(format, 100, 512))
    tokens = torch.tensor([[3, 99, 0], [3, 64, 31]])
    wanted = dequantize(table).bfloat16()[tokens]
    embeddings = BlockTable(table, torch.bfloat16)
    assert embeddings.shape == (100, 512)
    assert torch.equal(embeddings.rows(tokens), wanted)
    assert embeddings.rows(tokens[:0]).shape == (0, 3, 512)


@pytest.mark.parametrize("format", [*FORMATS, "F32"])
def test_rows_of_a_matrix_are_looked_up(native: bool, format: str) -> None:
    stored = (numbers(format, torch.randn(70, 512)) if format == "F32"
              else random_blocks(format, 70, 512))
    layer = BlockLinear.from_blocks([stored], None)
    rows = torch.tensor([[3, 69], [0, 64]])
    wanted = dequantize(stored)[rows]
    wanted = wanted.bfloat16().float() if format == "F32" else wanted
    assert torch.equal(layer.rows(rows), wanted)


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_look_embeddings_up_in_the_blocks_of_the_file(format: str) -> None:
    inputs = 288 if BLOCK_SIZES[format].weights == 32 else 512       # not all spans are complete
    stored, library = random_blocks(format, 70, inputs), kernels()
    table = BlockTable(stored, torch.bfloat16).native
    assert library is not None and table is not None
    tokens = torch.tensor([3, 69, 0, 3, -1, 70])
    tensor = torch.empty(6, inputs, dtype=torch.bfloat16)
    library("embed", table, tokens, 6, tensor)
    assert torch.equal(tensor, dequantize(stored).bfloat16()[tokens.clamp(0, 69)])


def test_rare_formats_are_unpacked_to_bfloat16(native: bool) -> None:
    data = torch.randint(0, 256, (8, 66), dtype=torch.uint8)
    data[:, 64:66] = torch.full((8, 1), 0.01).half().view(torch.uint8)
    tensor = BlockTensor("TQ2_0", (8, 256), data)
    layer = BlockLinear.from_blocks([tensor], None)
    assert torch.equal(layer.dense(), dequantize(tensor).bfloat16())


def test_matrices_of_different_inputs_are_refused() -> None:
    with pytest.raises(BadInput, match="do not read the same inputs"):
        BlockLinear.from_blocks([random_blocks("Q4_K", 8, 256), random_blocks("Q4_K", 8, 512)],
                                None)


@pytest.mark.skipif(kernels() is None, reason="blocks are packed for kernels")
def test_a_matrix_is_packed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed is let go of before the rest is read, and the result is the same."""
    library, tensor = kernels(), random_blocks("Q6_K", 150, 512)
    assert library is not None
    whole = block_linear.pack_blocks(tensor, library)
    parts = list[torch.Tensor]()
    monkeypatch.setattr(block_linear, "PACKED", 1)
    assert torch.equal(block_linear.pack_blocks(tensor, library, parts.append), whole)
    assert [len(part) for part in parts] == [32, 32, 32, 32, 22]
    assert torch.equal(torch.cat(parts), tensor.data)
