"""Seconds by part: what is inside another part is counted once."""

from __future__ import annotations

import pytest

from draftproof.engine import stats
from draftproof.engine.stats import Clock, Timed


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


class Target:
    """Reads for three seconds, until it is late."""

    def __init__(self, time: Time) -> None:
        self.time = time

    def read(self) -> None:
        self.time.now += 3
        if self.time.now > 90:
            raise TimeoutError


class Drafter:
    """Drafts for a second, and has the target read meanwhile."""

    name = "slow"

    def __init__(self, time: Time) -> None:
        self.time = time

    def propose(self, target: Target, times: int) -> str:
        self.time.now += 1
        for _ in range(times):
            target.read()
        return "a tree"


def test_what_is_inside_a_part_is_counted_once(time: Time) -> None:
    clock = Clock()
    target, drafter = Timed(Target(time), clock, "verify", ["read"]), Timed(Drafter(time), clock, "draft", ["propose"])
    with clock.part("decide"):
        time.now += 5
        assert drafter.propose(target, times=2) == "a tree" and drafter.name == "slow"
        time.now += 5
    assert dict(clock.seconds) == {"verify": 6.0, "draft": 1.0, "decide": 10.0} and clock.total == time.now == 17.0


def test_a_whole_part_takes_what_is_inside_it(time: Time) -> None:
    clock = Clock()
    target = Timed(Target(time), clock, "verify", ["read"])
    with clock.part("prefill", whole=True):
        target.read()
        with clock.part("decide"):
            time.now += 1
    target.read()
    assert dict(clock.seconds) == {"prefill": 4.0, "verify": 3.0} and clock.total == 7.0


def test_what_fails_took_time_as_well(time: Time) -> None:
    clock = Clock()
    target = Timed(Target(time), clock, "verify", ["read"])
    time.now = 89.0
    with pytest.raises(TimeoutError), clock.part("decide"):
        target.read()
    assert dict(clock.seconds) == {"verify": 3.0, "decide": 0.0}
