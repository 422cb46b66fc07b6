"""A short forward for the common families: the model's layers, called without the overhead of
their modules.

It is used only where it agrees with the model's own forward in the check at load. On CPUs with
kernels, `fused_forward` reads up to 64 nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.cache.kv_cache import KVCache, tree_mask
from draftproof.core.tree import TokenTree
from draftproof.forward.decoder_layers import AttentionKind, Decoder, DecoderLayer, Linear
from draftproof.forward.fused_forward import FusedForward

if TYPE_CHECKING:
    from draftproof.cache.kv_layer import KVLayer

SHAPES = 64
"""The most shapes for which a forward is compiled."""
QUERIES = 4
"""Attention is computed for at least so many queries. With AMX one query rounds differently from
several, with AVX-512 alone up to three do."""


class FastForward:
    """The forward of a decoder by torch's operators and, where a CPU has them, our kernels.

    Args:
        decoder: The parts of the decoder.
        use_kernels: Whether our kernels may compute whole reads in one call, where they fit.
    """

    def __init__(self, decoder: Decoder, *, use_kernels: bool = True) -> None:
        self.decoder = decoder
        self.dtype, self.device = decoder.dtype, decoder.device
        self.context, self.kinds, self.layers = decoder.context, decoder.kinds, decoder.layers
        self.embed, self.head, self.head_dim = decoder.embed, decoder.head, decoder.head_dim
        self.native_head = decoder.native_head
        natives = [self.native_head, *(weight for layer in self.layers for weight in layer.natives)]
        self.native = not any(weight is None for weight in natives)
        self.sharing = self.layers[0].heads // self.layers[0].key_heads
        self.fused = FusedForward.of(self) if use_kernels else None
        self.backend: str | None = None                     # the compiler of `forward`, if any
        self.forward: Callable[..., tuple[Tensor, Tensor | None]] = self._forward

    def compile(self, backend: str) -> None:
        """Compile the forward for each shape that it is called with."""
        self.backend = backend
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
        self.forward = torch.compile(self._forward, backend=backend, dynamic=False, fullgraph=True)

    def with_decoder(self, decoder: Decoder) -> FastForward:
        """The same forward for another decoder, with this one's compiler and use of kernels."""
        other = FastForward(decoder, use_kernels=not (self.native and self.fused is None))
        if self.backend is not None:
            other.compile(self.backend)
        return other

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Read the nodes `first:`, whose tokens are `tokens` [B, W], into the scratch of the cache.

        Absent nodes are read as an arbitrary token. Returns logits [B, W, V] (or [B, 1, V]) and
        hidden states [B, W, T, H] of `hidden_layers`, numbered as in transformers.
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
        """[..., H] hidden states before the first layer; a token outside of the vocabulary is read
        as the nearest one inside."""
        hidden = self.embed.rows(tokens.clamp(0, self.embed.shape[0] - 1))
        scale = self.decoder.embed_scale
        return hidden if scale == 1 else hidden * scale

    def angles(self, kind: AttentionKind, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, W, D] cosines and sines of positions [B, W]; the angle is 0 without rotation."""
        cos, sin = self.decoder.angles(kind, positions, self.dtype)
        rest = self.head_dim - cos.shape[-1]
        return (F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))) if rest else (cos, sin)

    def _forward(
        self, tokens: Tensor, positions: Tensor, masks: list[Tensor], cache: KVCache,
        last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.embedded(tokens)
        seen = [
            (*self._rotation(kind, positions), self._folded(mask))
            for kind, mask in zip(self.kinds, masks, strict=True)
        ]
        states = [hidden]
        for layer, store in zip(self.layers, cache.layers, strict=True):
            hidden = self._layer(layer, store, hidden, *seen[layer.kind])
            states.append(hidden)
        states[-1] = hidden = self.decoder.norm(hidden)
        logits = self.head(hidden[:, -1:] if last_only else hidden)
        selected = [states[number] for number in hidden_layers]
        return logits, torch.stack(selected, 2) if selected else None

    def layer(
        self, layer: DecoderLayer, store: KVLayer, hidden: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """[B, W, H] the states after one layer, which may belong to another decoder of this form.

        Args:
            layer: The layer, whose kind of attention is one of this decoder's.
            store: Where its keys and values are written.
            hidden: [B, W, H] the states before it.
            positions: [B, W].
            mask: A mask as from `tree_mask`.
        """
        cos, sin = self._rotation(self.kinds[layer.kind], positions)
        return self._layer(layer, store, hidden, cos, sin, self._folded(mask))

    def _folded(self, mask: Tensor) -> Tensor:
        """The mask where query heads that share keys are read as one head."""
        copies = self.sharing * -(-QUERIES // (mask.shape[2] * self.sharing))
        return mask.repeat(1, 1, copies, 1) if copies > 1 else mask

    def _layer(
        self, layer: DecoderLayer, store: KVLayer, hidden: Tensor, cos: Tensor, sin: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """[B, W, H] the states after one layer."""
        attended = self._attend(layer, store, layer.input_norm(hidden), cos, sin, mask)
        hidden = hidden + self._added(attended, layer.post_attention)
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        gated = F.gelu(gate, approximate="tanh") if self.decoder.gelu else F.silu(gate)
        return hidden + self._added(layer.down(gated * up), layer.post_mlp)

    def _added(self, delta: Tensor, norm: Linear | None) -> Tensor:
        """A layer's contribution to the residual stream."""
        if norm is not None:
            return norm(delta)
        scale = self.decoder.residual_scale
        return delta if scale == 1 else delta * scale

    def _rotation(self, kind: AttentionKind, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1, W, D] cosines, and sines with signs that make swapping halves a quarter turn."""
        (cos, sin), half = self.angles(kind, positions), kind.rotary_dim // 2
        return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]

    def _rotated(self, kind: AttentionKind, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding of heads [B, heads, W, D]."""
        if not (half := kind.rotary_dim // 2):
            return heads
        swapped = (heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :])
        return torch.addcmul(heads * cos, torch.cat(swapped, -1), sin)

    def _attend(
        self, layer: DecoderLayer, store: KVLayer, inputs: Tensor, cos: Tensor, sin: Tensor,
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
