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
    {"prefix_allowed_tokens_fn": lambda row, ids: [row + 2, 7 + int(ids[-1]) % 9, 21]},
    {"logits_processor": LogitsProcessorList([Forbid()])},
], ids=lambda asked: next(iter(asked)))  # fmt: skip
def test_processors_of_the_caller_are_asked_row_by_row(asked: dict[str, Any]) -> None:
    for rows in (1, 4):
        theirs, ours = both(model(), batch(rows), **asked)
        assert torch.equal(theirs, ours)
    assert not torch.equal(theirs, both(model(), batch(4))[0]), "nothing was asked for"


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


@pytest.mark.parametrize(("asked", "word"), [
    ({"drafter": "nonsense"}, "nonsense"),
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
