"""Models in mixed precision are refused, in a sentence that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import fresh

import draftproof
from draftproof.engine.load import load
from draftproof.errors import UnsupportedModel

PROMPT = [5, 9, 3]
SAYS = r"autocast in bfloat16.*keep_fp32_wrapper=False"


def autocast(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype=dtype)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_autocast_around_load_or_around_a_call_is_refused(family: str) -> None:
    model = fresh(family).float()
    with autocast(), pytest.raises(UnsupportedModel, match=SAYS):
        load(model)
    engine = load(model)
    wanted = engine.generate([PROMPT], max_new_tokens=12)[0].tokens
    with autocast(), pytest.raises(UnsupportedModel, match=SAYS):
        engine.generate([PROMPT], max_new_tokens=12)
    with autocast(), torch.autocast("cpu", enabled=False):
        assert engine.generate([PROMPT], max_new_tokens=12)[0].tokens == wanted
    with autocast(), pytest.raises(UnsupportedModel, match=SAYS):
        ids = torch.tensor([PROMPT])
        model.generate(ids, max_new_tokens=4, custom_generate=draftproof.generate)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_autocast_within_the_forward_is_refused_before_and_after_load(family: str) -> None:
    """As accelerate and trainers put it there."""
    if family == "t5":
        from draftproof.verify.small_models import tiny

        model = tiny("t5").float()
        sampled: Any = None
    else:
        model = fresh(family).float()
        sampled = load(model)
    model.forward = autocast()(model.forward)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match=SAYS):
        load(model)
    if sampled is not None:
        with pytest.raises(UnsupportedModel, match=SAYS):
            sampled.generate([PROMPT], max_new_tokens=4)
    del model.forward


def test_a_model_that_accelerate_unwrapped_is_run() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = fresh("llama").float()
    wanted = load(model).generate([PROMPT], max_new_tokens=12)[0].tokens
    accelerate.state.AcceleratorState._reset_state(True)    # another test may have chosen another
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    with pytest.raises(UnsupportedModel, match=SAYS):
        load(accelerator.unwrap_model(prepared))
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert load(bare).generate([PROMPT], max_new_tokens=12)[0].tokens == wanted


def test_autocast_without_effect_is_accepted() -> None:
    with autocast():
        load(fresh("llama"))                                    # float64
        load(fresh("llama").bfloat16())


def test_a_named_model_writes_the_same_text_under_autocast() -> None:
    """It is read by our forward alone, in the dtype that was asked for."""
    engine = load("demo", dtype="float32", drafter="none")
    wanted = engine.generate([[5, 6, 7]], max_new_tokens=16)[0].tokens
    with autocast():
        assert engine.generate([[5, 6, 7]], max_new_tokens=16)[0].tokens == wanted
