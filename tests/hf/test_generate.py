"""`model.generate(custom_generate=draftproof.generate)` writes what `model.generate` writes."""

from __future__ import annotations

import copy
from itertools import product
from threading import Thread
from typing import Any

import pytest
import torch
from tiny import FAMILIES, VOCAB, fresh, model, prompts
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation import (
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import draftproof
from draftproof.errors import BadInput
from draftproof.verify.small_models import tiny

PAD, NEW = VOCAB - 1, 18
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
OURS = {"custom_generate": draftproof.generate}


def batch(rows: int) -> dict[str, Tensor]:
    """Ragged prompts, padded on the left."""
    texts = [[token % PAD for token in text] for text in prompts(rows, seed=3)]
    width = max(map(len, texts))
    ids = torch.tensor([[PAD] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def both(mine: Any, inputs: dict[str, Tensor], **asked: Any) -> tuple[Any, Any]:
    """What transformers writes, and what we write."""
    how = {**GREEDY, **inputs, **asked}
    ours = {name: how.pop(name) for name in ("drafter", "acceptance") if name in how}
    return mine.generate(**how), mine.generate(**how, **ours, **OURS)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_transformers(family: str) -> None:
    """Of each row alone: transformers' Gemma 2 writes another text where padding fills a window."""
    module, inputs = model(family), batch(4)
    theirs, ours = both(module, inputs)
    assert family == "gemma2" or torch.equal(theirs, ours)
    for row, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
        alone = {"input_ids": ids[mask == 1][None], "attention_mask": mask[mask == 1][None]}
        theirs, mine = both(module, alone)
        assert torch.equal(theirs, mine) and torch.equal(theirs[0, -NEW:], ours[row, -NEW:])


@pytest.mark.parametrize(("name", "text", "refused"), [
    ("mamba", "cache_params", r"cache(_params)? of a text"),
    ("gemma3", "mm_encoder_outputs", "an image or a video"),
])  # fmt: skip
def test_default_multimodal_inputs_are_accepted_and_real_ones_refused(
    name: str, text: str, refused: str
) -> None:
    mine, ids = tiny(name), torch.tensor([[5, 6, 7, 8, 5, 6]])
    theirs, ours = both(mine, {"input_ids": ids})
    assert torch.equal(theirs, ours)
    planes = torch.arange(6).expand(4, 1, 6)                # as from Qwen-VL
    assert torch.equal(ours, mine.generate(ids, **GREEDY, **OURS, position_ids=planes))
    filled: Any = {"image": torch.zeros(1, 4, 32)}
    if text == "cache_params":
        filled = mine(ids[:, :2], use_cache=True).cache_params
    with pytest.raises(BadInput, match=refused):
        mine.generate(ids, **GREEDY, **OURS, **{text: filled})


ASKED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.4}, {"bad_words_ids": [[4], [7, 9]], "no_repeat_ngram_size": 2},
    {"min_new_tokens": 12, "eos_token_id": [5, 6, 8]}, {"eos_token_id": [5, 6, 8, 12]},
    {"suppress_tokens": [37, 17, 20], "renormalize_logits": True},
    {"forced_eos_token_id": 9, "exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 5},
)  # fmt: skip


@pytest.mark.parametrize("place", range(4))
def test_options_batches_samples_and_drafters_together(place: int) -> None:
    """Sampled tokens where one is left to choose from. Drafts are right, or another model's."""
    module = model(("llama", "qwen2-sliding", "gpt2", "opt")[place])
    for case, (rows, n) in enumerate(product((1, 4), (1, 3))):
        drafter = (module, model("llama", 1), None)[(place + case) % 3]
        asked = ASKED[(place + case) % len(ASKED)]
        if n > 1:
            asked = {**asked, "do_sample": True, "top_k": 1, "num_return_sequences": n}
        theirs, ours = both(module, batch(rows), drafter=drafter, **asked)
        assert torch.equal(theirs, ours), (rows, n, asked)


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


def test_scores_and_logits_equal_those_of_transformers() -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True,
             "logits_processor": LogitsProcessorList([Forbid()])}
    theirs, ours = both(model(), batch(2), **asked)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(theirs[name]))


def test_the_shortest_of_several_length_limits_applies() -> None:
    inputs = batch(2)
    lengths = [inputs["input_ids"].shape[1] + more for more in (5, 9)]
    limits = StoppingCriteriaList([MaxLengthCriteria(length) for length in lengths])
    theirs, ours = both(model(), inputs, stopping_criteria=limits)
    assert torch.equal(theirs, ours) and ours.shape[1] == lengths[0]


def test_each_number_of_draft_tokens_and_acceptance_rule_has_its_own_engine() -> None:
    module, ids = fresh("llama"), torch.tensor([[5, 6, 7]])
    for more in ({"num_assistant_tokens": 2}, {"num_assistant_tokens": 3},
                 {"num_assistant_tokens": 3, "acceptance": "block"}):
        module.generate(ids, **GREEDY, **OURS, drafter="prompt-lookup", **more)
    engines = module.__dict__["_draftproof"].values()
    assert [(engine.budget.max_draft_tokens, engine.acceptance) for engine in engines] == [
        (2, "match"), (3, "match"), (3, "block")]


class AllSaid:
    """Keeps state, as lm-eval's, which says "all have been done once"."""

    def __init__(self, rows: int) -> None:
        self.ended, self.seen = [False] * rows, list[tuple[int, ...]]()

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> bool:
        self.seen.append(tuple(input_ids[:, -1].tolist()))
        last = torch.isin(input_ids[:, -1], torch.tensor([20, 32, 39, 26, PAD])).tolist()
        self.ended = [item or now for item, now in zip(self.ended, last, strict=True)]
        return all(self.ended)


