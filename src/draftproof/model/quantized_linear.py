"""Linear layers in 8 or 4 bits on a CPU. Knows our kernels and torch's private ones, and tests for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.model.packed_linear import Whole
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.structures import LANES, Linear, interleaved, rounded

GROUP = 32
"""Weights that share a scale in 4 bits."""
CHUNK = 1 << 22
"""Weights quantised at a time, so that a large table needs no second copy."""
TRIES = 8
"""How often a kernel that seems slow is timed again: something else may have run just then."""


class Int8Linear(Whole):
    """Weights in 8 bits with a scale per output, activations in 8 bits with a scale per token, made as they come.

    The sums are of integers, so a token's outputs are the same bits whatever is read beside it. In bfloat16 the kernel is
    ours, as quick as the weights can be read, and oneDNN's elsewhere. There activations lie around 128 in unsigned bytes:
    signed ones have no fast product without AMX. own: by our kernel, where there is one; without it, always oneDNN's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, own: bool = True) -> None:
        super().__init__(len(weight))
        codes, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        for rows in _chunks(weight):
            scale[rows] = weight[rows].abs().amax(1).float().clamp(min=1e-30) / 127
            codes[rows] = (weight[rows] / scale[rows, None]).round_().to(torch.int8)
        self.in_features, self.bias = weight.shape[1], None if bias is None else bias.to(weight.dtype)
        self.scale, self.offset = scale / 127, torch.zeros(len(weight), dtype=torch.int32)
        self.kernels = kernels() if weight.dtype == torch.bfloat16 else None
        if own and self.kernels is not None and self.kernels.int8:
            self.scale, self._added = rounded(self.scale), None if self.bias is None else rounded(self.bias)
            self.weight = interleaved(codes, 4).view(torch.uint8).bitwise_xor_(128)
            self.native = Linear.of(self.weight, self.scale, self._added, self.in_features, self.out_features)
        else:
            self.weight = torch.ops.onednn.qlinear_prepack(codes, None)
        self._most = torch.tensor([127.0])

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kernels is not None and self.native is not None:
            return self.kernels.multiply(self.native, inputs)
        if self.kernels is None or self.in_features % LANES or self.out_features % LANES:
            return self._by_torch(inputs)
        return self._by_both(self.kernels, inputs.contiguous())

    def _by_both(self, kernels: Kernels, inputs: Tensor) -> Tensor:
        rows, threads = inputs.numel() // self.in_features, torch.get_num_threads()
        codes, most = torch.empty(inputs.shape, dtype=torch.uint8), torch.empty(rows)
        kernels.codes(inputs.data_ptr(), codes.data_ptr(), most.data_ptr(), rows, self.in_features, threads)
        products, outputs = self._product(codes), inputs.new_empty(*inputs.shape[:-1], self.out_features)
        bias = None if self.bias is None else self.bias.data_ptr()
        kernels.scaled(products.data_ptr(), most.data_ptr(), bias, outputs.data_ptr(), rows, self.out_features, threads)
        return outputs

    def _by_torch(self, inputs: Tensor) -> Tensor:
        most = inputs.abs().amax(-1, keepdim=True)                                  # [..., 1]
        codes = (inputs * (self._most / most)).add_(128.5).to(torch.uint8)          # to the nearest, by cutting off
        outputs = self._product(codes).mul_(most)
        return (outputs if self.bias is None else outputs.add_(self.bias)).to(inputs.dtype)

    def _product(self, codes: Tensor) -> Tensor:
        """[..., outputs] float32, but for the scale of the activations."""
        multiply = torch.ops.onednn.qlinear_pointwise.default
        product: Tensor = multiply(
            codes, 1.0, 128, self.weight, self.scale, self.offset, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return int(self.weight.numel()) + bytes_of(self.scale, self.offset, self.bias)


class Int4Linear(Whole):
    """Weights in 4 bits with a scale and an offset per `GROUP` of inputs; activations as they are.

    Quick for one token and slower with every token more: for drafting rather than for verifying.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(len(weight))
        codes, scales = zip(*(_four_bits(weight[rows]) for rows in _chunks(weight)), strict=True)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.cat(codes), 1)
        self.scales = torch.cat(scales, 1)                                          # [groups, outputs, 2]
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).to(self.scales.dtype).contiguous()
        outputs: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(rows, self.weight, GROUP, self.scales)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features).to(inputs.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return bytes_of(self.weight, self.scales, self.bias)


@cache
def works(layer: Callable[[Tensor], nn.Module]) -> bool:
    """Whether the kernels exist, are right where the sums are largest, and are not the slow reference in bfloat16."""
    dice = torch.Generator().manual_seed(0)
    for weight, inputs in (
        (torch.ones(64, 256), torch.ones(8, 256)),              # without wide sums in hardware these overflow
        (torch.randn(64, 256, generator=dice), torch.randn(8, 256, generator=dice)),
    ):
        try:
            made = layer(weight)
            outputs = made(inputs)
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
        truth = F.linear(inputs, weight)
        if not (outputs - truth).norm() <= 0.15 * truth.norm():
            return False
    made, weight, inputs = layer(weight.bfloat16()), weight.bfloat16(), inputs.bfloat16()
    with _alone():
        tries = ((_seconds(lambda: made(inputs)), _seconds(lambda: F.linear(inputs, weight))) for _ in range(TRIES))
        return any(seconds < 50 * plainly for seconds, plainly in tries)


@contextmanager
def _alone() -> Iterator[None]:
    """By one thread: on a busy machine several wait for each other a hundred times as long as they multiply."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes held; a tensor made of tensors holds those."""
    total = 0
    for tensor in tensors:
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is not None:
            total += bytes_of(*(getattr(tensor, name) for name in inner()[0]))
        elif tensor is not None:
            total += tensor.numel() * tensor.element_size()
    return total


def _chunks(weight: Tensor) -> list[slice]:
    """Rows of a weight, some at a time."""
    rows = max(1, CHUNK // weight.shape[1])
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 [outputs, inputs], and scale and offset of each group [groups, outputs, 2]: w = (code - 8) s + z."""
    dtype = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    grouped = weight.float().view(len(weight), -1, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)                                  # [outputs, groups]
    scale = ((high - low) / 15).clamp(min=1e-6).to(dtype)
    offset = (low + 8 * scale.float()).to(dtype)
    codes = ((grouped - offset[..., None]) / scale[..., None]).round_().clamp_(-8, 7) + 8
    return codes.view(weight.shape).to(torch.int32), torch.stack([scale, offset], -1).transpose(0, 1).contiguous()


def _seconds(work: Callable[[], object]) -> float:
    """The best of a few."""
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
