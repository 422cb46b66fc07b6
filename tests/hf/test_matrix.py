"""Families, batches, samples, processors and drafters together; then what comes with a call:
criteria, streamers, caches, a model that is being trained."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from test_generate import NEW, PAD, batch, both
from tiny import VOCAB, fresh, model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache
from transformers.generation import StoppingCriteriaList, StopStringCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import draftproof
from draftproof.errors import BadInput

HUB = Path(__file__).parents[2] / "recipes" / "custom_generate"
FAMILIES = ("llama", "qwen2-sliding", "qwen3", "mistral-sliding", "gemma3", "gpt2", "gpt-neox",
            "phi3", "opt", "granite")  # fmt: skip
ASKED: tuple[dict[str, Any], ...] = (
    {}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[4], [7, 9]]},
    {"min_new_tokens": 12, "eos_token_id": [5, 6, 8]}, {"min_length": 25, "eos_token_id": [5, 17]},
    {"suppress_tokens": [37, 17, 20], "renormalize_logits": True}, {"eos_token_id": [5, 6, 8, 12]},
    {"sequence_bias": [[[4], 3.0]], "encoder_repetition_penalty": 1.2},
    {"forced_eos_token_id": 9, "exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 5},
)  # fmt: skip


@pytest.mark.parametrize("place", range(len(FAMILIES)), ids=FAMILIES)
def test_tokens_are_those_of_transformers(place: int) -> None:
    """Sampled ones where one token is left to choose from, as greedy calls have no samples. Drafts
    are the family's own, which are right, or another's."""
    own = model(FAMILIES[place])
    for case, (rows, n) in enumerate(product((1, 4), (1, 3))):
        drafter = (own, model("llama", 1), None)[(place + case) % 3]
        asked = ASKED[(place + case) % len(ASKED)]
        if n > 1:
            asked = {**asked, "do_sample": True, "top_k": 1, "num_return_sequences": n}
        theirs, ours = both(own, batch(rows), drafter=drafter, **asked)
        assert torch.equal(theirs, ours), (rows, n, asked)


def test_every_option_asked_for_has_an_effect() -> None:
    how = {**batch(4), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    plain = model().generate(**how)
    assert not any(torch.equal(plain, model().generate(**{**how, **asked})) for asked in ASKED[1:])


def demo() -> tuple[Any, Any]:
    folder = draftproof.embedded("demo")
    return (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            AutoTokenizer.from_pretrained(folder))  # fmt: skip


def test_a_stop_string_inside_a_round_leaves_the_same_tokens() -> None:
    own, tokenizer = demo()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    inputs = tokenizer(["Once upon a time", "Lily saw a big dog and"], return_tensors="pt",
                       padding=True)  # fmt: skip
    free = own.generate(**inputs, max_new_tokens=40, do_sample=False)
    for stops in (["little girl"], [" big", "was so"], ["oved to pl", "an to th"]):
        how = {**inputs, "max_new_tokens": 40, "do_sample": False}
        theirs = own.generate(**how, stop_strings=stops, tokenizer=tokenizer)
        ours = own.generate(
            **how, stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, stops)]),
            custom_generate=draftproof.generate, drafter=own, num_assistant_tokens=7,
        )
        assert torch.equal(theirs, ours) and not torch.equal(theirs, free)


@pytest.mark.parametrize("ends", [None, 38])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_criterion_may_keep_state_and_look_at_the_whole_batch(
    rows: int, ends: int | None
) -> None:
    """Asked once per token about all rows, as lm-eval's, which says "all have been done once"."""
    class AllSaid:
        def __init__(self) -> None:
            self.said, self.seen = [False] * rows, list[tuple[int, ...]]()

        def __call__(self, input_ids: Tensor, scores: object, **_: object) -> bool:
            self.seen.append(tuple(input_ids[:, -1].tolist()))
            last = torch.isin(input_ids[:, -1], torch.tensor([20, 32, 39, 26, PAD])).tolist()
            self.said = [one or now for one, now in zip(self.said, last, strict=True)]
            return all(self.said)

    asked, texts = [AllSaid(), AllSaid()], list[Tensor]()
    for one, more in zip(asked, ({}, {"custom_generate": draftproof.generate}), strict=True):
        criteria = StoppingCriteriaList([one])
        texts.append(model().generate(
            **batch(rows), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD,
            eos_token_id=ends, stopping_criteria=criteria, **more))  # fmt: skip
    assert torch.equal(*texts) and asked[0].seen == asked[1].seen
    assert texts[0].shape[1] < batch(rows)["input_ids"].shape[1] + NEW


