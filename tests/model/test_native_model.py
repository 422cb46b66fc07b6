"""A native model reads what transformers' class reads, with the bits of the same forward around
that class; its configuration is completed as transformers completes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import of_family

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.forward.native_config import ARCHITECTURES, NativeConfig, why_not_native
from draftproof.model.module_target import ModuleTarget
from draftproof.model.native_model import NativeModel
from draftproof.model.target import Target
from draftproof.model.variants import first_layers, quantized
from draftproof.native.kernels import kernels
from draftproof.weights.packed_linear import pack_linears
from draftproof.weights.tensor_source import SafetensorsSource

SIZES = {
    "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "vocab_size": 96, "initializer_range": 0.2, "max_position_embeddings": 512, "head_dim": 16,
    "num_key_value_heads": 2
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5] * 2,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
                                                   "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": 70}),
    "mistral yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "ministral": ("Ministral", {
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "phi3": ("Phi3", {"pad_token_id": None, "sliding_window": 70, "head_dim": 32, "rope_parameters":
                      {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3 long": ("Phi3", {"pad_token_id": None, "original_max_position_embeddings": 256,
                           "rope_parameters": LONGROPE}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "logits_scaling": 4.0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None}),
    "seed-oss": ("SeedOss", {"pad_token_id": None, "attention_out_bias": True}),
    "gemma3": ("Gemma3", {
        "sliding_window": 70, "query_pre_attn_scalar": 24, "pad_token_id": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
}  # fmt: skip
SHAPE = TreeShape.from_digits(["0", "1", "2", "00", "01", "10", "20", "000", "010", "0100"])


def saved(family: str, folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A random model of a family, in a folder and as transformers loads it from there."""
    name, extra = FAMILIES[family]
    model = of_family(name, **SIZES | extra).to(dtype)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval()


def native(folder: Path, dtype: torch.dtype) -> NativeModel:
    settings = json.loads((folder / "config.json").read_text())
    return NativeModel(settings, SafetensorsSource(folder, dtype), dtype=dtype, name=str(folder))


