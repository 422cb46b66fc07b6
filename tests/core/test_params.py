"""Options of a request: what is taken as what, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftproof.core.params import Sampling
from draftproof.errors import BadInput

NUMPY: dict[str, Any] = {
    "seed": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int8(5),
    "top_p": np.float64(0.9), "min_p": np.float16(0.25), "max_new_tokens": np.uint8(5),
    "min_new_tokens": np.int32(2), "max_length": np.int64(9), "repetition_penalty": np.float32(1.5),
    "presence_penalty": np.int64(1), "no_repeat_ngram": np.uint64(3),
    "logit_bias": {np.int64(5): np.float32(0.5)}, "stop_tokens": np.array([1, 2]),
    "stop_token_ids": [np.int64(7)],
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_numbers_are_accepted(name: str) -> None:
    """Stored as Python's own: kernels and grammars read nothing else, and equal options are equal.
    """
    value = NUMPY[name]
    plain = value.tolist() if hasattr(value, "tolist") else value
    sampling = Sampling(**{name: value})
    assert sampling == Sampling(**{name: plain})
    stored = getattr(sampling, name)
    parts = next(iter(stored.items())) if name == "logit_bias" else stored
    for part in parts if isinstance(parts, tuple) else (parts,):
        assert type(part) in (int, float)


@pytest.mark.parametrize(("name", "value"), [
    ("seed", np.float64(3)), ("temperature", np.float32("nan")), ("top_k", np.int64(-2)),
    ("top_p", np.float32(1.5)), ("seed", np.bool_(True)), ("stop_tokens", np.array([0.5])),
    ("logit_bias", {np.float32(1): 1.0}), ("temperature", "0.5"), ("temperature", 10**400),
])  # fmt: skip
def test_invalid_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=name):
        Sampling(**{name: value})


def test_limits_of_options_are_inclusive() -> None:
    limits: dict[str, Any] = {"top_logprobs": (0, 20), "top_p": (0.01, 1), "min_p": (0, 1)}
    for name, (least, most) in limits.items():
        for value in (least, most):
            assert getattr(Sampling(logprobs=True, **{name: value}), name) == value
        with pytest.raises(BadInput, match=name):
            Sampling(logprobs=True, **{name: most + 1})
