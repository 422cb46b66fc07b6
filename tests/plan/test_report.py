"""The verdict of a plan respects its own interval."""

from __future__ import annotations

import pytest

from draftproof.plan.report import judged


@pytest.mark.parametrize(("speed_up", "low", "high", "verdict"), [
    (1.06, 0.93, 1.18, "makes no difference that 2 texts can show"),
    (1.5, 1.2, 1.9, "pays"), (0.8, 0.7, 0.9, "does not pay"),
    (0.8, 0.6, 1.1, "makes no difference that 2 texts can show"),
    (1.02, 1.01, 1.03, "makes no difference (±5%)"),
])
def test_no_gain_is_claimed_that_lies_within_the_noise(
    speed_up: float, low: float, high: float, verdict: str
) -> None:
    assert judged(speed_up, low, high, 2) == verdict
