"""Makes a configuration in Hugging Face's format from a GGUF file's metadata, and maps tensors.

Sources: the constants of the package `gguf`, and llama.cpp's convert_hf_to_gguf.py, which changes
weights: it reorders the rows of Llama's queries and keys for another rotation, and adds one to
Gemma's norms, as the model does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.gguf.blocks import BlockTensor, dequantize
from draftproof.gguf.families import FAMILIES
from draftproof.gguf.family import PARAMETERS, UNSHIFTED, Family, per_layer
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.tokenizer import end_tokens


class Stored(NamedTuple):
    """The location of a Hugging Face checkpoint's tensor in the file, and how it was changed.

    Attributes:
        name: The name of the tensor in the file.
        heads: The number of heads whose rows are in the order of adjacent pairs instead of Hugging
            Face's order of halves; 0 if there are none.
        shift: The number that was added to every value in the file.
        joined: A tensor whose outputs follow those of the first in the checkpoint's joint tensor;
            empty for none.
        restored: Computes the checkpoint's numbers from those of the file (of both tensors if there
            are two), where this takes more than reordering rows.
    """

    name: str
    heads: int = 0
    shift: float = 0.0
    joined: str = ""
    restored: Callable[..., Tensor] | None = None


class Model(NamedTuple):
    """A file's description of its model.

    Attributes:
        config: A configuration as in config.json.
        tensors: Every tensor of the model, by its name in Hugging Face's checkpoints.
        unused: Tensors of the file that neither the model nor a drafter reads.
        prediction: The tensors of layers for multi-token prediction, which follow the model's
            layers, by their names in DeepSeek-V3's checkpoint.
    """

    config: dict[str, Any]
    tensors: dict[str, Stored]
    unused: list[str]
    prediction: dict[str, Stored]


def model_of(file: GGUFFile) -> Model | None:
    """Read the model's configuration and the locations of its tensors.

    Returns:
        None for an architecture that is not mapped here.

    Raises:
        UnsupportedModel: The file holds no language model, or has an unknown setting.
        ModelNotFound: Metadata or tensors are missing.
    """
    _check_kind(file)
    family = FAMILIES.get(file.architecture)
    experts = file.metadata.integer(f"{file.architecture}.expert_count", 0)
    if family is None or (family.layer_of is None and bool(experts) != any(
        "experts" in name for name in family.layer)):
        return None
    config = _common(file, family)
    if family.more is not None:
        family.more(file, config)
    tensors = dict(_tensors(file, family, config))
    prediction = _prediction(file, family, config)
    read = [*tensors.values(), *prediction.values()]
    used = {name for stored in read for name in (stored.name, stored.joined)} | ROPE_FACTORS
    unused = [name for name in file.tensors if name not in used]
    return Model(config, tensors, unused, prediction)


_APART, _FUSED = "ffn_gate_exps.weight+ffn_up_exps.weight", "ffn_gate_up_exps.weight"
"""What goes into the experts of a layer, in two tensors or, in some newer files, in one."""
_ENDS = {
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "embed_tokens": "embed_tokens",
    "shared_head.norm": "shared_head_norm", "shared_head.head": "shared_head_head",
}  # fmt: skip
"""Tensors around a layer for multi-token prediction, in a checkpoint and in a file."""


def _check_kind(file: GGUFFile) -> None:
    """Refuse files of only a part of a model, or of no language model."""
    kind = file.metadata.text("general.type", "model")
    if kind != "model" or file.architecture == "clip":
        what = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix",
                "mmproj": "the vision part of a model"}.get(kind, f"of the kind {kind!r}")
        what = "the vision part of a model" if file.architecture == "clip" else what
        raise UnsupportedModel(f"{file.path} is {what}; give the GGUF file of a language model")


def _common(file: GGUFFile, family: Family) -> dict[str, object]:
    """The settings of all families."""
    name, metadata = file.architecture, file.metadata
    heads, hidden = metadata.integer(f"{name}.attention.head_count"), _hidden(file)
    # per layer, 0 without attention, or one number for all layers
    key_heads = int(max(metadata.numbers(f"{name}.attention.head_count_kv", [heads]), default=0))
    if min(heads, key_heads) < 1 or heads % key_heads:
        raise ModelNotFound(
            f"{file.path} has {heads} heads and {key_heads} of keys; fetch it again"
        )
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden // heads)
    if head_dim < 1:
        raise ModelNotFound(f"{file.path} has heads of {head_dim} numbers; fetch it again")
    epsilon = np.float32(metadata.number(f"{name}.attention.layer_norm_rms_epsilon"))
    config: dict[str, object] = {
        "architectures": [family.architecture], "model_type": family.model_type,
        "vocab_size": _tensor(file, "token_embd.weight").shape[0], "hidden_size": hidden,
        "intermediate_size": _width(file),
        "num_hidden_layers": layer_count(file), "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{name}.context_length"),
        # stored in float32: the shortest decimal is the intended number
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


def _width(file: GGUFFile) -> int:
    """The width of the first layer's feed-forward part; 0 where there are only experts."""
    key = "feed_forward_length"
    if f"{file.architecture}.{key}" not in file.metadata and file.metadata.get(
            f"{file.architecture}.expert_count"):
        return 0
    return per_layer(file, key, 1)[0]


