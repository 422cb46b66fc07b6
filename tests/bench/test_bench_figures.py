"""From recorded trials to figures: every number can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from recorded import GREEDY, Scripted, Time, bench, three_ways

from draftproof.bench.figures import Figures, Interval, Sameness, figures, first_difference, interval, waits
from draftproof.bench.measure import Bench, Chunk, Setting, Trial, Written

pytestmark = pytest.mark.usefixtures("memory_is_not_looked_at")


def of(run: Bench, price: float | None = None, categories: tuple[str, ...] = ()) -> dict[str, Figures]:
    found = figures(run, categories or ("",) * len(run.prompts), price)
    return {one.way: one for one in found}


def test_figures_of_a_steady_machine() -> None:
    run = bench(*three_ways(), prompts=4, turns=2)
    run.run()
    found = of(run, price=3.6)
    plain, drafter, stock = found["plain"], found["drafter"], found["transformers"]
    assert plain.tokens_per_second == pytest.approx(9 / 8.5)
    assert drafter.tokens_per_second == pytest.approx(9 / 3.5)
    assert drafter.speed_up is not None and drafter.speed_up.median == pytest.approx(8.5 / 3.5)
    assert drafter.against_generate is not None and drafter.against_generate.median == pytest.approx(17 / 3.5)
    assert stock.speed_up is not None and stock.speed_up.median == pytest.approx(0.5)
    assert drafter.tokens_per_round == pytest.approx(8 / 3) and plain.tokens_per_round == 1
    assert drafter.rounds_by_tokens == {1: 8, 3: 8, 4: 8}
    assert drafter.first_token == 0.5 and stock.first_token == 1.0
    assert drafter.cost_per_million == pytest.approx(3.6 / 3600 * 3.5 / 9 * 1e6)
    assert drafter.seconds_per_token is not None and stock.seconds_per_token is None
    assert sum(drafter.seconds_per_token.values()) == pytest.approx(3.5 / 9)
    assert drafter.seconds_per_token["other"] == pytest.approx(0.6 / 9)


def test_a_ratio_is_taken_pair_by_pair() -> None:
    """A machine that slows down tenfold between prompts changes no ratio; medians of speeds would be far off."""
    time = Time()
    swings = (1.0, 1.0, 1.0, 10.0, 10.0, 1.0, 3.0)                    # the first two are warm-ups
    run = bench(Scripted("plain", time, [1] * 8, slower=swings), Scripted("drafter", time, [4, 4], slower=swings), prompts=5)
    run.run()
    found = of(run)["drafter"].speed_up
    assert found is not None
    assert found.median == pytest.approx(8.5 / 2.5) and found.low == pytest.approx(found.high)


def test_turns_are_medians_before_prompts_are() -> None:
    time = Time()
    plain = Scripted("plain", time, [1] * 8)
    drafter = Scripted("drafter", time, [4, 4], slower=(1, 1, 1, 1, 1, 1, 1, 50))   # two prompts, three turns: one hiccup
    run = bench(plain, drafter, prompts=2, turns=3)
    run.run()
    found = of(run)["drafter"].speed_up
    assert found is not None and found.median == pytest.approx(3.4) and found.low == pytest.approx(3.4)


def test_the_interval_holds_the_median_and_narrows_with_more_prompts() -> None:
    few, many = interval([1.0, 1.5, 2.0, 2.5]), interval([1.0, 1.5, 2.0, 2.5] * 20)
    for found in (few, many):
        assert found.low is not None and found.high is not None and found.low <= found.median <= found.high
    assert many.high - many.low < few.high - few.low  # type: ignore[operator]
    assert interval([2.0]) == Interval(2.0)
    assert interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0)
    assert few == interval([1.0, 1.5, 2.0, 2.5])                     # no dice that change from run to run


def test_a_bootstrap_interval_covers_as_often_as_it_says() -> None:
    """Medians of 25 exponential values: the true one, log 2, lies inside nine times in ten at least."""
    import numpy as np

    dice = np.random.default_rng(1)
    inside = 0
    for _ in range(60):
        found = interval(dice.exponential(size=25).tolist())
        inside += found.low <= math.log(2) <= found.high  # type: ignore[operator]
    assert inside >= 54


def test_texts_are_compared_with_plain_token_by_token() -> None:
    time = Time()
    wrong = [*range(6), 99, *range(7, 100)]
    run = bench(Scripted("plain", time, [1] * 8), Scripted("drafter", time, [4, 4], text=wrong), prompts=3)
    run.run()
    found = of(run)
    assert found["drafter"].texts == Sameness(compared=3, same=0, first=(1, 7))
    assert found["plain"].texts is None
    run.ways[1].text = tuple(range(100))  # type: ignore[attr-defined]
    run.trials.clear()
    run.run()
    assert of(run)["drafter"].texts == Sameness(compared=3, same=3)


def test_a_shorter_text_differs_behind_its_end() -> None:
    assert first_difference([1, 2], [1, 2, 3]) == 3 and first_difference([1, 2, 3], [1, 2]) == 3
    assert first_difference([1, 2], [1, 2]) is None and first_difference([5], [1, 2]) == 1


def test_tokens_of_one_chunk_wait_for_the_first_of_them_only() -> None:
    chunks = [Chunk(1.0, 1), Chunk(2.0, 3), Chunk(5.0, 1)]
    trial = Trial("drafter", GREEDY, 0, 0, (0,), [Written([1] * 5, chunks)], 5.0)
    assert waits([trial]) == pytest.approx((0.5, 2.7, 2.94))           # of 0, 0, 1, 3
    assert waits([replace(trial, texts=[Written([1], chunks[:1])])]) is None


def test_the_first_token_is_not_kept_waiting_by_other_texts() -> None:
    """Of those that waited for a row nobody says when they began."""
    run = bench(*three_ways(), prompts=2, settings=[Setting(2, 0.0)])
    run.run()
    for place, trial in enumerate(run.trials):
        late = [replace(text, chunks=[Chunk(chunk.at + 9, chunk.tokens) for chunk in text.chunks]) for text in trial.texts]
        run.trials[place] = replace(trial, texts=[*trial.texts, *late], prompts=trial.prompts * 2)
    assert of(run)["drafter"].first_token == of(run)["plain"].first_token == 0.5


def test_a_way_that_reads_prompt_and_draft_at_once_has_no_round_of_its_own_for_the_prompt() -> None:
    chunks = [Chunk(1.0, 5), Chunk(2.0, 3)]
    assert Written([1] * 8, chunks).rounds == [3]
    assert Written([1] * 8, chunks, prefilled=False).rounds == [5, 3]


def test_the_ceiling_is_what_bare_forwards_allow() -> None:
    run = bench(*three_ways(), prompts=2)
    run.run()
    found = of(run)
    ceiling = found["drafter"].ceiling
    assert ceiling is not None and found["transformers"].ceiling is None
    assert (ceiling.verify_seconds, ceiling.draft_seconds) == (0.8, 0.1)
    assert ceiling.tokens_per_second == pytest.approx(8 / 3 / 0.9)
    assert ceiling.decoding_tokens_per_second == pytest.approx(8 / 3)    # eight tokens in three rounds of a second
    assert ceiling.efficiency.median == pytest.approx(0.9)


@pytest.mark.parametrize("turns", [1, 3])
def test_what_was_reached_is_the_same_on_a_host_that_slows_down(turns: int) -> None:
    """Half way it becomes half as fast, or ten times slower now and then: a trial and its forwards alike."""
    calls = 2 + 4 * turns                                               # two warm-ups, then four prompts in each turn
    half, swings = [1.0] * (calls // 2) + [2.0], [1.0, 1.0, *[1.0, 10.0, 1.0] * 20]
    for slower in (half, swings):
        time = Time()
        ways = [Scripted("plain", time, [1] * 8, slower=slower), Scripted("drafter", time, [4, 4], slower=slower, draft=0.1)]
        run = bench(*ways, prompts=4, turns=turns)
        run.run()
        ceiling = of(run)["drafter"].ceiling
        assert ceiling is not None and ceiling.efficiency.low is not None
        assert (ceiling.efficiency.low, ceiling.efficiency.high) == pytest.approx((0.9, 0.9))
        assert ceiling.efficiency.median == pytest.approx(0.9)
        assert len({trial.seconds for trial in run.trials if trial.way == "drafter"}) == 2


def test_trials_whose_forwards_nobody_measured_have_no_part_in_what_was_reached() -> None:
    run = bench(*three_ways(), prompts=4)
    run.run()
    run.trials = [replace(one, bare=None, seconds=9 * one.seconds) if one.group else one for one in run.trials]
    ceiling = of(run)["drafter"].ceiling
    assert ceiling is not None and ceiling.efficiency == Interval(pytest.approx(0.9))
    run.trials = [replace(one, bare=None) for one in run.trials]
    assert of(run)["drafter"].ceiling is None


def test_rows_side_by_side_share_rounds() -> None:
    """In a batch, tokens of all rows count against one forward; and seconds of rows are not added up."""
    run = bench(*three_ways(), prompts=4, settings=[Setting(4, 0.0)])
    run.run()
    drafter = of(run)["drafter"]
    assert drafter.tokens_per_second == pytest.approx(4 * 9 / 3.5)
    assert drafter.ceiling is not None and drafter.ceiling.tokens_per_second == pytest.approx(4 * 8 / 3 / 0.9)
    assert drafter.ceiling.efficiency.median == pytest.approx(0.9)
    assert drafter.seconds_per_token is not None
    assert sum(drafter.seconds_per_token.values()) == pytest.approx(3.5 / 36)


def test_batches_are_held_against_one_row_turn_by_turn() -> None:
    """A machine that is three times as slow in the second turn changes no ratio; of one row alone there is none."""
    time = Time()
    plain = Scripted("plain", time, [1] * 8, slower=[1.0] * (2 * 2 + 6) + [3.0])           # warm-ups, and the first turn
    run = bench(plain, prompts=5, settings=[Setting(1, 0.0), Setting(5, 0.0)], turns=2)
    run.run()
    one, five = figures(run, [""] * 5)
    assert one.against_one_row is None and five.against_one_row is not None
    assert (five.against_one_row.median, five.against_one_row.low, five.against_one_row.high) == pytest.approx((5.0, 5.0, 5.0))
    assert [trial.seconds for trial in run.trials if trial.setting.batch == 5] == pytest.approx([8.5, 25.5])
    run.trials = [trial for trial in run.trials if trial.setting.batch == 5]
    assert figures(run, [""] * 5)[0].against_one_row is None


def test_categories_are_counted_apart() -> None:
    time = Time()
    run = bench(Scripted("plain", time, [1] * 8), Scripted("drafter", time, [4, 4]), prompts=3)
    run.run()
    for trial in run.trials:                                            # the last prompt is one that drafts go wrong in
        if trial.way == "drafter" and trial.prompts == (2,):
            text = trial.texts[0]
            stats = type(text.stats)()  # type: ignore[misc]
            for _ in range(8):
                stats.record(width=3, drafted=3, reach=3, accepted=0, emitted=1)
            trial.texts[0] = Written(text.tokens, [Chunk(at, 1) for at in range(9)], stats=stats)
    found = of(run, categories=("easy", "easy", "hard"))["drafter"].categories
    assert found["easy"].tokens_per_round == 4 and found["easy"].acceptance == 1 and found["easy"].prompts == 2
    assert found["hard"].tokens_per_round == 1 and found["hard"].acceptance == 0
    assert found["easy"].speed_up == pytest.approx(3.4)
    assert of(run, categories=("", "", "hard"))["drafter"].categories.keys() == {"hard"}


def test_an_interrupted_run_compares_what_has_a_pair() -> None:
    run = bench(*three_ways(), prompts=2)
    run.run()
    run.trials = [trial for trial in run.trials if (trial.way, trial.group) != ("plain", 1)]
    found = of(run)["drafter"]
    assert found.trials == 2 and found.speed_up == Interval(pytest.approx(8.5 / 3.5))
    assert found.texts == Sameness(1, 1)
    run.trials = [trial for trial in run.trials if trial.way != "plain"]
    assert of(run)["drafter"].speed_up is None and of(run)["drafter"].texts is None


def test_joules_are_told_only_where_every_run_was_metered() -> None:
    run = bench(*three_ways(), prompts=2)
    run.run()
    assert of(run)["drafter"].joules_per_token is None
    run.trials = [replace(trial, joules=18.0) for trial in run.trials]
    assert of(run)["drafter"].joules_per_token == pytest.approx(2.0)
