"""Linear layers packed for oneDNN: the same bits, sooner. Knows torch's private packing operators, and tests for them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import Counter

import torch
from torch import Tensor, nn

ROWS = 8
"""Rows per forward the packing is laid out for; others work as well."""


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers beside each other that read the same inputs."""


class PackedLinear(nn.Module):
    """A bfloat16 linear layer on the CPU whose weight lies as oneDNN reads it; several layers in one if they share inputs."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weights, biases = [one.weight.detach() for one in linears], [one.bias for one in linears]
        self.out_features = sum(len(weight) for weight in weights)
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases[0] is not None else None
        self._last: tuple[Tensor, Tensor] | None = None                 # inputs and outputs that parts still wait for

    def forward(self, inputs: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return packed

    def part(self, inputs: Tensor, start: int, stop: int) -> Tensor:
        """Outputs `start` to `stop`; the whole is computed for the first part and forgotten with the last."""
        if self._last is None or self._last[0] is not inputs:
            self._last = (inputs, self.forward(inputs))
        outputs = self._last[1][..., start:stop]
        if stop == self.out_features:
            self._last = None
        return outputs


class PackedPart(nn.Module):
    """Stands where a layer was that is computed together with its neighbours."""

    def __init__(self, whole: PackedLinear, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, inputs: Tensor) -> Tensor:
        return self.whole.part(inputs, self.start, self.stop)


def pack_linears(model: nn.Module) -> int:
    """Pack every plain bfloat16 linear layer of `model` in place, where that gives the same bits; return how many.

    Layers that share their inputs become one. The originals are given up, page by page: for models loaded here, never
    for one that a user holds. Weights shared with another module (tied embeddings) stay: a packed copy would hold them
    twice.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    packed = 0
    for module in list(model.modules()):
        groups = _groups(module, owners)
        if packed == 0 and groups and not _same(groups[0]):
            return 0
        for names in groups:
            _pack(module, names)
            packed += len(names)
    return packed


def _groups(module: nn.Module, owners: Counter[int]) -> list[dict[str, nn.Linear]]:
    """The layers of a module that can be packed, those together that can be one, by their names."""
    single = {
        name: child
        for name, child in module._modules.items()
        if type(child) is nn.Linear and _packable(child) and owners[id(child.weight)] == 1
    }
    together = [{name: single[name] for name in names} for names in FUSED if _alike([single.get(name) for name in names])]
    grouped = {name for group in together for name in group}
    return together + [{name: child} for name, child in single.items() if name not in grouped]


def _alike(linears: list[nn.Linear | None]) -> bool:
    """Whether these are layers that one matrix can stand for."""
    forms = {(one.in_features, one.bias is None) if one is not None else None for one in linears}
    return len(forms) == 1 and None not in forms


def _pack(module: nn.Module, linears: dict[str, nn.Linear]) -> None:
    """Put packed layers in the place of `linears` of a module."""
    whole = PackedLinear(*linears.values())
    start = 0
    for name, linear in linears.items():
        stop = start + linear.out_features
        module._modules[name] = PackedPart(whole, start, stop) if len(linears) > 1 else whole
        start = stop
        _release(linear.weight)


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


def _same(linears: dict[str, nn.Linear]) -> bool:
    """Whether packed layers give the bits of the originals, for one row and for several."""
    first = next(iter(linears.values()))
    inputs = torch.randn(1, 5, first.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = PackedLinear(*linears.values())
    with torch.inference_mode():
        return all(
            torch.equal(torch.cat([one(part) for one in linears.values()], -1), packed(part))
            for part in (inputs, inputs[:, :1])
        )
