"""Families of GGUF files with mixtures of experts: Qwen3-MoE, GLM-4.5, DeepSeek, Llama 4, gpt-oss.

A file has the experts of a layer as three tensors: gate, up and down projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import UnsupportedModel
from draftproof.gguf.family import (
    CHOICE_BIAS,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    QKV,
    SHARED_EXPERTS,
    Family,
    decimal,
)
from draftproof.gguf.file import GGUFFile


def _qwen3_moe(file: GGUFFile, config: dict[str, object]) -> None:
    metadata = file.metadata
    config |= {
        "num_experts": metadata.integer("qwen3moe.expert_count"),
        "num_experts_per_tok": metadata.integer("qwen3moe.expert_used_count"),
        "moe_intermediate_size": metadata.integer("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _routed(file: GGUFFile, config: dict[str, object]) -> None:
    """The settings of experts in DeepSeek and GLM-4.5."""
    metadata, prefix = file.metadata, f"{file.architecture}."

    def integer(key: str, default: int | None = None) -> int:
        return metadata.integer(prefix + key, default)

    config |= {
        "n_routed_experts": integer("expert_count"),
        "n_shared_experts": integer("expert_shared_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "moe_intermediate_size": integer("expert_feed_forward_length"),
        "first_k_dense_replace": integer("leading_dense_block_count"),
        "n_group": integer("expert_group_count", 0) or 1,
        "topk_group": integer("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag(f"{prefix}expert_weights_norm", False),
        "routed_scaling_factor": decimal(metadata.number(f"{prefix}expert_weights_scale", 1.0)),
    }


def _glm4_moe(file: GGUFFile, config: dict[str, Any]) -> None:
    """GLM-4.5 and 4.6; the files of GLM-4.5 Air have no norms of heads."""
    _routed(file, config)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)      # the class' is a half


def _glm4_moe_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    prefix = f"blk.{layer}."
    norms = HEAD_NORMS if f"{prefix}attn_q_norm.weight" in file.tensors else {}
    return {**_GLM4_MOE, **norms, **_mlp_of(file, layer)}


def _mlp_of(file: GGUFFile, layer: int) -> dict[str, str]:
    """The modules of a layer that may be dense, or have routed and shared experts."""
    prefix = f"blk.{layer}."
    if f"{prefix}ffn_gate_inp.weight" not in file.tensors:
        return {**MLP, "mlp.down_proj": "ffn_down"}
    has_bias = f"{prefix}exp_probs_b.bias" in file.tensors
    return {**SHARED_EXPERTS, **(CHOICE_BIAS if has_bias else {})}


def _deepseek2(file: GGUFFile, config: dict[str, Any]) -> None:
    """DeepSeek V2, or V3 if the choice of experts has a bias."""
    metadata, rope = file.metadata, config["rope_parameters"]
    _routed(file, config)

    def integer(key: str, default: int | None = None) -> int:
        return metadata.integer(f"deepseek2.{key}", default)

    layers = range(config["num_hidden_layers"])
    is_v3 = any(f"blk.{layer}.exp_probs_b.bias" in file.tensors for layer in layers)
    rotated, rank = integer("rope.dimension_count"), integer("attention.q_lora_rank", 0)
    if rope["rope_type"] == "yarn" and "deepseek2.rope.scaling.yarn_log_multiplier" in metadata:
        scale = decimal(10 * metadata.number("deepseek2.rope.scaling.yarn_log_multiplier"))
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    rope.pop("partial_rotary_factor", None)
    del config["head_dim"]
    if is_v3:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    else:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    config |= {
        "num_key_value_heads": config["num_attention_heads"], "q_lora_rank": rank or None,
        "kv_lora_rank": integer("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": integer("attention.key_length_mla") - rotated,
        "v_head_dim": integer("attention.value_length_mla"),
    }


def _deepseek2_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    low_rank = f"blk.{layer}.attn_q_a.weight" in file.tensors
    queries = _LOW_RANK_QUERIES if low_rank else {"self_attn.q_proj": "attn_q"}
    return {**_LATENT, **queries, **_mlp_of(file, layer)}


def _deepseek2_restorers(_: object) -> dict[str, Callable[..., Tensor]]:
    """Files have separate projections of latent states to keys, transposed, and to values."""
    def both(keys: Tensor, values: Tensor) -> Tensor:   # [heads, latent, key], [heads, value, ...]
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)

    return {"self_attn.kv_b_proj": both}


def _llama4(file: GGUFFile, config: dict[str, Any]) -> None:
    """Llama 4: chunks of 8192 tokens in three of four layers, as llama.cpp reads it."""
    metadata, layers = file.metadata, range(config["num_hidden_layers"])
    if metadata.integer("llama4.attention.sliding_window", 8192) == 0:
        raise UnsupportedModel(
            f"{file.path} is a Llama 4 model without chunked attention, which cannot be read from "
            "a GGUF file here; give the folder or hub id of the model itself"
        )
    experts = metadata.integer("llama4.expert_count")
    config |= {
        "intermediate_size": metadata.integer("llama4.expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer("llama4.expert_used_count"),
        "moe_layers": [layer for layer in layers
                       if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors],
        "interleave_moe_layer_step": metadata.integer("llama4.interleave_moe_layer_step", 1),
        # not stated in files: the larger model, Maverick, does not norm queries and keys
        "use_qk_norm": experts != 128,
    }  # fmt: skip


def _llama4_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    has_experts = f"blk.{layer}.ffn_gate_inp.weight" in file.tensors
    return {**_LLAMA4, **(_LLAMA4_EXPERTS if has_experts else _LLAMA4_DENSE)}


def _transposed(*parts: Tensor) -> Tensor:
    """Experts whose checkpoint has inputs before outputs, and gates before up projections."""
    return torch.cat(parts, -2).transpose(-1, -2)


def _llama4_restorers(_: object) -> dict[str, Callable[..., Tensor]]:
    return dict.fromkeys(
        ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"), _transposed
    )


def _gpt_oss(file: GGUFFile, config: dict[str, Any]) -> None:
    metadata, layers = file.metadata, range(config["num_hidden_layers"])
    config |= {
        "intermediate_size": metadata.integer("gpt-oss.expert_feed_forward_length"),
        "num_local_experts": metadata.integer("gpt-oss.expert_count"),
        "num_experts_per_tok": metadata.integer("gpt-oss.expert_used_count"),
        "sliding_window": metadata.integer("gpt-oss.attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention"
                        for layer in layers],
    }  # fmt: skip
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False       # as in every published model


def _gpt_oss_restorers(_: object) -> dict[str, Callable[..., Tensor]]:
    """Checkpoints interleave gate and up projections."""
    def in_turns(gates: Tensor, ups: Tensor) -> Tensor:     # [experts, size, ...]
        return torch.stack([gates, ups], 2).flatten(1, 2)

    return {
        "mlp.experts.gate_up_proj": lambda *parts: in_turns(*parts).transpose(-1, -2),
        "mlp.experts.gate_up_proj_bias": in_turns,
        "mlp.experts.down_proj": lambda tensor: tensor.transpose(-1, -2),
    }


_LATENT = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_k_b+attn_v_b", "self_attn.o_proj": "attn_output",
}  # fmt: skip
_LOW_RANK_QUERIES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
}  # fmt: skip
_ATTENTION = {
    **QKV, "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GLM4_MOE = {**_ATTENTION, "post_attention_layernorm": "post_attention_norm"}
_LLAMA4 = _ATTENTION
_LLAMA4_DENSE = {
    "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}  # fmt: skip
_LLAMA4_EXPERTS = {
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.gate_up_proj": EXPERTS["mlp.experts.gate_up_proj"],
    "feed_forward.experts.down_proj": EXPERTS["mlp.experts.down_proj"],
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
_GPT_OSS = {
    **_GLM4_MOE, "self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": EXPERTS["mlp.experts.gate_up_proj"],
    "mlp.experts.gate_up_proj_bias": "ffn_gate_exps.bias+ffn_up_exps.bias",
    "mlp.experts.down_proj": EXPERTS["mlp.experts.down_proj"],
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}  # fmt: skip
MIXTURES = {
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", {**_ATTENTION, **HEAD_NORMS, **EXPERTS},
                       more=_qwen3_moe),
    "glm4moe": Family("Glm4MoeForCausalLM", "glm4_moe", _GLM4_MOE, more=_glm4_moe,
                      layer_of=_glm4_moe_layer),
    "deepseek2": Family("DeepseekV2ForCausalLM", "deepseek_v2", _LATENT, more=_deepseek2,
                        layer_of=_deepseek2_layer, restorers=_deepseek2_restorers),
    "llama4": Family("Llama4ForCausalLM", "llama4_text", DENSE, more=_llama4,
                     layer_of=_llama4_layer, restorers=_llama4_restorers),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", _GPT_OSS, more=_gpt_oss,
                      restorers=_gpt_oss_restorers),
}  # fmt: skip
"""Families with mixtures of experts, by the architecture's name in llama.cpp."""
