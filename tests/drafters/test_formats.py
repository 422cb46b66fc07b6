"""The one reader: what a folder or file is, whom it is for, and what it says when it is neither."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import test_dflash
import test_dspark
import torch
from published import deep
from safetensors.torch import save_file

import draftproof as dp
from draftproof.drafters.checkpoint import Checkpoint, renamed, target_name
from draftproof.drafters.checkpoints import formats, load_drafter, recognise
from draftproof.errors import DrafterMismatch, ModelNotFound


def verifier(name: str, **method: Any) -> dict[str, Any]:
    return {"algorithm": "dspark", "verifier": {"name_or_path": name, "architectures": []},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6,
                                  "verifier_accept_k": 1, "accept_tolerance": 0.0, **method}]}


def spark(folder: Path, **changed: Any) -> Path:
    return test_dspark.folder_of(folder, test_dspark.spark_weights("vanilla"), "speculators",
                                 **changed)  # fmt: skip


def test_the_detected_format_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = spark(tmp_path, speculators_config=verifier("Qwen/Qwen3-4B"))
    with caplog.at_level(logging.WARNING, "draftproof"):
        engine = dp.load(deep().model, drafter=str(folder))
    assert "drafting with the DSpark head for Qwen3-4B, block 6" in caplog.text
    assert engine.drafter.description == "DSpark head for Qwen3-4B, block 6"


@pytest.mark.parametrize("key", [
    "base_model", "base_model_name_or_path", "target_model", "target_model_name",
])  # fmt: skip
def test_settings_of_several_names_say_what_a_head_was_trained_for(
    key: str, tmp_path: Path
) -> None:
    target = deep().with_model(deep().model)
    target.name = "/models/Qwen3-8B-Instruct"
    with pytest.raises(DrafterMismatch, match=r"trained for Qwen3-4B, and the target is Qwen3-8B"):
        load_drafter(spark(tmp_path, **{key: "Qwen/Qwen3-4B"}), target)
    drafter = load_drafter(spark(tmp_path, **{key: "Qwen/Qwen3-8B"}), target)
    assert drafter.description == "DSpark head for Qwen3-8B, block 6"


def test_a_head_for_another_target_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Its name, hidden states, layers and vocabulary."""
    target = deep().with_model(deep().model)
    target.name = "/models/Qwen3-8B-Instruct"
    folder = spark(tmp_path, speculators_config=verifier("Qwen/Qwen3-4B"))
    with pytest.raises(DrafterMismatch, match=r"trained for Qwen3-4B, and the target is Qwen3-8B"):
        load_drafter(folder, target)
    target.name = "/models/qwen3_4b-gguf/qwen3_4b-q4.gguf"
    load_drafter(folder, target)
    changes = (({"target_hidden_size": 64}, "64 numbers"), ({"draft_vocab_size": 30}, "30"),
               ({"aux_hidden_state_layer_ids": [2, 4, 60]}, "60"), ({"num_target_layers": 9}, "9"))
    for change, why in changes:
        with pytest.raises(DrafterMismatch, match=why):
            load_drafter(spark(tmp_path / "other", **change), deep())
    w = test_dspark.spark_weights("vanilla")
    w["fc.weight"] = torch.ones(32, 3 * 48, dtype=torch.float64)
    with pytest.raises(DrafterMismatch, match="48 numbers"):
        load_drafter(test_dspark.folder_of(tmp_path / "wide", w, "speculators"), deep())
    w = test_dspark.spark_weights("vanilla") | {"t2d": torch.ones(9000, dtype=torch.bool)}
    with pytest.raises(DrafterMismatch, match="9000 tokens"):
        load_drafter(test_dspark.folder_of(tmp_path / "many", w, "speculators"), deep())


def test_lossy_acceptance_settings_are_refused(tmp_path: Path) -> None:
    for change in ({"accept_tolerance": 2.0}, {"verifier_accept_k": 3}):
        folder = spark(tmp_path, speculators_config=verifier("Qwen/Qwen3-4B", **change))
        with pytest.raises(DrafterMismatch, match="would change the text"):
            load_drafter(folder, deep())


def test_disabled_settings_are_ignored(tmp_path: Path) -> None:
    """What transformers and `speculators` always write is not refused either."""
    base = {"return_dict": True, "output_hidden_states": False, "id2label": {"0": "LABEL_0"},
            "speculators_version": "0.9.0", "quantization_config": None, "some_list": [],
            "some_flag": False, "some_count": 0}  # fmt: skip
    load_drafter(spark(tmp_path, **base), deep())
    for change in ({"quantization_config": {"quant_method": "nvfp4"}}, {"some_flag": True}):
        with pytest.raises(DrafterMismatch, match=next(iter(change))):
            load_drafter(spark(tmp_path, **change), deep())


def test_files_that_are_not_drafters_are_rejected(tmp_path: Path) -> None:
    """A model's folder is none; a file of weights that nobody knows is refused."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert recognise(tmp_path) is None and recognise(tmp_path / "nothing") is None
    with pytest.raises(ModelNotFound, match="no drafter"):
        load_drafter(tmp_path, deep())
    with pytest.raises(DrafterMismatch, match="no drafter that is known"):
        recognise(tmp_path / "model.safetensors")


def test_every_format_has_a_title_and_tables() -> None:
    titles = [form.title for form in formats()]
    assert len({*titles}) == len(titles) >= 8
    known = [form for form in formats() if form.settings]
    assert known and all(isinstance(key, str) for item in known for key in item.settings)


def test_weights_under_two_names_are_refused(tmp_path: Path) -> None:
    w = test_dflash.weights()
    w["model.fc.weight"] = w["fc.weight"].clone()
    with pytest.raises(DrafterMismatch, match=r"fc\.weight"):
        load_drafter(test_dflash.written(tmp_path, w), deep())
    assert renamed(["a.b", "c"], {r"a\.(.+)": r"\1", "c": ""}) == {"b": "a.b"}
    assert target_name({"base_model": "org/Model-7B/"}) == "Model-7B"
    assert Checkpoint(tmp_path).settings["num_target_layers"] == 7
