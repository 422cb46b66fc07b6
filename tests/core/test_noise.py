"""The noise: streams are independent, its laws are right, and every bit is fixed by its key.

The chi-square tests have fixed seeds, so they always say the same; by law one seed in a million
raises a false alarm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from tiny import CPU
from torch import Tensor

from draftproof.core import acceptance, noise
from draftproof.core.acceptance import RULES
from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.noise import Role
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.draft_model import DraftModel

ALARM = 1e-6
SEEDS = [0, 1, -1, 2**31, -(2**31), 2**40 + 7, 2**63 - 1, -(2**63), 0xDEADBEEF]


def surprise(counts: Tensor, law: Tensor) -> float:
    """Chi-square p-value of `counts` under `law`."""
    expected = law.double() * counts.sum()
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1))


def streams(
    seeds: Sequence[int], role: Role, places: Sequence[int], origin: int | None = None
) -> Tensor:
    keys = noise.row_keys(list(seeds), [0] * len(seeds))
    place = torch.tensor(places).expand(len(seeds), -1)
    return noise.stream(keys, role, place,
                        None if origin is None else torch.full_like(place, origin))


# The hash -----------------------------------------------------------------------------------------


def mix(bits: int) -> int:
    """lowbias32 on unsigned words."""
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D & 0xFFFFFFFF
    bits ^= bits >> 15
    bits = bits * 0x846CA68B & 0xFFFFFFFF
    return bits ^ bits >> 16


def reference(seed: int, sample: int, role: int, place: int, origin: int) -> tuple[int, int]:
    """The stream of a draw, in whole numbers."""
    first, second = (seed & 0xFFFFFFFF,
                     (seed >> 32 & 0xFFFFFFFF) ^ (sample * 0x9E3779B9 & 0xFFFFFFFF))
    low = mix(first ^ place * 0x9E3779B9 & 0xFFFFFFFF)
    low = mix(low + 0x85EBCA6B * (role + 1) & 0xFFFFFFFF)
    high = mix(mix(second + low & 0xFFFFFFFF) ^ origin * 0x85EBCA6B & 0xFFFFFFFF)
    return mix(low ^ high * 0x9E3779B9 & 0xFFFFFFFF), high


@pytest.mark.parametrize("seed", SEEDS)
def test_every_bit_is_that_of_whole_numbers(seed: int) -> None:
    """Wrap-around int32 arithmetic, at positions beyond 2^16, seeds of 64 bits, either sign."""
    for sample, role, place, origin in itertools.product(
        (0, 1, 9), Role, (0, 1, 65_535, 65_537, 1_000_003), (0, 70_001)
    ):
        keys = noise.row_keys([seed], [sample])
        found = noise.stream(keys, role, torch.tensor([[place]]), torch.tensor([[origin]]))[0, 0]
        low, high = reference(seed, sample, role, place, origin)
        assert [int(word) & 0xFFFFFFFF for word in found] == [low, high]
        gumbel = noise.gumbel(found, 5)
        for token in range(5):
            bits = mix(mix(low ^ token * 0x9E3779B9 & 0xFFFFFFFF) + high & 0xFFFFFFFF) & 0x7FFFFFFF
            unit = min((bits + 0.5) / 2**31, 1 - 2.0**-24)
            assert float(gumbel[token]) == pytest.approx(-math.log(-math.log1p(-unit)), rel=2e-5,
                                                         abs=2e-5)
        coin = (mix(mix(low) + high & 0xFFFFFFFF) & 0x7FFFFFFF) + 0.5
        assert float(noise.uniform(found)) == pytest.approx(min(coin / 2**31, 1 - 2.0**-24),
                                                            abs=1e-7)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """Alone or in a batch, in any order of rows and places: the same bits."""
    places = [3, 70_000, 5, 5]
    together = noise.gumbel(streams(SEEDS, Role.TARGET, places), 33)
    for row, seed in enumerate(SEEDS):
        for column, place in enumerate(places):
            assert torch.equal(together[row, column],
                               noise.gumbel(streams([seed], Role.TARGET, [place]), 33)[0, 0])
    assert torch.equal(together[..., :7], noise.gumbel(streams(SEEDS, Role.TARGET, places), 7)), (
        "nor on the vocabulary"
    )


def test_keys_tell_seeds_samples_roles_places_and_rounds_apart() -> None:
    seen = set()
    for seed, role in itertools.product([*range(200), *SEEDS[2:]], Role):
        for origin in (0, 1, 2):
            seen.update(map(tuple, streams([seed], role, range(10), origin)[0].tolist()))
    assert len(seen) == (200 + len(SEEDS) - 2) * 4 * 10 * 3
    samples = noise.row_keys([5] * 1000, list(range(1000)))
    assert len({tuple(key) for key in samples.tolist()}) == 1000
    assert noise.row_keys([5], [0]).equal(noise.row_keys([5 + 2**64], [0])), "64 bits count"


# Laws ---------------------------------------------------------------------------------------------


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    coins = noise.uniform(streams(range(300), Role.ACCEPT, range(300))).flatten()
    assert surprise(torch.histc(coins, 100, 0, 1), torch.full((100,), 0.01)) > ALARM
    assert coins.min() > 0 and coins.max() < 1
    extremes = noise._unit(torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert (extremes > 0).all() and (extremes < 1).all()


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0])
def test_the_race_is_a_draw_from_softmax(sharpness: float) -> None:
    """argmax(scores + noise) over 200 000 draws, along seeds and along positions."""
    scores = torch.arange(12, dtype=torch.float64).sin() * sharpness
    for keyed in (streams(range(200_000), Role.TARGET, [77]),
                  streams([3], Role.DRAFT, range(200_000))):
        winners = (scores + noise.gumbel(keyed, 12)).argmax(-1).flatten()
        assert surprise(torch.bincount(winners, minlength=12), scores.softmax(-1)) > ALARM
        assert (
            surprise(
                torch.bincount(winners, minlength=12),
                (scores * 1.1 + torch.arange(12) * 0.01).softmax(-1)
            )
            < ALARM
        ), "control"


def test_the_runners_up_are_drawn_without_replacement() -> None:
    scores = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64)
    law, races = (scores.softmax(-1),
                  scores + noise.gumbel(streams(range(100_000), Role.DRAFT, [4]), 4)[:, 0])
    pairs = races.topk(2, -1).indices
    wanted = law[:, None] * law / (1 - law[:, None])
    wanted.fill_diagonal_(0)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    keep = wanted.flatten() > 0
    assert counts[~keep].sum() == 0 and surprise(counts[keep], wanted.flatten()[keep]) > ALARM


def test_streams_are_independent() -> None:
    """Neighbours in role, place, round, seed, sample or token do not depend on each other."""
    base = {"seed": 0, "sample": 0, "role": 0, "place": 0, "origin": 0, "token": 0}
    count = 40_000

    def draws(shift: dict[str, int]) -> Tensor:
        at = {name: base[name] + shift.get(name, 0) for name in base}
        keys = noise.row_keys([at["seed"] + 7919 * index for index in range(200)],
                              [at["sample"]] * 200)
        place = at["place"] + 10 + 3 * torch.arange(200).expand(200, -1)
        keyed = noise.stream(keys, Role(at["role"]), place,
                             torch.full_like(place, at["origin"] + 5))
        return noise.gumbel(keyed, 4)[..., at["token"]].flatten()

    shifts = [{name: step} for name in base for step in (1, 2, 3)] + [
        {"place": 1, "origin": 1}, {"role": 1, "place": 1}, {"role": 2, "origin": 1}
    ]
    first = draws({})
    for shift in shifts:
        other = draws(shift)
        correlation = float(torch.corrcoef(torch.stack([first.exp().reciprocal(),
                                                        other.exp().reciprocal()]))[0, 1])
        assert abs(correlation) < 5.5 / math.sqrt(count), shift
        cells = (_eighth(first) * 8 + _eighth(other)).bincount(minlength=64)
        assert surprise(cells, torch.full((64,), 1 / 64)) > ALARM, shift
    assert (
        abs(float(torch.corrcoef(torch.stack([first, first + draws({"seed": 1})]))[0, 1])) > 0.5
    ), "control"


def _eighth(gumbel: Tensor) -> Tensor:
    """Which eighth of its law each number falls into."""
    return ((-(-gumbel.double()).exp()).exp() * 8).long().clamp(0, 7)


# Draft, coin and replacement together -------------------------------------------------------------


class Table:
    """Logits that depend on the depth alone: thousands of rows in one round, at no cost."""

    name, vocab_size, context, reads_trees = "table", 4, 1 << 20, True

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.lengths = scores, torch.zeros(0)

    def new_cache(self, rows: int, capacity: int) -> Any:
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        return self

    def rows(self, start: int, stop: int) -> Any:
        return self

    def bound(self, longest: int) -> None:
        """Nothing is stored."""

    def keep(self, nodes: Tensor | None, count: Tensor) -> None:
        self.lengths = self.lengths + count

    def read(
        self, tree: TokenTree, cache: Any, *, first: int = 0, last_only: bool = False
    ) -> Reading:
        shift = 0 if first else -1  # the root is read as the second of two nodes
        return Reading(self.scores[(tree.depths[:, first:] + shift).clamp(min=0)])


SHAPES = {"chain": TreeShape.chain(2), "siblings": TreeShape.branching((3,)),
          "tree": TreeShape.branching((2, 2))}


def first_tokens(rule: str, shape: TreeShape, rows: int = 60_000) -> tuple[Tensor, Tensor]:
    """Counts of the first token that a round emits, and the law it should have."""
    p = torch.tensor([[0.1, 0.5, 0.39, 0.01], [0.25, 0.25, 0.4, 0.1], [0.4, 0.1, 0.1, 0.4]],
                     dtype=torch.float64)
    q = torch.tensor([[0.59, 0.4, 0.005, 0.005], [0.1, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]],
                     dtype=torch.float64)
    drafter = DraftModel(Table(q.log()), 4, shape)
    drafter.start(rows, 8, CPU)
    one = torch.ones(rows, 1, dtype=torch.int64)
    drafter.observe(Commit(range(rows), one, one, one[:, 0]))
    params = [SamplingParams(Sampling(temperature=1.0, seed=seed), 1) for seed in range(rows)]
    frontier = Frontier(Prefix(torch.ones(rows, 8, dtype=torch.int64), one[:, 0]), Sampler(params),
                        8, RULES[rule].drawn)
    tree = drafter.propose(frontier)
    accepted = RULES[rule].accept(tree, p.log()[tree.depths], frontier)
    path = tree.tokens.gather(1, accepted.nodes)
    first = torch.where(accepted.count > 1, path[:, 1], accepted.root)
    return torch.bincount(first, minlength=4), p[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_of_real_noise_has_the_law_of_the_target(rule: str, shape: str) -> None:
    assert surprise(*first_tokens(rule, SHAPES[shape])) > ALARM


def test_noise_shared_with_the_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biased in fact (vLLM #47386, #54282): the replacement drawn with the noise of the draft."""
    monkeypatch.setattr(acceptance, "Role", SimpleNamespace(ACCEPT=Role.ACCEPT, RECOVER=Role.DRAFT))
    assert surprise(*first_tokens("rejection", SHAPES["chain"])) < ALARM
