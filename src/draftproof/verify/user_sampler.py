"""Loads a user's sampler for `draftproof audit --python`."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path
from typing import Any

from draftproof.errors import BadInput
from draftproof.verify.audit import Draw


def from_module(name: str) -> Draw:
    """The function ``module:attribute``; modules may be in the working directory."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        sampler: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"python was {name!r}, which cannot be imported: {error}") from error
    if not callable(sampler):
        raise BadInput(f"{name} is no function sample(prompt, n, seed); give module:function")
    return sampler  # type: ignore[no-any-return]
