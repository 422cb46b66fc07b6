"""draftproof: lossless speculative decoding for Hugging Face causal language models.

    import draftproof as dp
    engine = dp.load("demo", assistant_model="demo-draft")
    print(engine.generate("Once upon a time", max_new_tokens=100)[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.core.messages import Accepted, Commit, Frontier, Reading
    from draftproof.core.sampling import Sampling
    from draftproof.core.tree import ABSENT, TokenTree, TreeShape
    from draftproof.decoding.budget import Budget, Fixed
    from draftproof.decoding.engine import Chunk, Completion, Engine
    from draftproof.decoding.load import load
    from draftproof.drafters.base import Drafter
    from draftproof.drafters.draft_model import DraftModel
    from draftproof.drafters.plain import Plain
    from draftproof.drafters.prompt_lookup import PromptLookup
    from draftproof.errors import DraftproofError
    from draftproof.target.loading import embedded
    from draftproof.target.target import Target

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "Accepted",
    "Budget",
    "Chunk",
    "Commit",
    "Completion",
    "DraftModel",
    "Drafter",
    "DraftproofError",
    "Engine",
    "Fixed",
    "Frontier",
    "Plain",
    "PromptLookup",
    "Reading",
    "Sampling",
    "Target",
    "TokenTree",
    "TreeShape",
    "embedded",
    "load",
]

_HOME = {
    "draftproof.core.messages": ("Accepted", "Commit", "Frontier", "Reading"),
    "draftproof.core.sampling": ("Sampling",),
    "draftproof.core.tree": ("ABSENT", "TokenTree", "TreeShape"),
    "draftproof.decoding.budget": ("Budget", "Fixed"),
    "draftproof.decoding.engine": ("Chunk", "Completion", "Engine"),
    "draftproof.decoding.load": ("load",),
    "draftproof.drafters.base": ("Drafter",),
    "draftproof.drafters.draft_model": ("DraftModel",),
    "draftproof.drafters.plain": ("Plain",),
    "draftproof.drafters.prompt_lookup": ("PromptLookup",),
    "draftproof.errors": ("DraftproofError",),
    "draftproof.target.loading": ("embedded",),
    "draftproof.target.target": ("Target",),
}
"""Where each name lives. They are imported when first asked for: torch takes seconds, ``draftproof --help`` must not."""


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module 'draftproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
