"""Which tokens follow which: pairs counted in text, for heads that do not know what the others chose.

Behind a parent a, a head's chance of x is multiplied by (p(x | a) / p(x)) ** WEIGHT, the gain of the pair. It is what Hydra's
heads (arXiv 2402.05109) learn to see, the token before, for the price of a table and no further layer. Knows counts and
chances; nothing of heads.

Shape letters beyond the usual: P pairs, K steps, S pairs of one parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.errors import DrafterMismatch

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
        least, highest = int(self.tokens.min()), int(self.tokens.max())
        sound = int(starts[0]) == 0 and int(starts[-1]) == len(self.tokens) and int(sizes.min()) >= 0
        if not sound or int(sizes.max()) > MOST or least < 0 or highest >= vocab_size:
            raise DrafterMismatch(
                f"the pairs of the Medusa heads speak of tokens up to {highest}, the target has {vocab_size}; or they are "
                f"broken, or more than {MOST} of one token; use heads trained for this target"
            )
        known = min(len(self.rest), vocab_size)                 # tables are padded: what is beyond has no pairs
        starts = torch.cat([starts[: known + 1], starts[known].expand(vocab_size - known)])
        rest = torch.cat([self.rest[:known].float(), self.rest.new_zeros(vocab_size - known).float()])
        tensors = (part.to(device).contiguous() for part in (starts.int(), self.tokens.int(), self.gains.float(), rest))
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

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors it lies in, in the order of drafting.c."""
        return self.starts, self.tokens, self.gains, self.rest

    def pool(self, root: Tensor, confidence: Tensor, weights: Tensor, nodes: int) -> Pool:
        """What the `nodes` likeliest nodes are among, behind roots [B].

        odds: [B, K, V] the logarithms of the chances that heads give, whatever stands before. weights: [B] what gains are
        multiplied with. No host synchronisation.
        """
        level, chances = root[:, None], confidence.new_zeros(len(root), 1)
        levels = [Pool(level, torch.zeros_like(level), chances)]
        own, start = confidence.topk(min(nodes, confidence.shape[-1]), -1), 0
        for step in range(confidence.shape[1]):
            above = chances.topk(min(nodes, level.shape[1]), 1)                             # [B, W]
            parents = level.gather(1, above.indices)
            tokens, best = self._behind(parents, confidence[:, step], own.values[:, step], own.indices[:, step], weights, nodes)
            places = (start + above.indices)[..., None].expand_as(best)
            start += level.shape[1]
            level, chances = tokens.flatten(1), (above.values[..., None] + best).flatten(1)
            levels.append(Pool(level, places.flatten(1), chances))
        tokens, parents, chances = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        there = chances > -torch.inf                                                        # nor NaN
        return Pool(torch.where(there, tokens, ABSENT), parents, torch.where(there, chances, -torch.inf))

    def behind(self, parents: Tensor) -> Tensor:
        """[P, V] the gains of all tokens behind parents [P]."""
        vocab_size = len(self.rest)
        named, at = self._named(parents)
        gains = self.rest[parents][:, None].repeat(1, vocab_size + 1)                       # the last is for none
        return gains.scatter(1, torch.where(named == ABSENT, vocab_size, named), self.gains[at])[:, :vocab_size]

    def shaped(self, root: Tensor, confidence: Tensor, weights: Tensor, shape: TreeShape) -> TokenTree:
        """The tree of this shape; arguments as for `pool`. A node of rank r is its parent's r-th likeliest child."""
        levels, chances = [root[:, None]], [confidence.new_zeros(len(root), 1)]
        own = confidence.topk(min(max(shape.ranks) + 1, confidence.shape[-1]), -1)
        for step in range(len(shape.levels) - 1):
            above, ranks = shape.births(step + 1, root.device)
            tokens, best = self._behind(
                levels[-1], confidence[:, step], own.values[:, step], own.indices[:, step], weights, own.indices.shape[-1]
            )
            levels.append(tokens[:, above, ranks])
            chances.append(chances[-1][:, above] + best[:, above, ranks])
        tokens, whole = torch.cat(levels, 1), torch.cat(chances, 1)
        there = whole > -torch.inf                                                          # nor NaN
        return TokenTree.shaped(torch.where(there, tokens, ABSENT), shape, confidence=torch.where(there, whole, -torch.inf).exp())

    def _behind(
        self, parents: Tensor, confidence: Tensor, best: Tensor, choices: Tensor, weights: Tensor, children: int
    ) -> tuple[Tensor, Tensor]:
        """The likeliest children of parents [B, W], and the logarithms of their chances: [B, W, children] both, or less.

        They are among the pairs and the head's own best choices. odds: [B, V]; best, choices: [B, R] the highest of these,
        and whose they are.
        """
        parents = parents.clamp(min=0)                                                      # one that is absent
        named, at = self._named(parents)                                                    # [B, W, S]
        weights = weights[:, None, None].to(confidence.dtype)
        before = confidence[:, None].expand(-1, parents.shape[1], -1).gather(2, named.clamp(min=0))
        before = torch.where(named == ABSENT, -torch.inf, before)
        lifted = before + weights * self.gains[at].to(confidence.dtype)
        rest = weights * self.rest[parents][..., None].to(confidence.dtype)                       # [B, W, 1]
        unnamed = (1 - before.exp().sum(-1, keepdim=True)).clamp(min=0)
        whole = (lifted.exp().sum(-1, keepdim=True) + unnamed * rest.exp()).log()
        twice = (choices[:, None, :, None] == named[:, :, None]).any(-1)                    # [B, W, R]
        others = torch.where(twice, -torch.inf, best[:, None] + rest)
        chances = (torch.cat([lifted, others], -1) - whole).clamp(max=0)
        likeliest = chances.topk(min(children, chances.shape[-1]), -1)
        return torch.cat([named, choices[:, None].expand_as(others)], -1).gather(2, likeliest.indices), likeliest.values

    def _named(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """[..., S] the tokens that parents [...] have pairs with, ABSENT where there are no more, and where these lie."""
        first, end = self.starts[parents].long(), self.starts[parents + 1].long()
        at = first[..., None] + torch.arange(self.most, device=first.device)
        there, at = at < end[..., None], at.clamp(max=len(self.tokens) - 1)
        return torch.where(there, self.tokens[at].long(), ABSENT), at


def pairs_tree(
    pairs: Table, logits: Tensor, frontier: Frontier, root: Tensor, nodes: int, shape: TreeShape | None, weight: float
) -> TokenTree:
    """The tree of the likeliest `nodes` nodes behind roots [B], or the one of this shape, by heads' logits [B, K, V].

    weight: what gains are multiplied with before they are added to logits.
    """
    sampler = frontier.sampler
    confidence = sampler.confidence(sampler.gumbel_logits(logits, first_choices(frontier, root, logits), Role.TARGET))
    if shape is not None:
        return pairs.shaped(root, confidence, weight * sampler.slope, shape)
    tokens, parents, chances = pairs.pool(root, confidence, weight * sampler.slope, nodes)
    return sampler.ops.run(TokenTree.likeliest, tokens, parents, chances.exp(), nodes + 1, logits.shape[1])


def first_choices(frontier: Frontier, root: Tensor, logits: Tensor) -> Paths:
    """Where heads stand. Penalties and n-gram rules look at their own first choices as the text between."""
    root = root[:, None]
    told = frontier.sampler.reads_text                                              # otherwise nobody asks for tokens
    tokens = torch.cat([root, logits[:, :-1].argmax(-1)], 1) if told else root.expand(-1, logits.shape[1])
    return Paths(frontier.prefix, TokenTree.chain(tokens))
