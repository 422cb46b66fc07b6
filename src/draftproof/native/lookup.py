"""Drafting from what was read before, by the kernels of lookup.c: what drafters that need no model do in a round.

Tensors lie in the memory of a CPU; those that are written to are contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


def _fields(pointers: str, numbers: str, fractions: str = "") -> tuple[tuple[str, type], ...]:
    kinds = ((pointers, _POINTER), (numbers, _NUMBER), (fractions, ctypes.c_float))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


class Twins(IntEnum):
    """Nodes of a pool that have the same text: there are none, the likeliest counts, or their odds add up."""

    APART = 0
    LIKELIEST = 1
    SUMMED = 2


class Grown(NamedTuple):
    """Trees [rows, N]: tokens, parents, and odds, in falling order; N is what the largest has."""

    tokens: Tensor
    parents: Tensor
    confidence: Tensor


class _Grown(ctypes.Structure):
    _fields_ = _fields("tokens parents odds", "nodes absent widest")


class _Texts(ctypes.Structure):
    _fields_ = _fields("tokens positions", "rows room")


class Index(ctypes.Structure):
    """Where a suffix index lies; as in lookup.c. Whoever makes one keeps the tensors."""

    _fields_ = _fields("text places tags counts weights sizes", "room count ways slots shift follow scatter absent")


class Table(ctypes.Structure):
    """Where known successors lie; as in lookup.c."""

    _fields_ = _fields("tags tokens odds", "best slots shift token before absent")


class Counts(ctypes.Structure):
    """How good the word of members was; as in lookup.c."""

    _fields_ = _fields("own all", "kinds classes levels", "fade fade_all trust trust_all untold")


class Member(NamedTuple):
    """A member's trees [rows, N]; odds None if it tells none."""

    tokens: Tensor
    parents: Tensor
    confidence: Tensor | None


class _Member(ctypes.Structure):
    _fields_ = _fields("tokens parents odds", "nodes")


class Pool(NamedTuple):
    """Members' trees side by side, [rows, M]: tokens, parents (-1 at each root), and the kinds of nodes."""

    tokens: Tensor
    parents: Tensor
    kinds: Tensor


