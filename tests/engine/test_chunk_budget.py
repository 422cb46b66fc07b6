"""Chunks of a prompt take about as long as a round, whatever the machine."""

from __future__ import annotations

import pytest

from draftproof.engine.chunk_budget import LEAST, SHARE, ChunkBudget


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 0.001), (0.01, 0.002), (0.0, 0.1), (0.0, 1e-5)])
def test_a_chunk_comes_to_take_so_many_rounds(fixed: float, each: float) -> None:
    budget, round_seconds = ChunkBudget(64), 0.02
    for _ in range(40):
        budget.round_took(round_seconds, 0)
        budget.chunk_took(budget.tokens, fixed + each * budget.tokens)
    wanted = (SHARE * round_seconds - fixed) / each
    assert budget.tokens == pytest.approx(min(max(wanted, LEAST), 64), abs=1.5)


def test_the_short_last_chunk_and_what_is_unknown_teach_nothing() -> None:
    budget = ChunkBudget(64)
    before = budget.tokens
    budget.chunk_took(before, 1.0)
    assert budget.tokens == before, "no round is known"
    budget.round_took(0.01, 0)
    budget.chunk_took(before - 1, 1.0)
    assert budget.tokens == before
    budget.chunk_took(before, 1.0)
    assert budget.tokens == before // 2, "at most by half at a time"
    assert ChunkBudget(2).tokens == 2


def test_drafts_next_to_a_prompt_do_not_make_its_chunks_longer() -> None:
    """With the time of chunks they would grow without end: each is bounded by the other."""
    budget = ChunkBudget(64)
    budget.round_took(0.02, 0)
    for _ in range(40):
        budget.pending = True
        budget.chunk_took(budget.tokens, 0.002 * budget.tokens)
        budget.round_took(0.1, 5)
    assert budget.tokens == round(SHARE * 0.02 / 0.002)
    assert budget.most_drafts(1) == budget.tokens and budget.most_drafts(64) == 0


def test_one_slow_round_is_not_believed() -> None:
    budget = ChunkBudget(64)
    for seconds in (0.02, 5.0, 0.02):
        budget.round_took(seconds, 0)
        budget.chunk_took(budget.tokens, 0.001 * budget.tokens)
    assert budget.tokens < 2 * SHARE * 0.02 / 0.001
