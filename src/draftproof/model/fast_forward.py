"""A short forward for the common families: the model's own layers, called without the machinery
around them.

It is used where a load-time read agrees with the model's own forward, and nowhere else. On CPUs
with kernels `fused_forward` reads up to 64 nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.core.tree import TokenTree
from draftproof.model.fused_forward import FusedForward
from draftproof.model.kv_cache import KVCache, tree_mask
from draftproof.model.layers import (
    AttentionKind,
    DecoderLayer,
    Linear,
    attention_kind,
    bare,
    decoder_layer,
    epsilon_of,
    native_of,
    norm_of,
    norm_weight,
)

FAMILIES = (
    "Gemma3ForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM", "MinistralForCausalLM",
    "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "SeedOssForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip
ROTATIONS = ("default", "linear", "llama3", "longrope", "yarn")
"""Rotary embeddings that depend on a position alone: longrope as far as its first limit, where a
target's context ends."""
GELU = "gelu_pytorch_tanh"
SHAPES = 64
"""Shapes of one forward that are compiled, at the most."""
QUERIES = 4
"""Attention is never asked for fewer: with AMX one query rounds differently from several, with
AVX-512 alone up to three do."""


class FastForward:
    """The decode forward of one model, with the model's own weights.

    windows: how many positions back attention sees, if not all, by kind of layer. context:
    positions the model knows.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Mapping[str, int | None], context: int
    ) -> None:
        body: Any = model.model
        self.windows, self.context = windows, context
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.hidden_size: int = model.config.hidden_size
        self.embed, self.rotary = body.embed_tokens, body.rotary_emb
        self.embed_scale = _embed_scale(model.config, body.embed_tokens)
        self.residual_scale = float(getattr(model.config, "residual_multiplier", 1.0))
        self.gelu = _activation(model.config) == GELU
        self.norm, self.norm_weight = norm_of(body.norm), norm_weight(body.norm)
        self.epsilon = epsilon_of(body.norm)
        self.head_dim = int(body.layers[0].self_attn.head_dim)
        kinds = [attention_kind(body, number, windows) for number in range(len(body.layers))]
        self.kinds = list(dict.fromkeys(kinds))
        self.layers = [
            decoder_layer(layer, self.head_dim, self.kinds.index(kind))
            for layer, kind in zip(body.layers, kinds, strict=True)
        ]
        norms = [one for one in body.modules() if type(one) is type(body.norm)]
        self.dtypes = {self.dtype, self.embed.weight.dtype, *(one.weight.dtype for one in norms)}
        self.head, self.native_head = bare(model.lm_head), native_of(model.lm_head)
        natives = [self.native_head, *(one for layer in self.layers for one in layer.natives)]
        self.native = not any(one is None for one in natives)
        self.sharing = self.layers[0].heads // self.layers[0].key_heads
        self.fused = FusedForward.of(self)
        self.backend: str | None = None                     # what compiled `forward`, if one did
        self.forward: Callable[..., tuple[Tensor, Tensor | None]] = self._forward

    def compile(self, backend: str) -> None:
        """Have the forward compiled for each shape it meets."""
        self.backend = backend
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
        self.forward = torch.compile(self._forward, backend=backend, dynamic=False, fullgraph=True)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is built of the parts this forward knows, with nothing hooked into
        them.

        Never in float64: there the point is to agree with transformers, whose norms compute in
        float32.
        """
        config = model.config
        return (
            type(model).__name__ in FAMILIES
            and model.dtype != torch.float64
            and _activation(config) in ("silu", GELU)
            and all(rotation in ROTATIONS for rotation in _rotations(config))
            and getattr(config, "attn_logit_softcapping", None) is None
            and not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
        )

    def of(self, model: PreTrainedModel) -> FastForward:
        """The same for another model of this kind, or for this one with other weights."""
        other = FastForward(model, self.windows, self.context)
        if self.native and self.fused is None:              # the kernels were found to disagree
            other.fused = None
        if self.backend is not None:
            other.compile(self.backend)
        return other

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Read the nodes `first:`, whose tokens are `tokens` [B, W], into the scratch of the cache.

        Absent ones are read as some token. Returns logits [B, W, V] (or [B, 1, V]) and hidden
        states [B, W, T, H] of `hidden_layers`, as transformers counts them.
        """
        if self.fused is not None and self.fused.takes(tokens.shape[1], cache):
            cache.reserve(tree.tokens.shape[1])
            return self.fused(tokens, tree, first, cache, last_only, hidden_layers)
        span = cache.write_at(first, tree.tokens.shape[1])
        positions = tree.positions(cache.lengths, self.context)[:, first:]
        masks = [
            tree_mask(tree, cache.lengths, span, self.dtype, first, kind.window)
            for kind in self.kinds
        ]
        return self.forward(tokens, positions, masks, cache, last_only, hidden_layers)

    def embedded(self, tokens: Tensor) -> Tensor:
        """[..., H] hidden states before the first layer; an unknown token is read as the nearest
        known one."""
        hidden = F.embedding(tokens.clamp(0, len(self.embed.weight) - 1), self.embed.weight)
        return hidden if self.embed_scale == 1 else hidden * self.embed_scale

    def angles(
        self, kind: AttentionKind, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, W, D] cosines and sines of positions [B, W]; what is not rotated has the angle 0."""
        cos, sin = self.rotary(hidden, positions, *([kind.rope] if kind.rope is not None else []))
        rest = self.head_dim - cos.shape[-1]
        return (F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))) if rest else (cos, sin)

    def _forward(
        self, tokens: Tensor, positions: Tensor, masks: list[Tensor], cache: KVCache,
        last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.embedded(tokens)
        # queries of heads that share keys are read as one head's
        folded = tokens.shape[1] * self.sharing
        copies = self.sharing * -(-QUERIES // folded)
        masks = [mask.repeat(1, 1, copies, 1) if copies > 1 else mask for mask in masks]
        seen = [
            (*self._rotation(kind, hidden, positions), mask)
            for kind, mask in zip(self.kinds, masks, strict=True)
        ]
        states = [hidden]
        for layer, store in zip(self.layers, cache.layers, strict=True):
            attended = self._attend(layer, store, layer.input_norm(hidden), *seen[layer.kind])
            hidden = hidden + self._added(attended, layer.post_attention)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
            gated = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
            hidden = hidden + self._added(layer.down(gated * up), layer.post_mlp)
            states.append(hidden)
        states[-1] = hidden = self.norm(hidden)
        logits = self.head(hidden[:, -1:] if last_only else hidden)
        some = [states[number] for number in hidden_layers]
        return logits, torch.stack(some, 2) if some else None

    def _added(self, delta: Tensor, norm: Linear | None) -> Tensor:
        """What a layer adds to the residual stream."""
        if norm is not None:
            return norm(delta)
        return delta if self.residual_scale == 1 else delta * self.residual_scale

    def _rotation(
        self, kind: AttentionKind, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, 1, W, D] cosines, and sines signed: to swap halves then rotates by a quarter turn."""
        (cos, sin), half = self.angles(kind, hidden, positions), kind.rotary_dim // 2
        return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]

    def _rotated(self, kind: AttentionKind, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding of heads [B, heads, W, D]."""
        if not (half := kind.rotary_dim // 2):
            return heads
        swapped = (heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :])
        return torch.addcmul(heads * cos, torch.cat(swapped, -1), sin)

    def _attend(
        self, layer: DecoderLayer, store: Any, inputs: Tensor, cos: Tensor, sin: Tensor,
        mask: Tensor
    ) -> Tensor:
        rows, width, _ = inputs.shape
        # [B, heads, W, D]
        qkv = layer.qkv(inputs).view(rows, width, -1, self.head_dim).transpose(1, 2)
        query_key, value = torch.split(qkv, [layer.heads + layer.key_heads, layer.key_heads], 1)
        query_key = query_key if layer.head_norm is None else layer.head_norm(query_key)
        query_key = self._rotated(self.kinds[layer.kind], query_key, cos, sin)
        query, key = torch.split(query_key, [layer.heads, layer.key_heads], 1)
        keys, values = store.update(key, value)
        folded = width * self.sharing
        query = query.reshape(rows, layer.key_heads, folded, self.head_dim)
        if mask.shape[2] > folded:
            query = query.repeat(1, 1, mask.shape[2] // folded, 1)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scale)
        out = out[:, :, :folded].reshape(rows, layer.heads, width, self.head_dim)
        return layer.output(out.transpose(1, 2).reshape(rows, width, -1))


def _activation(config: Any) -> str | None:
    return getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)


def _rotations(config: Any) -> list[str]:
    """Kinds of rotary embedding, by name; of each kind of layer where these differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    several = [one for one in rope.values() if isinstance(one, dict)]
    return [one.get("rope_type", "default") for one in several or [rope]]


def _embed_scale(config: Any, embed: Any) -> float:
    """What embeddings are multiplied by, rounded as the model rounds it."""
    if (scale := getattr(embed, "embed_scale", None)) is not None:
        return float(scale.to(embed.weight.dtype))
    return float(getattr(config, "embedding_multiplier", 1.0))
