"""Bigram correction of draft heads: counts of which token follows which.

Medusa's heads predict without knowing what the others chose. After a token a, a head's chance of x
is multiplied by (p(x | a) / p(x)) ** WEIGHT and normalised again. Hydra (arXiv 2402.05109) trains
layers that see the token before; here a table is enough. Without bigrams nothing changes.

Further shape letters: P bigrams, S of one first token, K heads, W nodes of a level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.errors import DrafterMismatch
from draftproof.native.cpu_ops import UNSUPPORTED, Unsupported, cpu_kernel
from draftproof.native.declarations import structure
from draftproof.native.kernels import Kernels
from draftproof.native.structures import LANES
from draftproof.native.trees import TreeBuffer

Pairs = structure("Pairs")
MOST = 128
"""The most bigrams per first token; the most common are kept."""
PRIOR = 10.0
"""Pseudo-count of each first token, with the usual frequencies of second tokens."""
WEIGHT = 0.7
"""Weight of a gain. Below 1, because the head has already guessed the token before."""


class Bigrams(NamedTuple):
    """Logarithmic gains of bigrams, grouped by first token.

    starts: [V + 1] int32, those of token a are starts[a] to starts[a + 1]. tokens, gains: [P] the
    second tokens (int32), the most common first, and log p(x | a) / p(x). rest: [V] the same for
    all other tokens together. most: the most of one first token.
    """

    starts: Tensor
    tokens: Tensor
    gains: Tensor
    rest: Tensor
    most: int = MOST

    @classmethod
    def none(cls, vocab_size: int) -> Bigrams:
        """An empty table."""
        starts, tokens = (torch.zeros(size, dtype=torch.int32) for size in (vocab_size + 1, 0))
        gains, rest = (torch.zeros(size, dtype=torch.float32) for size in (0, vocab_size))
        return cls(starts, tokens, gains, rest, 0)

    @classmethod
    def counted(cls, first: Tensor, second: Tensor, vocab_size: int) -> Bigrams:
        """Count tokens [N] and their successors [N]; pairs that occur only once are dropped."""
        codes, counts = torch.unique(first.long() * vocab_size + second.long(), return_counts=True)
        seen = torch.bincount(first.long(), minlength=vocab_size).double()
        usual = torch.bincount(second.long(), minlength=vocab_size).double() + 0.5
        usual /= usual.sum()
        codes, counts = codes[counts > 1], counts[counts > 1]
        order = counts.argsort(descending=True, stable=True)
        order = order[(codes[order] // vocab_size).argsort(stable=True)]    # by first, then count
        first, second, counts = codes[order] // vocab_size, codes[order] % vocab_size, counts[order]
        rank = torch.arange(len(first)) - torch.searchsorted(first, first)
        first, second, counts = (part[rank < MOST] for part in (first, second, counts))
        chance = (counts + PRIOR * usual[second]) / (seen[first] + PRIOR)
        left, usually = torch.ones(2, vocab_size, dtype=torch.float64)
        left.index_add_(0, first, chance, alpha=-1)
        usually.index_add_(0, first, usual[second], alpha=-1)
        starts = torch.searchsorted(first, torch.arange(vocab_size + 1))
        rest = (left.clamp(min=1e-6) / usually.clamp(min=1e-6)).log()
        gains = (chance / usual[second]).log()
        return cls(starts.int(), second.int(), gains.float(), rest.float())

    def check(self, vocab_size: int) -> None:
        """Check the columns against each other, and the tokens against the target's.

        Raises:
            DrafterMismatch: They are not a table of bigrams of `vocab_size` tokens.
        """
        starts, tokens, gains, rest = self[:4]
        fits = all(column.dim() == 1 for column in self[:4]) and len(rest) > 0
        fits &= not starts.is_floating_point() and not tokens.is_floating_point()
        fits &= gains.is_floating_point() and rest.is_floating_point()
        if not fits or len(starts) != len(rest) + 1 or len(tokens) != len(gains):
            shapes = ", ".join(str(list(column.shape)) for column in self[:4])
            raise DrafterMismatch(
                f"the pairs of the Medusa heads are columns of shapes {shapes}, which are no table "
                "of pairs; fetch the heads again"
            )
        sizes, highest = starts.long().diff(), int(tokens.max()) if len(tokens) else 0
        ordered = int(starts[0]) == 0 and int(starts[-1]) == len(tokens) and int(sizes.min()) >= 0
        if not ordered or int(sizes.max()) > MOST or not gains.isfinite().all() or (
            not rest.isfinite().all()
        ):
            raise DrafterMismatch(
                "the pairs of the Medusa heads are damaged: not in order, not finite, or more than "
                f"{MOST} of one token; fetch the heads again"
            )
        if highest >= vocab_size or (len(tokens) and int(tokens.min()) < 0):
            raise DrafterMismatch(
                f"the pairs of the Medusa heads have tokens up to {highest}, the target has "
                f"{vocab_size}; use heads trained for this target"
            )

    def resized(self, vocab_size: int, device: torch.device) -> Bigrams:
        """The table for a target of this vocabulary size; padding tokens have no bigrams.

        Raises DrafterMismatch for unknown tokens and inconsistent tables, which C would trust."""
        self.check(vocab_size)
        starts, most = self.starts.long(), int(self.starts.diff().max())
        known = min(len(self.rest), vocab_size)
        starts = torch.cat([starts[: known + 1], starts[known].expand(vocab_size - known)])
        rest = torch.cat([self.rest[:known], self.rest.new_zeros(vocab_size - known)])
        columns = starts.int(), self.tokens.int(), self.gains.float(), rest.float()
        return Bigrams._make([*(column.to(device) for column in columns), most])

    def after(self, first: Tensor, log_probs: Tensor, weights: Tensor) -> Tensor:
        """[B, W, V] log-probabilities after tokens `first` [B, W] (any, where ABSENT), of those by
        `log_probs` [B, V]. weights: [B, 1, 1]."""
        first, vocab_size = first.clamp(min=0), len(self.rest)
        place = self.starts[first].long()[..., None] + torch.arange(self.most, device=first.device)
        there = place < self.starts[first + 1][..., None]
        place = torch.where(there, place, 0)
        named = torch.where(there, self.tokens[place].long(), vocab_size)   # one more than there is
        gains = self.rest[first][..., None].repeat(1, 1, vocab_size + 1)
        gains = gains.scatter(2, named, self.gains[place])[..., :vocab_size]
        return (log_probs[:, None] + weights * gains.to(log_probs.dtype)).log_softmax(-1)


def bigram_tree(
    table: Bigrams, logits: Tensor, frontier: Frontier, nodes: int, shape: TreeShape | None,
    weight: float,
) -> TokenTree:  # fmt: skip
    """The tree of the likeliest `nodes` nodes, or the one of this shape, by logits [B, K, V].

    A node of rank r is its parent's r-th likeliest child. Penalties and n-gram rules use the heads'
    first choices as the text in between.
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
            log_probs_after = table.after(tokens.gather(1, place), log_probs[:, step], weights)
            steps, candidates = log_probs_after.topk(min(nodes, log_probs_after.shape[-1]), -1)
            parents.append((size + place)[..., None].expand_as(candidates).flatten(1))
            size += score.shape[1]
            tokens, score = candidates.flatten(1), (above[..., None] + steps).flatten(1)
        else:
            place, rank = shape.children(step + 1, root.device)
            log_probs_after = table.after(tokens, log_probs[:, step], weights)
            steps, candidates = log_probs_after.topk(max(shape.ranks) + 1, -1)
            tokens, score = candidates[:, place, rank], score[:, place] + steps[:, place, rank]
        levels.append((tokens, score))
    tokens, score = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    there = score > -torch.inf                                                          # nor NaN
    tokens, confidence = torch.where(there, tokens, ABSENT), torch.where(there, score.exp(), 0)
    if shape is not None:
        return TokenTree.shaped(tokens, shape, confidence=confidence)
    pool = (tokens, torch.cat(parents, 1), confidence)
    return sampler.ops.run(TokenTree.likeliest, *pool, nodes + 1, logits.shape[1])


@cpu_kernel(bigram_tree)
def _bigram_tree(
    library: Kernels, table: Bigrams, logits: Tensor, frontier: Frontier, nodes: int,
    shape: TreeShape | None, weight: float,
) -> TokenTree | Unsupported:  # fmt: skip
    rows, heads, vocab = logits.shape
    sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, vocab, 0)
    if logits.dtype != torch.bfloat16 or sampling is None or len(table.rest) != vocab:
        return UNSUPPORTED
    pairs = Pairs(*table[:4], vocab, len(table.tokens))
    out = TreeBuffer(rows, nodes + 1)
    work = torch.empty(rows * heads * (vocab + LANES), dtype=torch.float32)
    children = nodes if shape is None else max(shape.ranks) + 1
    library(
        "bigram_tree", pairs, weight, None if shape is None else shape.child_ranks, logits,
        frontier.prefix.root, rows, heads, vocab, children, *sampling[:4], out.output, work
    )
    return out.tree(heads, shape)
