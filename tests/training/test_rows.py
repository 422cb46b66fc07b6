"""Rows and batches: every row once per epoch, the same for the same (seed, step), padding that counts for nothing."""

from __future__ import annotations

from collections import Counter

import torch
from tiny import prompts

from draftproof import embedded
from draftproof.model.loading import load_tokenizer
from draftproof.model.tokenizer import Codec
from draftproof.training.rows import Batches, Example, Rows, tokenized
from draftproof.training.texts import Document


def ragged(count: int = 40, length: int = 32) -> Rows:
    texts = prompts(count, seed=1, longest=50)
    return Rows((Example(text, [place > 1 for place in range(len(text))]) for text in texts), length)


def test_every_row_comes_once_per_epoch_in_another_order() -> None:
    batches = Batches(ragged(), 4, seed=0)
    size = len(batches)
    epochs = [[number for step in range(size) for number in batches[epoch * size + step].rows] for epoch in (0, 1)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(range(len(batches.rows)))
    assert epochs[0] != epochs[1] and len(batches) > 3


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    one, two, other = Batches(ragged(), 4, 7), Batches(ragged(), 4, 7), Batches(ragged(), 4, 8)
    for step in (13, 2, 40):
        assert torch.equal(one[step].tokens, two[step].tokens) and one[step].rows == two[step].rows
    assert any(one[step].rows != other[step].rows for step in range(5))


def test_padding_counts_for_nothing_and_the_rest_is_the_text() -> None:
    rows = ragged()
    batches = Batches(rows, 4, 0)
    for step in range(len(batches)):
        batch = batches[step]
        for place, number in enumerate(batch.rows):
            begin, end = rows.starts[number], rows.starts[number + 1]
            assert batch.tokens[place, : end - begin].tolist() == rows.tokens[begin:end].tolist()
            assert batch.weights[place, : end - begin].tolist() == rows.mask[begin:end].tolist()
            assert not batch.weights[place, end - begin :].any()
        assert batch.tokens.numel() <= 4 * rows.length and batch.sizes == rows.sizes[list(batch.rows)].tolist()


def test_pairs_end_with_what_counts_and_never_span_rows() -> None:
    rows = Rows([Example([1, 2, 3, 4], [False, False, True, True]), Example([5, 6, 7, 8], [True, False, False, True])], 32)
    first, second = rows.bigrams()
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(2, 3), (3, 4), (7, 8)]


def test_short_rows_stand_with_short_ones() -> None:
    rows = Rows((Example([1] * size, [True] * size) for size in [16] * 64 + [128] * 8), 128)
    batches = Batches(rows, 2, 0)
    shapes = Counter(tuple(batches[step].tokens.shape) for step in range(len(batches)))
    assert shapes == {(16, 16): 4, (2, 128): 4}


def test_a_long_text_is_cut_and_nothing_is_lost() -> None:
    rows = Rows([Example(list(range(100)), [True] * 100)], 32)
    assert rows.sizes.tolist() == [32, 32, 32, 4] and rows.tokens.tolist() == list(range(100))


def test_pieces_without_anything_to_foretell_are_dropped() -> None:
    """A head reads a token to foretell the one after the next: what counts must have two before it."""
    texts = [Example([1, 2], [True] * 2), Example([1, 2, 3], [True, True, False]), Example([1, 2, 3], [False, False, True])]
    assert Rows(texts, 16).tokens.tolist() == [1, 2, 3] and len(Rows(texts, 16)) == 1


def test_only_answers_count_and_an_end_is_added() -> None:
    tokenizer = load_tokenizer(embedded("demo"))
    assert tokenizer is not None
    codec = Codec(tokenizer)
    ((tokens, counts),) = tokenized(Document("a dog", "Who is it?"), codec, 0)
    asked = codec.encode("Who is it?")
    assert tokens == asked + codec.encode("a dog", special=False) + [0]
    assert counts == [False] * len(asked) + [True] * (len(tokens) - len(asked))
    assert tokenized(Document(prompt="Who is it?"), codec, 0) == []