def layer_count(file: GGUFFile) -> int:
    """The number of decoder layers; the file also counts layers for multi-token prediction."""
    name, metadata = file.architecture, file.metadata
    count = metadata.integer(f"{name}.block_count") - _prediction_layers(file)
    if not 0 < count <= len(file.tensors):
        raise ModelNotFound(f"{file.path} has {count} layers by its metadata; fetch it again")
    return count


def _prediction_layers(file: GGUFFile) -> int:
    return file.metadata.integer(f"{file.architecture}.nextn_predict_layers", 0)


def _hidden(file: GGUFFile) -> int:
    return file.metadata.integer(f"{file.architecture}.embedding_length")


def _tensor(file: GGUFFile, name: str) -> BlockTensor:
    if name not in file.tensors:
        raise ModelNotFound(f"{file.path} lacks the tensor {name}; fetch it again")
    return file.tensors[name]


def _tensors(
    file: GGUFFile, family: Family, config: dict[str, Any]
) -> Iterator[tuple[str, Stored]]:
    """Each tensor of the checkpoint, and its location."""
    yield "model.embed_tokens.weight", Stored("token_embd.weight")
    yield family.norm[0], Stored(family.norm[1], shift=family.shift)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", Stored("output.weight")
    for module, name in family.outside:
        if f"{name}.weight" in file.tensors:
            yield f"model.{module}.weight", Stored(f"{name}.weight")
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(file, family, config, layer)


def _layer(
    file: GGUFFile, family: Family, config: dict[str, Any], layer: int
) -> Iterator[tuple[str, Stored]]:
    """Each tensor of a decoder layer."""
    heads = {"self_attn.q_proj": config["num_attention_heads"],
             "self_attn.k_proj": config["num_key_value_heads"]}  # fmt: skip
    restorers = {} if family.restorers is None else family.restorers(config)
    modules = family.layer if family.layer_of is None else family.layer_of(file, layer)
    for module, block in modules.items():
        place, prefix = f"model.layers.{layer}.{module}", f"blk.{layer}."
        restored = restorers.get(module)
        if module.startswith(PARAMETERS):
            if block == _APART and f"{prefix}{_FUSED}" in file.tensors:
                block = _FUSED
            first, _, second = block.partition("+")
            names = [prefix + name for name in (first, second) if name]
            for name in names:
                _tensor(file, name)
            yield place, Stored(names[0], joined=names[1] if second else "", restored=restored)
            continue
        block, _, second = block.partition("+")
        joined = f"{prefix}{second}.weight" if second else ""
        for kind in ("weight", "bias"):
            name = f"{prefix}{block}.{kind}"
            if kind == "weight":
                _tensor(file, name)
            elif name not in file.tensors:
                continue
            is_shifted = module.endswith("norm") and module not in UNSHIFTED
            yield f"{place}.{kind}", Stored(
                name, heads.get(module, 0) if family.permuted else 0,
                family.shift if is_shifted and kind == "weight" else 0.0, joined, restored,
            )  # fmt: skip