def readings(target: Target) -> torch.Tensor:
    """A prompt wider than the kernels read, then a tree in each of two ragged rows."""
    tokens = torch.randint(96, (2, 160), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(2, 192)
    with torch.inference_mode():
        target.read(TokenTree.chain(tokens[:, :100]), cache)
        cache.keep(None, torch.tensor([100, 41]))
        tree = TokenTree.shaped(tokens[:, 100:111], SHAPE)
        first = target.read(tree, cache, hidden_layers=(0, 2, -1))
        cache.keep(torch.tensor([[0, 2, 6], [0, 1, 5]]), torch.tensor([3, 2]))
        second = target.read(TokenTree.chain(tokens[:, 120:123]), cache)
    assert first.hidden is not None
    parts = (first.logits, first.hidden, second.logits)
    return torch.cat([part.flatten().double() for part in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_native_model_reads_what_transformers_class_reads(family: str, tmp_path: Path) -> None:
    module = saved(family, tmp_path, torch.float32)
    ours, stock = Target(native(tmp_path, torch.float32)), ModuleTarget(module)
    stock.fast = None                           # transformers' own forward
    truth = readings(stock)
    assert (readings(ours) - truth).abs().max() <= 1e-4 * truth.abs().max()
    assert ours.context == stock.context and ours.vocab_size == stock.vocab_size
    assert ours.reads_trees and ours.layout.shapes == stock.layout.shapes


@pytest.mark.skipif(kernels() is None, reason="no kernels for linear layers here")
@pytest.mark.parametrize("family", FAMILIES)
def test_native_model_is_bit_identical_to_fast_forward_of_the_module(
    family: str, tmp_path: Path
) -> None:
    module = saved(family, tmp_path, torch.bfloat16)
    pack_linears(module)
    ours, theirs = Target(native(tmp_path, torch.bfloat16)), Target(module)
    assert ours.ragged_batches and theirs.ragged_batches
    assert torch.equal(readings(ours), readings(theirs))
    tokens = torch.arange(8)
    hidden = torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        for raw in (False, True):
            assert torch.equal(ours.embed(tokens, raw), theirs.embed(tokens, raw))
            assert torch.equal(ours.unembed(hidden, raw), theirs.unembed(hidden, raw))


@pytest.mark.skipif(kernels() is None, reason="no kernels for linear layers here")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama 3", "gemma3", "granite", "phi3"])
def test_a_native_model_is_quantised_and_compared_as_the_class_is(
    family: str, kind: str, tmp_path: Path
) -> None:
    module, text = saved(family, tmp_path, torch.bfloat16), torch.arange(1, 90)
    ours = quantized(Target(native(tmp_path, torch.bfloat16)), kind, text)
    theirs = quantized(Target(module), kind, text)
    mine, hers = ours.quantization, theirs.quantization
    assert mine is not None and hers is not None
    assert mine.tokens == hers.tokens and abs(mine.kl - hers.kl) < 0.2 * hers.kl + 1e-4
    assert abs(mine.agreement - hers.agreement) < 0.06
    assert torch.equal(readings(ours), readings(theirs))
    short = first_layers(ours, 2)
    assert torch.equal(readings(short), readings(first_layers(theirs, 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_is_completed_as_transformers_completes_it(family: str) -> None:
    """Also where it leaves everything out that has a default."""
    name, extra = FAMILIES[family]
    kind = next(model_type for model, model_type in ARCHITECTURES.items()
                if model == f"{name}ForCausalLM")
    bare = {"num_hidden_layers": 3, "vocab_size": 96, "hidden_size": 96, "intermediate_size": 96,
            "num_attention_heads": 6}
    for settings in (bare, {**SIZES, **extra}):
        settings = {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **settings}
        assert why_not_native(settings) is None
        ours = NativeConfig(settings)
        rest = {key: value for key, value in settings.items() if key != "model_type"}
        theirs = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(rest)))
        names = ["rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
                 "num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id"]
        names += [each for each in ("attention_bias", "mlp_bias", "sliding_window", "layer_types")
                  if hasattr(theirs, each) and getattr(theirs, each) is not None]
        for item in names:
            assert getattr(ours, item) == getattr(theirs, item), item
        rope = ours.rope_parameters.get("", ours.rope_parameters)
        wanted = theirs.rope_parameters
        for mine, hers in ((rope, wanted),) if "rope_type" in wanted else (
            (rope[layer], wanted[layer]) for layer in wanted
        ):
            assert {key: mine.get(key) for key in hers} == {"partial_rotary_factor": None, **hers} \
                or {key: mine.get(key, 1.0) for key in hers} == hers


def test_what_is_not_known_is_refused_in_a_sentence(tmp_path: Path) -> None:
    saved("llama", tmp_path, torch.float32)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [
        {"model_type": "gpt2"}, {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "relu"}, {"quantization_config": {"quant_method": "gptq"}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"sliding_window": 5}, {"vocab_size": None},
    ]
    source = SafetensorsSource(tmp_path, torch.float32)
    for change in changes:
        with pytest.raises(UnsupportedModel, match="cannot be built natively"):
            NativeModel({**settings, **change}, source, dtype=torch.float32)
    with pytest.raises(ModelNotFound, match=r"lacks model\.layers\.3"):
        NativeModel({**settings, "num_hidden_layers": 4}, source, dtype=torch.float32)


@pytest.mark.parametrize("settings", [
    {"do_sample": False, "eos_token_id": [2, 3]}, {"eos_token_id": 2},
    {"do_sample": False, "eos_token_id": 2, "num_beams": 1},
    {"do_sample": True, "min_p": 0.1},
])  # fmt: skip
def test_generation_config_is_read_from_the_folder_with_or_without_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    saved("llama", tmp_path, torch.float32)
    file = tmp_path / "generation_config.json"
    file.unlink()
    assert native(tmp_path, torch.float32).generation_config is None
    file.write_text(json.dumps(settings))
    config, wanted = native(tmp_path, torch.float32), transformers.GenerationConfig(**settings)
    for name in ("do_sample", "eos_token_id"):
        assert getattr(config.generation_config, name) == settings.get(name)
        assert getattr(wanted, name) == settings.get(name)
