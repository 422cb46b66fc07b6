"""What is learnt of a model's forward."""

from __future__ import annotations

import inspect
import warnings

import torch
from tiny import FAMILIES, model

from draftproof.cache.layout import cache_argument
from draftproof.model.target import Target


def test_the_cache_is_passed_under_the_argument_name_of_the_forward() -> None:
    assert cache_argument(("input_ids", "past_key_values")) == "past_key_values"
    assert cache_argument(("input_ids", "cache_params")) == "cache_params"
    assert cache_argument(("input_ids", "cache")) == "cache", "transformers 5.24"


def test_no_deprecated_argument_is_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        target = Target(model(FAMILIES[0]))
        target.own_logits(torch.tensor([[1, 2, 3]]))
    assert target.layout.cache_name in inspect.signature(target.model.forward).parameters
