"""SamplingParams that cannot be honoured are refused in one sentence."""

import pytest

from draftproof.core.params import Sampling
from draftproof.errors import BadInput


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"no_repeat_ngram": -1},
        {"min_new_tokens": -1},
        {"max_new_tokens": 0},
        {"stop": [""]},
        {"banned_words": [[]]},
        {"temperature": True},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": "much"},
        {"max_new_tokens": 1.5},
        {"seed": 1.5},
        {"seed": "x"},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": [[5, 1]]},
        {"logit_bias": {"a": 1}},
        {"logprobs": "yes"},
        {"top_logprobs": 2},
        {"top_logprobs": 21, "logprobs": True},
        {"stop": [5]},
        {"stop": 5},
        {"stop": None},
        {"stop_tokens": 5},
        {"stop_tokens": ["a"]},
        {"stop_tokens": "ab"},
        {"banned_words": [5]},
        {"banned_words": [["a"]]},
        {"banned_words": b"x"},
    ],
    ids=str,
)
def test_a_wish_that_cannot_be_honoured_is_one_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput) as error:
        Sampling(**wrong)
    message = str(error.value)
    assert next(iter(wrong)) in message and "\n" not in message and len(message) < 200


def test_unknown_wishes_are_refused() -> None:
    with pytest.raises(TypeError):
        Sampling(temprature=1.0)


def test_whole_numbers_are_taken_as_the_floats_they_are() -> None:
    """A kernel that reads floats was handed the integer 1 as a temperature once."""
    names = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = Sampling(**dict.fromkeys(names, 1))
    assert all(type(getattr(given, name)) is float for name in names)
