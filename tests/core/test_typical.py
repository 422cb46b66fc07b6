"""Typical acceptance: thresholds, paths, and a root that no draft has looked at.

That it is lossy, by the distance it tells, is enumerated in tests/engine/test_lossy_engine.py.
"""

from __future__ import annotations

import pytest
import torch
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


class Fixed:
    """Draws what it is told, row by row."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def flip(self, probability: Tensor, node: int) -> Tensor:
        raise AssertionError("typical acceptance flips no coin")

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        return self.tokens


@pytest.mark.parametrize(("distribution", "entropy", "threshold"),
                         [((0.5, 0.3, 0.2), 1.029623, 0.09), ((0.25,) * 4, 1.386254, 0.075003),
                          ((0.97, 0.02, 0.01), 0.153808, 0.09)])
def test_thresholds_match_the_original_implementation(
    distribution: tuple[float, ...], entropy: float, threshold: float
) -> None:
    p = torch.tensor(distribution, dtype=torch.float64)
    assert float(Typical().threshold(p)) == pytest.approx(threshold, abs=5e-7)
    unbounded = Typical(epsilon=0.999999, delta=0.3).threshold(p)  # the entropy alone decides
    assert float(unbounded) == pytest.approx(0.3 * torch.tensor(-entropy).exp().item(), abs=5e-7)


@pytest.mark.parametrize(
    "wrong", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}, {"delta": float("nan")}]
)
def test_thresholds_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        Typical(**wrong)


SURE, SPREAD, FLAT = (0.0, 0.9, 0.1), (0.4, 0.3, 0.3), (0.0, 0.0, 1.0)
ROOT, RIGHT = (0.2, 0.5, 0.3), (0.1, 0.1, 0.8)


@pytest.mark.parametrize(("tokens", "shape", "distributions", "path", "distance"), [
    pytest.param([0, 1, 2, 2], ["0", "1", "10"], [SURE, SURE, SPREAD, SURE], [0, 2, 3],
                 [0.9, 0.7, 0], id="the longest wins over the likelier"),
    pytest.param([0, 1, 2, 0, 2], ["0", "1", "00", "10"], [ROOT, SPREAD, RIGHT, ROOT, ROOT],
                 [0, 2, 4], [0.7, 0.2, 0], id="of equally long ones the likelier wins"),
    pytest.param([0, ABSENT, 0, 2], ["0", "1", "10"], [FLAT] * 4, [0], [0, 0, 0],
                 id="absent and orphaned nodes never stand"),
])  # fmt: skip
def test_paths(tokens, shape, distributions, path, distance) -> None:
    tree = TokenTree.shaped(torch.tensor([tokens]), TreeShape.from_digits(shape))
    probs = torch.tensor([distributions], dtype=torch.float64)
    result = accept_by_typicality(tree, probs, Fixed(torch.tensor([0])), Typical())
    assert result.nodes[0, : int(result.count)].tolist() == path
    assert result.distance is not None and result.distance[0].tolist() == pytest.approx(distance)


@pytest.mark.parametrize("shape", [TreeShape.chain(3), TreeShape.branching((2, 2, 1))], ids=len)
def test_on_one_hot_distributions_it_is_the_greedy_rule(shape: TreeShape) -> None:
    dice, rows, nodes = torch.Generator().manual_seed(0), 200, len(shape)
    tree = TokenTree.shaped(torch.randint(3, (rows, nodes), generator=dice), shape)
    chosen = torch.randint(3, (rows, nodes), generator=dice)
    exact: Accepted = accept_by_matching(tree, chosen)
    distributions = torch.nn.functional.one_hot(chosen, 3).double()
    strict = Typical(epsilon=0.9999, delta=50.0)
    ours = accept_by_typicality(tree, distributions, Fixed(exact.root), strict)
    assert torch.equal(ours.count, exact.count) and len(exact.count.unique()) > 1
    for row, count in enumerate(exact.count.tolist()):      # siblings may have the same token
        result, wanted = (tree.tokens[row, item.nodes[row, :count]] for item in (ours, exact))
        assert torch.equal(result, wanted)
    assert ours.distance is not None and not ours.distance.any()


def test_root_is_unbiased_even_if_the_draft_uses_its_noise() -> None:
    """Drafts that race with the noise of the target's choice: where they are turned down the next
    token still has its distribution.

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


def test_acceptance_uses_each_rows_sampling_options() -> None:
    """Temperature and filters come before the threshold: a token they forbid cannot stand."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).expand(3, 2, 3)
    params = (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2),
              Sampling(temperature=0.2))
    paths = paths_of([[1]] * 3)
    tree = TokenTree.chain(torch.tensor([[1, 2]] * 3))
    accepted = Typical().accept(tree, logits, Frontier(paths.prefix, sampler_of(*params), 1))
    assert accepted.count.tolist() == [2, 1, 1]                             # 0.09003, 0, 0.00005
