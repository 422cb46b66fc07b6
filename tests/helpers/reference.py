"""What decoding means, once more, in plain Python: one text, one token at a time.

Imports nothing of draftproof. Written from the definitions of transformers' ``generate`` and of
OpenAI's penalties, for reading, not for speed. `want` is anything with the fields of `Sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Scores = list[float]
Logits = Callable[[tuple[int, ...]], Sequence[float]]
"""The model: logits behind a text."""
End = tuple[tuple[int, ...], str, str]
"""How a run ends: its new tokens, its text, and why."""

PIECES = ("a", "b", "é", "ba", "c")
SLOW = 2
"""A token that shows only with the token behind it, as half a character would."""


def distribution_of_run(
    logits: Logits, prompt: Sequence[int], want: Any, limit: int
) -> dict[End, float]:
    """Every way a run can end, with its probability."""
    ends: dict[End, float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        new, mass = waiting.pop()
        law = next_law(logits((*prompt, *new)), [*prompt, *new], len(prompt), want)
        for token, chance in enumerate(law):
            if chance > 0:
                longer = (*new, token)
                end = _end_of(longer, want, limit)
                if end is None:
                    waiting.append((longer, mass * chance))
                else:
                    ends[end] = ends.get(end, 0.0) + mass * chance
        if all(math.isnan(chance) for chance in law):                   # nothing may be chosen
            end = (new, shown(new, ended=True), "error")
            ends[end] = ends.get(end, 0.0) + mass
    return ends


def next_law(logits: Sequence[float], text: Sequence[int], prompt_length: int, want: Any) -> Scores:
    """The distribution of the next token behind `text`."""
    scores = penalised(list(logits), list(text), prompt_length, want)
    if want.temperature == 0:
        first = scores.index(max(scores))
        return [1.0 if token == first else 0.0 for token in range(len(scores))]
    scores = [score / want.temperature for score in scores]
    if want.top_k:
        least = sorted(scores, reverse=True)[min(want.top_k, len(scores)) - 1]
        scores = [score if score >= least else -math.inf for score in scores]
    if want.top_p < 1:
        law, mass, kept = softmax(scores), 0.0, set()
        for token in sorted(range(len(law)), key=lambda token: -law[token]):
            if mass < want.top_p:
                kept.add(token)
            mass += law[token]
        scores = [score if token in kept else -math.inf for token, score in enumerate(scores)]
    if want.min_p > 0:
        law = softmax(scores)
        least = want.min_p * max(law)
        scores = [score if law[token] >= least else -math.inf for token, score in enumerate(scores)]
    return softmax(scores)


def penalised(scores: Scores, text: list[int], prompt_length: int, want: Any) -> Scores:
    """Bias, penalties and bans behind `text`, in the order of transformers' ``generate``."""
    new, stop_tokens = text[prompt_length:], want.stop_tokens or ()
    for token, bias in want.logit_bias.items():
        scores[token] += bias
    for token in set(text) if want.repetition_penalty != 1 else ():
        penalty = want.repetition_penalty
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    for token in set(new):
        scores[token] -= want.presence_penalty + want.frequency_penalty * new.count(token)
    banned = set(stop_tokens) if len(new) < want.min_new_tokens else set()
    size = want.no_repeat_ngram
    for start in range(len(text) - size + 1 if size else 0):
        if text[start : start + size - 1] == text[len(text) - size + 1 :]:
            banned.add(text[start + size - 1])
    for word in want.banned_words:
        head = list(word[:-1])
        if text[len(text) - len(head) :] == head:
            banned.add(word[-1])
    return [-math.inf if token in banned else score for token, score in enumerate(scores)]


def softmax(scores: Sequence[float]) -> Scores:
    best = max(scores)
    if best == -math.inf:
        return [math.nan] * len(scores)
    weights = [math.exp(score - best) for score in scores]
    return [weight / sum(weights) for weight in weights]


def shown(tokens: Sequence[int], ended: bool) -> str:
    """The text of `tokens`, without a last piece that waits for the token behind it."""
    whole = ended or not tokens or tokens[-1] != SLOW
    return "".join(PIECES[token] for token in (tokens if whole else tokens[:-1]))


def _end_of(tokens: tuple[int, ...], want: Any, limit: int) -> End | None:
    """How the run ended if it ended with its last token."""
    text, ends = shown(tokens, ended=False), want.stop_tokens or ()
    if any(stop in text for stop in want.stop):
        return tokens, _cut(text, want.stop), "stop"
    if tokens[-1] in ends or len(tokens) >= limit:
        whole = shown(tokens, ended=True)
        by_text = any(stop in whole for stop in want.stop)
        return tokens, _cut(whole, want.stop), "stop" if by_text or tokens[-1] in ends else "length"
    return None


def _cut(text: str, stops: Sequence[str]) -> str:
    """`text` up to the earliest stop string."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
