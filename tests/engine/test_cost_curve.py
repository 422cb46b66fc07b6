"""What rounds cost, learned on the way: through noise, hiccups, cold starts and changes of the machine's speed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from tiny import target

from draftproof.engine.cost_curve import CostCurve, measure_costs
from draftproof.engine.pace import ASKED, GUESS, STALE, TOO_LONG, TURNED, CostTable, Pace

SIZES = (0, 1, 2, 4, 8)
TRUE = {0: 1.0, 1: 1.2, 2: 1.3, 4: 1.5, 8: 2.1}


def told(pace: Pace, sizes: Iterable[int], step: float = 0.01, noise: float = 0.0, seed: int = 0) -> Pace:
    """`pace`, after rounds of these sizes."""
    dice = random.Random(seed)
    for size in sizes:
        pace.observe(pace.sizes.index(size), step * TRUE[size] * dice.lognormvariate(0, noise))
    return pace


def test_exact_seconds_give_exact_costs() -> None:
    pace = told(Pace(SIZES), [0, 1, 0, 2, 4, 8] * 6)
    assert pace.plain_step == pytest.approx(0.01, rel=0.01)
    assert pace.cost == pytest.approx(list(TRUE.values()), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_noise_averages_out(seed: int) -> None:
    pace = told(Pace(SIZES), random.Random(seed).choices(SIZES, k=300), noise=0.2, seed=seed)
    assert pace.cost == pytest.approx(list(TRUE.values()), rel=0.15)
    assert pace.plain_step == pytest.approx(0.01, rel=0.25)
    assert all(low <= high for low, high in zip(pace.cost, pace.high, strict=True))


def test_sizes_that_never_ran_lie_on_the_line() -> None:
    pace = told(Pace(SIZES), [0])
    assert pace.cost == [1 + GUESS * size for size in SIZES] and not pace.started
    told(pace, [2] * 9)
    assert pace.started
    assert pace.cost == pytest.approx([1, 1.15, 1.3, 1.6, 2.2], rel=0.02)
    told(pace, [8] * 9)
    assert pace.cost == pytest.approx([1, 1.15, 1.3, 1.3 + 0.8 / 3, 2.1], rel=0.05)


def test_a_machine_that_slows_down_leaves_relative_costs_alone() -> None:
    """Only rounds of one size run while it does; the plain step and every other size follow."""
    pace = told(Pace(SIZES), [0, 1, 2, 4, 8] * 20, noise=0.02)
    told(pace, [4] * 30, step=0.02, noise=0.02)
    assert pace.risen > 0.4, "and a plain round should tell whether it is so"
    told(pace, [0, 4, 4, 4, 0], step=0.02, noise=0.02)
    assert pace.plain_step == pytest.approx(0.02, rel=0.1)
    assert pace.cost == pytest.approx(list(TRUE.values()), rel=0.15)


def test_a_plain_round_tells_a_slow_drafter_from_a_slow_machine() -> None:
    """As before, but plain rounds take what they took: it was the size that became dear, by a factor of three."""
    pace = told(Pace(SIZES), [0, 1, 2, 4, 8] * 20, noise=0.02)
    for _ in range(6):
        told(pace, [4] * 5, step=0.03, noise=0.02)
        told(pace, [0], noise=0.02)
    assert pace.plain_step == pytest.approx(0.01, rel=0.1)
    assert pace.cost[3] == pytest.approx(4.5, rel=0.15)
    assert pace.cost[1] == pytest.approx(1.2, rel=0.2), "the others did not change"


def test_a_hiccup_is_no_news() -> None:
    pace = told(Pace(SIZES), [0, 1, 2, 4, 8] * 20, noise=0.02)
    before = list(pace.cost)
    for size in (2, 0):
        pace.observe(SIZES.index(size), 0.5)
        told(pace, [1, 2, 4], noise=0.02)
    assert pace.cost == pytest.approx(before, rel=0.05) and pace.plain_step == pytest.approx(0.01, rel=0.1)


def test_cold_first_rounds_are_forgotten() -> None:
    """The first round of every kind takes three times as long; what is believed of it is charged for, and hardly kept."""
    pace = Pace(SIZES)
    told(pace, [0], step=0.03)
    told(pace, [0] * 3)
    charged = pace.observe(3, 0.045)
    assert charged == pytest.approx(TOO_LONG * (1 + 4 * GUESS), rel=0.01) and pace.cost[3] < 0.9 * charged
    told(pace, [4] * 4)
    assert pace.cost[3] == pytest.approx(1.5, rel=0.1)


def test_a_plain_round_behind_a_draft_has_a_cost_of_its_own() -> None:
    """It is slower, which is the draft's doing: the plain step stays what it is among plain rounds."""
    pace = told(Pace(SIZES), [0, 0])
    for _ in range(30):
        told(pace, [4])
        charged = pace.observe(TURNED, 0.012)
        told(pace, [0])
    assert charged == pytest.approx(1.2, rel=0.03)
    assert pace.plain_step == pytest.approx(0.01, rel=0.03) and pace.cost[3] == pytest.approx(1.5, rel=0.03)


