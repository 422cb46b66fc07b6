"""Suffix decoding: the index counts as a dictionary would, remembers earlier requests, and forgets the oldest."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from drafting import Watch, assert_well_formed
from tiny import CPU, VOCAB, prompts, sampler_of, target
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, NOTHING, TokenTree
from draftproof.drafters.suffix import OWN, SIZES, SLOTS, Places, SuffixDrafter, slot_of
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput

CAPACITY = 64
pytestmark = pytest.mark.usefixtures("lookup")
Text = list[int]


def commit(rows: list[int], texts: list[Text]) -> Commit:
    """Ragged pieces of text; behind them stands what must not be read."""
    width = max(map(len, texts))
    tokens = torch.tensor([text + [1] * (width - len(text)) for text in texts])
    count = torch.tensor([len(text) for text in texts])
    return Commit(rows, tokens, torch.arange(width).expand(len(rows), -1), count)


def propose(drafter: SuffixDrafter, texts: list[Text], budget: int = 6, trees: bool = True) -> TokenTree:
    """A proposal behind texts whose last token is the root, all before it observed."""
    tokens = torch.full((len(texts), CAPACITY), 2)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    position = torch.tensor([len(text) - 1 for text in texts])
    asked = Frontier(Prefix(tokens, position), sampler_of(*[Sampling()] * len(texts)), budget, trees=trees)
    tree = drafter.propose(asked)
    assert_well_formed(tree, asked)
    return tree


def paths_of(tree: TokenTree, row: int = 0) -> dict[tuple[int, ...], float]:
    """Drafted texts behind the root and their odds."""
    assert tree.confidence is not None
    texts = [tuple(token for token in text[1:] if token != NOTHING) for text in tree.texts[row].tolist()]
    there = tree.present[row].tolist()
    return {text: confidence for text, confidence, here in zip(texts, tree.confidence[row].tolist(), there, strict=True) if here and text}


def started(memory: int = 4096, rows: int = 4) -> SuffixDrafter:
    drafter = SuffixDrafter(memory)
    drafter.start(rows, CAPACITY, CPU)
    return drafter


def ways() -> Text:
    """Four tokens that never push each other out."""
    kept = slot_of(torch.arange(30))
    return [int((kept == one).nonzero()[0]) for one in range(SLOTS)]


def counted(text: Text, others: list[Text]) -> dict[int, float]:
    """The odds of each next token behind `text`, by dictionaries: escape to the next shorter context (method C)."""
    confidence: dict[int, float] = {}
    left = 1.0
    for size in (size for size in SIZES if size <= len(text)):
        seen: dict[int, float] = {}
        own: dict[int, bool] = {}                                       # whether it was last seen in the text itself
        for other in [*others, text[:-1]]:                              # the root is not committed
            for end in range(size, len(other)):
                if other[end - size : end] == text[-size:]:
                    seen[other[end]] = seen.get(other[end], 0) + 1
                    own[other[end]] = other not in others
        seen = {token: count + OWN * own[token] for token, count in seen.items()}
        room = sum(seen.values()) + len(seen)
        for token, count in seen.items():
            confidence[token] = confidence.get(token, 0.0) + left * count / room
        left *= len(seen) / room if seen else 1.0
    return confidence


def test_the_odds_are_those_of_counting() -> None:
    """Of random texts over four tokens, earlier and running: every next token has the odds a dictionary gives it."""
    dice, four, checked = random.Random(1), ways(), 0
    for case in range(25):
        texts = [[dice.choice(four) for _ in range(dice.randint(2, 30))] for _ in range(3)]
        drafter = started()
        for row, text in enumerate(texts[:2]):
            drafter.observe(commit([row], [text]))
        drafter.select([])
        mine = texts[2]
        drafter.observe(commit([0], [mine[:1]]))
        for start in range(1, len(mine) - 1, 5):                        # in pieces, as rounds commit them
            drafter.observe(commit([0], [mine[start : min(start + 5, len(mine) - 1)]]))
        found = {path[0]: confidence for path, confidence in paths_of(propose(drafter, [mine], budget=30)).items() if len(path) == 1}
        wanted = counted(mine, texts[:2])
        assert found.keys() <= wanted.keys()
        kept = {token: confidence for token, confidence in wanted.items() if confidence > 0.05}       # the least may not be drafted at all
        assert {token: found.get(token, 0.0) for token in kept} == pytest.approx(kept, rel=0.05), case
        checked += len(kept)
    assert checked > 50


def test_an_earlier_request_is_remembered_and_continued() -> None:
    drafter = started()
    story = list(range(3, 33))
    drafter.observe(commit([0], [story]))
    drafter.select([])
    drafter.start(2, CAPACITY, CPU)
    drafter.observe(commit([0], [[1, *story[:3]]]))
    tree = propose(drafter, [[1, *story[:4]]], trees=False)
    assert tree.is_chain and tree.tokens[0].tolist() == story[3:10]


def test_a_row_reads_what_another_row_writes() -> None:
    drafter = started()
    for row in range(2):
        drafter.observe(commit([row], [[row + 1]]))
    drafter.observe(commit([0, 1], [[5, 6, 7, 8, 9], [11]]))
    tree = propose(drafter, [[1, 5, 6, 7, 8, 9, 9], [2, 11, 6]], budget=2, trees=False)
    assert tree.tokens[1].tolist() == [6, 7, 8]


def test_a_text_that_ends_goes_round() -> None:
    """Where the row's own text comes to its end, the root included, the draft begins again at the match."""
    drafter = started()
    drafter.observe(commit([0], [[9, 1, 2, 3, 1, 2]]))
    assert propose(drafter, [[9, 1, 2, 3, 1, 2, 3]], trees=False).tokens[0].tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_the_draft_stops_where_another_text_ends() -> None:
    drafter = started()
    drafter.observe(commit([0], [[5, 6, 7]]))
    drafter.select([])
    drafter.observe(commit([0], [[1]]))
    tree = propose(drafter, [[1, 5]], trees=False)
    assert [token for token in tree.tokens[0].tolist() if token != ABSENT] == [5, 6, 7]


