"""Takes the parts of a decoder from a transformers module, for our forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftproof.forward.decoder_layers import (
    AttentionKind,
    Decoder,
    DecoderLayer,
    Linear,
    bare,
    native_of,
    rms_norm,
)
from draftproof.forward.native_config import ARCHITECTURES, GELU
from draftproof.forward.rope import ROPE_TYPES
from draftproof.weights.packed_linear import PackedSlice
from draftproof.weights.token_table import DenseTable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def fits(model: PreTrainedModel) -> bool:
    """Whether the model has only parts that our forward knows, without hooks.

    Never in float64, which is for comparison with transformers, whose norms compute in float32.
    """
    config = model.config
    return (
        type(model).__name__ in ARCHITECTURES
        and model.dtype != torch.float64
        and _activation(config) in ("silu", GELU)
        and all(rotation in ROPE_TYPES for rotation in _rotations(config))
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(
            module._forward_hooks or module._forward_pre_hooks for module in model.modules()
        )
        and _is_original(model)
    )


def _is_original(model: PreTrainedModel) -> bool:
    """Whether every module whose forward ours replaces is the family's own, unchanged.

    Linear layers are called as they are, so they may be quantised or have an adapter.
    """
    home, body = type(model).__module__, getattr(model, "model", None)
    if body is None or not home.startswith("transformers.models."):
        return False
    norms = [body.norm]
    parts = [model, body, body.rotary_emb]
    for layer in body.layers:
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        parts += [layer, attention, mlp]
        norms += [part for module in (layer, attention) if isinstance(module, nn.Module)
                  for name, part in module.named_children() if name.endswith("norm")]  # fmt: skip
    table = body.embed_tokens
    return (
        all(_is_of(part, home) for part in [*parts, *norms])
        and (_is_of(table, home) or (type(table) is nn.Embedding and _is_bare(table)))
        and len({epsilon_of(norm) for norm in norms}) == 1     # our kernels take a single epsilon
    )


def _is_of(part: object, home: str) -> bool:
    """Whether a module's class is from this file of transformers, with an unchanged forward."""
    return (
        isinstance(part, nn.Module)
        and type(part).__module__ == home
        and type(part).forward.__module__ == home
        and _is_bare(part)
    )


def _is_bare(part: nn.Module) -> bool:
    """Whether a module's forward was not replaced."""
    return "forward" not in vars(part)


