"""The target: a causal language model that reads token trees.

The draft model of speculative sampling is read through the same class.
`Target` is the protocol and what all targets share; `ModuleTarget` reads a transformers module,
`NativeTarget` a model built from a configuration and tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import LAYERS, KVLayer
from draftproof.cache.layout import UNSCALED, Layout, LogitScaling, context_of
from draftproof.core.messages import Features, Reading
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput
from draftproof.forward.fast_forward import FastForward
from draftproof.forward.fused_forward import Tables
from draftproof.model.facts import Facts
from draftproof.model.native_model import NativeModel
from draftproof.model.parallel import ALONE, ProcessGroup
from draftproof.native.kernels import Chains

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftproof.weights.quantize import Quantization


class Target:
    """A causal LM with the interface that decoding needs.

    `Target(model)` makes the implementation for the model, as `pathlib.Path` does for a system.

    Args:
        model: A transformers module with a language-model head, put in evaluation mode and
            otherwise left alone; or a `NativeModel`.
        kv_cache: "int8" or "fp8" to store keys and values in 8 bits; None to store them as
            the model computes them.
        group: The ranks that hold the model's parts, if it is sharded; each keeps the keys and
            values of its own heads.

    Attributes:
        facts: What the model stores, which drafts it reads exactly, and by which forward.
        model: The module or native model that is read.
        context: The number of positions that the model supports.
        quantization: What quantising cost and saved, if the target was quantised.

    Raises:
        UnsupportedModel: What cannot be read exactly, in one sentence.
    """

    is_encoder_decoder = False
    """Whether an encoder reads what rows are about; see `EncoderDecoder`."""
    facts: Facts
    fast: FastForward | None
    reads_trees: bool
    """Whether trees are read exactly; otherwise drafts are chains."""
    vocab_size: int
    """Logits per token."""

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Self:
        if cls is Target and model is not None:
            made: Self = object.__new__(_implementation(model))
            return made
        return object.__new__(cls)

    def __init__(
        self, model: PreTrainedModel | NativeModel, *, kv_cache: str | None = None,
        group: ProcessGroup = ALONE,
    ) -> None:
        if kv_cache is not None and kv_cache not in LAYERS:
            raise BadInput(
                f"the KV cache was to be {kv_cache!r}; choose one of {', '.join(LAYERS)}, or leave "
                "it out"
            )
        self.model: Any = model
        self.group, self.kv_cache = group, kv_cache
        config = model.config.get_text_config()
        self.name = model.config.name_or_path or type(model).__name__
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.context = context_of(config)
        self.hidden_size = int(getattr(config, "hidden_size", 0))
        self._scaling = LogitScaling.of(config)         # reading a config is slow
        self.quantization: Quantization | None = None

    @property
    def layout(self) -> Layout:
        return self.facts.layout

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, like recurrent and convolutional ones: only chains are read,
        and waiting tokens are read again."""
        return self.facts.has_states

    @property
    def ragged_batches(self) -> bool:
        """Whether absent nodes cost nothing, so that rows of a batch may have different numbers of
        nodes."""
        return self.fast is not None and self.fast.fused is not None

    @property
    def weights_version(self) -> object:
        """An object that is replaced when changed weights are adopted."""
        raise NotImplementedError

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False,
        hidden_layers: tuple[int, ...] = (),
    ) -> Reading:
        """Read the nodes `first:` of a tree; those before lie in the scratch already. Commits
        nothing.

        Args:
            tree: [B, N] tokens and their parents.
            cache: Keys and values of the rows; its scratch is written.
            first: The first node to read.
            last_only: Return logits of the last node alone.
            hidden_layers: Layers whose states are returned, numbered as in transformers.

        Returns:
            Logits [B, N - first, V] ([B, 1, V] with `last_only`), hidden [B, N - first, T, H].
        """
        assert self.fast is not None
        tokens = tree.tokens[:, first:] if first else tree.tokens
        logits, hidden = self.fast(tokens, tree, first, cache, last_only, hidden_layers)
        return self._reading(logits, hidden)

    def read_with_chunk(
        self, tree: TokenTree, chunk: Tensor, cache: KVCache,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[Reading, Reading] | None:  # fmt: skip
        """Read trees in the first rows of a cache, and in the same pass a chunk of a prompt in its
        last row. The weights are read once for both, and results have the same bits as two reads.

        Args:
            tree: [B, N] tokens and their parents, for fewer rows than the cache has.
            chunk: [1, W] tokens of the prompt.
            cache: The cache of all rows; it knows the length of its longest row.
            hidden_layers: As in `read`.

        Returns:
            The trees' reading as from `read`, and the chunk's as with `last_only`; None, without
            reading anything, if they cannot be read together.
        """
        fused = self.fast.fused if self.fast is not None else None
        nodes = max(tree.tokens.shape[1], chunk.shape[1])
        if fused is None or not fused.takes(nodes, cache):
            return None
        cache.reserve(nodes)
        trees, chunks = fused.with_chunk(tree, chunk, cache, hidden_layers)
        return self._reading(*trees), self._reading(*chunks)

    def features(
        self, tokens: Tensor, weights: Tensor, *, hidden_layers: tuple[int, ...] = (-1,),
        logits: bool = False,
    ) -> Features:
        """Read whole texts without a cache, for training.

        Args:
            tokens: [B, S], padded on the right.
            weights: [B, S], passed through.
            hidden_layers: As in `read`.
            logits: Also return logits after every token.
        """
        raise NotImplementedError

    def embed(self, tokens: Tensor, raw: bool = False) -> Tensor:
        """[..., H] the model's own token embeddings, before later steps of some families; raw: as
        stored in the table.

        Args:
            tokens: Token ids, int64.
            raw: Without the scale that the model applies.

        Returns:
            Embeddings, with one more dimension, of the hidden size.
        """
        raise NotImplementedError

    def unembed(self, hidden: Tensor, raw: bool = False) -> Tensor:
        """[..., V] logits of hidden states after the final norm, scaled or capped like the model's
        own; raw: as the head computes them.

        Args:
            hidden: Hidden states after the final norm, [..., H].
            raw: Without the scale or cap that the model applies.

        Returns:
            Logits [..., V].
        """
        raise NotImplementedError

    def with_model(self, model: PreTrainedModel | NativeModel) -> Target:
        """This target with another model of the same layout.

        Args:
            model: Another model of the same layout.

        Returns:
            A target that reads the other model.
        """
        raise NotImplementedError

    def module(self) -> PreTrainedModel:
        """The transformers module of the same weights, for everything that needs one; a native
        target loads it on first use."""
        return self.model

    def refresh(self) -> None:
        """Adopt weights that were changed."""

    def begin(self, cache: KVCache, sources: Sequence[object]) -> None:
        """Set the sources of a cache's rows, before their first token is read.

        Args:
            cache: The cache of the rows.
            sources: The encoder's input for each row.
        """

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` rows of `capacity` positions. Texts begin here, so changed
        weights are adopted.

        Args:
            rows: Rows of the batch.
            capacity: The most tokens of a row.

        Returns:
            An empty cache.
        """
        if self.group.is_single:
            self.refresh()
        return self.plain_cache(rows, capacity, LAYERS[self.kv_cache] if self.kv_cache else KVLayer)

    def plain_cache(self, rows: int, size: int, layer: type[KVLayer] = KVLayer) -> KVCache:
        """A cache that holds keys and values as the model computes them.

        Args:
            rows: Rows of the batch.
            size: The most tokens of a row.
            layer: The class that stores keys and values.

        Returns:
            An empty cache of keys and values alone.
        """
        layout = self.layout
        return KVCache.empty(layout.shapes, rows, size, layout.dtype, self.device, layer)

    @property
    def position_bytes(self) -> tuple[int, int]:
        """Bytes per position in the cache, and in a cache without quantised keys and values."""
        return self.new_cache(1, 1).nbytes, self.plain_cache(1, 1).nbytes

    def chain(
        self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int,
        draft_sampling: DraftSampling,
    ) -> Chains | None:
        """Draft the root and a chain of at most `steps` tokens for each row in one call of our
        kernels; None, without reading anything, where that is not possible.

        The chains contain the `nodes` most likely nodes of all rows, and may end after them. Tokens
        that rows lack before the root are read and committed, at most `width` with the root. The
        cache is bounded: no row of the prefix is longer.

        Args:
            prefix: The committed text of each row.
            width: The number of tokens that each row has yet to read.
            cache: The cache of the rows.
            steps: The most tokens to draft.
            nodes: The most nodes.
            draft_sampling: How to choose the tokens.
        """
        fused = self.fast.fused if self.fast is not None else None
        if fused is None or not fused.takes(max(width, steps), cache):
            return None
        # drafts need not be rounded like reads
        if self._scaling.divisor is not None:
            temperatures = draft_sampling.temperatures * self._scaling.divisor
            draft_sampling = draft_sampling._replace(temperatures=temperatures)
        return fused.chain(prefix, width, cache, steps, nodes, draft_sampling)

    def head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows of the LM head, if they can be read on their own.

        Args:
            tokens: [D] int64.

        Returns:
            Weight [D, H] and bias [D] in float32; None if logits are scaled, or if the head is a
            module that may do more than multiply.
        """
        return None

    @cached_property
    def native(self) -> Tables | None:
        """The embeddings and the head in the form our kernels read, for draft heads; small ones are
        copied."""
        plain = self._scaling == UNSCALED
        return Tables.of(self.fast) if plain and self.fast is not None else None

    def _reading(self, logits: Tensor, hidden: Tensor | None) -> Reading:
        """A reading of hidden states and of logits, scaled or capped like the model's own."""
        scaled = logits if self._scaling == UNSCALED else self._scaling.apply(logits)
        return Reading(scaled, hidden)

    def _adopt(self, facts: Facts, fast: FastForward | None) -> None:
        """Use these facts for all reads."""
        self.facts, self.fast = facts, fast
        self.reads_trees, self.vocab_size = facts.reads_trees, facts.vocab_size

    def _copy(self) -> Self:
        """A copy of the target, for another model or other facts."""
        other = copy.copy(self)
        other.__dict__.pop("native", None)
        return other


def _implementation(model: object) -> Any:
    """The class that reads a model. transformers is imported only for its own modules."""
    if isinstance(model, NativeModel):
        from draftproof.model.native_target import NativeTarget

        return NativeTarget
    from draftproof.model.module_target import ModuleTarget

    return ModuleTarget


def target_of(model: Any, **options: Any) -> Target:
    """Make the target of a model of any kind.

    Args:
        model: A transformers module, possibly an encoder-decoder, or a native model.
        options: Options of `Target`.
    """
    if not hasattr(model, "config"):
        raise BadInput(
            f"the model was {model!r:.60}; give a folder, a hub id or a transformers model"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        from draftproof.model.encoder_decoder import EncoderDecoder

        return EncoderDecoder(model, **options)
    return Target(model, **options)
