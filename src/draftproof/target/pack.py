"""Linear layers packed for oneDNN: the same bits, sooner. Knows torch's private packing operators, and tests for them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor, nn

ROWS = 8
"""Rows per forward the packing is laid out for; others work as well."""


class PackedLinear(nn.Module):
    """A bfloat16 linear layer on the CPU whose weight lies as oneDNN reads it; the original is freed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = linear.bias.detach() if linear.bias is not None else None

    def forward(self, inputs: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return packed


def pack_linears(model: nn.Module) -> int:
    """Pack every plain bfloat16 linear layer of `model` in place, where that gives the same bits; return how many.

    The originals are given up, page by page: for models loaded here, never for one that a user holds. Weights shared
    with another module (tied embeddings) stay: a packed copy would hold them twice.
    """
    owners = [id(parameter) for module in model.modules() for parameter in module._parameters.values()]
    packed = 0
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Linear and _packable(child) and owners.count(id(child.weight)) == 1:
                layer = PackedLinear(child)
                if packed == 0 and not _same(child, layer):
                    return 0
                module._modules[name] = layer
                _release(child.weight)
                packed += 1
    return packed


def _packable(linear: nn.Linear) -> bool:
    weight = linear.weight
    plain = type(weight.data) is Tensor and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    hooks = linear._forward_hooks or linear._forward_pre_hooks
    return plain and not hooks and torch.backends.mkldnn.is_available() and _supported()  # type: ignore[no-untyped-call]


def _supported() -> bool:
    """Whether this build of torch has the operators."""
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def _release(weight: Tensor) -> None:
    """Let go of the whole pages behind a weight that nobody reads again; the mapped checkpoint would keep them resident."""
    if sys.platform == "linux":
        start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _same(linear: nn.Linear, packed: PackedLinear) -> bool:
    """Whether the packed layer gives the bits of the original, for one row and for several."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 5, linear.in_features, generator=generator).bfloat16()
    with torch.inference_mode():
        return all(torch.equal(linear(part), packed(part)) for part in (inputs, inputs[:, :1]))
