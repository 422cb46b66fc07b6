"""The families of models that GGUF files are mapped to: settings and names of tensors.

Sources: the constants of the package `gguf`, and how convert_hf_to_gguf.py of llama.cpp writes each
architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.gguf.file import GGUFFile

GELU = "gelu_pytorch_tanh"


PARAMETERS = ("mlp.experts.", "mlp.gate.e_score", "linear_attn.A_log", "linear_attn.dt_bias")
"""How names of modules begin that are parameters of their own, without `.weight`."""
UNSHIFTED = ("linear_attn.norm",)
"""Norms to which nothing is added in any architecture."""


class Family(NamedTuple):
    """How an architecture of llama.cpp corresponds to a class of transformers.

    Attributes:
        architecture: The class.
        model_type: Of its configuration.
        layer: Modules of a layer, and the tensors of a block. Of `PARAMETERS` tensors are named in
            full; two with "+" between them are one parameter.
        permuted: Whether rows of queries and keys are stored in the order of pairs.
        shift: What was added to the weights of norms.
        more: Further settings.
        layer_of: The modules of one layer, where layers differ.
        norm: The last norm, in the checkpoint and in the file.
        restorers: What gives the checkpoint's numbers for those of the file, by module.
    """

    architecture: str
    model_type: str
    layer: dict[str, str]
    permuted: bool = False
    shift: float = 0.0
    more: Callable[[GGUFFile, dict[str, Any]], None] | None = None
    layer_of: Callable[[GGUFFile, int], dict[str, str]] | None = None
    restorers: Callable[[dict[str, Any]], dict[str, Callable[..., Tensor]]] | None = None
    norm: tuple[str, str] = ("model.norm.weight", "output_norm.weight")


def _phi3(file: GGUFFile, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    config["original_max_position_embeddings"] = rope.get(
        "original_max_position_embeddings", config["max_position_embeddings"]
    )
    window = file.metadata.integer("phi3.attention.sliding_window", 0)
    config["sliding_window"] = window or None


def _granite(file: GGUFFile, config: dict[str, Any]) -> None:
    names = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
             "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}  # fmt: skip
    usual = {"attention_multiplier": config["head_dim"] ** -0.5}
    for key, name in names.items():
        number = np.float32(file.metadata.number(f"granite.{name}", usual.get(key, 1.0)))
        config[key] = float(str(number))


def _smollm3(file: GGUFFile, config: dict[str, Any]) -> None:
    """Every fourth layer has no rotation; no file says so."""
    count = config["num_hidden_layers"]
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(count)]


def _gemma3(file: GGUFFile, config: dict[str, Any]) -> None:
    metadata, count = file.metadata, config["num_hidden_layers"]
    window = metadata.integer("gemma3.attention.sliding_window", 0)
    pattern = metadata.numbers("gemma3.attention.sliding_window_pattern", [6])
    if len(pattern) == 1:
        slides = [bool(window) and (layer + 1) % max(1, int(pattern[0])) != 0
                  for layer in range(count)]  # fmt: skip
    else:
        slides = [bool(window and slide) for slide in pattern[:count]]
    # the largest of the family scales by the width per head (gemma_pytorch, config.py)
    largest = count == 62
    scalar = config["hidden_size"] // config["num_attention_heads"]
    local = metadata.number("gemma3.rope.freq_base_swa", 1e4)
    config |= {
        "hidden_activation": GELU, "sliding_window": window or None,
        "query_pre_attn_scalar": scalar if largest else config["head_dim"],
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_parameters": {"full_attention": config["rope_parameters"],
                            "sliding_attention": {"rope_type": "default", "rope_theta": local}},
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }  # fmt: skip
    del config["hidden_act"]


def _mistral3(file: GGUFFile, config: dict[str, Any]) -> None:
    """Mistral, or Ministral 3 where queries grow with their positions."""
    metadata, rope = file.metadata, config["rope_parameters"]
    if rope["rope_type"] == "yarn" and "mistral3.rope.scaling.yarn_log_multiplier" in metadata:
        scale = metadata.number("mistral3.rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    config["sliding_window"] = None
    growth = metadata.number("mistral3.attention.temperature_scale", 0.0)
    if growth:
        config |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
        rope["llama_4_scaling_beta"] = float(str(np.float32(growth)))
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])


def _qwen3_moe(file: GGUFFile, config: dict[str, Any]) -> None:
    metadata = file.metadata
    config |= {
        "num_experts": metadata.integer("qwen3moe.expert_count"),
        "num_experts_per_tok": metadata.integer("qwen3moe.expert_used_count"),
        "moe_intermediate_size": metadata.integer("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _qwen35(file: GGUFFile, config: dict[str, Any]) -> None:
    """Qwen 3.5: three of four layers have a recurrent state instead of keys and values."""
    metadata, count = file.metadata, config["num_hidden_layers"]
    heads = metadata.integer("qwen35.ssm.time_step_rank")
    linear = [f"blk.{layer}.ssm_a" in file.tensors for layer in range(count)]
    sections = metadata.numbers("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    config |= {
        "layer_types": ["linear_attention" if has_state else "full_attention"
                        for has_state in linear],
        "linear_conv_kernel_dim": metadata.integer("qwen35.ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("qwen35.ssm.state_size"),
        "linear_num_key_heads": metadata.integer("qwen35.ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.integer("qwen35.ssm.inner_size") // max(heads, 1),
    }  # fmt: skip
    # all three positions of a token of text are alike, so that sections change nothing
    config["rope_parameters"] |= {"mrope_section": [int(size) for size in sections[:3]],
                                  "mrope_interleaved": True}


def _qwen35_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    return _QWEN35_LINEAR if f"blk.{layer}.ssm_a" in file.tensors else _QWEN35_FULL


def _qwen35_restorers(config: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """Files have the value heads of one key head apart, which checkpoints have together."""
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
    }


def _deepseek2(file: GGUFFile, config: dict[str, Any]) -> None:
    """DeepSeek V2, or V3 where experts have a bias for being chosen."""
    metadata, rope = file.metadata, config["rope_parameters"]

    def integer(key: str, default: int | None = None) -> int:
        return metadata.integer(f"deepseek2.{key}", default)

    layers = range(config["num_hidden_layers"])
    is_v3 = any(f"blk.{layer}.exp_probs_b.bias" in file.tensors for layer in layers)
    rotated, groups = integer("rope.dimension_count"), integer("expert_group_count", 0)
    rank = integer("attention.q_lora_rank", 0)
    if rope["rope_type"] == "yarn" and "deepseek2.rope.scaling.yarn_log_multiplier" in metadata:
        scale = 10 * metadata.number("deepseek2.rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": float(str(np.float32(scale))),
                 "mscale_all_dim": float(str(np.float32(scale)))}
    rope.pop("partial_rotary_factor", None)
    del config["head_dim"]
    if is_v3:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    else:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    config |= {
        "num_key_value_heads": config["num_attention_heads"], "q_lora_rank": rank or None,
        "kv_lora_rank": integer("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": integer("attention.key_length_mla") - rotated,
        "v_head_dim": integer("attention.value_length_mla"),
        "n_routed_experts": integer("expert_count"),
        "n_shared_experts": integer("expert_shared_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "moe_intermediate_size": integer("expert_feed_forward_length"),
        "first_k_dense_replace": integer("leading_dense_block_count"),
        "n_group": groups or 1, "topk_group": integer("expert_group_used_count", 1),
        "norm_topk_prob": bool(metadata.get("deepseek2.expert_weights_norm", False)),
        "routed_scaling_factor": float(str(np.float32(
            metadata.number("deepseek2.expert_weights_scale", 1.0)))),
    }  # fmt: skip


def _deepseek2_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    prefix = f"blk.{layer}."
    queries = _LOW_RANK_QUERIES if f"{prefix}attn_q_a.weight" in file.tensors else {
        "self_attn.q_proj": "attn_q"}
    mlp = _SHARED_EXPERTS if f"{prefix}ffn_gate_inp.weight" in file.tensors else {
        **_MLP, "mlp.down_proj": "ffn_down"}
    bias = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
    return {**_LATENT, **queries, **mlp,
            **(bias if f"{prefix}exp_probs_b.bias" in file.tensors else {})}


def _deepseek2_restorers(config: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """Files have what makes keys and values of latent states apart, that of keys transposed."""
    def both(keys: Tensor, values: Tensor) -> Tensor:   # [heads, latent, key], [heads, value, ...]
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)

    return {"self_attn.kv_b_proj": both}


def _lfm2(file: GGUFFile, config: dict[str, Any]) -> None:
    """LFM2: most layers mix the last few tokens by a short convolution."""
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


def _lfm2_restorers(_: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    return {"conv.conv": lambda tensor: tensor[:, None]}


_QKV = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
_REST = {
    "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_DENSE = {**_QKV, **_MLP, **_REST}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_exps.weight+ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_LATENT = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_k_b+attn_v_b", "self_attn.o_proj": "attn_output",
}  # fmt: skip
_LOW_RANK_QUERIES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
}  # fmt: skip
_SHARED_EXPERTS = {
    **_EXPERTS, "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
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
    **_QKV, "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
}  # fmt: skip
_QWEN35 = {
    **_MLP, "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip
_QWEN35_FULL = {**_QWEN35, **_QKV, **_HEAD_NORMS, "self_attn.o_proj": "attn_output"}
_QWEN35_LINEAR = {
    **_QWEN35, "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _DENSE, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _DENSE),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", {**_DENSE, **_HEAD_NORMS}),
    "phi3": Family("Phi3ForCausalLM", "phi3", {
        **_REST, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    }, more=_phi3),
    "granite": Family("GraniteForCausalLM", "granite", _DENSE, permuted=True, more=_granite),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _DENSE, permuted=True, more=_smollm3),
    "mistral3": Family("MistralForCausalLM", "mistral", _DENSE, permuted=True, more=_mistral3),
    "glm4": Family("Glm4ForCausalLM", "glm4", {
        **_QKV, **_REST, "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    }),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", {
        **_QKV, **_HEAD_NORMS, **_EXPERTS, "input_layernorm": "attn_norm",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    }, more=_qwen3_moe),
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", _QWEN35_FULL, shift=1.0, more=_qwen35,
                     layer_of=_qwen35_layer, restorers=_qwen35_restorers),
    "deepseek2": Family("DeepseekV2ForCausalLM", "deepseek_v2", _LATENT, more=_deepseek2,
                        layer_of=_deepseek2_layer, restorers=_deepseek2_restorers),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", _LFM2, more=_lfm2, layer_of=_lfm2_layer,
                   restorers=_lfm2_restorers,
                   norm=("model.embedding_norm.weight", "token_embd_norm.weight")),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", {
        **_DENSE, **_HEAD_NORMS, "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    }, shift=1.0, more=_gemma3),
}  # fmt: skip
"""Architectures that are mapped here, by their name in llama.cpp."""
