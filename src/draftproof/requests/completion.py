"""The options of a call, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypedDict

from draftproof.core.params import Likely, Sampling, is_whole
from draftproof.errors import BadInput, DraftproofError
from draftproof.requests.stats import RoundStats

Wanted = Sampling | Sequence[Sampling] | None


class Options(TypedDict, total=False):
    """Keyword arguments of `Engine.generate`.

    sampling: one for all or one per prompt; None uses the model's own generation defaults.
    n: samples per prompt; sample i is the same for every `n`. batch_size: rows at a time
    (default: all, up to 8).
    """

    max_new_tokens: int | None
    sampling: Wanted
    n: int
    batch_size: int | None


@dataclass(frozen=True)
class Completion:
    """The result of one prompt, or of one sample of it.

    tokens: the new tokens with the end token. text: without special tokens and stop string.
    finish_reason: "stop" (an end token or a stop string), "length", "abort" (by the caller), or
        "error": there was no next token, and `error` says why; the text up to there is correct.
    logprobs: natural logarithms under the unprocessed model, one per token, or None.
    top_logprobs: for each token, the most likely ones in its place with logprobs, or None.
    prompt, sample: the indices of the prompt and of its sample.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None
    stats: RoundStats
    prompt: int = 0
    sample: int = 0
    error: DraftproofError | None = None
    top_logprobs: list[Likely] | None = None

    def checked(self) -> Completion:
        """Return itself, or raise the error that ended it."""
        if self.error is not None:
            raise self.error
        return self


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position, from 1, at which two texts differ; None if they are equal."""
    pairs = enumerate(zip_longest(ours, theirs), 1)
    return next((place for place, (a, b) in pairs if a != b), None)


def check_count(name: str, value: int) -> None:
    """Raise BadInput for a value that is not a count."""
    if not is_whole(value) or value < 1:
        raise BadInput(f"{name} was {value!r:.60}; it must be a whole number, at least 1")
