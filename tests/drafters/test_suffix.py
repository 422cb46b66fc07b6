"""Suffix decoding: the index counts as a dictionary would, and forgets the oldest texts first."""

from __future__ import annotations

import os
import random
from contextlib import suppress

import pytest
import torch
from drafting import commit_of, drafted, proposed
from tiny import CPU, sampler_of

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.suffix import OWN, SIZES, SLOTS, SuffixDrafter, slot_of
from draftproof.native.kernels import kernels
from draftproof.native.trees import TreeBuffer, texts_of

CAPACITY = 64
pytestmark = pytest.mark.usefixtures("lookup")
Text = list[int]


def started(memory: int = 4096, rows: int = 4, *texts: Text) -> SuffixDrafter:
    drafter = SuffixDrafter(memory)
    drafter.start(rows, CAPACITY, CPU)
    for row, text in enumerate(texts):
        drafter.observe(commit_of([row], [text]))
    return drafter


def counted(text: Text, others: list[Text]) -> dict[int, float]:
    """The chance of each next token after `text`, by dictionaries: an escape coder of method C."""
    confidence: dict[int, float] = {}
    left = 1.0
    for size in (size for size in SIZES if size <= len(text)):
        seen: dict[int, float] = {}
        ours: dict[int, bool] = {}  # whether last seen in the text itself
        for other in [*others, text[:-1]]:                      # the root is not committed
            for end in range(size, len(other)):
                if other[end - size : end] == text[-size:]:
                    seen[other[end]] = seen.get(other[end], 0) + 1
                    ours[other[end]] = other not in others
        seen = {token: count + OWN * ours[token] for token, count in seen.items()}
        total = sum(seen.values()) + len(seen)
        for token, count in seen.items():
            confidence[token] = confidence.get(token, 0.0) + left * count / total
        left *= len(seen) / total if seen else 1.0
    return confidence


def test_confidence_is_that_of_counting() -> None:
    """Random texts over four tokens, earlier and running: next tokens are as likely as counted."""
    slots = slot_of(torch.arange(30))
    four = [int((slots == item).nonzero()[0]) for item in range(SLOTS)]     # none replaces another
    dice, checked = random.Random(1), 0
    for case in range(25):
        texts = [[dice.choice(four) for _ in range(dice.randint(2, 30))] for _ in range(3)]
        drafter, mine = started(4096, 4, *texts[:2]), texts[2]
        drafter.select([])
        drafter.observe(commit_of([0], [mine[:1]]))
        for start in range(1, len(mine) - 1, 5):                # in pieces, as rounds commit them
            drafter.observe(commit_of([0], [mine[start : min(start + 5, len(mine) - 1)]]))
        settings = {path[0]: item for path, item in drafted(proposed(drafter, [mine], 30)).items()
                 if len(path) == 1}
        wanted = counted(mine, texts[:2])
        assert settings.keys() <= wanted.keys()
        kept = {token: item for token, item in wanted.items() if item > 0.05}   # others may go
        assert {token: settings.get(token, 0.0) for token in kept} == pytest.approx(
            kept, rel=0.05
        ), case
        checked += len(kept)
    assert checked > 50


@pytest.mark.parametrize(("earlier", "text", "wanted"), [
    (list(range(3, 33)), [1, 3, 4, 5, 6], [6, 7, 8, 9, 10, 11, 12]),
    ([5, 6, 7], [1, 5], [5, 6, 7]),                         # it stops where another text ends
    ([], [9, 1, 2, 3, 1, 2, 3], [3, 1, 2, 3, 1, 2, 3]),     # and repeats its own
], ids=["earlier", "end", "own"])  # fmt: skip
def test_earlier_continuations_are_drafted(earlier: Text, text: Text, wanted: Text) -> None:
    drafter = started(4096, 4, *([earlier] if earlier else []))
    drafter.start(2, CAPACITY, CPU)
    drafter.observe(commit_of([0], [text[:-1]]))
    tree = proposed(drafter, [text], trees=False)
    assert tree.is_chain and [item for item in tree.tokens[0].tolist() if item != ABSENT] == wanted


def test_a_row_reads_what_another_row_writes() -> None:
    drafter = started(4096, 4, [1], [2])
    drafter.observe(commit_of([0, 1], [[5, 6, 7, 8, 9], [11]]))
    tree = proposed(drafter, [[1, 5, 6, 7, 8, 9, 9], [2, 11, 6]], 2, trees=False)
    assert tree.tokens[1].tolist() == [6, 7, 8]


def test_ranking_prefers_frequency_over_recency_and_own_text_over_others() -> None:
    drafter = started()
    for text in ([4, 5], [4, 5], [4, 5], [4, 6]):
        drafter.observe(commit_of([0], [text]))
        drafter.select([])
    drafter.observe(commit_of([0], [[1]]))
    drafts = drafted(proposed(drafter, [[1, 4]]))
    assert drafts[(5,)] > drafts[(6,)] > 0
    drafter.observe(commit_of([0], [[4, 6, 2]]))
    two = drafted(proposed(drafter, [[1, 4, 6, 2, 4]]))
    assert two[(6,)] > two[(5,)] > 0


def _of_any(drafter: SuffixDrafter, text: Text) -> TokenTree:
    """As `proposed`, for tokens beyond the tests' vocabulary."""
    prefix = Prefix(torch.tensor([text]), torch.tensor([len(text) - 1]))
    return drafter.propose(Frontier(prefix, sampler_of(Sampling()), 4))


