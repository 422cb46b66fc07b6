"""Our caches in the form that transformers modules take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from draftproof.cache.kv_layer import KVLayer

if TYPE_CHECKING:
    from draftproof.cache.kv_cache import KVCache

CacheLayerMixin.register(KVLayer)       # it has the methods without importing transformers


def module_cache(cache: KVCache) -> transformers.Cache:
    """A transformers cache with the layers of our cache."""
    return transformers.Cache(layers=cache.layers)


class EmptyLayer(DummyLayer):
    """A layer that stores nothing: it has no attention, or uses another layer's keys."""

    stores: tuple[Tensor, ...] = ()

    def rows(self, start: int, stop: int) -> Self:
        return self

    def set_slots(self, slots: Tensor, span: int) -> None:
        """Do nothing, since nothing is written."""
