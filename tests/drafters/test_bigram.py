"""Bigrams: what is counted, and trees of the likeliest paths where a choice depends on the last."""

from __future__ import annotations

import itertools

import pytest
import torch
from drafting import drafted, needs_kernels
from tiny import CPU, paths_of, sampler_of
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.bigram import MOST, PRIOR, WEIGHT, Bigrams, bigram_tree
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.errors import DrafterMismatch

VOCAB, HEADS, ROWS = 40, 3, 3
HERE = torch.device("cpu")


def counted(vocab: int = VOCAB) -> tuple[Bigrams, list[int]]:
    """Of a text in which some tokens follow others more often than not."""
    dice = torch.Generator().manual_seed(3)
    text = (vocab * torch.rand(3000, generator=dice) ** 2).long()
    for place in range(1, 3000, 2):
        text[place] = (7 * text[place - 1] + 1) % vocab if place % 3 else text[place]
    return Bigrams.counted(text[:-1], text[1:], vocab), text.tolist()


def dense(bigrams: Bigrams) -> Tensor:
    """[V, V] all gains."""
    gains = bigrams.rest[:, None].expand(-1, len(bigrams.rest)).clone()
    for first, (start, end) in enumerate(itertools.pairwise(bigrams.starts.tolist())):
        gains[first, bigrams.tokens[start:end].long()] = bigrams.gains[start:end]
    return gains


