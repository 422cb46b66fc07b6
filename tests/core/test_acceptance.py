"""Acceptance by numbers: published vectors and the edges of the rules, one row at a time.

That the rules write the target's distribution, in the whole engine, is enumerated in tests/verify.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from draftproof.core import noise
from draftproof.core.acceptance import accept_by_block, accept_by_matching, accept_by_rejection
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, TokenTree, TreeShape

both = pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])


class Recorder:
    """A `Chance` with coins decided beforehand that writes down what it was asked; one row."""

    def __init__(self, *coins: bool) -> None:
        self.coins, self.confidence, self.weights = coins, [], []

    def flip(self, probability: Tensor, node: int) -> Tensor:
        self.confidence.append(float(probability))
        return torch.tensor([self.coins[node - 1] and float(probability) > 0])

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        self.weights = (weights / weights.sum())[0].tolist()
        return weights.argmax(-1)


def distributions(*rows: list[float]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64)


def chain(drafted: tuple[int, ...], *drawn_from: list[float]) -> TokenTree:
    """Tokens after root 0, and the distribution of each."""
    nothing = [0.0] * len(drawn_from[0])
    return TokenTree.chain(torch.tensor([[0, *drafted]]), distributions(nothing, *drawn_from))


@pytest.mark.parametrize(("token", "confidence", "residual"),
                         [(0, 1, [1, 0, 0]), (1, 0.6, [1, 0, 0]), (2, 2 / 3, [1, 0, 0])])
def test_token_rule_vector(token: int, confidence: float, residual: list[float]) -> None:
    """p = [.5, .3, .2], q = [.2, .5, .3]: acceptance 1, .6, 2/3; the residual is token 0."""
    chance = Recorder(False)
    targets = distributions([0.5, 0.3, 0.2], [1, 0, 0])
    accept_by_rejection(chain((token,), [0.2, 0.5, 0.3]), targets, chance)
    assert chance.confidence == pytest.approx([confidence]) and chance.weights == residual


SAME = [[1 / 3, 2 / 3]] * 3, [[2 / 3, 1 / 3]] * 2
MIXED = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], [[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]


@pytest.mark.parametrize(("inputs", "drafted", "coins", "confidence", "residual"), [
    (SAME, (0, 0), (False, False), [0, 0.25], [0, 1]),
    (SAME, (0, 1), (False, False), [0, 1], [0, 1]),
    (SAME, (1, 0), (False, False), [1, 0.5], [0, 1]),
    (SAME, (1, 1), (True, False), [1, 1], [0, 1]),
    (MIXED, (0, 1), (False, False), [1, 1], [1, 0, 0]),
    (MIXED, (0, 1), (True, False), [1, 1], [0, 2 / 3, 1 / 3]),
    (MIXED, (0, 1), (False, True), [1, 1], [0.25, 0.25, 0.5]),
    (MIXED, (1, 1), (False, False), [0, 0.9], [1, 0, 0]),
    (MIXED, (1, 0), (False, False), [0, 0.15], [1, 0, 0]),
])  # fmt: skip
def test_block_vectors(inputs, drafted, coins, confidence, residual) -> None:
    chance = Recorder(*coins)
    accept_by_block(chain(drafted, *inputs[1]), distributions(*inputs[0]), chance)
    assert chance.confidence == pytest.approx(confidence)
    assert chance.weights == pytest.approx(residual)


def mean_accepted(rule, targets: Tensor, drafts: Tensor) -> float:
    """E[accepted] of chains of 2, by every draft and every way its coins may fall; distributions
    [2, V, V] are those after each token."""
    total, vocab = 0.0, drafts.shape[-1]
    for drafted in itertools.product(range(vocab), repeat=2):
        before = (0, *drafted)
        q = [drafts[token] for token in before[:2]]
        p = torch.stack([targets[token] for token in before])[None]
        tree = TokenTree.chain(torch.tensor([before]), torch.stack([q[0], *q])[None])
        for coins in itertools.product((False, True), repeat=2):
            chance = Recorder(*coins)
            accepted = int(rule(tree, p, chance).count) - 1
            probs = [item if coin else 1 - item
                    for coin, item in zip(coins, chance.confidence, strict=True)]
            total += accepted * math.prod(probs) * float(q[0][drafted[0]] * q[1][drafted[1]])
    return total


def test_block_verification_accepts_more_than_the_token_rule() -> None:
    """Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 by tokens, 11/9 by block; it
    never accepts less."""
    example = (distributions(*SAME[0][:2])[0], distributions(*SAME[1])[0])
    assert mean_accepted(accept_by_rejection, *example) == pytest.approx(10 / 9)
    assert mean_accepted(accept_by_block, *example) == pytest.approx(11 / 9)
    for seed in range(5):
        dice = torch.Generator().manual_seed(seed)
        sample = (1.5 * torch.randn(2, 3, 3, generator=dice, dtype=torch.float64)).softmax(-1)
        by_token, by_block = (mean_accepted(rule, *sample)
                              for rule in (accept_by_rejection, accept_by_block))
        assert by_block >= by_token - 1e-12


@both
def test_identical_distributions_accept_every_token(rule) -> None:
    same = torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)
    assert mean_accepted(rule, same, same) == pytest.approx(2)


@both
@pytest.mark.parametrize("beyond", [math.nan, 0.2])
def test_ragged_rows_equal_their_shorter_chains(rule, beyond: float) -> None:
    """Absent nodes, whatever their distribution holds (NaN too), change no coin and no residual."""
    dice = torch.Generator().manual_seed(3)
    for present, coins in itertools.product(range(4), itertools.product([False, True], repeat=3)):
        drawn, probs = torch.rand(2, 1, 4, 5, generator=dice, dtype=torch.float64).softmax(-1)
        tokens, end = torch.tensor([[1, 2, 3, 4]]), present + 1
        alone, wide = Recorder(*coins), Recorder(*coins)
        short = rule(TokenTree.chain(tokens[:, :end], drawn[:, :end]), probs[:, :end], alone)
        tokens[:, end:], drawn[:, end:] = ABSENT, beyond
        long = rule(TokenTree.chain(tokens, drawn), probs, wide)
        assert int(long.count) == int(short.count)
        assert wide.confidence[:present] == pytest.approx(alone.confidence)
        assert wide.weights == pytest.approx(alone.weights)
        assert not any(wide.confidence[present:])


def test_siblings_outside_the_draft_support_are_never_accepted() -> None:
    """Siblings beyond the support of q never stand, and what comes then is the residual, not q."""
    tree = TokenTree.shaped(torch.tensor([[0, 1, 2]]), TreeShape.branching((2,)),
                            distributions([0, 0, 0], [0, 1, 0], [0, 1, 0]))
    chance = Recorder(False, True)
    targets = distributions([0.5, 0.2, 0.3], [1, 0, 0], [1, 0, 0])
    accepted = accept_by_rejection(tree, targets, chance)
    assert chance.confidence == pytest.approx([0.2, 0]) and int(accepted.count) == 1
    assert chance.weights == pytest.approx([0.625, 0, 0.375])


@both
def test_zero_probability_tokens_are_never_accepted(rule) -> None:
    """p = 0 has probabilities 0, and the keyed coin is strict: at probabilities 0 it never falls
    (`u <= p` takes what cannot be at u = 0, as in transformers)."""
    chance = Recorder(False)
    rule(chain((1,), [0.1, 0.8, 0.1]), distributions([0.5, 0, 0.5], [1, 0, 0]), chance)
    assert chance.confidence == [0]
    sampler = Sampler([SamplingParams(Sampling(temperature=1.0), 1)])
    root = torch.zeros(1, dtype=torch.int64)
    keyed = sampler.chance(Prefix(root[:, None], root))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "uniform", lambda _: torch.zeros(1, 1))
        assert not keyed.flip(torch.zeros(1), 1)


def test_matching_ends_where_no_token_is_allowed() -> None:
    accepted = accept_by_matching(TokenTree.chain(torch.tensor([[5, 6, ABSENT], [5, 6, 7]])),
                                  torch.tensor([[6, -2, 0], [6, 7, 9]]))
    assert (accepted.count.tolist(), accepted.root.tolist()) == ([2, 3], [-2, 9])
