"""Audit: right engines pass, every planted bug is found, the rest is one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftproof.core.params import Sampling
from draftproof.errors import BadInput
from draftproof.verify.audit import Audit, Distribution, Text, assisted, audit, model_distribution
from draftproof.verify.cases import toy

VOCAB, LENGTH, PROMPT = 6, 3, (1, 2)
Sampler = Callable[[list[int], int, int], list[list[int]]]
Array = NDArray[np.float64]
Mistake = Callable[[Array, Array, Array, int], tuple[Array, Array]]
"""(p, q, q before warping, place in the round) -> probability of each token as an accepted draft,
and as a replacement."""


def weighed(drawn_from: Array, ratio: Array, rest: Array) -> tuple[Array, Array]:
    """Tokens drawn from one distribution and accepted by this ratio, else replaced by the rest."""
    accepted = drawn_from * np.clip(np.nan_to_num(ratio, nan=0.0), 0, 1)
    return accepted, max(0.0, 1 - float(accepted.sum())) * rest / rest.sum()


def residual(p: Array, q: Array) -> Array:
    left = np.maximum(p - q, 0)
    return left if left.sum() > 0 else p


def peak(q: Array) -> Array:
    return np.eye(len(q))[q.argmax()]


RIGHT: Mistake = lambda p, q, raw, at: weighed(q, p / q, residual(p, q))       # noqa: E731
MISTAKES: dict[str, Mistake] = {
    "argmax drafts weighed as if drawn (transformers' Gemma-4)":
        lambda p, q, raw, at: weighed(peak(q), p / q, residual(p, q)),
    "drafts drawn from the warped distribution, weighed with the raw one (transformers #47932)":
        lambda p, q, raw, at: weighed(q, p / raw, residual(p, raw)),
    "drafts drawn from the raw distribution, weighed with the warped one":
        lambda p, q, raw, at: weighed(raw, p / q, residual(p, q)),
    "replacement drawn from the target's distribution": lambda p, q, raw, at: weighed(q, p / q, p),
    "argmax drafts, replaced from the target's distribution":
        lambda p, q, raw, at: weighed(peak(q), p, p),
    "residual put through a softmax (transformers #28508)":
        lambda p, q, raw, at: weighed(q, p / q, np.exp(np.maximum(p - q, 0))),
    "ratio upside down": lambda p, q, raw, at: weighed(q, q / p, residual(p, q)),
    "every draft accepted": lambda p, q, raw, at: weighed(q, np.ones_like(p), p),
    "first draft of a round accepted without a test":
        lambda p, q, raw, at: weighed(q, p / q if at else np.ones_like(p), residual(p, q)),
    "lossy: an ensemble of nine tenths": lambda p, q, raw, at: weighed(q, 0.1 + 0.9 * p / q, p),
}


def drawn(dice: np.random.Generator, probs: Array) -> int:
    """A token drawn with these weights."""
    place = np.searchsorted(probs.cumsum(), dice.random() * probs.sum(), side="right")
    return min(int(place), len(probs) - 1)


def table(salt: int, temperature: float = 1.0) -> Distribution:
    """A distribution that depends on the whole text."""

    @cache
    def row(text: Text) -> Any:
        probs = np.exp(np.random.default_rng([salt, *text]).normal(0, 1.5, VOCAB) / temperature)
        return probs / probs.sum()

    return lambda texts: np.stack([row(tuple(text)) for text in texts])


TARGET, DRAFT = table(1), table(2)


def speculative(mistake: Mistake, draft: Distribution = DRAFT, tokens: int = 2, bonus: bool = True
                ) -> Sampler:
    """A draft-and-verify loop with a mistake in it."""

    @cache
    def probs(text: Text, place: int) -> Any:
        with np.errstate(all="ignore"):
            distributions = (distribution([text])[0] for distribution in (TARGET, draft, DRAFT))
            return np.concatenate(mistake(*distributions, place))

    def continued(text: Text, dice: np.random.Generator) -> list[int]:
        start = len(text)
        while len(text) < start + LENGTH:
            for place in range(tokens):
                came = drawn(dice, probs(text, place))
                text = (*text, came % VOCAB)
                if came >= VOCAB:
                    break
            else:
                text = (*text, drawn(dice, TARGET([text if bonus else text[:-1]])[0]))
        return list(text[start : start + LENGTH])

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        dice = np.random.default_rng(seed)
        return [continued(tuple(prompt), dice) for _ in range(n)]

    return sample


def plain(
    distribution: Distribution = TARGET, ends: Sequence[int] = (), beyond: bool = False
) -> Sampler:
    """Token by token; `beyond`: the end token does not end it."""

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        dice, texts = np.random.default_rng(seed), []
        for _ in range(n):
            text: list[int] = []
            while len(text) < LENGTH and (beyond or not set(text) & set(ends)):
                text.append(drawn(dice, distribution([(*prompt, *text)])[0]))
            texts.append(text)
        return texts

    return sample


def judged(sampler: Sampler, distribution: Distribution = TARGET, **options: Any) -> Audit:
    return audit(sampler, distribution, PROMPT, **{"samples": 2000, "length": LENGTH, **options})


@pytest.mark.parametrize("sampler", [plain(), speculative(RIGHT), speculative(RIGHT, tokens=1)])
def test_correct_engines_pass(sampler: Sampler) -> None:
    verdict = judged(sampler)
    assert not verdict.biased and all(check.control for check in verdict.checks)
    assert verdict.joint.detects < 0.15 and len(verdict.checks) == LENGTH + 2


@pytest.mark.parametrize("bug", MISTAKES)
def test_every_bug_is_detected(bug: str) -> None:
    draft = table(2, temperature=0.5) if " raw " in bug else DRAFT
    verdict = judged(speculative(MISTAKES[bug], draft), samples=3000)
    assert verdict.biased and all(check.control for check in verdict.checks)


def hidden(*asked: Any) -> list[list[int]]:
    """Does not tell its end token."""
    return [text[:-1] if text[-1] == 2 else text for text in plain(ends=(2,))(*asked)]


def twice(prompt: list[int], n: int, seed: int) -> list[list[int]]:
    return [text for text in plain()(prompt, n // 2, seed) for _ in range(2)]


@pytest.mark.parametrize(("sampler", "ends", "biased"), [
    (speculative(RIGHT, bonus=False, tokens=1), (), True), (plain(table(1, 2.0)), (), True),
    (lambda prompt, n, seed: plain()(prompt, n, 0), (), True),
    (lambda prompt, n, seed: plain()(prompt, 1, 0) * n, (), True), (twice, (), True),
    (plain(ends=(2, 4)), (2, 4), False), (hidden, (2,), False),
    (plain(ends=(2,), beyond=True), (2,), True),
    (lambda prompt, n, seed: [[]] * n, (), True),
], ids=["no bonus position", "another temperature", "one seed", "one text", "each text twice",
        "ends", "ends untold", "going on after the end", "empty texts"])  # fmt: skip
def test_other_mistakes_and_ends(sampler: Sampler, ends: tuple[int, ...], biased: bool) -> None:
    assert judged(sampler, samples=3000, ends=ends).biased is biased


def test_impossible_tokens_fail_at_once() -> None:
    def narrow(texts: Sequence[Text]) -> Any:
        distribution = np.where(TARGET(texts) < 0.02, 0, TARGET(texts))
        return distribution / distribution.sum(-1, keepdims=True)

    assert judged(plain(), narrow).joint.p_value == 0
    assert not judged(plain(narrow), narrow).biased


def test_rare_outcomes_are_pooled_with_a_large_vocabulary() -> None:
    probs = 1 / np.arange(1, 2001)
    probs /= probs.sum()
    distribution: Distribution = lambda texts: np.stack([np.roll(probs, t[-1]) for t in texts])  # noqa: E731

    def sample(prompt: list[int], n: int, seed: int) -> list[list[int]]:
        shift = np.random.default_rng(seed).choice(2000, size=(n, 2), p=probs)
        return ((prompt[-1] + shift.cumsum(1)) % 2000).tolist()     # type: ignore[no-any-return]

    assert not audit(sample, distribution, [5], length=2, samples=4000).biased
    doubled = lambda p, n, s: [[a, a] for a, _ in sample(p, n, s)]                  # noqa: E731
    assert audit(doubled, distribution, [5], length=2, samples=4000).biased


@pytest.mark.parametrize(
    ("sampler", "distribution", "options", "words"),
    [
        (plain(), TARGET, {"samples": 10}, "200"), (plain(), TARGET, {"length": 0}, "length"),
        (lambda prompt, n, seed: [[1]], TARGET, {}, "100 texts and returned 1"),
        (lambda prompt, n, seed: None, TARGET, {}, "NoneType"),
        (plain(), lambda texts: TARGET(texts) * 2, {}, "not to 1"),
    ],
)
def test_unjudgeable_input_is_reported_in_one_sentence(
    sampler, distribution, options, words
) -> None:
    with pytest.raises(BadInput, match=words):
        judged(sampler, distribution, **options)


def test_transformers_with_a_draft_model_is_unbiased() -> None:
    model, assistant = (toy(seed, 6, dtype=torch.float32).model for seed in (21, 22))
    want = Sampling(temperature=0.8, top_k=4)
    engine = assisted(model, assistant, want, LENGTH, 2)
    result = audit(engine, model_distribution(model, want), [3], length=LENGTH, samples=300)
    assert not result.biased and result.joint.detects < 0.4


@pytest.mark.parametrize("calls", [2, 3, 5])
def test_calls_that_ignore_their_seed_are_noticed(calls: int) -> None:
    """Few calls are compared as well: a server may give all texts in two answers."""
    right, names = speculative(RIGHT), list[str]()
    for draw in (right, lambda prompt, n, seed: right(prompt, n, 7)):
        result = audit(draw, TARGET, PROMPT, samples=2400, at_once=2400 // calls)
        names.append(" ".join(check.name for check in result.checks if not check.passed))
    assert names[0] == "" and "calls with different seeds" in names[1]
