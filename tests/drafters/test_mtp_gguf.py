"""Layers for multi-token prediction in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
import torch
import transformers
from published import drafted_logits
from safetensors.torch import load_file, save_file

from draftproof.drafters import mtp
from draftproof.engine.load import load
from draftproof.errors import DrafterMismatch, ModelNotFound
from draftproof.gguf.config import model_of
from draftproof.gguf.file import GGUFFile
from draftproof.model.loading import load_model
from draftproof.model.target import Target

KINDS = {"qwen35": "mtp_num_hidden_layers", "qwen35moe": "mtp_num_hidden_layers",
         "qwen3next": "mtp_num_hidden_layers", "glm4moe": "num_nextn_predict_layers",
         "deepseek3": "num_nextn_predict_layers"}  # fmt: skip
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
        "shared_head_norm": "norm"}  # fmt: skip
DEEPSEEK = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm",
            "shared_head_norm": "shared_head.norm"}  # fmt: skip
TEXT, DRAFTED = [7, 3, 31, 2, 9, 4, 12], [5, 8, 0]


def written(kind: str, folder: Path, change: Callable[[dict[str, Any]], None] | None = None,
            **metadata: Any) -> tuple[Path, Path]:  # fmt: skip
    """The same model with one layer for prediction, as a folder and as a file."""
    hybrid = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    model = gguf_models.tiny(kind, **(hybrid if kind.startswith("qwen") else {}))
    config, count = model.config, model.config.num_hidden_layers
    single = type(config)(**{**config.to_dict(), "layer_types": None, "num_hidden_layers": 1,
                             "first_k_dense_replace": 0, KINDS[kind]: None})  # fmt: skip
    if getattr(single, "layer_types", None):
        single.layer_types = ["full_attention"]
    torch.manual_seed(5)
    layer = type(model.model.layers[-1])(single, 0).eval().requires_grad_(False)
    qwen = kind.startswith("qwen")
    centre = 0.0 if qwen else 1.0                           # norms that count from one
    state = {f"layers.{count}.{key}": 0.3 * torch.randn_like(weight) + centre * ("norm" in key)
             for key, weight in layer.state_dict().items()}  # fmt: skip
    ends = {name: centre + 0.3 * torch.randn(64) for name in DEEPSEEK}
    ends["eh_proj"] = 0.3 * torch.randn(64, 128)

    model.save_pretrained(folder)
    checkpoint = load_file(folder / "model.safetensors")
    for key, weight in state.items():
        name = key.replace(f"layers.{count}.", "mtp.layers.0.") if qwen else f"model.{key}"
        checkpoint[name] = weight
    for name, weight in ends.items():
        at = f"mtp.{QWEN[name]}" if qwen else f"model.layers.{count}.{DEEPSEEK[name]}"
        checkpoint[f"{at}.weight"] = weight
    save_file(checkpoint, folder / "model.safetensors", metadata={"format": "pt"})
    settings = transformers.AutoConfig.from_pretrained(folder)
    setattr(settings, KINDS[kind], 1)
    settings.save_pretrained(folder)

    blocks = {f"blk.{count}.nextn.{name}.weight": weight + (qwen and "norm" in name)
              for name, weight in ends.items()}  # fmt: skip
    tensors = {name: weight.numpy() for name, weight in blocks.items()}
    more = {f"model.{key}": weight for key, weight in state.items()}
    path = gguf_models.save(model, folder / "model.gguf", more=more, extra=tensors, change=change,
                            **{".block_count": count + 1, ".nextn_predict_layers": 1, **metadata})
    return folder, path


def target(path: Path) -> Target:
    return Target(load_model(path, "float32", "cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_drafts_as_the_folder_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    folder, path = written(kind, tmp_path)
    file = model_of(GGUFFile.open(path))
    assert file is not None and file.unused == []
    model = target(path)
    logits = drafted_logits(model, mtp.load(model), TEXT, DRAFTED)
    model.model.config.name_or_path = str(folder)
    wanted = drafted_logits(model, mtp.load(model), TEXT, DRAFTED)
    for ours, theirs in zip(logits, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_it_can_be_chosen_by_name_and_text_is_unchanged(tmp_path: Path) -> None:
    _, path = written("qwen35", tmp_path)
    engines = (load(path, drafter=name, budget=4, dtype="float32") for name in ("mtp", "none"))
    drafted, plain = (engine.generate([[1, 2, 3]], max_new_tokens=12)[0] for engine in engines)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


def test_a_missing_norm_falls_back_to_the_models_final_norm(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        tensors.pop("blk.2.nextn.shared_head_norm.weight")

    _, path = written("glm4moe", tmp_path, drop)
    made: Any = mtp.load(model := target(path))
    assert torch.equal(made.network.ends[0].norm.weight, model.model.model.norm.weight)


@pytest.mark.parametrize("same", [True, False])
def test_tables_of_its_own_must_be_the_models(same: bool, tmp_path: Path) -> None:
    """They are quantised apart from the model's, so they need not be equal bit by bit."""
    def add(tensors: dict[str, Any]) -> None:
        noise = np.random.default_rng(0).standard_normal((96, 64))
        head = tensors["output.weight"]
        copy = head + 0.05 * head.std() * noise if same else head.std() * noise
        tensors["blk.2.nextn.shared_head_head.weight"] = copy.astype(np.float32)

    _, path = written("glm4moe", tmp_path, add)
    if same:
        mtp.load(target(path))
        return
    with pytest.raises(DrafterMismatch, match=r"has head\.weight of its own"):
        mtp.load(target(path))


@pytest.mark.parametrize("lost", ["blk.2.", "blk.2.attn_k."])
def test_files_without_the_layers_are_read_and_say_so(lost: str, tmp_path: Path) -> None:
    """Some were made without them and still count them; in others they may have another form."""
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(lost)]:
            del tensors[name]

    _, path = written("glm4moe", tmp_path, drop)
    with pytest.raises(ModelNotFound, match="no layers for multi-token prediction"):
        mtp.load(target(path))