class ByRow(AllSaid):
    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Any:
        self.seen.append(tuple(input_ids[:, -1].tolist()))
        return torch.isin(input_ids[:, -1], torch.tensor([20, 32, 39]))


class Steps(BaseStreamer):
    def __init__(self) -> None:
        self.heard = list[Any]()

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ends", [None, [5, 38]])
@pytest.mark.parametrize("kind", [AllSaid, ByRow])
def test_criteria_and_streamers_are_called_as_by_transformers(
    rows: int, ends: list[int] | None, kind: type[AllSaid]
) -> None:
    """Once per token, about all rows: transformers asks an assisted model once a round."""
    criteria, streams, texts = [kind(rows), kind(rows)], [Steps(), Steps()], list[Tensor]()
    for criterion, stream, more in zip(criteria, streams, ({}, OURS), strict=True):
        asked = {"stopping_criteria": StoppingCriteriaList([criterion]), "streamer": stream}
        texts.append(model().generate(**batch(rows), **GREEDY, **asked, **more, eos_token_id=ends))
    assert torch.equal(*texts) and criteria[0].seen == criteria[1].seen
    assert streams[0].heard == streams[1].heard
    assert texts[0].shape[1] < batch(rows)["input_ids"].shape[1] + NEW


def test_a_text_streamer_in_a_thread_gives_the_text(demo: tuple[Any, Any]) -> None:
    ours, tokenizer = demo
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    how = {**inputs, "max_new_tokens": 30, "do_sample": False}
    writer = Thread(target=ours.generate, kwargs={**how, "streamer": streamer, **OURS})
    writer.start()
    text = "".join(streamer)
    writer.join()
    assert text == tokenizer.decode(ours.generate(**how)[0][inputs.input_ids.shape[1] :])


def test_an_assistant_drafts_and_a_batch_may_have_one() -> None:
    """transformers refuses batches with an assistant model; the engine is made once."""
    mine, inputs = fresh("llama"), batch(4)
    theirs = mine.generate(**inputs, **GREEDY)
    for _ in range(2):
        ours = mine.generate(**inputs, **GREEDY, assistant_model=model(seed=1), **OURS)
        assert torch.equal(theirs, ours)
    (engine,) = mine._draftproof.values()
    assert engine.drafter.name == "draft-model"
    assert not copy.deepcopy(mine)._draftproof


def test_samples_follow_the_seed_of_torch_and_no_drafter() -> None:
    module, texts = model(), []
    how = {**batch(2), **GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9,
           "num_return_sequences": 3}  # fmt: skip
    for seed, drafter in ((1, model(seed=1)), (1, "none"), (2, "none")):
        torch.manual_seed(seed)
        texts.append(module.generate(**how, drafter=drafter, **OURS))
    assert texts[0].shape[0] == 6 and torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])
    assert len({tuple(text.tolist()) for text in texts[0]}) > 2


@pytest.mark.parametrize(("asked", "word"), [
    ({"drafter": "nonsense"}, "nonsense"),
    ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention mask"),
    ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids"),
])  # fmt: skip
def test_unsupported_arguments_are_refused_by_name(asked: dict[str, Any], word: str) -> None:
    how = {"input_ids": torch.tensor([[1, 2, 3]]), **GREEDY, **asked}
    with pytest.raises(BadInput, match=word):
        model().generate(**how, **OURS)


def test_empty_past_key_values_are_accepted_and_filled_ones_refused() -> None:
    module, inputs = model(), batch(1)
    cache = DynamicCache(config=module.config)
    theirs, _ = both(module, inputs)
    assert torch.equal(theirs, module.generate(**inputs, **GREEDY, past_key_values=cache, **OURS))
    module(inputs["input_ids"][:, :-1], past_key_values=cache)
    with pytest.raises(BadInput, match="past_key_values of a text"):
        module.generate(**inputs, **GREEDY, past_key_values=cache, **OURS)


@pytest.mark.parametrize(("asked", "most"), [
    ({}, None), ({"num_assistant_tokens": 3}, 3),
    ({"generation_config": GenerationConfig(num_assistant_tokens=4)}, 4),
])  # fmt: skip
def test_a_number_of_draft_tokens_is_taken_and_transformers_default_is_not(
    asked: dict[str, Any], most: int | None
) -> None:
    ours = fresh("llama")
    ours.generate(**batch(1), **asked, max_new_tokens=4, pad_token_id=PAD, **OURS)
    (engine,) = ours._draftproof.values()
    assert engine.budget.max_draft_tokens == (most or engine.drafter.max_draft_tokens)


def test_weights_and_dtypes_that_change_between_calls_are_taken_up() -> None:
    mine, inputs = fresh("llama"), batch(2)
    before, _ = both(mine, inputs)
    with torch.no_grad():
        for weight in mine.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    for dtype in (torch.float64, torch.float32, torch.float64):
        theirs, ours = both(mine.to(dtype), inputs)
        assert torch.equal(theirs, ours) and not torch.equal(before, theirs)
    assert len(mine._draftproof) == 2


def test_a_model_in_training_is_read_without_dropout_and_trains_on() -> None:
    ours, inputs = fresh("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), batch(2)
    wanted, _ = both(ours, inputs)
    ours.train()
    ours.transformer.h[0].eval()                             # frozen by the user
    before = [part.training for part in ours.modules()]
    for _ in range(2):
        assert torch.equal(ours.generate(**inputs, **GREEDY, **OURS), wanted)
        assert [part.training for part in ours.modules()] == before
