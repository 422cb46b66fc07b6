"""The target: a causal language model that reads token trees. Knows transformers' forward; chooses nothing.

The draft model of speculative sampling is read through the same class: to it, drafting is reading.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from draftproof.core.messages import Features, Reading
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import BadInput, BrokenModel, UnsupportedModel, first_line
from draftproof.model.fast_forward import FastForward
from draftproof.model.fused_forward import Tables
from draftproof.model.kv_cache import LAYERS, KVCache, KVLayer, LayerShape, tree_mask
from draftproof.model.parallel import ALONE, ProcessGroup
from draftproof.model.quantize import Quantization, first_layers, is_quantized, quantized_and_compared
from draftproof.native.kernels import Chains, kernels

UNLIMITED = 1 << 30
"""The context of a model whose configuration names no limit."""
NEAR = 0.02
"""Nats per token that a draft model may stray when it is made lighter without being asked."""


class Target:
    """A causal LM as the decoder sees it.

    model: any `PreTrainedModel` with a language-model head, put in evaluation mode and otherwise left alone.
    kv_cache: "int8" or "fp8" to store keys and values in so many bits; None, as the model computes them.
    group: the ranks that hold the model's parts, if it is sharded; each keeps the keys and values of its own heads.
    Raises UnsupportedModel, in one sentence, for what cannot be read exactly: the check reads a small tree and
    compares it with the model's own forward on every path.
    """

    def __init__(self, model: PreTrainedModel, *, kv_cache: str | None = None, group: ProcessGroup = ALONE) -> None:
        if kv_cache is not None and kv_cache not in LAYERS:
            raise BadInput(f"the KV cache was to be {kv_cache!r}; choose one of {', '.join(LAYERS)}, or leave it out")
        self.model, self.group = model.eval(), group
        config = model.config.get_text_config()
        self.name = model.config.name_or_path or type(model).__name__
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.context = _context_of(config)
        self.hidden_size: int = config.hidden_size
        self._ending = _Ending.of(config)                # a config is slow to ask
        self.kv_cache = kv_cache
        self.quantization: Quantization | None = None    # what it cost, and saved
        self._noise = _NOISE[torch.bfloat16 if is_quantized(model) and self.dtype != torch.float16 else self.dtype]
        self._trims = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._fast: FastForward | None = None
        with torch.inference_mode():
            self._layout = _layout_of(model)
            self.vocab_size = self._layout.vocab
            fits = group.alone and FastForward.fits(model)
            self._examine(FastForward(model, self._layout.windows, self.context) if fits else None)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` rows of `capacity` positions."""
        return self._new_cache(rows, capacity, LAYERS[self.kv_cache] if self.kv_cache else KVLayer)

    def quantized(self, kind: str, text: Tensor | None = None, *, give_up: bool = False) -> Target:
        """This target with quantised layers, compared with the original on `text`, token ids [S]; see `quantize.quantized`.

        What was found out about the original holds: quantising changes weights, not what a layer may see.
        """
        other = copy.copy(self)
        other.__dict__.pop("native", None)
        other.model, other.quantization = quantized_and_compared(self.model, kind, text, give_up=give_up)
        other._fast = self._fast.of(other.model) if self._fast is not None else None
        return other

    def lighter(self, text: Sequence[int]) -> Target | None:
        """This target with 8-bit weights, for drafting: where our kernels read those and what it says of a text stays near."""
        plain = self.dtype == torch.bfloat16 and self.device.type == "cpu" and not is_quantized(self.model)
        found, known = kernels() if plain else None, [token for token in text[: self.context] if token < self.vocab_size]
        if found is None or not found.int8 or not known:
            return None
        try:
            other = self.quantized("int8", torch.tensor(known))
        except BadInput:                                                # nothing to quantise
            return None
        return other if other.quantization is not None and other.quantization.kl <= NEAR else None

    def compiled(self, backend: str = "inductor") -> Target:
        """This target with its forward compiled by torch.compile, for each shape it meets.

        inductor keeps what it compiled on disk. Raises UnsupportedModel if the model has no fast forward, or if compiled it
        does not agree with the model's own.
        """
        if self._fast is None:
            raise UnsupportedModel(f"{self.name} has no fast forward, which is what is compiled; leave --compile out")
        if self._fast.native:
            raise UnsupportedModel(f"{self.name} is read by kernels that are compiled already; leave --compile out")
        other = copy.copy(self)
        other._fast = self._fast.of(self.model)
        other._fast.compile(backend)
        with torch.inference_mode():
            text = torch.arange(10, device=self.device) % self.vocab_size
            error = other._error(_Case.of(self.model, text, _TESTED, together=True))
        if not error <= 6 * self._noise:
            how = f"gives other logits when compiled ({error:.1g} off)" if isfinite(error) else "cannot be compiled"
            raise UnsupportedModel(f"{self.name} {how}; leave --compile out")
        return other

    def first_layers(self, count: int) -> Target:
        """The first `count` layers of this target as a target of its own, behind the same final norm and head."""
        other = copy.copy(self)
        other.model = first_layers(self.model, count)
        other._layout = self._layout._replace(shapes=self._layout.shapes[:count])
        other._fast = self._fast.of(other.model) if self._fast is not None else None
        return other

    @property
    def skips_absent(self) -> bool:
        """Whether nodes that are not there cost nothing, so that rows of a batch may as well have different numbers of them."""
        return self._fast is not None and self._fast.fused is not None

    @property
    def is_fast(self) -> bool:
        """Whether a `FastForward` reads, in place of the model's own forward."""
        return self._fast is not None

    @property
    def position_bytes(self) -> tuple[int, int]:
        """Bytes the cache holds per position, and those it would hold as the model computes them."""
        return self.new_cache(1, 1).nbytes, self._new_cache(1, 1, KVLayer).nbytes

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> Reading:
        """Read the nodes `first:` of a tree; those before lie in the scratch already. Commits nothing.

        last_only: return logits of the last node alone. taps: hidden layers to return, counted as transformers does.
        Reading: logits [B, N - first, V] ([B, 1, V] with `last_only`), hidden [B, N - first, T, H] or None.
        """
        tokens = tree.tokens[:, first:] if first else tree.tokens
        if self._fast is not None:
            logits, hidden = self._fast(tokens, tree, first, cache, last_only, hidden_layers)
            return Reading(self._ending.finished(logits), hidden)
        span = cache.write_at(first, tree.tokens.shape[1])
        out: Any = self.model(
            input_ids=tokens.clamp(0, self.vocab_size - 1),
            attention_mask=self._masks(tree, cache.lengths, span, first),
            position_ids=tree.positions(cache.lengths, self.context)[:, first:],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(hidden_layers),
            **({"logits_to_keep": 1} if last_only and self._trims else {}),
        )
        logits = out.logits[:, -1:] if last_only else out.logits
        hidden = torch.stack([out.hidden_states[tap] for tap in hidden_layers], 2) if hidden_layers else None
        return Reading(logits, hidden)

    def chain(self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int, draft_sampling: DraftSampling) -> Chains | None:
        """[B, 1 + d] the root and a chain of at most `steps` tokens, for a draft model; see `FastForward.chain`.

        None, and nothing was read, where this takes a read per token.
        """
        if self._fast is None:
            return None
        if self._ending.divisor is not None:                            # what is drafted need not be rounded as it is read
            draft_sampling = draft_sampling._replace(temperatures=draft_sampling.temperatures * self._ending.divisor)
        return self._fast.chain(prefix, width, cache, steps, nodes, draft_sampling)

    def features(self, tokens: Tensor, weights: Tensor, *, hidden_layers: tuple[int, ...] = (-1,), logits: bool = False) -> Features:
        """Read whole texts without a cache, for training: tokens [B, S], the shorter ones padded on the right.

        weights: [B, S] passed through. taps: as in `read`. logits: return those behind every token as well.
        """
        out: Any = self.model(
            input_ids=tokens.clamp(0, self.vocab_size - 1),
            use_cache=False,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if not logits and self._trims else {}),
        )
        hidden = torch.stack([out.hidden_states[tap] for tap in hidden_layers], 2)
        return Features(tokens, hidden, weights, out.logits if logits else None)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] the model's own token embeddings, without what some families do to them afterwards."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens.clamp(0, self.vocab_size - 1))
        return embedded

    def unembed(self, hidden: Tensor) -> Tensor:
        """[..., V] logits of hidden states behind the final norm, scaled or capped where the model's own are."""
        packed = self._fast is not None and torch.is_inference_mode_enabled()           # packed weights know no gradients
        head = self._fast.head if packed and self._fast is not None else self.model.get_output_embeddings()
        wide = hidden if self.group.alone else hidden.reshape(1, -1, hidden.shape[-1])  # DeepSpeed's want three dimensions
        logits = self._ending.finished(head(wide))
        return logits if self.group.alone else logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    @cached_property
    def native(self) -> Tables | None:
        """The tables between tokens and hidden states as our kernels read them, for draft heads; what is small is copied."""
        plain = self._ending == _Ending(None, None, None) and self.group.alone and self._fast is not None
        return Tables.of(self._fast) if plain and self._fast is not None else None

    def _masks(self, tree: TokenTree, lengths: Tensor, span: int, first: int) -> Tensor | dict[str, Tensor]:
        def mask(window: int | None) -> Tensor:
            return tree_mask(tree, lengths, span, self.dtype, first, window)

        kinds = {kind: mask(window) for kind, window in self._layout.windows.items()}
        return kinds if len(kinds) > 1 else next(iter(kinds.values()))

    def _new_cache(self, rows: int, capacity: int, layer: type[KVLayer]) -> KVCache:
        return KVCache.empty(self._layout.shapes, rows, capacity, self._layout.dtype, self.device, layer)

    def _examine(self, fast: FastForward | None) -> None:
        """Find out whether trees are read exactly, and by which forward; raise if not even chains are.

        A chain and a tree behind three committed tokens are compared with the model's own forward on
        every path. `fast` is used if it agrees as closely as the stock forward does.
        """
        text = torch.randint(self.vocab_size, (10,), generator=torch.Generator().manual_seed(0)).to(self.device)
        chain = _Case.of(self.model, text, TreeShape.chain(4), together=False)
        tree = _Case.of(self.model, text, _TESTED, together=True)
        on_chain, on_tree = self._error(chain), self._error(tree)
        if not on_chain <= 6 * self._noise:
            raise UnsupportedModel(
                f"{type(self.model).__name__} gives other logits when read through a cache with explicit positions and a "
                "four-dimensional mask than on its own (ALiBi models do, for one); it cannot be run exactly, choose another"
            )
        # an ALiBi that counts slots is right for chains, and wrong for trees by hardly more than half precision blurs
        self.reads_trees = bool(self.group.number(on_tree <= max(self._noise, 3 * on_chain)))
        enough = max(self._noise, 3 * on_tree)
        self._fast = fast
        if fast is not None and fast.fused is not None and not self._error(tree) <= enough:
            fast.fused = None
        if fast is not None and fast.fused is None and not self._error(tree) <= enough:
            self._fast = None

    def _error(self, case: _Case) -> float:
        """How far a read of the case is from the model's own forward, relative to its logits."""
        cache, lead = self._new_cache(1, 32, KVLayer), case.lead
        try:
            self.read(TokenTree.chain(lead), cache)
            cache.keep(None, torch.full_like(cache.lengths, lead.shape[1]))
            with self.group.intact():
                logits = self.read(case.tree, cache).logits[0].double()
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
            return float("inf")
        return float(((logits - case.logits).abs().max() / case.logits.abs().max()).detach())


