"""Prefixes of earlier texts with their keys and values: what a prompt begins with need not be read
again. Knows caches and tokens; knows nothing of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftproof.cache.kv_cache import KVCache

LEAST = 16
"""Fewer tokens are read sooner than they are looked up and copied."""


class Known(NamedTuple):
    """An owner's text, and what each layer stores of it: [1, heads, tokens, ...] each."""

    tokens: npt.NDArray[np.int64]
    stores: list[Tensor]
    nbytes: int
    owner: int

    def common(self, text: npt.NDArray[np.int64]) -> int:
        """How many first tokens it shares with a text."""
        size = min(len(text), len(self.tokens))
        differ = text[:size] != self.tokens[:size]
        return int(differ.argmax()) if differ.any() else size


class PrefixCache:
    """Texts in at most `limit` bytes; those not used for longest go first.

    It belongs to one model with its present weights: `belong_to` forgets those of any other. A text
    serves the prompts of its owner alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.known = limit, list[Known]()       # the last used at the end
        self.hits = self.reused = 0
        self._owner: object = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.nbytes for entry in self.known)

    def belong_to(self, weights: object) -> None:
        """Forget what other weights computed."""
        if weights is not self._owner:
            self._owner = weights
            self.known.clear()

    def reuse(self, prompt: Sequence[int], row: KVCache, grain: int, owner: int = 0) -> int:
        """Put the longest known beginning of a prompt, a multiple of `grain`, into the one row of a
        cache; return its length. The last token is never known: it must be read."""
        best, count = self._best(prompt, grain, owner)
        if count:
            entry = self.known.pop(best)
            self.known.append(entry)
            for store, known in zip(row.tensors, entry.stores, strict=True):
                store[:, :, :count] = known[:, :, :count]
            row.lengths.fill_(count)
            self.hits, self.reused = self.hits + 1, self.reused + count
        return count

    def length(self, prompt: Sequence[int], grain: int, owner: int = 0) -> int:
        """How much of a prompt `reuse` would put in place."""
        return self._best(prompt, grain, owner)[1]

    def keep(
        self, tokens: Sequence[int], row: KVCache, owner: int = 0, *, copy: bool = True
    ) -> None:
        """Remember a text whose keys and values are in the one row of a cache, if it fits.

        copy: whether the cache goes on to be written to."""
        text, count = np.array(tokens), len(tokens)
        shared = [entry.common(text) if entry.owner == owner else -1 for entry in self.known]
        each = sum(store.stride(2) * store.shape[1] * store.element_size() for store in row.tensors)
        nbytes = (each + text.itemsize) * count
        if count < LEAST or count in shared or nbytes > self.limit:
            return
        self.known = [entry for entry, common in zip(self.known, shared, strict=True)
                      if common < len(entry.tokens)]          # others begin it, and say no more
        stores = [store[:, :, :count] for store in row.tensors]
        if copy:
            stores = [store.clone() for store in stores]
        else:
            nbytes = text.nbytes + row.nbytes
        self.known.append(Known(text, stores, nbytes, owner))
        while self.nbytes > self.limit:
            self.known.pop(0)

    def _best(self, prompt: Sequence[int], grain: int, owner: int) -> tuple[int, int]:
        """Which text of an owner begins most like a prompt, and how much of that is of use."""
        text = np.array(prompt[:-1])
        shared = [(entry.common(text), place) for place, entry in enumerate(self.known)
                  if entry.owner == owner]
        count, best = max(shared, default=(0, 0))
        count -= count % grain
        return best, count if count >= LEAST else 0
