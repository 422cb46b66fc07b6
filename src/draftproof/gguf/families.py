"""The model families to which GGUF files are mapped: settings and names of tensors.

Sources: the constants of the package `gguf`, and llama.cpp's convert_hf_to_gguf.py, which writes
each architecture.
"""

from __future__ import annotations

from typing import Any

from draftproof.gguf.experts import MIXTURES
from draftproof.gguf.family import DENSE, HEAD_NORMS, QKV, REST, Family, decimal
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.gemma import GEMMAS
from draftproof.gguf.hybrids import HYBRIDS


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
        config[key] = decimal(file.metadata.number(f"granite.{name}", usual.get(key, 1.0)))


def _smollm3(file: GGUFFile, config: dict[str, Any]) -> None:
    """Every fourth layer has no rotation, which files do not state."""
    count = config["num_hidden_layers"]
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(count)]


def _mistral3(file: GGUFFile, config: dict[str, Any]) -> None:
    """Mistral, or Ministral 3 if queries are scaled by their positions."""
    metadata, rope = file.metadata, config["rope_parameters"]
    if rope["rope_type"] == "yarn" and "mistral3.rope.scaling.yarn_log_multiplier" in metadata:
        scale = metadata.number("mistral3.rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    config["sliding_window"] = None
    growth = metadata.number("mistral3.attention.temperature_scale", 0.0)
    if growth:
        config |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
        rope["llama_4_scaling_beta"] = decimal(growth)
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", DENSE, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", DENSE),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", {**DENSE, **HEAD_NORMS}),
    "phi3": Family("Phi3ForCausalLM", "phi3", {
        **REST, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    }, more=_phi3),
    "granite": Family("GraniteForCausalLM", "granite", DENSE, permuted=True, more=_granite),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", DENSE, permuted=True, more=_smollm3),
    "mistral3": Family("MistralForCausalLM", "mistral", DENSE, permuted=True, more=_mistral3),
    "glm4": Family("Glm4ForCausalLM", "glm4", {
        **QKV, **REST, "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    }),
    **MIXTURES, **HYBRIDS, **GEMMAS,
}  # fmt: skip
"""Architectures that are mapped here, by their name in llama.cpp."""
