"""A model as files that other engines read: a Hugging Face folder, OpenVINO's format, GGUF. Knows names and layouts of files.

None of the packages is a dependency: what is not installed is said in one sentence, with what would install it.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from draftproof.bench.inflate import inflated
from draftproof.errors import BadInput
from draftproof.model.loading import PreTrainedModel, load_tokenizer

PRECISIONS = ("bf16", "int8")
"""bfloat16 weights, or eight bits each: W8A8 here, OpenVINO's int8 and llama.cpp's Q8_0."""
NORMAL, CONTROL = 1, 3
"""Kinds of token in GGUF."""


class Missing(Exception):
    """An engine cannot be used here; the message says why in one sentence."""


def write_folder(model: str, size: str | None, folder: Path) -> Path:
    """A model and its tokenizer as transformers writes them, in bfloat16, inflated evenly to `size` parameters if asked."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise BadInput(f"{model} has no tokenizer; put one beside the model, its prompts are texts")
    loaded = inflated(model, size, even=True)
    disable_progress_bar()
    loaded.save_pretrained(folder)
    enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return folder


def write_openvino(source: Path, folder: Path, precision: str, exporter: str | None = None) -> Path:
    """OpenVINO's format, by ``optimum-cli export openvino``; it may belong to another environment than this one."""
    beside = Path(sys.executable).with_name("optimum-cli")
    command = exporter or shutil.which("optimum-cli") or (str(beside) if beside.exists() else None)
    if command is None:
        raise Missing("optimum-cli is not installed: pip install optimum-intel, or name one of another environment")
    asked = [command, "export", "openvino", "--model", str(source), "--task", "text-generation-with-past"]
    asked += ["--weight-format", "int8"] if precision == "int8" else []           # what is bfloat16 stays so
    done = subprocess.run([*asked, str(folder)], capture_output=True, text=True, check=False)
    weights = folder / "openvino_model.bin"
    if done.returncode != 0 or not weights.is_file():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        raise Missing(f"optimum-cli could not convert the model: {said[-1]}")
    wanted = sum(file.stat().st_size for file in source.glob("*.safetensors")) * (0.45 if precision == "int8" else 0.9)
    if weights.stat().st_size < wanted:
        raise Missing(f"optimum-cli stored the model in {weights.stat().st_size:,} bytes, fewer than {precision} weights take")
    return folder


def write_gguf(model: PreTrainedModel, folder: Path, file: Path, precision: str) -> Path:
    """GGUF of a Llama model and the byte-level BPE tokenizer in `folder`, through the package gguf."""
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise Missing("the package gguf is not installed: pip install gguf") from error
    settings, tensors = gguf_settings(model.config), gguf_tensors(model)
    writer: Any = gguf.GGUFWriter(file, "llama")
    for key, value in settings.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    tokens, kinds, merges = gguf_vocabulary(folder, int(model.config.vocab_size))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    end = model.config.eos_token_id
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)
    kind = gguf.GGMLQuantizationType
    for name, tensor in tensors.items():
        stored = kind.F32 if tensor.dim() == 1 else kind.BF16 if precision == "bf16" or tensor.shape[-1] % 32 else kind.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(tensor.detach().float().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_settings(config: Any) -> dict[str, int | float]:
    """What llama.cpp must know of a Llama model."""
    kind, rope = config.model_type, config.rope_parameters
    if kind != "llama" or rope.get("rope_type", "default") != "default" or config.attention_bias or config.mlp_bias:
        raise Missing(f"only Llama models without biases and scaled positions are written as GGUF here, and this is {kind}")
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by llama.cpp's names. It turns neighbours against each other, transformers the halves of a head."""
    config, found = model.config, dict[str, Tensor]()
    found["token_embd.weight"] = model.model.embed_tokens.weight
    found["output_norm.weight"] = model.model.norm.weight
    if not config.tie_word_embeddings:
        found["output.weight"] = model.lm_head.weight
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for number, layer in enumerate(model.model.layers):
        for theirs, name in _NAMES.items():
            weight = layer.get_submodule(theirs).weight
            found[f"blk.{number}.{name}.weight"] = _interleaved(weight, heads[name]) if name in heads else weight
    return found


def gguf_vocabulary(folder: Path, size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens by id, their kinds, and merges of the tokenizer in `folder`, padded to `size` tokens."""
    file = folder / "tokenizer.json"
    told: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    model = told.get("model", {})
    if model.get("type") != "BPE":
        raise Missing(f"the tokenizer in {folder} is not a BPE in tokenizer.json, which is what is written as GGUF here")
    tokens, kinds = [f"[unused{number}]" for number in range(size)], [NORMAL] * size
    for text, number in model["vocab"].items():
        tokens[number] = text
    for special in told.get("added_tokens", ()):
        tokens[special["id"]], kinds[special["id"]] = special["content"], CONTROL
    return tokens, kinds, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    outputs, inputs = weight.shape
    return weight.view(heads, 2, outputs // heads // 2, inputs).transpose(1, 2).reshape(outputs, inputs)
