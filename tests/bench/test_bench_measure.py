"""The race is fair: everyone writes everything, in turn, and time is taken where a user feels it."""

from __future__ import annotations

from collections import Counter

import pytest
from recorded import GREEDY, Scripted, Time, bench, three_ways

from draftproof.bench.machine import Energy
from draftproof.bench.measure import Setting

pytestmark = pytest.mark.usefixtures("memory_is_not_looked_at")


def test_every_way_writes_every_group_once_a_turn_after_a_warm_up() -> None:
    run = bench(*three_ways(), prompts=4, turns=2)
    ticks: list[str] = []
    run.run(ticks.append)
    assert len(ticks) == run.total and len(run.trials) == run.runs == 3 * 4 * 2
    assert all("warming up" in doing for doing in ticks[:3]) and "warming up" not in " ".join(ticks[3:])
    seen = Counter((trial.way, trial.turn, trial.prompts) for trial in run.trials)
    assert set(seen.values()) == {1} and len(seen) == 24
    assert run.memory.keys() == {(way.name, GREEDY) for way in run.ways}


def test_the_order_turns_so_that_nobody_is_always_first() -> None:
    run = bench(*three_ways(), prompts=3, turns=2)
    run.run()
    rounds = [tuple(trial.way for trial in run.trials[start : start + 3]) for start in range(0, 18, 3)]
    assert Counter(order[0] for order in rounds) == {"plain": 2, "drafter": 2, "transformers": 2}
    assert all(len(set(order)) == 3 for order in rounds)


@pytest.mark.parametrize(
    ("count", "batch", "size"), [(5, 2, 4), (3, 8, 8), (4, 4, 4), (1, 1, 1), (7, 1, 1), (19, 2, 8), (24, 8, 24), (40, 8, 32)]
)
def test_groups_are_full_and_hold_every_prompt(count: int, batch: int, size: int) -> None:
    """Several times as many as there are rows, as far as there are so many: no prompt twice for the sake of that."""
    run = bench(*three_ways(), prompts=count, settings=[Setting(batch, 0.0)])
    groups = run.groups(run.settings[0])
    assert all(len(group) == size for group in groups)
    assert {prompt for group in groups for prompt in group} == set(range(count))
    assert len(groups) == -(-count // size)


def test_a_way_is_told_how_many_rows_it_may_write_side_by_side() -> None:
    run = bench(*three_ways(), prompts=9, settings=[Setting(1, 0.0), Setting(3, 0.0)])
    asked: list[tuple[int, int]] = []
    write = run.ways[0].write
    run.ways[0].write = lambda task, clock: asked.append((len(task.prompts), task.rows)) or write(task, clock)  # type: ignore
    run.run()
    assert set(asked) == {(1, 1), (9, 3)}


def test_who_cannot_write_several_rows_sits_out() -> None:
    plain, drafter, stock = three_ways()
    stock.most = 1
    run = bench(plain, drafter, stock, settings=[Setting(1, 0.0), Setting(4, 0.0)])
    run.run()
    assert {trial.way for trial in run.trials if trial.setting.batch == 4} == {"plain", "drafter"}
    assert len(run.trials) == run.runs


def test_settings_are_spread_over_every_turn() -> None:
    """What is said of batch 8 against one row must not be the machine's speed a minute later against now."""
    run = bench(*three_ways(), prompts=4, settings=[Setting(1, 0.0), Setting(4, 0.0), Setting(1, 0.7)], turns=2)
    run.run()
    order = [(trial.turn, trial.setting, trial.group) for trial in run.trials[::3]]
    single, several, warm = run.settings
    turn = [(single, 0), (warm, 0), (single, 1), (warm, 1), (several, 0), (single, 2), (warm, 2), (single, 3), (warm, 3)]
    assert order == [(number, *one) for number in range(2) for one in turn]


def test_forwards_are_measured_alone_right_behind_a_trial_and_seldom_enough() -> None:
    plain, drafter, stock = three_ways()
    drafter.bare_seconds = 3.75                                         # longer than one of its trials, of 3.5 seconds
    run = bench(plain, drafter, stock, prompts=5, turns=4)
    run.run()
    assert all(trial.bare is not None for trial in run.trials if trial.way == "plain")          # takes no time: always
    assert all(trial.bare is None for trial in run.trials if trial.way == "transformers")
    mine = [trial for trial in run.trials if trial.way == "drafter"]
    measured = [place for place, trial in enumerate(mine) if trial.bare is not None]
    assert measured == [0, 5, 10, 15]                                   # 15 seconds of trials for 3.75 of forwards
    at = [place for place, name in enumerate(plain.order) if name == "drafter alone"]
    assert len(at) == 4 and all(plain.order[place - 1] == "drafter" for place in at)


def test_chunks_count_from_the_call() -> None:
    time = Time(now=1e6)
    run = bench(Scripted("plain", time, [2, 1]))
    run.run()
    for trial in run.trials:
        assert [(chunk.at, chunk.tokens) for chunk in trial.texts[0].chunks] == [(0.5, 1), (1.5, 2), (2.5, 1)]
        assert trial.seconds == 2.5 and trial.tokens == 4


def test_an_interrupt_leaves_what_was_measured() -> None:
    run = bench(*three_ways(), prompts=3, turns=2)

    def tick(doing: str) -> None:
        if len(run.trials) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(tick)
    assert len(run.trials) == 7 < run.runs


def test_joules_are_those_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    time = Time()
    run = bench(Scripted("plain", time, [1, 1]))
    energy = Energy.__new__(Energy)
    energy.meters, energy.unreadable = [], ""
    energy.read = lambda: [20.0 * time.now]  # type: ignore[method-assign]
    energy.since = lambda before: 20.0 * time.now - before[0]  # type: ignore[method-assign]
    run.energy = energy
    run.run()
    assert [trial.joules for trial in run.trials] == [20.0 * 2.5] * 3
