"""The sampling options of a request, and of a running row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from draftproof.errors import BadInput

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``processor(input_ids [n, L], scores [n, V]) -> scores [n, V]``, a function of the prefix
only."""


class RuleContext(NamedTuple):
    """What a rule on logits may depend on in addition to the text.

    Attributes:
        prompt: Token ids of the prompt.
        limit: The most new tokens.
        ends: End tokens.
        device: Where logits are.
        encoded: What an encoder reads, else the prompt.
    """

    prompt: Sequence[int]
    limit: int
    ends: tuple[int, ...]
    device: torch.device
    encoded: Sequence[int] = ()


RuleRequest = RuleContext
"""The class under its former name."""


@dataclass(frozen=True)
class LogitsRule:
    """A rule on logits from the model's own generation_config or a grammar, made per request. It
    runs before the user's processors.

    make: raises BadInput for a request that it cannot serve. reads_text: False if it reads only
    scores. forces: its processor has a method `forced`, which returns the only tokens that may
    follow a text.
    """

    name: str
    make: Callable[[RuleContext], LogitsProcessor]
    reads_text: bool = True
    forces: bool = False


MOST_STOPS, LONGEST_STOP = 1_000, 1_000
"""The most stop strings of a request, and the most characters of each. All are searched at each
token."""
MOST_BANNED_WORDS, MOST_BANNED_TOKENS = 10_000, 100_000
"""The most banned words of a request, and their total size. All are compared at each draft node."""
Likely = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """The sampling options of a request. The default is plain greedy decoding.

    Example:
        ```python
        engine.generate("Once upon a time", sampling=dp.Sampling(temperature=0.7, seed=1))
        ```

    Attributes:
        temperature: 0 is greedy.
        top_k: Only the k most likely tokens; 0 is off.
        top_p: Only the most likely tokens that together have this probability; 1 is off.
        min_p: Only tokens this many times as likely as the most likely one; 0 is off.
        repetition_penalty: Over prompt and new tokens (CTRL, arXiv 1909.05858); 1 is off.
        presence_penalty: Subtracted, over new tokens only, as in OpenAI's API; 0 is off.
        frequency_penalty: The same for each occurrence of a token.
        no_repeat_ngram: No n-gram of this size occurs twice; 0 is off.
        logit_bias: Added to the logits, by token id.
        banned_words: Strings or sequences of token ids that must not appear.
        min_new_tokens: No end token before so many new tokens.
        max_new_tokens: At most so many; None leaves it to the call.
        max_length: Tokens of prompt and text together, where max_new_tokens is not given.
        stop: Strings that end the text and are not part of it. min_new_tokens does not hold
            these back.
        stop_tokens: End tokens instead of the model's own; None takes the model's.
        stop_token_ids: End tokens in addition to these, as vLLM's option of this name.
        seed: The same seed gives the same text with any drafter, tree or batch.
        logprobs: Report the log-probability of each new token under the unprocessed model.
        top_logprobs: Also report so many of the most likely tokens in its place, up to 20.
        processors: Functions of the prefix, `(input_ids [n, L], scores [n, V]) -> scores [n, V]`.
        logits_rules: Further rules of the model's generation_config or of a grammar.
        stop_when: Functions of the text, `(input_ids [1, L]) -> bool`, checked after every new
            token; true ends the text there.

    Raises:
        BadInput: A value is out of range or of a wrong type.
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
    stop_token_ids: Sequence[int] = ()
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
        for name, (sound, wanted) in _WANTED.items():
            value = getattr(self, name)
            if value is None and name in ("max_new_tokens", "max_length", "stop_tokens"):
                continue
            if not sound(value):
                raise BadInput(f"{name} was {value!r:.100}; it must be {wanted}")
            object.__setattr__(self, name, _plain(value, getattr(Sampling, name, None)))
        if self.top_logprobs and not self.logprobs:
            raise BadInput(f"top_logprobs was {self.top_logprobs} without logprobs; ask for both")


@dataclass(frozen=True)
class SamplingParams:
    """One running row for the sampler: its options with strings resolved, its sample number, and
    the processors of its rules."""

    sampling: Sampling
    prompt_length: int
    stop_tokens: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    sample: int = 0
    logits_rules: tuple[tuple[LogitsRule, LogitsProcessor], ...] = ()


_Check = Callable[[object], bool]
"""Whether a value is as it must be."""


def _is_list(value: object) -> TypeGuard[Collection[Any]]:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def is_whole(value: object) -> bool:
    """Whether something is a whole number: a token id, a count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _plain(value: Any, default: object) -> Any:
    """A checked value as Python numbers: kernels and grammars accept neither numpy's numbers nor an
    int for a float.

    Args:
        value: a number, ids, or a mapping of ids to numbers, as given by the caller.
        default: the option's default, whose type decides between int and float.
    """
    if isinstance(default, float):
        return float(value)
    if is_whole(value):
        return int(value)
    if isinstance(value, Mapping):
        return {int(token): float(bias) for token, bias in value.items()}
    if _is_list(value) and len(value) and all(map(is_whole, value)):
        return tuple(map(int, value))
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_word(value: object) -> bool:
    return _is_text(value) or (_is_list(value) and len(value) > 0 and all(map(is_whole, value)))


