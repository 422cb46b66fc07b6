"""Ways in lockstep: the texts are those of ways left alone, and a host that wanders is the same to all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest
import tiny
from recorded import Time

import draftproof as dp
from draftproof.bench.never_slower import SLICE, Case, Way, _line, _measure, _ways
from draftproof.core.params import SamplingParams
from draftproof.engine.sequence import SequenceState

NEW, ENDS = 40, (7, 11, 23, 30)


class Scribe:
    """Writes `step` tokens per row in a round; a round takes a second, and a prompt, and twice that when the host is slow.

    log: whose round it was, of all scribes that share it. slow: the host is, from this entry of the log on.
    """

    drafter = dp.Plain()

    def __init__(self, name: str, time: Time, log: list[str], step: int = 1, slow: int = 1 << 30) -> None:
        self.name, self.time, self.log, self.step, self.slow = name, time, log, step, slow

    def generate(self, *_: Any, **__: Any) -> None:
        """A warm-up that takes no time."""

    def rounds(self, prompts: list[list[int]], *, max_new_tokens: int, **_: Any) -> Iterator[list[SequenceState]]:
        rows = [SequenceState(prompt, SamplingParams(dp.Sampling(), len(prompt)), max_new_tokens) for prompt in prompts]
        for row in rows:
            self._pass()
            row.extend([0], None, 0)
            yield rows
        while going := [row for row in rows if row.finish_reason is None]:
            self._pass()
            for row in going:
                row.stats.record(width=0, drafted=0, reach=0, accepted=0, emitted=row.extend([0] * self.step, None, 0))
            yield going

    def _pass(self) -> None:
        self.time.now += 1.0 if len(self.log) < self.slow else 2.0
        self.log.append(self.name)


def scribes(time: Time, log: list[str], slow: int = 1 << 30, most: int = SLICE + 1) -> dict[str, Way]:
    steps = {"plain": 1, "fixed": most, "adaptive": SLICE}
    return {name: Way(Scribe(name, time, log, step, slow)) for name, step in steps.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_in_lockstep_are_those_written_alone(rows: int, temperature: float) -> None:
    """Of prompts of different lengths, and with an end token at which some rows end early."""
    case, target = Case("lookup", NEW, rows, temperature), tiny.target("llama")
    engine = dp.Engine(target, dp.Plain(), stop_tokens=ENDS)
    batches = [tiny.prompts(rows, seed) for seed in (1, 2)]
    ways = _ways(engine, dp.PromptLookup)
    ways["a draft model"] = Way(dp.Engine(target, dp.DraftModel(target, tiny.VOCAB), budget=3, stop_tokens=ENDS))
    _measure(ways, batches, case, 1)
    wanted = dp.Sampling(temperature=temperature, seed=1)
    alone = [engine.generate(batch, max_new_tokens=NEW, sampling=wanted) for batch in batches]
    for way in ways.values():
        assert way.texts == [[one.tokens for one in done] for done in alone] * 4
        assert all(seconds > 0 for seconds in way.wall)
    assert ways["plain"].stats.emitted == 4 * sum(one.stats.emitted for done in alone for one in done)
    assert len({len(text) for texts in ways["plain"].texts for text in texts}) > 1


@pytest.mark.parametrize("rows", [1, 4])
def test_seconds_are_those_of_the_slices_and_none_is_lost(rows: int) -> None:
    time, log = Time(), list[str]()
    start, ways, batch = time.now, scribes(time, log), [[1]] * rows
    _measure(ways, [batch] * 8, Case("none", NEW, rows), 1, (time, time))
    tokens = NEW * rows
    assert sum(sum(way.wall) for way in ways.values()) * tokens == pytest.approx(time.now - start)
    for name, way in ways.items():
        assert way.wall == way.cpu == pytest.approx([log.count(name) / 8 / tokens] * 8)
    assert log.count("plain") == 8 * (rows + NEW - 1)                   # prompts one by one, rounds side by side


def test_a_host_that_becomes_slower_is_the_same_to_all() -> None:
    ways = [scribes(Time(), log := list[str](), slow) for slow in (1 << 30, 100)]
    for some in ways:
        _measure(some, [[[1]]] * 8, Case("none", NEW), 1, (some["plain"].engine.time,) * 2)  # type: ignore[attr-defined]
    assert len(log) / 8 * 3 > 100                                       # in the midst of a text
    for name in ("fixed", "adaptive"):
        steady, slower = (_line("", name, some).wall for some in ways)
        assert slower.value == pytest.approx(steady.value, rel=0.02)
        assert slower.high - slower.low < 0.1 * slower.value


def test_each_way_has_its_turn_behind_each_other_equally_often() -> None:
    """Behind itself it would find warm what the others find cold."""
    time, log = Time(), list[str]()
    _measure(scribes(time, log, most=SLICE), [[[1]]], Case("none", NEW + 1), 1, (time, time))
    texts = [log[at : at + len(log) // 8] for at in range(0, len(log), len(log) // 8)]
    for text in texts:
        assert sorted(text[:3]) == ["adaptive", "fixed", "plain"]       # prompts, each in a slice of its own
        longest = max(len(list(group)) for name, group in groupby(text) if name == "plain")
        assert longest == SLICE
    neighbours = Counter(pair for text in texts for pair in pairwise(name for name, _ in groupby(text)))
    assert len(neighbours) == 6 and max(neighbours.values()) <= 1.1 * min(neighbours.values())
    assert {text[0] for text in texts} == {"plain", "fixed", "adaptive"}
