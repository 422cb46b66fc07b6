"""Structures that describe a model to the kernels, and the layouts of its weights. Knows no
functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.native.pages import enlarge

STRIP, WORDS = 32, 16
"""Outputs of a linear layer made at a time, and what its inputs, in words of 32 bits, are rounded
up to."""
LANES = 16
"""Numbers the kernels reckon with at a time, at most: where activations are read as they lie, there
is a multiple of it."""
GROUP, PART, BLOCK = 32, 128, 256
"""Weights of 4 bits that share a step and a base; activations, and weights, that share a scale."""


def _fields(pointers: str, numbers: str = "", floats: str = "") -> tuple[tuple[str, type], ...]:
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (floats, ctypes.c_float))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


class Read(ctypes.Structure):
    """What all layers of one read share; as in model.h."""

    _fields_ = (
        *_fields("", "rows nodes first heads key_heads head_dim capacity"),
        *_fields("", "window context threads turned stores"),
        *_fields("lengths parents cosines sines starts which", "", "scale"),
    )


class Linear(ctypes.Structure):
    """A linear layer; as in model.h."""

    _fields_ = (*_fields("weights scale bias", "size padded outputs"), *_fields("blocks"))

    @classmethod
    def of(
        cls, weights: Tensor, scale: Tensor | None, bias: Tensor | None, size: int, outputs: int
    ) -> Linear:
        """weights as `interleaved` made them; scale and bias of as many outputs. The caller keeps
        them alive."""
        places = (None if one is None else one.data_ptr() for one in (weights, scale, bias))
        return cls(*places, size, size + -size % (WORDS * 4 // weights.element_size()), outputs)

    @classmethod
    def of_4_bits(
        cls, weights: Tensor, scales: Tensor, bias: Tensor | None, size: int, outputs: int
    ) -> Linear:
        """weights and scales as `nibbles` made them. The caller keeps them alive."""
        places = (weights.data_ptr(), None, None if bias is None else bias.data_ptr())
        return cls(*places, size, size + -size % PART, outputs, scales.data_ptr())


class Norm(ctypes.Structure):
    """How norms are made, and sums; as in model.h."""

    _fields_ = _fields("", "", "epsilon share")


class Layer(ctypes.Structure):
    """One layer of a model; as in model.h."""

    _fields_ = (
        *((name, Linear) for name in ("inner", "output", "gate_up", "down")),
        *_fields("before after query key mixed fed", "way"),
    )


class Model(ctypes.Structure):
    """A model: its layers, and what lies between these and tokens; as in model.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)), *_fields("", "count vocab ways gelu"),
        *_fields("last embeddings"), ("head", ctypes.POINTER(Linear)), ("norm", Norm),
        *_fields("", "", "loud"),
    )  # fmt: skip

    @classmethod
    def of(
        cls, layers: Sequence[Layer], ways: int, gelu: bool, last: Tensor, embeddings: Tensor,
        head: Linear | None, norm: Norm, loud: float
    ) -> Model:
        """last: [H] float32, the weight of the final norm. embeddings: [V, H], and what they are
        multiplied by.

        The caller keeps alive what is named by its place.
        """
        behind = ctypes.pointer(head) if head is not None else None
        some, places = (Layer * len(layers))(*layers), (last.data_ptr(), embeddings.data_ptr())
        return cls(some, len(layers), len(embeddings), ways, gelu, *places, behind, norm, loud)


class Recurrence(ctypes.Structure):
    """A recurrent draft head; as in heads.c."""

    _fields_ = (
        *((name, Linear) for name in ("fed", "back", "narrow", "projection")),
        *_fields("blocks table map", "hidden layers recurs smooth first vocab"),
    )


class Pairs(ctypes.Structure):
    """Pairs of tokens; as in heads.c."""

    _fields_ = _fields("starts tokens gains rest")


class Heads(ctypes.Structure):
    """Medusa heads that share the target's projection, with pairs; as in heads.c."""

    _fields_ = (
        ("blocks", ctypes.c_void_p), ("projection", Linear), ("map", ctypes.c_void_p),
        ("pairs", Pairs), *_fields("", "layers vocab", "weight")
    )


class TreeOutput(ctypes.Structure):
    """Where trees are written; as in pools.h."""

    _fields_ = _fields("tokens parents confidence", "nodes absent widest")


class Texts(ctypes.Structure):
    """Where texts lie; as in pools.h."""

    _fields_ = _fields("tokens positions", "rows room")


class Index(ctypes.Structure):
    """Where a suffix index lies; as in lookup.c."""

    _fields_ = _fields(
        "text places tags counts weights sizes", "room count ways slots shift follow scatter absent"
    )


class Table(ctypes.Structure):
    """Where known successors lie; as in ensemble.c."""

    _fields_ = _fields("tags tokens odds", "best slots shift token before absent")


class Counts(ctypes.Structure):
    """How often members of an ensemble were right; as in ensemble.c."""

    _fields_ = _fields("own all", "kinds classes levels", "fade fade_all trust trust_all unknown")


class Member(ctypes.Structure):
    """A member's trees; as in ensemble.c."""

    _fields_ = _fields("tokens parents confidence", "nodes")


def interleaved(weight: Tensor, fold: int) -> Tensor:
    """[outputs / 32, inputs / fold, 32, fold] a weight [outputs, inputs], rounded up with zeros, as
    the kernels read it."""
    outputs, inputs = weight.shape
    beyond = (0, -inputs % (WORDS * fold), 0, -outputs % STRIP)
    padded = F.pad(weight, beyond) if any(beyond) else weight.contiguous()
    # `fold` numbers are one word
    words = padded.view(torch.int32).view(len(padded) // STRIP, STRIP, -1).transpose(1, 2)
    packed = enlarge(torch.empty(words.shape, dtype=torch.int32)).copy_(words)
    return packed.view(weight.dtype).view(len(packed), -1, STRIP, fold)


def plain(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    """[outputs, inputs] what `interleaved` was made of."""
    return weight.transpose(1, 2).reshape(len(weight) * STRIP, -1)[:outputs, :inputs]


def nibbles(codes: Tensor, steps: Tensor, bases: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (step * code + base - 128) * scale of 4 bits, and their scales, as the kernels read
    them: of codes [outputs, inputs] up to 15, steps and bases [outputs, groups] up to 17 and 255,
    and scales [outputs, blocks], rounded up with zeros."""
    more = -len(codes) % STRIP
    padded = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % PART, 0, more))
    halves = padded.view(len(padded) // STRIP, STRIP, -1, GROUP // 8, 2, 4)
    packed = (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    beyond = (0, 0, 0, packed.shape[1] - steps.shape[1], 0, more)
    both = F.pad(torch.stack([steps, bases], -1).to(torch.uint8), beyond)
    behind = both.view(len(packed), STRIP, -1, 2).transpose(1, 2).flatten(2)
    weights = torch.cat([packed, behind], 2)
    ordered = F.pad(scales.half(), (0, 0, 0, more)).view(len(packed), STRIP, -1)
    return enlarge(torch.empty_like(weights)).copy_(weights), ordered.transpose(1, 2).contiguous()


def rounded(numbers: Tensor) -> Tensor:
    """One number per output, with zeros for those a weight was rounded up by."""
    return F.pad(numbers, (0, -len(numbers) % STRIP))
