"""Chunks of a prompt take about as long as a round, whatever the machine."""

from __future__ import annotations

import pytest

from draftproof.engine.chunk_budget import LEAST, SHARE, TOGETHER, ChunkBudget


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 0.001), (0.01, 0.002), (0.0, 0.1), (0.0, 1e-5)])
def test_chunk_size_converges_to_the_target_time(fixed: float, each: float) -> None:
    budget, round_seconds = ChunkBudget(64), 0.02
    for _ in range(40):
        budget.round_took(round_seconds, 0)
        budget.chunk_took(budget.tokens, fixed + each * budget.tokens)
    wanted = (SHARE * round_seconds - fixed) / each
    assert budget.tokens == pytest.approx(min(max(wanted, LEAST), 64), abs=1.5)


@pytest.mark.parametrize(("fixed", "each"), [
    (0.0, 0.001), (0.01, 0.001), (0.018, 0.0005), (0.0, 1e-5)])  # fmt: skip
def test_mixed_passes_converge_to_the_target_time_with_any_draft(
    fixed: float, each: float
) -> None:
    budget, round_seconds, longest = ChunkBudget(64), 0.02, 0.0
    for _ in range(9):
        budget.round_took(round_seconds, 3)
    for drafted in [3, 0, 7, 20] * 20:
        nodes = 1 + min(drafted, budget.most_drafts(1))
        chunk = budget.chunk_size(nodes)
        seconds = fixed + each * (nodes + chunk)
        budget.pass_took(chunk, nodes, seconds)
        longest = max(longest, seconds)
    wanted = (TOGETHER * round_seconds - fixed) / each
    assert budget.pass_tokens == pytest.approx(min(wanted, 128), rel=0.1)
    assert longest < 1.3 * TOGETHER * round_seconds, "on the way there, too"


def test_prompts_progress_even_if_rounds_become_slower() -> None:
    budget = ChunkBudget(64)
    for _ in range(40):
        budget.round_took(0.02, 0)
    for _ in range(90):
        chunk = budget.chunk_size(4)
        budget.pass_took(chunk, 4, 0.08 + 0.002 * chunk)
    assert chunk > 3 * LEAST


def test_short_or_unmeasured_chunks_are_ignored() -> None:
    budget = ChunkBudget(64)
    before = budget.tokens
    budget.chunk_took(before, 1.0)
    assert budget.tokens == before, "no round is known"
    for _ in range(5):
        budget.round_took(0.01, 0)
        budget.chunk_took(budget.tokens, 0.001)
    before = budget.tokens
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


def test_slow_outlier_rounds_are_ignored() -> None:
    budget = ChunkBudget(64)
    for seconds in (0.02, 5.0, 0.02, 0.02, 5.0) * 4:
        budget.round_took(seconds, 0)
        budget.chunk_took(budget.tokens, 0.001 * budget.tokens)
    assert budget.tokens < 1.1 * SHARE * 0.02 / 0.001
