"""Pairs of tokens: what is counted, and that a tree holds the likeliest paths where each choice depends on the one before."""

from __future__ import annotations

import itertools
from math import log
from typing import NamedTuple

import pytest
import torch
from drafting import needs_kernels
from tiny import CPU, paths_of, sampler_of
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.bigram import LEAST, MOST, PRIOR, WEIGHT, Pairs, Table, pairs_tree
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.errors import DrafterMismatch

VOCAB, HEADS, ROWS = 40, 3, 3
Path = tuple[int, ...]


def text(length: int = 3000, vocab: int = VOCAB) -> Tensor:
    """Tokens of which some follow others more often than not."""
    dice = torch.Generator().manual_seed(3)
    free = (vocab * torch.rand(length, generator=dice) ** 2).long()
    for place in range(1, length, 2):
        free[place] = (7 * free[place - 1] + 1) % vocab if place % 3 else free[place]
    return free


def counted(vocab: int = VOCAB) -> Pairs:
    made = Pairs.counted(text(vocab=vocab)[:-1], text(vocab=vocab)[1:], vocab)
    assert made is not None
    return made


def dense(pairs: Pairs) -> Tensor:
    """[V, V] all gains."""
    gains = pairs.rest[:, None].expand(-1, len(pairs.rest)).clone()
    for parent, (start, end) in enumerate(itertools.pairwise(pairs.starts.tolist())):
        gains[parent, pairs.tokens[start:end].long()] = pairs.gains[start:end]
    return gains


def test_gains_are_what_was_counted() -> None:
    tokens, pairs = text(), counted()
    seen, usual = torch.zeros(VOCAB, VOCAB), torch.full((VOCAB,), 0.5)
    for one, other in itertools.pairwise(tokens.tolist()):
        seen[one, other] += 1
        usual[other] += 1
    usual /= usual.sum()
    gains, starts = dense(pairs), pairs.starts.tolist()
    for parent in range(VOCAB):
        named = pairs.tokens[starts[parent] : starts[parent + 1]].tolist()
        assert set(named) == {token for token in range(VOCAB) if seen[parent, token] >= LEAST}
        assert [seen[parent, token] for token in named] == sorted((seen[parent, token] for token in named), reverse=True)
        chance = (seen[parent] + PRIOR * usual) / (seen[parent].sum() + PRIOR)
        for token in named:
            assert gains[parent, token] == pytest.approx(log(chance[token] / usual[token]), abs=1e-5)
        others = [token for token in range(VOCAB) if token not in named]
        assert pairs.rest[parent] == pytest.approx(log(chance[others].sum() / usual[others].sum()), abs=1e-3)
    assert gains.max() > 1 and gains.min() < -0.3


def test_the_gains_of_all_tokens_behind_some() -> None:
    pairs, parents = counted(), torch.tensor([0, 39, 7, 7])
    assert torch.equal(pairs.table(VOCAB, parents.device).behind(parents), dense(pairs)[parents])


def test_only_the_commonest_pairs_are_kept_and_none_that_came_once() -> None:
    second = torch.cat([torch.full((LEAST + token,), token) for token in range(1, MOST + 50)])
    pairs = Pairs.counted(torch.zeros_like(second), second, MOST + 50)
    assert pairs is not None and pairs.tokens.tolist() == list(range(MOST + 49, 49, -1))
    assert pairs.starts.tolist() == [0, *[MOST] * (MOST + 50)]
    assert Pairs.counted(torch.arange(9), torch.arange(9), 9) is None


