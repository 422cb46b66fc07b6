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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_writes_what_it_returns(folders: tuple[str, str], temperature: float) -> None:
    engine = dp.load(folders[0], drafter="suffix", budget=3)
    sampling = dp.Sampling(temperature=temperature, seed=3, max_new_tokens=9)
    wanted = [one.tokens for one in engine.generate(PROMPTS, sampling=sampling)]
    method = OurEngine("suffix", engine)
    together, first, _ = method.write(PROMPTS, sampling, 2, time.perf_counter)
    assert together == wanted and first is None
    for prompt, text in zip(PROMPTS, wanted, strict=True):
        start = time.perf_counter()
        alone, first, stats = method.write([prompt], sampling, 1, time.perf_counter)
        assert alone == [text] and first is not None and start < first < time.perf_counter()
        assert stats.emitted == len(text) - 1                   # the first came with the prompt


def test_all_methods_of_a_model_write_the_same_texts(folders: tuple[str, str]) -> None:
    target, draft = folders
    drafters = ["suffix", "self-layers:1"]
    plain, methods = load_methods(target, drafters, [draft], budget=3)
    assert [one.name for one in methods] == ["plain", *drafters, draft]
    run = Bench(methods, PROMPTS, [Setting(1, 0.0), Setting(2, 0.0)], plain.sampling, 8, 1)
    run.run()
    figures = compute(run)
    assert len(figures) == 8 and all(one.same == one.texts > 0 for one in figures)


def test_nobody_named_any_the_default_is_measured(folders: tuple[str, str]) -> None:
    _, methods = load_methods(folders[0], [], [])
    assert [one.name for one in methods] == ["plain", "portfolio"]
    assert isinstance(methods[1].engine.drafter, dp.Portfolio)


@pytest.mark.parametrize(("drafters", "given", "why"), [
    (["suffix", "suffix"], {}, "suffix was given twice"),
    (["suffix", "medusa+recycling"], {"quantize_draft": "int8"}, "--quantize-draft is for"),
])
def test_what_does_not_fit_is_refused_before_loading(
    drafters: list[str], given: dict[str, str], why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        load_methods(str(Path("no", "such", "model")), drafters, [], **given)