def decoder_of(
    model: PreTrainedModel, windows: Mapping[str, int | None], context: int
) -> Decoder:
    """The parts of a model that `fits`.

    Args:
        model: A transformers model of a known family.
        windows: How many positions back attention sees, by kind of layer; None: all.
        context: The number of positions that the model supports.
    """
    body = model.model
    head_dim = int(body.layers[0].self_attn.head_dim)
    kinds = [attention_kind(body, number, windows) for number in range(len(body.layers))]
    distinct = list(dict.fromkeys(kinds))
    norms = [module for module in body.modules() if type(module) is type(body.norm)]
    table, rotary = DenseTable(body.embed_tokens.weight), body.rotary_emb

    def angles(
        kind: AttentionKind, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        like = table.weight[:1, :1].to(dtype)
        cos, sin = rotary(like, positions, *([kind.rope] if kind.rope is not None else []))
        return cos, sin

    return Decoder(
        dtype=model.dtype, device=model.device, hidden_size=model.config.hidden_size,
        head_dim=head_dim, context=context, embed=table,
        embed_scale=_embed_scale(model.config, body.embed_tokens),
        residual_scale=float(getattr(model.config, "residual_multiplier", 1.0)),
        gelu=_activation(model.config) == GELU, norm=norm_of(body.norm),
        norm_weight=norm_weight(body.norm), epsilon=epsilon_of(body.norm), kinds=distinct,
        layers=[decoder_layer(layer, head_dim, distinct.index(kind))
                for layer, kind in zip(body.layers, kinds, strict=True)],
        head=bare(model.lm_head), native_head=native_of(model.lm_head), angles=angles,
        dtypes={model.dtype, table.weight.dtype, *(norm.weight.dtype for norm in norms)},
    )  # fmt: skip


def attention_kind(
    body: PreTrainedModel, number: int, windows: Mapping[str, int | None]
) -> AttentionKind:
    config, rotary = body.config, body.rotary_emb
    kinds = getattr(config, "layer_types", None)
    name = str(kinds[number]) if kinds else ""
    window = windows[name] if name in windows else next(iter(windows.values()))
    several = not hasattr(rotary, "inv_freq")
    unrotated = not getattr(body.layers[number].self_attn, "use_rope", True)
    frequencies = getattr(rotary, f"{name}_inv_freq") if several else rotary.inv_freq
    return AttentionKind(
        name if several else None, 0 if unrotated else 2 * len(frequencies), window
    )


def decoder_layer(layer: Any, head_dim: int, kind: int) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    mlp_norm, post_attention, post_mlp = layer.post_attention_layernorm, None, None
    if hasattr(layer, "pre_feedforward_layernorm"):             # Gemma norms outputs as well
        post_attention, mlp_norm = mlp_norm, layer.pre_feedforward_layernorm
        post_mlp = layer.post_feedforward_layernorm
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = (layer.input_layernorm, mlp_norm, *head_norms, post_attention, post_mlp)
    qkv = _parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    gate_up = _parts(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    heads = int(attention.config.num_attention_heads)
    key_heads = (sum(linear.out_features for linear in qkv) // head_dim - heads) // 2
    return DecoderLayer(
        input_norm=norm_of(layer.input_layernorm), qkv=_together(*qkv),
        head_norm=_head_norm(attention, heads, key_heads) if head_norms[0] is not None else None,
        output=bare(attention.o_proj),
        post_attention=norm_of(post_attention) if post_attention is not None else None,
        mlp_norm=norm_of(mlp_norm), gate_up=_together(*gate_up), down=bare(mlp.down_proj),
        post_mlp=norm_of(post_mlp) if post_mlp is not None else None, heads=heads,
        key_heads=key_heads, inner_size=sum(linear.out_features for linear in gate_up) // 2,
        scale=attention.scaling, kind=kind,
        weights=tuple(None if norm is None else norm_weight(norm) for norm in norms),
        natives=tuple(
            native_of(linear) for linear in (qkv[0], attention.o_proj, gate_up[0], mlp.down_proj)
        )
    )


def _parts(module: nn.Module, joined: str, parts: Sequence[str]) -> list[Any]:
    """Layers that read the same inputs; a single one where the family has a joint layer."""
    return [getattr(module, name) for name in ((joined,) if hasattr(module, joined) else parts)]


def _together(*linears: nn.Module) -> Linear:
    """The concatenated outputs of several layers, in one multiplication where packed as one.
    """
    first = linears[0]
    if isinstance(first, PackedSlice):
        return bare(first.whole)
    several = [bare(linear) for linear in linears]
    return lambda inputs: torch.cat([linear(inputs) for linear in several], -1)


def norm_weight(norm: Any) -> Tensor:
    """[.] the float32 factors of a norm; Gemma stores them less one."""
    weight: Tensor = norm.weight.detach().float()
    return 1.0 + weight if type(norm).__name__.startswith("Gemma") else weight


def epsilon_of(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def norm_of(norm: Any) -> Linear:
    """Root-mean-square norm over the last dimension."""
    return rms_norm(norm_weight(norm), norm.weight.dtype, norm.weight.shape[-1], epsilon_of(norm))


def _head_norm(attention: Any, heads: int, key_heads: int) -> Linear:
    """The norms of query and key heads as one norm, each head with its own kind's weight."""
    query, key = attention.q_norm, attention.k_norm
    weight = torch.cat(
        [norm_weight(query).expand(heads, -1), norm_weight(key).expand(key_heads, -1)]
    )[:, None]
    return rms_norm(weight, query.weight.dtype, weight.shape[-1], epsilon_of(query))


def _activation(config: PreTrainedConfig) -> str | None:
    return getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)


def _rotations(config: PreTrainedConfig) -> list[str]:
    """Names of the rotary embeddings: one per kind of layer where these differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    several = [kind for kind in rope.values() if isinstance(kind, dict)]
    return [kind.get("rope_type", "default") for kind in several or [rope]]


def _embed_scale(config: PreTrainedConfig, embed: Any) -> float:
    """The factor of the embeddings, rounded as the model rounds it."""
    if (scale := getattr(embed, "embed_scale", None)) is not None:
        return float(scale.to(embed.weight.dtype))
    return float(getattr(config, "embedding_multiplier", 1.0))
