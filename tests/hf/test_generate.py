"""`model.generate(custom_generate=draftproof.generate)` writes what `model.generate` writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import FAMILIES, VOCAB, fresh, model, prompts
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import draftproof
from draftproof.errors import BadInput

PAD, NEW = 0, 18


def batch(rows: int) -> dict[str, Tensor]:
    """Ragged prompts, padded on the left."""
    texts = [[1 + token % (VOCAB - 1) for token in text] for text in prompts(rows, seed=3)]
    width = max(map(len, texts))
    ids = torch.tensor([[PAD] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def both(own: Any, inputs: dict[str, Tensor], **asked: Any) -> tuple[Any, Any]:
    """What transformers writes, and what we write."""
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **inputs, **asked}
    ours = {name: how.pop(name) for name in ("drafter", "acceptance") if name in how}
    theirs = own.generate(**how)
    return theirs, own.generate(**how, **ours, custom_generate=draftproof.generate)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """Of each row alone: transformers' Gemma 2 writes another text where padding fills a window."""
    own, inputs = model(family), batch(4)
    theirs, ours = both(own, inputs)
    assert family == "gemma2" or torch.equal(theirs, ours)
    for row, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
        alone = {"input_ids": ids[mask == 1][None], "attention_mask": mask[mask == 1][None]}
        theirs, mine = both(own, alone)
        assert torch.equal(theirs, mine) and torch.equal(theirs[0, -NEW:], ours[row, -NEW:])


class Forbid:
    """A processor of a user's: no token that differs from the last one by two, in even rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, last in enumerate(input_ids[:, -1].tolist()):
            scores[row, (last + 2) % VOCAB] = -torch.inf if row % 2 == 0 else scores[row, 0]
        return scores


@pytest.mark.parametrize("asked", [
    {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[4], [7, 9]]},
    {"min_new_tokens": 12, "eos_token_id": [5, 6, 8]}, {"suppress_tokens": [37, 17, 20]},
    {"sequence_bias": [[[4], 3.0]]}, {"forced_eos_token_id": 9},
    {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 5},
    {"encoder_repetition_penalty": 1.5}, {"eos_token_id": [5, 6, 8, 12]},
    {"prefix_allowed_tokens_fn": lambda row, ids: [row + 2, 7 + int(ids[-1]) % 9, 21]},
    {"logits_processor": LogitsProcessorList([Forbid()])},
], ids=lambda asked: next(iter(asked)))  # fmt: skip
@pytest.mark.parametrize("rows", [1, 4])
def test_processors_and_ends_are_honoured(asked: dict[str, Any], rows: int) -> None:
    theirs, ours = both(model(), batch(rows), **asked)
    assert torch.equal(theirs, ours)
    plain, _ = both(model(), batch(rows))
    assert rows == 1 or not torch.equal(plain, theirs), "nothing was asked for"


@pytest.mark.parametrize("ends", [None, 38])
def test_a_criterion_is_asked_behind_every_token(ends: int | None) -> None:
    """transformers asks an assisted model once a round, and so keeps more than the criterion
    allows."""
    class Last:
        def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
            return torch.isin(input_ids[:, -1], torch.tensor([20, 32, 39]))

    theirs, ours = both(model(), batch(4), stopping_criteria=StoppingCriteriaList([Last()]),
                        eos_token_id=ends)
    free, _ = both(model(), batch(4))
    assert torch.equal(theirs, ours) and not torch.equal(theirs, free)


def test_an_assistant_drafts_and_a_batch_may_have_one() -> None:
    """transformers refuses batches with an assistant model; the engine is made once."""
    own, assistant, inputs = fresh("llama"), model(seed=1), batch(4)
    theirs = own.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
    for _ in range(2):
        ours = own.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD,
                            assistant_model=assistant, custom_generate=draftproof.generate)
        assert torch.equal(theirs, ours)
    (engine,) = own._draftproof.values()
    assert engine.drafter.name == "draft-model"
    assert not copy.deepcopy(own)._draftproof


def test_samples_follow_the_seed_of_torch_and_no_drafter() -> None:
    own, inputs = model(), batch(2)
    how = {
        **inputs, "max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 9,
        "top_p": 0.9, "num_return_sequences": 3, "pad_token_id": PAD,
        "custom_generate": draftproof.generate
    }
    texts = []
    for seed, drafter in ((1, model(seed=1)), (1, "none"), (2, "none")):
        torch.manual_seed(seed)
        texts.append(own.generate(**how, drafter=drafter))
    assert (
        texts[0].shape[0] == 6
        and torch.equal(texts[0], texts[1])
        and not torch.equal(texts[1], texts[2])
    )
    assert len({tuple(text.tolist()) for text in texts[0]}) > 2


def test_scores_and_logits_are_those_of_transformers() -> None:
    theirs, ours = both(
        model(), batch(4), return_dict_in_generate=True, output_scores=True, output_logits=True,
        repetition_penalty=1.4
    )
    assert torch.equal(theirs.sequences, ours.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(theirs[name]), torch.stack(ours[name]), rtol=1e-4, atol=1e-4
        )


def test_a_streamer_gets_every_token_once() -> None:
    class Tokens(BaseStreamer):
        def __init__(self) -> None:
            self.tokens, self.ended = list[int](), 0

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    streamer = Tokens()
    text = model().generate(
        **batch(1), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, streamer=streamer,
        custom_generate=draftproof.generate
    )
    assert streamer.tokens == text[0].tolist() and streamer.ended == 1


@pytest.mark.parametrize(("asked", "word"), [
    ({"num_beams": 2}, "num_beams"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ({"guidance_scale": 1.5}, "guidance_scale"), ({"drafter": "nonsense"}, "nonsense"),
    ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention mask"),
    ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, Any], word: str) -> None:
    how = {
        "input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4, "do_sample": False,
        "pad_token_id": PAD
    }
    with pytest.raises(BadInput, match=word):
        model().generate(**{**how, **asked}, custom_generate=draftproof.generate)


def test_a_number_of_draft_tokens_is_taken_and_transformers_default_is_not() -> None:
    own, inputs = fresh("llama"), batch(1)
    for asked, most in (({}, None), ({"num_assistant_tokens": 3}, 3),
                        ({"generation_config": GenerationConfig(num_assistant_tokens=4)}, 4)):
        own.__dict__.pop("_draftproof", None)
        own.generate(
            **inputs, **asked, max_new_tokens=4, pad_token_id=PAD,
            custom_generate=draftproof.generate
        )
        (engine,) = own._draftproof.values()
        assert engine.budget.most == (most or engine.drafter.default_budget)


def test_weights_that_change_between_calls_are_taken_up() -> None:
    own, inputs = fresh("llama"), batch(2)
    before, _ = both(own, inputs)
    with torch.no_grad():
        for weight in own.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs, ours = both(own, inputs)
    assert torch.equal(theirs, ours) and not torch.equal(before, theirs)
