"""Which tokens follow which: pairs counted in text, for heads that do not know what the others chose.

Behind a parent a, a head's chance of x is multiplied by (p(x | a) / p(x)) ** WEIGHT, the gain of the pair. It is what Hydra's
heads (arXiv 2402.05109) learn to see, the token before, for the price of a table and no further layer. Knows counts and
chances; nothing of heads.

Shape letters beyond the usual: P pairs, K steps, S pairs of one parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftproof.core.tree import ABSENT, TokenTree
from draftproof.errors import DrafterMismatch
from draftproof.native import kernels as native
from draftproof.native.kernels import Contest, Kernels

MOST, LEAST = 128, 2
"""Pairs kept of one parent, the commonest; and how often a pair must have come to be kept."""
PRIOR = 10.0
"""How many times a parent is taken to have been seen in front of what usually comes, whatever it is."""
WEIGHT = 0.7
"""How much a gain counts. Less than 1: the head has guessed at the parent, too."""


class Pairs(nn.Module):
    """The gains of pairs, all in logarithms; parents and their pairs lie end to end.

    starts: [V + 1] int32, the pairs of token a are starts[a] to starts[a + 1]. tokens, gains: [P] the second tokens
    (int32), the commonest first, and log p(x | a) / p(x). rest: [V] the same for all tokens together that are not named.
    """

    starts: Tensor
    tokens: Tensor
    gains: Tensor
    rest: Tensor

    def __init__(self, vocab_size: int, pairs: int) -> None:
        super().__init__()
        self.register_buffer("starts", torch.zeros(vocab_size + 1, dtype=torch.int32))
        self.register_buffer("tokens", torch.zeros(pairs, dtype=torch.int32))
        self.register_buffer("gains", torch.zeros(pairs))
        self.register_buffer("rest", torch.zeros(vocab_size))

    @classmethod
    def counted(cls, first: Tensor, second: Tensor, vocab_size: int) -> Pairs | None:
        """Of tokens [N] and those behind them [N]; None if no pair comes often enough."""
        codes, counts = torch.unique(first.long() * vocab_size + second.long(), return_counts=True)
        seen = torch.bincount(first.long(), minlength=vocab_size).double()
        usual = torch.bincount(second.long(), minlength=vocab_size).double() + 0.5
        usual /= usual.sum()
        codes, counts = codes[counts >= LEAST], counts[counts >= LEAST]
        order = counts.argsort(descending=True, stable=True)
        order = order[(codes[order] // vocab_size).argsort(stable=True)]            # by parent, the commonest first
        parents, tokens, counts = codes[order] // vocab_size, codes[order] % vocab_size, counts[order]
        place = torch.arange(len(parents)) - torch.searchsorted(parents, parents)
        parents, tokens, counts = (part[place < MOST] for part in (parents, tokens, counts))
        if not len(parents):
            return None
        chance = (counts + PRIOR * usual[tokens]) / (seen[parents] + PRIOR)
        others, usually = torch.ones(2, vocab_size, dtype=torch.float64)
        others.index_add_(0, parents, chance, alpha=-1), usually.index_add_(0, parents, usual[tokens], alpha=-1)
        made = cls(vocab_size, len(parents))
        made.starts.copy_(torch.searchsorted(parents, torch.arange(vocab_size + 1)))
        made.tokens.copy_(tokens)
        made.gains.copy_((chance / usual[tokens]).log())
        made.rest.copy_((others.clamp(min=TINY) / usually.clamp(min=TINY)).log())
        return made

    def table(self, vocab_size: int, device: torch.device) -> Table:
        """To look things up in, for a target of so many tokens. Raises DrafterMismatch for pairs of others."""
        starts, sizes = self.starts.long(), self.starts.diff()
        sound = int(starts[0]) == 0 and int(starts[-1]) == len(self.tokens) == len(self.gains) and bool((sizes >= 0).all())
        if not sound or int(self.tokens.min()) < 0 or int(self.tokens.max()) >= vocab_size:
            raise DrafterMismatch(
                f"the pairs of the Medusa heads speak of tokens up to {int(self.tokens.max())}, the target has {vocab_size}; "
                "use heads trained for this target"
            )
        known = min(len(self.rest), vocab_size)                 # tables are padded: what is beyond has no pairs
        starts = torch.cat([starts[: known + 1], starts[known].expand(vocab_size - known)])
        rest = torch.cat([self.rest[:known].float(), torch.zeros(vocab_size - known)])
        tensors = (part.to(device).contiguous() for part in (starts.int(), self.tokens, self.gains.float(), rest))
        return Table(int(sizes.max()), *tensors)


TINY = 1e-6
"""The least chance that is taken to be left for what is not named."""


class Pool(NamedTuple):
    """Nodes that a tree is chosen from, [B, M] each: tokens, parents (places in the pool), and logarithms of their odds."""

    tokens: Tensor
    parents: Tensor
    chances: Tensor


@dataclass(frozen=True)
class Table:
    """`Pairs` to look things up in; gains and rest in float32. most: pairs of one parent."""

    most: int
    starts: Tensor
    tokens: Tensor
    gains: Tensor
    rest: Tensor

    @cached_property
    def native(self) -> native.Pairs:
        """Where it lies, for our kernels."""
        return native.Pairs(*(part.data_ptr() for part in (self.starts, self.tokens, self.gains, self.rest)))

    def tree(self, found: Kernels, logits: Tensor, roots: Tensor, nodes: int, children: int, contest: Contest) -> TokenTree:
        """As `pool`, chosen from by our kernels: logits [B, K, V] in bfloat16."""
        tokens, parents, chances = found.paired(self.native, WEIGHT, logits, roots, nodes, children, contest, ABSENT)
        return TokenTree(tokens, parents, min(nodes, logits.shape[1]), is_chain=children == 1, odds=chances.exp())

    def pool(self, root: Tensor, odds: Tensor, weights: Tensor, nodes: int, children: int) -> Pool:
        """What the `nodes` likeliest nodes are among, behind roots [B]; `children` are weighed of each parent.

        odds: [B, K, V] the logarithms of the chances that heads give, whatever stands before. weights: [B] what gains are
        multiplied with. No host synchronisation.
        """
        level, chances = root[:, None], odds.new_zeros(len(root), 1)
        levels = [Pool(level, torch.zeros_like(level), chances)]
        own, start = odds.topk(min(children, odds.shape[-1]), -1), 0
        for step in range(odds.shape[1]):
            above = chances.topk(min(nodes, level.shape[1]), 1)                             # [B, W]
            parents = level.gather(1, above.indices)
            weighed = self._behind(parents, odds[:, step], own.values[:, step], own.indices[:, step], weights)
            best = weighed.chances.topk(min(children, weighed.chances.shape[-1]), -1)       # [B, W, R]
            places = (start + above.indices)[..., None].expand_as(best.indices)
            start += level.shape[1]
            chances = (above.values[..., None] + best.values).flatten(1)
            level = weighed.tokens.gather(2, best.indices).flatten(1)
            levels.append(Pool(level, places.flatten(1), chances))
        tokens, parents, chances = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        there = chances > -torch.inf                                                        # nor NaN
        return Pool(torch.where(there, tokens, ABSENT), parents, torch.where(there, chances, -torch.inf))

    def _behind(self, parents: Tensor, odds: Tensor, best: Tensor, choices: Tensor, weights: Tensor) -> _Weighed:
        """The children of parents [B, W] that are in question, each once: their pairs, and a head's own best choices.

        odds: [B, V]; best, choices: [B, R] the highest of these, and whose they are.
        """
        first, end = self.starts[parents].long(), self.starts[parents + 1].long()
        at = first[..., None] + torch.arange(self.most, device=first.device)                # [B, W, S]
        there, at = at < end[..., None], at.clamp(max=len(self.tokens) - 1)
        named = torch.where(there, self.tokens[at].long(), ABSENT)
        weights = weights[:, None, None].to(odds.dtype)
        before = odds[:, None].expand(-1, parents.shape[1], -1).gather(2, named.clamp(min=0))
        before = torch.where(there, before, -torch.inf)
        lifted = before + weights * self.gains[at].to(odds.dtype)
        rest = weights * self.rest[parents][..., None].to(odds.dtype)                       # [B, W, 1]
        unnamed = (1 - before.exp().sum(-1, keepdim=True)).clamp(min=0)
        whole = (lifted.exp().sum(-1, keepdim=True) + unnamed * rest.exp()).log()
        twice = (choices[:, None, :, None] == named[:, :, None]).any(-1)                    # [B, W, R]
        others = torch.where(twice, -torch.inf, best[:, None] + rest)
        tokens = torch.cat([named, choices[:, None].expand_as(others)], -1)
        return _Weighed(tokens, (torch.cat([lifted, others], -1) - whole).clamp(max=0))


class _Weighed(NamedTuple):
    """[B, W, S + R] children in question, and the logarithms of their chances behind their parents."""

    tokens: Tensor
    chances: Tensor
