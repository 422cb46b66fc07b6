"""Families of GGUF files whose layers differ in kind: Qwen3-Next, Qwen3.5 and LFM2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftproof.gguf.family import EXPERTS, HEAD_NORMS, MLP, QKV, Family
from draftproof.gguf.file import GGUFFile


def _delta_nets(file: GGUFFile, config: dict[str, Any]) -> None:
    """Qwen3-Next and 3.5: most layers have a recurrent state instead of keys and values."""
    metadata, prefix = file.metadata, f"{file.architecture}.ssm."
    heads = metadata.integer(f"{prefix}time_step_rank")
    linear = [f"blk.{layer}.ssm_a" in file.tensors for layer in range(config["num_hidden_layers"])]
    config |= {
        "layer_types": ["linear_attention" if has_state else "full_attention"
                        for has_state in linear],
        "linear_conv_kernel_dim": metadata.integer(f"{prefix}conv_kernel"),
        "linear_key_head_dim": metadata.integer(f"{prefix}state_size"),
        "linear_num_key_heads": metadata.integer(f"{prefix}group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.integer(f"{prefix}inner_size") // max(heads, 1),
    }  # fmt: skip


def _qwen35(file: GGUFFile, config: dict[str, Any]) -> None:
    _delta_nets(file, config)
    key = f"{file.architecture}.rope.dimension_sections"
    sections = file.metadata.numbers(key, [11, 11, 10, 0])
    # the three positions of a text token are equal, so sections change nothing
    config["rope_parameters"] |= {"mrope_section": [int(size) for size in sections[:3]],
                                  "mrope_interleaved": True}


def _qwen35_moe(file: GGUFFile, config: dict[str, object]) -> None:
    _qwen35(file, config)
    _experts(file, config)


def _qwen3_next(file: GGUFFile, config: dict[str, object]) -> None:
    _delta_nets(file, config)
    _experts(file, config)
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _experts(file: GGUFFile, config: dict[str, object]) -> None:
    metadata, prefix = file.metadata, f"{file.architecture}.expert_"
    size = metadata.integer(f"{prefix}feed_forward_length")
    config |= {
        "num_experts": metadata.integer(f"{prefix}count"),
        "num_experts_per_tok": metadata.integer(f"{prefix}used_count"),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": metadata.integer(
            f"{prefix}shared_feed_forward_length", size),
    }  # fmt: skip


def _is_linear(file: GGUFFile, layer: int) -> bool:
    return f"blk.{layer}.ssm_a" in file.tensors


def _qwen35_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    return {**_DENSE_MLP, **(_QWEN35_LINEAR if _is_linear(file, layer) else _FULL)}


def _qwen35_moe_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    return {**_SHARED_EXPERT, **(_QWEN35_LINEAR if _is_linear(file, layer) else _FULL)}


def _qwen3_next_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    if not _is_linear(file, layer):
        return {**_SHARED_EXPERT, **_FULL}
    # older files have a single matrix in the checkpoint's order
    whole = f"blk.{layer}.ssm_in.weight" in file.tensors
    inputs = "ssm_in" if whole else "attn_qkv+attn_gate"
    return {**_SHARED_EXPERT, **_LINEAR, "linear_attn.in_proj_qkvz": inputs,
            "linear_attn.in_proj_ba": "ssm_ba"}


def _qwen35_restorers(config: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """Files separate the value heads of one key head, which are adjacent in checkpoints."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    before = 2 * keys * config["linear_key_head_dim"]   # queries and keys

    def grouped(tensor: Tensor, size: int, axis: int = 0) -> Tensor:
        shape = tensor.shape
        apart = tensor.reshape(*shape[:axis], values // keys, keys, size, *shape[axis + 1 :])
        return apart.transpose(axis, axis + 1).reshape(shape)

    def after(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:before], grouped(tensor[before:], width)])

    return {
        "linear_attn.in_proj_qkv": after,
        "linear_attn.conv1d": lambda tensor: after(tensor)[:, None],
        "linear_attn.in_proj_z": lambda tensor: grouped(tensor, width),
        "linear_attn.in_proj_a": lambda tensor: grouped(tensor, 1),
        "linear_attn.in_proj_b": lambda tensor: grouped(tensor, 1),
        "linear_attn.out_proj": lambda tensor: grouped(tensor, width, 1),
        "linear_attn.dt_bias": lambda tensor: grouped(tensor, 1),
        "linear_attn.A_log": lambda tensor: grouped(tensor, 1).neg().log(),
        "mlp.shared_expert_gate": lambda tensor: tensor.view(1, -1),
    }


def _qwen3_next_restorers(config: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """Checkpoints group the rows of each key head: its query, key, values and gates."""
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]

    def together(*parts: Tensor) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        qkv, gates = parts
        sizes = [keys * width, keys * width, len(gates)]
        heads = [part.reshape(keys, -1, part.shape[-1])
                 for part in (*torch.split(qkv, sizes), gates)]
        return torch.cat(heads, 1).flatten(0, 1)

    return {
        "linear_attn.in_proj_qkvz": together,
        "linear_attn.conv1d": lambda tensor: tensor[:, None],
        "linear_attn.A_log": lambda tensor: tensor.neg().log(),
        "mlp.shared_expert_gate": lambda tensor: tensor.view(1, -1),
    }


def _lfm2(file: GGUFFile, config: dict[str, Any]) -> None:
    """LFM2: most layers mix the last few tokens with a short convolution."""
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = [
        "conv" if f"blk.{layer}.shortconv.conv.weight" in file.tensors else "full_attention"
        for layer in layers
    ]
    config |= {"conv_L_cache": file.metadata.integer("lfm2.shortconv.l_cache"),
               "norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}


def _lfm2_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    has_conv = f"blk.{layer}.shortconv.conv.weight" in file.tensors
    return {**_LFM2, **(_LFM2_CONV if has_conv else _LFM2_ATTENTION)}


def _lfm2_restorers(_: object) -> dict[str, Callable[..., Tensor]]:
    return {"conv.conv": lambda tensor: tensor[:, None]}


_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
_DENSE_MLP = {**MLP, "mlp.down_proj": "ffn_down"}
_SHARED_EXPERT = {
    **EXPERTS, "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_FULL = {**_NORMS, **QKV, **HEAD_NORMS, "self_attn.o_proj": "attn_output"}
_LINEAR = {
    **_NORMS, "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_QWEN35_LINEAR = {
    **_LINEAR, "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
}  # fmt: skip
_LFM2 = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip
_LFM2_CONV = {
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
_LFM2_ATTENTION = {
    **QKV, "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
}  # fmt: skip
HYBRIDS = {
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", _FULL, shift=1.0, more=_qwen35,
                     layer_of=_qwen35_layer, restorers=_qwen35_restorers),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _FULL, shift=1.0,
                        more=_qwen35_moe, layer_of=_qwen35_moe_layer, restorers=_qwen35_restorers),
    "qwen3next": Family("Qwen3NextForCausalLM", "qwen3_next", _FULL, shift=1.0, more=_qwen3_next,
                        layer_of=_qwen3_next_layer, restorers=_qwen3_next_restorers),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", _LFM2, more=_lfm2, layer_of=_lfm2_layer,
                   restorers=_lfm2_restorers,
                   norm=("model.embedding_norm.weight", "token_embd_norm.weight")),
}  # fmt: skip
"""Families with recurrent layers, by the architecture's name in llama.cpp."""
