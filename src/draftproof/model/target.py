"""The target: a causal language model that reads token trees.

The draft model of speculative sampling is read through the same class: to it, drafting is reading.
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
    """A causal LM as the decoder sees it.

    `Target(model)` makes the implementation for the model, as `pathlib.Path` does for a system.

    Args:
        model: A transformers module with a language-model head, put in evaluation mode and
            otherwise left alone; or a `NativeModel`.
        kv_cache: "int8" or "fp8" to store keys and values in so many bits; None, as the model
            computes them.
        group: The ranks that hold the model's parts, if it is sharded; each keeps the keys and
            values of its own heads.

    Attributes:
        facts: What the model stores, which drafts it reads exactly, and by which forward.
        model: The module or native model that is read.
        context: Positions the model knows.
        quantization: What quantising cost and saved, if it was quantised.

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
        self._scaling = LogitScaling.of(config)         # a config is slow to ask
        self.quantization: Quantization | None = None

    @property
    def layout(self) -> Layout:
        return self.facts.layout

    @property
    def has_states(self) -> bool:
        """Whether layers keep states, as recurrent and convolutional ones do: chains are read, and
        what waits is read again."""
        return self.facts.has_states

    @property
    def ragged_batches(self) -> bool:
        """Whether nodes that are not there cost nothing, so that rows of a batch may as well have
        different numbers of them."""
        return self.fast is not None and self.fast.fused is not None

    @property
    def weights_version(self) -> object:
        """Another object once the weights were changed and taken up."""
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
            hidden_layers: Layers whose states are returned, counted as transformers does.

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
        """Read trees of the first rows of a cache, and in the same pass a chunk of a prompt in its
        last row. The weights are read once for both, and no bit differs from two reads.

        Args:
            tree: [B, N] tokens and their parents, of fewer rows than the cache has.
            chunk: [1, W] tokens of the prompt.
            cache: All rows of a batch; it knows the length of its longest row.
            hidden_layers: As in `read`.

        Returns:
            Of the trees as `read`, of the chunk as with `last_only`; None, and nothing was read, if
            they cannot be read together.
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
            tokens: [B, S], the shorter ones padded on the right.
            weights: [B, S], passed through.
            hidden_layers: As in `read`.
            logits: Return those after every token as well.
        """
        raise NotImplementedError

    def embed(self, tokens: Tensor, raw: bool = False) -> Tensor:
        """[..., H] the model's own token embeddings, without what some families do to them
        afterwards; raw: as their table has them.

        Args:
            tokens: Token ids, int64.
            raw: Without the scale that the model applies.

        Returns:
            Embeddings, one more dimension of the hidden size.
        """
        raise NotImplementedError

    def unembed(self, hidden: Tensor, raw: bool = False) -> Tensor:
        """[..., V] logits of hidden states after the final norm, scaled or capped where the
        model's own are; raw: as the head has them.

        Args:
            hidden: Hidden states after the final norm, [..., H].
            raw: Without the scale or cap that the model applies.

        Returns:
            Logits [..., V].
        """
        raise NotImplementedError

    def with_model(self, model: Any) -> Target:
        """This target with another model, which stores and sees what its own does.

        Args:
            model: Another model of the same layout.

        Returns:
            A target that reads it.
        """
        raise NotImplementedError

    def module(self) -> PreTrainedModel:
        """The transformers module of the same weights, for what only that can do; a native target
        loads it when it is first asked."""
        return self.model

    def refresh(self) -> None:
        """Take up weights that somebody changed."""

    def begin(self, cache: KVCache, sources: Sequence[object]) -> None:
        """Let the rows of a cache be about these sources, before their first token is read.

        Args:
            cache: The cache of the rows.
            sources: What the encoder reads of each row.
        """

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` rows of `capacity` positions. Texts begin here, so weights that
        changed are taken up.

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
        """One that holds keys and values as the model computes them.

        Args:
            rows: Rows of the batch.
            size: The most tokens of a row.
            layer: The class that stores keys and values.

        Returns:
            An empty cache of nothing but keys and values.
        """
        layout = self.layout
        return KVCache.empty(layout.shapes, rows, size, layout.dtype, self.device, layer)

    @property
    def position_bytes(self) -> tuple[int, int]:
        """Bytes per position in the cache, and in one that holds what the model computes."""
        return self.new_cache(1, 1).nbytes, self.plain_cache(1, 1).nbytes

    def chain(
        self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int,
        draft_sampling: DraftSampling,
    ) -> Chains | None:
        """Of each row the root and a chain of at most `steps` tokens, drafted in one call of our
        kernels; None, and nothing was read, where it cannot be.

        The likeliest `nodes` of all rows are among them; where a chain is not among these it may
        end. What rows lack before the root is read and committed, at most `width` tokens with the
        root. The cache is bounded: no row of the prefix is longer.

        Args:
            prefix: The committed text of each row.
            width: Tokens that each row has yet to read.
            cache: The cache of the rows.
            steps: The most tokens to draft.
            nodes: The most nodes.
            draft_sampling: How the tokens are chosen.
        """
        fused = self.fast.fused if self.fast is not None else None
        if fused is None or not fused.takes(max(width, steps), cache):
            return None
        # what is drafted need not be rounded as it is read
        if self._scaling.divisor is not None:
            temperatures = draft_sampling.temperatures * self._scaling.divisor
            draft_sampling = draft_sampling._replace(temperatures=temperatures)
        return fused.chain(prefix, width, cache, steps, nodes, draft_sampling)

    def head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows of the LM head, where they can be read without the rest.

        Args:
            tokens: [D] int64.

        Returns:
            Weight [D, H] and bias [D] in float32; None where logits are scaled, or the head is a
            module that may do more than multiply.
        """
        return None

    @cached_property
    def native(self) -> Tables | None:
        """The tables between tokens and hidden states as our kernels read them, for draft heads;
        what is small is copied."""
        plain = self._scaling == UNSCALED
        return Tables.of(self.fast) if plain and self.fast is not None else None

    def _reading(self, logits: Tensor, hidden: Tensor | None) -> Reading:
        """Logits scaled or capped where the model's own are, and hidden states."""
        scaled = logits if self._scaling == UNSCALED else self._scaling.apply(logits)
        return Reading(scaled, hidden)

    def _adopt(self, facts: Facts, fast: FastForward | None) -> None:
        """Read as these facts say."""
        self.facts, self.fast = facts, fast
        self.reads_trees, self.vocab_size = facts.reads_trees, facts.vocab_size

    def _copy(self) -> Self:
        """The same target, to be given another model or other facts."""
        other = copy.copy(self)
        other.__dict__.pop("native", None)
        return other


def _implementation(model: object) -> Any:
    """The class that reads a model. transformers is imported for its own modules alone."""
    if isinstance(model, NativeModel):
        from draftproof.model.native_target import NativeTarget

        return NativeTarget
    from draftproof.model.module_target import ModuleTarget

    return ModuleTarget


def target_of(model: Any, **options: Any) -> Target:
    """The model as the decoder sees it, whichever kind it is.

    Args:
        model: A transformers module, an encoder-decoder too, or a native model.
        options: Those of `Target`.
    """
    if not hasattr(model, "config"):
        raise BadInput(
            f"the model was {model!r:.60}; give a folder, a hub id or a transformers model"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        from draftproof.model.encoder_decoder import EncoderDecoder

        return EncoderDecoder(model, **options)
    return Target(model, **options)
