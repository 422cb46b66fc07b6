"""draftproof: lossless speculative decoding for Hugging Face causal language models.

    import draftproof as dp
    engine = dp.load("demo", assistant_model="demo-draft")
    print(engine.generate("Once upon a time", max_new_tokens=100)[0].text)
"""

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
