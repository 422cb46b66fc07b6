"""The cache holds exactly the committed tokens: after any rounds it reads on as if it had been
filled afresh.

Of quantised keys and values this holds bit for bit, and no number is off by more than half a step.
"""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB, model, target
from torch import Tensor

from draftproof.cache.kv_cache import KVCache, tree_mask
from draftproof.cache.kv_layer import LAYERS, Int8Layer, KVLayer, LayerShape
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.errors import BadInput
from draftproof.model.target import Target

SHAPES = [
    TreeShape.branching((2, 2, 1)), TreeShape.chain(5),
    TreeShape.from_digits(["0", "1", "10", "100", "1000", "11"])
]
MASKED = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
CAPACITY = 64
any_kind = pytest.mark.parametrize("kind", LAYERS)
any_cache = pytest.mark.parametrize("kind", [None, *LAYERS])


def of_kind(kind: str | None, family: str = "llama") -> Target:
    return target(family) if kind is None else Target(model(family), kv_cache=kind)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def commit(
    ours: Target, cache: KVCache, texts: list[list[int]], dice: torch.Generator, shape: TreeShape
) -> None:
    """Read a random tree with gaps, keep the path to a random node of each row."""
    tokens = torch.randint(VOCAB, (len(texts), len(shape)), generator=dice)
    tree = TokenTree.shaped(tokens, shape)
    last = torch.randint(len(shape), (len(texts),), generator=dice)
    on_path = tree.ancestors[torch.arange(len(texts)), last]
    tree.tokens[~on_path & (torch.rand(tokens.shape, generator=dice) < 0.2)] = ABSENT
    ours.read(tree, cache)
    nodes, count = tree.path_to(last), tree.depths.gather(1, last[:, None])[:, 0] + 1
    cache.keep(None if shape.is_chain else nodes, count)
    for row, text in enumerate(texts):
        text += tree.tokens[row, nodes[row, : int(count[row])]].tolist()


def assert_reads_on(ours: Target, cache: KVCache, texts: list[list[int]]) -> None:
    """The next tree gets the logits of a cache that was filled in one read, row by row."""
    assert cache.lengths.tolist() == [len(text) for text in texts]
    shape = TreeShape.branching((2, 1)).within(3)
    tree = TokenTree.shaped(torch.arange(len(texts) * 4).view(-1, 4) % VOCAB, shape)
    result = ours.read(tree, cache).logits
    for row, text in enumerate(texts):
        fresh = ours.new_cache(1, CAPACITY)
        if text:
            ours.read(TokenTree.chain(torch.tensor([text])), fresh)
            fresh.keep(None, torch.tensor([len(text)]))
        alone = TokenTree.shaped(tree.tokens[row : row + 1], shape)
        logits = ours.read(alone, fresh).logits[0]
        torch.testing.assert_close(result[row], logits, rtol=0, atol=1e-9)


@any_cache
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "falcon"])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_keep_equals_reading_again(kind: str | None, family: str, shape: TreeShape) -> None:
    ours, dice = of_kind(kind, family), torch.Generator().manual_seed(len(shape))
    cache, texts = ours.new_cache(4, CAPACITY), [[] for _ in range(4)]
    for _ in range(5):
        commit(ours, cache, texts, dice, shape)
        assert_reads_on(ours, cache, texts)


@any_cache
def test_keep_moves_all_stores_without_kernels(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "stores", None)
    ours, dice = of_kind(kind), torch.Generator().manual_seed(5)
    cache, texts = ours.new_cache(3, CAPACITY), [[] for _ in range(3)]
    for _ in range(3):
        commit(ours, cache, texts, dice, SHAPES[0])
    assert_reads_on(ours, cache, texts)


@any_cache
def test_select_keeps_drops_and_repeats_rows(kind: str | None) -> None:
    ours, dice = of_kind(kind), torch.Generator().manual_seed(1)
    for rows in ([2, 0], [3, 3, 1, 0], [1], [0, 1, 2, 3], [3, 2, 1, 0], [], [2, 2, 2]):
        cache, texts = ours.new_cache(4, CAPACITY), [[] for _ in range(4)]
        for _ in range(2):
            commit(ours, cache, texts, dice, SHAPES[0])
        cache.select(rows)
        left = [list(texts[row]) for row in rows]
        assert cache.lengths.tolist() == [*map(len, left), *[0] * (4 - len(rows))]
        if rows:
            view = cache.rows(0, len(rows))
            assert_reads_on(ours, view, left)
            commit(ours, view, left, dice, SHAPES[2])
            assert_reads_on(ours, view, left)


