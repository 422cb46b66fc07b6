"""From a GGUF file's metadata to a configuration in Hugging Face's format, and the map of tensors.

Sources: the constants of the package `gguf`, and how convert_hf_to_gguf.py of llama.cpp changes
weights: it reorders the rows of Llama's queries and keys for another rotation, and stores Gemma's
norms with the one added that the model adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.gguf.blocks import dequantize
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.tokenizer import end_tokens

GELU = "gelu_pytorch_tanh"


class Stored(NamedTuple):
    """Where a tensor of the Hugging Face checkpoint is in the file, and how it was changed.

    Attributes:
        name: Of the tensor in the file.
        heads: 0, or how many heads have their rows in the order of adjacent pairs, where Hugging
            Face's order is halves.
        shift: What the file added to every number.
    """

    name: str
    heads: int = 0
    shift: float = 0.0


class Model(NamedTuple):
    """What a file says about its model.

    Attributes:
        config: A configuration as in config.json.
        tensors: Every tensor that the model has, by its name in Hugging Face's checkpoints.
        unused: Tensors of the file that the model does not read.
    """

    config: dict[str, Any]
    tensors: dict[str, Stored]
    unused: list[str]


class Family(NamedTuple):
    """How an architecture of llama.cpp corresponds to a class of transformers.

    Attributes:
        architecture: The class.
        model_type: Of its configuration.
        layer: Modules of a layer, and the tensors of a block.
        permuted: Whether rows of queries and keys are stored in the order of pairs.
        shift: What was added to the weights of norms.
        more: Further settings.
    """

    architecture: str
    model_type: str
    layer: dict[str, str]
    permuted: bool = False
    shift: float = 0.0
    more: Callable[[GGUFFile, dict[str, Any]], None] | None = None


def model_of(file: GGUFFile) -> Model | None:
    """Read the model's configuration and where its tensors are.

    Returns:
        None for an architecture that is not mapped here.

    Raises:
        UnsupportedModel: The file holds no language model, or has a setting that is not known.
        ModelNotFound: Metadata or tensors are missing.
    """
    _check_kind(file)
    family = FAMILIES.get(file.architecture)
    if family is None or file.metadata.get(f"{file.architecture}.expert_count"):
        return None
    config = _common(file, family)
    if family.more is not None:
        family.more(file, config)
    tensors = dict(_tensors(file, family, config))
    used = {stored.name for stored in tensors.values()} | ROPE_FACTORS
    return Model(config, tensors, [name for name in file.tensors if name not in used])


def _check_kind(file: GGUFFile) -> None:
    """Refuse files that are a part of a model or no language model."""
    kind = file.metadata.text("general.type", "model")
    if kind != "model" or file.architecture == "clip":
        what = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix",
                "mmproj": "the vision part of a model"}.get(kind, f"of the kind {kind!r}")
        what = "the vision part of a model" if file.architecture == "clip" else what
        raise UnsupportedModel(f"{file.path} is {what}; give the GGUF file of a language model")


def _common(file: GGUFFile, family: Family) -> dict[str, Any]:
    """The settings that all families have."""
    name, metadata = file.architecture, file.metadata
    heads, hidden = metadata.integer(f"{name}.attention.head_count"), _hidden(file)
    key_heads = metadata.integer(f"{name}.attention.head_count_kv", heads)
    if min(heads, key_heads) < 1 or heads % key_heads:
        raise ModelNotFound(
            f"{file.path} has {heads} heads and {key_heads} of keys; fetch it again"
        )
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden // heads)
    epsilon = np.float32(metadata.number(f"{name}.attention.layer_norm_rms_epsilon"))
    config: dict[str, Any] = {
        "architectures": [family.architecture], "model_type": family.model_type,
        "vocab_size": _tensor(file, "token_embd.weight").shape[0], "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": layer_count(file), "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{name}.context_length"),
        # stored in float32: the shortest decimal is the number that was meant
        "rms_norm_eps": float(str(epsilon)), "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": _rope(file, head_dim), "dtype": "bfloat16",
    }  # fmt: skip
    for key, role in (("bos", "bos"), ("pad", "padding")):
        token = metadata.integer(f"tokenizer.ggml.{role}_token_id", -1)
        config[f"{key}_token_id"] = token if token >= 0 else None
    ends = list(end_tokens(file))
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    return config


def layer_count(file: GGUFFile) -> int:
    """Layers of the decoder; the file also counts those that predict further tokens."""
    name, metadata = file.architecture, file.metadata
    count = metadata.integer(f"{name}.block_count")
    count -= metadata.integer(f"{name}.nextn_predict_layers", 0)
    if not 0 < count <= len(file.tensors):
        raise ModelNotFound(f"{file.path} has {count} layers by its metadata; fetch it again")
    return count


def _hidden(file: GGUFFile) -> int:
    return file.metadata.integer(f"{file.architecture}.embedding_length")


def _tensor(file: GGUFFile, name: str) -> Any:
    if name not in file.tensors:
        raise ModelNotFound(f"{file.path} lacks the tensor {name}; fetch it again")
    return file.tensors[name]


def _tensors(
    file: GGUFFile, family: Family, config: dict[str, Any]
) -> Iterator[tuple[str, Stored]]:
    """Each tensor of the checkpoint, and where it is."""
    yield "model.embed_tokens.weight", Stored("token_embd.weight")
    yield "model.norm.weight", Stored("output_norm.weight", shift=family.shift)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", Stored("output.weight")
    heads = {"self_attn.q_proj": config["num_attention_heads"],
             "self_attn.k_proj": config["num_key_value_heads"]}  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        for module, block in family.layer.items():
            norm = module.endswith("norm")
            for kind in ("weight", "bias"):
                name = f"blk.{layer}.{block}.{kind}"
                if kind == "weight":
                    _tensor(file, name)
                elif name not in file.tensors:
                    continue
                yield f"model.layers.{layer}.{module}.{kind}", Stored(
                    name, heads.get(module, 0) if family.permuted else 0,
                    family.shift if norm and kind == "weight" else 0.0,
                )  # fmt: skip


def paired_rows(rows: int, heads: int) -> Tensor:
    """[rows] the places in the file of rows in Hugging Face's order.

    llama.cpp rotates adjacent numbers of a head, Hugging Face numbers half a head apart.

    Args:
        rows: Of the matrix of queries or keys.
        heads: That these rows belong to.
    """
    places = torch.arange(rows).view(heads, -1, 2)
    return places.transpose(1, 2).reshape(-1)


# rotary position embedding

ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
"""Of every published model with such factors; the file holds the factors alone."""


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    name, metadata = file.architecture, file.metadata
    rope: dict[str, Any] = {
        "rope_type": "default", "rope_theta": metadata.number(f"{name}.rope.freq_base", 1e4)
    }
    rotated = metadata.integer(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    prefix = f"{name}.rope.scaling."
    kind = metadata.text(f"{prefix}type", "none")
    factor = metadata.number(f"{prefix}factor", 0.0)
    context = metadata.integer(f"{name}.context_length")
    original = metadata.integer(f"{prefix}original_context_length", context)
    if kind == "none" and factor > 1:
        kind = "linear"
    if "rope_factors_short.weight" in file.tensors:
        return rope | {
            "rope_type": "longrope", "original_max_position_embeddings": original,
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
        }
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(file, prefix) | {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original
        }
    if kind != "none":
        raise UnsupportedModel(f"{file.path} scales positions by {kind!r}, which is not known here")
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3(file, rope["rope_theta"], rotated, context)
    return rope


def _factors(file: GGUFFile, name: str) -> list[float]:
    factors: list[float] = dequantize(_tensor(file, name)).flatten().tolist()
    return factors


def _yarn(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """What a file may say about YaRN beyond its factor."""
    names = {"attention_factor": "attn_factor", "beta_fast": "yarn_beta_fast",
             "beta_slow": "yarn_beta_slow"}  # fmt: skip
    return {key: file.metadata.number(prefix + name) for key, name in names.items()
            if prefix + name in file.metadata}  # fmt: skip


def _llama3(file: GGUFFile, theta: float, rotated: int, context: int) -> dict[str, Any]:
    """Factors of frequencies: Llama 3's rule where it gives them, else the factors themselves."""
    factors = torch.tensor(_factors(file, "rope_freqs.weight"))
    if bool((factors == 1).all()):
        return {}
    largest, (low, high, original) = float(factors.max()), _LLAMA3.values()
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    wavelengths = 2 * math.pi * theta**exponents
    share = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - share) / largest + share)
    if len(factors) == len(wanted) and torch.allclose(factors, wanted, rtol=1e-4):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    listed = factors.tolist()
    return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed,
            "factor": 1.0, "original_max_position_embeddings": context}  # fmt: skip


# families


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


_QKV = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
_REST = {
    "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_DENSE = {**_QKV, **_MLP, **_REST}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _DENSE, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _DENSE),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", {**_DENSE, **_HEAD_NORMS}),
    "phi3": Family("Phi3ForCausalLM", "phi3", {
        **_REST, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    }, more=_phi3),
    "granite": Family("GraniteForCausalLM", "granite", _DENSE, permuted=True, more=_granite),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _DENSE, permuted=True, more=_smollm3),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", {
        **_DENSE, **_HEAD_NORMS, "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    }, shift=1.0, more=_gemma3),
}  # fmt: skip
"""Architectures that are mapped here, by their name in llama.cpp."""
