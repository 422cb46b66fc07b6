"""Bounds: the best trees, what entropy allows, from where drafts pay; against brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product

import pytest
import torch

from draftproof.core.params import Sampling
from draftproof.plan.limits import STEPS, break_even, ceiling, entropy, trees
from draftproof.plan.recording import Drafts, Text
from draftproof.training.draft_trees import RANKS, optimal

Path = tuple[int, ...]
SHARES = ((0.5, 0.3, 0.1), (0.6, 0.1, 0.2), (0.3, 0.25, 0.2))


def best_of_all(shares: Sequence[Sequence[float]], nodes: int) -> float:
    """The most that any tree of `nodes` nodes is worth, if steps are independent."""
    paths = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    worth = {path: math.prod(shares[at][rank] for at, rank in enumerate(path)) for path in paths}
    whole = (some for some in combinations(paths, nodes)
             if all(len(path) == 1 or path[:-1] in some for path in some))
    return max(sum(worth[path] for path in some) for some in whole)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_dynamic_programme_finds_the_best_tree_of_all(nodes: int) -> None:
    """Positions are every combination of ranks as often as its share says."""
    ranks = torch.tensor([0, 1, 2, RANKS])
    times = [torch.tensor([*step, 1 - sum(step)]).mul(20).round().long() for step in SHARES]
    columns = [ranks.repeat_interleave(count) for count in times]
    tree = optimal(torch.cartesian_prod(*columns), nodes, 3)
    worth = sum(math.prod(SHARES[at][rank] for at, rank in enumerate(path)) for path in tree)
    assert len(tree) == nodes and worth == pytest.approx(best_of_all(SHARES, nodes))


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_ceiling_is_the_best_tree_that_knows_the_distribution(nodes: int) -> None:
    chances = torch.tensor(((1.0, 0.0, 0.0), *SHARES))          # of the prompt's end and 3 tokens
    known = (torch.zeros(0), torch.zeros(0), torch.cat([chances, torch.zeros(1, 3)]))
    text = Text([0] * 5, 1, Sampling(temperature=1.0), None, known)
    assert ceiling([text], nodes) == pytest.approx(1 + best_of_all(SHARES, nodes))


def test_entropy_counts_new_tokens_alone() -> None:
    text = Text([0] * 4, 2, Sampling(), None, None, torch.tensor([9.0, 1.0, 3.0, 9.0]))
    assert entropy([text]) == 2.0


def test_break_even_is_where_a_chain_gives_what_its_round_costs() -> None:
    rate = break_even(4, 1.75)
    assert rate is not None and sum(rate**i for i in range(5)) == pytest.approx(1.75)
    assert break_even(4, 0.9) == 0 and break_even(4, 5.1) is None


def test_trees_of_a_draft_that_is_always_right_give_whole_rounds() -> None:
    text = Text(list(range(38)), 2, Sampling())
    right = Drafts([], [], torch.zeros(38, dtype=torch.long))
    for nodes, chain, grown, best in trees([text, text], [right, right]):
        depth = min(nodes, STEPS)
        rounds = math.ceil(35 / (1 + depth))                    # the first token is the prompt's
        assert chain == grown == best == pytest.approx(35 / rounds)
    assert trees([text], [right]) == []
