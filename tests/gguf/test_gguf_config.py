"""Configurations and maps of tensors: a file gives the logits of the model it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import gguf_models
import numpy as np
import pytest
import torch
import transformers

from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.gguf.config import model_of
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.weights import blocks_of, numbers_of


def through_transformers(file: GGUFFile) -> Any:
    """The model that a file describes, in transformers' class."""
    model = model_of(file)
    assert model is not None
    settings = {key: value for key, value in model.config.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        loaded = getattr(transformers, model.config["architectures"][0])(config).eval()
    state = {name: numbers_of(file, stored) for name, stored in model.tensors.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    loaded.load_state_dict(state, assign=True)
    fresh = type(loaded)(config)
    loaded.model.rotary_emb = fresh.model.rotary_emb
    if hasattr(loaded.model.embed_tokens, "embed_scale"):
        loaded.model.embed_tokens.embed_scale = fresh.model.embed_tokens.embed_scale
    return loaded


@pytest.mark.parametrize("name", gguf_models.FAMILIES)
def test_a_file_gives_the_logits_of_its_model(name: str, tmp_path: Path) -> None:
    original = gguf_models.tiny(name)
    file = GGUFFile.open(gguf_models.save(original, tmp_path / "model.gguf"))
    model = model_of(file)
    assert model is not None and model.unused == []
    read = through_transformers(file)
    tokens = torch.randint(0, 96, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, logits = original(tokens).logits, read(tokens).logits
    assert (wanted - logits).abs().max() <= 1e-5 * wanted.abs().max()
    for key in ("rms_norm_eps", "vocab_size", "eos_token_id", "head_dim", "layer_types"):
        if hasattr(original.config, key) and key in model.config:
            assert model.config[key] == getattr(original.config, key)


@pytest.mark.parametrize("name", ["llama3", "llama4"])
def test_rope_factors_restore_the_original_rope_parameters(name: str, tmp_path: Path) -> None:
    """Factors without their rule would end texts at the model's context."""
    original = gguf_models.tiny(name)
    model = model_of(GGUFFile.open(gguf_models.save(original, tmp_path / "model.gguf")))
    assert model is not None
    assert model.config["rope_parameters"] == original.config.rope_parameters


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """As llama.cpp reads files of before there was a type; a factor of 1 scales nothing."""
    original = gguf_models.tiny("llama")
    for factor, wanted in ((4.0, ("linear", 4.0)), (1.0, ("default", None))):
        path = gguf_models.save(original, tmp_path / "model.gguf",
                                **{".rope.scaling.factor": factor})
        model = model_of(GGUFFile.open(path))
        assert model is not None
        rope = model.config["rope_parameters"]
        assert (rope["rope_type"], rope.get("factor")) == wanted


@pytest.mark.parametrize(("layers", "scalar"), [(26, 32), (34, 32), (48, 32), (62, 16)])
def test_only_the_largest_gemma3_scales_queries_by_the_width_per_head(
    layers: int, scalar: int, tmp_path: Path
) -> None:
    """Heads have 32 numbers, and there are 64 for 4 of them; 12B has 48 layers, 27B has 62."""
    original = gguf_models.tiny("gemma3", num_hidden_layers=layers)
    model = model_of(GGUFFile.open(gguf_models.save(original, tmp_path / "model.gguf")))
    assert model is not None
    assert model.config["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(("name", "stated", "wanted"), [
    ("deepseek2", {"expert_weights_norm": None, "expert_weights_scale": None},
     {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    ("llama4", {}, {"use_qk_norm": True}),
    ("llama4", {"expert_count": 128}, {"use_qk_norm": False}),              # Maverick
    ("mistral3-plain", {}, {"sliding_window": None}),                       # the class' is 4096
    ("granite", {"attention.scale": None, "logit_scale": None, "embedding_scale": None},
     {"attention_multiplier": 0.25, "logits_scaling": 1.0, "embedding_multiplier": 1.0}),
])  # fmt: skip
def test_what_a_file_does_not_state_is_as_in_the_published_models(
    name: str, stated: dict[str, int | None], wanted: dict[str, object], tmp_path: Path
) -> None:
    original = gguf_models.tiny(name)
    file = GGUFFile.open(gguf_models.save(original, tmp_path / "model.gguf"))
    for key, value in stated.items():
        file.metadata.pop(f"{file.architecture}.{key}", None)
        if value is not None:
            file.metadata[f"{file.architecture}.{key}"] = value
    model = model_of(file)
    assert model is not None
    assert {key: model.config[key] for key in wanted} == wanted


def test_rows_in_blocks_are_reordered_without_changing_them(tmp_path: Path) -> None:
    original = gguf_models.tiny("llama")
    file = GGUFFile.open(gguf_models.save(original, tmp_path / "model.gguf", "Q8_0"))
    model = model_of(file)
    assert model is not None
    stored = model.tensors["model.layers.1.self_attn.k_proj.weight"]
    blocks = blocks_of(file, stored)
    assert blocks.type == "Q8_0" and blocks.shape == (32, 64)
    wanted = original.model.layers[1].self_attn.k_proj.weight.detach()
    assert (numbers_of(file, stored) - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_files_that_are_not_language_models_are_refused(tmp_path: Path) -> None:
    weight = {"x": np.ones(32)}
    for kind, architecture, words in (
        ("adapter", "llama", "a LoRA adapter"), ("imatrix", "llama", "an importance matrix"),
        ("mmproj", "clip", "the vision part"), ("model", "clip", "the vision part"),
    ):  # fmt: skip
        path = gguf_files.write(tmp_path / "x.gguf", weight, {"general.type": kind}, architecture)
        with pytest.raises(UnsupportedModel, match=words):
            model_of(GGUFFile.open(path))
    path = gguf_files.write(tmp_path / "x.gguf", weight, {"general.type": "model"}, "unheard-of")
    assert model_of(GGUFFile.open(path)) is None


def test_missing_settings_and_tensors_are_named(tmp_path: Path) -> None:
    original = gguf_models.tiny("qwen2")
    path = gguf_models.save(original, tmp_path / "model.gguf", **{".block_count": 3})
    with pytest.raises(ModelNotFound, match=r"lacks the tensor blk\.2\."):
        model_of(GGUFFile.open(path))
    path = gguf_models.save(original, tmp_path / "model.gguf", **{".block_count": 1 << 31})
    with pytest.raises(ModelNotFound, match=r"has 2147483648 layers"):
        model_of(GGUFFile.open(path))
    path = gguf_models.save(original, tmp_path / "model.gguf", **{".attention.head_count": 0})
    with pytest.raises(ModelNotFound, match=r"has 0 heads"):
        model_of(GGUFFile.open(path))
    path = gguf_models.save(gguf_models.tiny("llama3"), tmp_path / "model.gguf",
                            **{".rope.dimension_count": 1 << 31})  # fmt: skip
    with pytest.raises(ModelNotFound, match=r"rotates 2147483648 numbers and has 8 factors"):
        model_of(GGUFFile.open(path))
    hybrid = gguf_models.tiny("qwen3next")
    path = gguf_models.save(hybrid, tmp_path / "model.gguf", **{".attention.key_length": 0})
    with pytest.raises(ModelNotFound, match="has heads of 0 numbers"):
        model_of(GGUFFile.open(path))
    path = gguf_models.save(hybrid, tmp_path / "model.gguf", **{".ssm.group_count": 3})
    file = GGUFFile.open(path)
    model = model_of(file)
    assert model is not None
    with pytest.raises(ModelNotFound, match=r"another shape of blk\.0\.attn_qkv\.weight"):
        numbers_of(file, model.tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"])
    scaled = {".rope.scaling.type": "unheard-of"}
    path = gguf_models.save(original, tmp_path / "model.gguf", **scaled)
    with pytest.raises(UnsupportedModel, match=r"scales positions by 'unheard-of'"):
        model_of(GGUFFile.open(path))
