"""Lookups, suffixes, token recycling and their merging: `CpuOps` computes what `Ops` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import assert_well_formed
from helpers.pools import assert_alike, pools
from tiny import CPU, sampler_of

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.ops import TORCH
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import SIZES, SLOTS, SuffixDrafter, slot_of
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.native.kernels import kernels
from draftproof.native.structures import LANES

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler here")

VOCAB, CAPACITY = 7, 160
TEXTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 5, 6, 7, 5, 6, 7, 5, 6]]
APART = [int((slot_of(torch.arange(50)) == number).int().argmax()) for number in range(SLOTS)]
"""Tokens that never push each other out: of two that do so within one commit, operators count both
for the last."""


def frontier(texts: Sequence[Sequence[int]], budget: int, trees: bool = True) -> Frontier:
    tokens = torch.full((len(texts), CAPACITY), 2)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    position = torch.tensor([len(text) - 1 for text in texts])
    return Frontier(
        Prefix(tokens, position), sampler_of(*[Sampling()] * len(texts)), budget, trees=trees
    )


def piece(rows: range, texts: list[list[int]]) -> Commit:
    width = max(map(len, texts))
    tokens = torch.tensor([text + [1] * (width - len(text)) for text in texts])
    count = torch.tensor([len(text) for text in texts])
    return Commit(rows, tokens, torch.arange(width).expand(len(texts), -1), count)


def written(dice: torch.Generator, most: int) -> list[int]:
    """Tokens among which much comes again."""
    size = int(torch.randint(1, most, (), generator=dice))
    return [APART[int(4 * number**2)] for number in torch.rand(size, generator=dice)]


def asked_alike(drafters: Sequence[Drafter], asked: Frontier) -> None:
    trees = []
    for drafter in drafters:
        trees.append(drafter.propose(asked))
        assert_well_formed(trees[-1], asked)
    if asked.trees:
        assert_alike(*trees)


def test_lookups_find_the_same() -> None:
    dice = torch.Generator().manual_seed(3)
    for longest, shortest in ((16, 1), (1, 1), (3, 2), (5, 5)):
        drafters = [PromptLookup(longest, shortest), PromptLookup(longest, shortest)]
        drafters[1].ops, drafters[0].ops = TORCH, CPU
        for budget in (1, 4, 9):
            asked_alike(drafters, frontier([written(dice, 60) for _ in range(5)], budget))
            # more places than are looked at
            many = torch.randint(2, (150,), generator=dice).tolist()
            asked_alike(drafters, frontier([many], budget))


def observed_alike(drafters: Sequence[Drafter], commit: Commit) -> None:
    for drafter in drafters:
        drafter.observe(commit)


def test_suffixes_are_kept_and_found_alike() -> None:
    """Also when memory is used up, and old text lies where new is written."""
    assert SIZES[0] == LANES
    dice, drafters = torch.Generator().manual_seed(4), [SuffixDrafter(), SuffixDrafter()]
    indexes = [drafter._indexes[torch.device("cpu")] for drafter in drafters]
    texts: list[list[int]] = []
    for drafter in drafters:
        # an index without collisions, and room for few texts
        drafter.memory = 7 * CAPACITY
    for turn in range(60):
        if turn % 12 == 0:
            for drafter, ops in zip(drafters, (CPU, TORCH), strict=True):
                drafter.start(3, CAPACITY, ops)
            texts = [written(dice, 40) for _ in range(3)]
            for row in range(3):
                observed_alike(drafters, piece(range(row, row + 1), texts[row : row + 1]))
        # a row goes, another is there twice
        if turn % 12 == 6:
            texts = [texts[2], texts[0], list(texts[0])]
            for drafter in drafters:
                drafter.select([2, 0, 0])
        roots = [*written(dice, 9), *range(3)]
        for budget in (1, 5):
            asked_alike(
                drafters,
                frontier([[*text, root] for text, root in zip(texts, roots, strict=False)], budget)
            )
        more = [written(dice, 6) for _ in texts]
        texts = [[*text, *new] for text, new in zip(texts, more, strict=True)]
        observed_alike(drafters, piece(range(3), more))
    ours, theirs = indexes
    assert ours.tags.count_nonzero() > 100
    for name in ("text", "tags", "places", "counts"):
        # the last is for nothing
        assert torch.equal(getattr(ours, name)[:-1], getattr(theirs, name)[:-1])
    for one, other in zip(drafters[0]._rows or (), drafters[1]._rows or (), strict=True):
        assert torch.equal(one, other)


def read(dice: torch.Generator, tree: TokenTree, spoiled: bool) -> Successors:
    """What came out behind its nodes: the best of random logits, sure of them or not."""
    sure = 3 * torch.rand(*tree.tokens.shape, 1, generator=dice)
    logits = sure * torch.randn(*tree.tokens.shape, VOCAB, generator=dice)
    if spoiled:
        logits[:, ::2] = torch.nan
    best = logits.topk(5, -1)
    return Successors(tree, best.indices, best.values)


def test_successors_are_kept_and_found_alike() -> None:
    dice, drafters = torch.Generator().manual_seed(5), [TokenRecycling(300), TokenRecycling(300)]
    drafters[1].ops, drafters[0].ops = TORCH, CPU
    texts = [written(dice, 12) for _ in range(3)]
    for row, text in enumerate(texts):
        observed_alike(drafters, piece(range(row, row + 1), [text]))
    for turn in range(15):
        tokens, parents, _ = pools(dice, 3, 6, VOCAB)
        texts = [[*text, root] for text, root in zip(texts, tokens[:, 0].tolist(), strict=True)]
        asked_alike(drafters, frontier(texts, 1 + turn % 9, trees=turn != 3))
        commit = piece(range(3), [text[-1:] for text in texts])
        observed_alike(
            drafters,
            replace(
                commit, successors=read(dice, TokenTree(tokens, parents, 5), spoiled=turn == 7)
            ),
        )
    for drafter, ops in zip(drafters, (CPU, TORCH), strict=True):
        drafter.start(3, CAPACITY, ops)
    # prompts: known tokens, in known pairs and in new ones
    for row in range(3):
        text = written(dice, 30)
        observed_alike(
            drafters,
            piece(
                range(row, row + 1),
                [[*text, *(one for token in text for one in (token, 50 + token))]]
            ),
        )
    ours, theirs = (drafter._tables[torch.device("cpu")] for drafter in drafters)
    assert ours.tags.count_nonzero() > 20
    assert torch.equal(ours.tags[:-1], theirs.tags[:-1]) and torch.equal(
        ours.tokens[:-1], theirs.tokens[:-1]
    )
    torch.testing.assert_close(ours.confidence[:-1], theirs.confidence[:-1], rtol=1e-5, atol=1e-7)


def test_members_are_judged_and_merged_alike() -> None:
    """Also by trees without odds, and while rows come and go."""
    dice = torch.Generator().manual_seed(6)

    class Silent(PromptLookup):
        def propose(self, frontier: Frontier) -> TokenTree:
            return replace(super().propose(frontier), confidence=None)

    drafters = [Portfolio([PromptLookup(), SuffixDrafter(2000), Silent(3)]) for _ in range(2)]
    for drafter, ops in zip(drafters, (CPU, TORCH), strict=True):
        drafter.start(3, CAPACITY, ops)
    texts: list[list[int]] = []
    for turn in range(14):
        if turn in (0, 1, 5):
            texts.append(written(dice, 20))
            observed_alike(drafters, piece(range(len(texts) - 1, len(texts)), texts[-1:]))
        if turn == 9:
            texts = [texts[2], texts[1]]
            for drafter in drafters:
                drafter.select([2, 1])
        new = [written(dice, 4) for _ in texts]
        asked_alike(
            drafters,
            frontier(
                [[*text, more[0]] for text, more in zip(texts, new, strict=True)], 6,
                trees=turn != 11
            ),
        )
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
        observed_alike(drafters, piece(range(len(texts)), new))
    ours, theirs = (drafter._counts for drafter in drafters)
    assert ours is not None and theirs is not None and float(ours.all[:, 1].sum()) > 50
    torch.testing.assert_close(ours.all, theirs.all)
    torch.testing.assert_close(ours.rows, theirs.rows)
