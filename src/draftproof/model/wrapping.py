"""Functions of transformers that are wrapped where a model's classes use them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedModel

_MARK = "wrapped_by_draftproof"


def sources(model: PreTrainedModel) -> list[Any]:
    """The Python modules that the classes of a model are of."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names]


def wrap(owners: Collection[Any], name: str, around: Callable[[Any], Any]) -> bool:
    """Wrap what these have by this name, unless it is already; return whether any has it."""
    found = [owner for owner in owners if hasattr(owner, name)]
    for owner in found:
        inner = getattr(owner, name)
        if not hasattr(inner, _MARK):
            outer = around(inner)
            setattr(outer, _MARK, True)
            setattr(owner, name, outer)
    return bool(found)
