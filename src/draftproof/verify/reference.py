"""The definition of decoding once more, in plain Python: one text, one token at a time.

Imports nothing of draftproof. Follows the definitions of transformers' ``generate`` and of
OpenAI's penalties, and aims at readability, not speed. `sampling` is any object with the fields
of `Sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Scores = list[float]
Logits = Callable[[tuple[int, ...]], Sequence[float]]
"""The model: logits after a text."""
End = tuple[tuple[int, ...], str, str]
"""How a run ends: its new tokens, its text, and why."""


class Alphabet(NamedTuple):
    """The texts of tokens.

    Attributes:
        pieces: The text of each token.
        late: A token that shows only with the next one, like half a character.
        special: A token whose text is searched for stop strings but never shown.
    """

    pieces: Sequence[str]
    late: int | None = None
    special: int | None = None


LETTERS = Alphabet(("a", "b", "é", "ba", "c"), late=2)
TAGS = Alphabet(("a", "b", "<e>"), special=2)


def distribution_of_run(
    logits: Logits, prompt: Sequence[int], sampling: Any, limit: int, alphabet: Alphabet = LETTERS
) -> dict[End, float]:
    """Every possible end of a run, with its probability."""
    ends: dict[End, float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        new, mass = waiting.pop()
        probs = next_token_probs(
            logits((*prompt, *new)), [*prompt, *new], len(prompt), sampling
        )
        for token, prob in enumerate(probs):
            if prob > 0:
                longer = (*new, token)
                end = _end_of(longer, sampling, limit, alphabet)
                if end is None:
                    waiting.append((longer, mass * prob))
                else:
                    ends[end] = ends.get(end, 0.0) + mass * prob
        if all(math.isnan(prob) for prob in probs):                     # no token is allowed
            end = (new, _shown(_characters(new, True, alphabet)), "error")
            ends[end] = ends.get(end, 0.0) + mass
    return ends


def next_token_probs(
    logits: Sequence[float], text: Sequence[int], prompt_length: int, sampling: Any
) -> Scores:
    """The distribution of the next token after `text`."""
    scores = penalised(list(logits), list(text), prompt_length, sampling)
    if sampling.temperature == 0:
        first = scores.index(max(scores))
        return [1.0 if token == first else 0.0 for token in range(len(scores))]
    scores = [score / sampling.temperature for score in scores]
    if sampling.top_k:
        least = sorted(scores, reverse=True)[min(sampling.top_k, len(scores)) - 1]
        scores = [score if score >= least else -math.inf for score in scores]
    if sampling.top_p < 1:
        probs, mass, kept = softmax(scores), 0.0, set()
        for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
            if mass < sampling.top_p:
                kept.add(token)
            mass += probs[token]
        scores = [score if token in kept else -math.inf for token, score in enumerate(scores)]
    if sampling.min_p > 0:
        probs = softmax(scores)
        least = sampling.min_p * max(probs)
        scores = [
            score if probs[token] >= least else -math.inf for token, score in enumerate(scores)
        ]
    return softmax(scores)


def penalised(scores: Scores, text: list[int], prompt_length: int, sampling: Any) -> Scores:
    """Bias, penalties and bans after `text`, in the order of transformers' ``generate``."""
    new, stop_tokens = text[prompt_length:], sampling.stop_tokens or ()
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in set(text) if sampling.repetition_penalty != 1 else ():
        penalty = sampling.repetition_penalty
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    for token in set(new):
        times = new.count(token)
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    banned = set(stop_tokens) if len(new) < sampling.min_new_tokens else set()
    size = sampling.no_repeat_ngram
    for start in range(len(text) - size + 1 if size else 0):
        if text[start : start + size - 1] == text[len(text) - size + 1 :]:
            banned.add(text[start + size - 1])
    for word in sampling.banned_words:
        head = list(word[:-1])
        if len(text) >= len(head) and text[len(text) - len(head) :] == head:
            banned.add(word[-1])
    return [-math.inf if token in banned else score for token, score in enumerate(scores)]


def softmax(scores: Sequence[float]) -> Scores:
    """Probabilities; NaN if no token is allowed."""
    best = max(scores)
    if best == -math.inf:
        return [math.nan] * len(scores)
    weights = [math.exp(score - best) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _characters(
    tokens: Sequence[int], ended: bool, alphabet: Alphabet
) -> list[tuple[str, bool]]:
    """The characters of `tokens`, and whether each is shown, without a pending last token."""
    waits = not ended and tokens and tokens[-1] == alphabet.late
    return [
        (character, token != alphabet.special)
        for token in (tokens[:-1] if waits else tokens) for character in alphabet.pieces[token]
    ]


def _shown(characters: Sequence[tuple[str, bool]]) -> str:
    return "".join(character for character, shown in characters if shown)


def _end_of(
    tokens: tuple[int, ...], sampling: Any, limit: int, alphabet: Alphabet
) -> End | None:
    """How the run ended, if it ended with its last token."""
    ends = sampling.stop_tokens or ()
    cut = _cut(_characters(tokens, False, alphabet), sampling.stop)
    if cut is not None:
        return tokens, _shown(cut), "stop"
    if tokens[-1] in ends or len(tokens) >= limit:
        characters = _characters(tokens, True, alphabet)
        cut = _cut(characters, sampling.stop)
        reason = "stop" if cut is not None or tokens[-1] in ends else "length"
        return tokens, _shown(characters if cut is None else cut), reason
    return None


def _cut(
    characters: list[tuple[str, bool]], stops: Sequence[str]
) -> list[tuple[str, bool]] | None:
    """The characters before the earliest stop string; None if there is none."""
    text = "".join(character for character, _ in characters)
    starts = [text.index(stop) for stop in stops if stop in text]
    return characters[: min(starts)] if starts else None