def test_the_plain_step_is_that_of_rests() -> None:
    """A plain round that was thought about is slower, and so told alone it would make drafts seem cheaper than they are."""
    pace = Pace(SIZES)
    for _ in range(40):
        for _ in range(3):
            asked = pace.observe(ASKED, 0.011)
        told(pace, [4])
        pace.rest(16, 0.01)
    assert asked == pytest.approx(1.1, rel=0.01)
    assert pace.plain_step == pytest.approx(0.01, rel=0.01) and pace.cost[3] == pytest.approx(1.5, rel=0.01)


def test_a_rest_measures_the_plain_step() -> None:
    """Also before any other round did, whatever it was before, and as soon as one round that was asked for does."""
    pace = Pace(SIZES)
    pace.rest(9, 0.02)
    assert pace.plain_step == pytest.approx(0.02) and pace.plain_is_due
    pace.rest(9, 0.02)
    assert not pace.plain_is_due
    told(pace, [2] * STALE, step=0.02)
    assert pace.plain_is_due
    pace.rest(30, 0.05)
    assert not pace.plain_is_due and pace.plain_step == pytest.approx(0.05, rel=0.05) and pace.since_plain == 0
    told(pace, [2] * STALE, step=0.05)
    assert pace.plain_is_due
    pace.observe(ASKED, 0.05)
    assert not pace.plain_is_due and pace.since_plain == 0
    frozen = CostTable.of({0: 1.0, 2: 1.5}).pace(1, 1)
    frozen.rest(9, 0.5)
    assert frozen.plain_step == 1.0


def test_a_draft_costs_no_less_than_none() -> None:
    """If it seems to, the plain step was overrated: its first round was cold."""
    pace = told(Pace(SIZES), [0], step=0.05)
    told(pace, [1] * 5)
    assert min(pace.cost) == 1.0 and pace.plain_step <= 0.0121


def test_a_plain_round_on_a_busy_machine_makes_no_draft_dearer() -> None:
    """Again and again it is busy just while a plain round is measured: then drafts seem to cost less than none. What the other
    sizes cost has nothing to do with that."""
    pace = told(Pace(SIZES), [0, 1, 2, 4, 8] * 20, noise=0.02)
    for _ in range(6):
        told(pace, [0, 0, 0], step=0.02)
        told(pace, [2] * 5)
    assert pace.cost == pytest.approx(list(TRUE.values()), rel=0.25)


def test_what_was_measured_on_a_busy_machine_is_found_out() -> None:
    """It took far too long just while one size was tried. The longer ago, the less sure; and two that were much quicker are
    believed, for no machine is too quick."""
    pace = told(Pace(SIZES), [0, 1, 2, 4, 8] * 20, noise=0.02)
    for _ in range(24):
        told(pace, [8], step=0.03)
        told(pace, [0, 2])
    assert pace.cost[4] > 4.0
    sure = pace.high[4] / pace.cost[4]
    pace.rest(300, 0.01)
    assert pace.high[4] / pace.cost[4] > 1.2 * sure
    told(pace, [8, 0, 2, 8, 0, 2])
    assert pace.cost[4] < 2.5
    frozen = CostTable.of({0: 1.0, 2: 1.5}).pace(1, 1)
    frozen.skip(1000)
    assert frozen.high == frozen.cost == [1.0, 1.5]