def _prediction(file: GGUFFile, family: Family, config: dict[str, Any]) -> dict[str, Stored]:
    """The tensors of layers for multi-token prediction, which the model does not need; none if the
    file lacks them or has them in another form."""
    if f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight" not in file.tensors:
        return {}
    try:
        return dict(_predicting(file, family, config))
    except ModelNotFound:
        return {}


def _predicting(
    file: GGUFFile, family: Family, config: dict[str, Any]
) -> Iterator[tuple[str, Stored]]:
    first = config["num_hidden_layers"]
    for layer in range(first, first + _prediction_layers(file)):
        yield from _layer(file, family, config, layer)
        for module, block in _ENDS.items():
            name = f"blk.{layer}.nextn.{block}.weight"
            shift = family.shift if module.endswith("norm") else 0.0
            if name in file.tensors:
                yield f"model.layers.{layer}.{module}.weight", Stored(name, shift=shift)
            elif module == "shared_head.norm" and layer == first:       # llama.cpp's rule
                last = family.norm[1]
                yield f"model.layers.{layer}.{module}.weight", Stored(last, shift=shift)


def paired_rows(rows: int, heads: int) -> Tensor:
    """[rows] the indices in the file of rows in Hugging Face's order.

    llama.cpp rotates adjacent numbers of a head, Hugging Face numbers half a head apart.

    Args:
        rows: The number of rows of the matrix of queries or keys.
        heads: The number of heads to which these rows belong.
    """
    index = torch.arange(rows).view(heads, -1, 2)
    return index.transpose(1, 2).reshape(-1)


# rotary position embedding

ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_LLAMA3: tuple[dict[str, float], ...] = tuple(
    {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": 8192}
    for high in (4.0, 1.0)
)
"""The scaling of every published Llama 3, and of Llama 4; a file holds only the factors."""


def _rope(file: GGUFFile, head_dim: int) -> dict[str, object]:
    name, metadata = file.architecture, file.metadata
    theta = metadata.number(f"{name}.rope.freq_base", 1e4)
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
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
        return rope | _llama3(file, theta, rotated, context)
    return rope


def _factors(file: GGUFFile, name: str) -> list[float]:
    factors: list[float] = dequantize(_tensor(file, name)).flatten().tolist()
    return factors


def _yarn(file: GGUFFile, prefix: str) -> dict[str, float]:
    """The optional settings of YaRN in a file, besides its factor."""
    names = {"attention_factor": "attn_factor", "beta_fast": "yarn_beta_fast",
             "beta_slow": "yarn_beta_slow"}  # fmt: skip
    return {key: file.metadata.number(prefix + name) for key, name in names.items()
            if prefix + name in file.metadata}  # fmt: skip


def _llama3(file: GGUFFile, theta: float, rotated: int, context: int) -> dict[str, object]:
    """Factors of frequencies: Llama 3's rule if it reproduces them, or else the factors."""
    factors = torch.tensor(_factors(file, "rope_freqs.weight"))
    if bool((factors == 1).all()):
        return {}
    if len(factors) != rotated // 2:
        raise ModelNotFound(
            f"{file.path} rotates {rotated} numbers and has {len(factors)} factors of frequencies; "
            "fetch it again"
        )
    largest, exponents = float(factors.max()), torch.arange(0, rotated, 2).float() / rotated
    wavelengths = 2 * math.pi * theta**exponents
    for settings in _LLAMA3:
        low, high, original = settings.values()
        # Llama 4 has nothing between the two
        share = ((original / wavelengths - low) / max(high - low, 1e-9)).clamp(0, 1)
        wanted = 1 / ((1 - share) / largest + share)
        if torch.allclose(factors, wanted, rtol=1e-4):
            return {"rope_type": "llama3", "factor": largest, **settings}
    listed = factors.tolist()
    return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed,
            "factor": 1.0, "original_max_position_embeddings": context}  # fmt: skip
