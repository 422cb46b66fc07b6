"""Prefixes of earlier texts with their keys and values: what a prompt begins with need not be read
again. Knows caches and tokens; knows nothing of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftproof.model.kv_cache import KVCache

LEAST = 16
"""Fewer tokens are read sooner than they are looked up and copied."""


class Known(NamedTuple):
    """A text, and what each layer stores of it: [1, heads, tokens, ...] each. head: its first
    `LEAST` tokens, which are sooner compared than all."""

    tokens: npt.NDArray[np.int64]
    stores: list[Tensor]
    head: bytes
    nbytes: int


class PrefixCache:
    """Texts in at most `limit` bytes; those not used for longest go first.

    It belongs to one model with its present weights: `belong_to` forgets those of any other.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.known = limit, list[Known]()       # the last used at the end
        self.hits = self.reused = 0
        self._owner: object = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(one.nbytes for one in self.known)

    def belong_to(self, weights: object) -> None:
        """Forget what other weights computed."""
        if weights is not self._owner:
            self._owner = weights
            self.known.clear()

    def reuse(self, prompt: Sequence[int], row: KVCache, grain: int) -> int:
        """Put the longest known beginning of a prompt, a multiple of `grain`, into the one row of a
        cache; return its length. The last token is never known: it must be read."""
        best, count = self._best(prompt, grain)
        if not count:
            return 0
        one = self.known.pop(best)
        self.known.append(one)
        places = (store for layer in row.layers for store in layer.stores)
        for store, known in zip(places, one.stores, strict=True):
            store[:, :, :count] = known[:, :, :count]
        row.lengths.fill_(count)
        self.hits, self.reused = self.hits + 1, self.reused + count
        return count

    def length(self, prompt: Sequence[int], grain: int) -> int:
        """How much of a prompt `reuse` would put in place."""
        return self._best(prompt, grain)[1]

    def _best(self, prompt: Sequence[int], grain: int) -> tuple[int, int]:
        """Which text begins most like a prompt, and how much of that is of use."""
        text, best, count = np.array(prompt[:-1]), -1, 0
        head = _head(text)
        for place, one in enumerate(self.known):
            common = _common(text, one.tokens) if one.head == head else 0
            best, count = (place, common) if common > count else (best, count)
        count -= count % grain
        return (best, count) if count >= LEAST else (-1, 0)

    def keep(self, tokens: Sequence[int], row: KVCache) -> None:
        """Remember a text whose keys and values are in the one row of a cache, if it fits."""
        text, count = np.array(tokens), len(tokens)
        head = _head(text)
        alike = [one for one in self.known if one.head == head]
        if count < LEAST or any(_common(text, one.tokens) == count for one in alike):
            return
        stores = [store for layer in row.layers for store in layer.stores]
        each = sum(store.stride(2) * store.shape[1] * store.element_size() for store in stores)
        nbytes = (each + text.itemsize) * count
        if nbytes > self.limit:
            return
        held = [one for one in self.known
                if one.head != head or _common(text, one.tokens) < len(one.tokens)]
        copies = [store[:, :, :count].clone() for store in stores]
        self.known = [*held, Known(text, copies, head, nbytes)]
        while self.nbytes > self.limit:
            self.known.pop(0)


def _head(text: npt.NDArray[np.int64]) -> bytes:
    return text[:LEAST].tobytes()


def _common(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """How many first tokens two texts share."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
