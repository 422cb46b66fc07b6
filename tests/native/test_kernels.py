"""What small kernels compute, against torch; layouts of weights."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import pytest
import torch

from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.kernels import kernels
from draftproof.native.structures import QUANTIZED, interleaved, unpack


@pytest.mark.parametrize(("dtype", "fold"), [(torch.bfloat16, 2), (torch.int8, 4)])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (33, 50), (288, 768)])
def test_interleaving_is_reversible(
    outputs: int, inputs: int, dtype: torch.dtype, fold: int
) -> None:
    weight = (100 * torch.rand(outputs, inputs)).to(dtype)
    packed = interleaved(weight, fold)
    assert packed.shape[2:] == (32, fold) and packed.is_contiguous()
    assert torch.equal(unpack(packed, inputs, outputs), weight)


@pytest.mark.skipif(kernels() is None, reason="no library here")
@pytest.mark.parametrize(
    ("gelu", "opened"),
    [
        (False, torch.nn.functional.silu),
        (True, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
    ],
    ids=["silu", "gelu"],
)
def test_gate_activation_is_exact_for_extreme_inputs(
    gelu: bool, opened: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Far below zero nothing, however far: exponentials there are beyond any number."""
    library = kernels()
    assert library is not None
    for sign in (-1, 1):
        gate = sign * torch.logspace(-2, 38, 1600).bfloat16()
        up, out = torch.full_like(gate, 2.0), torch.empty_like(gate)
        library("gate", torch.cat([gate, up]), out, gelu, 1, len(gate))
        torch.testing.assert_close(
            out, opened(gate.float()).bfloat16() * up, rtol=0.01, atol=1e-3 if gelu else 1e-30
        )
    broken = torch.cat([torch.full((16,), torch.nan), torch.ones(16)]).bfloat16()
    library("gate", broken, out, gelu, 1, 16)
    assert out[:16].isnan().all()


@pytest.mark.skipif(kernels() is None, reason="no library here")
@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as Linux does it")
@pytest.mark.parametrize("format", QUANTIZED)
def test_nothing_is_read_after_the_last_weight(format: str) -> None:
    """A matrix of a single block, at the end of memory; a read beyond it ends the process."""
    library, size, page = kernels(), BLOCK_SIZES[format], mmap.PAGESIZE
    assert library is not None
    memory = mmap.mmap(-1, 2 * page)
    weights = torch.frombuffer(
        memory, dtype=torch.float32, count=size.weights, offset=page - 4 * size.weights
    ).view(1, -1)
    weights.copy_(torch.randn(1, size.weights, generator=torch.Generator().manual_seed(0)))
    end = ctypes.c_void_p(weights.data_ptr() + weights.nbytes)
    blocks = torch.zeros(1, size.nbytes, dtype=torch.uint8)
    child = os.fork()
    if not child:
        try:
            ctypes.CDLL(None).mprotect(end, page, 0)
            library("quantize", QUANTIZED.index(format), weights, 1, size.weights, blocks)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
