"""Prompts in every form give the text of the list of token ids, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafting import texts
from tiny import target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace, Sequence
from transformers import BatchEncoding, PreTrainedTokenizerFast

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.tokenizer.codec import Codec

IDS, OTHER = [5, 9, 3, 7], [8, 2]
TWO = BatchEncoding({"input_ids": [IDS, [0, 0, *OTHER]], "attention_mask": [[1] * 4, [0, 0, 1, 1]]})
ONE: dict[str, Callable[[], Any]] = {
    "tuple": lambda: tuple(IDS), "tensor": lambda: torch.tensor(IDS),
    "tensor [1, S]": lambda: torch.tensor([IDS]), "array": lambda: np.array(IDS),
    "array [1, S]": lambda: np.array([IDS]), "numpy integers": lambda: list(np.array(IDS)),
    "integers of torch": lambda: list(torch.tensor(IDS)),
    "tensors in a list": lambda: [torch.tensor([IDS])],
    "encoding": lambda: BatchEncoding({"input_ids": IDS, "attention_mask": [1] * 4}),
    "encoding of tensors": lambda: BatchEncoding({"input_ids": [IDS]}, tensor_type="pt"),
    "encoding, right-padded": lambda: {"input_ids": [*IDS, 0], "attention_mask": [1, 1, 1, 1, 0]},
    "encodings": lambda: [BatchEncoding({"input_ids": IDS})]
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_one_prompt_in_any_form(name: str) -> None:
    engine = Engine(target())
    assert texts(engine, ONE[name](), max_new_tokens=5) == texts(engine, [IDS], max_new_tokens=5)


def test_left_padding_is_not_treated_as_text() -> None:
    engine = Engine(target())
    wanted = texts(engine, [IDS, OTHER], max_new_tokens=5)
    for kind in (None, "pt", "np"):
        assert texts(engine, BatchEncoding(dict(TWO), tensor_type=kind), max_new_tokens=5) == wanted
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "wrong",
    [(part for part in [IDS]), b"Once", None, 7, {1, 2}, Path("x"), [5.0, 6.0], [True, False],
     torch.tensor(IDS).float(), [IDS, None], [[IDS, OTHER]], ["Once", 5], [5, "Once"], {"a": 1},
     {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, torch.zeros(2, 0, dtype=torch.int64),
     {"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, torch.zeros(2, 2, 2).long(),
     {"input_ids": [1, 2], "attention_mask": [1]}, [[]], torch.tensor(7)],
    ids=lambda wrong: f"{type(wrong).__name__}"
)  # fmt: skip
def test_invalid_prompts_are_reported_in_one_sentence(wrong: Any) -> None:
    with pytest.raises(BadInput) as error:
        Engine(target()).generate(wrong, max_new_tokens=5)
    assert "\n" not in str(error.value)


def test_prompts_that_repeat_one_another_with_one_seed_are_noted(
    caplog: pytest.LogCaptureFixture
) -> None:
    """They get the same text, which who repeats a prompt to sample does not expect."""
    engine, drawn = Engine(target()), Sampling(temperature=1.0)
    for sampling, copies in (
        (drawn, 2), (Sampling(), 0), ([replace(drawn, seed=seed) for seed in range(4)], 0),
        ([drawn, replace(drawn, seed=1), drawn, drawn], 1),
    ):
        caplog.clear()
        engine.generate([IDS, IDS, OTHER, IDS], max_new_tokens=1, sampling=sampling)
        assert len(caplog.messages) == bool(copies)
        assert not copies or f"{copies} of 4 prompts repeat" in caplog.messages[0]
    caplog.clear()
    engine.generate(IDS, max_new_tokens=1, sampling=drawn, n=3)
    assert not caplog.messages


def test_a_banned_word_is_written_neither_at_the_beginning_nor_after_a_space() -> None:
    engine, prompt = load("demo", drafter="none"), "Once upon a time"
    assert engine.codec is not None
    (plain,) = engine.generate(prompt, max_new_tokens=20)
    word = plain.text.split()[4]
    (done,) = engine.generate(prompt, max_new_tokens=20, sampling=Sampling(banned_words=word))
    assert f" {word}" in plain.text and word not in done.text.split()
    params = engine.requests.params(Sampling(banned_words=word), [1], 9)
    encoded = [engine.codec.encode(text, special=False) for text in (word, f" {word}")]
    assert set(params.banned) == set(map(tuple, encoded))


def test_a_banned_word_without_tokens_is_refused() -> None:
    """Where a tokenizer removes zero-width spaces. No word would ban a token per row instead."""
    inner = Tokenizer(WordLevel({"a": 0, "▁": 1}, unk_token="a"))
    inner.normalizer = Sequence([Replace("\u200b", ""), Replace(" ", "▁")])
    codec = Codec(PreTrainedTokenizerFast(tokenizer_object=inner))
    requests = Engine(target(), codec=codec).requests
    with pytest.raises(BadInput, match=r"'\\u200b\\u200b', which this tokenizer encodes to no tok"):
        requests.params(Sampling(banned_words=["\u200b\u200b"], logit_bias={1: 0.0}), [1], 9)
