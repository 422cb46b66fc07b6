"""Typical acceptance: thresholds, paths, and that it is lossy by the distance it tells."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from helpers.distribution import (
    Law,
    Text,
    constant,
    distance,
    likeliest,
    one_hot,
    random_law,
    strayed,
    target_laws,
    text_law,
)
from scipy.stats import chi2
from tiny import paths_of, random_logits, sampler_of
from torch import Tensor

from draftproof.core.acceptance import accept_by_matching
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.core.typical import Typical, accept_by_typicality
from draftproof.errors import BadInput

EXACT = 1e-12
SHAPES = {"chain": TreeShape.chain(3), "wide": TreeShape.branching((2,)),
          "tree": TreeShape.branching((2, 2, 1)),
          "ragged": TreeShape.from_digits(["0", "1", "2", "00", "10", "11", "000"])}
LAWS: dict[str, tuple[Law, Law]] = {
    "unrelated": (random_law(3, 1), random_law(3, 2)),
    "alike": (random_law(3, 12, 0.5), random_law(3, 13, 0.5)),
    "with impossible tokens": (random_law(3, 3, zeros=1), random_law(3, 4)),
    "sharp": (random_law(3, 5, 4.0), random_law(3, 5, 4.0)),
}


class Fixed:
    """Draws what it is told, row by row, and keeps the law it was asked to draw from."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def flip(self, probability: Tensor, node: int) -> Tensor:
        raise AssertionError("typical acceptance flips no coin")

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        self.weights = weights
        return self.tokens


def one_round(
    text: Text, root: int, shape: TreeShape, target: Law, draft: Law, typical: Typical
) -> tuple[Accepted, Tensor, Text]:
    """A row per token that may be drawn, what each weighs, and the accepted tokens."""
    tokens = likeliest(text, root, shape, draft)
    laws = target_laws(text, tokens, shape, target, 3)
    tree = TokenTree.shaped(torch.tensor(tokens).expand(3, -1), shape)
    chance = Fixed(torch.arange(3))
    accepted = accept_by_typicality(tree, laws.expand(3, -1, -1), chance, typical)
    path = [tokens[node] for node in accepted.nodes[0, 1 : int(accepted.count[0])].tolist()]
    return accepted, chance.weights[0], tuple(path)


def written(
    shape: TreeShape, target: Law, draft: Law, typical: Typical, length: int
) -> tuple[dict[Text, float], float]:
    """The law of the `length` tokens written behind root 0, and the sum of the distances told."""
    open_: list[defaultdict[Text, float]] = [defaultdict(float) for _ in range(length + 1)]
    open_[0][()] = 1.0
    told = 0.0
    for texts in open_[:length]:
        for text, weight in texts.items():
            *before, root = (0, *text)
            accepted, law, path = one_round(tuple(before), root, shape, target, draft, typical)
            assert accepted.distance is not None
            left = length - len(text)
            for token, confidence in enumerate(law.tolist()):
                tokens = (*path, token)[:left]
                open_[len(text) + len(tokens)][(*text, *tokens)] += weight * confidence
                told += weight * confidence * float(accepted.distance[token, : len(tokens)].sum())
    return dict(open_[length]), told


# Thresholds and paths -----------------------------------------------------------------------------


@pytest.mark.parametrize(("law", "entropy", "threshold"),
                         [((0.5, 0.3, 0.2), 1.029623, 0.09), ((0.25,) * 4, 1.386254, 0.075003),
                          ((0.97, 0.02, 0.01), 0.153808, 0.09)])
def test_thresholds_are_those_of_the_original(
    law: tuple[float, ...], entropy: float, threshold: float
) -> None:
    p = torch.tensor(law, dtype=torch.float64)
    assert float(Typical().threshold(p)) == pytest.approx(threshold, abs=5e-7)
    unbounded = Typical(epsilon=0.999999, delta=0.3).threshold(p)  # the entropy alone decides
    assert float(unbounded) == pytest.approx(0.3 * torch.tensor(-entropy).exp().item(), abs=5e-7)


@pytest.mark.parametrize(
    "wrong", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}, {"delta": float("nan")}]
)
def test_thresholds_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        Typical(**wrong)


def accepted_of(tokens: list[int], shape: TreeShape, *laws: tuple[float, ...]) -> Accepted:
    """One row, a law per node; the token drawn behind the path is 0."""
    probs = torch.tensor([laws], dtype=torch.float64)
    return accept_by_typicality(TokenTree.shaped(torch.tensor([tokens]), shape), probs,
                                Fixed(torch.tensor([0])), Typical())


def test_the_longest_path_wins_over_the_likelier_one() -> None:
    sure, spread = (0.0, 0.9, 0.1), (0.4, 0.3, 0.3)
    found = accepted_of([0, 1, 2, 2], TreeShape.from_digits(["0", "1", "10"]), sure, sure, spread,
                        sure)
    assert found.nodes[0, :3].tolist() == [0, 2, 3]
    assert found.distance is not None and found.distance[0].tolist() == pytest.approx(
        [0.9, 0.7, 0.0]
    )


