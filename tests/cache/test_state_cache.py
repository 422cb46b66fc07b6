"""Recurrent and hybrid models: chains from states, the text of the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import admit, decoder, read_elsewhere, running
from tiny import build

from draftproof.cache.state_cache import BLOCK, StateCache
from draftproof.cache.state_layer import StateLayer, Trail
from draftproof.core.params import Sampling
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.base import Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.target import Target

VOCAB = 96
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
       "linear_value_head_dim": 8}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR, FULL = "linear_attention", "full_attention"
SSM = {"mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": ("Qwen3_5TextConfig",
                        {**SIZES, **GDN, "layer_types": [LINEAR, FULL, LINEAR]}),
    "convolutions": ("Lfm2Config", {**SIZES, "layer_types": ["conv", FULL, "conv"]}),
    "Mamba 1, whose scan is handed its state": (
        "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "states and keys in one layer": (
        "FalconH1Config", {**SIZES, **SSM, "mamba_n_heads": 4, "mamba_d_head": 8,
                           "mamba_d_ssm": 32}),
    "no single steps": (
        "NemotronHConfig",
        {**SIZES, "layers_block_type": [LINEAR, FULL, LINEAR], "mamba_num_heads": 4, "n_groups": 1,
         "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 8}),
}  # fmt: skip
BRANCHING = ("gated delta net", "convolutions")
"""Kinds that read trees."""
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29, 31], [3], [2, 4, 8, 16]]


def made(kind: str, seed: int = 0) -> Target:
    name, values = KINDS[kind]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return Target(build(name, seed, vocab_size=VOCAB, initializer_range=0.4, **ends, **values))


def nearly(kind: str) -> Target:
    """A model whose weights are nearly those of `made`."""
    target = made(kind)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape,
                                           generator=torch.Generator().manual_seed(0)))
    return target


@torch.inference_mode()
def own_text(target: Target, prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(20):
        text.append(int(target.own_logits(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def agrees(logits: torch.Tensor, target: Target, text: list[int]) -> None:
    wanted = target.own_logits(torch.tensor([text]))[0, -1]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gated delta net", "no single steps"])
def test_prompts_prefilled_in_another_cache_move_with_their_states(kind: str) -> None:
    results = []
    for next_to in (True, False):
        item, rows = decoder(Plain(), ours=made(kind)), [running(text, limit=9) for text in PROMPTS]
        item.prompts.chunk = 4
        admit(item, rows[1:2])
        for _ in read_elsewhere(item, rows[:1]) if next_to else ():
            item.step()
        if not next_to:
            admit(item, rows[:1])
        admit(item, rows[2:])
        while item.running:
            item.step()
        results.append([row.tokens for row in rows])
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_independent_of_the_draft(kind: str) -> None:
    """Alone and in ragged batches, drafted for by a model with states that is nearly the same."""
    model, draft = made(kind), nearly(kind)
    assert model.has_states and model.reads_trees == (kind in BRANCHING)
    assert model.facts.single_steps == (kind != "no single steps")
    for want in (Sampling(), Sampling(temperature=0.8, seed=3)):
        done = Engine(model).generate(PROMPTS, sampling=want, max_new_tokens=20, batch_size=1)
        plain = [completion.checked().tokens for completion in done]
        if want.temperature == 0:
            assert plain == [own_text(model, prompt) for prompt in PROMPTS]
        for rows in (1, 3):
            engine = Engine(model, DraftModel(draft, VOCAB), budget=4)
            done = engine.generate(PROMPTS, sampling=want, max_new_tokens=20, batch_size=rows)
            assert [completion.checked().tokens for completion in done] == plain
            rates = [completion.stats.tokens_per_round for completion in done]
            assert all(rate > 1.2 for rate in rates), "what was drafted is never accepted"


def chain(*rows: list[int]) -> TokenTree:
    return TokenTree.chain(torch.tensor(rows))


@torch.inference_mode()
@pytest.mark.parametrize(
    "kind", ["gated delta net", "convolutions", "states and keys in one layer"]
)
def test_rejected_drafts_leave_no_trace(kind: str) -> None:
    """States after each token are kept where layers record them: nothing waits. Others are read
    again, in one pass with what comes next."""
    model = made(kind)
    cache, records = model.new_cache(2, 64), kind != "states and keys in one layer"
    assert isinstance(cache, StateCache)
    model.read(chain([1, 2, 3], [4, 5, ABSENT]), cache)
    cache.keep(None, torch.tensor([3, 2]))
    assert cache.waiting.tolist() == ([0, 0] if records else [0, 2])
    layer = next(layer for layer in cache.layers if isinstance(layer, StateLayer))
    before = [state.clone() for state in layer.states]
    model.read(chain([6, 9, 9], [7, 8, 9]), cache)
    same = zip(before, layer.states, strict=True)
    assert all(torch.equal(was, now) for was, now in same), "a read commits nothing"
    cache.keep(None, torch.tensor([1, 3]))
    assert cache.waiting.tolist() == ([0, 0] if records else [1, 0])
    logits = model.read(chain([10], [11]), cache).logits
    for row, text in enumerate(([1, 2, 3, 6, 10], [4, 5, 7, 8, 9, 11])):
        agrees(logits[row, -1], model, text)


TREE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])
"""Paths of nodes: 0-1-3-6, 0-1-4, 0-2-5."""


@torch.inference_mode()
@pytest.mark.parametrize("kind", BRANCHING)
def test_states_follow_the_branch_that_is_accepted(kind: str) -> None:
    """A tree is read at once, and a commit takes the states after its path: nothing waits."""
    model = made(kind)
    cache = model.new_cache(2, 64)
    assert isinstance(cache, StateCache)
    model.read(chain([1, 2, 3], [4, 5, 6]), cache)
    cache.keep(None, torch.tensor([3, 1]))
    tree = TokenTree.shaped(torch.arange(20, 34).view(2, 7), TREE)
    logits = model.read(tree, cache).logits
    for row, text in enumerate(([1, 2, 3], [4])):
        for path in ([0, 1, 3, 6], [0, 1, 4], [0, 2, 5]):
            agrees(logits[row, path[-1]], model, text + tree.tokens[row, path].tolist())
    cache.keep(torch.tensor([[0, 2, 5, 3], [0, 1, 4, 3]]), torch.tensor([3, 2]))
    assert not cache.waiting.any() and cache.lengths.tolist() == [6, 3]
    logits = model.read(chain([40], [41]), cache).logits
    for row, text in enumerate(([1, 2, 3, 20, 22, 25, 40], [4, 27, 28, 41])):
        agrees(logits[row, -1], model, text)


@torch.inference_mode()
def test_a_tree_is_read_after_tokens_that_wait() -> None:
    """Rows may lack different numbers of tokens; a part of a tree is read from its root on."""
    model = made("gated delta net")
    cache = model.new_cache(2, 64)
    assert isinstance(cache, StateCache)
    model.read(chain([1, 2, 3], [4, 5, 6]), cache)
    cache._reads.marks, cache._reads.trails = [], []        # as after a long block
    cache.keep(None, torch.tensor([3, 1]))
    assert cache.waiting.tolist() == [3, 1]
    tree = TokenTree.shaped(torch.arange(20, 34).view(2, 7), TREE)
    whole = model.read(tree, cache).logits
    part = model.read(tree, cache, first=4).logits
    torch.testing.assert_close(part, whole[:, 4:])
    for row, text in enumerate(([1, 2, 3], [4])):
        agrees(whole[row, 5], model, text + tree.tokens[row, [0, 2, 5]].tolist())
    cache.keep(torch.tensor([[0, 2, 5], [0, 1, 4]]), torch.tensor([3, 2]))
    logits = model.read(chain([40], [41]), cache).logits
    for row, text in enumerate(([1, 2, 3, 20, 22, 25, 40], [4, 27, 28, 41])):
        agrees(logits[row, -1], model, text)


@pytest.mark.parametrize("kind", BRANCHING)
def test_text_is_independent_of_trees(kind: str) -> None:
    """Trees drafted by a model that reads them itself, alone and in batches."""
    model, draft = made(kind), nearly(kind)
    for want in (Sampling(), Sampling(temperature=0.8, seed=3)):
        done = Engine(model).generate(PROMPTS, sampling=want, max_new_tokens=20, batch_size=1)
        plain = [completion.checked().tokens for completion in done]
        for rows in (1, 3):
            engine = Engine(model, DraftModel(draft, VOCAB, TREE), budget=6)
            done = engine.generate(PROMPTS, sampling=want, max_new_tokens=20, batch_size=rows)
            assert [completion.checked().tokens for completion in done] == plain
            assert all(completion.stats.tokens_per_round > 1.2 for completion in done)


def test_trees_over_states_need_the_cache_that_our_attention_reads() -> None:
    model = made("gated delta net").model
    assert Target(model).reads_trees and not Target(model, kv_cache="int8").reads_trees


@torch.inference_mode()
def test_memory_stays_flat_if_every_draft_is_rejected() -> None:
    """As wide a read every round, whatever was rejected before; nothing is kept of reads."""
    model, widths = made("gated delta net"), set()
    cache = model.new_cache(1, 512)
    assert isinstance(cache, StateCache)
    for token in range(30):
        tree = cache.truncate_tree(chain([token % VOCAB, 1, 2, 3]))
        block = cache.block(tree, 0)
        widths.add(block.tree.tokens.shape[1])
        model.read(tree, cache)
        cache.keep(None, torch.tensor([1]))
        assert len(cache._reads.trails) == 1 and len(cache._reads.marks) <= 1
    assert widths == {4} and int(cache.lengths) == 30


@torch.inference_mode()
def test_states_follow_their_rows_and_empty_rows_start_fresh() -> None:
    model = made("Mamba 1, whose scan is handed its state")
    cache = model.new_cache(2, 32)
    model.read(chain([1, 2, 3], [4, 5, 6]), cache)
    cache.keep(None, torch.tensor([3, 1]))
    cache.select([1])
    view = cache.rows(1, 2)
    model.read(chain([1, 2]), view)
    view.keep(None, torch.tensor([2]))
    logits = model.read(chain([7], [7]), cache).logits[:, -1]
    for row, text in enumerate(([4, 7], [1, 2, 7])):
        agrees(logits[row], model, text)


@torch.inference_mode()
def test_rows_wait_for_at_most_one_block() -> None:
    """A draft is cut to what fits after what waits; a row that fills the block moves on."""
    model = made("states and keys in one layer")
    cache, dice, most = model.new_cache(2, 512), torch.Generator().manual_seed(0), 0
    assert isinstance(cache, StateCache)
    for _ in range(60):
        drafted = torch.randint(VOCAB, (2, 5), generator=dice)
        tree = cache.truncate_tree(TokenTree.chain(drafted))
        model.read(tree, cache)
        there = tree.present.sum(1)
        cache.keep(None, torch.minimum(there, 1 + torch.randint(5, (2,), generator=dice)))
        most = max(most, int(cache.waiting.max()))
        assert cache.waiting.max() < BLOCK and tree.present[:, 0].all()
    assert most > 5 and len(cache._reads.marks) <= 1


@torch.inference_mode()
def test_models_without_continuable_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    after = Trail.after
    taken = StateCache._take
    monkeypatch.setattr(StateCache, "_take", lambda cache, mark, rows: taken(cache, mark, rows[:1]))
    with pytest.raises(UnsupportedModel, match="the states it kept"):
        made("states and keys in one layer")
    monkeypatch.setattr(Trail, "after", lambda trail, row, *rest: after(trail, 0, *rest))
    with pytest.raises(UnsupportedModel, match="the states it kept"):
        made("gated delta net")


def test_static_shapes_are_refused() -> None:
    engine = Engine(made("convolutions"), shapes=ShapePolicy(closed=True))
    with pytest.raises(BadInput, match="leave graphs"):
        engine.generate([[1, 2]], max_new_tokens=2)


@torch.inference_mode()
def test_pending_states_are_not_applied_to_moved_rows() -> None:
    """Rows move between a read and what is kept of it: no row takes the states of another."""
    model = made("gated delta net")
    cache = model.new_cache(2, 64)
    assert isinstance(cache, StateCache)
    model.read(chain([1, 2], [3, 4]), cache)
    cache.keep(None, torch.tensor([2, 2]))
    model.read(chain([5], [6]), cache)
    cache.select([1])
    model.read(chain([6]), cache.rows(0, 1))
    cache.select([0, 0])
    assert not cache._reads.marks
    cache.keep(None, torch.tensor([1, 1]))
    logits = model.read(chain([7], [8]), cache).logits[:, -1]
    for row, last in enumerate((7, 8)):
        agrees(logits[row], model, [3, 4, 6, last])