@any_cache
def test_a_view_leaves_the_other_rows_alone(kind: str | None) -> None:
    """Reading and keeping in a view: the other rows keep their bits, scratch included, and their
    lengths."""
    ours, dice = of_kind(kind), torch.Generator().manual_seed(2)
    cache, texts = ours.new_cache(4, CAPACITY), [[] for _ in range(4)]
    commit(ours, cache, texts, dice, SHAPES[0])
    before = [[store.clone() for store in layer.stores] for layer in cache.layers]
    commit(ours, cache.rows(1, 3), inner := texts[1:3], dice, SHAPES[1])
    for layer, stores in zip(cache.layers, before, strict=True):
        for store, old in zip(layer.stores, stores, strict=True):
            assert torch.equal(store[[0, 3]], old[[0, 3]]) and not torch.equal(store[1], old[1])
    assert_reads_on(ours, cache, [texts[0], *inner, texts[3]])


@any_cache
def test_scratch_never_leaks(kind: str | None) -> None:
    """Whatever lies beyond the committed tokens, huge numbers too, the logits are the same bits."""
    for family in ("llama", "gemma2"):
        ours, dice = of_kind(kind, family), torch.Generator().manual_seed(3)
        cache, texts = ours.new_cache(3, CAPACITY), [[] for _ in range(3)]
        for _ in range(3):
            commit(ours, cache, texts, dice, SHAPES[0])
        tree = TokenTree.chain(torch.tensor([[1, 2, 3]] * 3))
        wanted = ours.read(tree, cache).logits
        for store in (store for layer in cache.layers for store in layer.stores):
            for row, length in enumerate(cache.lengths.tolist()):
                store[row, :, length:] = 1e30 if store.is_floating_point() else -127
        assert torch.equal(ours.read(tree, cache).logits, wanted)


def test_a_path_may_overlap_its_destination() -> None:
    """Nodes 1, 2, 4, 5 move to 1, 2, 3, 4: each from where it lay before the move."""
    store = torch.arange(8, dtype=torch.float64).view(1, 1, -1, 1).repeat(1, 1, 1, 2)
    layer = KVLayer(store, store.clone())
    cache = KVCache([layer], torch.tensor([2]), 8)
    cache.keep(torch.tensor([[0, 2, 3, 5]]), torch.tensor([4]))
    assert layer.keys[0, 0, :, 0].tolist() == [0, 1, 2, 4, 5, 7, 6, 7]
    assert cache.lengths.tolist() == [6]


# Quantised ---


def states(rows: int, nodes: int, heads: int = 2, dim: int = 8, seed: int = 0) -> Tensor:
    """Random keys or values; some heads of some tokens a thousand times as large."""
    dice = torch.Generator().manual_seed(seed)
    loud = 10 ** (3 * torch.rand(rows, heads, nodes, 1, generator=dice))
    return torch.randn(rows, heads, nodes, dim, generator=dice) * loud


def layer_of(kind: str, rows: int = 2, dtype: torch.dtype = torch.float32) -> Int8Layer:
    made = LAYERS[kind].empty(LayerShape(2, 8, 8), rows, 16, dtype, torch.device("cpu"))
    assert isinstance(made, Int8Layer)
    return made


def written(layer: Int8Layer, slots: Tensor, keys: Tensor) -> Tensor:
    """What is read back at `slots` [B, W]."""
    layer.slots = slots
    result = layer.update(keys, keys)[0]
    return result.gather(2, slots[:, None, :, None].expand_as(keys))


@any_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_quantisation_error_is_at_most_half_a_step(kind: str, dtype: torch.dtype) -> None:
    inputs = states(2, 5).to(dtype)
    text = written(layer_of(kind, dtype=dtype), torch.arange(5).expand(2, -1), inputs)
    assert text.dtype == dtype
    most = inputs.abs().amax(-1, keepdim=True).double()
    # scale and product are rounded as well
    slack = 4 * torch.finfo(dtype).eps * most
    step = most / 127 if kind == "int8" else inputs.abs().double().clamp(min=2**-6 * 0.002) / 8
    off = (text.double() - inputs.double()).abs()
    assert (off <= step / 2 + slack).all() and float(off.max()) > 0


