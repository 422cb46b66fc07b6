"""Statistics of a sampler against a known law: the G-test, its power, and total variation with an interval.

Knows counts and laws; knows nothing of models. Tests are scipy's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

Array = NDArray[np.float64]

FALSE_ALARM = 1e-6
"""How often a correct sampler is accused, per test."""
POWER = 0.999
"""How often a sampler as wrong as `GTest.detects` is caught."""


class GTest(NamedTuple):
    """A sampler against a law.

    p_value: of the G-test (likelihood ratio, chi-squared with `cells` - 1 degrees of freedom, cells expected fewer than
    five times pooled); 0 if something impossible came. tv, low, high: total variation between the sample and the law,
    and a 99 % bootstrap interval of the true one, the noise of sampling taken off. detects: the total variation that
    a sample of this size finds with probability `POWER` at a false-alarm rate of `FALSE_ALARM`, in any direction.
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
    samples = int(seen.sum())
    low, high = tv_interval(seen, expected)
    tv = float(np.abs(seen / samples - expected).sum() / 2)
    pooled_seen, pooled_law = _pooled(seen, expected)
    cells = len(pooled_law)
    impossible = bool(seen[expected == 0].sum() > 0)
    if impossible or cells < 2:
        return GTest(0.0 if impossible else 1.0, samples, cells, tv, low, high, detectable(samples, max(cells, 2)))
    result = stats.power_divergence(pooled_seen, pooled_law * samples, lambda_="log-likelihood")
    return GTest(float(result.pvalue), samples, cells, tv, low, high, detectable(samples, cells))


def detectable(samples: int, cells: int, false_alarm: float = FALSE_ALARM, power: float = POWER) -> float:
    """The smallest total variation that a G-test surely finds, whatever its direction.

    The test's noncentrality is samples * sum(d^2 / p), at least samples * (2 TV)^2 by the Cauchy-Schwarz inequality.
    """
    freedom = cells - 1
    threshold = stats.chi2.isf(false_alarm, freedom)
    needed = optimize.brentq(lambda shift: stats.ncx2.sf(threshold, freedom, shift) - power, 1e-3, 1e4)
    return float(min(np.sqrt(needed / samples) / 2, 1.0))


def tv_interval(counts: ArrayLike, law: ArrayLike, confidence: float = 0.99, draws: int = 400) -> tuple[float, float]:
    """Bootstrap interval of the total variation to `law`, less what sampling alone would show."""
    seen, expected = np.asarray(counts, float), np.asarray(law, float)
    samples = int(seen.sum())
    dice = np.random.default_rng(0)
    share = seen / samples

    def distances(source: Array) -> Array:
        shares = dice.multinomial(samples, source / source.sum(), size=draws) / samples
        return np.asarray(np.abs(shares - expected).sum(1) / 2)

    noise = float(distances(expected).mean())
    again = distances(share)
    spread = np.quantile(np.abs(again - again.mean()), confidence)
    tv = float(np.abs(share - expected).sum() / 2)
    return max(0.0, tv - noise - float(spread)), min(1.0, tv + float(spread))


def _pooled(seen: Array, law: Array) -> tuple[Array, Array]:
    """Cells expected fewer than five times, put together."""
    rare = law * seen.sum() < 5
    if not rare.any():
        return seen, law
    counts, shares = np.append(seen[~rare], seen[rare].sum()), np.append(law[~rare], law[rare].sum())
    return (counts, shares) if shares[-1] > 0 else (counts[:-1], shares[:-1])
