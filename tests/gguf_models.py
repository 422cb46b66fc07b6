"""Tiny models of transformers, written as convert_hf_to_gguf.py of llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                             "head_dim": 32}),
    "llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
                                             "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "yarn": ("qwen2", {"max_position_embeddings": 256, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0,
        "original_max_position_embeddings": 128}}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "longrope": ("phi3", {
        "sliding_window": None, "max_position_embeddings": 256,
        "original_max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
                            "original_max_position_embeddings": 128,
                            "short_factor": [1.0 + 0.1 * n for n in range(8)],
                            "long_factor": [2.0 + 0.1 * n for n in range(8)]}}),
    "granite": ("granite", {"attention_multiplier": 0.0625, "embedding_multiplier": 12.0,
                            "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 64,
                               "query_pre_attn_scalar": 32}),
}  # fmt: skip
"""Models by name: their type in transformers and settings beyond `SIZES`."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MIXED: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4": ("glm4", {"head_dim": 16}),
    "mistral3": ("ministral3", {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16}}),
    "qwen35": ("qwen3_5_text", {
        **DELTA_NET,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True,
                            "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}),
    "deepseek2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
                                  "routed_scaling_factor": 1.5, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.5,
        "mscale_all_dim": 0.5, "original_max_position_embeddings": 32}}),
    "deepseek3": ("deepseek_v3", {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1,
                                  "routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
                      "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}),
    "mistral3-plain": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "glm4moe": ("glm4_moe", {
        **ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                            "partial_rotary_factor": 0.5}}),
    "qwen35moe": ("qwen3_5_moe_text", {**DELTA_NET, **MIXED, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True,
        "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}),
    "qwen3next": ("qwen3_next", {**DELTA_NET, **MIXED, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}),
    "llama4": ("llama4_text", {
        "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0,
                            "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                            "original_max_position_embeddings": 8192}}),
    "gpt-oss": ("gpt_oss", {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
        "attention_bias": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32}}),
    "gemma4": ("gemma4_text", {
        **GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}),
    "gemma4-experts": ("gemma4_text", {
        **GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1}),
    "qwen3moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32, "norm_topk_prob": True}),
}  # fmt: skip
"""Those whose files are mapped here, and run by transformers (the plain one by our forward)."""
ARCHITECTURES = {"gemma3_text": "gemma3", "ministral3": "mistral3", "mistral": "mistral3",
                 "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35",
                 "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe",
                 "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
                 "llama4_text": "llama4", "gpt_oss": "gpt-oss", "gemma4_text": "gemma4"}
PAIRED = {"llama", "granite", "smollm3", "mistral3"}


def tiny(name: str, **changed: Any) -> Any:
    """A model with random weights, norms and biases included, in float32."""
    kind, settings = {**FAMILIES, **BY_TRANSFORMERS}[name]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **settings, **changed})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.mul_(3)
        for key, buffer in model.named_buffers():
            if key in model.state_dict():
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def save(model: Any, path: Path, types: str | dict[str, str] | None = None, parts: int = 0, *,
         more: dict[str, torch.Tensor] | None = None, extra: dict[str, np.ndarray] | None = None,
         change: Callable[[dict[str, Any]], object] | None = None,
         **metadata: Any) -> Path:  # fmt: skip
    """Write a model.

    Args:
        model: Of `tiny`, or of its families.
        path: Where to.
        types: The type of matrices, or of those whose names end so; None leaves them in float32.
        parts: Tensors of each part of a split file; 0 writes one file.
        more: Weights of further layers, by their names in a checkpoint.
        extra: Further tensors of the file.
        change: Changes the tensors of the file.
        metadata: Further keys.
    """
    config = model.config
    if config.model_type == "gemma4_text":                  # else widths of heads cannot be read
        config.allow_global_per_layer_attribute_access = True
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers + bool(more))
    tensors: dict[str, np.ndarray] = {}
    for key, weight in [*model.state_dict().items(), *(more or {}).items()]:
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensors |= placed(architecture, config, names, key, weight.float())
    keys = settings(architecture, config, tensors)
    tensors |= extra or {}
    if change is not None:
        change(tensors)
    kinds = types if isinstance(types, dict) else {"": types}
    matrices = {name: kind for ending, kind in kinds.items() for name, tensor in tensors.items()
                if tensor.ndim > 1 and kind and name.endswith(ending)}  # fmt: skip
    return gguf_files.write(path, tensors, {**keys, **metadata}, architecture, matrices,
                            split_max_tensors=parts)  # fmt: skip


