"""Plain autoregressive decoding: the drafter that proposes only the root, in the same code."""

from __future__ import annotations

from draftproof.core.messages import Frontier
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter


class Plain(Drafter):
    """Proposes nothing: one token per round."""

    name = "none"
    default_budget = 0

    def propose(self, frontier: Frontier) -> TokenTree:
        return TokenTree.root(frontier.prefix.root)
