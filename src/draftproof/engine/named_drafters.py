"""Drafters that need no file from the user, by name, and the default drafter."""

from __future__ import annotations

import hashlib
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.errors import BadInput, first_line
from draftproof.model.names import resolve
from draftproof.model.native_model import NativeModel
from draftproof.model.target import Target

if TYPE_CHECKING:
    from draftproof.model.loading import PreTrainedModel

log = logging.getLogger("draftproof")

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": Plain,
    "prompt-lookup": PromptLookup,
    "suffix": SuffixDrafter,
    "recycling": TokenRecycling,
    "portfolio": lambda: Portfolio([PromptLookup(), SuffixDrafter(), TokenRecycling()]),
}
"""Drafters that need nothing but their name."""
HEADS = {"medusa": "demo-medusa", "redrafter": "demo-redrafter"}
"""Draft heads embedded in the package, trained for the demo model."""
SHIPPED = {"88c9fbbe2593e0cb": "qwen2.5-coder-1.5b-redrafter"}
"""Draft heads in the package that are used by default for these weights, by `weights_key`."""


def imported(name: str, target: Target) -> Drafter:
    """A drafter of the user's own, `module:Class`; also from the working directory.

    The class or function is called with nothing, or with the target if it takes an argument.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        make: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"drafter was {name!r}, which cannot be imported: {error}") from error
    if isinstance(make, Drafter):
        return make
    try:
        needed = [parameter for parameter in inspect.signature(make).parameters.values()
                  if parameter.default is parameter.empty
                  and parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        drafter = make(target) if needed else make()
    except TypeError as error:
        raise BadInput(
            f"drafter was {name!r}, which could not be called with the target or with nothing: "
            f"{first_line(error)}"
        ) from error
    if not isinstance(drafter, Drafter):
        raise BadInput(f"{name} made a {type(drafter).__name__}; it must make a draftproof.Drafter")
    return drafter


def default_name(target: Target) -> str:
    """The default drafter: the training-free ones, and heads that ship for these weights."""
    heads = SHIPPED.get(weights_key(target.model)) if target.group.is_single else None
    if heads and not Path(resolve(heads)).exists():
        log.warning("the draft heads for this model are not installed; install draftproof-heads "
                    "(in a clone: pip install ./packaging/heads)")
        heads = None
    return f"{heads}+portfolio" if heads else "portfolio"


def weights_key(model: PreTrainedModel | NativeModel) -> str:
    """A name for the weights of a model, in any precision. It is made from the last norm, which no
    format changes."""
    if isinstance(model, NativeModel):
        return _digest(model.decoder.norm_weight)
    vectors = [weight for _, weight in model.named_parameters() if weight.dim() == 1]
    if not vectors:
        return ""
    return _digest(vectors[-1])


def _digest(vector: Tensor) -> str:
    return hashlib.sha256(vector.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]