def _are_stops(value: Any) -> bool:
    return (
        _all(_is_text)(value) and len(value) <= MOST_STOPS
        and all(len(stop) <= LONGEST_STOP for stop in value)
    )  # fmt: skip


def _are_banned(value: object) -> bool:
    """The size of banned words. A string counts its bytes, since it has at most as many tokens."""
    if not (_is_list(value) and len(value) <= MOST_BANNED_WORDS and all(map(_is_word, value))):
        return False
    sizes = (len(word.encode(errors="replace")) if isinstance(word, str) else len(word)
             for word in value)
    return sum(sizes) <= MOST_BANNED_TOKENS


def _all(part: _Check) -> _Check:
    return lambda values: _is_list(values) and all(map(part, values))


def _number(low: float, high: float = 1e30, integral: bool = False) -> _Check:
    """Whether something is a number in this range. Larger ones would be lost in float32."""
    kind = Integral if integral else Real

    def check(value: Any) -> bool:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number and bool(low <= value <= high)

    return check


def _count(low: int = 0, high: int = 10**9) -> tuple[_Check, str]:
    return _number(low, high, integral=True), f"a whole number from {low} to {high}"


_WANTED: dict[str, tuple[_Check, str]] = {
    "temperature": (lambda value: _number(1e-30)(value) or _number(0, 0)(value),
                    "0, or a number from 1e-30 to 1e30"),
    "top_p": (_number(1e-30, 1), "a number above 0 and at most 1"),
    "min_p": (_number(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_number(1e-30), "a number from 1e-30 to 1e30"),
    "presence_penalty": (_number(-1e30), "a number"),
    "frequency_penalty": (_number(-1e30), "a number"),
    "seed": (_number(-inf, inf, integral=True), "a whole number"),
    **dict.fromkeys(("top_k", "no_repeat_ngram", "min_new_tokens"), _count()),
    **dict.fromkeys(("max_new_tokens", "max_length"), _count(1, 10**18)),
    "logprobs": (lambda value: isinstance(value, bool), "true or false"),
    "top_logprobs": _count(0, 20),
    "logit_bias": (
        lambda value: isinstance(value, Mapping) and all(
            is_whole(token) and _number(-inf)(bias) for token, bias in value.items()
        ), "numbers up to 1e30, by token id"),
    "stop": (
        _are_stops, f"a list of at most {MOST_STOPS:,} strings, none empty or longer than "
        f"{LONGEST_STOP:,} characters"),
    **dict.fromkeys(("stop_tokens", "stop_token_ids"), (_all(is_whole), "a list of token ids")),
    **dict.fromkeys(("processors", "stop_when"), (_all(callable), "a list of functions")),
    "banned_words": (
        _are_banned, f"a list of at most {MOST_BANNED_WORDS:,} strings or lists of token ids, none "
        f"empty, of at most {MOST_BANNED_TOKENS:,} bytes and token ids together"),
}  # fmt: skip
"""For each option, a check of its value, and in words what the value must be."""
