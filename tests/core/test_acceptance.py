"""Acceptance is exact in law: all outcomes of the loop are enumerated; wrong ones are caught."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from helpers.distribution import (
    DrawnRule,
    Law,
    Round,
    Text,
    Worlds,
    constant,
    distance,
    drawn_law,
    drawn_round,
    likeliest,
    loop_law,
    matched_round,
    one_hot,
    path_of,
    random_law,
    text_law,
)
from helpers.mistakes import BLOCK_MISTAKES, TOKEN_MISTAKES, block_rule, token_rule
from torch import Tensor

from draftproof.core.acceptance import accept_by_block, accept_by_rejection
from draftproof.core.tree import TreeShape

EXACT = 1e-12
CHAINS = [TreeShape.chain(length) for length in (1, 2, 3)]
TREES = [TreeShape.branching(children) for children in ((2,), (3,), (2, 2), (3, 1))]
PAIRS: dict[str, tuple[Law, Law]] = {
    "unrelated": (random_law(3, 1), random_law(3, 2)),
    "alike": (random_law(3, 12, 0.5), random_law(3, 13, 0.5)),
    "equal": (random_law(3, 1), random_law(3, 1)),
    "target with impossible tokens": (random_law(3, 3, zeros=1), random_law(3, 4)),
    "draft with impossible tokens": (random_law(3, 3), random_law(3, 4, zeros=1)),
    "disjoint at times": (random_law(3, 5, zeros=2), random_law(3, 6, zeros=2)),
    "greedy target": (one_hot(random_law(3, 7)), random_law(3, 8)),
    "greedy both": (one_hot(random_law(3, 7)), one_hot(random_law(3, 9))),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
@pytest.mark.parametrize("shape", CHAINS + TREES,
                         ids=lambda shape: str(len(shape)) + ("c" if shape.is_chain else "t"))
def test_rejection_writes_the_target_law(pair: str, shape: TreeShape) -> None:
    if len(shape) == 7 and pair not in ("unrelated", "target with impossible tokens",
                                        "disjoint at times"):
        return  # 41472 worlds a round: three pairs say it all
    target, draft = PAIRS[pair]
    # a whole round and its bonus token; rounds that stop early are followed by others
    length = len(shape.levels)
    written = drawn_law(accept_by_rejection, shape, target, draft, 3, length)
    assert distance(written, text_law(target, 3, length)) < EXACT


@pairs
@pytest.mark.parametrize("shape", CHAINS, ids=len)
def test_block_writes_the_target_law(pair: str, shape: TreeShape) -> None:
    target, draft = PAIRS[pair]
    length = len(shape.levels)
    assert (
        distance(
            drawn_law(accept_by_block, shape, target, draft, 3, length), text_law(target, 3, length)
        )
        < EXACT
    )


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
def test_four_tokens_and_a_longer_text(rule) -> None:
    target, draft = random_law(4, 21), random_law(4, 22, zeros=1)
    written = drawn_law(rule, TreeShape.chain(2), target, draft, 4, 4)
    assert distance(written, text_law(target, 4, 4)) < EXACT


@pairs
@pytest.mark.parametrize("shape", [*CHAINS, TREES[0], TREES[2]],
                         ids=lambda shape: str(shape.parents))
def test_matching_writes_the_target_law(pair: str, shape: TreeShape) -> None:
    target, draft = PAIRS[pair]
    written = loop_law(lambda text, root: _matched(text, root, shape, target, draft), 4)
    assert distance(written, text_law(target, 3, 4)) < EXACT


def test_matching_accepts_the_mass_of_the_drafted_paths() -> None:
    """E[accepted] = the sum over drafted nodes of p(path): the bound no rule can pass (B.4)."""
    target, draft, shape = random_law(3, 1), random_law(3, 2), TREES[2]
    tokens = likeliest((), 1, shape, draft)
    laws = [_path_mass(target, (), tokens, shape, node) for node in range(1, len(shape))]
    assert matched_round(tokens, (), shape, target, 3).accepted == pytest.approx(
        sum(laws), abs=EXACT
    )


# E[accepted] and published numbers ----------------------------------------------------------------


@pairs
def test_block_accepts_the_sum_of_its_weights_and_never_less_than_rejection(pair: str) -> None:
    target, draft = PAIRS[pair]
    for shape, root in itertools.product(CHAINS, range(3)):
        by_token = drawn_round(accept_by_rejection, (), root, shape, target, draft, 3).accepted
        by_block = drawn_round(accept_by_block, (), root, shape, target, draft, 3).accepted
        assert by_block == pytest.approx(_mean_weight((root,), len(shape) - 1, target, draft),
                                         abs=EXACT)
        assert by_block >= by_token - EXACT


def test_example_of_the_block_paper() -> None:
    """Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 by tokens, 11/9 by block."""
    target, draft = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    means = [drawn_round(rule, (), 0, TreeShape.chain(2), target, draft, 2).accepted
             for rule in (accept_by_rejection, accept_by_block)]
    assert means == pytest.approx([10 / 9, 11 / 9], abs=EXACT)


# Edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
def test_equal_laws_accept_everything(rule) -> None:
    law = random_law(3, 1)
    assert drawn_round(rule, (), 1, TreeShape.chain(3), law, law, 3).accepted == pytest.approx(
        3, abs=EXACT
    )


# Wrong rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["", *TOKEN_MISTAKES])
def test_wrong_token_rules_are_caught(mistake: str) -> None:
    error = _worst(partial(token_rule, mistake=mistake), TREES[0])
    assert error > 1e-3 if mistake else error < EXACT


@pytest.mark.parametrize("mistake", ["", *BLOCK_MISTAKES])
def test_wrong_block_rules_are_caught(mistake: str) -> None:
    error = _worst(partial(block_rule, mistake=mistake), CHAINS[1])
    assert error > 1e-3 if mistake else error < EXACT


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
@pytest.mark.parametrize("lie", ["argmax weighed as drawn", "kept only when likely"])
def test_drafts_that_lie_about_their_law_are_caught(rule, lie: str) -> None:
    """A rule is exact for the law that tokens were drawn from; where they were not, it is seen."""
    target, draft = PAIRS["unrelated"]
    written = drawn_law(rule, CHAINS[1], target, Liar(draft, lie), 3, 3)
    assert distance(written, text_law(target, 3, 3)) > 1e-3


@pytest.mark.parametrize(
    "mistake", ["deepest hit without its ancestors", "the drafted token instead of the pick"]
)
def test_wrong_matching_is_caught(mistake: str) -> None:
    target, draft, shape = *PAIRS["unrelated"], CHAINS[1]

    def one_round(text: Text, root: int) -> Round:
        tokens = likeliest(text, root, shape, draft)
        right = matched_round(tokens, text, shape, target, 3)
        if mistake.startswith("deepest"):  # a hit at depth 2 takes depth 1 along
            hit = float(target(path_of(text, tokens, shape, 1))[tokens[2]])
            wrong = {emitted: confidence * (1 - hit) for emitted, confidence in right.law.items()
                     if len(emitted) == 1}
            law = {**right.law, **wrong}
            for emitted, confidence in wrong.items():
                law[(*tokens[1:], emitted[0])] = law.get(
                    (*tokens[1:], emitted[0]), 0
                ) + confidence * hit / (1 - hit)
            return Round(law, 0)
        return Round({(tokens[1],): 1.0}, 0)

    assert distance(loop_law(one_round, 3), text_law(target, 3, 3)) > 1e-3


class Liar:
    """Tokens are drawn by enumeration from one law, and the tree shows another."""

    def __init__(self, law: Law, lie: str) -> None:
        self.law, self.lie = law, lie

    def __call__(self, text: Text) -> Tensor:
        return Shown(self.law(text), self.lie)


class Shown(Tensor):
    """A law [V] as the tree shows it; the enumeration asks `clone` for the one it draws from."""

    def __new__(cls, law: Tensor, lie: str) -> Shown:
        shown = law.as_subclass(cls)
        shown.lie = lie
        return shown

    def clone(self, *_: object, **__: object) -> Tensor:
        law = self.as_subclass(Tensor)
        return (torch.nn.functional.one_hot(law.argmax(), len(law)).double()
                if self.lie.startswith("argmax") else law.square())


def _worst(rule: DrawnRule, shape: TreeShape) -> float:
    """The largest error over pairs of laws that differ in several tokens each way."""
    weighed = [(random_law(4, 31, 0.8), random_law(4, 32, 0.8)),
               (random_law(4, 33), random_law(4, 34, zeros=1))]
    return max(distance(drawn_law(rule, shape, *pair, 4, 3), text_law(pair[0], 4, 3))
               for pair in weighed)


def _matched(text: Text, root: int, shape: TreeShape, target: Law, draft: Law) -> Round:
    return matched_round(likeliest(text, root, shape, draft), text, shape, target, 3)


def _path_mass(target: Law, text: Text, tokens: list[int], shape: TreeShape, node: int) -> float:
    path = path_of(text, tokens, shape, node)[len(text) :]
    return float(torch.stack([target((*text, *path[:place]))[path[place]]
                              for place in range(1, len(path))]).prod())


def _mean_weight(
    text: Text, length: int, target: Law, draft: Law, weight: float = 1.0, confidence: float = 1.0
) -> float:
    """The sum over i of E[P_i], from the definition."""
    if length == 0:
        return 0.0
    total = 0.0
    for token in draft(text).nonzero()[:, 0].tolist():
        q = float(draft(text)[token])
        here = min(1.0, weight * float(target(text)[token]) / q)
        total += confidence * q * here + _mean_weight((*text, token), length - 1, target, draft,
                                                      here, confidence * q)
    return total


def test_the_checker_counts_all_of_probability() -> None:
    target, draft = PAIRS["unrelated"]
    one = drawn_round(accept_by_rejection, (), 0, TREES[2], target, draft, 3)
    assert sum(one.law.values()) == pytest.approx(1, abs=EXACT)
    assert isinstance(Worlds(torch.zeros(1, 1), torch.zeros(1), torch.ones(1)).odds, Tensor)
