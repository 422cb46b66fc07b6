"""The noise: every bit is fixed by its key, streams are independent, and its distributions are
right.

The chi-square tests have fixed seeds, so they always say the same; by chance one seed in a million
raises a false alarm. Rounds of whole texts with this noise are audited in tests/verify.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role

ALARM = 1e-6
SEEDS = [0, 1, -1, 2**31, -(2**31), 2**40 + 7, 2**63 - 1, -(2**63), 0xDEADBEEF]


def chi_square_p_value(counts: Tensor, distribution: Tensor) -> float:
    """Chi-square p-value of `counts` under `distribution`."""
    expected = distribution.double() * counts.sum()
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1))


def streams(
    seeds: Sequence[int], role: Role, places: Sequence[int], origin: int | None = None
) -> Tensor:
    keys = noise.row_keys(list(seeds), [0] * len(seeds))
    place = torch.tensor(places).expand(len(seeds), -1)
    return noise.stream(keys, role, place,
                        None if origin is None else torch.full_like(place, origin))


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
def test_noise_bits_match_integer_arithmetic(seed: int) -> None:
    """Wrap-around int32 arithmetic, at positions beyond 2^16, seeds of 64 bits, either sign."""
    for sample, role, place, origin in itertools.product(
        (0, 1, 9), Role, (0, 1, 65_535, 65_537, 1_000_003), (0, 70_001)
    ):
        keys = noise.row_keys([seed], [sample])
        result = noise.stream(keys, role, torch.tensor([[place]]), torch.tensor([[origin]]))[0, 0]
        low, high = reference(seed, sample, role, place, origin)
        assert [int(word) & 0xFFFFFFFF for word in result] == [low, high]
        gumbel = noise.gumbel(result, 5)
        for token in range(5):
            bits = mix(mix(low ^ token * 0x9E3779B9 & 0xFFFFFFFF) + high & 0xFFFFFFFF) & 0x7FFFFFFF
            unit = min((bits + 0.5) / 2**31, 1 - 2.0**-24)
            wanted = -math.log(-math.log1p(-unit))
            assert float(gumbel[token]) == pytest.approx(wanted, rel=2e-5, abs=2e-5)
        coin = min(((mix(mix(low) + high & 0xFFFFFFFF) & 0x7FFFFFFF) + 0.5) / 2**31, 1 - 2.0**-24)
        assert float(noise.uniform(result)) == pytest.approx(coin, abs=1e-7)


def test_draws_are_independent_of_the_batch() -> None:
    """Alone or in a batch, in any order of rows and places: the same bits."""
    places = [3, 70_000, 5, 5]
    together = noise.gumbel(streams(SEEDS, Role.TARGET, places), 33)
    for (row, seed), (column, place) in itertools.product(enumerate(SEEDS), enumerate(places)):
        alone = noise.gumbel(streams([seed], Role.TARGET, [place]), 33)[0, 0]
        assert torch.equal(together[row, column], alone)
    assert torch.equal(together[..., :7], noise.gumbel(streams(SEEDS, Role.TARGET, places), 7))


def test_noise_keys_are_distinct() -> None:
    seeds = [*range(200), *SEEDS[2:]]
    seen = {tuple(key) for role in Role for origin in (0, 1, 2)
            for key in streams(seeds, role, range(10), origin).flatten(0, 1).tolist()}
    assert len(seen) == len(seeds) * 4 * 10 * 3
    samples = noise.row_keys([5] * 1000, list(range(1000)))
    assert len({tuple(key) for key in samples.tolist()}) == 1000
    assert noise.row_keys([5], [0]).equal(noise.row_keys([5 + 2**64], [0])), "64 bits count"


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    coins = noise.uniform(streams(range(300), Role.ACCEPT, range(300))).flatten()
    assert chi_square_p_value(torch.histc(coins, 100, 0, 1), torch.full((100,), 0.01)) > ALARM
    extremes = noise._unit(torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert (extremes > 0).all() and (extremes < 1).all()


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0])
def test_gumbel_race_draws_from_softmax_without_replacement(
    sharpness: float
) -> None:
    """argmax(scores + noise) over 200 000 draws, along seeds and along positions."""
    scores = torch.arange(12, dtype=torch.float64).sin() * sharpness
    distribution = scores.softmax(-1)
    for keyed in (streams(range(200_000), Role.TARGET, [77]),
                  streams([3], Role.DRAFT, range(200_000))):
        first, second = (scores + noise.gumbel(keyed, 12)).topk(2, -1).indices.unbind(-1)
        counts = torch.bincount(first.flatten(), minlength=12)
        assert chi_square_p_value(counts, distribution) > ALARM
        other = (scores * 1.1 + torch.arange(12) * 0.01).softmax(-1)
        assert chi_square_p_value(counts, other) < ALARM, "control"
        pairs = torch.bincount((first * 12 + second).flatten(), minlength=144)
        before = distribution[:, None]
        wanted = (before * distribution / (1 - before)).fill_diagonal_(0).flatten()
        assert pairs[wanted == 0].sum() == 0
        assert chi_square_p_value(pairs[wanted > 0], wanted[wanted > 0]) > ALARM


def test_streams_are_independent() -> None:
    """Neighbours in role, place, round, seed, sample or token do not depend on each other."""
    names, count = ("seed", "sample", "role", "place", "origin", "token"), 40_000

    def draws(**at: int) -> Tensor:
        seed, sample, role, place, origin, token = (at.get(name, 0) for name in names)
        keys = noise.row_keys([seed + 7919 * index for index in range(200)], [sample] * 200)
        places = place + 10 + 3 * torch.arange(200).expand(200, -1)
        keyed = noise.stream(keys, Role(role), places, torch.full_like(places, origin + 5))
        return noise.gumbel(keyed, 4)[..., token].flatten()

    def correlation(tensor: Tensor, other: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([tensor, other]))[0, 1])

    def eighth(gumbel: Tensor) -> Tensor:
        return ((-(-gumbel.double()).exp()).exp() * 8).long().clamp(0, 7)

    shifts = [{name: step} for name in names for step in (1, 2, 3)]
    shifts += [{"place": 1, "origin": 1}, {"role": 1, "place": 1}, {"role": 2, "origin": 1}]
    first = draws()
    for shift in shifts:
        other = draws(**shift)
        apart = correlation(first.exp().reciprocal(), other.exp().reciprocal())
        assert abs(apart) < 5.5 / math.sqrt(count), shift
        cells = (eighth(first) * 8 + eighth(other)).bincount(minlength=64)
        assert chi_square_p_value(cells, torch.full((64,), 1 / 64)) > ALARM, shift
    assert correlation(first, first + draws(seed=1)) > 0.5, "control"
