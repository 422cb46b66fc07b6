"""Every field of transformers' GenerationConfig is honoured, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import NEW, both
from tiny import model
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

import draftproof
from draftproof.errors import BadInput

IDS = {"input_ids": torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])}
HONOURED: dict[str, Any] = {
    "max_length": 14, "max_new_tokens": 7, "min_length": 20, "min_new_tokens": 12, "max_time": 60.0,
    "do_sample": True, "num_return_sequences": 1, "use_cache": False,
    "cache_implementation": "dynamic", "cache_config": {}, "max_cache_len": 64,
    "temperature": 0.5, "top_k": 1, "top_p": 0.01, "min_p": 0.99, "top_h": 0.01, "typical_p": 0.01,
    "epsilon_cutoff": 0.5, "eta_cutoff": 0.5, "repetition_penalty": 1.4,
    "encoder_repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[4], [7, 9]],
    "renormalize_logits": True, "forced_bos_token_id": 7, "forced_eos_token_id": 9,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (3, 1.3),
    "suppress_tokens": [37, 17, 20], "begin_suppress_tokens": [6, 22, 37],
    "sequence_bias": [[[4], 3.0]],
    "watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash"),
    "encoder_no_repeat_ngram_size": 2, "output_scores": True, "output_logits": True,
    "return_dict_in_generate": True, "pad_token_id": 39, "bos_token_id": 5, "eos_token_id": [5, 6],
    "decoder_start_token_id": 4, "num_assistant_tokens": 3, "prompt_lookup_num_tokens": 3,
    "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.3,
    "max_matching_ngram_size": 3, "assistant_early_exit": 1, "assistant_lookbehind": 3,
    "target_lookbehind": 3, "early_stopping": True, "length_penalty": 2.0, "low_memory": True,
    "compile_config": CompileConfig(), "disable_compile": True, "prefill_chunk_size": 4,
    "transformers_version": "5.0.0", "_from_model_config": True, "continuous_batching_config": None,
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6,
    "dola_layers": "low", "guidance_scale": 1.5, "output_attentions": True, "constraints": ["x"],
    "output_hidden_states": True, "assistant_ensemble_weight": 0.5, "speculation_type": "dflash",
    "use_mtp": True, "is_assistant": True, "force_words_ids": [[4]],
}  # fmt: skip
UNREACHED = ("stop_strings", "token_healing")
"""They need a tokenizer; see test_call.py."""


def test_every_field_is_checked() -> None:
    assert {*HONOURED, *REFUSED, *UNREACHED} == {*GenerationConfig().to_dict()}


def single_choice_settings(**asked: Any) -> dict[str, Any]:
    """What a sampled call needs to have one text only, and fields to have an effect."""
    alone = {"top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    if {"do_sample", "temperature"} & {*asked}:
        return {"top_k": 1, "do_sample": True}
    if alone & {*asked}:
        return {"do_sample": True, "top_k": 0, "temperature": 1e-3}
    if "exponential_decay_length_penalty" in asked or "min_length" in asked:
        return {"eos_token_id": [5, 6, 17]}
    needs = {"output_scores", "output_logits"} & {*asked}
    return {"return_dict_in_generate": True} if needs else {}


@pytest.mark.parametrize("name", HONOURED)
def test_fields_behave_as_in_transformers(name: str) -> None:
    asked = {name: HONOURED[name]}
    theirs, ours = both(model(), IDS, **{**single_choice_settings(**asked), **asked})
    if torch.is_tensor(theirs):
        assert torch.equal(theirs, ours)
        return
    assert torch.equal(theirs.sequences, ours.sequences)
    assert {*ours.keys()} | {"past_key_values"} == {*theirs.keys()}
    for key in {"scores", "logits"} & {*ours.keys()}:
        assert len(theirs[key]) == len(ours[key]) == NEW
        torch.testing.assert_close(theirs[key], ours[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_would_change_the_text_are_refused(name: str) -> None:
    asked = {name: REFUSED[name]}
    if name.startswith("output"):
        asked["return_dict_in_generate"] = True
    if name == "penalty_alpha":
        asked["top_k"] = 4
    if name in ("num_beam_groups", "diversity_penalty"):
        asked |= {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}
        name = "num_beams|num_beam_groups|diversity_penalty"
    with pytest.raises(BadInput, match=name):
        model().generate(
            **IDS, **asked, max_new_tokens=4, pad_token_id=0, custom_generate=draftproof.generate
        )
