"""draftproof: lossless speculative decoding for Hugging Face causal language models.

    import draftproof as dp
    engine = dp.load("demo", assistant_model="demo-draft")
    print(engine.generate("Once upon a time", max_new_tokens=100)[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftproof.core.messages import Accepted, Commit, Frontier, Reading
    from draftproof.core.params import Sampling
    from draftproof.core.tree import ABSENT, TokenTree, TreeShape
    from draftproof.core.typical import Typical
    from draftproof.drafters.base import Drafter, Plain
    from draftproof.drafters.checkpoints import read_head, write_head
    from draftproof.drafters.draft_model import DraftModel, SelfDraft
    from draftproof.drafters.medusa import Medusa, MedusaHead
    from draftproof.drafters.portfolio import Portfolio
    from draftproof.drafters.prompt_lookup import PromptLookup
    from draftproof.drafters.redrafter import ReDrafter, ReDrafterHead
    from draftproof.drafters.suffix import SuffixDrafter
    from draftproof.drafters.token_recycling import TokenRecycling
    from draftproof.engine.budget import Adaptive, Budget, Fixed
    from draftproof.engine.config import EngineConfig
    from draftproof.engine.engine import (
        Chunk,
        Completion,
        Engine,
        Request,
        Scheduler,
        Status,
        Update,
    )
    from draftproof.engine.load import load
    from draftproof.engine.shape_policy import ShapePolicy
    from draftproof.errors import BadInput, DraftproofError
    from draftproof.hf.generate import generate
    from draftproof.model.loading import embedded
    from draftproof.model.target import Target
    from draftproof.training.config import SelfGenerateConfig, TrainConfig, TrainRun
    from draftproof.training.texts import DataConfig
    from draftproof.training.train_run import train

__version__ = "0.1.0"

__all__ = [
    "ABSENT", "Accepted", "Adaptive", "BadInput", "Budget", "Chunk", "Commit", "Completion",
    "DataConfig", "DraftModel", "Drafter", "DraftproofError", "Engine", "EngineConfig", "Fixed",
    "Frontier", "Medusa", "MedusaHead", "Plain", "Portfolio", "PromptLookup", "ReDrafter",
    "ReDrafterHead", "Reading", "Request", "Sampling", "Scheduler", "SelfDraft",
    "SelfGenerateConfig", "ShapePolicy", "Status", "SuffixDrafter", "Target", "TokenRecycling",
    "TokenTree", "TrainConfig", "TrainRun", "TreeShape", "Typical", "Update", "embedded",
    "generate", "load", "read_head", "train", "write_head",
]

_HOME = {
    "draftproof.core.typical": ("Typical",),
    "draftproof.core.messages": ("Accepted", "Commit", "Frontier", "Reading"),
    "draftproof.core.params": ("Sampling",),
    "draftproof.core.tree": ("ABSENT", "TokenTree", "TreeShape"),
    "draftproof.engine.budget": ("Adaptive", "Budget", "Fixed"),
    "draftproof.engine.config": ("EngineConfig",),
    "draftproof.engine.engine": ("Chunk", "Completion", "Engine", "Request", "Scheduler", "Status",
                                 "Update"),
    "draftproof.engine.load": ("load",),
    "draftproof.engine.shape_policy": ("ShapePolicy",),
    "draftproof.drafters.base": ("Drafter", "Plain"),
    "draftproof.drafters.checkpoints": ("read_head", "write_head"),
    "draftproof.drafters.draft_model": ("DraftModel", "SelfDraft"),
    "draftproof.drafters.medusa": ("Medusa", "MedusaHead"),
    "draftproof.drafters.portfolio": ("Portfolio",),
    "draftproof.drafters.prompt_lookup": ("PromptLookup",),
    "draftproof.drafters.token_recycling": ("TokenRecycling",),
    "draftproof.drafters.redrafter": ("ReDrafter", "ReDrafterHead"),
    "draftproof.drafters.suffix": ("SuffixDrafter",),
    "draftproof.errors": ("BadInput", "DraftproofError"),
    "draftproof.hf.generate": ("generate",),
    "draftproof.model.loading": ("embedded",),
    "draftproof.model.target": ("Target",),
    "draftproof.training.train_run": ("train",),
    "draftproof.training.config": ("SelfGenerateConfig", "TrainConfig", "TrainRun"),
    "draftproof.training.texts": ("DataConfig",),
}
"""Where each name lives. They are imported when first asked for: torch takes seconds, ``draftproof
--help`` must not."""


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module 'draftproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
