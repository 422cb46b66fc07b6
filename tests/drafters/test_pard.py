"""PARD: a draft model that reads mask tokens, against a forward without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafting
import pytest
import tiny
import torch
from published import keeps_the_text

from draftproof.core.tree import TokenTree
from draftproof.drafters.draft_parallel import TOKENS, ParallelDraft
from draftproof.engine.load import load
from draftproof.errors import BadInput, DrafterMismatch

MASK, SEEN = 39, [7, 3, 31, 2, 9, 4, 4, 1, 12]


def drafter(**overrides: Any) -> ParallelDraft:
    draft = tiny.target(seed=1, num_hidden_layers=1, **overrides)
    return ParallelDraft(draft, tiny.VOCAB, MASK, trees=True)


def test_blocks_match_reading_without_a_cache() -> None:
    """After a prompt, and again after some of the draft was accepted."""
    ours, model, seen = drafter(), tiny.model(seed=1, num_hidden_layers=1), list(SEEN)
    ours.start(1, 64, drafting.CPU)
    ours.observe(drafting.commit_of([0], [seen[:-1]]))
    for new in ([], [5, 8, 0], [3]):
        if new:
            ours.observe(drafting.commit_of([0], [[seen[-1], *new[:-1]]]))
        seen += new
        with torch.inference_mode():
            frontier = drafting.frontier_of([seen], 4)
            result = ours._block(frontier, 4)[0]
            wanted = model(torch.tensor([[*seen, *[MASK] * 3]])).logits[0, len(seen) - 1 :]
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-9)


def test_rows_of_different_lengths_share_a_pass() -> None:
    ours, texts = drafter(), [SEEN, SEEN[:4]]
    ours.start(2, 64, drafting.CPU)
    for row, text in enumerate(texts):
        ours.observe(drafting.commit_of([row], [text[:-1]]))
    with torch.inference_mode():
        result = ours.propose(drafting.frontier_of(texts, 4, trees=False)).tokens
        for row, text in enumerate(texts):
            alone = drafter()
            alone.start(1, 64, drafting.CPU)
            alone.observe(drafting.commit_of([0], [text[:-1]]))
            item = alone.propose(drafting.frontier_of([text], 4, trees=False)).tokens
            assert result[row].tolist() == item[0].tolist()


def test_text_is_unchanged() -> None:
    keeps_the_text(drafter(), tiny.target())


def test_a_folder_with_a_mask_token_drafts_in_one_pass(tmp_path: Path) -> None:
    """One model for a whole family, named as a draft model or as a drafter."""
    draft = tiny.fresh("llama", 1, num_hidden_layers=1)
    draft.config.pard_token = MASK
    draft.save_pretrained(tmp_path / "pard")
    plain = load(tiny.model(), drafter="none").generate([SEEN], max_new_tokens=12)[0]
    for options in ({"drafter": tmp_path / "pard"}, {"assistant_model": tmp_path / "pard"}):
        engine = load(tiny.model(), **options)
        assert isinstance(engine.drafter, ParallelDraft)
        assert engine.generate([SEEN], max_new_tokens=12)[0].tokens == plain.tokens
    with pytest.raises(BadInput, match="shapes its own"):
        load(tiny.model(), drafter=tmp_path / "pard", draft_tree="zephyr_stage2")
    with pytest.raises(DrafterMismatch, match="pard_token"):
        ParallelDraft(tiny.target(seed=1), tiny.VOCAB, 4000)


def test_long_gaps_are_read_apart() -> None:
    ours, text = drafter(), [3 + number % 30 for number in range(60)]
    ours.start(1, 128, drafting.CPU)
    ours.observe(drafting.commit_of([0], [text[:-1]]))
    with torch.inference_mode():
        tree = ours.propose(drafting.frontier_of([text], TOKENS, trees=False, capacity=128))
        model = tiny.model(seed=1, num_hidden_layers=1)
        wanted = model(torch.tensor([[*text, *[MASK] * (TOKENS - 1)]])).logits[0, len(text) - 1 :]
    assert isinstance(tree, TokenTree)
    assert tree.tokens[0, 1:].tolist() == wanted.argmax(-1).tolist()
