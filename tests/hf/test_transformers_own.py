"""What transformers' own tests of greedy, sampled and assisted generation check, asked of ours.

Written from their description (tests/generation: the mixin for all models, and its integration
tests); docs/transformers.md lists which have no meaning here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import NEW, PAD, batch
from test_matrix import HUB, demo
from tiny import model
from torch import Tensor
from transformers import TextStreamer, pipeline
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

import draftproof

OURS = {"custom_generate": draftproof.generate}
families = pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])


def texts(own: Any, rows: int = 2, **asked: Any) -> Any:
    how = {**batch(rows), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **asked}
    return own.generate(**how)


def dictionary(own: Any, **asked: Any) -> Any:
    wants = ("return_dict_in_generate", "output_scores", "output_logits")
    return texts(own, **dict.fromkeys(wants, True), **asked)


@families
@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "num_return_sequences": 2}],
                         ids=["greedy", "sampled"])  # fmt: skip
def test_outputs_have_their_types_lengths_and_shapes(family: str, drawn: dict[str, Any]) -> None:
    """With a cache or without; each row begins with its prompt."""
    own, rows = model(family), 2 * drawn.get("num_return_sequences", 1)
    prompt = batch(2)["input_ids"]
    for cached in (True, False):
        out = dictionary(own, use_cache=cached, **drawn, **OURS)
        assert isinstance(out, GenerateDecoderOnlyOutput)
        assert out.sequences.shape == (rows, prompt.shape[1] + NEW)
        assert torch.equal(out.sequences[:, : prompt.shape[1]],
                           prompt.repeat_interleave(rows // 2, 0))  # fmt: skip
        for steps in (out.scores, out.logits):
            assert len(steps) == NEW
            assert {one.shape for one in steps} == {(rows, own.config.vocab_size)}
            assert {one.dtype for one in steps} == {torch.float32}
    seeds = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        seeds.append(texts(own, **drawn, **OURS))
    assert torch.equal(*seeds)


@families
@pytest.mark.parametrize("kind", ["random", "same", "lookup", "early exit"])
def test_assisted_text_and_logits_are_those_of_greedy_search(family: str, kind: str) -> None:
    own = model(family)
    drafts = {
        "random": {"assistant_model": model(family, 5)}, "same": {"assistant_model": own},
        "lookup": {"prompt_lookup_num_tokens": 2}, "early exit": {"assistant_early_exit": 1},
    }  # fmt: skip
    greedy, ours = dictionary(own), dictionary(own, **drafts[kind], **OURS)
    assert torch.equal(greedy.sequences, ours.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(greedy[name], ours[name], rtol=1e-4, atol=1e-4)
    assert own.generation_config.num_assistant_tokens is None, "nothing is left behind"


@families
def test_assisted_sampling_keeps_lengths(family: str) -> None:
    """Exactly max_length, at least min_length before an end, with an assistant whose schedule is
    constant."""
    own, size = model(family), batch(2)["input_ids"].shape[1]
    how = {"do_sample": True, "assistant_model": model(family, 5), "max_new_tokens": None,
           "num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant"}  # fmt: skip
    assert texts(own, max_length=size + 7, **how, **OURS).shape[1] == size + 7
    ends = list(range(1, 40, 2))
    out = texts(own, max_length=size + 20, min_length=size + 9, eos_token_id=ends, **how, **OURS)
    new = out[:, size:]
    assert not bool((new[:, :9] % 2).any()) and new.shape[1] <= 20


def test_an_end_token_is_an_int_a_list_or_inside_a_draft() -> None:
    own, how = model(), {"assistant_model": model(), "num_assistant_tokens": 7}
    free = texts(own, 1)[0, batch(1)["input_ids"].shape[1] :].tolist()
    end = free[4]
    found = [texts(own, 1, eos_token_id=one, **how, **OURS) for one in (end, [end], [end, 39])]
    assert torch.equal(found[0], found[1]) and found[0][0, -1] == end
    assert torch.equal(found[0], texts(own, 1, eos_token_id=end))
    assert torch.equal(found[2], texts(own, 1, eos_token_id=[end, 39]))


def test_a_processor_that_writes_in_place_leaves_the_logits_alone() -> None:
    class InPlace:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, ::2] = -1000.0
            return scores

    greedy = dictionary(model(), logits_processor=[InPlace()])
    ours = dictionary(model(), logits_processor=[InPlace()], **OURS)
    assert torch.equal(greedy.sequences, ours.sequences)
    torch.testing.assert_close(greedy.scores, ours.scores, rtol=1e-4, atol=1e-4)
    assert all(float(one.min()) > -1000 for one in ours.logits)


def test_transition_scores_are_computed_from_the_output() -> None:
    own = model()
    found = [own.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
             for out in (dictionary(own), dictionary(own, **OURS))]  # fmt: skip
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_criteria_of_the_caller_go_before_those_of_the_configuration() -> None:
    size = batch(2)["input_ids"].shape[1]
    shorter = StoppingCriteriaList([MaxLengthCriteria(size + 5)])
    assert texts(model(), stopping_criteria=shorter, **OURS).shape[1] == size + 5
    late = StoppingCriteriaList([MaxTimeCriteria(0.0)])
    assert texts(model(), stopping_criteria=late, **OURS).shape[1] == size + 1


def test_arguments_are_checked_as_ever() -> None:
    with pytest.raises(ValueError, match="foo"):
        texts(model(), foo="bar", **OURS)
    with pytest.raises(ValueError, match="do_samples"):
        texts(model(), do_samples=True, **OURS)
    assert torch.equal(texts(model(), logits_to_keep=0, **OURS), texts(model()))


def test_a_stop_sequence_of_a_pipeline_and_a_text_streamer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, tokenizer = demo()
    writer = pipeline("text-generation", model=own, tokenizer=tokenizer)
    how = {"max_new_tokens": 40, "do_sample": False, "stop_sequence": ","}
    folder = {"custom_generate": str(HUB), "trust_remote_code": True}
    theirs, ours = writer("Once upon a time", **how), writer("Once upon a time", **how, **folder)
    assert theirs == ours and theirs[0]["generated_text"].endswith(",")
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    own.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=TextStreamer(tokenizer),
                 assistant_model=own, **OURS)  # fmt: skip
    wanted = own.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert capsys.readouterr().out.strip() == tokenizer.decode(wanted[0]).strip()
