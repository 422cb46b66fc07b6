"""Acceptance by numbers: published vectors, and the edges of the rules, one row at a time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers.distribution import Text, constant, drawn_round
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import accept_by_block, accept_by_matching, accept_by_rejection
from draftproof.core.ops import TORCH
from draftproof.core.tree import ABSENT, TokenTree, TreeShape

EXACT = 1e-12


def test_token_rule_vector() -> None:
    """A.11: p = [.5, .3, .2], q = [.2, .5, .3]: acceptance 1, .6, 2/3; the residual is token 0."""
    confidence, residual = {}, {}
    for token in range(3):
        tree = _chain([0, token], [[0, 0, 0], [0.2, 0.5, 0.3]])
        chance = Recorder([False])
        accept_by_rejection(tree, _laws([0.5, 0.3, 0.2], [1, 0, 0]), chance)
        confidence[token], residual[token] = chance.confidence[0], chance.weights
    assert confidence == pytest.approx({0: 1, 1: 0.6, 2: 2 / 3})
    assert residual[1] == pytest.approx([1, 0, 0])
    one = drawn_round(accept_by_rejection, (), 0, TreeShape.chain(1), constant(0.5, 0.3, 0.2),
                      constant(0.2, 0.5, 0.3), 3)
    assert one.accepted == pytest.approx(0.7, abs=EXACT)


SAME = [[1 / 3, 2 / 3]] * 3, [[2 / 3, 1 / 3]] * 2


MIXED = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], [[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]


@pytest.mark.parametrize(("laws", "drafted", "confidence"),
                         [(SAME, (0, 0), [0, 0.25]), (SAME, (0, 1), [0, 1]),
                          (SAME, (1, 0), [1, 0.5]), (SAME, (1, 1), [1, 1]), (MIXED, (0, 1), [1, 1]),
                          (MIXED, (1, 1), [0, 0.9]), (MIXED, (1, 0), [0, 0.15])])
def test_block_vectors(
    laws: tuple[list[list[float]], list[list[float]]], drafted: Text, confidence: list[float]
) -> None:
    """B.1: the coins of block verification."""
    chance = Recorder([False, False])
    accept_by_block(_chain([0, *drafted], [[0.0] * len(laws[0][0]), *laws[1]]), _laws(*laws[0]),
                    chance)
    assert chance.confidence == pytest.approx(confidence)


@pytest.mark.parametrize(("coins", "residual"),
                         [([False, False], [1, 0, 0]), ([True, False], [0, 2 / 3, 1 / 3]),
                          ([False, True], [0.25, 0.25, 0.5])])
def test_block_residual_vectors(coins: list[bool], residual: list[float]) -> None:
    chance = Recorder(coins)
    accept_by_block(_chain([0, 0, 1], [[0.0] * 3, *MIXED[1]]), _laws(*MIXED[0]), chance)
    assert chance.weights == pytest.approx(residual)


@pytest.mark.parametrize(("drafted", "coins"), [((0, 0), [False, False]), ((1, 1), [True, False])])
def test_block_residual_is_the_other_token(drafted: Text, coins: list[bool]) -> None:
    chance = Recorder(coins)
    accept_by_block(_chain([0, *drafted], [[0.0] * 2, *SAME[1]]), _laws(*SAME[0]), chance)
    assert chance.weights == pytest.approx([0, 1])


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
def test_a_ragged_row_is_as_its_shorter_chain(rule) -> None:
    """Absent nodes, whatever their law holds (NaN too), change no coin and no residual."""
    generator = torch.Generator().manual_seed(3)
    for present, coins in itertools.product(range(4), itertools.product([False, True], repeat=3)):
        laws, probs = (torch.rand(1, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
                       for _ in range(2))
        tokens = torch.tensor([[1, 2, 3, 4]])
        alone = Recorder(list(coins))
        short = rule(TokenTree.chain(tokens[:, : present + 1], laws[:, : present + 1]),
                     probs[:, : present + 1], alone)
        wide = Recorder(list(coins))
        tokens[:, present + 1 :] = ABSENT
        laws[:, present + 1 :] = torch.nan
        long = rule(TokenTree.chain(tokens, laws), probs, wide)
        assert int(long.count) == int(short.count)
        assert wide.confidence[:present] == pytest.approx(alone.confidence)
        assert wide.weights == pytest.approx(alone.weights)
        assert not any(wide.confidence[present:])


def test_nothing_left_of_the_draft_law_ends_a_family() -> None:
    """Siblings beyond the support of q never stand, and what comes then is the residual, not q."""
    tree = TokenTree.shaped(torch.tensor([[0, 1, 2]]), TreeShape.branching((2,)),
                            _laws([0, 0, 0], [0, 1, 0], [0, 1, 0]))
    chance = Recorder([False, True])
    accepted = accept_by_rejection(tree, _laws([0.5, 0.2, 0.3], [1, 0, 0], [1, 0, 0]), chance)
    assert chance.confidence == pytest.approx([0.2, 0])
    assert chance.weights == pytest.approx([0.625, 0, 0.375])
    assert int(accepted.count) == 1


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
def test_what_cannot_be_is_not_accepted(rule) -> None:
    """p = 0 has odds 0, and the keyed coin is strict: at odds 0 it never falls."""
    chance = Recorder([False])
    rule(_chain([0, 1], [[0, 0, 0], [0.1, 0.8, 0.1]]), _laws([0.5, 0, 0.5], [1, 0, 0]), chance)
    assert chance.confidence == [0]


def test_rules_that_weigh_need_a_law() -> None:
    for rule in (accept_by_rejection, accept_by_block):
        with pytest.raises(ValueError, match="law the drafts were drawn from"):
            rule(TokenTree.chain(torch.tensor([[0, 1]])), _laws([0.5, 0.5], [0.5, 0.5]),
                 Recorder([True]))


def test_matching_ends_where_nothing_can_be_picked() -> None:
    accepted = accept_by_matching(TokenTree.chain(torch.tensor([[5, 6, ABSENT], [5, 6, 7]])),
                                  torch.tensor([[6, -2, 0], [6, 7, 9]]))
    assert (accepted.count.tolist(), accepted.root.tolist()) == ([2, 3], [-2, 9])


def test_loose_coins_are_caught() -> None:
    """`u <= p` takes what cannot be at u = 0 (HF utils.py does): the coin must be strict."""
    chance = object.__new__(acceptance.KeyedChance)
    chance.keys, chance.position = (torch.zeros(1, 2, dtype=torch.int32),
                                    torch.zeros(1, 1, dtype=torch.int64))
    chance.ops = TORCH
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "noise",
                      SimpleNamespace(stream=lambda *_: None, uniform=lambda _: torch.zeros(1, 1)))
        assert not chance.flip(torch.zeros(1), 1)


class Recorder:
    """A `Chance` with coins decided beforehand that writes down what it was asked; one row."""

    def __init__(self, coins: list[bool]) -> None:
        self.coins, self.confidence, self.weights = coins, [], []

    def flip(self, probability: Tensor, node: int) -> Tensor:
        self.confidence.append(float(probability))
        return torch.tensor([self.coins[node - 1] and float(probability) > 0])

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        self.weights = (weights / weights.sum())[0].tolist()
        return weights.argmax(-1)


def _laws(*rows: list[float]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64)


def _chain(tokens: list[int], laws: list[list[float]]) -> TokenTree:
    return TokenTree.chain(torch.tensor([tokens]), _laws(*laws))