def test_frequent_before_recent_and_own_before_foreign() -> None:
    drafter = started()
    for text in ([4, 5], [4, 5], [4, 5], [4, 6]):
        drafter.observe(commit([0], [text]))
        drafter.select([])
    drafter.observe(commit([0], [[1]]))
    one = paths_of(propose(drafter, [[1, 4]]))
    assert one[(5,)] > one[(6,)] > 0
    drafter.observe(commit([0], [[4, 6, 2]]))
    two = paths_of(propose(drafter, [[1, 4, 6, 2, 4]]))
    assert two[(6,)] > two[(5,)] > 0


def test_the_oldest_is_forgotten_and_memory_stays_what_it_is() -> None:
    """Requests go on for ever, the store does not grow: the latest are known, the first are not."""
    drafter = started(memory=3 * (CAPACITY + 3), rows=1)
    told = [[10 * n + 5, 10 * n + 6, 10 * n + 7] for n in range(12)]
    sizes = set()
    for text in told:
        drafter.start(1, CAPACITY, CPU)
        drafter.observe(commit([0], [text]))
        assert drafter._index is not None
        sizes.add((len(drafter._index.text), len(drafter._index.tags)))
    assert len(sizes) == 1
    drafter.start(1, CAPACITY, CPU)
    drafter.observe(commit([0], [[1]]))
    known = [(text[1],) in paths_of(_of_any(drafter, [[1, text[0]]])) for text in told]
    assert known == [False] * 10 + [True] * 2


def _of_any(drafter: SuffixDrafter, texts: list[Text]) -> TokenTree:
    """As `propose`, of tokens beyond the tests' vocabulary."""
    tokens = torch.tensor(texts)
    prefix = Prefix(tokens, torch.tensor([len(text) - 1 for text in texts]))
    return drafter.propose(Frontier(prefix, sampler_of(*[Sampling()] * len(texts)), 4))


def test_copies_of_a_row_write_apart() -> None:
    """Samples of one prompt: each goes on from the prompt, in a lane of its own, and all are remembered."""
    drafter = started(rows=3)
    drafter.observe(commit([0], [[3, 4, 5]]))
    drafter.select([0, 0, 0])
    drafter.observe(commit([0, 1, 2], [[6, 7], [8, 9], [10, 11]]))
    drafter.observe(commit([0, 1, 2], [[12], [13], [14]]))
    ends = [7, 9, 11]
    for row, end in enumerate(ends):
        texts = [[3, 4, 5, 6, 7, 12, end], [3, 4, 5, 8, 9, 13, end], [3, 4, 5, 10, 11, 14, end]]
        assert {(12,), (13,), (14,)} & paths_of(propose(drafter, texts, budget=8), 0).keys() == {(12 + row,)}


def test_lanes_of_running_rows_never_overlap() -> None:
    dice = random.Random(3)
    cursor = 0
    for _ in range(50):
        width, rows = dice.randint(4, 40), dice.randint(1, 5)
        lanes = Places(width, max(500 // width, 2 * rows + 1), cursor)
        for _ in range(40):
            if len(lanes.used) < rows and dice.random() < 0.6:
                lanes.take()
            elif lanes.used:
                lanes.used.pop(dice.randrange(len(lanes.used)))
            starts = sorted(lanes.used)
            assert all(later - one >= width for one, later in pairwise(starts))
            assert all(0 <= start <= lanes.width * lanes.count - width for start in starts)
        cursor = lanes.cursor


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_the_second_time_nearly_all_is_known(sampling: Sampling) -> None:
    """The same requests again: the text is the same, and the drafter has read it before."""
    asked = prompts(5, seed=5)
    wanted = [one.tokens for one in Engine(target()).generate(asked, max_new_tokens=40, sampling=sampling)]
    engine = Engine(target(), Watch(SuffixDrafter()), budget=7)
    rates = []
    for _ in range(2):
        done = engine.generate(asked, max_new_tokens=40, sampling=sampling, batch_size=3)
        assert [one.tokens for one in done] == wanted
        rates.append(sum(one.stats.emitted for one in done) / sum(one.stats.rounds for one in done))
    assert rates[1] > 4 and rates[1] > 2 * rates[0]


def test_tokens_of_any_vocabulary() -> None:
    drafter = started()
    big: Tensor = torch.tensor([[200_000, 3, 150_001, 9]])
    drafter.observe(Commit([0], big, torch.arange(4)[None], torch.tensor([4])))
    assert _of_any(drafter, [[200_000, 3, 150_001, 9, 200_000]]).tokens[0, :3].tolist() == [200_000, 3, 150_001]


def test_a_memory_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="memory"):
        SuffixDrafter(memory=0)
    assert VOCAB > 33
