"""The fused forward reads what the model reads, and gives a position the same bits wherever its
node lies."""

from typing import Any

import pytest
import torch
import transformers
from tiny import of_family

from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.forward.fused_forward import NODES
from draftproof.model.exactness import probe
from draftproof.model.target import Target
from draftproof.native.kernels import kernels
from draftproof.weights.packed_linear import pack_linears

SIZES = {
    "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "vocab_size": 96, "initializer_range": 0.2, "max_position_embeddings": 512, "head_dim": 16,
    "num_key_value_heads": 2
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama bias": ("Llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True,
                             "head_dim": 48}),
    "mistral sliding": ("Mistral", {"sliding_window": 70}),
    "qwen2": ("Qwen2", {}),
    "mistral, heads of 80": ("Mistral", {"head_dim": 80, "num_attention_heads": 4}),
    "qwen3 wide heads": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 128}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "logits_scaling": 4.0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None}),
    "gemma3": ("Gemma3", {
        "sliding_window": 70, "query_pre_attn_scalar": 24, "pad_token_id": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "phi3 turned in part": ("Phi3", {
        "pad_token_id": None, "sliding_window": 70, "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75
        },
    }),
}  # fmt: skip
IN_8_BITS = ("llama bias", "mistral, heads of 80", "qwen3 wide heads", "gemma3")
CACHES = [*((family, None) for family in FAMILIES), *((family, "int8") for family in IN_8_BITS)]
SHAPE = TreeShape.from_digits(["0", "1", "2", "00", "01", "10", "20", "000", "010", "0100"])

library = kernels()
pytestmark = pytest.mark.skipif(library is None, reason="no kernels for linear layers here")


