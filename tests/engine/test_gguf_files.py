"""Engines for GGUF files: read by our own forward, without a module of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models
import pytest
import torch

from draftproof.core.params import Sampling
from draftproof.engine.load import load
from draftproof.gguf.config import model_of
from draftproof.gguf.file import GGUFFile
from draftproof.model.gguf_model import unpacked
from draftproof.model.native_model import NativeModel

PROMPT = [5, 17, 33, 8, 90, 41]


def written(path: Path, name: str = "llama", types: str | None = "Q8_0") -> Path:
    return gguf_models.save(gguf_models.tiny(name), path / "model.gguf", types)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_file_writes_what_transformers_writes_with_its_weights(
    name: str, tmp_path: Path
) -> None:
    path = written(tmp_path, name)
    file = GGUFFile.open(path)
    model = model_of(file)
    assert model is not None
    stock = unpacked(file, model, torch.float32)
    with torch.inference_mode():
        wanted = stock.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
    for drafter in ("none", "portfolio"):
        engine = load(path, dtype="float32", drafter=drafter)
        assert isinstance(engine.target.model, NativeModel)
        (answer,) = engine.generate([PROMPT], sampling=Sampling(max_new_tokens=24))
        assert list(answer.tokens) == wanted[0, len(PROMPT):].tolist()


def test_end_tokens_of_a_file_end_the_text(tmp_path: Path) -> None:
    engine = load(written(tmp_path), dtype="float32")
    assert engine.stop_tokens == (2,)


def test_unsupported_native_features_fall_back_to_transformers(tmp_path: Path) -> None:
    path = written(tmp_path)
    options: dict[str, Any]
    for options, native in (({"dtype": "float64"}, False), ({"quantize": "int8"}, True),
                            ({"drafter": "self-int8"}, True)):
        engine = load(path, **options)
        assert isinstance(engine.target.model, NativeModel) == native


def test_a_file_drafts_for_another(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    draft = written(tmp_path / "draft", "llama-tied")
    engine = load(written(tmp_path), dtype="float32", assistant_model=draft)
    plain = load(written(tmp_path), dtype="float32", drafter="none")
    sampling = Sampling(max_new_tokens=24)
    answers = [each.generate([PROMPT], sampling=sampling)[0].tokens for each in (engine, plain)]
    assert list(answers[0]) == list(answers[1])
