"""Prompt lookup: the plain search for what followed the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafting import Watch, assert_well_formed, drafted, frontier_of, per_round
from tiny import prompts, target

from draftproof.core.messages import Frontier
from draftproof.core.prefix import Prefix
from draftproof.drafters.prompt_lookup import PLACES, PromptLookup
from draftproof.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("lookup")


def frontier(
    texts: list[list[int]], budget: int, trees: bool, seed: int = 0, longest: bool = False
) -> Frontier:
    """Rows with noise after their text."""
    asked = frontier_of(texts, budget, trees=trees, capacity=40)
    tokens, position = asked.prefix.tokens, asked.prefix.position
    noise = torch.randint(3, tokens.shape, generator=torch.Generator().manual_seed(seed))
    tokens = torch.where(torch.arange(40) <= position[:, None], tokens, noise)
    prefix = Prefix(tokens, position, longest=int(position.max()) if longest else None)
    return replace(asked, prefix=prefix)


def search(text: list[int], longest: int, shortest: int) -> list[tuple[int, int]]:
    """Length and end of earlier matches of the text's end, the longest and latest first."""
    results = []
    for end in range(1, len(text)):
        size = 0
        while size < min(longest, end) and text[end - 1 - size] == text[-1 - size]:
            size += 1
        if size >= shortest:
            results.append((size, end))
    return sorted(results, reverse=True)


def goes_on(text: list[int], end: int, budget: int) -> list[int]:
    """The text from `end` on, round and round."""
    return [text[end + ahead % (len(text) - end)] for ahead in range(budget)]


def cases() -> list[tuple[list[int], int, int]]:
    dice = torch.Generator().manual_seed(0)
    sizes = [(1 + case % 17, 1 + case % 4, 1 + case % (1 + case % 4)) for case in range(200)]
    return [(torch.randint(3, (size,), generator=dice).tolist(), longest, shortest)
            for size, longest, shortest in sizes]


def by_hand(
    text: list[int], longest: int, shortest: int, budget: int
) -> dict[tuple[int, ...], float]:
    """The chance of every beginning of the best continuations, each if none before it is right."""
    confidence: dict[tuple[int, ...], float] = {}
    left = 1.0
    for size, end in search(text, longest, shortest)[:PLACES]:
        holds = left
        path = goes_on(text, end, budget)
        for depth in range(budget):
            holds *= (size + depth) / (size + depth + 3)
            prefix = tuple(path[: depth + 1])
            confidence[prefix] = confidence.get(prefix, 0.0) + holds
        left *= 3 / (size + 3)
    return confidence


def test_a_tree_holds_the_likeliest_of_several_continuations() -> None:
    """And a chain is the path of most expected tokens."""
    branched = 0
    for text, longest, shortest in cases():
        trees = []
        for wants_trees in (True, False):
            asked = frontier([text], 6, wants_trees, seed=len(text))
            trees.append(PromptLookup(longest, shortest).propose(asked))
            assert_well_formed(trees[-1], asked)
        confidence, drafts = by_hand(text, longest, shortest, 6), drafted(trees[0])
        best = sorted(confidence.values(), reverse=True)[:6]
        assert list(drafts.values()) == pytest.approx(best)
        assert drafts == pytest.approx({path: confidence[path] for path in drafts})
        worth = {path: sum(drafts[path[: end + 1]] for end in range(len(path))) for path in drafts}
        chain = max(drafted(trees[1]), key=len, default=())
        assert trees[1].is_chain and worth.get(chain, 0) == pytest.approx(
            max(worth.values(), default=0)
        )
        branched += sum(len(path) == 1 for path in drafts) > 1
    assert branched > 30, "no tree had two branches: it tests chains"


def test_rows_are_isolated_and_ignore_padding() -> None:
    texts = [text for text, _, _ in cases()[10:16]]
    together = PromptLookup().propose(frontier(texts, 5, True, seed=1))
    again = PromptLookup().propose(frontier(texts, 5, True, seed=2, longest=True))
    assert torch.equal(together.tokens, again.tokens)
    for row, text in enumerate(texts):
        alone = PromptLookup().propose(frontier([text], 5, True))
        assert drafted(alone) == drafted(together, row)


def test_repeated_text_is_accepted() -> None:
    """Greedy, a tiny model goes round in circles: lookup must follow it, and the text must stay."""
    asked = [text * 3 for text in prompts(6, seed=3)]
    wanted = [item.tokens for item in Engine(target()).generate(asked, max_new_tokens=60)]
    done = Engine(target(), Watch(PromptLookup()), budget=7).generate(asked, max_new_tokens=60)
    assert [completion.tokens for completion in done] == wanted
    assert per_round(done) > 1.5
