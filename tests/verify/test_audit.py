"""Audit: right engines pass, every planted bug is found, the rest is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bug_catalog import MISTAKES, RIGHT, Mistake, drawn

from draftproof.core.params import Sampling
from draftproof.errors import BadInput
from draftproof.verify.audit import Audit, Law, Text, audit
from draftproof.verify.cases import toy
from draftproof.verify.engines import ModelLaw, assisted

VOCAB, LENGTH, PROMPT = 6, 3, (1, 2)


def table(salt: int, sharp: float = 1.5, temperature: float = 1.0) -> Law:
    """A law that depends on the whole text."""

    @cache
    def row(text: Text) -> Any:
        odds = np.exp(np.random.default_rng([salt, *text]).normal(0, sharp, VOCAB) / temperature)
        return odds / odds.sum()

    return lambda texts: np.stack([row(tuple(text)) for text in texts])


TARGET, DRAFT = table(1), table(2)
Sampler = Callable[[list[int], int, int], list[list[int]]]


def speculative(
    mistake: Mistake, draft: Law = DRAFT, raw: Law = DRAFT, tokens: int = 2,
    bonus: bool = True,
) -> Sampler:
    """A draft-and-verify loop with a mistake in it."""

    @cache
    def odds(text: Text, place: int) -> Any:
        with np.errstate(all="ignore"):
            laws = (law([text])[0] for law in (TARGET, draft, raw))
            return np.concatenate(mistake(*laws, place))

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        dice = np.random.default_rng(seed)
        return [one(tuple(prompt), dice) for _ in range(n)]

    def one(text: Text, dice: np.random.Generator) -> list[int]:
        start = len(text)
        while len(text) < start + LENGTH:
            for place in range(tokens):
                came = drawn(dice, odds(text, place))
                text = (*text, came % VOCAB)
                if came >= VOCAB:
                    break
            else:
                text = (*text, drawn(dice, TARGET([text if bonus else text[:-1]])[0]))
        return list(text[start : start + LENGTH])

    return sample


def plain(law: Law, ends: Sequence[int] = (), beyond: bool = False) -> Sampler:
    """Token by token; `beyond`: the end token does not end it."""

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        dice, texts = np.random.default_rng(seed), []
        for _ in range(n):
            text: list[int] = []
            while len(text) < LENGTH and (beyond or not set(text) & set(ends)):
                text.append(drawn(dice, law([(*prompt, *text)])[0]))
            texts.append(text)
        return texts

    return sample


def judged(sampler: Any, **options: Any) -> Audit:
    return audit(sampler, TARGET, PROMPT, **{"samples": 2000, "length": LENGTH, **options})


@pytest.mark.parametrize(
    "sampler", [plain(TARGET), speculative(RIGHT), speculative(RIGHT, tokens=1),
                SimpleNamespace(sample=plain(TARGET))]
)
def test_right_engines_pass(sampler: Any) -> None:
    found = judged(sampler)
    assert not found.biased and all(check.control for check in found.checks)
    assert found.joint.low == 0 and found.joint.detects < 0.15 and found.false_alarm <= 1e-5
    json.dumps(found.as_dict())


@pytest.mark.parametrize("bug", MISTAKES)
def test_every_bug_is_found(bug: str) -> None:
    draft = table(2, temperature=0.5) if " raw " in bug or "before warping" in bug else DRAFT
    found = judged(speculative(MISTAKES[bug], draft), samples=3000)
    assert found.biased and all(check.control for check in found.checks)


def test_a_missing_bonus_position_and_a_wrong_temperature_are_found() -> None:
    assert judged(speculative(RIGHT, bonus=False, tokens=1), samples=3000).biased
    assert judged(plain(table(1, temperature=2.0))).biased


def test_repeating_samples_are_found_though_their_law_is_right() -> None:
    assert judged(lambda prompt, n, seed: plain(TARGET)(prompt, n, 0)).biased
    assert judged(lambda prompt, n, seed: plain(TARGET)(prompt, 1, 0) * n).biased

    def twice(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        return [text for text in plain(TARGET)(prompt, n // 2, seed) for _ in range(2)]

    assert judged(twice).biased


def test_the_end_of_a_text() -> None:
    assert not judged(plain(TARGET, ends=(2, 4)), ends=(2, 4)).biased
    def hidden(*asked: Any) -> list[list[int]]:
        return [text[:-1] if text[-1] == 2 else text for text in plain(TARGET, (2,))(*asked)]

    assert not judged(hidden, ends=(2,)).biased
    assert judged(plain(TARGET, ends=(2,), beyond=True), ends=(2,)).biased
    assert judged(lambda prompt, n, seed: [[]] * n).biased, "no text may end without an end token"


def test_impossible_tokens_fail_at_once() -> None:
    def narrow(texts: Sequence[Text]) -> Any:
        law = np.where(TARGET(texts) < 0.02, 0, TARGET(texts))
        return law / law.sum(-1, keepdims=True)

    assert audit(plain(TARGET), narrow, PROMPT, samples=2000).joint.p_value == 0
    assert not audit(plain(narrow), narrow, PROMPT, samples=2000).biased


def test_rare_outcomes_are_pooled_with_a_large_vocabulary() -> None:
    odds = 1 / np.arange(1, 2001)
    odds /= odds.sum()
    law: Law = lambda texts: np.stack([np.roll(odds, t[-1]) for t in texts])  # noqa: E731

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        shift = np.random.default_rng(seed).choice(2000, size=(n, 2), p=odds / odds.sum())
        return ((prompt[-1] + shift.cumsum(1)) % 2000).tolist()     # type: ignore[no-any-return]

    found = audit(sample, law, [5], length=2, samples=4000)
    assert not found.biased and found.joint.cells < 200
    doubled = lambda p, n, s: [[a, a] for a, _ in sample(p, n, s)]                  # noqa: E731
    assert audit(doubled, law, [5], length=2, samples=4000).biased


@pytest.mark.parametrize(
    ("sampler", "law", "prompt", "options", "words"),
    [
        (plain(TARGET), TARGET, PROMPT, {"samples": 10}, "at least 200"),
        (plain(TARGET), TARGET, PROMPT, {"length": 0}, "length"),
        (lambda prompt, n, seed: [[1]], TARGET, PROMPT, {}, "100 texts and returned 1"),
        (lambda prompt, n, seed: None, TARGET, PROMPT, {}, "NoneType"),
        (plain(TARGET), TARGET, [], {}, "prompt is empty"),
        (plain(TARGET), lambda texts: TARGET(texts) * 2, PROMPT, {}, "sum to one"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(sampler, law, prompt, options, words) -> None:
    with pytest.raises(BadInput, match=words):
        audit(sampler, law, prompt, **options)


def test_transformers_with_a_draft_model_is_unbiased() -> None:
    model, assistant = (toy(seed, 6, dtype=torch.float32).model for seed in (21, 22))
    want = Sampling(temperature=0.8, top_k=4)
    engine = assisted(model, assistant, want, LENGTH, 2)
    found = audit(engine, ModelLaw(model, want), [3], length=LENGTH, samples=300)
    assert not found.biased and found.joint.detects < 0.4
