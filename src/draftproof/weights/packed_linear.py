"""bfloat16 linear layers in the layout of our C kernels. Knows nothing of models.

Without kernels nothing is packed, and torch's own layers are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from draftproof.native.kernels import kernels
from draftproof.native.pages import release
from draftproof.native.structures import (
    Native,
    interleaved,
    linear,
    pad_to_strip,
    strip_rows,
    unpack,
)

M = TypeVar("M", bound=nn.Module)

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Neighbouring layers that read the same inputs."""
CROSSED = ("encoder_attn", "cross_attn")
"""Modules in which keys and values read an encoder's output instead."""


class JointLinear(nn.Module):
    """One or several linear layers that read the same inputs, multiplied as one.

    native: the form our kernels read, made from weight, scales and padded_bias, if there are
    `kernels`.
    """

    weight: Tensor

    def __init__(self, inputs: int, outputs: int, bias: Tensor | None, native: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = inputs, outputs, bias
        self.kernels = kernels() if native else None
        self.padded_bias = None if bias is None else pad_to_strip(bias.bfloat16())
        self.scales: Tensor | None = None
        self.native: Native | None = None
        self._last: tuple[Tensor, Tensor] | None = None     # inputs, and outputs for later slices

    def connect(self) -> None:
        """Pass the addresses of all tensors to our kernels."""
        if self.kernels is not None:
            self.native = linear(
                self.weight, self.scales, self.padded_bias, self.in_features, self.out_features
            )

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return bytes_of(self.weight, self.scales, self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.kernels is not None and self.native is not None
        return self.kernels.multiply(self.native, inputs.bfloat16()).to(inputs.dtype)

    def dense(self) -> Tensor:
        """[outputs, inputs] the weight, if it was not rounded."""
        raise NotImplementedError

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows of the weight.

        Args:
            numbers: [...] int64 indices of outputs.

        Returns:
            [..., inputs] float32.
        """
        raise NotImplementedError

    def part(self, inputs: Tensor, start: int, stop: int) -> Tensor:
        """Outputs `start` to `stop`; all are computed for the first slice and kept until the last.
        """
        if self._last is None or self._last[0] is not inputs:
            self._last = (inputs, self.forward(inputs))
        outputs = self._last[1][..., start:stop]
        if stop == self.out_features:
            self._last = None
        return outputs


class PackedLinear(JointLinear):
    """bfloat16 linear layers for our kernels. A token's outputs have the same bits whatever is read
    with it."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Pack weights [outputs, inputs], whose outputs are joined in order, and their bias."""
        super().__init__(weights[0].shape[1], sum(map(len, weights)), bias)
        self.weight = interleaved(weights, 2)
        self.connect()

    @classmethod
    def joining(cls, *linears: nn.Linear) -> PackedLinear:
        """Join layers that read the same inputs."""
        biases = [linear.bias for linear in linears]
        bias = (
            torch.cat([bias_part.detach() for bias_part in biases])
            if biases[0] is not None
            else None
        )
        return cls([linear.weight.detach() for linear in linears], bias)

    def dense(self) -> Tensor:
        return unpack(self.weight, self.in_features, self.out_features)

    def rows(self, numbers: Tensor) -> Tensor:
        return strip_rows(self.weight, numbers, self.in_features)


class PackedSlice(nn.Module):
    """Replaces a layer that is computed together with its neighbours."""

    def __init__(self, whole: JointLinear, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop
        self.out_features = stop - start

    @property
    def bias(self) -> Tensor | None:
        return None if self.whole.bias is None else self.whole.bias[self.start : self.stop]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.whole.part(inputs, self.start, self.stop)

    def dense(self) -> Tensor:
        return self.whole.dense()[self.start : self.stop]


def pack_linears(model: nn.Module) -> int:
    """Pack every plain bfloat16 linear layer of `model` in place; return how many, 0 without
    kernels.

    Only for models loaded here, never for a user's: the originals are released page by page; of
    embeddings tied to the head, only looked-up rows are read from the file again.
    """
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    packed = 0
    for place, module in list(model.named_modules()):
        single = {name: child for name, child in module._modules.items()
                  if isinstance(child, nn.Linear) and packable(child)}
        groups = [{name: child} for name, child in single.items()]
        if not place.endswith(CROSSED):
            groups = fusable_groups(
                single, lambda linear: (linear.in_features, linear.bias is None))
        for group in groups:
            widths = {name: linear.out_features for name, linear in group.items()}
            replace_modules(module, widths, PackedLinear.joining(*group.values()))
            for layer in group.values():
                release(layer.weight, read_again=owners[id(layer.weight)] > 1)
            packed += len(group)
    return packed


def packable(linear: nn.Linear) -> bool:
    """Whether a layer is a plain bfloat16 matrix without hooks, on a CPU with kernels."""
    weight = linear.weight
    plain = type(linear) is nn.Linear and type(weight.data) is Tensor
    cpu_bf16 = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    hooks = linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__
    return plain and cpu_bf16 and not hooks and kernels() is not None


def fusable_groups(single: Mapping[str, M], form: Callable[[M], object]) -> list[dict[str, M]]:
    """Group a module's layers by name; those of `JOINED` are a group if all exist with one form.
    """
    joined = [{name: single[name] for name in names}
              for names in JOINED if all(name in single for name in names)]
    alike = [group for group in joined if len({form(layer) for layer in group.values()}) == 1]
    grouped = {name for group in alike for name in group}
    return alike + [{name: layer} for name, layer in single.items() if name not in grouped]


def replace_modules(module: nn.Module, outputs: Mapping[str, int], whole: JointLinear) -> None:
    """Replace a module's layers of these names and widths by `whole`."""
    start = 0
    for name, width in outputs.items():
        slice_ = PackedSlice(whole, start, start + width) if len(outputs) > 1 else whole
        module._modules[name] = slice_
        start += width


def bytes_of(*tensors: Tensor | None) -> int:
    """The size of tensors in bytes; a tensor made of tensors counts as these."""
    total = 0
    for tensor in tensors:
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is not None:
            total += bytes_of(*(getattr(tensor, name) for name in inner()[0]))
        elif tensor is not None:
            total += tensor.nbytes
    return total
