"""Seconds by part: what is inside another part is counted once."""

from __future__ import annotations

import pytest

from draftproof.engine import stats
from draftproof.engine.stats import Clock


class Time:
    """Stands still unless told."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    own = Time()
    monkeypatch.setattr(stats, "time", own)
    return own


def test_what_is_inside_a_part_is_counted_once(time: Time) -> None:
    clock = Clock()
    with clock.decide:
        time.now += 5
        with clock.draft:
            time.now += 1
            for _ in range(2):
                with clock.verify:
                    time.now += 3
        time.now += 5
    seconds = {part: spent for part, spent in clock.seconds.items() if spent}
    assert seconds == {"verify": 6.0, "draft": 1.0, "decide": 10.0}
    assert clock.total == time.now == 17.0


def test_what_fails_took_time_as_well(time: Time) -> None:
    clock = Clock()
    with pytest.raises(TimeoutError), clock.decide:
        time.now += 3
        raise TimeoutError
    assert clock.seconds["decide"] == 3.0
