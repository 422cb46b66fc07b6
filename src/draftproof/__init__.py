"""draftproof: lossless speculative decoding for Hugging Face causal language models.

    import draftproof as dp
    engine = dp.load("demo", assistant_model="demo-draft")
    print(engine.generate("Once upon a time", max_new_tokens=100)[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.core.lossy import Typical
    from draftproof.core.messages import Accepted, Commit, Frontier, Reading
    from draftproof.core.tree import ABSENT, TokenTree, TreeShape
    from draftproof.core.wishes import Sampling
    from draftproof.decoding.adaptive import Adaptive
    from draftproof.decoding.budget import Budget, Confidence, Fixed
    from draftproof.decoding.engine import Chunk, Completion, Engine
    from draftproof.decoding.load import load
    from draftproof.decoding.self_draft import SelfDraft
    from draftproof.decoding.shapes import Shapes
    from draftproof.drafters.base import Drafter
    from draftproof.drafters.checkpoint import read_head, write_head
    from draftproof.drafters.draft_model import DraftModel
    from draftproof.drafters.medusa import Medusa, MedusaHead
    from draftproof.drafters.plain import Plain
    from draftproof.drafters.portfolio import Portfolio
    from draftproof.drafters.prompt_lookup import PromptLookup
    from draftproof.drafters.recycling import TokenRecycling
    from draftproof.drafters.redrafter import ReDrafter, ReDrafterHead
    from draftproof.drafters.redrafter_learning import LearnConfig
    from draftproof.drafters.suffix import SuffixDrafter
    from draftproof.errors import DraftproofError
    from draftproof.target.loading import embedded
    from draftproof.target.target import Target
    from draftproof.training.course import Course, train
    from draftproof.training.material import Sources, Writing
    from draftproof.training.trainer import Plan

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "Accepted",
    "Adaptive",
    "Budget",
    "Chunk",
    "Commit",
    "Completion",
    "Confidence",
    "Course",
    "DraftModel",
    "Drafter",
    "DraftproofError",
    "Engine",
    "Fixed",
    "Frontier",
    "LearnConfig",
    "Medusa",
    "MedusaHead",
    "Plain",
    "Plan",
    "Portfolio",
    "PromptLookup",
    "ReDrafter",
    "ReDrafterHead",
    "Reading",
    "Sampling",
    "SelfDraft",
    "Shapes",
    "Sources",
    "SuffixDrafter",
    "Target",
    "TokenRecycling",
    "TokenTree",
    "TreeShape",
    "Typical",
    "Writing",
    "embedded",
    "load",
    "read_head",
    "train",
    "write_head",
]

_HOME = {
    "draftproof.core.lossy": ("Typical",),
    "draftproof.core.messages": ("Accepted", "Commit", "Frontier", "Reading"),
    "draftproof.core.wishes": ("Sampling",),
    "draftproof.core.tree": ("ABSENT", "TokenTree", "TreeShape"),
    "draftproof.decoding.adaptive": ("Adaptive",),
    "draftproof.decoding.budget": ("Budget", "Confidence", "Fixed"),
    "draftproof.decoding.engine": ("Chunk", "Completion", "Engine"),
    "draftproof.decoding.load": ("load",),
    "draftproof.decoding.self_draft": ("SelfDraft",),
    "draftproof.decoding.shapes": ("Shapes",),
    "draftproof.drafters.base": ("Drafter",),
    "draftproof.drafters.checkpoint": ("read_head", "write_head"),
    "draftproof.drafters.draft_model": ("DraftModel",),
    "draftproof.drafters.medusa": ("Medusa", "MedusaHead"),
    "draftproof.drafters.plain": ("Plain",),
    "draftproof.drafters.portfolio": ("Portfolio",),
    "draftproof.drafters.prompt_lookup": ("PromptLookup",),
    "draftproof.drafters.recycling": ("TokenRecycling",),
    "draftproof.drafters.redrafter": ("ReDrafter", "ReDrafterHead"),
    "draftproof.drafters.redrafter_learning": ("LearnConfig",),
    "draftproof.drafters.suffix": ("SuffixDrafter",),
    "draftproof.errors": ("DraftproofError",),
    "draftproof.target.loading": ("embedded",),
    "draftproof.target.target": ("Target",),
    "draftproof.training.course": ("Course", "train"),
    "draftproof.training.material": ("Sources", "Writing"),
    "draftproof.training.trainer": ("Plan",),
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
