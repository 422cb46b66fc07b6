"""The cache holds exactly the committed tokens: after any rounds it reads on as if it had been filled afresh."""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB, target
from torch import Tensor

from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target

SHAPES = [TreeShape.branching((2, 2, 1)), TreeShape.chain(5), TreeShape.from_digits(["0", "1", "10", "100", "1000", "11"])]
CAPACITY = 64


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def commit(own: Target, cache: KVCache, texts: list[list[int]], dice: torch.Generator, shape: TreeShape) -> None:
    """Read a random tree with gaps, keep the path to a random node of each row."""
    tokens = torch.randint(VOCAB, (len(texts), len(shape)), generator=dice)
    tree = TokenTree.shaped(tokens, shape)
    last = torch.randint(len(shape), (len(texts),), generator=dice)
    on_path = tree.ancestors[torch.arange(len(texts)), last]
    tree.tokens[~on_path & (torch.rand(tokens.shape, generator=dice) < 0.2)] = ABSENT
    own.read(tree, cache)
    nodes, count = tree.path_to(last), tree.depths.gather(1, last[:, None])[:, 0] + 1
    cache.keep(None if shape.is_chain else nodes, count)
    for row, text in enumerate(texts):
        text += tree.tokens[row, nodes[row, : int(count[row])]].tolist()


def assert_reads_on(own: Target, cache: KVCache, texts: list[list[int]]) -> None:
    """The next tree gets the logits of a cache that was filled in one read, row by row."""
    assert cache.lengths.tolist() == [len(text) for text in texts]
    tree = TokenTree.shaped(torch.arange(len(texts) * 4).view(-1, 4) % VOCAB, TreeShape.branching((2, 1)).within(3))
    found = own.read(tree, cache).logits
    for row, text in enumerate(texts):
        fresh = own.new_cache(1, CAPACITY)
        if text:
            own.read(TokenTree.chain(torch.tensor([text])), fresh)
            fresh.keep(None, torch.tensor([len(text)]))
        alone = TokenTree.shaped(tree.tokens[row : row + 1], TreeShape.branching((2, 1)).within(3))
        torch.testing.assert_close(found[row], own.read(alone, fresh).logits[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "falcon"])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_keep_equals_a_fresh_read(family: str, shape: TreeShape) -> None:
    own, dice = target(family), torch.Generator().manual_seed(len(shape))
    cache, texts = own.new_cache(4, CAPACITY), [[] for _ in range(4)]
    for _ in range(6):
        commit(own, cache, texts, dice, shape)
        assert_reads_on(own, cache, texts)


def test_select_keeps_drops_and_repeats_rows() -> None:
    own, dice = target(), torch.Generator().manual_seed(1)
    for rows in ([2, 0], [3, 3, 1, 0], [1], [0, 1, 2, 3], [3, 2, 1, 0], [], [2, 2, 2]):
        cache, texts = own.new_cache(4, CAPACITY), [[] for _ in range(4)]
        for _ in range(2):
            commit(own, cache, texts, dice, SHAPES[0])
        cache.select(rows)
        left = [list(texts[row]) for row in rows]
        assert cache.lengths.tolist() == [*map(len, left), *[0] * (4 - len(rows))]
        if rows:
            view = cache.rows(0, len(rows))
            assert_reads_on(own, view, left)
            commit(own, view, left, dice, SHAPES[2])
            assert_reads_on(own, view, left)


def test_a_view_leaves_the_other_rows_alone() -> None:
    """Reading and keeping in a view: the other rows keep their bits, scratch included, and their lengths."""
    own, dice = target(), torch.Generator().manual_seed(2)
    cache, texts = own.new_cache(4, CAPACITY), [[] for _ in range(4)]
    commit(own, cache, texts, dice, SHAPES[0])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    commit(own, cache.rows(1, 3), inner := texts[1:3], dice, SHAPES[1])
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        for row in (0, 3):
            assert torch.equal(layer.keys[row], keys[row]) and torch.equal(layer.values[row], values[row])
        assert not torch.equal(layer.keys[1], keys[1])
    assert_reads_on(own, cache, [texts[0], *inner, texts[3]])


@pytest.mark.parametrize("garbage", [1e30, -1e30])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scratch_never_leaks(family: str, garbage: float) -> None:
    """Whatever lies beyond the committed tokens, huge numbers too, the logits are the same bits."""
    own, dice = target(family), torch.Generator().manual_seed(3)
    cache, texts = own.new_cache(3, CAPACITY), [[] for _ in range(3)]
    for _ in range(3):
        commit(own, cache, texts, dice, SHAPES[0])
    tree = TokenTree.chain(torch.tensor([[1, 2, 3]] * 3))
    wanted = own.read(tree, cache).logits
    for layer in cache.layers:
        for row, length in enumerate(cache.lengths.tolist()):
            layer.keys[row, :, length:], layer.values[row, :, length:] = garbage, garbage
    assert torch.equal(own.read(tree, cache).logits, wanted)


def test_a_path_may_overlap_its_destination() -> None:
    """Nodes 1, 2, 4, 5 move to 1, 2, 3, 4: each from where it lay before the move."""
    layer = _numbers(1, 8)
    cache = KVCache([layer], torch.tensor([2]))
    cache.keep(torch.tensor([[0, 2, 3, 5]]), torch.tensor([4]))
    assert layer.keys[0, 0, :, 0].tolist() == [0, 1, 2, 4, 5, 7, 6, 7] and cache.lengths.tolist() == [6]


def test_storage_is_counted() -> None:
    cache = target().new_cache(3, 32)
    assert cache.capacity == 32 and cache.nbytes == sum(
        store.nbytes for layer in cache.layers for store in (layer.keys, layer.values)
    )


def _numbers(rows: int, capacity: int):
    from draftproof.model.kv_cache import KVLayer

    store: Tensor = torch.arange(capacity, dtype=torch.float64).view(1, 1, -1, 1).repeat(rows, 1, 1, 2)
    return KVLayer(store.clone(), store.clone())
