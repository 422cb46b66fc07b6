"""Loading: what can be named loads as it says, and what cannot fails in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf_files
import gguf_models
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import fresh

from draftproof.engine.load import load
from draftproof.errors import BadInput, DraftproofError, ModelNotFound, UnsupportedModel
from draftproof.model import loading

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2,
      "vocab_size": 40, "is_encoder_decoder": True}
"""Of another kind than the weights next to it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("model")
    fresh("llama").float().save_pretrained(path)
    return path


def test_a_folder_loads_in_the_precision_asked_for(folder: Path) -> None:
    for asked, got in ((None, torch.float32), ("bf16", torch.bfloat16), ("float64", torch.float64),
                       ("half", torch.float16), (torch.float16, torch.float16)):
        loaded = loading.load_model(folder, asked, "cpu")
        assert loaded.dtype == got and not loaded.training
    for none in ("int8", "float33", "long"):
        with pytest.raises(BadInput, match="dtype"):
            loading.load_model(folder, none)


def test_loading_errors_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    def broken(name: str, **changes: str | None) -> Path:
        path = Path(shutil.copytree(folder, tmp_path / name))
        for file_name, content in changes.items():
            where = path / file_name.replace("__", ".")
            where.unlink() if content is None else where.write_text(content)
        return path

    config = json.loads((folder / "config.json").read_text())
    cases: list[tuple[Any, type[DraftproofError]]] = [
        (tmp_path / "nowhere", ModelNotFound),
        ("./nowhere", ModelNotFound),
        ("nobody/nothing-at-all", ModelNotFound),
        ("", ModelNotFound),
        (broken("no-config", config__json=None), ModelNotFound),
        (broken("bad-config", config__json="{"), ModelNotFound),
        (broken("no-weights", model__safetensors=None), ModelNotFound),
        (broken("bad-weights", model__safetensors="not weights"), ModelNotFound),
        (broken("no-type", config__json="{}"), ModelNotFound),
        (broken("t5", config__json=json.dumps(T5)), ModelNotFound),
        (broken("vit", config__json=json.dumps({"model_type": "vit"})), UnsupportedModel),
        (broken("size", config__json=json.dumps({**config, "hidden_size": 64})), ModelNotFound),
    ]
    for name, kind in cases:
        with pytest.raises(kind) as error:
            loading.load_model(name)
        assert "\n" not in str(error.value), name
    with pytest.raises(ModelNotFound, match="demo"):
        loading.embedded("nothing")


@pytest.mark.parametrize("how, says", [
    (lambda item: {key: item[key] for key in item if key != "model.norm.weight"},
     "lacks model.norm.weight, which"),
    (lambda item: {"_orig_mod." + key: item[key] for key in item},
     r"and 20 more, which .* \(and has _orig_mod.lm_head.weight and 20 more instead\)"),
    (lambda item: {key.replace("q_proj.", "q_proj.base_layer."): item[key] for key in item},
     "q_proj.weight and 1 more.*merge_and_unload"),
    (lambda item: {**item, "model.norm.weight": torch.zeros(7)},
     r"another size of model.norm.weight: \[7\] for \[32\]"),
])  # fmt: skip
def test_weights_that_would_be_random_are_refused(
    folder: Path, tmp_path: Path, how: Any, says: str, capfd: Any
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    save_file(how(load_file(file)), file, {"format": "pt"})
    with pytest.raises(ModelNotFound, match=says):
        load(folder, assistant_model=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_tied_weights_are_not_reported_missing_and_unused_weights_are_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    loading.load_model(tmp_path)
    assert not caplog.records
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    loading.load_model(tmp_path)
    assert "layers.1.input_layernorm.weight and 8 more" in caplog.text


def test_remote_code_and_unmerged_adapters_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        shutil.copy(folder / file, tmp_path)
    torch.save({"model.norm.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pickle that runs code .* safetensors"):
        loading.load_model(tmp_path)
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    for trusted, says in ((False, "give trust_remote_code"), (True, r"own\.py")):
        with pytest.raises(DraftproofError, match=says):
            loading.load_model(tmp_path, trust_remote_code=trusted)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="merge_and_unload"):
        loading.load_model(tmp_path)


def test_loading_asks_for_a_tokenizer_only_where_there_is_one(
    folder: Path, tmp_path: Path
) -> None:
    assert loading.load_tokenizer(folder) is None
    assert load(folder).codec is None
    with pytest.raises(BadInput, match="no tokenizer"):
        load(folder, tokenizer=folder)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFound, match="tokenizer"):
        loading.load_tokenizer(tmp_path)


def test_loading_a_gguf_file_gives_its_model(tmp_path: Path) -> None:
    model = gguf_models.tiny("qwen2")
    gguf_models.save(model, tmp_path / "model.GGUF")
    loaded = loading.load_model(tmp_path / "model.GGUF", "float32", "cpu")
    assert not hasattr(loaded, "hf_quantizer") and loaded.dtype == torch.float32
    assert loading.load_config(tmp_path / "model.GGUF").hidden_size == model.config.hidden_size
    assert loading.load_tokenizer(tmp_path / "model.GGUF") is None
    with torch.inference_mode():
        text = torch.arange(12)[None]
        torch.testing.assert_close(loaded(text).logits, model(text).logits)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"broken\.gguf is not a GGUF file"):
        loading.load_model(tmp_path / "broken.gguf")
    with pytest.raises(ModelNotFound, match="there is no f"):
        loading.load_model(tmp_path / "other.gguf")


def test_the_parts_of_a_gguf_file_are_one_model(tmp_path: Path) -> None:
    model = gguf_models.tiny("llama")
    gguf_models.save(model, tmp_path / "m.gguf", parts=9)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    text = torch.arange(12)[None]
    for part in parts:
        with torch.inference_mode():
            result = loading.load_model(part, "float32", "cpu")(text).logits
        torch.testing.assert_close(result, model(text).logits)


def test_an_architecture_that_nothing_reads_is_named(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", {"x": np.ones(32)}, {}, "rwkv7")
    with pytest.raises(UnsupportedModel, match="is a rwkv7 model, which cannot be read"):
        loading.load_model(path)


TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip
SIGHT = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8,
         "out_hidden_size": 32}


def test_an_image_text_model_writes_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=SIGHT)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(tmp_path)
    held = {name for name, _ in loading.load_model(tmp_path).named_parameters()}
    assert held == {name for name, _ in model.named_parameters() if "visual" not in name}
    prompt = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
    (done,) = load(tmp_path, budget=3).generate([prompt], max_new_tokens=12)
    wanted = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            logits = model(input_ids=torch.tensor([wanted]), use_cache=False).logits
            wanted.append(int(logits[0, -1].argmax()))
    assert done.checked().tokens == wanted[len(prompt) :]
