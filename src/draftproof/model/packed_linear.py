"""Linear layers packed: for oneDNN, the same bits sooner, or for our own kernels. Knows torch's private packing operators."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from draftproof.native.build import SWITCH
from draftproof.native.kernels import kernels
from draftproof.native.pages import release
from draftproof.native.structures import Linear, interleaved, plain, rounded

M = TypeVar("M", bound=nn.Module)

ROWS = 8
"""Rows per forward the packing is laid out for; others work as well."""
LARGE = 1 << 26
"""Bytes of linear layers that no cache holds. Reading them from memory is then all that counts, and our kernels take 65 to
95 % of the time (`python -m draftproof.bench.linears`). Smaller models keep the bits of their own layers, unless the
environment says `ALL` or the processor multiplies by tiles: oneDNN then sums a row in another order where there are many."""
ALL = "all"

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers beside each other that read the same inputs."""


class Whole(nn.Module):
    """Linear layers that read the same inputs, multiplied as one; a layer alone is a whole of one."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.out_features = outputs
        self.native: Linear | None = None                               # the layer as our kernels read it, if they do
        self._last: tuple[Tensor, Tensor] | None = None                 # inputs and outputs that parts still wait for

    def part(self, inputs: Tensor, start: int, stop: int) -> Tensor:
        """Outputs `start` to `stop`; the whole is computed for the first part and forgotten with the last."""
        if self._last is None or self._last[0] is not inputs:
            self._last = (inputs, self.forward(inputs))
        outputs = self._last[1][..., start:stop]
        if stop == self.out_features:
            self._last = None
        return outputs


class PackedLinear(Whole):
    """A bfloat16 linear layer on the CPU whose weight lies as it is read; several layers in one if they share inputs.

    free: by our own kernel where there is one, quicker but rounded in another order. By oneDNN otherwise, which gives the
    bits of the originals.
    """

    def __init__(self, *linears: nn.Linear, free: bool = False) -> None:
        weights, biases = [one.weight.detach() for one in linears], [one.bias for one in linears]
        super().__init__(sum(len(weight) for weight in weights))
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.in_features = weight.shape[1]
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases[0] is not None else None
        self.kernels = kernels() if free else None
        if self.kernels is not None and self.kernels.bf16:
            self._added = None if self.bias is None else rounded(self.bias)
            self.weight = interleaved(weight, 2)
            self.native = Linear.of(self.weight, None, self._added, self.in_features, self.out_features)
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kernels is not None and self.native is not None:
            return self.kernels.multiply(self.native, inputs)
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return packed

    def dense(self) -> Tensor:
        """[outputs, inputs] the weight."""
        native = self.native is not None
        weight: Tensor = plain(self.weight, self.in_features, self.out_features) if native else self.weight.to_dense()
        return weight


class PackedSlice(nn.Module):
    """Stands where a layer was that is computed together with its neighbours."""

    def __init__(self, whole: Whole, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, inputs: Tensor) -> Tensor:
        return self.whole.part(inputs, self.start, self.stop)


def pack_linears(model: nn.Module, *, free: bool | None = None) -> int:
    """Pack every plain bfloat16 linear layer of `model` in place; return how many.

    free: in whatever order of rounding is quickest, as for drafters, whose bits nobody reads; None decides (`LARGE`).
    Layers that share their inputs become one. The originals are given up, page by page: for models loaded here, never
    for one that a user holds. Weights shared with another module (tied embeddings) stay: a packed copy would hold them
    twice.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    free = _ours(model) if free is None else free
    packed = 0
    for module in list(model.modules()):
        groups = _groups(module, owners)
        if packed == 0 and groups and not _same(groups[0]):
            return 0
        for names in groups:
            _pack(module, names, free)
            packed += len(names)
    return packed


def _ours(model: nn.Module) -> bool:
    """Whether our kernels are to read a target's layers."""
    found = kernels()
    if found is not None and found.tiles:
        return True
    size = sum(module.weight.nbytes for module in model.modules() if type(module) is nn.Linear)
    return size >= LARGE or os.environ.get(SWITCH) == ALL


def _groups(module: nn.Module, owners: Counter[int]) -> list[dict[str, nn.Linear]]:
    """The layers of a module that can be packed, those together that can be one, by their names."""
    single = {
        name: child
        for name, child in module._modules.items()
        if type(child) is nn.Linear and packable(child) and owners[id(child.weight)] == 1
    }
    return together(single, lambda linear: (linear.in_features, linear.bias is None))


def together(single: Mapping[str, M], form: Callable[[M], object]) -> list[dict[str, M]]:
    """Layers of one module by their names, those of `FUSED` as one group if they are there and of one form."""
    fused = [{name: single[name] for name in names} for names in FUSED if all(name in single for name in names)]
    alike = [group for group in fused if len({form(layer) for layer in group.values()}) == 1]
    grouped = {name for group in alike for name in group}
    return alike + [{name: layer} for name, layer in single.items() if name not in grouped]


def _pack(module: nn.Module, linears: dict[str, nn.Linear], free: bool) -> None:
    """Put packed layers in the place of `linears` of a module."""
    put(module, {name: linear.out_features for name, linear in linears.items()}, PackedLinear(*linears.values(), free=free))
    for linear in linears.values():
        release(linear.weight)


def put(module: nn.Module, outputs: Mapping[str, int], whole: Whole) -> None:
    """Put `whole` in the place of the layers of a module that have these names and so many outputs."""
    start = 0
    for name, width in outputs.items():
        module._modules[name] = PackedSlice(whole, start, start + width) if len(outputs) > 1 else whole
        start += width


def packable(linear: nn.Linear) -> bool:
    """Whether a layer is one that oneDNN can pack, with nothing hooked into it."""
    weight = linear.weight
    plain = type(weight.data) is Tensor and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    hooks = linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__
    return plain and not hooks and torch.backends.mkldnn.is_available() and _supported()  # type: ignore[no-untyped-call]


def _supported() -> bool:
    """Whether this build of torch has the operators."""
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


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
