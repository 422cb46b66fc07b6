"""A model's generation_config: the text of transformers' generate, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import fresh
from transformers import GenerationConfig, PreTrainedModel

from draftproof.core.params import Sampling
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model import generation_defaults as defaults
from draftproof.model.generation_defaults import default_sampling

PROMPT, NEW, END = [5, 9, 3, 22], 20, 1


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return fresh("llama", seed=7, vocab_size=60).double()


def _written(model: PreTrainedModel, prompt: list[int], **asked: Any) -> list[int]:
    """What transformers writes."""
    model.generation_config = GenerationConfig(**{"eos_token_id": END, "pad_token_id": 0, **asked})
    ids = torch.tensor([prompt])
    return model.generate(ids)[0, len(prompt) :].tolist()  # type: ignore[no-any-return,operator]


def _rules(base: list[int]) -> dict[str, dict[str, Any]]:
    first, third = base[0], base[2]
    return {
        "suppress": {"suppress_tokens": [first, base[3]]},
        "suppress at the beginning": {"begin_suppress_tokens": [first]},
        "end tokens are not banned": {"bad_words_ids": [[third], [first, 8]],
                                      "eos_token_id": third},
        "no end token is banned": {"bad_words_ids": [[third]], "eos_token_id": [END, third]},
        "forced first token": {"forced_bos_token_id": 7},
        "forced end with the first token": {"forced_eos_token_id": 0},
        "forced end": {"forced_eos_token_id": [7, 8]},
        "min_length": {"min_length": 12, "eos_token_id": third},
        "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": third},
        "end tokens": {"eos_token_id": [base[5], base[8]]},
        "max_length": {"max_length": 9, "max_new_tokens": None},
        "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 1},
        "invalid values": {"remove_invalid_values": True, "suppress_tokens": [first]},
        "penalties": {"repetition_penalty": 4.0, "no_repeat_ngram_size": 2,
                      "renormalize_logits": True},
    }  # fmt: skip


CASES = tuple(_rules(list(range(9))))


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_equals_generate(name: str, model: PreTrainedModel) -> None:
    prompt = PROMPT[:1] if name == "forced first token" else PROMPT
    base = _written(model, prompt, max_new_tokens=NEW)
    assert len(set(base[:9])) > 4
    wanted = _written(model, prompt, **{"max_new_tokens": NEW, **_rules(base)[name]})
    for drafter in ("none", "portfolio"):
        assert load(model, drafter=drafter).generate([prompt])[0].tokens == wanted
    assert wanted != base


def test_sampling_without_top_k_has_that_of_transformers(model: PreTrainedModel) -> None:
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95)
    assert default_sampling(model) == Sampling(temperature=0.6, top_k=50, top_p=0.95)
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, stop_strings="end")
    assert default_sampling(model) == Sampling(temperature=1.0, stop=("end",))
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.6, max_new_tokens=9)
    assert default_sampling(model) == Sampling(max_new_tokens=9)


REFUSED: dict[str, Any] = {
    "num_beams": 4, "guidance_scale": 1.5, "watermarking_config": {"bias": 8.0}, "penalty_alpha": 1,
    "token_healing": True, "max_time": 2.0, "num_return_sequences": 2, "dola_layers": "low",
    "diversity_penalty": 0.5, "num_beam_groups": 2, "constraints": [1], "force_words_ids": [[1]],
    "typical_p": 0.3, "sequence_bias": [[[1], -50.0]],
}  # fmt: skip


def test_every_field_of_transformers_is_understood_or_refused(model: PreTrainedModel) -> None:
    """A field that a new transformers brings is in no table: it is refused as soon as it is set."""
    understood = {*defaults.UNDERSTOOD, *defaults.RULES}
    assert not understood & set(REFUSED)
    for name in GenerationConfig().to_dict():
        if name not in understood:
            model.generation_config = GenerationConfig(max_new_tokens=NEW)
            setattr(model.generation_config, name, REFUSED.get(name, "new"))
            if name in defaults.WHERE_SAMPLED:          # greedy text is the same with it
                assert load(model, drafter="none").generate([PROMPT])[0].tokens
                model.generation_config.do_sample = True
            with pytest.raises(BadInput, match=name):
                load(model, drafter="none").generate([PROMPT])


def test_neutral_values_are_ignored(model: PreTrainedModel) -> None:
    """And a sampling of one's own goes before all of them."""
    late = GenerationConfig._get_default_generation_params()
    model.generation_config = GenerationConfig(**{**late, "max_length": None})
    assert default_sampling(model) == Sampling()
    model.generation_config = GenerationConfig(num_beams=4)
    engine = load(model, drafter="none")
    assert engine.generate([PROMPT], sampling=Sampling(), max_new_tokens=3)[0].tokens


def test_a_rule_that_cannot_be_used_is_one_sentence(model: PreTrainedModel) -> None:
    for asked in ({"forced_eos_token_id": -1}, {"max_length": 3}):
        model.generation_config = GenerationConfig(eos_token_id=None, **asked)
        with pytest.raises(BadInput, match=next(iter(asked))):
            load(model, drafter="none").generate([PROMPT])


def test_refused_options_can_be_excluded_by_name(model: PreTrainedModel) -> None:
    """And the rest still holds."""
    asked: dict[str, Any] = {"max_new_tokens": NEW, "repetition_penalty": 1.3}
    wanted = _written(model, PROMPT, **asked)
    model.generation_config = GenerationConfig(
        eos_token_id=END, num_beams=4, length_penalty=2.0, guidance_scale=1.5, **asked
    )
    with pytest.raises(BadInput, match="--ignore-generation-config guidance_scale"):
        load(model).generate([PROMPT])
    with pytest.raises(BadInput, match="num_beams"):
        load(model, ignore_generation_config="guidance_scale").generate([PROMPT])
    engine = load(model, ignore_generation_config="num_beams,guidance_scale")
    assert engine.generate([PROMPT])[0].tokens == wanted
    assert model.generation_config.num_beams == 4
    for name in ("temperature", "eos_token_id", "num_beam"):
        with pytest.raises(BadInput, match=f"'{name}', which cannot be left out"):
            load(model, ignore_generation_config=name)
