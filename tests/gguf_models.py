"""Tiny models of transformers, written as convert_hf_to_gguf.py of llama.cpp writes them."""

from __future__ import annotations

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
ARCHITECTURES = {"gemma3_text": "gemma3"}
PAIRED = {"llama", "granite", "smollm3"}


def tiny(name: str) -> Any:
    """A model with random weights, norms and biases included, in float32."""
    kind, settings = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **settings})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.mul_(3)
    return model


def save(model: Any, path: Path, types: str | None = None, parts: int = 0,
         **metadata: Any) -> Path:  # fmt: skip
    """Write a model.

    Args:
        model: Of `tiny`, or of its families.
        path: Where to.
        types: The type of matrices; None leaves them in float32.
        parts: Tensors of each part of a split file; 0 writes one file.
        metadata: Further keys.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    tensors = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        tensors[name] = stored(architecture, config, key, weight.float()).numpy()
    keys = settings(architecture, config, tensors)
    matrices = {name: types for name, tensor in tensors.items() if tensor.ndim > 1 and types}
    return gguf_files.write(path, tensors, {**keys, **metadata}, architecture, matrices,
                            split_max_tensors=parts)  # fmt: skip


def stored(architecture: str, config: Any, key: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as the file has it."""
    if architecture in PAIRED and (".q_proj." in key or ".k_proj." in key):
        heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        shape = weight.shape
        weight = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        weight = weight.swapaxes(1, 2).reshape(shape)
    if architecture == "gemma3" and key.endswith("norm.weight"):
        weight = weight + 1
    return weight.contiguous()


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
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".attention.key_length": head_dim, ".rope.dimension_count": head_dim,
        ".rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        keys |= {".rope.scaling.type": kind, ".rope.scaling.factor": float(rope["factor"])}
    if kind in ("yarn", "longrope"):
        keys[".rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope":
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
    if architecture in ("phi3", "gemma3"):
        keys[".attention.sliding_window"] = config.sliding_window or 0
    if local is not None:
        keys[".rope.freq_base_swa"] = float(local["rope_theta"])
    for role, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        keys[f"tokenizer.ggml.{role}_token_id"] = getattr(config, f"{key}_token_id")
    return keys
