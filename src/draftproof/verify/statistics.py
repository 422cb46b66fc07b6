"""Statistics of counts against a known distribution: scipy's G-test, its power, an interval."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

Array = NDArray[np.float64]

FALSE_ALARM, POWER = 1e-6, 0.999
"""How often a correct sampler is accused, per test; how often one as wrong as `GTest.detects` is
caught."""


class GTest(NamedTuple):
    """A sample against a distribution.

    p_value: of the G-test (likelihood ratio; cells expected fewer than five times are pooled); 0 if
    something impossible came. tv, low, high: total variation between sample and distribution, and a
    99 % interval of the true one. detects: the total variation, in any direction, that a sample of
    this size finds with probability `POWER` at a false-alarm rate of `FALSE_ALARM`.
    """

    p_value: float
    samples: int
    cells: int
    tv: float
    low: float
    high: float
    detects: float

    @property
    def passed(self) -> bool:
        return self.p_value >= FALSE_ALARM


def g_test(counts: ArrayLike, law: ArrayLike) -> GTest:
    """Test `counts` of every outcome against its probability in `law` (summing to one)."""
    seen, expected = np.asarray(counts, float), np.asarray(law, float)
    samples, rare = int(seen.sum()), expected * seen.sum() < 5
    pooled, shares = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    pooled, shares = pooled[shares > 0], shares[shares > 0]
    p_value = 0.0 if seen[expected == 0].sum() > 0 else 1.0
    if p_value and len(shares) > 1:
        test = stats.power_divergence(pooled, shares * samples, lambda_="log-likelihood")
        p_value = float(test.pvalue)
    detects, interval = detectable(samples, max(len(shares), 2)), tv_interval(seen, expected)
    return GTest(p_value, samples, len(shares), *interval, detects)


def detectable(samples: int, cells: int, alarm: float = FALSE_ALARM, power: float = POWER) -> float:
    """The smallest total variation that a G-test surely finds, whatever its direction.

    The test's noncentrality is samples * sum(d^2 / p) >= samples * (2 TV)^2 (Cauchy-Schwarz).
    """
    threshold = stats.chi2.isf(alarm, cells - 1)
    missing = lambda shift: stats.ncx2.sf(threshold, cells - 1, shift) - power      # noqa: E731
    needed = optimize.brentq(missing, 1e-3, 1e4)
    return float(min(np.sqrt(needed / samples) / 2, 1.0))


def tv_interval(counts: ArrayLike, law: ArrayLike, draws: int = 400) -> tuple[float, float, float]:
    """Total variation to `law`, and a 99 % bootstrap interval of the true one, the noise of
    sampling taken off below."""
    seen, expected = np.asarray(counts, float), np.asarray(law, float)
    samples, dice = int(seen.sum()), np.random.default_rng(0)

    def distances(source: Array) -> Array:
        shares = dice.multinomial(samples, source / source.sum(), size=draws) / samples
        return np.asarray(np.abs(shares - expected).sum(1) / 2)

    noise, again = float(distances(expected).mean()), distances(seen / samples)
    spread = float(np.quantile(np.abs(again - again.mean()), 0.99))
    tv = float(np.abs(seen / samples - expected).sum() / 2)
    return tv, max(0.0, tv - noise - spread), min(1.0, tv + spread)


def too_equal(same: int, pairs: int, chance: float) -> float:
    """p-value of so many equal pairs, where independent ones are equal with this probability."""
    return float(stats.binom.sf(same - 1, pairs, chance))
