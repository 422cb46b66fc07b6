"""Engines as they are measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tiny

import draftproof as dp
from draftproof.bench.measure import Bench, OurEngine, Setting
from draftproof.bench.methods import load_methods
from draftproof.bench.report import compute
from draftproof.errors import BadInput

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny.fresh("llama").save_pretrained(folder / "target")
    tiny.fresh("llama", num_hidden_layers=1).save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def test_all_methods_of_a_model_write_the_same_texts(folders: tuple[str, str]) -> None:
    target, draft = folders
    drafters = ["suffix", "self-layers:1"]
    plain, methods = load_methods(target, drafters, [draft], budget=3)
    assert [method.name for method in methods] == ["plain", *drafters, draft]
    settings = [Setting(1, 0.0), Setting(2, 0.8)]
    run = Bench(methods, PROMPTS, settings, plain.sampling, 8, 1)
    run.run()
    figures = compute(run)
    assert len(figures) == 8 and all(figure.same == figure.texts > 0 for figure in figures)
    assert [figure.first_token is None for figure in figures] == [False] * 4 + [True] * 4
    _, methods = load_methods(target, [], [])               # nobody named any: the default
    assert isinstance(methods[1].engine.drafter, dp.Portfolio)


def test_a_single_prompt_is_streamed(folders: tuple[str, str]) -> None:
    method = OurEngine("suffix", dp.load(folders[0], drafter="suffix", budget=3))
    start, sampling = time.perf_counter(), dp.Sampling(max_new_tokens=9)
    texts, first, stats = method.write(PROMPTS[:1], sampling, 1, time.perf_counter, 0)
    assert first is not None and start < first < time.perf_counter()
    assert stats.emitted == len(texts[0]) - 1               # the first came with the prompt


@pytest.mark.parametrize(("drafters", "inputs", "why"), [
    (["suffix", "suffix"], {}, "suffix was given twice"),
    (["suffix", "medusa+recycling"], {"quantize_draft": "int8"}, "--quantize-draft is for"),
])
def test_invalid_combinations_are_refused_before_loading(
    drafters: list[str], inputs: dict[str, str], why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        load_methods(str(Path("no", "such", "model")), drafters, [], **inputs)
