"""Loading: what can be named loads as it says, and what cannot fails in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import fresh
from transformers import GenerationConfig

from draftproof.core.params import Sampling
from draftproof.engine.load import load
from draftproof.errors import (
    BadInput,
    DraftproofError,
    ModelNotFound,
    TokenizerMismatch,
    UnsupportedModel,
)
from draftproof.model import loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("model")
    fresh("llama").float().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (None, torch.float32), ("bf16", torch.bfloat16), ("float64", torch.float64),
        (torch.float16, torch.float16)
    ],
)
def test_a_folder_loads_in_the_precision_asked_for(
    folder: Path, asked: Any, got: torch.dtype
) -> None:
    own = loading.load_model(folder, asked, "cpu")
    assert own.dtype == got and not own.training


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_embedded_models_are_ordinary_folders(name: str) -> None:
    path = loading.embedded(name)
    assert loading.resolve(name) == str(path) and loading.load_tokenizer(path) is not None
    assert loading.load_model(name).num_parameters() > 1000


def test_one_sentence_for_everything_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    def broken(name: str, **changes: str | None) -> Path:
        path = tmp_path / name
        path.mkdir()
        for file in folder.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
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
        (
            broken("t5", config__json=json.dumps({"model_type": "t5", "is_encoder_decoder": True})),
            UnsupportedModel
        ),
        (broken("vit", config__json=json.dumps({"model_type": "vit"})), UnsupportedModel),
        (
            broken("other-size", config__json=json.dumps({**config, "hidden_size": 64})),
            ModelNotFound
        ),
    ]
    for name, kind in cases:
        with pytest.raises(kind) as error:
            loading.load_model(name)
        assert "\n" not in str(error.value), name
    with pytest.raises(ModelNotFound, match="demo"):
        loading.embedded("nothing")


@pytest.mark.parametrize("dtype", ["int8", "float33", "long"])
def test_a_precision_that_is_none_is_refused(folder: Path, dtype: str) -> None:
    with pytest.raises(BadInput, match="dtype"):
        loading.load_model(folder, dtype)


def test_a_device_that_is_none_is_refused(folder: Path) -> None:
    for device in ("cuda:77", "nonsense"):
        with pytest.raises(DraftproofError) as error:
            loading.load_model(folder, device=device)
        assert "\n" not in str(error.value)


def test_the_models_own_wishes_are_kept() -> None:
    own = fresh("llama")
    assert loading.default_sampling(own) == Sampling() and loading.stop_tokens(own) == ()
    own.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05,
        eos_token_id=[3, 4]
    )
    wanted = Sampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert loading.default_sampling(own) == wanted and loading.stop_tokens(own) == (3, 4)
    own.generation_config = GenerationConfig(
        do_sample=False, temperature=0.6, top_k=20, eos_token_id=7, max_new_tokens=9
    )
    assert loading.default_sampling(own) == Sampling(
        max_new_tokens=9
    ) and loading.stop_tokens(own) == (7,)


def test_a_drafter_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match="drafter"):
        load(folder, drafter="nonsense")
    with pytest.raises(BadInput, match="give one"):
        load(folder, drafter="none", assistant_model=folder)
    from tiny import shared

    with pytest.raises(TokenizerMismatch, match="tokenizers"):
        load("demo", assistant_model=shared("models", "slm-4096-gpt2"))


def test_loading_asks_for_a_tokenizer_only_where_there_is_one(folder: Path) -> None:
    assert loading.load_tokenizer(folder) is None
    assert load(folder).codec is None
    with pytest.raises(BadInput, match="no tokenizer"):
        load(folder, tokenizer=folder)
    broken = folder / "tokenizer.json"
    broken.write_text("{")
    try:
        with pytest.raises(ModelNotFound, match="tokenizer"):
            loading.load_tokenizer(folder)
    finally:
        broken.unlink()