class _Case(NamedTuple):
    """A tree behind committed tokens `lead` [1, L], and the model's own logits [N, V] behind each of its nodes."""

    lead: Tensor
    tree: TokenTree
    logits: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, text: Tensor, shape: TreeShape, *, together: bool) -> _Case:
        """together: read all paths side by side, which is quicker and shows less of what rounding does."""
        nodes, lead = len(shape), text[:3]
        tree = TokenTree.shaped(text[None, 3 : 3 + nodes], shape)
        paths = [torch.cat([lead, tree.tokens[0][tree.ancestors[0, node]]]) for node in range(nodes)]
        padded = nn.utils.rnn.pad_sequence(paths, batch_first=True)                 # what follows is not seen
        parts = [padded] if together else [path[None] for path in paths]
        read = [row for part in parts for row in model(input_ids=part, use_cache=False).logits]
        last = [row[len(path) - 1] for row, path in zip(read, paths, strict=True)]
        return cls(lead[None], tree, torch.stack(last).double())


_TESTED = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""The tree read at load."""

_NOISE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}     # float64 has float32 inside


class _Ending(NamedTuple):
    """What families do to the logits of their head: Cohere multiplies, Granite divides, Gemma 2 caps them."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> _Ending:
        factor, divisor, cap = (
            getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping")
        )
        multiplies = isinstance(factor, float) and factor != 1
        divides = isinstance(divisor, (int, float)) and divisor != 1
        return cls(factor if multiplies else None, divisor if divides else None, cap or None)

    def finished(self, logits: Tensor) -> Tensor:
        """[..., V] what is sampled from."""
        logits = logits if self.factor is None else logits * self.factor
        logits = logits if self.divisor is None else logits / self.divisor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


