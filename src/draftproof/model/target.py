"""The target: a causal language model that reads token trees.

The draft model of speculative sampling is read through the same class: to it, drafting is reading.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.core.messages import Features, Reading
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model import inspection, quantize
from draftproof.model.copies import Snapshot, first_layers
from draftproof.model.fast_forward import FastForward
from draftproof.model.fused_forward import Tables
from draftproof.model.kv_cache import KVCache, key_depths, tree_mask
from draftproof.model.kv_layer import LAYERS, KVLayer
from draftproof.model.layout import STATES, Layout, LogitScaling, context_of, layout_of
from draftproof.model.parallel import ALONE, ProcessGroup
from draftproof.model.patches import Place, forget_handed, patch_decoder, placed
from draftproof.model.quantize import Quantization
from draftproof.model.quantized_linear import slow_because
from draftproof.model.state_cache import StateCache
from draftproof.native.kernels import Chains

DRAFT_KL_LIMIT = 0.02
"""Nats per token up to which a draft model is quantised without being asked."""


class Target:
    """A causal LM as the decoder sees it.

    model: any `PreTrainedModel` with a language-model head, put in evaluation mode and otherwise
    left alone. kv_cache: "int8" or "fp8" to store keys and values in so many bits; None, as the
    model computes them. group: the ranks that hold the model's parts, if it is sharded; each keeps
    the keys and values of its own heads.
    Raises UnsupportedModel, in one sentence, for what cannot be read exactly: the check reads a
    small tree and compares it with the model's own forward on every path.
    """

    encodes = False
    """Whether an encoder reads what rows are about; see `EncoderDecoder`."""

    def __init__(
        self, model: PreTrainedModel, *, kv_cache: str | None = None, group: ProcessGroup = ALONE
    ) -> None:
        if kv_cache is not None and kv_cache not in LAYERS:
            raise BadInput(
                f"the KV cache was to be {kv_cache!r}; choose one of {', '.join(LAYERS)}, or leave "
                "it out"
            )
        self.model, self.group = model.eval(), group
        config = model.config.get_text_config()
        self.name = model.config.name_or_path or type(model).__name__
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.context = context_of(config)
        self.hidden_size = int(getattr(config, "hidden_size", 0))
        self._scaling = LogitScaling.of(config)         # a config is slow to ask
        self.kv_cache = kv_cache
        self.quantization: Quantization | None = None    # what it cost, and saved
        self.tolerance = inspection.tolerance_of(model)
        self._trims = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.steps = True               # states may go on by single tokens
        self.fast: FastForward | None = None
        self.layout: Layout            # this, vocab_size and reads_trees are what the check finds
        self.vocab_size: int
        self.reads_trees: bool
        self._takes_place = patch_decoder(model)
        with torch.inference_mode():
            inspection.check(self)
        self._seen = Snapshot.of(model)

    def begin(self, cache: KVCache, sources: Sequence[Any]) -> None:
        """Let the rows of a cache be about these sources, before their first token is read."""

    def own_logits(self, tokens: Tensor) -> Tensor:
        """[B, S, V] of the model's own forward without a cache: what is exact."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def check_text(self, size: int) -> Tensor:
        """[size] random tokens, for the check at load."""
        dice = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (size,), generator=dice).to(self.device)

    def check_cache(self, size: int) -> KVCache:
        """Of one row, for the check at load."""
        return self.plain_cache(1, size)

    def find_layout(self) -> Layout:
        return layout_of(self.model)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` rows of `capacity` positions. Texts begin here, so weights that
        changed are taken up."""
        if self.group.alone:
            self.refresh()
        return self.plain_cache(rows, capacity, LAYERS[self.kv_cache] if self.kv_cache else KVLayer)

    def quantized(self, kind: str, text: Tensor | None = None, *, give_up: bool = False) -> Target:
        """This target with quantised layers, compared with the original on `text`, token ids [S];
        see `quantize.quantized`. What was found out about the original holds; what becomes of it
        later is not taken up."""
        model, cost = quantize.quantized_and_compared(self.model, kind, text, give_up=give_up)
        other = self.around(model)
        other.quantization = cost
        return other

    def around(self, model: PreTrainedModel) -> Target:
        """This target with another model, which stores and sees what its own does."""
        other = copy.copy(self)
        other.__dict__.pop("native", None)
        other.model, other._seen = model, Snapshot.of(model)
        other.fast = self.fast.of(model) if self.fast is not None else None
        return other

    def refresh(self) -> None:
        """Take up weights that somebody changed: by a step of training, a merged adapter, a loaded
        state. Raises BadInput for a model that was cast, moved, or put in training mode."""
        model, now = self.model, Snapshot.of(self.model)
        if model.training:
            raise BadInput(
                f"{self.name} was put in training mode, in which dropout changes what it writes; "
                "call its eval() first"
            )
        if (model.dtype, model.device) != (self.dtype, self.device):
            raise BadInput(
                f"{self.name} was {self.dtype} on {self.device} when it was loaded here and is "
                f"{model.dtype} on {model.device} now; load it here again"
            )
        if self._seen.same(now):
            return
        self.__dict__.pop("native", None)
        if self.fast is not None:
            fast = self.fast.of(model) if FastForward.fits(model) else None
            if fast is not None and now.modules == self._seen.modules:
                self.fast = fast
            else:
                with torch.inference_mode():
                    inspection.examine(self, fast)
        self._seen = now

    def lighter(self, text: Sequence[int]) -> Target | None:
        """This target with 8-bit weights, for drafting: where our kernels read those and what it
        says of a text stays near."""
        known = [token for token in text[: self.context] if token < self.vocab_size]
        slow = self.device.type != "cpu" or slow_because("int8", self.dtype) is not None
        if slow or not known or quantize.is_quantized(self.model):
            return None
        with suppress(BadInput, UnsupportedModel):                      # nothing to quantise
            other = self.quantized("int8", torch.tensor(known))
            if other.quantization is not None and other.quantization.kl <= DRAFT_KL_LIMIT:
                return other
        return None

    def first_layers(self, count: int) -> Target:
        """The first `count` layers of this target as a target of its own, behind the same final
        norm and head."""
        other = self.around(first_layers(self.model, count))
        shapes, states = self.layout.shapes[:count], self.layout.states[:count]
        other.layout = self.layout._replace(shapes=shapes, states=states)
        return other

    @property
    def skips_absent(self) -> bool:
        """Whether nodes that are not there cost nothing, so that rows of a batch may as well have
        different numbers of them."""
        return self.fast is not None and self.fast.fused is not None

    @property
    def weights(self) -> object:
        """Another object once the weights were changed and taken up."""
        return self._seen

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, as recurrent and convolutional ones do: chains are read, and
        what waits is read again."""
        return any(self.layout.states)

    @property
    def position_bytes(self) -> tuple[int, int]:
        """Bytes per position in the cache, and in one that holds what the model computes."""
        return self.new_cache(1, 1).nbytes, self.plain_cache(1, 1).nbytes

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False,
        hidden_layers: tuple[int, ...] = ()
    ) -> Reading:
        """Read the nodes `first:` of a tree; those before lie in the scratch already. Commits
        nothing.

        last_only: return logits of the last node alone. hidden_layers: to return the states of,
        counted as transformers does.
        Returns logits [B, N - first, V] ([B, 1, V] with `last_only`), hidden [B, N - first, T, H].
        """
        if isinstance(cache, StateCache):
            return self._read_behind_states(tree, cache, first, last_only, hidden_layers)
        tokens = tree.tokens[:, first:] if first else tree.tokens
        if self.fast is not None:
            logits, hidden = self.fast(tokens, tree, first, cache, last_only, hidden_layers)
            return Reading(self._scaling.apply(logits), hidden)
        span, lengths = cache.write_at(first, tree.tokens.shape[1]), cache.lengths
        positions, place = tree.positions(lengths, self.context)[:, first:], None
        masks = self._masks(tree, lengths, span, first)
        if self._takes_place:
            keys = lengths[:, None] + key_depths(tree, lengths, span)[1]
            place = Place(positions, keys, self.context)
        with placed(place):
            return self._forward(tokens, masks, positions, cache, int(last_only), hidden_layers)

    def _read_behind_states(
        self, tree: TokenTree, cache: StateCache, first: int, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        """As `read`: a block of every row is read, and what was asked for is taken from it."""
        block = cache.block(tree, first)
        chain, width = TokenTree.chain(block.tokens), block.tokens.shape[1]
        positions = chain.positions(block.start, self.context)
        masks = self._masks(chain, block.start, cache.reserve(width), 0)
        asked = torch.arange(tree.tokens.shape[1] - first)
        place = (block.skipped[:, None] + asked).clamp(max=width - 1)
        last = place[:, -1:] if last_only else place
        kept = width - int(last.min()) if self._trims else width
        try:
            reading = self._forward(block.tokens, masks, positions, cache, kept, hidden_layers)
        finally:
            forget_handed()
        cache.was_read(block, first)
        last = last - (width - reading.logits.shape[1])
        return reading.gather(last.to(self.device), place.to(self.device))

    def _inputs(
        self, tokens: Tensor, masks: object, positions: Tensor, cache: KVCache
    ) -> dict[str, Any]:
        """What the model's own forward is given for a read."""
        return {"input_ids": tokens, "attention_mask": masks, "position_ids": positions,
                self.layout.cache_name: cache}

    def _forward(
        self, tokens: Tensor, masks: object, positions: Tensor, cache: KVCache, last: int,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        """The model's own forward; last: how many of the last tokens' logits are wanted; 0: all."""
        out: Any = self.model(
            **self._inputs(tokens.clamp(0, self.vocab_size - 1), masks, positions, cache),
            use_cache=True, output_hidden_states=bool(hidden_layers),
            **({"logits_to_keep": last} if last and self._trims else {})
        )
        hidden = out.decoder_hidden_states if self.encodes else out.hidden_states
        states = [hidden[layer] for layer in hidden_layers]
        logits = out.logits[:, -last:] if last else out.logits
        return Reading(logits, torch.stack(states, 2) if states else None)

    def chain(
        self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int,
        draft_sampling: DraftSampling
    ) -> Chains | None:
        """Of each row the root and a chain of at most `steps` tokens, drafted in one call of our
        kernels; None, and nothing was read, where it cannot be.

        The likeliest `nodes` of all rows are among them; where a chain is not among these it may
        end. What rows lack before the root is read and committed, at most `width` tokens with the
        root. The cache is bounded: no row of the prefix is longer.
        """
        fused = self.fast.fused if self.fast is not None else None
        if fused is None or not fused.takes(max(width, steps), cache):
            return None
        # what is drafted need not be rounded as it is read
        if self._scaling.divisor is not None:
            heats = draft_sampling.temperatures * self._scaling.divisor
            draft_sampling = draft_sampling._replace(temperatures=heats)
        return fused.chain(prefix, width, cache, steps, nodes, draft_sampling)

    def features(
        self, tokens: Tensor, weights: Tensor, *, hidden_layers: tuple[int, ...] = (-1,),
        logits: bool = False
    ) -> Features:
        """Read whole texts without a cache, for training: tokens [B, S], the shorter ones padded on
        the right.

        weights: [B, S] passed through. hidden_layers: as in `read`. logits: return those behind
        every token as well.
        """
        out: Any = self.model(
            input_ids=tokens.clamp(0, self.vocab_size - 1), use_cache=False,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if not logits and self._trims else {})
        )
        hidden = torch.stack([out.hidden_states[layer] for layer in hidden_layers], 2)
        return Features(tokens, hidden, weights, out.logits if logits else None)

    def embed(self, tokens: Tensor, raw: bool = False) -> Tensor:
        """[..., H] the model's own token embeddings, without what some families do to them
        afterwards; raw: as their table has them."""
        table: Any = self.model.get_input_embeddings()
        tokens = tokens.clamp(0, self.vocab_size - 1)
        return torch.nn.functional.embedding(tokens, table.weight) if raw else table(tokens)

    def unembed(self, hidden: Tensor, raw: bool = False) -> Tensor:
        """[..., V] logits of hidden states behind the final norm, scaled or capped where the
        model's own are; raw: as the head has them."""
        # packed weights know no gradients
        packed = self.fast if torch.is_inference_mode_enabled() else None
        head = packed.head if packed is not None else self.model.get_output_embeddings()
        # DeepSpeed's want three dimensions
        wide = hidden if self.group.alone else hidden.reshape(1, -1, hidden.shape[-1])
        logits = head(wide) if raw else self._scaling.apply(head(wide))
        return logits if self.group.alone else logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    @cached_property
    def native(self) -> Tables | None:
        """The tables between tokens and hidden states as our kernels read them, for draft heads;
        what is small is copied."""
        plain = self._scaling == LogitScaling(None, None, None)
        return Tables.of(self.fast) if plain and self.fast is not None else None

    def _masks(
        self, tree: TokenTree, lengths: Tensor, span: int, first: int
    ) -> Tensor | dict[str, Tensor | None] | None:
        kinds: dict[str, Tensor | None] = {
            kind: tree_mask(tree, lengths, span, self.dtype, first, window,
                            kind == "chunked_attention")
            for kind, window in self.layout.windows.items()
        }
        if len(kinds) < 2:
            return next(iter(kinds.values()), None)
        return kinds | dict.fromkeys(STATES) if self.has_states else kinds

    def plain_cache(self, rows: int, size: int, layer: type[KVLayer] = KVLayer) -> KVCache:
        """One that holds keys and values as the model computes them."""
        layout, how = self.layout, (rows, size, self.layout.dtype, self.device, layer)
        if not self.has_states:
            return KVCache.empty(layout.shapes, *how)
        return StateCache.for_states(layout.shapes, layout.states, *how, self.steps)
