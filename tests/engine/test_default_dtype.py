"""The text is the same whatever torch's default dtype is: programs set it before or after loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from drafting import DRAFTERS, texts
from tiny import prompts, target

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load

OTHERS = [torch.bfloat16, torch.float16, torch.float64]
WANTS = [
    Sampling(), Sampling(temperature=0.9, seed=4),
    Sampling(temperature=0.8, seed=3, top_p=0.95, min_p=0.01, frequency_penalty=0.5,
             repetition_penalty=1.1, no_repeat_ngram=4, logit_bias={3: 0.5}),
]  # fmt: skip


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def written(engine: Engine) -> list[list[tuple[list[int], str]]]:
    return [texts(engine, prompts(4), max_new_tokens=12, sampling=want) for want in WANTS[1:]]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_writes_the_same_text(name: str, dtype: torch.dtype) -> None:
    drafter = DRAFTERS[name](target())
    wanted = written(Engine(target(), drafter))
    with default_dtype(dtype):
        for other in (drafter, DRAFTERS[name](target())):       # made before, and after
            assert written(Engine(target(), other)) == wanted


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_every_rule_writes_the_same_text(acceptance: str, dtype: torch.dtype) -> None:
    engine = Engine(target(), DRAFTERS["draft tree"](target()), acceptance=acceptance)
    wanted = written(engine)
    with default_dtype(dtype):
        assert written(engine) == wanted


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("options", [
    {"dtype": "float32"}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.needs_kernels),
    {"dtype": "bfloat16", "quantize": "int8"},
    {"dtype": "bfloat16", "drafter": "medusa"}], ids=str)  # fmt: skip
def test_a_model_is_loaded_the_same(options: dict[str, str], dtype: torch.dtype) -> None:
    prompt = ["Once upon a time, Lily had a", "Tom saw a"]
    engine = load("demo", **options)
    wanted = texts(engine, prompt, max_new_tokens=30, sampling=WANTS[2])
    with default_dtype(dtype):
        assert texts(engine, prompt, max_new_tokens=30, sampling=WANTS[2]) == wanted
        again = load("demo", **options)
        assert texts(again, prompt, max_new_tokens=30, sampling=WANTS[2]) == wanted
