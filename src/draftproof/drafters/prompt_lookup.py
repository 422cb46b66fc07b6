"""Prompt lookup: what followed the last time the text ended like this. No model, no memory, no training.

A. Saxena, "Prompt Lookup Decoding" (2023); transformers' ``prompt_lookup_num_tokens``. Ours takes the most recent
of the longest matches, for all rows at once, without a host synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.sampling import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput


class PromptLookup(Drafter):
    """Proposes the continuation of the longest, most recent earlier occurrence of the text's last tokens.

    longest, shortest: sizes of the n-gram that must match. No match, no draft.
    """

    name = "prompt-lookup"
    default_budget = 7

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise BadInput(f"prompt lookup was given n-grams of {shortest} to {longest} tokens; give 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest

    def propose(self, frontier: Frontier) -> TokenTree:
        prefix = frontier.prefix
        start = self._continuation(prefix)                                              # [B, 1]
        place = start + torch.arange(frontier.budget, device=start.device)              # [B, K]
        known = (start > 0) & (place <= prefix.position[:, None])
        drafted = prefix.tokens.gather(1, place.clamp(max=prefix.tokens.shape[1] - 1))
        drafted = torch.where(known, drafted, ABSENT)
        return TokenTree.chain(torch.cat([prefix.root[:, None], drafted], 1))

    def _continuation(self, prefix: Prefix) -> Tensor:
        """[B, 1] where the matched text goes on; 0 if nothing matches."""
        tokens, last = prefix.tokens, prefix.position[:, None]
        places = torch.arange(tokens.shape[1], device=tokens.device)                    # each a possible match end
        alive = places < last                                                           # [B, S]
        length = torch.zeros_like(tokens)
        for back in range(self.longest):
            suffix = tokens.gather(1, (last - back).clamp(min=0))                       # [B, 1]
            alive = alive & (tokens.roll(back, 1) == suffix) & (places >= back) & (last >= back)
            length += alive
        score = torch.where(length >= self.shortest, length * tokens.shape[1] + places, -1)
        best = score.max(1, keepdim=True)
        return torch.where(best.values >= 0, best.indices + 1, 0)
