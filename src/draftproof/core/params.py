"""What a request asks for, and what of it a running row knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.errors import BadInput

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``processor(input_ids [n, L], scores [n, V]) -> scores [n, V]``, of the prefix alone."""


SMALL, LARGEST = 1e-30, 10**9
"""Smaller numbers are lost in float32, as are those above 1 / SMALL; larger counts are mistakes."""


class RuleRequest(NamedTuple):
    """What a rule on logits may depend on, beside the text: its request. encoded: what an encoder
    reads, else the prompt."""

    prompt: Sequence[int]
    limit: int
    ends: tuple[int, ...]
    device: torch.device
    encoded: Sequence[int] = ()


@dataclass(frozen=True)
class LogitsRule:
    """A rule on logits that a model's own generation_config asks for, made per request; asked
    before the user's processors.

    make: raises BadInput for a request that it cannot serve. reads_text: else it sees scores alone.
    """

    name: str
    make: Callable[[RuleRequest], LogitsProcessor]
    reads_text: bool = True


Likely = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """What one request wants. The default is greedy decoding with nothing added.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    repetition_penalty: over prompt and new tokens (CTRL, arXiv 1909.05858); 1 is off.
    presence_penalty, frequency_penalty: subtracted, over new tokens only (as OpenAI's); 0 is off.
    no_repeat_ngram: no n-gram of this size occurs twice; 0 is off.
    logit_bias: added to the logits, by token id.
    banned_words: strings or token id sequences that must not appear.
    min_new_tokens: no end token before so many. max_new_tokens: None leaves it to the call.
    max_length: tokens of prompt and text together, where no max_new_tokens is given.
    stop: strings that end the text; they are not part of it. stop_tokens: end tokens; None takes
    the model's own.
    seed: any integer; the same seed gives the same text whatever the drafter, tree or batch.
    logprobs: report the log-probability of each new token under the unprocessed model.
    top_logprobs: and of so many of the likeliest tokens in its place, up to 20.
    processors: functions of the prefix, ``(input_ids [n, L], scores [n, V]) -> scores [n, V]``.
    logits_rules: what the model's own generation_config asks for beside all this.
    stop_when: functions of the text, ``(input_ids [1, L]) -> bool``, asked behind every new token;
    true ends it there.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_words: Sequence[str | Sequence[int]] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    processors: Sequence[LogitsProcessor] = ()
    logits_rules: Sequence[LogitsRule] = ()
    stop_when: Sequence[Callable[[Tensor], bool]] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "banned_words"):
            if isinstance(getattr(self, name), str):        # one string is a list of one
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            _within(self, name, 0 if name == "temperature" else None)
        for name in ("top_k", "no_repeat_ngram", "min_new_tokens"):
            _within(self, name, 0, LARGEST, whole=True)
        for name in ("max_new_tokens", "max_length"):
            if getattr(self, name) is not None:
                _within(self, name, 1, whole=True)
        _within(self, "seed", whole=True)
        _within(self, "top_p", 0, 1, open_low=True)
        _within(self, "min_p", 0, 1)
        _within(self, "repetition_penalty", 0, open_low=True)
        biases = self.logit_bias
        if not isinstance(biases, Mapping) or not all(
            _is_token(token) and isinstance(bias, (int, float)) and bias <= 1 / SMALL
            for token, bias in biases.items()
        ):
            raise BadInput(
                f"logit_bias was {biases!r:.200}; it must be numbers up to {1 / SMALL}, by token id"
            )
        if not isinstance(self.logprobs, bool):
            raise BadInput(f"logprobs was {self.logprobs!r}; it must be true or false")
        _within(self, "top_logprobs", 0, 20, whole=True)
        if self.top_logprobs and not self.logprobs:
            raise BadInput(f"top_logprobs was {self.top_logprobs} without logprobs; ask for both")
        for name, parts, wanted in _LISTED:
            values = getattr(self, name)
            if values is None and name == "stop_tokens":
                continue
            if not _is_list(values) or not all(parts(value) for value in values):
                raise BadInput(f"{name} was {values!r:.200}; it must be a list of {wanted}")


@dataclass(frozen=True)
class SamplingParams:
    """One running row as the sampler sees it: its sampling with strings resolved, its place among
    samples, and the processors of its rules."""

    sampling: Sampling
    prompt_length: int
    stop_tokens: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    sample: int = 0
    logits_rules: tuple[tuple[LogitsRule, LogitsProcessor], ...] = ()


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_word(value: object) -> bool:
    if _is_text(value):
        return True
    return isinstance(value, Collection) and len(value) > 0 and _is_list(value) and all(
        map(_is_token, value)
    )


_LISTED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("stop", _is_text, "strings that are not empty"),
    ("stop_tokens", _is_token, "token ids"),
    ("banned_words", _is_word, "strings, or lists of token ids, that are not empty"),
)
"""Options that hold several, what each of them must be, and that in words."""


def _within(
    owner: object, name: str, low: float | None = None, high: float | None = None,
    open_low: bool = False, whole: bool = False,
) -> None:  # fmt: skip
    value = getattr(owner, name)
    kind = int if whole else (int, float)
    number = isinstance(value, kind) and not isinstance(value, bool) and -inf < value < inf
    if number and not whole and value and not SMALL <= abs(value) <= 1 / SMALL:
        sizes = f"0, or from {SMALL} to {1 / SMALL} in size"
        raise BadInput(f"{name} was {value!r:.40}; it must be {sizes}")
    above = number and (low is None or (value > low if open_low else value >= low))
    if above and (high is None or value <= high):
        if not whole:
            object.__setattr__(owner, name, float(value))       # kernels read them as floats
        return
    bounds = [] if low is None else [f"{'above' if open_low else 'at least'} {low}"]
    bounds += [] if high is None else [f"at most {high}"]
    wanted = " ".join(["a whole number" if whole else "a number", " and ".join(bounds)]).strip()
    raise BadInput(f"{name} was {value!r:.40}; it must be {wanted}")