class Lookup:
    """The functions of lookup.c. Where one takes `absent`, that is the token of a node that is not there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        shapes = {
            "grow": (*(_POINTER,) * 3, *(_NUMBER,) * 3, _POINTER),
            "match": (_POINTER, *(_NUMBER,) * 5, _POINTER),
            "index": (*(_POINTER,) * 5, *(_NUMBER,) * 2),
            "continue": (*(_POINTER,) * 5, ctypes.c_float, *(_NUMBER,) * 2, _POINTER),
            "recycle": (*(_POINTER,) * 6, *(_NUMBER,) * 3),
            "told": (*(_POINTER,) * 4, _NUMBER, ctypes.c_float),
            "remember": (*(_POINTER,) * 3, *(_NUMBER,) * 3, _POINTER),
            "judge": (*(_POINTER,) * 5, _NUMBER, _POINTER, _NUMBER),
            "merge": (*(_POINTER,) * 3, *(_NUMBER,) * 2, *(_POINTER,) * 4),
        }
        self._call = {name: getattr(library, f"draftproof_{name}") for name in shapes}
        for name, shape in shapes.items():
            self._call[name].argtypes = shape
            self._call[name].restype = None

    def grow(self, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, twins: Twins, absent: int) -> Grown:
        """The trees of the likeliest nodes of pools [rows, M], the root (their node 0) among at most `nodes`.

        Of equals the earlier. A parent comes before its children; a node whose parent is -1, or itself, is the root once
        more. What has odds of 0 is not there.
        """
        rows, size = tokens.shape
        parts = [part.contiguous() for part in (tokens, parents, confidence.float())]
        places = (part.data_ptr() for part in parts)
        return _into(rows, min(nodes, size), absent, lambda out: self._call["grow"](*places, rows, size, twins, out))

    def match(
        self, text: Tensor, position: Tensor, longest: int, shortest: int, near: int, places: int, steps: int, absent: int
    ) -> Grown:
        """Trees of what followed the last tokens of text [rows, room] up to position [rows] where they stood before."""
        texts, numbers = _texts(text, position), (longest, shortest, near, places, steps)
        return _into(len(text), 1 + steps, absent, lambda out: self._call["match"](texts, *numbers, out))

    def index(self, index: Index, tails: Tensor, ends: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Write `count` [b] of tokens [b, D] behind ends [b]; these and tails [b, L], the text before, move on."""
        tokens, count = tokens.contiguous(), count.contiguous()
        places = (part.data_ptr() for part in (tails, ends, tokens, count))
        self._call["index"](ctypes.addressof(index), *places, *tokens.shape)

    def go_on(
        self, index: Index, text: Tensor, position: Tensor, rows: Sequence[Tensor], own: float, paths: int, steps: int
    ) -> Grown:
        """Trees of the likeliest continuations of text [rows, room] up to position [rows]; of each row the tail, begin, end."""
        places, texts = [part.data_ptr() for part in rows], _texts(text, position)
        return _into(
            len(text), 1 + steps, index.absent,
            lambda out: self._call["continue"](ctypes.addressof(index), texts, *places, own, paths, steps, out),
        )  # fmt: skip

    def recycle(self, table: Table, tokens: Tensor, parents: Tensor, tails: Tensor, best: Tensor, logits: Tensor) -> None:
        """Learn what came out behind the nodes of trees [b, N]: best [b, N, k] and their logits; tails [b, 2] before them."""
        parts = [part.contiguous() for part in (tokens, parents, tails, best, logits.float())]
        self._call["recycle"](ctypes.addressof(table), *(part.data_ptr() for part in parts), *best.shape)

    def told(self, table: Table, before: Tensor, tokens: Tensor, successors: Tensor, confidence: float) -> None:
        """Learn that successors were read behind tokens, and these behind others, all [b, N]; they get these odds."""
        parts = [part.contiguous() for part in (before, tokens, successors)]
        self._call["told"](ctypes.addressof(table), *(part.data_ptr() for part in parts), tokens.numel(), confidence)

    def remember(
        self, table: Table, text: Tensor, position: Tensor, tails: Tensor, width: int, fan: int, depth: int, nodes: int
    ) -> Grown:
        """Trees of what is known to follow each root; of a level `width` nodes are followed, by `fan` tokens each."""
        texts = _texts(text, position)
        return _into(
            len(text), nodes, table.absent,
            lambda out: self._call["remember"](ctypes.addressof(table), texts, tails.data_ptr(), width, fan, depth, out),
        )  # fmt: skip

    def judge(
        self, counts: Counts, tokens: Tensor, parents: Tensor, kinds: Tensor, asked: Tensor, text: Tensor, position: Tensor,
        absent: int,
    ) -> None:  # fmt: skip
        """Count what stood of a pool [rows, M] proposed behind roots at `asked` [rows], by text up to position [rows]."""
        places = (part.data_ptr() for part in (tokens, parents, kinds, asked))
        self._call["judge"](ctypes.addressof(counts), *places, tokens.shape[1], _texts(text, position), absent)

    def merge(self, counts: Counts, everyone: Tensor, members: Sequence[Member], nodes: int, absent: int) -> tuple[Pool, Grown]:
        """Members' trees side by side, and the trees of the likeliest of all their nodes, as far as each is to be believed."""
        held = [[part.contiguous() if part is not None else None for part in member] for member in members]
        pointers = ([part.data_ptr() if part is not None else None for part in parts] for parts in held)
        sizes = [member.tokens.shape[1] for member in members]
        listed = (_Member * len(members))(*(_Member(*three, size) for three, size in zip(pointers, sizes, strict=True)))
        rows = len(members[0].tokens)
        pool = Pool(*torch.empty(3, rows, sum(sizes), dtype=torch.int64).unbind())
        places, told = [part.data_ptr() for part in pool], (ctypes.addressof(counts), everyone.data_ptr())
        numbers = (listed, len(members), rows, *places)
        return pool, _into(rows, min(nodes, sum(sizes)), absent, lambda out: self._call["merge"](*told, *numbers, out))


def _texts(text: Tensor, position: Tensor) -> ctypes.Array[_Texts]:
    assert text.stride(1) == 1 and position.is_contiguous()
    return (_Texts * 1)(_Texts(text.data_ptr(), position.data_ptr(), len(text), text.stride(0)))


def _into(rows: int, nodes: int, absent: int, grow: Callable[[ctypes.Array[_Grown]], object]) -> Grown:
    """The trees that are grown into so much room, as wide as the largest."""
    tokens, parents = torch.empty(2, rows, nodes, dtype=torch.int64).unbind()
    confidence = torch.empty(rows, nodes)
    out = (_Grown * 1)(_Grown(tokens.data_ptr(), parents.data_ptr(), confidence.data_ptr(), nodes, absent, 1))
    grow(out)
    width = out[0].widest
    return Grown(tokens, parents, confidence) if width == nodes else Grown(tokens[:, :width], parents[:, :width], confidence[:, :width])
