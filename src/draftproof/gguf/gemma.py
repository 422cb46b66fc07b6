"""Gemma 3 and 4 in GGUF files."""

from __future__ import annotations

from typing import Any

import torch

from draftproof.gguf.blocks import dequantize
from draftproof.gguf.family import DENSE, GELU, HEAD_NORMS, Family, per_layer
from draftproof.gguf.file import GGUFFile


def _gemma3(file: GGUFFile, config: dict[str, Any]) -> None:
    metadata, count = file.metadata, config["num_hidden_layers"]
    window = metadata.integer("gemma3.attention.sliding_window", 0)
    pattern = metadata.numbers("gemma3.attention.sliding_window_pattern", [6])
    if len(pattern) == 1:
        slides = [bool(window) and (layer + 1) % max(1, int(pattern[0])) != 0
                  for layer in range(count)]  # fmt: skip
    else:
        slides = [bool(window and slide) for slide in pattern[:count]]
    # the family's largest model scales by the width per head (gemma_pytorch, config.py)
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


def _gemma4(file: GGUFFile, config: dict[str, Any]) -> None:
    """Gemma 4: sliding and full layers differ in heads, and the last ones share keys and values."""
    metadata, count = file.metadata, config["num_hidden_layers"]
    slides = [bool(slide) for slide in
              per_layer(file, "attention.sliding_window_pattern", count)]
    sizes = per_layer(file, "feed_forward_length", count)
    heads = dict(zip(slides, per_layer(file, "attention.head_count_kv", count), strict=True))
    width = metadata.integer("gemma4.attention.key_length_swa", config["head_dim"])
    rotated = metadata.integer("gemma4.rope.dimension_count_swa", width)
    theta = metadata.number("gemma4.rope.freq_base_swa", 1e4)
    table = file.tensors.get("per_layer_token_embd.weight")
    experts = metadata.integer("gemma4.expert_count", 0)
    config |= {
        "hidden_activation": GELU, "head_dim": width, "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads.get(True, config["num_key_value_heads"]),
        "num_global_key_value_heads": heads.get(False), "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "num_kv_shared_layers": _shared(file),
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in file.tensors
            for layer in range(count - _shared(file))),
        "sliding_window": metadata.integer("gemma4.attention.sliding_window"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": _share(file),
                               "rope_theta": config["rope_parameters"]["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "final_logit_softcapping": metadata.get("gemma4.final_logit_softcapping"),
        "hidden_size_per_layer_input": metadata.integer(
            "gemma4.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else config["vocab_size"],
        "enable_moe_block": experts > 0,
    }  # fmt: skip
    if rotated != width:
        share = rotated / max(width, 1)
        config["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = share
    if experts:
        config |= {
            "num_experts": experts,
            "top_k_experts": metadata.integer("gemma4.expert_used_count"),
            "moe_intermediate_size": metadata.integer("gemma4.expert_feed_forward_length"),
        }
    del config["hidden_act"]


def _shared(file: GGUFFile) -> int:
    """The number of last layers that use the keys and values of earlier ones."""
    return file.metadata.integer("gemma4.attention.shared_kv_layers", 0)


def _share(file: GGUFFile) -> float:
    """The share of a head that is rotated; the factors all but stop the rest's rotation."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return 1.0
    turning: torch.Tensor = dequantize(factors) < 1e20
    return float(turning.float().mean())


def _gemma4_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    prefix, count = f"blk.{layer}.", file.metadata.integer("gemma4.block_count")
    modules = dict(_GEMMA4)
    if layer >= count - _shared(file):
        modules = {name: block for name, block in modules.items() if name not in _KEYS_VALUES}
    elif f"{prefix}attn_v.weight" not in file.tensors:
        del modules["self_attn.v_proj"]
    if f"{prefix}ffn_gate_inp.weight" in file.tensors:
        modules |= _GEMMA4_EXPERTS
    if f"{prefix}inp_gate.weight" in file.tensors:
        modules |= _PER_LAYER_INPUT
    return modules


_GEMMA = {
    **DENSE, **HEAD_NORMS, "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_GEMMA4 = {**_GEMMA, "layer_scalar": "layer_output_scale.weight"}
_KEYS_VALUES = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
_GEMMA4_EXPERTS = {
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_exps.weight+ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
}  # fmt: skip
_PER_LAYER_INPUT = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
_OUTSIDE = (
    ("embed_tokens_per_layer", "per_layer_token_embd"),
    ("per_layer_model_projection", "per_layer_model_proj"),
    ("per_layer_projection_norm", "per_layer_proj_norm"),
)  # fmt: skip
GEMMAS = {
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _GEMMA, shift=1.0, more=_gemma3),
    "gemma4": Family("Gemma4ForCausalLM", "gemma4_text", _GEMMA4, more=_gemma4,
                     layer_of=_gemma4_layer, outside=_OUTSIDE),
}  # fmt: skip
"""The Gemma families, by the architecture's name in llama.cpp."""