def test_streamers_hear_what_they_hear_from_transformers() -> None:
    """Step by step, of batches too; a text streamer in a thread of its own gives the text."""
    class Steps(BaseStreamer):
        def __init__(self) -> None:
            self.heard = list[Any]()

        def put(self, value: Tensor) -> None:
            self.heard.append(value.tolist())

        def end(self) -> None:
            self.heard.append("end")

    for rows in (1, 4):
        pair = [Steps(), Steps()]
        for one, more in zip(pair, ({}, {"custom_generate": draftproof.generate}), strict=True):
            model().generate(**batch(rows), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD,
                             eos_token_id=[5, 6, 8], streamer=one, **more)  # fmt: skip
        assert pair[0].heard == pair[1].heard
    own, tokenizer = demo()
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    how = {**inputs, "max_new_tokens": 30, "do_sample": False, "streamer": streamer,
           "custom_generate": draftproof.generate}  # fmt: skip
    writer = Thread(target=own.generate, kwargs=how)
    writer.start()
    text = "".join(streamer)
    writer.join()
    wanted = own.generate(**inputs, max_new_tokens=30, do_sample=False)[0]
    assert text == tokenizer.decode(wanted[inputs.input_ids.shape[1] :])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_cache_of_the_same_text_may_be_handed_in(family: str, rows: int) -> None:
    """From a first turn of the conversation; one of another text would be silently wrong."""
    own, inputs = model(family), batch(rows)
    first = own.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=PAD,
                         return_dict_in_generate=True)  # fmt: skip
    more = torch.cat([first.sequences, torch.full((rows, 2), 7)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 8, dtype=torch.int64)], 1)
    wanted = own.generate(more, attention_mask=mask, max_new_tokens=NEW, do_sample=False,
                          pad_token_id=PAD)  # fmt: skip
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD,
           "custom_generate": draftproof.generate}  # fmt: skip
    caches = [first.past_key_values, DynamicCache(config=own.config)]
    if family == "llama":
        caches.append(StaticCache(config=own.config, max_cache_len=64))
    for cache in caches:
        found = own.generate(more, attention_mask=mask, past_key_values=cache, **how)
        assert torch.equal(found, wanted)
    other = more.clone()
    other[:, 2 - more.shape[1] + inputs["input_ids"].shape[1]] = 11
    other[:, inputs["input_ids"].shape[1] - 1] = VOCAB - 1
    with pytest.raises(BadInput, match="past_key_values of another text"):
        own.generate(other, attention_mask=mask, past_key_values=first.past_key_values, **how)
    with pytest.raises(BadInput, match="past_key_values"):
        own.generate(
            more[:, -2:], attention_mask=mask, past_key_values=first.past_key_values, **how
        )


def test_a_model_in_training_is_read_without_dropout_and_trains_on() -> None:
    own, inputs = fresh("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), batch(2)
    wanted, _ = both(own, inputs)
    own.train()
    own.transformer.h[0].eval()                             # frozen by the user
    before = [part.training for part in own.modules()]
    for _ in range(2):
        found = own.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD,
                             custom_generate=draftproof.generate)  # fmt: skip
        assert torch.equal(found, wanted)
        assert [part.training for part in own.modules()] == before


def test_a_model_that_was_cast_gets_an_engine_of_its_own() -> None:
    own, inputs = fresh("llama"), batch(2)
    for dtype in (torch.float64, torch.float32, torch.float64):
        theirs, ours = both(own.to(dtype), inputs)
        assert torch.equal(theirs, ours)
    assert len(own._draftproof) == 2


def test_the_hub_folder_takes_stop_strings_and_samples_beside_an_assistant() -> None:
    own, tokenizer = demo()
    inputs = tokenizer("Lily saw a big dog and", return_tensors="pt")
    how = {**inputs, "max_new_tokens": 40, "do_sample": True, "top_k": 1, "tokenizer": tokenizer,
           "stop_strings": ["oved to pl", "an to th"], "num_return_sequences": 2}  # fmt: skip
    ours = own.generate(**how, custom_generate=str(HUB), trust_remote_code=True,
                        assistant_model=own)  # fmt: skip
    assert torch.equal(ours, own.generate(**how)) and ours.shape[1] < 46