def test_the_plain_step_is_measured_first_and_now_and_then() -> None:
    pace = Pace(SIZES)
    assert pace.plain_is_due and pace.plain_step == 0
    told(pace, [0])
    assert pace.plain_is_due, "the first may have been cold"
    told(pace, [0, 2])
    assert not pace.plain_is_due
    told(pace, [2] * (STALE - 1))
    assert pace.plain_is_due
    told(pace, [0])
    assert not pace.plain_is_due
    told(pace, [2, 2], step=0.1)
    assert pace.plain_is_due, "two surprises in a row"
    told(pace, [0])
    assert not pace.plain_is_due and pace.plain_step == pytest.approx(0.01, rel=0.2)


def test_a_new_shape_of_batch_begins_with_what_others_know() -> None:
    table = CostTable(SIZES)
    told(table.pace(1, 100), [0, 1, 2, 4, 8] * 10)
    assert table.pace(1, 200) is table.pace(1, 100), "short texts are alike"
    other = table.pace(7, 100)
    assert other is table.pace(8, 250) and other is not table.pace(4, 100)
    assert other.started and other.plain_is_due and other.plain_step == 0
    assert other.cost == pytest.approx(list(TRUE.values()), rel=0.02)
    assert other.high[4] > table.pace(1, 100).high[4]


def test_a_record_answers_as_the_table_did() -> None:
    table = CostTable(SIZES)
    told(table.pace(1, 100), [0, 1, 2, 4, 8] * 10)
    told(table.pace(8, 3000), [0, 2, 8], step=0.05)
    table.observe_setup(700, 3.0)
    again = CostTable.replay(json.loads(json.dumps(table.record())))
    for shape in ((1, 50), (8, 4000)):
        assert again.pace(*shape).cost == pytest.approx(table.pace(*shape).cost)
        assert again.pace(*shape).plain_step == pytest.approx(table.pace(*shape).plain_step)
    told(again.pace(1, 100), [4] * 50, step=9.0)
    again.observe_setup(700, 99.0)
    assert again.pace(1, 100).cost == pytest.approx(table.pace(1, 100).cost) and not again.pace(1, 100).plain_is_due
    assert again.setup(700) == table.setup(700) == 3.0


def test_set_ups_are_known_by_their_size() -> None:
    table = CostTable(SIZES)
    assert table.setup(500) == 0 and not table.knows_setups
    table.observe_setup(500, 4.0)
    assert table.knows_setups and table.setup(400) == 4.0 and table.setup(0) == 0
    assert table.setup(2000) == 16.0, "four times the tokens"
    assert table.setup(20) == 4.0, "no more than a larger one"
    table.observe_setup(500, 9.0)
    assert table.setup(500) == pytest.approx(5.5)
    table.observe_setup(500, 4.0)
    assert table.setup(500) == pytest.approx(4.45), "less is believed sooner"


def test_a_set_up_that_takes_far_too_long_is_believed_the_second_time_in_a_row() -> None:
    table = CostTable(SIZES)
    assert table.observe_setup(20, 100.0) == table.setup(20) == 1 + TOO_LONG
    assert table.observe_setup(20, 0.5) == 0.5 and table.setup(20) < 2
    believed = [table.observe_setup(20, 100.0) for _ in range(2)]
    assert believed[0] < 6 and believed[1] == 100.0


def test_a_round_that_takes_far_too_long_is_believed_the_second_time_in_a_row() -> None:
    pace = told(Pace(SIZES), [0, 0])
    assert pace.observe(3, 1.0) == pytest.approx(TOO_LONG * (1 + 4 * GUESS)) and pace.cost[3] < 4
    told(pace, [4] * 4)
    assert pace.cost[3] == pytest.approx(1.5, rel=0.15)
    slow = told(Pace(SIZES), [0, 0])
    for _ in range(2):
        slow.observe(3, 1.0)
    assert slow.cost[3] > 10, "more than any stake"


def test_a_curve_is_a_line_between_its_points() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 1.6, 4.0))
    assert [curve.at(width) for width in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 1.2, 1.6, 2.8, 4.0, 6.4])
    assert CostCurve((3,), (2.0,)).at(50) == 2.0


def test_a_curve_is_measured() -> None:
    turns: list[int] = []
    curve = measure_costs(target(), (4, 1, 300), rows=2, context=16, repeats=2, progress=lambda done, of: turns.append(done))
    assert curve.widths == (1, 4) and min(curve.seconds) > 0 and turns == [1, 2, 3]
