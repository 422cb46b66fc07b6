"""A quantised target writes its own text, with every drafter, in any batch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import DRAFTERS, Fading, Hinted, Oracle, Watch, accepted_share, texts
from tiny import fresh, model, prompts, target

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model import loading
from draftproof.model.target import Target
from draftproof.model.variants import quantized
from draftproof.native.kernels import kernels
from draftproof.weights.quantize import is_quantized

WAYS = [pytest.param("int8", None, id="int8"), pytest.param("int4", None, id="int4"),
        pytest.param(None, "fp8", id="fp8 cache"), pytest.param("int8", "int8", id="int8, cache")]
ASKED, STORIES = prompts(5, seed=2), ["Once upon a time", "The dog saw a big"]
COLD, WARM = Sampling(), Sampling(temperature=0.9, seed=11)
OPTIONS: dict[str, Any] = {"max_new_tokens": 18}


@lru_cache(maxsize=16)
def quantised(weights: str | None, cache: str | None, family: str = "llama") -> Target:
    """A tiny target in few bits; everything else in float64."""
    ours = Target(model(family), kv_cache=cache)
    return ours if weights is None else quantized(ours, weights)


@pytest.mark.parametrize(("weights", "cache"), WAYS)
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "drawn"])
def test_same_text_with_any_drafter_in_few_bits(
    sampling: Sampling, weights: str | None, cache: str | None
) -> None:
    ours = quantised(weights, cache)
    wanted = texts(Engine(ours), ASKED, sampling=sampling, **OPTIONS)
    assert len({tuple(tokens) for tokens, _ in wanted}) == len(ASKED)
    if weights is not None:
        assert wanted != texts(Engine(target()), ASKED, sampling=sampling, **OPTIONS)
    for name in ("prompt-lookup", "draft chain", "target itself, tree", "medusa", "guess"):
        for budget, rows in ((None, 5), (None, 3), (Fading(8), 5)):
            engine = Engine(ours, Watch(DRAFTERS[name](ours)), budget=budget)
            assert texts(engine, ASKED, sampling=sampling, batch_size=rows, **OPTIONS) == wanted
    known = Oracle({tuple(text): tokens for text, (tokens, _) in zip(ASKED, wanted, strict=True)})
    done = Engine(ours, Watch(Hinted(known))).generate(ASKED, sampling=sampling, **OPTIONS)
    assert [(completion.tokens, completion.finish_reason) for completion in done] == wanted
    assert accepted_share(done) > 0.2


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen2-sliding"])
@pytest.mark.parametrize(("weights", "cache"), [("int8", None), (None, "int8")])
def test_other_families_in_few_bits(family: str, weights: str | None, cache: str | None) -> None:
    quantised_model = quantised(weights, cache, family)
    wanted = texts(Engine(quantised_model), ASKED, sampling=WARM, **OPTIONS)
    for drafter in ("prompt-lookup", "target itself, tree", "guess"):
        engine = Engine(quantised_model, DRAFTERS[drafter](quantised_model))
        assert texts(engine, ASKED, sampling=WARM, **OPTIONS) == wanted, drafter


@pytest.mark.parametrize("rule", RULES)
def test_quantised_targets_accept_their_own_drafts(rule: str) -> None:
    """Draft and target read in other shapes and caches: in integers it makes no difference."""
    ours = quantised("int8", "int8")
    for sampling in (COLD, WARM):
        engine = Engine(ours, DRAFTERS["target itself"](ours), acceptance=rule, budget=4)
        done = engine.generate(ASKED, max_new_tokens=21, sampling=sampling)
        assert all(item.stats.accepted == 16 and item.stats.rounds == 4 for item in done)


def test_a_quantised_draft_never_changes_the_text() -> None:
    """Nor does a self-draft of a quantised target, made of the original before that is given up."""
    def written(**how: Any) -> list[str]:
        engine = load("demo", budget=4 * (how["drafter"] != "none"), **how)
        if "quantize_draft" in how:
            assert is_quantized(engine.drafter.model.model)
        return [item.text for item in engine.generate(STORIES, max_new_tokens=20, sampling=WARM)]

    bits, draft = {"dtype": "float32", "quantize": "int8"}, {"quantize_draft": "int8"}
    wanted = written(drafter="none", dtype="float64")
    for drafter in ("demo-draft", "self-layers:2"):
        assert written(drafter=drafter, dtype="float64", **draft) == wanted, drafter
    wanted = written(drafter="none", **bits)
    for drafter in ("self-int8", "self-layers:3", "demo-draft"):
        assert written(drafter=drafter, **bits) == wanted, drafter


@pytest.mark.skipif(kernels() is None, reason="no kernels for 8 bits here")
def test_named_draft_models_are_quantised_to_int8_if_predictions_barely_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drafts(named: Any, **how: Any) -> tuple[bool, list[str]]:
        engine = load("demo", assistant_model=named, budget=4, **how)
        bits = is_quantized(engine.drafter.model.model)
        return bits, [completion.text for completion in engine.generate(STORIES, max_new_tokens=20)]

    eight, written = drafts("demo-draft")
    whole = loading.load_model("demo-draft", None, None)
    assert eight and drafts("demo-draft", quantize_draft="none") == (False, written)
    assert drafts(whole) == (False, written) and not is_quantized(whole)
    assert not drafts("demo-draft", dtype="float32")[0]
    monkeypatch.setattr("draftproof.model.variants.DRAFT_KL_LIMIT", 0.0)
    assert drafts("demo-draft") == (False, written)


def test_loading_quantises_and_says_what_it_cost() -> None:
    ours = load("demo", drafter="none", quantize="int8", kv_cache="int8").target
    loss = ours.quantization
    assert loss is not None and loss.kind == "int8" and loss.tokens > 100
    assert 0 < loss.kl < 0.05 and loss.agreement > 0.85 and loss.after < 0.7 * loss.before
    assert is_quantized(ours.model) and ours.position_bytes[0] < ours.position_bytes[1]


def test_models_passed_in_are_never_modified() -> None:
    ours = fresh("llama")
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    engine = load(ours, quantize="int8", drafter="self-layers:1", quantize_draft="int8")
    assert engine.target.model is not ours and not is_quantized(ours)
    engine.generate(ASKED, max_new_tokens=5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(("inputs", "words"), [
    ({"quantize": "int7"}, "quantize was 'int7'; choose one of int8, int4, fp8"),
    ({"kv_cache": "int4"}, "kv_cache was 'int4'; choose one of int8, fp8"),
    ({"quantize_draft": "int8"}, "are for draft models"),
    ({"quantize": "fp8"}, "emulated on a CPU"),
    ({"drafter": "self-layers:x"}, "self-int8, self-int4, or self-layers:N"),
    ({"drafter": "self-int8", "quantize_draft": "int4"}, "leave one of them out")
])
def test_invalid_combinations_raise_a_clear_error(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load("demo", device="cpu", **inputs)


def test_a_name_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    """The folder exists, and nothing in it can be loaded."""
    with pytest.raises(BadInput, match="int7"):
        load(tmp_path, quantize="int7")
