"""Keys and values of earlier texts, so that a prompt with the same beginning need not be read
again. This knows caches and tokens, but nothing of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache

LEAST = 16
"""Shorter beginnings are not looked up: it takes less time to read them than to copy them."""


States = dict[int, list[Tensor]]
"""Recurrent states of a text by the number of tokens before them."""


class Known(NamedTuple):
    """The text of an owner, and each layer's store of it, [1, heads, tokens, ...]; of a model with
    recurrent states, these at borders of chunks, where alone a prompt can go on."""

    tokens: npt.NDArray[np.int64]
    stores: list[Tensor]
    nbytes: int
    owner: int
    states: States | None = None

    def usable(self, text: npt.NDArray[np.int64], grain: int) -> int:
        """How many tokens of a text, a multiple of `grain`, need not be read."""
        count = self.common(text)
        if self.states is not None:
            return max((border for border in self.states if border <= count), default=0)
        return count - count % grain

    def common(self, text: npt.NDArray[np.int64]) -> int:
        """How many tokens its common prefix with a text has."""
        size = min(len(text), len(self.tokens))
        differ = text[:size] != self.tokens[:size]
        return int(differ.argmax()) if differ.any() else size


class PrefixCache:
    """Texts in at most `limit` bytes; the least recently used are dropped first.

    It belongs to one model and its present weights: `belong_to` forgets texts of others. A text
    serves only prompts of its owner.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.known = limit, list[Known]()       # the most recently used at the end
        self.hits = self.reused = 0
        self._owner: object = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.nbytes for entry in self.known)

    def belong_to(self, weights: object) -> None:
        """Forget everything that other weights computed."""
        if weights is not self._owner:
            self._owner = weights
            self.known.clear()

    def reuse(
        self, prompt: Sequence[int], row: KVCache, grain: int, owner: int = 0
    ) -> tuple[int, States]:
        """Copy the longest known beginning of a prompt, a multiple of `grain`, to the only row of a
        cache; return its length, and the states known within it. The last token is always left to
        be read."""
        (best, count), states = self._best(prompt, grain, owner), States()
        if count:
            entry = self.known.pop(best)
            self.known.append(entry)
            for store, known in zip(row.by_position, entry.stores, strict=True):
                store[:, :, :count] = known[:, :, :count]
            if entry.states is not None:
                row.resume(entry.states[count], torch.tensor(prompt[:count]))
                states = {place: held for place, held in entry.states.items() if place <= count}
            row.lengths.fill_(count)
            self.hits, self.reused = self.hits + 1, self.reused + count
        return count, states

    def length(self, prompt: Sequence[int], grain: int, owner: int = 0) -> int:
        """How many tokens of a prompt `reuse` would copy."""
        return self._best(prompt, grain, owner)[1]

    def keep(
        self, tokens: Sequence[int], row: KVCache, owner: int = 0, *, copy: bool = True,
        states: States | None = None,
    ) -> None:  # fmt: skip
        """Remember a text whose keys and values are in the only row of a cache, if it fits.

        copy: whether the cache will still be written to. states: of a model that has them."""
        text, count = np.array(tokens), len(tokens)
        shared = [entry.common(text) if entry.owner == owner else -1 for entry in self.known]
        each = sum(store.stride(2) * store.shape[1] * store.element_size()
                   for store in row.by_position)
        held = sum(state.nbytes for states_at in (states or {}).values() for state in states_at)
        nbytes = (each + text.itemsize) * count + held
        if count < LEAST or count in shared or nbytes > self.limit:
            return
        self.known = [entry for entry, common in zip(self.known, shared, strict=True)
                      if common < len(entry.tokens)]          # prefixes of it are no longer needed
        stores = [store[:, :, :count] for store in row.by_position]
        if copy:
            stores = [store.clone() for store in stores]
        else:
            nbytes = text.nbytes + row.nbytes + held
        self.known.append(Known(text, stores, nbytes, owner, states))
        while self.nbytes > self.limit:
            self.known.pop(0)

    def _best(self, prompt: Sequence[int], grain: int, owner: int) -> tuple[int, int]:
        """The owner's text with the longest prefix of a prompt, and how many of its tokens can be
        used."""
        text = np.array(prompt[:-1])
        shared = [(entry.usable(text, grain), place) for place, entry in enumerate(self.known)
                  if entry.owner == owner]
        count, best = max(shared, default=(0, 0))
        return best, count if count >= LEAST else 0
