"""What transformers' own tests of greedy, sampled and assisted generation check, asked of ours.

Written from their description (tests/generation: the mixin for all models, and its integration
tests); docs/transformers.md lists which have no meaning here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_generate import GREEDY, NEW, OURS, batch
from tiny import model
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria


def texts(ours: Any, rows: int = 2, **asked: Any) -> Any:
    return ours.generate(**{**batch(rows), **GREEDY, **asked})


def dictionary(ours: Any, **asked: Any) -> Any:
    wants = ("return_dict_in_generate", "output_scores", "output_logits")
    return texts(ours, **dict.fromkeys(wants, True), **asked)


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "num_return_sequences": 2}],
                         ids=["greedy", "sampled"])  # fmt: skip
def test_outputs_have_their_types_lengths_and_shapes(drawn: dict[str, Any]) -> None:
    """With a cache or without; each row begins with its prompt."""
    module, rows = model("qwen3"), 2 * drawn.get("num_return_sequences", 1)
    prompt = batch(2)["input_ids"]
    for cached in (True, False):
        out = dictionary(module, use_cache=cached, **drawn, **OURS)
        assert isinstance(out, GenerateDecoderOnlyOutput)
        assert out.sequences.shape == (rows, prompt.shape[1] + NEW)
        repeated = prompt.repeat_interleave(rows // 2, 0)
        assert torch.equal(out.sequences[:, : prompt.shape[1]], repeated)
        for steps in (out.scores, out.logits):
            assert len(steps) == NEW
            assert {step.shape for step in steps} == {(rows, module.config.vocab_size)}
            assert {step.dtype for step in steps} == {torch.float32}


@pytest.mark.parametrize("kind", ["random", "same", "lookup", "early exit"])
def test_assisted_text_and_logits_are_those_of_greedy_search(kind: str) -> None:
    """And so are transition scores, by which texts are compared."""
    mine = model("gpt2")
    drafts: dict[str, Any] = {
        "random": {"assistant_model": model("gpt2", 5)}, "same": {"assistant_model": mine},
        "lookup": {"prompt_lookup_num_tokens": 2}, "early exit": {"assistant_early_exit": 1},
    }  # fmt: skip
    greedy, ours = dictionary(mine), dictionary(mine, **drafts[kind], **OURS)
    assert torch.equal(greedy.sequences, ours.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(greedy[name], ours[name], rtol=1e-4, atol=1e-4)
    scored = partial(mine.compute_transition_scores, normalize_logits=True)
    transitions = (scored(item.sequences, item.scores) for item in (greedy, ours))
    torch.testing.assert_close(*transitions, rtol=1e-4, atol=1e-4)
    assert mine.generation_config.num_assistant_tokens is None, "nothing is left over"


def test_assisted_sampling_keeps_lengths() -> None:
    """Exactly max_length, at least min_length before an end, with an assistant whose schedule is
    constant."""
    module, size = model(), batch(2)["input_ids"].shape[1]
    how = {"do_sample": True, "assistant_model": model("llama", 5), "max_new_tokens": None,
           "num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant"}  # fmt: skip
    assert texts(module, max_length=size + 7, **how, **OURS).shape[1] == size + 7
    ends = list(range(1, 40, 2))
    out = texts(module, max_length=size + 20, min_length=size + 9, eos_token_id=ends, **how, **OURS)
    new = out[:, size:]
    assert not bool((new[:, :9] % 2).any()) and new.shape[1] <= 20


def test_an_end_token_is_an_int_a_list_or_inside_a_draft() -> None:
    module, how = model(), {"assistant_model": model(), "num_assistant_tokens": 7}
    free = texts(module, 1)[0, batch(1)["input_ids"].shape[1] :].tolist()
    end = free[4]
    for item in (end, [end], [end, 39]):
        result = texts(module, 1, eos_token_id=item, **how, **OURS)
        assert torch.equal(result, texts(module, 1, eos_token_id=item)) and result[0, -1] == end


def test_a_processor_that_writes_in_place_leaves_the_logits_alone() -> None:
    class InPlace:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, ::2] = -1000.0
            return scores

    greedy = dictionary(model(), logits_processor=[InPlace()])
    ours = dictionary(model(), logits_processor=[InPlace()], **OURS)
    assert torch.equal(greedy.sequences, ours.sequences)
    torch.testing.assert_close(greedy.scores, ours.scores, rtol=1e-4, atol=1e-4)
    assert all(float(row.min()) > -1000 for row in ours.logits)


@pytest.mark.parametrize(("criterion", "new"), [
    (MaxLengthCriteria(batch(2)["input_ids"].shape[1] + 5), 5), (MaxTimeCriteria(0.0), 1),
], ids=["length", "time"])  # fmt: skip
def test_stopping_criteria_of_the_caller_take_precedence(
    criterion: Any, new: int
) -> None:
    result = texts(model(), stopping_criteria=StoppingCriteriaList([criterion]), **OURS)
    assert result.shape[1] == batch(2)["input_ids"].shape[1] + new


def test_arguments_are_validated_as_by_transformers() -> None:
    for wrong in ("foo", "do_samples"):
        with pytest.raises(ValueError, match=wrong):
            texts(model(), **{wrong: True}, **OURS)
    assert torch.equal(texts(model(), logits_to_keep=0, **OURS), texts(model()))
