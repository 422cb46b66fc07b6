"""Interleaving, and figures of methods whose texts and seconds are written down beforehand."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny import prompts, target

from draftproof.bench.measure import PROMPTS_PER_ROW, Bench, Clock, OurEngine, Output, Setting
from draftproof.bench.report import Interval, as_json, compute, notes, table
from draftproof.core.params import Sampling
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.engine import Engine
from draftproof.requests.stats import RoundStats

GREEDY = Setting(1, 0.0)
ABOUT = {"machine": {"device": "cpu"}, "workload": "3 prompts", "new_tokens": 8,
         "rounds": 1, "quantised": ["int8 weights"]}


@dataclass
class Scripted:
    """Writes `text` for every prompt in `seconds` times a factor by call; first token at 0.5."""

    name: str
    time: list[float]
    seconds: float = 4.0
    text: Sequence[int] = tuple(range(8))
    factors: Sequence[float] = (1.0,)
    drafted: int = 0
    log: list[str] = field(default_factory=list)

    def write(
        self, prompts: Any, sampling: Sampling, batch: int, clock: Clock, owner: int
    ) -> Output:
        factor = self.factors[min(self.log.count(self.name), len(self.factors) - 1)]
        self.log.append(self.name)
        self.time[0] += 0.5
        first = clock()
        self.time[0] += self.seconds * factor - 0.5
        stats = RoundStats()
        for _ in range(4):
            stats.record(width=self.drafted, drafted=self.drafted, reach=self.drafted,
                         accepted=self.drafted // 2, emitted=2)
        return [list(self.text) for _ in prompts], first, stats


def bench(
    *methods: Scripted, prompts: int = 3, settings: Sequence[Setting] = (GREEDY,), rounds: int = 1
) -> Bench:
    log, time = list[str](), [100.0]
    for method in methods:
        method.log, method.time = log, time
    run = Bench(methods, [[i] for i in range(prompts)], settings, Sampling(), 8, rounds,
                lambda: time[0])
    run.run()
    return run


def three() -> list[Scripted]:
    drafter = Scripted("drafter", [], 2.0, drafted=2)
    return [Scripted("plain", []), drafter, Scripted("slow", [], 8.0)]


def test_every_method_runs_every_group_in_rotating_order() -> None:
    run = bench(*three(), rounds=2)
    log = run.methods[0].log  # type: ignore[attr-defined]
    assert log[:3] == ["plain", "drafter", "slow"]                          # the warm-up
    turns = [log[at : at + 3] for at in range(3, len(log), 3)]
    assert len(turns) == 6 and all(sorted(turn) == ["drafter", "plain", "slow"] for turn in turns)
    assert [turn[0] for turn in turns] == ["plain", "drafter", "slow"] * 2
    assert len(run.trials) == run.total == 18 and all(trial.count == 8 for trial in run.trials)


def test_settings_are_mixed_and_batches_take_several_prompts_per_row() -> None:
    settings = [GREEDY, Setting(2, 0.7)]
    run = bench(*three(), prompts=10, settings=settings)
    assert run.groups(settings[1]) == [tuple(range(8)), (8, 9, 0, 1, 2, 3, 4, 5)]
    assert len(run.groups(settings[1])[0]) == 2 * PROMPTS_PER_ROW
    order = [trial.setting.batch for trial in run.trials]
    assert order.index(2) < len(order) - 1 - order[::-1].index(1)      # not one after the other
    assert {str(setting) for setting in settings} == {"greedy, batch 1", "T = 0.7, batch 2"}


def test_speed_ups_are_paired_so_a_slowing_machine_does_not_bias_them() -> None:
    """Every call takes longer than the one before: ratios within a round stay what they are."""
    factors = [1.0, *(2.0 ** (i // 2) for i in range(20))]
    methods = {"plain": 4.0, "drafter": 2.0}
    scripted = [Scripted(name, [], seconds, factors=factors) for name, seconds in methods.items()]
    plain, drafter = compute(bench(*scripted, prompts=6, rounds=2))
    assert plain.speed_up == Interval(1.0) and drafter.speed_up == Interval(2.0)


def test_speed_ups_are_per_token_where_sampled_texts_have_other_lengths() -> None:
    """Half as many tokens in half the seconds is no speed-up."""
    half = Scripted("drafter", [], 2.0, text=tuple(range(4)), drafted=2)
    _, drafter = compute(bench(Scripted("plain", []), half, settings=[Setting(1, 0.7)]))
    assert drafter.speed_up == Interval(1.0) and drafter.tokens_per_second == 2.0


def test_speeds_and_texts_are_compared() -> None:
    methods = three()
    plain, drafter, slow = compute(bench(*methods, rounds=3))
    assert [item.tokens_per_second for item in (plain, drafter, slow)] == [2.0, 4.0, 1.0]
    assert drafter.texts == drafter.same == 9 and drafter.first_difference is None
    assert drafter.tokens_per_round == 2.0 and drafter.acceptance == pytest.approx(0.5)
    assert drafter.acceptance_by_position == [1.0, 0.0] and plain.acceptance is None
    assert drafter.first_token == 0.5
    methods[1].text = (0, 1, 2, 9, 4, 5, 6, 7)
    figures = compute(bench(*methods))
    assert (figures[1].same, figures[1].texts, figures[1].first_difference) == (0, 3, (1, 4))
    assert notes(figures, ABOUT)[0].endswith("differs from plain decoding at token 4 of prompt 1")
    run = bench(*three())
    run.trials = [replace(trial, tokens=[[0, 1, 9]]) if (trial.method, trial.prompts) ==
                  ("drafter", (2,)) else trial for trial in run.trials]
    assert [item.first_difference for item in compute(run)] == [None, (3, 3), None]


def test_an_interval_is_that_of_the_median() -> None:
    result, values = Interval.of([1.0, 2.0, 3.0, 4.0, 100.0]), [1.0, 2.0, 3.0, 4.0, 100.0]
    medians = [np.median(np.random.default_rng(i).choice(values, 5)) for i in range(4000)]
    bounds = np.percentile(medians, (2.5, 97.5))
    assert result.median == 3.0 and (result.low, result.high) == pytest.approx(bounds, abs=1)
    assert str(Interval.of([2.0])) == "2.00×" == str(Interval.of([2.0, 2.0]))


def test_the_table_fits_80_columns_and_json_has_every_number() -> None:
    methods = three()
    methods[1] = replace(methods[1], name="a folder with a rather long name")
    run = bench(*methods, settings=[GREEDY, Setting(4, 0.7)], prompts=8, rounds=2)
    figures, console = compute(run), Console(width=80, file=io.StringIO())
    console.print(table(figures, "demo"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80 and "T = 0.7, batch 4" in "\n".join(lines)
    body = json.loads(as_json(run, figures, ABOUT))
    assert len(body["trials"]) == len(run.trials) and len(body["figures"]) == 6
    assert body["figures"][1]["speed_up"]["median"] == 2.0
    assert body["trials"][0]["tokens"] == [list(range(8))]


def test_an_engine_is_timed_to_its_first_token_and_counts_all_rows() -> None:
    method, sampling = OurEngine("plain", Engine(target())), Sampling(max_new_tokens=5)
    tokens, first, stats = method.write(prompts(1), sampling, 1, count(1).__next__, 0)
    assert (len(tokens[0]), first, stats.emitted) == (5, 1, 4)
    tokens, first, stats = method.write(prompts(3), sampling, 2, count(1).__next__, 0)
    assert ([*map(len, tokens)], first, stats.emitted) == ([5, 5, 5], None, 12)


def test_no_draft_comes_from_the_memory_of_an_earlier_repetition() -> None:
    """Users do not ask the same thing three times; a speed-up from that would mislead them."""
    engine = Engine(target(), SuffixDrafter(), budget=4)
    settings = [Setting(1, 0.0), Setting(2, 0.0)]
    run = Bench([OurEngine("suffix", engine)], prompts(2), settings, Sampling(), 12, 3)
    run.run()
    for setting in settings:
        accepted = [sum(trial.stats.accepted for trial in run.trials
                        if (trial.round, trial.setting) == (number, setting))
                    for number in range(3)]
        assert accepted == accepted[:1] * 3