@any_kind
def test_quantisation_is_independent_of_slot_and_neighbours(kind: str) -> None:
    args = states(1, 6)
    together = written(layer_of(kind, 1), torch.arange(6)[None], args)
    for node in range(6):
        for slot in (0, 3, 15):
            alone = written(layer_of(kind, 1), torch.tensor([[slot]]), args[:, :, node : node + 1])
            assert torch.equal(alone, together[:, :, node : node + 1])
    loud = args.clone()
    loud[:, :, 1], loud[:, 1, 2] = 1e6, torch.nan
    text = written(layer_of(kind, 1), torch.arange(6)[None], loud)
    same = torch.tensor([0, 3, 4, 5])
    assert torch.equal(text[:, :, same], together[:, :, same])
    assert torch.equal(text[:, 0, 2], together[:, 0, 2])
    silence = torch.zeros(1, 2, 6, 8)
    assert torch.equal(written(layer_of(kind, 1), torch.arange(6)[None], silence), silence)


@any_kind
def test_quantised_caches_halve_the_memory_with_similar_logits(kind: str) -> None:
    how = ([LayerShape(2, 64, 64)], 3, 32, torch.bfloat16, torch.device("cpu"))
    sizes = [KVCache.empty(*how, layer).nbytes for layer in (LAYERS[kind], KVLayer)]
    assert sizes == [3 * 32 * 2 * 2 * (64 + 2), 3 * 32 * 2 * 2 * 128]
    ours, plain = of_kind(kind), target()
    sizes = [each.new_cache(1, 32).nbytes // 32 for each in (ours, plain)]
    assert ours.position_bytes == tuple(sizes) and sizes[0] < sizes[1]
    dice = torch.Generator().manual_seed(0)
    text = TokenTree.chain(torch.randint(VOCAB, (1, 20), generator=dice))
    item, other = (each.read(text, each.new_cache(1, CAPACITY)).logits for each in (plain, ours))
    assert 0 < float((item - other).norm() / item.norm()) < 0.1


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BadInput, match="'int2'; choose one of int8, fp8"):
        Target(model("llama"), kv_cache="int2")


# Masks ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("first", [0, 3])
def test_a_node_sees_the_committed_text_and_its_ancestors(
    dtype: torch.dtype, window: int | None, first: int
) -> None:
    lengths, capacity = torch.tensor([0, 4, 9]), 18
    tree = TokenTree.shaped(torch.zeros(3, len(MASKED), dtype=torch.int64), MASKED)
    mask = tree_mask(tree, lengths, capacity, dtype, first, window)
    assert mask.shape == (3, 1, len(MASKED) - first, capacity) and mask.dtype == dtype
    # added, not true or false; and softmax of nothing is NaN
    assert dtype.is_floating_point and (mask == 0).any(-1).all()
    for row, length in enumerate(lengths.tolist()):
        for node in range(first, len(MASKED)):
            for slot in range(capacity):
                there = slot - length
                seen = there < 0
                if 0 <= there < len(MASKED):
                    seen = bool(tree.ancestors[row, node, there])
                if seen and window is not None:
                    position = slot if slot < length else length + int(tree.depths[row, there])
                    seen = length + int(tree.depths[row, node]) - position < window
                wanted = 0 if seen else torch.finfo(dtype).min
                assert mask[row, 0, node - first, slot] == wanted, (row, node, slot)


@any_cache
def test_attention_mask_covers_the_last_slot_at_every_length(kind: str | None) -> None:
    """Also where that is the first of 64 more: slot by slot, and in reads of several nodes."""
    ours = of_kind(kind)
    for nodes in (1, 2, 5):
        cache, fresh = ours.new_cache(1, 256), ours.new_cache(1, 256)
        lead = 64 - 2 * nodes
        text = (torch.arange(lead + 4 * nodes) * 7 % VOCAB)[None]
        ours.read(TokenTree.chain(text[:, :lead]), cache)
        cache.keep(None, torch.tensor([lead]))
        step = [ours.read(TokenTree.chain(text[:, :lead]), fresh).logits]
        fresh.keep(None, torch.tensor([lead]))
        for start in range(lead, text.shape[1], nodes):
            assert cache.reserve(nodes) >= start + nodes
            tree = TokenTree.chain(text[:, start : start + nodes])
            cache.set_max_length(start)
            result = ours.read(tree, cache).logits
            cache.keep(None, torch.tensor([nodes]))
            step.append(result)
        if kind is None:
            whole = ours.own_logits(text)
            torch.testing.assert_close(torch.cat(step, 1), whole, rtol=0, atol=1e-9)