def heads(dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> Tensor:
    return 2 * torch.randn(ROWS, HEADS, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)


def paths(tree: TokenTree, row: int) -> set[Path]:
    """The token paths of a row's nodes, root excluded."""
    nodes = [node for node in range(1, tree.tokens.shape[1]) if tree.tokens[row, node] != ABSENT]
    return {tuple(tree.tokens[row, tree.ancestors[row, node]].tolist()[1:]) for node in nodes}


@pytest.mark.parametrize("budget", [1, 2, 5, 16, 31])
@pytest.mark.parametrize("weight", [0.0, WEIGHT, 1.5])
def test_a_tree_holds_the_likeliest_paths(budget: int, weight: float) -> None:
    """Of all paths of all tokens; a child's chance is its head's, times the gain, over the sum of all."""
    pairs, confidence, roots = counted(), heads().log_softmax(-1), torch.tensor([3, 17, 39])
    pool = pairs.table(VOCAB, confidence.device).pool(roots, confidence, torch.full((ROWS,), weight), budget)
    tree = TokenTree.likeliest(pool.tokens, pool.parents, pool.chances.exp(), budget + 1, HEADS)
    gains = dense(pairs).double()
    for row in range(ROWS):
        values: dict[Path, float] = {(): 0.0}
        for step in range(HEADS):
            laws = (confidence[row, step] + weight * gains).log_softmax(-1).tolist()              # [V, V] behind each parent
            for path in [path for path in values if len(path) == step]:
                parent = path[-1] if path else int(roots[row])
                values |= {(*path, token): values[path] + laws[parent][token] for token in range(VOCAB)}
        best = sorted((path for path in values if path), key=lambda path: -values[path])[:budget]
        assert paths(tree, row) == set(best)
        assert tree.confidence is not None
        chances = sorted((float(one) for one in tree.confidence[row, 1:].log()), reverse=True)
        assert chances == pytest.approx([values[path] for path in best], abs=1e-6)


def test_nothing_has_a_chance_where_a_head_is_broken_or_all_is_forbidden() -> None:
    confidence = heads().log_softmax(-1)
    confidence[0, 1], confidence[1, 0] = torch.nan, -torch.inf
    confidence[2, :, 5:] = -torch.inf                                                             # what is forbidden stays so
    pool = counted().table(VOCAB, confidence.device).pool(torch.tensor([1, 2, 3]), confidence, torch.ones(ROWS), 9)
    tree = TokenTree.likeliest(pool.tokens, pool.parents, pool.chances.exp(), 10, HEADS)
    assert set(tree.depths[0][tree.present[0]].tolist()) == {0, 1} and tree.present[1].sum() == 1
    assert set(tree.tokens[2, 1:].tolist()) <= {0, 1, 2, 3, 4} and tree.present[2].all()


def test_tables_of_padded_vocabularies() -> None:
    """Tokens that were never counted are no parents; fewer are as good, if no pair speaks of the others."""
    pairs = counted()
    wide = pairs.table(VOCAB + 8, torch.device("cpu"))
    assert wide.starts.tolist() == [*pairs.starts.tolist(), *[len(pairs.tokens)] * 8] and (wide.rest[VOCAB:] == 0).all()
    few = Pairs.counted(torch.tensor([1, 1, 2, 2]), torch.tensor([3, 3, 1, 1]), VOCAB)
    assert few is not None and few.table(8, torch.device("cpu")).starts.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    with pytest.raises(DrafterMismatch, match="up to 3, the target has 3"):
        few.table(3, torch.device("cpu"))


@pytest.mark.parametrize("harm", ["starts", "tokens", "too many"])
def test_broken_pairs_are_refused(harm: str) -> None:
    """Kernels trust a table: they would read beyond it, and have room for so many pairs of a token."""
    pairs = counted()
    if harm == "starts":
        pairs.starts[4] = 10**6
    elif harm == "too many":
        pairs = Pairs(VOCAB, MOST + 1)
        pairs.starts[1:] = MOST + 1
    else:
        pairs.tokens[9] = -2
    with pytest.raises(DrafterMismatch, match="pairs"):
        pairs.table(VOCAB, torch.device("cpu"))


def standing() -> Paths:
    """Where the heads stand."""
    prefix = paths_of([[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5]]).prefix
    return Paths(prefix, TokenTree.chain(prefix.root[:, None].expand(-1, HEADS)))


class Heads(NamedTuple):
    """What heads say in three rows, as our kernels take it and as operators do; the second row knows no token 7."""

    table: Table
    logits: Tensor
    root: Tensor
    frontier: Frontier
    confidence: Tensor
    weights: Tensor

    def tree(self, nodes: int, shape: TreeShape | None) -> TokenTree:
        return CPU.run(pairs_tree, self.table, self.logits, self.frontier, self.root, nodes, shape, WEIGHT)

    @classmethod
    def speaking(cls, heat: float, vocab: int = VOCAB) -> Heads:
        logits = heads(torch.bfloat16, vocab)
        logits[1, :, 7] = -torch.inf
        wish = Sampling(temperature=heat, seed=3)
        sampler, behind = sampler_of(wish, wish, Sampling(), ops=CPU), standing()
        frontier = Frontier(behind.prefix, sampler, 99)
        confidence = sampler.confidence(sampler.gumbel_logits(logits, behind, Role.TARGET))
        return cls(counted(vocab).table(vocab, confidence.device), logits, behind.prefix.root, frontier, confidence, WEIGHT * sampler.slope)


@needs_kernels
@pytest.mark.parametrize("heat", [0.0, 0.7, 1.5])
@pytest.mark.parametrize(("nodes", "vocab"), [(1, 40), (12, 40), (63, 40), (20, 331)])
def test_kernels_draft_what_operators_draft(heat: float, nodes: int, vocab: int) -> None:
    said = Heads.speaking(heat, vocab)
    ours = said.tree(nodes, None)
    pool = said.table.pool(said.root, said.confidence, said.weights, nodes)
    theirs = TokenTree.likeliest(pool.tokens, pool.parents, pool.chances.exp(), nodes + 1, HEADS)
    assert ours.confidence is not None and theirs.confidence is not None
    assert torch.allclose(ours.confidence, theirs.confidence, atol=1e-4)
    for row in range(ROWS):
        one, other = paths(ours, row), paths(theirs, row)
        assert len(one & other) >= len(other) - (nodes > 3)                                 # the last may be a near tie
        above = ours.confidence[row].gather(0, ours.parents[row].clamp(min=0))
        assert (ours.confidence[row] <= above).all() and ours.parents[row, 0] == -1
    assert not (ours.tokens[1, 1:] == 7).any()


SHAPES = {
    "chain": TreeShape.chain(HEADS),
    "wide": TreeShape(tuple(path for path in CHOICES["mc_sim_7b_63"] if len(path) <= HEADS)),
    "small": TreeShape(((0,), (2,), (2, 1), (2, 1, 0))),
}


@needs_kernels
@pytest.mark.parametrize("heat", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_fill_a_tree_as_operators_do(heat: float, shape: str) -> None:
    said, wanted = Heads.speaking(heat), SHAPES[shape]
    ours = said.tree(len(wanted) - 1, wanted)
    theirs = said.table.shaped(said.root, said.confidence, said.weights, wanted)
    assert ours.confidence is not None and theirs.confidence is not None and torch.allclose(ours.confidence, theirs.confidence, atol=1e-4)
    assert torch.equal(ours.parents, theirs.parents) and ours.is_chain == theirs.is_chain == (shape == "chain")
    assert (ours.tokens != theirs.tokens).sum() <= 2 and not (ours.tokens[1, 1:] == 7).any()


@needs_kernels
def test_kernels_leave_out_what_is_broken() -> None:
    logits, table = heads(torch.bfloat16), counted().table(VOCAB, torch.device("cpu"))
    logits[0, 1], logits[1, 0] = torch.nan, -torch.inf
    logits[2, :, 2:] = -torch.inf
    frontier = Frontier(standing().prefix, sampler_of(*[Sampling()] * 3), 20)
    tree = CPU.run(pairs_tree, table, logits, frontier, frontier.prefix.root, 20, None, WEIGHT)
    assert set(tree.depths[0][tree.present[0]].tolist()) == {0, 1} and tree.present[1].sum() == 1
    assert tree.present[2].sum() == 1 + 2 + 4 + 8 and set(tree.tokens[2, 1:].tolist()) == {ABSENT, 0, 1}
    assert tree.confidence is not None and torch.equal(tree.confidence > 0, tree.present)
