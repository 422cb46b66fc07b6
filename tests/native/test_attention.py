"""The kernel of attention against attention in double precision over the same store."""

import ctypes

import pytest
import torch
from torch import Tensor

from draftproof.core.tree import TreeShape
from draftproof.native.kernels import library
from draftproof.native.structures import AttentionKind, Layer, Norm, Read

SHAPE = TreeShape.from_digits(["0", "1", "2", "00", "01", "10", "20", "000", "010", "0100"])
PATHS = [(), *SHAPE.paths]
PARENTS = torch.tensor([[-1, *(PATHS.index(path[:-1]) for path in SHAPE.paths)]])
NODES = len(PATHS)

loaded = library().loaded
pytestmark = pytest.mark.skipif(loaded is None, reason="no kernels here")


class Store:
    """Random keys and values [heads, capacity, size] of one row, in bfloat16 or in 8 bits."""

    def __init__(self, heads: int, capacity: int, size: int, *, coded: bool) -> None:
        dice = torch.Generator().manual_seed(size)
        shape = (heads, capacity, size)
        self.scales: list[Tensor] = []
        if coded:
            self.numbers = [torch.randint(-127, 128, shape, generator=dice, dtype=torch.int8)
                            for _ in range(2)]
            self.scales = [torch.rand(heads, capacity, generator=dice).bfloat16() / 64
                           for _ in range(2)]
        else:
            self.numbers = [torch.randn(shape, generator=dice).bfloat16() for _ in range(2)]

    def tensors(self) -> list[Tensor]:
        return self.numbers + self.scales

    def decoded(self) -> list[Tensor]:
        """Keys and values in double precision."""
        scales = self.scales or [torch.ones(1)] * 2
        return [numbers.double() * scale.double()[..., None]
                for numbers, scale in zip(self.numbers, scales, strict=True)]


def attended(inner: Tensor, store: Store, group: int, length: int, threads: int,
             window: int = 0) -> Tensor:
    """[nodes, heads, size]: what the kernel computes; nodes' keys and values are stored."""
    assert loaded is not None
    heads, capacity, size = store.numbers[0].shape
    kind = AttentionKind(window, 0, torch.ones(capacity, size).bfloat16(),
                         torch.zeros(capacity, size).bfloat16())
    read = Read(1, NODES, 0, heads * group, heads, size, capacity, capacity, threads,
                len(store.tensors()), torch.tensor([length]), PARENTS, None, None, kind,
                size**-0.5)
    out = torch.empty(NODES, heads * group, size, dtype=torch.bfloat16)
    places = (ctypes.c_void_p * 4)(*(tensor.data_ptr() for tensor in store.tensors()))
    loaded.draftproof_attention(
        ctypes.byref(read), ctypes.byref(Layer()), ctypes.c_void_p(inner.data_ptr()),
        ctypes.byref(Norm()), places, ctypes.c_void_p(out.data_ptr()))
    return out


def reference(inner: Tensor, store: Store, group: int, length: int, window: int = 0) -> Tensor:
    keys, values = (part.repeat_interleave(group, 0) for part in store.decoded())
    queries = inner[:, : len(keys)].double()
    out = torch.empty_like(queries)
    for node in range(NODES):
        path, place = list[int](), node
        while place >= 0:
            path, place = [length + place, *path], int(PARENTS[0, place])
        slots = [*range(length), *path]
        slots = slots[-window:] if window else slots
        scores = torch.einsum("hd,hsd->hs", queries[node], keys[:, slots]) * keys.shape[-1] ** -0.5
        out[node] = torch.einsum("hs,hsd->hd", scores.softmax(-1), values[:, slots])
    return out


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("size", "heads", "group"), [
    (16, 2, 6), (48, 1, 8), (80, 2, 1), (128, 2, 6), (256, 1, 5)])  # fmt: skip
@pytest.mark.parametrize(("length", "window"), [
    (0, 0), (3, 0), (61, 0), (508, 0), (700, 0), (1100, 0), (1100, 70), (1100, 613)])  # fmt: skip
def test_attention_is_that_of_the_stored_numbers(
    size: int, heads: int, group: int, length: int, window: int, *, coded: bool
) -> None:
    """As near as the output's bfloat16 allows, for sharp and for flat probabilities."""
    dice = torch.Generator().manual_seed(length)
    inner = torch.randn(NODES, heads * (group + 2), size, generator=dice).bfloat16()
    for sharpness in (0.3, 1.0, 4.0):
        asked = inner.clone()
        asked[:, : heads * group] *= sharpness
        outputs = list[Tensor]()
        for threads in (1, 2):
            store = Store(heads, length + NODES, size, coded=coded)
            outputs.append(attended(asked, store, group, length, threads, window))
        truth = reference(asked, store, group, length, window)
        assert torch.equal(*outputs)
        assert (outputs[0] - truth).norm() < 0.0019 * truth.norm(), sharpness
