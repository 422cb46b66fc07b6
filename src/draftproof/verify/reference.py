"""What decoding means, once more, in plain Python: one text, one token at a time. Imports nothing of draftproof.

The installed sampler, stop rules and decoder are held against this file. It is written from the definitions of
transformers' ``generate`` and of OpenAI's penalties, for reading, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Scores = list[float]
Logits = Callable[[tuple[int, ...]], Sequence[float]]
"""The model: logits behind a text."""

PIECES = ("a", "b", "é", "ba", "c")
"""What each token of a toy vocabulary says; "é" shows only with the token behind it, as half a character would."""
_SLOW = 2


@dataclass(frozen=True)
class Wanted:
    """One request: the fields of `Sampling`, by the same names."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_words: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()


class Written(NamedTuple):
    """How a run ends: its new tokens, its text, and why."""

    tokens: tuple[int, ...]
    text: str
    reason: str


def distribution_of_run(logits: Logits, prompt: Sequence[int], want: Wanted, limit: int) -> dict[Written, float]:
    """Every way a run can end, with its probability."""
    ends: dict[Written, float] = {}
    open_: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_:
        new, odds = open_.pop()
        law = next_law(logits((*prompt, *new)), [*prompt, *new], len(prompt), want)
        for token, chance in enumerate(law):
            if chance > 0:
                longer = (*new, token)
                end = _end_of(longer, want, limit)
                if end is None:
                    open_.append((longer, odds * chance))
                else:
                    ends[end] = ends.get(end, 0.0) + odds * chance
    return ends


def next_law(logits: Sequence[float], text: Sequence[int], prompt_length: int, want: Wanted) -> Scores:
    """The law of the next token behind `text`."""
    scores = penalised(list(logits), list(text), prompt_length, want)
    if want.temperature == 0:
        best = max(scores)
        first = scores.index(best)
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
        scores = [score if law[token] >= want.min_p * max(law) else -math.inf for token, score in enumerate(scores)]
    return softmax(scores)


def penalised(scores: Scores, text: list[int], prompt_length: int, want: Wanted) -> Scores:
    """Bias, penalties and bans behind `text`, in the order of transformers' ``generate``."""
    new = text[prompt_length:]
    for token, bias in want.logit_bias.items():
        scores[token] += bias
    for token in set(text) if want.repetition_penalty != 1 else ():
        scores[token] *= want.repetition_penalty if scores[token] < 0 else 1 / want.repetition_penalty
    for token in set(new):
        scores[token] -= want.presence_penalty + want.frequency_penalty * new.count(token)
    banned = set(want.stop_tokens) if len(new) < want.min_new_tokens else set()
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
    """Scores as a law."""
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    return [weight / sum(weights) for weight in weights]


def shown(tokens: Sequence[int], ended: bool) -> str:
    """The text of `tokens`, without a last piece that waits for the token behind it."""
    return "".join(PIECES[token] for token in (tokens if ended or not tokens or tokens[-1] != _SLOW else tokens[:-1]))


def _end_of(tokens: tuple[int, ...], want: Wanted, limit: int) -> Written | None:
    """How the run ended if it ended with its last token."""
    text = shown(tokens, ended=False)
    if any(stop in text for stop in want.stop):
        return Written(tokens, _cut(text, want.stop), "stop")
    if tokens[-1] in want.stop_tokens or len(tokens) >= limit:
        whole = shown(tokens, ended=True)
        by_text = any(stop in whole for stop in want.stop)
        return Written(tokens, _cut(whole, want.stop), "stop" if by_text or tokens[-1] in want.stop_tokens else "length")
    return None


def _cut(text: str, stops: Sequence[str]) -> str:
    """`text` up to the earliest stop string."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


class Letters:
    """A detokenizer for the toy vocabulary: the same pieces, as a stream."""

    def __init__(self) -> None:
        self._late = ""

    def push(self, token: int) -> str:
        piece, self._late = (self._late, PIECES[token]) if token == _SLOW else (self._late + PIECES[token], "")
        return piece

    def finish(self) -> str:
        piece, self._late = self._late, ""
        return piece
