"""Prompt lookup: what followed the last times the text ended like this. No model, no memory, no training.

A. Saxena, "Prompt Lookup Decoding" (2023); transformers' ``prompt_lookup_num_tokens``. Ours finds the longest matches,
the most recent first among equals, for all rows at once and without a host synchronisation, and drafts a tree of what
followed them. The text is searched anew in every round: there is nothing to keep in step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput

NEAR = 32
"""Earlier occurrences of the last token that are looked at: those with the token before it too, then the most recent."""
PLACES = 4
"""Matches whose continuations are drafted."""


class PromptLookup(Drafter):
    """Proposes what followed the longest, most recent earlier occurrences of the text's last tokens.

    longest, shortest: sizes of the n-gram that must match. No match, no draft. Where a continuation runs into the end of
    the text it begins again, as if the text went round in a circle.
    """

    name = "prompt-lookup"
    default_budget = 7
    free = True

    def __init__(self, longest: int = 16, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise BadInput(f"prompt lookup was given n-grams of {shortest} to {longest} tokens; give 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest

    def propose(self, frontier: Frontier) -> TokenTree:
        if frontier.budget == 0:
            return TokenTree.root(frontier.prefix.root)
        sizes = (self.longest, self.shortest, NEAR, PLACES)
        return self.ops.run(match_prompt, frontier.prefix, sizes, frontier.budget, frontier.trees)


def match_prompt(prefix: Prefix, sizes: tuple[int, int, int, int], budget: int, trees: bool) -> TokenTree:
    """What followed earlier occurrences of each text's end; the best of them alone where only a chain will do.

    sizes: the longest and the shortest match, how many occurrences are looked at, and how many are drafted from.
    """
    found = _matches(prefix, *sizes)
    ahead = torch.arange(budget, device=found.place.device)                         # [K]
    start = torch.minimum(found.place, prefix.position[:, None])                    # [B, W]
    circle = prefix.position[:, None] + 1 - start                                   # tokens from there to the end
    place = start[..., None] + ahead % circle[..., None]                            # [B, W, K]
    drafted = prefix.tokens.gather(1, place.flatten(1)).view_as(place)
    drafted = torch.where(found.length[..., None] > 0, drafted, ABSENT)
    root = prefix.root[:, None, None].expand(-1, drafted.shape[1], 1)
    paths = torch.cat([root, drafted], -1)
    if not trees:
        return TokenTree.chain(paths[:, 0])
    return TokenTree.from_paths(paths, budget + 1, _votes(found.length, budget))


def _matches(prefix: Prefix, longest: int, shortest: int, near: int, places: int) -> _Matches:
    """The best matches, best first."""
    known = prefix.tokens.shape[1] if prefix.longest is None else prefix.longest + 1
    tokens, last = prefix.tokens[:, :known], prefix.position[:, None]
    size = tokens.shape[1]
    ends = torch.arange(size, device=tokens.device)                                 # each a possible match end
    tail = tokens.gather(1, (last - torch.arange(longest, device=tokens.device)).clamp(min=0))      # [B, L] backwards
    hit = (tokens == tail[:, :1]) & (ends < last)                                   # [B, S]
    pair = (tokens.roll(1, 1) == tail[:, min(1, longest - 1), None]) & (ends > 0)
    recent = torch.where(hit, ends + size * (hit & pair), -1).topk(min(near, size), 1)
    end = recent.indices                                                            # [B, R]
    back = end[..., None] - torch.arange(longest, device=tokens.device)             # [B, R, L]
    text = tokens.gather(1, back.clamp(min=0).flatten(1)).view_as(back)
    length = ((text == tail[:, None]) & (back >= 0)).cumprod(-1, dtype=torch.uint8).sum(-1)
    length = torch.where((recent.values >= 0) & (length >= shortest), length, 0)
    best = (length * size + end).topk(min(places, end.shape[1]), 1).indices         # [B, W]
    return _Matches(end.gather(1, best) + 1, length.gather(1, best))


class _Matches(NamedTuple):
    place: Tensor           # [B, W] where the matched text goes on
    length: Tensor          # [B, W] how many tokens match; 0 is no match


def _votes(length: Tensor, budget: int) -> Tensor:
    """[B, W, 1 + K] the odds of each continuation, given that none before it is right, and of its beginnings.

    A match of n tokens is followed by the same token n times in n + 3: what was found on stories, code and quotations.
    """
    grown = length[..., None] + torch.arange(budget, device=length.device)                  # [B, W, K]
    steps = (grown / (grown + 3)) * (length > 0)[..., None]
    missed = (1 - steps[:, :-1, :1]).cumprod(1)                                             # [B, W - 1, 1]
    left = torch.cat([torch.ones_like(steps[:, :1, :1]), missed], 1)                        # [B, W, 1]
    return torch.cat([left, left * steps.cumprod(-1)], -1)
