"""Seconds by part: what is inside another part is counted once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftproof.engine import stats
from draftproof.engine.stats import Clock


def test_what_is_inside_a_part_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails; time stands still unless it is told."""
    now, clock = [0.0], Clock()
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with pytest.raises(TimeoutError), clock.decide:
        now[0] += 5
        with clock.draft:
            now[0] += 1
            for _ in range(2):
                with clock.verify:
                    now[0] += 3
        now[0] += 5
        raise TimeoutError
    seconds = {part: spent for part, spent in clock.seconds.items() if spent}
    assert seconds == {"verify": 6.0, "draft": 1.0, "decide": 10.0}
    assert clock.total == now[0] == 17.0