class _Layout(NamedTuple):
    shapes: list[LayerShape]
    windows: dict[str, int | None]          # attention kind → window
    vocab: int
    dtype: torch.dtype                      # of keys and values


def _context_of(config: Any) -> int:
    """Positions the model reads alike in any batch: LongRoPE rescales all of them once one lies beyond its first limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    if rope.get("rope_type") == "longrope":
        limits.append(rope.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=UNLIMITED)


def _layout_of(model: PreTrainedModel) -> _Layout:
    """What the model stores per layer, learnt from one forward with transformers' own cache."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; draftproof runs decoder-only causal language models")
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModel(f"{name} uses {attention} attention; load it with attn_implementation='sdpa' or 'eager'")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        found = ", ".join(sorted(kinds))
        raise UnsupportedModel(f"{name} has {found} layers, which masks cannot express; choose another model")
    cache = DynamicCache(config=model.config)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModel(f"{name} does not run as a causal language model with a KV cache: {first_line(error)}") from error
    if not bool(out.logits.isfinite().any()):
        raise BrokenModel(f"{name} gives no finite logit for a two-token text; its weights are broken, or its dtype small")
    strange = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if strange or not cache.layers or not all(layer.is_initialized for layer in cache.layers):
        what = ", ".join(sorted(strange)) or "no attention cache"
        raise UnsupportedModel(f"{name} keeps state that cannot be rolled back by tokens ({what}); choose another model")
    windows: dict[str, int | None] = {}
    for layer in cache.layers:
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        windows["sliding_attention" if sliding else "full_attention"] = layer.sliding_window if sliding else None
    shapes = [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]
    return _Layout(shapes, windows, out.logits.shape[-1], cache.layers[0].keys.dtype)