def test_of_equally_long_paths_the_likelier_wins() -> None:
    root, left, right = (0.2, 0.5, 0.3), (0.4, 0.3, 0.3), (0.1, 0.1, 0.8)
    shape = TreeShape.from_digits(["0", "1", "00", "10"])
    tokens = [0, 1, 2, 0, 2]  # 0.5 * 0.4 against 0.3 * 0.8
    assert accepted_of(tokens, shape, root, left, right, root, root).nodes[0].tolist() == [0, 2, 4]


def test_absent_and_orphaned_nodes_never_stand() -> None:
    flat = (0.0, 0.0, 1.0)  # ABSENT must not read as the last token
    found = accepted_of([0, ABSENT, 0, 2], TreeShape.from_digits(["0", "1", "10"]), flat, flat,
                        flat, flat)
    assert found.count.tolist() == [1]
    assert found.distance is not None and not found.distance.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_on_one_hot_laws_it_is_the_greedy_rule(shape: str) -> None:
    target, draft = one_hot(random_law(3, 1)), random_law(3, 2)
    lengths = set()
    for text in itertools.product(range(3), repeat=3):
        tokens = likeliest(text[:2], text[2], SHAPES[shape], draft)
        laws = target_laws(text[:2], tokens, SHAPES[shape], target, 3)[None]
        tree = TokenTree.shaped(torch.tensor([tokens]), SHAPES[shape])
        exact = accept_by_matching(tree, laws.argmax(-1))
        ours = accept_by_typicality(tree, laws, Fixed(exact.root),
                                    Typical(epsilon=0.9999, delta=50.0))
        assert ours.count.tolist() == exact.count.tolist() and torch.equal(ours.nodes, exact.nodes)
        assert ours.distance is not None and not ours.distance.any()
        lengths |= {int(exact.count[0])}
    assert len(lengths) > 1


# Lossy, and by how much ---------------------------------------------------------------------------


@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_lossy_and_tells_by_how_much(shape: str, laws: str) -> None:
    """The text has another law than the target's, and its distance is the one that is told."""
    target, draft = LAWS[laws]
    law, told = written(SHAPES[shape], target, draft, Typical(), 4)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, text_law(target, 3, 4)) > 0.05, (
        "this is no longer lossy; has it become exact?"
    )
    assert told == pytest.approx(strayed(law, lambda text: target((0, *text)), 4), abs=EXACT)
    assert told > 0.05
    assert distance(law, text_law(target, 3, 4)) <= told + EXACT  # distances add up at most


def test_where_nothing_is_typical_the_law_is_the_target_law() -> None:
    """The control: thresholds that no token passes leave the exact law, and a distance of zero."""
    target, draft = constant(0.4, 0.35, 0.25), random_law(3, 2)
    law, told = written(SHAPES["tree"], target, draft, Typical(epsilon=0.99, delta=50.0), 4)
    assert distance(law, text_law(target, 3, 4)) < EXACT
    assert told == 0.0


def test_the_root_is_the_targets_even_if_the_draft_knew_its_noise() -> None:
    """Drafts that race with the noise of the target's choice: where they are turned down the next
    token still has its law.

    The control takes the target's own choice there, which the draft has looked at: it must be seen.
    """
    rows = 20_000
    p, q = random_logits(1, 1, 8, seed=3) / 3, random_logits(1, 1, 8, seed=4) / 3
    sampler = sampler_of(*[Sampling(temperature=1.0, seed=seed) for seed in range(rows)])
    start = paths_of([[1, 2]] * rows)
    token = sampler.gumbel_logits(q.expand(rows, 1, -1), start, Role.TARGET).argmax(-1)
    tree = TokenTree.chain(torch.cat([start.prefix.root[:, None], token], 1))
    frontier = Frontier(start.prefix, sampler, 1)
    accepted = Typical(epsilon=0.1, delta=50.0).accept(tree, p.expand(rows, 2, -1), frontier)
    down = accepted.count == 1
    assert 0.2 < float(down.float().mean()) < 0.8
    assert chance_of(accepted.root[down], p) > 1e-6
    assert chance_of(accepted.root[~down], p) > 1e-6
    assert chance_of(sampler.sample(p.expand(rows, 1, -1), start)[down, 0], p) < 1e-6


def chance_of(tokens: Tensor, logits: Tensor) -> float:
    """P-value of a chi-square test of `tokens` [n] against softmax(logits)."""
    expected = logits[0, 0].softmax(-1) * len(tokens)
    seen = torch.bincount(tokens, minlength=len(expected))
    return float(chi2.sf(float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1))


def test_the_law_judged_is_that_of_the_rows_own_sampling() -> None:
    """Temperature and filters come before the threshold: a token they forbid cannot stand."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).expand(3, 2, 3)
    params = (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2),
              Sampling(temperature=0.2))
    paths = paths_of([[1]] * 3)
    tree = TokenTree.chain(torch.tensor([[1, 2]] * 3))
    accepted = Typical().accept(tree, logits, Frontier(paths.prefix, sampler_of(*params), 1))
    assert accepted.count.tolist() == [2, 1, 1]                             # 0.09003, 0, 0.00005