def logits_of(dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return 2 * torch.randn(ROWS, HEADS, vocab, generator=dice).to(dtype)


def grown(
    table: Bigrams, logits: Tensor, nodes: int, shape: TreeShape | None = None, ops: Ops = CPU,
    temperature: float = 0.0,
) -> TokenTree:  # fmt: skip
    """The tree after three roots; the last row is greedy."""
    wish = Sampling(temperature=temperature, seed=3)
    prefix = paths_of([[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5]]).prefix
    asked = Frontier(prefix, sampler_of(wish, wish, Sampling(), ops=ops), 99)
    return ops.run(bigram_tree, table.resized(logits.shape[-1], HERE), logits, asked, nodes, shape,
                   WEIGHT)


def test_bigram_gains_match_counts() -> None:
    bigrams, tokens = counted()
    text, seen = torch.tensor(tokens), torch.zeros(VOCAB, VOCAB)
    seen.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
    usual, named = (seen.sum(0) + 0.5) / (seen.sum() + 0.5 * VOCAB), seen > 1
    chance = (seen + PRIOR * usual) / (seen.sum(1, keepdim=True) + PRIOR)
    others = chance.masked_fill(named, 0).sum(1), usual.expand_as(seen).masked_fill(named, 0).sum(1)
    rest = (others[0] / others[1]).log()[:, None]
    torch.testing.assert_close(dense(bigrams), torch.where(named, (chance / usual).log(), rest),
                               rtol=0, atol=1e-3)  # fmt: skip
    for first, (start, end) in enumerate(itertools.pairwise(bigrams.starts.tolist())):
        counts = seen[first, bigrams.tokens[start:end].long()].tolist()
        assert len(counts) == int(named[first].sum()) and counts == sorted(counts, reverse=True)


def test_only_frequent_bigrams_are_kept() -> None:
    second = torch.cat([torch.full((2 + token,), token) for token in range(1, MOST + 50)])
    bigrams = Bigrams.counted(torch.zeros_like(second), second, MOST + 50)
    assert bigrams.tokens.tolist() == list(range(MOST + 49, 49, -1))
    assert bigrams.starts.tolist() == [0, *[MOST] * (MOST + 50)]
    assert len(Bigrams.counted(torch.arange(9), torch.arange(9), 9).tokens) == 0


@pytest.mark.parametrize("budget", [1, 5, 31])
@pytest.mark.parametrize("bigrams", [counted()[0], Bigrams.none(VOCAB)], ids=["counted", "none"])
def test_a_tree_holds_the_likeliest_paths(bigrams: Bigrams, budget: int) -> None:
    """Of all paths; a child's chance is its head's, times the gain, over the sum of all."""
    logits, gains = logits_of(), dense(bigrams).double()
    tree = grown(bigrams, logits, budget)
    assert tree.confidence is not None
    for row in range(ROWS):
        values: dict[tuple[int, ...], float] = {(): 0.0}
        for step in range(HEADS):
            scores = logits[row, step].log_softmax(-1) + WEIGHT * gains
            distributions = scores.log_softmax(-1).tolist()
            for path in [path for path in values if len(path) == step]:
                distribution = distributions[path[-1] if path else int(tree.tokens[row, 0])]
                values |= {(*path, token): values[path] + distribution[token]
                           for token in range(VOCAB)}
        best = sorted((path for path in values if path), key=lambda path: -values[path])[:budget]
        assert drafted(tree, row).keys() == set(best)
        chances = sorted((float(item) for item in tree.confidence[row, 1:].log()), reverse=True)
        assert chances == pytest.approx([values[path] for path in best], abs=1e-6)


@pytest.mark.parametrize("dtype",
                         [torch.float64, pytest.param(torch.bfloat16, marks=needs_kernels)])
def test_nan_heads_and_forbidden_tokens_get_no_probability(
    dtype: torch.dtype
) -> None:
    logits = logits_of(dtype)
    logits[0, 1], logits[1, 0] = torch.nan, -torch.inf
    logits[2, :, 2:] = -torch.inf                               # what is forbidden stays so
    tree = grown(counted()[0], logits, 20)
    assert tree.confidence is not None and torch.equal(tree.confidence > 0, tree.present)
    assert set(tree.depths[0][tree.present[0]].tolist()) == {0, 1} and tree.present[1].sum() == 1
    assert set(tree.tokens[2, 1:].tolist()) == {ABSENT, 0, 1} and tree.present[2].sum() == 15


def test_bigrams_fit_the_target_or_are_refused() -> None:
    """Padding of its table has none. The C library trusts a table, and has room for so many."""
    bigrams = counted()[0]
    wide = bigrams.resized(VOCAB + 8, HERE)
    assert wide.starts.tolist() == [*bigrams.starts.tolist(), *[len(bigrams.tokens)] * 8]
    assert (wide.rest[VOCAB:] == 0).all()
    few = Bigrams.counted(torch.tensor([1, 1, 2, 2]), torch.tensor([3, 3, 1, 1]), VOCAB)
    assert few.resized(8, HERE).starts.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    starts, tokens, full = bigrams.starts.clone(), bigrams.tokens.clone(), few.starts.clone()
    starts[4], tokens[9], full[1:] = 10**6, -2, MOST + 1
    many = torch.zeros(MOST + 1, dtype=torch.int32)
    for broken in (bigrams._replace(starts=starts), bigrams._replace(tokens=tokens),
                   Bigrams(full, many, many.float(), few.rest)):
        with pytest.raises(DrafterMismatch, match="pairs"):
            broken.resized(VOCAB, HERE)
    with pytest.raises(DrafterMismatch, match="up to 3, the target has 3"):
        few.resized(3, HERE)


SHAPES = {"chain": TreeShape.chain(HEADS), "small": TreeShape(((0,), (2,), (2, 1), (2, 1, 0))),
          "wide": TreeShape(tuple(item for item in CHOICES["mc_sim_7b_63"] if len(item) <= HEADS))}


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize(("nodes", "vocab", "shape"),
                         [(1, 40, None), (12, 40, None), (63, 40, None), (20, 331, None),
                          *((0, 40, name) for name in SHAPES)])  # fmt: skip
def test_c_and_torch_draft_the_same_tokens(
    nodes: int, vocab: int, shape: str | None, temperature: float
) -> None:
    logits, wanted = logits_of(torch.bfloat16, vocab), SHAPES.get(shape or "")
    logits[1, :, 7] = -torch.inf
    nodes = nodes or len(wanted or ()) - 1
    asked = (counted(vocab)[0], logits, nodes, wanted)
    ours, theirs = (grown(*asked, ops, temperature) for ops in (CPU, TORCH))
    assert ours.confidence is not None and theirs.confidence is not None
    torch.testing.assert_close(ours.confidence, theirs.confidence.float(), atol=1e-4, rtol=0)
    assert not (ours.tokens[1, 1:] == 7).any() and (ours.parents[:, 0] == -1).all()
    if wanted is not None:
        assert torch.equal(ours.parents, theirs.parents) and ours.is_chain == theirs.is_chain
        assert (ours.tokens != theirs.tokens).sum() <= 2
        return
    for row in range(ROWS):
        item, other = (drafted(tree, row).keys() for tree in (ours, theirs))
        assert len(item & other) >= len(other) - (nodes > 3)     # the last may be a near tie
        above = ours.confidence[row].gather(0, ours.parents[row].clamp(min=0))
        assert (ours.confidence[row] <= above).all()
