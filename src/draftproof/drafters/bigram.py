"""Bigram correction of draft heads: which token follows which, counted in text.

Medusa's heads predict without knowing what the others chose. After a token a, a head's chance of x
is multiplied by (p(x | a) / p(x)) ** WEIGHT and normalised again. Hydra (arXiv 2402.05109) trains
layers to see the token before; this takes a table. Without bigrams the chances stay as they are.

Shape letters beyond the usual: P bigrams, S of one first token, K heads, W nodes of a level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.errors import DrafterMismatch

MOST, LEAST = 128, 2
"""Bigrams kept of one first token, the commonest; and how often one must have come to be kept."""
PRIOR = 10.0
"""How many times each token is taken to have been seen before what usually comes."""
WEIGHT = 0.7
"""How much a gain counts. Less than 1: the head has guessed at the token before, too."""
TINY = 1e-6
"""The least chance that is taken to be left for tokens without a bigram."""


class Bigrams(nn.Module):
    """The gains of bigrams, in logarithms; those of one first token lie side by side.

    starts: [V + 1] int32, those of token a are starts[a] to starts[a + 1]. tokens, gains: [P] the
    second tokens (int32), the commonest first, and log p(x | a) / p(x). rest: [V] the same for all
    other tokens together.
    """

    starts: Tensor
    tokens: Tensor
    gains: Tensor
    rest: Tensor

    def __init__(self, vocab_size: int, bigrams: int) -> None:
        super().__init__()
        self.register_buffer("starts", torch.zeros(vocab_size + 1, dtype=torch.int32))
        self.register_buffer("tokens", torch.zeros(bigrams, dtype=torch.int32))
        self.register_buffer("gains", torch.zeros(bigrams))
        self.register_buffer("rest", torch.zeros(vocab_size))

    @classmethod
    def counted(cls, first: Tensor, second: Tensor, vocab_size: int) -> Bigrams | None:
        """Of tokens [N] and those after them [N]; None if no bigram comes often enough."""
        codes, counts = torch.unique(first.long() * vocab_size + second.long(), return_counts=True)
        seen = torch.bincount(first.long(), minlength=vocab_size).double()
        usual = torch.bincount(second.long(), minlength=vocab_size).double() + 0.5
        usual /= usual.sum()
        codes, counts = codes[counts >= LEAST], counts[counts >= LEAST]
        order = counts.argsort(descending=True, stable=True)
        order = order[(codes[order] // vocab_size).argsort(stable=True)]    # by first, then count
        first, second, counts = codes[order] // vocab_size, codes[order] % vocab_size, counts[order]
        rank = torch.arange(len(first)) - torch.searchsorted(first, first)
        first, second, counts = (part[rank < MOST] for part in (first, second, counts))
        if not len(first):
            return None
        chance = (counts + PRIOR * usual[second]) / (seen[first] + PRIOR)
        left, usually = torch.ones(2, vocab_size, dtype=torch.float64)
        left.index_add_(0, first, chance, alpha=-1)
        usually.index_add_(0, first, usual[second], alpha=-1)
        made = cls(vocab_size, len(first))
        made.starts.copy_(torch.searchsorted(first, torch.arange(vocab_size + 1)))
        made.tokens.copy_(second)
        made.gains.copy_((chance / usual[second]).log())
        made.rest.copy_((left.clamp(min=TINY) / usually.clamp(min=TINY)).log())
        return made

    def table(self, vocab_size: int, device: torch.device) -> BigramTable:
        """For a target of so many tokens; raises DrafterMismatch for bigrams of others."""
        starts, sizes, known = self.starts.long(), self.starts.diff(), len(self.tokens)
        tokens = self.tokens.tolist() or [0]
        sound = int(starts[0]) == 0 and int(starts[-1]) == known and int(sizes.min()) >= 0
        if not sound or int(sizes.max()) > MOST or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise DrafterMismatch(
                f"the pairs of the Medusa heads have tokens up to {max(tokens)}, the target has "
                f"{vocab_size}; or they are broken, or more than {MOST} of one token; use heads "
                "trained for this target"
            )
        known = min(len(self.rest), vocab_size)             # tables are padded: others have none
        starts = torch.cat([starts[: known + 1], starts[known].expand(vocab_size - known)])
        rest = torch.cat([self.rest[:known], self.rest.new_zeros(vocab_size - known)])
        ids, gains = self.tokens.int().to(device), self.gains.float().to(device)
        starts, rest = starts.int().to(device), rest.float().to(device)
        return BigramTable(starts, ids, gains, rest, int(sizes.max()))


class BigramTable(NamedTuple):
    """`Bigrams` as decoding reads them; `most` is the most of one first token."""

    starts: Tensor
    tokens: Tensor
    gains: Tensor
    rest: Tensor
    most: int

    def of(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """[..., S] the second tokens of bigrams of `first` [...] (ABSENT pads), and their place."""
        place = self.starts[first].long()[..., None] + torch.arange(self.most, device=first.device)
        there = place < self.starts[first + 1][..., None]
        place = torch.where(there, place, 0)
        return torch.where(there, self.tokens[place].long(), ABSENT), place

    def children(
        self, first: Tensor, log_probs: Tensor, weights: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens after `first` [B, W], and their log-probabilities.

        They are among the bigrams and the best by `log_probs` [B, V]. weights: [B, 1, 1].
        """
        first = first.clamp(min=0)                                          # where ABSENT
        named, place = self.of(first)                                       # [B, W, S]
        before = log_probs[:, None].expand(-1, first.shape[1], -1).gather(2, named.clamp(min=0))
        before = torch.where(named == ABSENT, -torch.inf, before)
        lifted = before + weights * self.gains[place].to(log_probs.dtype)
        rest = weights * self.rest[first][..., None].to(log_probs.dtype)     # [B, W, 1]
        unnamed = (1 - before.exp().sum(-1, keepdim=True)).clamp(min=0)
        whole = (lifted.exp().sum(-1, keepdim=True) + unnamed * rest.exp()).log()
        best, choices = log_probs.topk(min(count, log_probs.shape[-1]), -1)             # [B, R]
        twice = (choices[:, None, :, None] == named[:, :, None]).any(-1)                # [B, W, R]
        others = torch.where(twice, -torch.inf, best[:, None] + rest)
        scores = (torch.cat([lifted, others], -1) - whole).clamp(max=0)
        likeliest = scores.topk(min(count, scores.shape[-1]), -1)
        tokens = torch.cat([named, choices[:, None].expand_as(others)], -1)
        return tokens.gather(2, likeliest.indices), likeliest.values


