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
from draftproof.model.loading import embedded
from draftproof.model.quantize import is_quantized
from draftproof.model.target import Target
from draftproof.native.kernels import kernels

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels for 8 bits here")
WAYS = [pytest.param("int8", None, id="int8"), pytest.param("int4", None, id="int4"),
        pytest.param(None, "int8", id="int8 cache"), pytest.param(None, "fp8", id="fp8 cache"),
        pytest.param("int8", "int8", id="int8, int8 cache")]
DRAWN = 0.9
ASKED, NEW = prompts(5, seed=2), 18
DRAFTED = ("prompt-lookup", "draft chain", "target itself, tree", "medusa", "guess")


@lru_cache(maxsize=16)
def quantised(weights: str | None, cache: str | None, family: str = "llama") -> Target:
    """A tiny target in few bits; everything else in float64."""
    own = Target(model(family), kv_cache=cache)
    return own if weights is None else own.quantized(weights)


@lru_cache(maxsize=32)
def plain(
    weights: str | None, cache: str | None, temperature: float, family: str = "llama"
) -> list[tuple[list[int], str]]:
    """What it writes without a drafter."""
    return texts(Engine(quantised(weights, cache, family)), ASKED, max_new_tokens=NEW,
                 sampling=at(temperature))


def at(temperature: float) -> Sampling:
    return Sampling(temperature=temperature, seed=11)


@pytest.mark.parametrize(("weights", "cache"), WAYS)
@pytest.mark.parametrize("temperature", [0.0, DRAWN])
@pytest.mark.parametrize("drafter", DRAFTED)
def test_same_text_with_any_drafter_in_few_bits(
    drafter: str, temperature: float, weights: str | None, cache: str | None
) -> None:
    own, wanted, sampling = (quantised(weights, cache), plain(weights, cache, temperature),
                             at(temperature))
    engine = Engine(own, Watch(DRAFTERS[drafter](own)))
    assert texts(engine, ASKED, max_new_tokens=NEW, sampling=sampling) == wanted
    assert texts(engine, ASKED, max_new_tokens=NEW, sampling=sampling, batch_size=3) == wanted
    assert [
        texts(engine, [text], max_new_tokens=NEW, sampling=sampling)[0] for text in ASKED[:2]
    ] == wanted[:2]
    fading = Engine(own, Watch(DRAFTERS[drafter](own)), budget=Fading(8))
    assert texts(fading, ASKED, max_new_tokens=NEW, sampling=sampling) == wanted


@pytest.mark.parametrize(("weights", "cache"), WAYS)
def test_the_text_is_that_of_the_bits_and_not_the_original(
    weights: str | None, cache: str | None
) -> None:
    """Else the tests above would test nothing; and drafts that know the text stand."""
    wanted, sampling = plain(weights, cache, DRAWN), at(DRAWN)
    if weights is not None:
        assert wanted != texts(Engine(target()), ASKED, max_new_tokens=NEW, sampling=sampling)
    assert len({tuple(tokens) for tokens, _ in wanted}) == len(ASKED)
    known = Oracle({tuple(text): tokens for text, (tokens, _) in zip(ASKED, wanted, strict=True)})
    done = Engine(quantised(weights, cache), Watch(Hinted(known))).generate(
        ASKED, max_new_tokens=NEW, sampling=sampling
    )
    assert [one.tokens for one in done] == [tokens for tokens, _ in wanted] and accepted_share(
        done
    ) > 0.2


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen2-sliding"])
@pytest.mark.parametrize(("weights", "cache"), WAYS[:1] + WAYS[2:3])
def test_other_families_in_few_bits(family: str, weights: str | None, cache: str | None) -> None:
    own = quantised(weights, cache, family)
    for temperature in (0.0, DRAWN):
        wanted = plain(weights, cache, temperature, family)
        for drafter in ("prompt-lookup", "target itself, tree", "guess"):
            engine = Engine(own, DRAFTERS[drafter](own))
            assert texts(engine, ASKED, max_new_tokens=NEW, sampling=at(temperature)) == wanted, (
                drafter
            )


