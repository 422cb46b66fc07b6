"""Encoder–decoders (T5, BART, Whisper, ...) as targets: the encoder runs once per text, and the
decoder is read like any other model.

For decoders whose forward takes no positions, see `patches`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutput

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import KVLayer, LayerShape
from draftproof.cache.layout import FAILURES, UNLIMITED, Layout, cache_argument
from draftproof.cache.source_cache import SourceCache
from draftproof.cache.state_shape import StateShape
from draftproof.cache.transformers_patches import patch_encoder_decoder
from draftproof.core.messages import Reading
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel, first_line
from draftproof.model.module_target import ModuleTarget


class EncoderOutput(BaseModelOutput):
    """An encoder's output for decoders; some families read other fields than the states."""

    router_logits = attention_mask = None


class Source:
    """An encoder's input for one text, as a batch of one, and its outputs.

    inputs: arguments of the encoder's forward by name. tokens: the text, for code that looks at it.
    known: an encoder and its output for these inputs.
    """

    def __init__(
        self, inputs: Mapping[str, Tensor], tokens: Sequence[int] = (),
        known: tuple[nn.Module, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.inputs, self.tokens = dict(inputs), tokens
        self._encoded = [known] if known is not None else []

    def encoded(self, encoder: nn.Module) -> Tensor:
        """[1, S, H] the encoder's output, computed once, even if a draft model has the same one."""
        for known, output in self._encoded:
            if known is encoder:
                return output
        if not self.inputs:
            raise BadInput(
                "encoder_outputs of the target were given, and the draft model has another "
                "encoder; give the encoder's inputs, or leave the draft model out"
            )
        where = next(encoder.parameters())
        inputs = {
            name: value.to(where.device, where.dtype if value.is_floating_point() else value.dtype)
            for name, value in self.inputs.items()
        }
        try:
            output = encoder(**inputs, return_dict=True).last_hidden_state
        except FAILURES as error:
            raise BadInput(
                f"the encoder cannot read {', '.join(inputs)}: {first_line(error)}; give what the "
                "model's tokenizer or processor returns"
            ) from error
        self._encoded.append((encoder, output))
        return output


class EncoderDecoder(ModuleTarget):
    """A target whose rows attend to a source, which `begin` sets.

    encoder: runs once per source; a draft model may share the target's. If it reads text, rows with
    sources of different length are read in one pass; audio is read row by row.
    """

    is_encoder_decoder = True

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        # its texts parted from its own forward when it was checked
        if model.config.model_type == "led":
            raise UnsupportedModel(
                f"{type(model).__name__} has an encoder that does not say the same of a text each "
                "time; run it with transformers' generate"
            )
        self.encoder: nn.Module = model.get_encoder()
        takes = inspect.signature(model.forward).parameters
        read = inspect.signature(self.encoder.forward).parameters
        for name in (model.main_input_name, "input_features"):
            if name in takes and name not in read:
                raise UnsupportedModel(
                    f"{type(model).__name__} prepares its inputs before its encoder reads them; "
                    "run it with transformers' generate"
                )
        self._takes_positions = "decoder_position_ids" in takes
        self._cache_argument = cache_argument(takes)
        if not self._takes_positions:
            patch_encoder_decoder(model.get_decoder())
        self._together = model.main_input_name == "input_ids"
        config = getattr(self.encoder, "config", model.config).get_text_config()
        width = getattr(config, "hidden_size", 0)
        dice = torch.Generator().manual_seed(2)
        states = [torch.randn(1, size, width, dtype=torch.float32, generator=dice)
                  for size in (5, 9 if self._together else 5)]
        self._check_sources = [Source({}, (), (self.encoder, state)) for state in states]
        super().__init__(model, **options)

    def begin(self, cache: KVCache, sources: Sequence[Any]) -> None:
        """Set the sources of a cache's rows."""
        assert isinstance(cache, SourceCache)
        for row, source in enumerate(sources):
            _, _, crossed = self._begun(source, 1)
            cache.put(row, [store for layer in crossed for store in (layer.keys, layer.values)])

    def _begun(
        self, source: Source, size: int
    ) -> tuple[Tensor, list[CacheLayerMixin], list[CacheLayerMixin]]:
        """Logits of a text of `size` tokens for a source, and transformers' own cache layers for
        the text and for the source."""
        both = EncoderDecoderCache(DynamicCache(), DynamicCache())
        hidden = source.encoded(self.encoder).to(self.device, self.dtype)
        self._width = hidden.shape[-1]
        out = self.model(
            encoder_outputs=EncoderOutput(hidden), use_cache=True, **{self._cache_argument: both},
            decoder_input_ids=torch.zeros(1, size, dtype=torch.int64, device=self.device),
        )  # fmt: skip
        return out.logits, both.self_attention_cache.layers, both.cross_attention_cache.layers

    def shares_encoder(self, other: EncoderDecoder) -> bool:
        """Share another target's encoder if both are equal; return whether they are."""
        mine, theirs = self.encoder.state_dict(), other.encoder.state_dict()
        same = mine.keys() == theirs.keys() and all(
            value.shape == theirs[name].shape and torch.equal(value, theirs[name])
            for name, value in mine.items()
        )
        self.encoder = other.encoder if same else self.encoder
        return same

    @property
    def source_context(self) -> int:
        """The longest text that the encoder reads, in tokens."""
        config = getattr(self.encoder, "config", self.model.config)
        names = ("max_encoder_position_embeddings", "max_position_embeddings")
        return next(filter(None, (getattr(config, name, None) for name in names)), UNLIMITED)

    def read(self, tree: TokenTree, cache: KVCache, **how: Any) -> Reading:
        assert isinstance(cache, SourceCache)
        if self._together or len(set(cache.source_sizes)) < 2:
            return super().read(tree, cache, **how)
        alone = []
        for row in range(len(tree.tokens)):
            tokens, parents = (part[row : row + 1] for part in (tree.tokens, tree.parents))
            row_tree = TokenTree(tokens, parents, tree.depth_limit, is_chain=tree.is_chain)
            alone.append(super().read(row_tree, cache.rows(row, row + 1), **how))
        hidden = [reading.hidden for reading in alone if reading.hidden is not None]
        return Reading(
            torch.cat([reading.logits for reading in alone]), torch.cat(hidden) if hidden else None
        )

    def own_logits(self, tokens: Tensor) -> Tensor:
        source = self._check_sources[0].encoded(self.encoder).to(self.device, self.dtype)
        known = EncoderOutput(source.expand(len(tokens), -1, -1))
        out = self.model(encoder_outputs=known, decoder_input_ids=tokens, use_cache=False)
        logits: Tensor = out.logits
        return logits

    def check_text(self, size: int) -> Tensor:
        """Random tokens without padding, which some decoders skip in a text without a cache."""
        text = super().check_text(size)
        padding = getattr(self.model.config, "pad_token_id", None)
        return text if padding is None else (text + (text == padding)) % self.vocab_size

    def check_cache(self, size: int) -> KVCache:
        cache = self.plain_cache(2, size)
        self.begin(cache, self._check_sources)
        row = cache.rows(0, 1)
        assert isinstance(row, SourceCache) and isinstance(cache, SourceCache)
        row.least = cache.longest_source            # as if both rows were read
        return row

    def plain_cache(self, rows: int, size: int, layer: type[KVLayer] = KVLayer) -> KVCache:
        return SourceCache.wrap(super().plain_cache(rows, size, layer))

    def _inputs(
        self, tokens: Tensor, masks: object, positions: Tensor, cache: KVCache
    ) -> dict[str, object]:
        assert isinstance(cache, SourceCache)
        # the encoder output's keys are in the cache
        known = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)
        known = known.expand(len(tokens), cache.longest_source, self._width)
        extra = {"decoder_position_ids": positions} if self._takes_positions else {}
        return {
            "encoder_outputs": EncoderOutput(known), "attention_mask": cache.source_mask(),
            "decoder_input_ids": tokens, "decoder_attention_mask": masks,
            self._cache_argument: cache.for_model(), **extra,
        }

    def find_layout(self) -> Layout:
        """What the decoder stores for its own text, learnt from one forward."""
        name = type(self.model).__name__
        self._takes_place = not self._takes_positions
        try:
            logits, decoder_layers, crossed = self._begun(self._check_sources[0], 2)
            shapes = [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
                      for layer in decoder_layers]
            sizes = [
                {layer.keys.shape[2] for layer in layers} for layers in (decoder_layers, crossed)
            ]
        except FAILURES as error:
            raise UnsupportedModel(
                f"{name} does not run as an encoder-decoder with transformers' cache "
                f"({first_line(error)}); run it as its model card says"
            ) from error
        if not decoder_layers or len(crossed) != len(decoder_layers) or sizes != [{2}, {5}]:
            raise UnsupportedModel(
                f"{name} does not keep what it has read in transformers' cache, or in a way that "
                "cannot be rolled back by tokens; run it with transformers' generate"
            )
        config = self.model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        states: list[tuple[StateShape, ...]] = [() for _ in shapes]
        return Layout(shapes, states, windows, logits.shape[-1], decoder_layers[0].keys.dtype)