def placed(
    architecture: str, config: Any, names: Any, key: str, weight: torch.Tensor
) -> dict[str, np.ndarray]:
    """A weight of a checkpoint, as the tensors that the file has of it."""
    if "kv_b_proj" in key:
        return latent_of(config, key, weight)
    if ".experts." in key:
        return experts_of(architecture, key, weight)
    if "in_proj_qkvz" in key:
        return joint_of(config, key, weight)
    if key.endswith((".scale", "per_expert_scale")):
        block = "ffn_down_exps" if key.endswith("per_expert_scale") else "ffn_gate_inp"
        return {f"blk.{key.split('.')[2]}.{block}.scale": weight.numpy()}
    known = key.replace(".dt_bias", ".dt_proj.bias").replace("_correction_b", "_correction.b")
    known += ".weight" if key.endswith((".layer_scalar", ".sinks")) else ""
    name = names.get_name(known, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    weight = weight.squeeze(1) if ".conv.conv." in key else weight
    return {name: stored(architecture, config, key, weight).numpy()}


def stored(architecture: str, config: Any, key: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as the file has it."""
    if architecture in PAIRED and (".q_proj." in key or ".k_proj." in key):
        heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        shape = weight.shape
        weight = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        weight = weight.swapaxes(1, 2).reshape(shape)
    norm = key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight")
    if architecture in ("gemma3", "qwen35", "qwen35moe", "qwen3next") and norm:
        weight = weight + 1
    if "linear_attn." in key:
        weight = of_linear_attention(config, key, weight)
    return weight.contiguous()


def latent_of(config: Any, key: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """What makes keys, transposed, and values of latent states, head by head."""
    layer, width = key.split(".")[2], config.qk_nope_head_dim
    heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
    return {f"blk.{layer}.attn_k_b.weight": heads[:, :width].transpose(1, 2).contiguous().numpy(),
            f"blk.{layer}.attn_v_b.weight": heads[:, width:].contiguous().numpy()}


def of_linear_attention(config: Any, key: str, weight: torch.Tensor) -> torch.Tensor:
    """As `_LinearAttentionVReorderBase` of llama.cpp writes it: the value heads of a key head,
    which are neighbours in a checkpoint, apart by as many heads as there are keys."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if config.model_type == "qwen3_next":               # in the checkpoint's order
        return -weight.exp() if key.endswith("A_log") else weight.squeeze()
    width, first = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    heads = [key_head * (values // keys) + place
             for place in range(values // keys) for key_head in range(keys)]
    numbers = [head * width + number for head in heads for number in range(width)]
    if key.endswith("A_log"):
        return -weight.exp()[heads]
    if key.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return weight[heads]
    if key.endswith("in_proj_z.weight"):
        return weight[numbers]
    if key.endswith("out_proj.weight"):
        return weight[:, numbers]
    if key.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return torch.cat([weight[:first], weight[first:][numbers]]).squeeze()
    return weight


def joint_of(config: Any, key: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """Qwen3-Next's queries, keys and values of all heads, and their gates, one after another."""
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = torch.split(weight.view(keys, -1, weight.shape[1]), [width, width, values, values], 1)
    *qkv, gates = (part.flatten(0, 1) for part in parts)
    layer = key.split(".")[2]
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(qkv).numpy(),
            f"blk.{layer}.attn_gate.weight": gates.contiguous().numpy()}


def experts_of(architecture: str, key: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """The experts of a layer as the file has them, gates apart from what they let through."""
    layer, kind = key.split(".")[2], "bias" if key.endswith("bias") else "weight"
    if architecture in ("llama4", "gpt-oss") and kind == "weight":
        weight = weight.transpose(1, 2)
    names = ["down"] if "down_proj" in key else ["gate", "up"]
    if architecture == "gpt-oss" and len(names) == 2:           # in turns
        parts = [weight[:, ::2], weight[:, 1::2]]
    elif architecture == "gemma4" and len(names) == 2:
        names, parts = ["gate_up"], [weight]
    else:
        parts = list(weight.chunk(len(names), 1))
    return {f"blk.{layer}.ffn_{name}_exps.{kind}": part.contiguous().numpy()
            for name, part in zip(names, parts, strict=True)}


def settings(architecture: str, config: Any, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metadata of a model; adds tensors of rotary factors."""
    ropes = config.rope_parameters
    rope, local = ropes.get("full_attention", ropes), ropes.get("sliding_attention")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        ".block_count": config.num_hidden_layers, ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size, ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.layer_norm_rms_epsilon":
            getattr(config, "rms_norm_eps", None) or config.norm_eps,
        ".attention.key_length": head_dim, ".attention.value_length": head_dim,
        ".rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        ".rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        keys |= {".rope.scaling.type": kind, ".rope.scaling.factor": float(rope["factor"])}
    if kind in ("yarn", "longrope"):
        keys[".rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope":
        first = rope["original_max_position_embeddings"]
        growth = np.log(config.max_position_embeddings / first) / np.log(first)
        keys[".rope.scaling.attn_factor"] = float(np.sqrt(1 + growth))
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"])
    if kind == "llama3":
        inv_freq = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        tensors["rope_freqs.weight"] = (plain / inv_freq).numpy()
    if architecture == "granite":
        keys |= {".attention.scale": config.attention_multiplier,
                 ".embedding_scale": config.embedding_multiplier,
                 ".residual_scale": config.residual_multiplier,
                 ".logit_scale": config.logits_scaling}  # fmt: skip
    if architecture in ("phi3", "gemma3", "gemma4", "gpt-oss"):
        keys[".attention.sliding_window"] = config.sliding_window or 0
    if "llama_4_scaling_beta" in rope:
        keys |= {".attention.temperature_scale": rope["llama_4_scaling_beta"],
                 ".rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}  # fmt: skip
    if kind == "yarn" and "beta_fast" in rope:
        keys |= {".rope.scaling.yarn_beta_fast": rope["beta_fast"],
                 ".rope.scaling.yarn_beta_slow": rope["beta_slow"]}  # fmt: skip
    keys |= of_experts(architecture, config)
    if architecture == "deepseek2":
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        keys |= {".attention.head_count_kv": 1, ".attention.kv_lora_rank": config.kv_lora_rank,
                 ".attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
                 ".attention.value_length": config.kv_lora_rank,
                 ".attention.key_length_mla": width, ".rope.dimension_count": 8,
                 ".attention.value_length_mla": config.v_head_dim}  # fmt: skip
        if config.q_lora_rank:
            keys[".attention.q_lora_rank"] = config.q_lora_rank
        if rope["rope_type"] == "yarn":
            keys[".rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if architecture == "lfm2":
        heads = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
        keys |= {".attention.head_count_kv": heads, ".shortconv.l_cache": config.conv_L_cache}
    if architecture == "gemma4":
        keys |= of_gemma4(config, tensors)
    if architecture.startswith("qwen35"):
        keys[".rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        keys |= {".full_attention_interval": config.layer_types.index("full_attention") + 1,
                 ".ssm.conv_kernel": config.linear_conv_kernel_dim,
                 ".ssm.state_size": config.linear_key_head_dim,
                 ".ssm.group_count": config.linear_num_key_heads,
                 ".ssm.time_step_rank": config.linear_num_value_heads,
                 ".ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
                 }  # fmt: skip
    if local is not None:
        keys[".rope.freq_base_swa"] = float(local["rope_theta"])
    for role, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        keys[f"tokenizer.ggml.{role}_token_id"] = getattr(config, f"{key}_token_id")
    return keys


def of_experts(architecture: str, config: Any) -> dict[str, Any]:
    """The metadata of mixtures of experts."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in counts if getattr(config, name, None)), 0)
    if not count:
        return {}
    used = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    keys = {".expert_count": count, ".expert_used_count": used,
            ".expert_feed_forward_length": width}  # fmt: skip
    if hasattr(config, "shared_expert_intermediate_size"):
        keys[".expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture in ("deepseek2", "glm4moe"):
        keys |= {".expert_shared_count": config.n_shared_experts,
                 ".leading_dense_block_count": config.first_k_dense_replace,
                 ".expert_weights_scale": config.routed_scaling_factor,
                 ".expert_weights_norm": bool(config.norm_topk_prob),
                 ".expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2}  # fmt: skip
        if config.n_group > 1:
            keys |= {".expert_group_count": config.n_group,
                     ".expert_group_used_count": config.topk_group}
    if architecture == "llama4":
        keys |= {".feed_forward_length": config.intermediate_size_mlp,
                 ".interleave_moe_layer_step": config.interleave_moe_layer_step}  # fmt: skip
    return keys


def of_gemma4(config: Any, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metadata of Gemma 4; adds the factors that leave most of a full layer unrotated."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[slides.index(False)]
    wide, shared = full.head_dim, config.num_kv_shared_layers
    turning = int(wide * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    tensors["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (wide // 2 - turning))
    keys: dict[str, Any] = {
        ".attention.shared_kv_layers": shared,
        ".embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        ".attention.sliding_window_pattern": slides, ".attention.key_length": wide,
        ".attention.value_length": wide, ".attention.key_length_swa": config.head_dim,
        ".attention.value_length_swa": config.head_dim, ".rope.dimension_count": wide,
        ".rope.dimension_count_swa": config.head_dim,
    }  # fmt: skip
    if config.use_double_wide_mlp:
        first, size = len(slides) - shared, config.intermediate_size
        keys[".feed_forward_length"] = [size * (1 + (layer >= first))
                                        for layer in range(len(slides))]  # fmt: skip
    if config.attention_k_eq_v:
        keys[".attention.head_count_kv"] = [
            config.num_key_value_heads if slide else full.num_key_value_heads for slide in slides]
    if config.final_logit_softcapping:
        keys[".final_logit_softcapping"] = config.final_logit_softcapping
    return keys