@pytest.mark.parametrize("rule", RULES)
def test_the_target_in_few_bits_accepts_itself_whole(rule: str) -> None:
    """Draft and target read in other shapes and caches: in integers it makes no difference."""
    own = quantised("int8", "int8")
    for sampling in (at(0.0), at(DRAWN)):
        engine = Engine(own, DRAFTERS["target itself"](own), acceptance=rule, budget=4)
        done = engine.generate(ASKED, max_new_tokens=21, sampling=sampling)
        assert all(one.stats.accepted == 16 and one.stats.rounds == 4 for one in done)


def test_a_quantised_draft_never_changes_the_text() -> None:
    own = load("demo", drafter="none", dtype="float64")
    asked = ["Once upon a time", "The dog saw a big"]
    wanted = [one.tokens for one in own.generate(asked, max_new_tokens=20, sampling=at(DRAWN))]
    for kind, drafter in ((None, "demo-draft"), ("int8", "demo-draft"), ("int8", "self-layers:2")):
        drafted = load("demo", drafter=drafter, dtype="float64", quantize_draft=kind, budget=4)
        assert is_quantized(drafted.drafter.model.model) == (kind is not None)
        assert [
            one.tokens for one in drafted.generate(asked, max_new_tokens=20, sampling=at(DRAWN))
        ] == wanted


@needs_kernels
def test_a_named_draft_model_has_8_bits_where_it_says_nearly_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ["Once upon a time", "The dog saw a big"]

    def drafts(named: Any, **how: Any) -> tuple[bool, list[str]]:
        engine = load("demo", assistant_model=named, budget=4, **how)
        return is_quantized(engine.drafter.model.model), [
            one.text for one in engine.generate(asked, max_new_tokens=20)
        ]

    eight, written = drafts("demo-draft")
    whole = loading.load_model("demo-draft", None, None)
    assert eight and drafts("demo-draft", quantize_draft="none") == drafts(whole) == (
        False, written
    )
    assert not drafts("demo-draft", dtype="float32")[0] and not is_quantized(whole)
    monkeypatch.setattr("draftproof.model.target.DRAFT_KL_LIMIT", 0.0)
    assert drafts("demo-draft") == (False, written)


def test_loading_quantises_and_says_what_it_cost() -> None:
    own = load("demo", drafter="none", quantize="int8", kv_cache="int8")
    loss = own.target.quantization
    assert loss is not None and loss.kind == "int8" and loss.tokens > 100
    assert 0 < loss.kl < 0.05 and loss.agreement > 0.85 and loss.after < 0.7 * loss.before
    assert (is_quantized(own.target.model)
            and own.target.position_bytes[0] < own.target.position_bytes[1])
    assert load("demo", drafter="none").target.quantization is None


def test_a_model_that_was_handed_in_is_never_changed() -> None:
    own = fresh("llama")
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    engine = load(own, quantize="int8", drafter="self-layers:1", quantize_draft="int8")
    assert (engine.target.model is not own and not is_quantized(own)
            and engine.target.quantization.tokens == 0)
    engine.generate(ASKED, max_new_tokens=5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize("drafter", ["self-int8", "self-layers:3", "prompt-lookup", "demo-draft"])
def test_quantised_targets_and_drafts_are_chosen_apart(drafter: str) -> None:
    """The self-draft is made of the original, before that is given up."""
    asked, texts_ = ["Once upon a time"], []
    for drafts in ("none", drafter):
        own = load("demo", drafter=drafts, dtype="float32", quantize="int8", budget=3)
        texts_.append(own.generate(asked, max_new_tokens=20, sampling=Sampling())[0].text)
    assert texts_[0] == texts_[1]


@pytest.mark.parametrize(("given", "words"), [
    ({"quantize": "int7"}, "quantize was 'int7'; choose one of int8, int4, fp8"),
    ({"quantize_draft": "gptq"}, "quantize_draft was 'gptq'"),
    ({"kv_cache": "int4"}, "kv_cache was 'int4'; choose one of int8, fp8"),
    ({"quantize_draft": "int8"}, "is for draft models; name one"),
    ({"quantize": "fp8"}, "emulated on a CPU"),
    ({"drafter": "self-layers:x"}, "self-int8, self-int4, or self-layers:N"),
    ({"drafter": "self-int8", "quantize_draft": "int4"}, "leave one of them out")
])
def test_what_does_not_fit_is_refused_in_a_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load("demo", device="cpu", **given)


def test_a_name_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="int7"):
        load(tmp_path / "nowhere", quantize="int7")
    assert embedded().is_dir()
