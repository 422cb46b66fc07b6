"""What a model stores and does to its logits, found out at load; models that cannot be served are
refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import BrokenModel, UnsupportedModel, first_line
from draftproof.model.kv_layer import LayerShape

if TYPE_CHECKING:
    from draftproof.model.fast_forward import FastForward
    from draftproof.model.target import Target

log = logging.getLogger("draftproof")

UNLIMITED = 1 << 30
"""The context of a model whose configuration names no limit."""


class LogitScaling(NamedTuple):
    """What families do to the logits of their head: Cohere multiplies, Granite divides, Gemma 2
    caps them."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        factor, divisor, cap = (
            getattr(config, name, None) for name in (
                "logit_scale", "logits_scaling", "final_logit_softcapping"
            )
        )
        multiplies = isinstance(factor, float) and factor != 1
        divides = isinstance(divisor, (int, float)) and divisor != 1
        return cls(factor if multiplies else None, divisor if divides else None, cap or None)

    def apply(self, logits: Tensor) -> Tensor:
        """[..., V] the logits that are sampled from."""
        logits = logits if self.factor is None else logits * self.factor
        logits = logits if self.divisor is None else logits / self.divisor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


class Layout(NamedTuple):
    """What a model stores."""

    shapes: list[LayerShape]
    windows: dict[str, int | None]          # attention kind → window
    vocab: int
    dtype: torch.dtype                      # of keys and values

    def told(self) -> list[Any]:
        """As JSON has it."""
        return [*self[:3], str(self.dtype).removeprefix("torch.")]

    @classmethod
    def of(cls, told: list[Any]) -> Layout:
        """What `told` told."""
        shapes, windows, vocab, dtype = told
        return cls([LayerShape(*one) for one in shapes], windows, vocab, getattr(torch, dtype))


def context_of(config: Any) -> int:
    """Positions the model reads alike in any batch: LongRoPE and dynamic NTK rescale all of them
    once one lies beyond a limit, and a warning says so."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    rescales = rope.get("rope_type") in ("dynamic", "longrope")
    if rescales:
        limits.append(rope.get("original_max_position_embeddings"))
    context = min((limit for limit in limits if limit), default=UNLIMITED)
    if rescales and context < UNLIMITED:
        log.warning("note: %s positions are rescaled (%s rope) in texts beyond %d tokens, which "
                    "cannot be exact; texts end there", config.model_type, rope["rope_type"], context)
    return context


def layout_of(model: PreTrainedModel) -> Layout:
    """What the model stores per layer, learnt from one forward with transformers' own cache."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder; draftproof runs decoder-only causal language models"
        )
    absent = next((part for part, weight in model.named_parameters() if weight.is_meta), None)
    if absent is not None:
        raise UnsupportedModel(
            f"{name} has weights that are not in memory ({absent} is on the meta device): it was "
            "offloaded, or never loaded; load it whole, on one device"
        )
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"{name} uses {attention} attention; load it with attn_implementation='sdpa' or 'eager'"
        )
    kinds = set(
        getattr(model.config.get_text_config(), "layer_types", None) or ()
    ) - {"full_attention", "sliding_attention"}
    if kinds:
        found = ", ".join(sorted(kinds))
        raise UnsupportedModel(
            f"{name} has {found} layers, which masks cannot express; choose another model"
        )
    cache = DynamicCache(config=model.config)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModel(
            f"{name} does not run as a causal language model with a KV cache: {first_line(error)}"
        ) from error
    if getattr(out, "logits", None) is None or out.logits.dim() != 3:
        raise UnsupportedModel(
            f"{name} has no language-model head; load it with AutoModelForCausalLM"
        )
    if not bool(out.logits.isfinite().any()):
        raise BrokenModel(
            f"{name} gives no finite logit for a two-token text; its weights are broken, or its "
            "dtype small"
        )
    strange = {
        type(layer).__name__ for layer in cache.layers
    } - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if strange or not cache.layers or not all(layer.is_initialized for layer in cache.layers):
        what = ", ".join(sorted(strange)) or "no attention cache"
        raise UnsupportedModel(
            f"{name} keeps state that cannot be rolled back by tokens ({what}); choose another "
            "model"
        )
    windows: dict[str, int | None] = {}
    for layer in cache.layers:
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        windows["sliding_attention" if sliding else "full_attention"] = (
            layer.sliding_window if sliding else None
        )
    shapes = [
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in cache.layers
    ]
    return Layout(shapes, windows, out.logits.shape[-1], cache.layers[0].keys.dtype)


class CheckedRead(NamedTuple):
    """A tree behind committed tokens `lead` [1, L], and the model's own logits [N, V] behind each
    of its nodes."""

    lead: Tensor
    tree: TokenTree
    logits: Tensor

    @classmethod
    def of(
        cls, model: PreTrainedModel, text: Tensor, shape: TreeShape, *, together: bool
    ) -> CheckedRead:
        """together: read all paths side by side, which is quicker and shows less of what rounding
        does."""
        nodes, lead = len(shape), text[:3]
        tree = TokenTree.shaped(text[None, 3 : 3 + nodes], shape)
        paths = [
            torch.cat([lead, tree.tokens[0][tree.ancestors[0, node]]]) for node in range(nodes)
        ]
        # what follows is not seen
        padded = nn.utils.rnn.pad_sequence(paths, batch_first=True)
        parts = [padded] if together else [path[None] for path in paths]
        read = [row for part in parts for row in model(input_ids=part, use_cache=False).logits]
        last = [row[len(path) - 1] for row, path in zip(read, paths, strict=True)]
        return cls(lead[None], tree, torch.stack(last).double())

    def error(self, target: Target) -> float:
        """How far the target's read is from the model's own forward, relative to its logits."""
        cache = target.plain_cache(1, 32)
        try:
            target.read(TokenTree.chain(self.lead), cache)
            cache.keep(None, torch.full_like(cache.lengths, self.lead.shape[1]))
            with target.group.intact():
                logits = target.read(self.tree, cache).logits[0].double()
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
            return float("inf")
        return float(((logits - self.logits).abs().max() / self.logits.abs().max()).detach())


CHECK_TREE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""The tree read at load."""

# float64 has float32 inside
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def examined(target: Target, fast: FastForward | None) -> tuple[bool, FastForward | None]:
    """Whether a target, which has no fast forward yet, reads trees exactly, and `fast` if it agrees
    as closely as the stock forward does; raise if not even chains are read exactly.

    A chain and a tree behind three committed tokens are compared with the model's own forward on
    every path.
    """
    model, tolerance = target.model, target.tolerance
    text = torch.randint(target.vocab_size, (10,), generator=torch.Generator().manual_seed(0))
    text = text.to(target.device)
    chain = CheckedRead.of(model, text, TreeShape.chain(4), together=False)
    tree = CheckedRead.of(model, text, CHECK_TREE, together=True)
    on_chain, on_tree = chain.error(target), tree.error(target)
    if not on_chain <= 6 * tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__} gives other logits when read through a cache with explicit "
            "positions and a four-dimensional mask than on its own (ALiBi models do, for one); it "
            "cannot be run exactly, choose another"
        )
    # an ALiBi that counts slots is right for chains, and wrong for trees by hardly more than half
    # precision blurs
    reads_trees = bool(target.group.number(on_tree <= max(tolerance, 3 * on_chain)))
    enough = max(tolerance, 3 * on_tree)
    target._fast = fast
    if fast is not None and fast.fused is not None and not tree.error(target) <= enough:
        fast.fused = None
    if fast is not None and fast.fused is None and not tree.error(target) <= enough:
        fast = None
    return reads_trees, fast
