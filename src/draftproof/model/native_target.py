"""A target that only our own forward reads, built from a configuration and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftproof.cache.kv_cache import CHUNKS, KVCache
from draftproof.cache.layout import LogitScaling
from draftproof.core.messages import Features, Reading
from draftproof.core.tree import TokenTree
from draftproof.errors import UnsupportedModel
from draftproof.model.autocast import without_autocast
from draftproof.model.native_model import NativeModel
from draftproof.model.parallel import ALONE, ProcessGroup
from draftproof.model.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NativeTarget(Target):
    """A target without a transformers module. Its weights never change."""

    model: NativeModel
    _module: PreTrainedModel | None

    def __init__(
        self, model: NativeModel, *, kv_cache: str | None = None, group: ProcessGroup = ALONE
    ) -> None:
        super().__init__(model, kv_cache=kv_cache, group=group)
        if not group.is_single:
            raise UnsupportedModel(
                f"{self.name} was built natively, which is not sharded; give its name to load"
            )
        self.name, self._module = model.name, None
        self._adopt(model.facts, model.forward)

    @property
    def weights_version(self) -> object:
        return self.model.named_linears

    def with_model(self, model: NativeModel) -> Target:
        other = self._copy()
        other.model, other._module = model, None
        other._adopt(model.facts, model.forward)
        return other

    def module(self) -> PreTrainedModel:
        if self._module is None:
            from draftproof.model.loading import load_model
            from draftproof.weights.quantize import quantized

            module = load_model(self.model.config.name_or_path, self.dtype, "cpu")
            kind = self.model.source.kind
            self._module = module if kind is None else quantized(module, kind)
        return self._module

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False,
        hidden_layers: tuple[int, ...] = (),
    ) -> Reading:
        how: Any = {"first": first, "last_only": last_only, "hidden_layers": hidden_layers}
        if not torch.is_autocast_enabled(self.device.type):
            return super().read(tree, cache, **how)
        with without_autocast(self.device):
            return super().read(tree, cache, **how)

    def features(
        self, tokens: Tensor, weights: Tensor, *, hidden_layers: tuple[int, ...] = (-1,),
        logits: bool = False,
    ) -> Features:
        rows, size = tokens.shape
        cache = self.plain_cache(rows, size)
        readings = list[Reading]()
        for start in range(0, size, CHUNKS[-1]):
            chunk = TokenTree.chain(tokens[:, start : start + CHUNKS[-1]])
            readings.append(self.read(
                chunk, cache, last_only=not logits, hidden_layers=hidden_layers
            ))
            cache.keep(None, torch.full_like(cache.lengths, chunk.tokens.shape[1]))
        hidden = torch.cat(
            [reading.hidden for reading in readings if reading.hidden is not None], 1
        )
        every = torch.cat([reading.logits for reading in readings], 1) if logits else None
        return Features(tokens, hidden, weights, every)

    def embed(self, tokens: Tensor, raw: bool = False) -> Tensor:
        decoder = self.model.decoder
        rows = decoder.embed.rows(tokens.clamp(0, self.vocab_size - 1))
        # Gemma's table scales, in other families the body
        scales = not raw and self.model.config.model_type == "gemma3_text"
        return rows * decoder.embed_scale if scales else rows

    def head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        if self._scaling != LogitScaling(None, None, None):
            return None
        head = self.model.head
        bias = torch.zeros(len(tokens), dtype=torch.float32)
        return head.rows(tokens), bias if head.bias is None else head.bias[tokens].float()

    def unembed(self, hidden: Tensor, raw: bool = False) -> Tensor:
        logits = self.model.decoder.head(hidden)
        return logits if raw else self._scaling.apply(logits)