def test_oldest_texts_are_evicted_and_memory_use_is_constant() -> None:
    """Requests go on for ever, the store does not grow: the latest are known, the first are not."""
    drafter, sizes = started(3 * (CAPACITY + 3), 1), set()
    told = [[10 * n + 5, 10 * n + 6, 10 * n + 7] for n in range(12)]
    for text in told:
        drafter.start(1, CAPACITY, CPU)
        drafter.observe(commit_of([0], [text]))
        index = drafter._indexes[torch.device("cpu")]
        sizes.add((len(index.text), len(index.tags)))
    assert len(sizes) == 1
    drafter.start(1, CAPACITY, CPU)
    drafter.observe(commit_of([0], [[1]]))
    known = [(text[1],) in drafted(_of_any(drafter, [1, text[0]])) for text in told]
    assert known == [False] * 10 + [True] * 2


def test_tokens_of_any_vocabulary() -> None:
    text = [200_000, 3, 150_001, 9]
    tree = _of_any(started(4096, 4, text), [*text, 200_000])
    assert tree.tokens[0, :3].tolist() == text[:3]


@pytest.mark.skipif(kernels() is None, reason="no library here")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a read beyond memory ends the process")
def test_an_index_that_another_run_enlarged_is_not_read_beyond_its_text() -> None:
    """The other run learns after this one has described its index to the C library."""
    drafter, library = SuffixDrafter(), kernels()
    first = drafter.for_run(1, 100, CPU)
    first.observe(commit_of([0], [[5, 6, 7, 8]]))
    prefix = Prefix(torch.tensor([[5, 6, 7, 8, 9] + [0] * 96]), torch.tensor([4]))
    search = first.native_member(prefix).pointed("index")
    other = drafter.for_run(3, 60_000, CPU)
    for row, text in enumerate([[1, 2, 3], [4, 5], [1] * 300 + [5, 6, 7, 8, 9, 11, 12] * 3]):
        other.observe(commit_of([row], [text]))
    index = drafter._indexes[torch.device("cpu")]
    assert int(index.positions.max()) > search.pointed("index").room and library is not None
    child = os.fork()
    if not child:
        try:
            library("continue_text", search, texts_of(prefix, 8), 8, TreeBuffer(1, 9).output)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a read beyond memory ends the process")
def test_a_portfolio_asks_no_drafter_that_knows_fewer_rows() -> None:
    drafter = Portfolio([SuffixDrafter(100)])
    drafter.start(1, 60, CPU)
    prefix = Prefix(torch.tensor([[1, 2, 3] + [0] * 57]), torch.tensor([2]))
    child = os.fork()
    if not child:
        try:
            with suppress(Exception):
                drafter.propose(Frontier(prefix, sampler_of(Sampling()), 4))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_texts_of_another_owner_are_not_drafted_from() -> None:
    """Neither by what follows a context, nor where the text of one lies next to that of another."""
    mine, other = [3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 20, 21, 22, 23, 24]
    drafter, owners = started(), [random.Random(n).getrandbits(63) for n in range(3)]
    for owner, text in zip(owners, (mine, other, [4, 5, 9]), strict=True):
        drafter.start(4, CAPACITY, CPU)
        drafter.assign_owners([0], [owner])
        drafter.observe(commit_of([0], [text]))
    for owner, follows in ((owners[0], {6}), (owners[1], {20}), (0, set())):
        drafter.start(4, CAPACITY, CPU)
        drafter.assign_owners([0, 1], [owner, 1])
        drafter.observe(commit_of([0], [[1]]))
        drafter.observe(commit_of([1], [[1]]))
        tree = proposed(drafter, [[1, 3, 4, 5], [1, 3, 4, 5]])
        assert {path[0] for path in drafted(tree)} == follows
        assert not tree.present[1, 1:].any(), "nothing is known to the second row"
        drafter.select([1, 0])
        again = proposed(drafter, [[1, 3, 4, 5], [1, 3, 4, 5]])
        assert not again.present[0, 1:].any() and again.present[1, 1:].any() == bool(follows)


def test_a_draft_ends_where_the_text_of_another_owner_begins() -> None:
    drafter = started(4096, 1)
    index = drafter._indexes[torch.device("cpu")]
    for cursor, owner, text in ((0, 1, list(range(3, 20))), (8, 2, list(range(40, 60)))):
        drafter.start(1, CAPACITY, CPU)
        index.cursor = cursor
        drafter.assign_owners([0], [owner])
        drafter.observe(commit_of([0], [[token % 30 for token in text]]))
    drafter.start(1, CAPACITY, CPU)
    drafter.assign_owners([0], [1])
    drafter.observe(commit_of([0], [[3, 4, 5, 6]]))
    tree = proposed(drafter, [[3, 4, 5, 6, 7]], trees=False)
    assert [token for token in tree.tokens[0].tolist() if token != ABSENT] == [7, 8, 9, 10]


def test_copies_of_a_row_write_apart() -> None:
    """Samples of one prompt: each continues in a place of its own, all are remembered."""
    drafter = started(4096, 3, [3, 4, 5])
    drafter.select([0, 0, 0])
    drafter.observe(commit_of([0, 1, 2], [[6, 7], [8, 9], [10, 11]]))
    drafter.observe(commit_of([0, 1, 2], [[12], [13], [14]]))
    for row, end in enumerate((7, 9, 11)):
        texts = [[3, 4, 5, 6, 7, 12, end], [3, 4, 5, 8, 9, 13, end], [3, 4, 5, 10, 11, 14, end]]
        drafts = drafted(proposed(drafter, texts, 8))
        assert {(12,), (13,), (14,)} & drafts.keys() == {(12 + row,)}
