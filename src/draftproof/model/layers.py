"""The parts of a decoder layer, of whichever family: what is called, with which weights.

The families differ in which parts they have: norms over heads and of what layers add, rotation of
part of a head or none, windows, several rotary bases, multipliers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.model.packed_linear import JointLinear, PackedSlice
from draftproof.native.structures import Native

Linear = Callable[[Tensor], Tensor]


class AttentionKind(NamedTuple):
    """How the heads of a layer attend.

    rope: whose rotary base they use, if there are several. rotary_dim: how many numbers of a head
    are rotated. window: how many positions back they see, if not all.
    """

    rope: str | None
    rotary_dim: int
    window: int | None


class DecoderLayer(NamedTuple):
    input_norm: Linear
    qkv: Linear
    head_norm: Linear | None        # over each head of queries and keys
    output: Linear
    post_attention: Linear | None   # a norm of what attention adds
    mlp_norm: Linear
    gate_up: Linear
    down: Linear
    post_mlp: Linear | None         # a norm of what the MLP adds
    heads: int
    key_heads: int
    inner_size: int
    scale: float
    kind: int                       # index of its AttentionKind
    # [.] float32: input, mlp, query, key, post-attention, post-mlp norms
    weights: tuple[Tensor | None, ...]
    # qkv, output, gate_up and down, where our kernels read them
    natives: tuple[Native | None, ...]


def attention_kind(body: Any, number: int, windows: Mapping[str, int | None]) -> AttentionKind:
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
    if hasattr(layer, "pre_feedforward_layernorm"):             # Gemma norms what it adds as well
        post_attention, mlp_norm = mlp_norm, layer.pre_feedforward_layernorm
        post_mlp = layer.post_feedforward_layernorm
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = (layer.input_layernorm, mlp_norm, *head_norms, post_attention, post_mlp)
    qkv = _parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    gate_up = _parts(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    heads = int(attention.config.num_attention_heads)
    key_heads = (sum(one.out_features for one in qkv) // head_dim - heads) // 2
    return DecoderLayer(
        input_norm=norm_of(layer.input_layernorm), qkv=_together(*qkv),
        head_norm=_head_norm(attention, heads, key_heads) if head_norms[0] is not None else None,
        output=bare(attention.o_proj),
        post_attention=norm_of(post_attention) if post_attention is not None else None,
        mlp_norm=norm_of(mlp_norm), gate_up=_together(*gate_up), down=bare(mlp.down_proj),
        post_mlp=norm_of(post_mlp) if post_mlp is not None else None, heads=heads,
        key_heads=key_heads, inner_size=sum(one.out_features for one in gate_up) // 2,
        scale=attention.scaling, kind=kind,
        weights=tuple(None if one is None else norm_weight(one) for one in norms),
        natives=tuple(
            native_of(one) for one in (qkv[0], attention.o_proj, gate_up[0], mlp.down_proj)
        )
    )


def _parts(module: nn.Module, whole: str, parts: Sequence[str]) -> list[Any]:
    """Layers that read the same inputs: the one of this name where the family has them as one."""
    return [getattr(module, name) for name in ((whole,) if hasattr(module, whole) else parts)]


def native_of(module: nn.Module) -> Native | None:
    """A layer, or the whole it is a part of, as our kernels read it."""
    whole = module.whole if isinstance(module, PackedSlice) else module
    return whole.native if isinstance(whole, JointLinear) else None


def _together(*linears: nn.Module) -> Linear:
    """The outputs of several layers side by side; one multiplication where they were packed as one.
    """
    first = linears[0]
    if isinstance(first, PackedSlice):
        return bare(first.whole)
    several = [bare(linear) for linear in linears]
    return lambda inputs: torch.cat([linear(inputs) for linear in several], -1)


def bare(module: nn.Module) -> Linear:
    """A module's forward without the call protocol around it."""
    if type(module) is nn.Linear and "forward" not in module.__dict__:     # some quantisers wrap it
        weight, bias = module.weight, module.bias
        return lambda inputs: F.linear(inputs, weight, bias)
    forward: Linear = module.forward
    return forward


def norm_weight(norm: Any) -> Tensor:
    """[.] float32, what a norm multiplies by; Gemma's count from one."""
    weight: Tensor = norm.weight.detach().float()
    return 1.0 + weight if type(norm).__name__.startswith("Gemma") else weight


def epsilon_of(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def norm_of(norm: Any) -> Linear:
    """Root-mean-square norm over the last dimension."""
    return _rms_norm(norm_weight(norm), norm.weight.dtype, norm.weight.shape[-1], epsilon_of(norm))


def _head_norm(attention: Any, heads: int, key_heads: int) -> Linear:
    """The norms of queries and keys, each head with the weight of its kind, as one."""
    query, key = attention.q_norm, attention.k_norm
    weight = torch.cat(
        [norm_weight(query).expand(heads, -1), norm_weight(key).expand(key_heads, -1)]
    )[:, None]
    return _rms_norm(weight, query.weight.dtype, weight.shape[-1], epsilon_of(query))


def _rms_norm(weight: Tensor, dtype: torch.dtype, size: int, epsilon: float) -> Linear:
    """x / sqrt(mean x² + epsilon) * weight, in `dtype`, in few operators: sqrt(|x|² + n epsilon) is
    a hypotenuse."""
    if weight.device.type != "cpu" and weight.dim() == 1:
        there = weight.to(dtype)
        return lambda inputs: F.rms_norm(inputs, (size,), there, epsilon)       # one kernel there
    least = torch.tensor([(epsilon * size) ** 0.5], dtype=torch.float32, device=weight.device)
    factor = weight * size**0.5

    def normed(inputs: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32)
        return (inputs / length.hypot_(least) * factor).to(dtype)

    return normed
