"""Prompt lookup: propose what followed earlier occurrences of the end of the text. No model, no
memory.

A. Saxena, "Prompt Lookup Decoding" (2023); transformers' ``prompt_lookup_num_tokens``. This one
finds the longest matches, the most recent first among equals, for all rows at once, and drafts a
tree of what followed them. The text is searched again in every round, so there is no state.

Further shape letters: L longest match, W matches, K tokens drafted from each.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput
from draftproof.native.cpu_ops import cpu_kernel
from draftproof.native.declarations import Structure, structure
from draftproof.native.kernels import Kernels
from draftproof.native.trees import TreeBuffer, search_member, texts_of

NEAR = 32
"""The most earlier occurrences of the last token that are compared; those after the same token come
first."""
PLACES = 4
"""Matches whose continuations are drafted."""


class PromptLookup(Drafter):
    """Proposes what followed the longest and latest earlier occurrences of the last tokens.

    Prompt lookup decoding (A. Saxena, 2023). No match, no draft. A continuation that reaches the
    end of the text starts again, as if the text repeated itself.

    Args:
        longest: Tokens of the longest n-gram that is compared.
        shortest: Tokens that must match for a draft.

    Raises:
        BadInput: Unless 1 <= shortest <= longest.

    Example:
        >>> engine = dp.load("demo", drafter=dp.PromptLookup(longest=8, shortest=2))
    """

    name = "prompt-lookup"
    max_draft_tokens = 7

    def __init__(self, longest: int = 16, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise BadInput(
                f"prompt lookup had n-grams of {shortest} to {longest} tokens; "
                "give 1 <= shortest <= longest"
            )
        self.sizes = (longest, shortest, NEAR, PLACES)

    def propose(self, frontier: Frontier) -> TokenTree:
        tree = self.ops.run(match_prompt, frontier.prefix, self.sizes, frontier.max_draft_tokens)
        return tree if frontier.trees else tree.best_chain()

    def native_member(self, prefix: Prefix) -> Structure:
        return _member(self.sizes, len(prefix.position))


def match_prompt(prefix: Prefix, sizes: tuple[int, int, int, int], budget: int) -> TokenTree:
    """What followed earlier occurrences of each text's end.

    sizes: the longest and shortest match, occurrences looked at, and drafted from. Confidence: a
    match of n tokens is followed by the same token n times in n + 3, as measured on stories, code
    and quotations.
    """
    start, length = _matches(prefix, *sizes)
    ahead = torch.arange(budget, device=start.device)                               # [K]
    start = torch.minimum(start, prefix.position[:, None])                          # [B, W]
    period = prefix.position[:, None] + 1 - start                                   # to the end
    place = start[..., None] + ahead % period[..., None]                            # [B, W, K]
    drafted = prefix.tokens.gather(1, place.flatten(1)).view_as(place)
    drafted = torch.where(length[..., None] > 0, drafted, ABSENT)
    root = prefix.root[:, None, None].expand(-1, drafted.shape[1], 1)
    grown = (length[..., None] + ahead).float()
    steps = (grown / (grown + 3)) * (length > 0)[..., None]
    missed = (1 - steps[:, :-1, :1]).cumprod(1)                                     # [B, W - 1, 1]
    left = torch.cat([torch.ones_like(steps[:, :1, :1]), missed], 1)                # [B, W, 1]
    votes = torch.cat([left, left * steps.cumprod(-1)], -1)                         # [B, W, 1 + K]
    return TokenTree.from_paths(torch.cat([root, drafted], -1), budget + 1, votes)


def _matches(
    prefix: Prefix, longest: int, shortest: int, near: int, places: int
) -> tuple[Tensor, Tensor]:
    """[B, W] positions after the best matches, best first, and the lengths of the matches or 0."""
    known = prefix.tokens.shape[1] if prefix.longest is None else prefix.longest + 1
    tokens, last = prefix.tokens[:, :known], prefix.position[:, None]
    size, back = tokens.shape[1], torch.arange(longest, device=tokens.device)
    ends = torch.arange(size, device=tokens.device)                         # where a match may end
    tail = tokens.gather(1, (last - back).clamp(min=0))                     # [B, L] backwards
    hit = (tokens == tail[:, :1]) & (ends < last)                           # [B, S]
    pair = (tokens.roll(1, 1) == tail[:, min(1, longest - 1), None]) & (ends > 0)
    recent = torch.where(hit, ends + size * (hit & pair), -1).topk(min(near, size), 1)
    end = recent.indices                                                    # [B, R]
    before = end[..., None] - back                                          # [B, R, L]
    text = tokens.gather(1, before.clamp(min=0).flatten(1)).view_as(before)
    same = (text == tail[:, None]) & (before >= 0)
    length = same.cumprod(-1, dtype=torch.uint8).sum(-1)
    length = torch.where((recent.values >= 0) & (length >= shortest), length, 0)
    best = (length * size + end).topk(min(places, end.shape[1]), 1).indices
    return end.gather(1, best) + 1, length.gather(1, best)


@cpu_kernel(match_prompt)
def _match_prompt(
    library: Kernels, prefix: Prefix, sizes: tuple[int, int, int, int], budget: int
) -> TokenTree:
    out = TreeBuffer(len(prefix.position), 1 + budget)
    library("match_prompt", _search(sizes), texts_of(prefix, budget), budget, out.output)
    return out.tree(budget)


@lru_cache
def _search(sizes: tuple[int, int, int, int]) -> Structure:
    return structure("PromptSearch")(*sizes)


@lru_cache
def _member(sizes: tuple[int, int, int, int], rows: int) -> Structure:
    return search_member(rows, prompt=_search(sizes))