def bigram_tree(
    table: BigramTable, logits: Tensor, frontier: Frontier, nodes: int, shape: TreeShape | None,
    weight: float,
) -> TokenTree:  # fmt: skip
    """The tree of the likeliest `nodes` nodes, or the one of this shape, by logits [B, K, V].

    A node of rank r of a shape is its parent's r-th likeliest child. Penalties and n-gram rules
    take the heads' first choices for the text between.
    """
    sampler, root = frontier.sampler, frontier.prefix.root[:, None]
    text = torch.cat([root, logits[:, :-1].argmax(-1)], 1) if sampler.reads_text else root
    chain = TokenTree.chain(text.expand(-1, logits.shape[1]))
    scores = sampler.gumbel_logits(logits, Paths(frontier.prefix, chain), Role.TARGET)
    log_probs = sampler.confidence(scores)
    weights = (weight * sampler.slope[:, None, None]).to(log_probs.dtype)
    tokens, score, size = root, log_probs.new_zeros(root.shape), 0
    levels, parents = [(tokens, score)], [torch.zeros_like(root)]
    for step in range(logits.shape[1] if shape is None else len(shape.levels) - 1):
        if shape is None:                                   # any child of the best nodes
            above, place = score.topk(min(nodes, score.shape[1]), 1)                    # [B, W]
            first = tokens.gather(1, place)
            tokens, steps = table.children(first, log_probs[:, step], weights, nodes)
            parents.append((size + place)[..., None].expand_as(tokens).flatten(1))
            size += score.shape[1]
            tokens, score = tokens.flatten(1), (above[..., None] + steps).flatten(1)
        else:
            place, rank = shape.children(step + 1, root.device)
            most = max(shape.ranks) + 1
            tokens, steps = table.children(tokens, log_probs[:, step], weights, most)
            tokens, score = tokens[:, place, rank], score[:, place] + steps[:, place, rank]
        levels.append((tokens, score))
    tokens, score = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    there = score > -torch.inf                                                          # nor NaN
    tokens, confidence = torch.where(there, tokens, ABSENT), torch.where(there, score.exp(), 0)
    if shape is not None:
        return TokenTree.shaped(tokens, shape, confidence=confidence)
    pool = (tokens, torch.cat(parents, 1), confidence)
    return sampler.ops.run(TokenTree.likeliest, *pool, nodes + 1, logits.shape[1])