def model(family: str, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    name, extra = FAMILIES[family]
    return of_family(name, **SIZES | extra).to(torch.bfloat16).to(dtype)


def packed(family: str, cache: str | None = None) -> Target:
    """A target that our kernels read from tokens to logits."""
    return fused(model(family), kv_cache=cache)


def fused(ours: transformers.PreTrainedModel, **options: Any) -> Target:
    pack_linears(ours)
    target = Target(ours, **options)
    assert target.fast is not None and target.fast.fused is not None
    return target


def readings(target: Target) -> torch.Tensor:
    """Ragged rows: a long prompt, a tree after it, the rest of another tree after what was kept.
    """
    tokens = torch.randint(96, (3, 160), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(3, 192)
    with torch.inference_mode():
        # wider than the kernels read
        target.read(TokenTree.chain(tokens[:, :100]), cache)
        cache.keep(None, torch.tensor([100, 41, 1]))
        tree = TokenTree.shaped(tokens[:, 100:111], SHAPE)
        first = target.read(tree, cache, hidden_layers=(0, 2, -1))
        cache.keep(torch.tensor([[0, 2, 6], [0, 1, 5], [0, 3, 7]]), torch.tensor([3, 3, 2]))
        tree = TokenTree.shaped(tokens[:, 120:131], SHAPE)
        target.read(tree, cache)
        # level by level, as draft models do
        second = target.read(tree, cache, first=4, hidden_layers=(3,))
    assert first.hidden is not None and second.hidden is not None
    parts = (first.logits, first.hidden, second.logits, second.hidden)
    return torch.cat([part.flatten().double() for part in parts])


@pytest.mark.parametrize(("family", "cache"), CACHES)
def test_fused_reads_what_the_model_reads_as_closely_as_it_can(
    family: str, cache: str | None
) -> None:
    mine, stock = packed(family, cache), Target(model(family), kv_cache=cache)
    exact = Target(model(family, torch.float32))
    stock.fast = exact.fast = None
    truth = readings(exact)
    ours, theirs = ((readings(target) - truth).norm() / truth.norm() for target in (mine, stock))
    assert 0 < ours < 1.25 * theirs < 0.1


@pytest.mark.parametrize(("family", "cache"), CACHES)
def test_a_position_has_the_same_bits_alone_in_a_chain_in_a_batch_and_in_a_tree(
    family: str, cache: str | None
) -> None:
    probed = probe(packed(family, cache), widths=(1, 2, 5, 16, 32))
    assert not probed.differ and len(probed.same) == 12
    assert "trees up to 29 nodes" in probed.guarantee


@pytest.mark.parametrize("lead", [31, 32, 300, 319])
@pytest.mark.parametrize(("family", "kv_cache"), [
    ("llama", None), ("mistral sliding", None), ("qwen3 wide heads", None),
    ("mistral, heads of 80", "int8"), ("qwen3 wide heads", "int8")])  # fmt: skip
def test_a_branch_has_the_bits_of_the_chain_it_becomes_however_long_the_text(
    family: str, kv_cache: str | None, lead: int
) -> None:
    """Sums over the text are made of parts; none may end elsewhere because a token lies in another
    slot."""
    target, stock = packed(family, kv_cache), Target(model(family), kv_cache=kv_cache)
    exact = Target(model(family, torch.float32))
    stock.fast = exact.fast = None
    text = torch.randint(96, (1, lead), generator=torch.Generator().manual_seed(3))
    drafted = torch.randint(96, (1, len(SHAPE)), generator=torch.Generator().manual_seed(4))
    tree, deepest = TokenTree.shaped(drafted, SHAPE), SHAPE.paths.index((0, 1, 0, 0)) + 1
    path = tree.path_to(torch.tensor([deepest]))[0]

    def after(read: Target, tree: TokenTree, *, alone: bool = False) -> torch.Tensor:
        cache = read.new_cache(1, lead + 16)
        with torch.inference_mode():
            read.read(TokenTree.chain(text), cache)
            cache.keep(None, torch.tensor([lead]))
            if not alone:
                return read.read(tree, cache).logits[0]
            logits = []
            for token in tree.tokens[0]:
                logits.append(read.read(TokenTree.chain(token[None, None]), cache).logits[0, 0])
                cache.keep(None, torch.tensor([1]))
        return torch.stack(logits)

    branch = after(target, tree)[path]
    chain = TokenTree.chain(drafted[:, path])
    assert torch.equal(branch, after(target, chain))
    assert torch.equal(branch, after(target, chain, alone=True))
    truth = after(exact, tree)
    off = [(after(item, tree).double() - truth).norm() for item in (target, stock)]
    assert off[0] < 1.5 * off[1]


@pytest.mark.parametrize("lead", [505, 512, 1020])
@pytest.mark.parametrize(
    ("family", "window", "kv_cache"),
    [("llama", None, None), ("llama", None, "int8"), ("mistral sliding", 600, None)],
)
def test_attention_spans_do_not_change_bits(
    lead: int, family: str, window: int | None, kv_cache: str | None,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention takes 512 positions at a time, by one or by several threads: the last token of a
    path that crosses their end, in a tree, in chains of any width, and alone."""
    name, extra = FAMILIES[family]
    sizes = SIZES | extra | {"max_position_embeddings": 2048, "num_hidden_layers": 2}
    ours = of_family(name, **sizes | ({"sliding_window": window} if window else {}))
    target = fused(ours.to(torch.bfloat16), kv_cache=kv_cache)
    dice = torch.Generator().manual_seed(3)
    tree = TokenTree.shaped(torch.randint(96, (1, len(SHAPE)), generator=dice), SHAPE)
    deepest = SHAPE.paths.index((0, 1, 0, 0)) + 1
    path = tree.path_to(torch.tensor([deepest]))[0]
    text = torch.cat([torch.randint(96, (1, lead), generator=dice), tree.tokens[:, path]], 1)
    read = []
    for threads, width in ((1, NODES), (3, 64), (3, NODES), (2, 1)):
        monkeypatch.setattr("draftproof.forward.fused_forward.thread_count", lambda n=threads: n)
        cache, at = target.new_cache(1, lead + 16), max(0, lead - 200) if width == 1 else 0
        with torch.inference_mode():
            for start in (*range(0, at, 64), *range(at, lead, width)):
                end = min(start + (64 if start < at else width), lead, at if start < at else lead)
                target.read(TokenTree.chain(text[:, start:end]), cache)
                cache.keep(None, torch.tensor([end - start]))
            read.append(target.read(tree, cache).logits[0, deepest])
            read.append(target.read(TokenTree.chain(text[:, lead:]), cache).logits[0, -1])
            for token in text[0, lead:]:
                logits = target.read(TokenTree.chain(token[None, None]), cache).logits[0, 0]
                cache.keep(None, torch.tensor([1]))
            read.append(logits)
    assert all(torch.equal(read[0], other) for other in read)
    if kv_cache is None:
        with torch.inference_mode():
            wanted = ours.double()(text).logits[0, -1]
        assert (read[0] - wanted).norm() < 0.3 * wanted.norm(), "all spans count"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_fills_its_cache_has_the_same_bits(family: str) -> None:
    """Attention takes sixteen slots at a time, of which the last then lie after the cache."""
    tokens = torch.randint(96, (2, 53), generator=torch.Generator().manual_seed(5))
    target, read = packed(family), []
    for capacity in (53, 128):
        cache = target.new_cache(2, capacity)
        with torch.inference_mode():
            target.read(TokenTree.chain(tokens[:, :50]), cache)
            cache.keep(None, torch.tensor([50, 50]))
            read.append(target.read(TokenTree.chain(tokens[:, 50:]), cache).logits)
    assert torch.equal(*read)


@pytest.mark.parametrize("family", ["mistral sliding", "phi3 turned in part"])
def test_a_node_sees_exactly_the_positions_of_its_window(family: str) -> None:
    """Nodes of one read whose windows begin at 0, 1, 2, ..., in a layer that hands nothing on."""
    name, extra = FAMILIES[family]
    sizes, window = SIZES | extra | {"num_hidden_layers": 1}, extra["sliding_window"]
    target = fused(of_family(name, **sizes).to(torch.bfloat16))
    text = torch.randint(96, (1, 96), generator=torch.Generator().manual_seed(6))

    def after(text: torch.Tensor) -> torch.Tensor:
        cache = target.new_cache(1, 128)
        with torch.inference_mode():
            target.read(TokenTree.chain(text[:, :64]), cache)
            cache.keep(None, torch.tensor([64]))
            return target.read(TokenTree.chain(text[:, 64:]), cache).logits[0]

    before, edges = after(text), list[bool]()
    for place in range(26):
        other = text.clone()
        other[0, place] = (text[0, place] + 1) % 96
        seen, end = (after(other) != before).any(-1), place + window - 64
        assert not seen[end:].any(), place
        edges += seen[end - 1 : end].tolist()
    assert sum(edges) > 20, "the last node that sees a position, where rounding does not hide it"


def test_results_are_bitwise_independent_of_threads() -> None:
    target, before = packed("llama"), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(readings(target))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize(("family", "kv_cache"), CACHES)
def test_absent_nodes_are_not_read_and_change_no_bit(
    family: str, kv_cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, dice = packed(family, kv_cache), torch.Generator().manual_seed(2)
    prompt, drafted = (torch.randint(96, (4, size), generator=dice) for size in (90, 11))
    drafted[0, 4] = 500                             # beyond the vocabulary: read as its last token
    drafted[1, [3, 6, 7, 10]] = drafted[2, 1:] = drafted[3, 5:] = ABSENT
    tree, read = TokenTree.shaped(drafted, SHAPE), []
    for spared in (True, False):
        cache = target.new_cache(4, 128)
        with torch.inference_mode():
            target.read(TokenTree.chain(prompt), cache)
            cache.keep(None, torch.tensor([90, 37, 1, 64]))
            for store in (store for layer in cache.layers for store in layer.stores):
                for row, length in enumerate(cache.lengths.tolist()):
                    # nor may what nobody wrote change a bit
                    store[row, :, length:] = torch.nan if store.is_floating_point() else 113
            if not spared:
                monkeypatch.setattr(
                    "draftproof.forward.fused_forward._Present.of", lambda *asked: None
                )
            reading = target.read(tree, cache, hidden_layers=(0, 2, -1))
            last = target.read(tree, cache, last_only=True).logits
        assert torch.equal(last[0, 0], reading.logits[0, -1]) and last.shape[:2] == (4, 1)
        assert reading.hidden is not None
        assert reading.logits.shape[:2] == reading.hidden.shape[:2] == (4, 11)
        row, node = tree.present.nonzero().unbind(1)
        slots = [store[row, :, cache.lengths[row] + node].flatten(1).double()
                 for layer in cache.layers for store in layer.stores]
        there = tree.present
        read.append((reading.logits[there], reading.hidden[there], torch.cat(slots, 1)))
        assert spared or reading.logits.isfinite().all()
    assert all(torch.equal(item, other) for item, other in zip(*read, strict=True))


def test_unsupported_layouts_fall_back_to_operators() -> None:
    narrow = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"head_dim": 8}))
    sliding = transformers.MistralConfig(**SIZES, sliding_window=NODES)
    halves = (narrow, transformers.MistralForCausalLM(sliding))
    for other in (model("llama", torch.float32), *(halve.bfloat16().eval() for halve in halves)):
        pack_linears(other)
        fast = Target(other).fast
        assert fast is not None and fast.fused is None


@pytest.mark.parametrize(("family", "cache"), [
    ("llama", None), ("granite", None), ("gemma3", "int8")])  # fmt: skip
@pytest.mark.parametrize(("nodes", "width"), [(1, 64), (6, 6), (9, 3), (5, 17)])
def test_trees_and_a_chunk_of_a_prompt_have_the_same_bits_in_one_pass(
    family: str, cache: str | None, nodes: int, width: int
) -> None:
    """Rows of any length, absent nodes, a beginning of the prompt or more of it."""
    target, dice = packed(family, cache), torch.Generator().manual_seed(nodes)
    for rows, lengths, known in ((2, [70], 0), (5, [3, 64, 130], 33)):
        tokens = torch.randint(96, (len(lengths), nodes), generator=dice)
        tokens[0, max(2, nodes - 2) :] = ABSENT
        parents = (torch.arange(nodes) - 1) // 2        # -1 at the root
        tree = TokenTree(tokens, parents.repeat(len(lengths), 1), nodes)
        chunk = TokenTree.chain(torch.randint(96, (1, width), generator=dice))
        texts = torch.randint(96, (rows, 130), generator=dice)
        readings = []
        for together in (True, False):
            store = target.new_cache(rows, 256)
            with torch.inference_mode():
                for row, length in ((rows - 1, known), *enumerate(lengths)):
                    if length:
                        view = store.rows(row, row + 1)
                        target.read(TokenTree.chain(texts[row : row + 1, :length]), view)
                        view.keep(None, torch.tensor([length]))
                store.set_max_length(max(known, *lengths))
                layers, last = (-1, 1), store.rows(rows - 1, rows)
                both = target.read_with_chunk(tree, chunk.tokens, store, layers) if together else (
                    target.read(tree, store.rows(0, len(lengths)), hidden_layers=layers),
                    target.read(chunk, last, last_only=True, hidden_layers=layers))
            assert both is not None
            there = tree.present
            parts = [both[0].logits[there], both[0].hidden[there], *both[1]]
            readings.append([*parts, *(store[-1, :, : known + width] for store in store.tensors)])
        for in_one_pass, apart in zip(*readings, strict=True):
            assert torch.equal(in_one_pass, apart)
