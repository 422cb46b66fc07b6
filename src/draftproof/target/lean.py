"""A lean forward for the common families: the model's own layers, called without the machinery around them.

Llama, Mistral, Qwen2 and Qwen3 differ in which of these parts they have, so one forward driven by the model's modules
serves them. It is used where a load-time read agrees with the model's own forward, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.target.cache import RowCache

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

QUERIES = 4
"""Attention is never asked for fewer: with AMX one query rounds differently from several, with AVX-512 alone up to three do."""

Linear = Callable[[Tensor], Tensor]


class _Layer(NamedTuple):
    before: Linear
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Linear | None
    key_norm: Linear | None
    after: Linear
    gate: Linear
    up: Linear
    down: Linear
    scale: float


class Lean:
    """The decode forward of one model. Shares the model's modules; holds no weights of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.model
        self.embed, self.rotary, self.head = body.embed_tokens, body.rotary_emb, _bare(model.lm_head)
        self.norm = _norm(body.norm)
        self.head_dim = int(body.layers[0].self_attn.head_dim)
        self.layers = [_layer(layer) for layer in body.layers]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is built of the parts this forward knows, with nothing hooked into them.

        Never in float64: there the point is to agree with transformers, whose norms compute in float32 inside.
        """
        config = model.config
        scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        return (
            type(model).__name__ in FAMILIES
            and model.dtype != torch.float64
            and config.hidden_act == "silu"
            and scaled in ("default", "linear", "llama3")
            and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        )

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: RowCache, last_only: bool, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, W, V] (or [B, 1, V]) and tapped hidden states [B, W, T, H], as transformers counts them."""
        hidden = F.embedding(tokens, self.embed.weight)
        cos, sin = self.rotary(hidden, positions)                                       # [B, W, D] each
        half = self.head_dim // 2
        cos, sin = cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]
        states = [hidden]
        for layer, store in zip(self.layers, cache.layers, strict=True):
            hidden = hidden + self._attend(layer, store, layer.before(hidden), cos, sin, mask)
            inner = layer.after(hidden)
            hidden = hidden + layer.down(F.silu(layer.gate(inner)) * layer.up(inner))
            states.append(hidden)
        states[-1] = hidden = self.norm(hidden)
        logits = self.head(hidden[:, -1:] if last_only else hidden)
        return logits, torch.stack([states[tap] for tap in taps], 2) if taps else None

    def _attend(self, layer: _Layer, store: Any, inputs: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, width, _ = inputs.shape
        query, key, value = (
            project(inputs).view(rows, width, -1, self.head_dim) for project in (layer.query, layer.key, layer.value)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        half = self.head_dim // 2                        # swapping halves and signing the sine rotates by a quarter
        query = torch.addcmul(query * cos, query.roll(half, -1), sin)
        key = torch.addcmul(key * cos, key.roll(half, -1), sin)
        keys, values = store.update(key, value)
        shared = keys.shape[1] < query.shape[1]
        if shared and keys.device.type != "cpu":         # elsewhere a mask and shared heads together are slow
            keys, values = (store.repeat_interleave(query.shape[1] // keys.shape[1], 1) for store in (keys, values))
            shared = False
        if width < QUERIES:                              # few queries take other kernels, which round in their own way
            copies = -(-QUERIES // width)
            query, mask = query.repeat(1, 1, copies, 1), mask.repeat(1, 1, copies, 1)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=shared)
        return layer.output(out[:, :, :width].transpose(1, 2).reshape(rows, width, -1))


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        before=_norm(layer.input_layernorm),
        query=_bare(attention.q_proj),
        key=_bare(attention.k_proj),
        value=_bare(attention.v_proj),
        output=_bare(attention.o_proj),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        after=_norm(layer.post_attention_layernorm),
        gate=_bare(mlp.gate_proj),
        up=_bare(mlp.up_proj),
        down=_bare(mlp.down_proj),
        scale=attention.scaling,
    )


def _bare(module: nn.Module) -> Linear:
    """A module's forward without the call protocol around it."""
    if type(module) is nn.Linear:
        weight, bias = module.weight, module.bias
        return lambda inputs: F.linear(inputs, weight, bias)
    forward: Linear = module.forward
    return forward


def _norm(norm: Any) -> Linear:
    """Root-mean-square norm as one operator."""
    weight, epsilon, shape = norm.weight, norm.variance_epsilon, tuple(norm.weight.shape)
    return lambda inputs: F.rms_norm(inputs, shape, weight, epsilon)
