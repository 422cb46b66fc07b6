"""Medusa: heads that start as the target's own, the best tree of a budget, and one call for all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafting
import pytest
import torch
from drafting import MEDUSA_TREE, commit_of, drafted, frontier_of, needs_kernels, paired_head
from tiny import CPU, VOCAB, target
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.core.ops import Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.bigram import WEIGHT
from draftproof.drafters.checkpoints import read_head, write_head
from draftproof.drafters.medusa import NODES, Medusa, MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.native.kernels import kernels

TEXTS = [[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5]]
both_forms = pytest.mark.parametrize("share", [True, False], ids=["shared", "own projections"])


def noisy_head(
    heads: int = 3, share: bool = True, vocabulary: Any = None, layers: int = 2
) -> MedusaHead:
    """Heads of which no two are alike."""
    head = MedusaHead.fresh(vocabulary or target(), heads, layers, share)
    torch.manual_seed(0)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head


def features() -> Features:
    tokens = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return target().features(tokens, torch.ones(3, 12))


def logits_of(drafter: Medusa, hidden: Tensor, heads: int, ops: Ops = CPU) -> Tensor:
    """[B, heads, V] what it says of hidden states [B, H]."""
    drafter.start(len(hidden), 64, ops)
    drafter.hidden[:] = hidden
    return drafter.logits(len(hidden), heads)


class Scene:
    """Three rows with random hidden states and texts, and a drafter that observed them."""

    def __init__(
        self, head: MedusaHead, *params: Sampling, tree: Any = "dynamic", vocabulary: Any = None
    ) -> None:
        self.drafter = Medusa(head, vocabulary if vocabulary is not None else target(), tree)
        self.frontier = frontier_of(TEXTS, 1, *params)
        hidden = torch.randn(3, 1, 1, 32, generator=torch.Generator().manual_seed(4)).double()
        self.drafter.start(6, 64, CPU)
        self.drafter.observe(commit_of(range(3), [[0]] * 3, hidden))
        with torch.no_grad():
            self.logits: Tensor = self.drafter.logits(3, head.steps)

    def propose(self, budget: int, trees: bool = True) -> TokenTree:
        with torch.inference_mode():
            frontier = replace(self.frontier, max_draft_tokens=budget, trees=trees)
            return self.drafter.propose(frontier)


# Heads ------------------------------------------------------------------------------------------


@both_forms
def test_decoding_and_training_compute_the_same(share: bool, tmp_path: Path) -> None:
    """Fresh heads say what the target says. Stacked heads after token t say what step i says of
    t + 2 + i; so do those of a draft vocabulary of its tokens, written and read again, too."""
    head, known, inputs = noisy_head(share=share), torch.tensor([7, 3, 30, 12]), features()
    with torch.no_grad():
        ours = target().unembed(inputs.hidden[:, :, 0])
        for step, logits in enumerate(MedusaHead.fresh(target(), 3, 2, share).predict(inputs,
                                                                                      target())):
            torch.testing.assert_close(logits, ours[:, : -2 - step], rtol=0, atol=1e-12)
        trained = list(head.predict(inputs, target()))
        assert [len(logits[0]) for logits in trained] == [10, 9, 8] and head.steps == 3
        wanted = torch.stack([logits[:, 4] for logits in trained], 1)
        hidden = inputs.hidden[:, 4, 0]
        result = logits_of(Medusa(head, target()), hidden, 3)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)
        head.limit_vocabulary(known, target())
        write_head(head, tmp_path)
        read = read_head(tmp_path, target())
        assert isinstance(read, MedusaHead) and read.config == head.config
        for item in (head, read):
            for old, new in zip(trained, item.predict(inputs, target()), strict=True):
                torch.testing.assert_close(new, old[..., known], rtol=0, atol=1e-10)
            few = logits_of(Medusa(item, target()), hidden, 3)
            torch.testing.assert_close(few[..., known], wanted[..., known], rtol=0, atol=1e-10)
            assert int(few.isfinite().sum()) == 3 * 3 * len(known)
    tree = Scene(read, Sampling(temperature=1.0)).propose(30)
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= {ABSENT, *known.tolist()}
    head.heads[0].blocks[0].weight.data.zero_()             # type: ignore[union-attr, index]
    assert not torch.equal(read.heads[0].blocks[0].weight,  # type: ignore[union-attr, index]
                           head.heads[0].blocks[0].weight)  # type: ignore[union-attr, index]


def test_heads_of_another_target_are_refused() -> None:
    cases = ((16, VOCAB, "16 numbers.*has 32"), (32, 4096, "4096 tokens.*has 40"))
    for hidden, vocab, words in cases:
        form = MedusaConfig(num_heads=2, hidden_size=hidden, vocab_size=vocab)
        with pytest.raises(DrafterMismatch, match=words):
            Medusa(MedusaHead(form), target())
    with pytest.raises(BadInput, match=r"num_heads.*0"):
        MedusaConfig(num_heads=0, hidden_size=32, vocab_size=VOCAB)


# Trees ------------------------------------------------------------------------------------------


PER_DEPTH = {"mc_sim_7b_63": [10, 28, 23, 2], "vicuna_7b_stage2": [10, 23, 23, 7],
             "vicuna_13b_stage2": [10, 19, 25, 9], "vicuna_33b_stage2": [10, 24, 24, 5],
             "zephyr_stage2": [10, 27, 23, 3]}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_smaller_budgets_use_a_prefix_of_the_published_tree(name: str) -> None:
    paths, stage = CHOICES[name], Scene(noisy_head(4), Sampling(), tree=name)
    assert len(paths) == len(set(paths)) == 63 and max(map(max, paths)) == 9
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == PER_DEPTH[name]
    assert (stage.drafter.max_draft_tokens, stage.drafter.deepest) == (63, 4)
    best = stage.logits.topk(10, -1).indices
    for budget in range(1, 65):
        assert len(TreeShape(paths[:budget])) == 1 + min(budget, 63)    # refuses an orphan
        if budget not in (1, 7, 40, 64):
            continue
        tree = stage.propose(budget)
        for row in range(3):
            ranks = [list(enumerate(path)) for path in paths[:budget]]
            wanted = {tuple(int(best[row, head, rank]) for head, rank in path) for path in ranks}
            assert drafted(tree, row).keys() == wanted


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}]
)
def test_drafts_follow_the_targets_sampling_options(params: dict[str, Any]) -> None:
    """The first choice of each head is the target's own sample, with its noise."""
    stage = Scene(noisy_head(), Sampling(**params), tree=((0,), (0, 0), (0, 0, 0)))
    tree = stage.propose(3)
    paths = Paths(stage.frontier.prefix, TokenTree.chain(tree.tokens[:, :3]))
    assert torch.equal(stage.frontier.sampler.sample(stage.logits, paths), tree.tokens[:, 1:])


@pytest.mark.parametrize("tree", ["dynamic", MEDUSA_TREE], ids=["dynamic", "fixed"])
def test_confidence_is_the_product_of_head_probabilities(tree: Any) -> None:
    """1 at the root, at most the parent's, 0 where absent; the heads' own if greedy."""
    stage = Scene(noisy_head(), Sampling(), tree=tree)
    result, distributions = stage.propose(7), stage.logits.softmax(-1)
    assert result.confidence is not None and (result.confidence[:, 0] == 1).all()
    for row in range(3):
        for path, confidence in drafted(result, row).items():
            steps = [float(distributions[row, head, token]) for head, token in enumerate(path)]
            assert confidence == pytest.approx(math.prod(steps))
    warm = Scene(noisy_head(4), Sampling(temperature=1.3, top_k=3), tree=tree).propose(40)
    assert warm.confidence is not None and torch.equal(warm.confidence > 0, warm.present)
    assert (warm.confidence <= warm.confidence.gather(1, warm.parents.clamp(min=0))).all()


class Chains:
    """The target, if it could not read trees."""

    reads_trees = False

    def __getattr__(self, name: str) -> Any:
        return getattr(target(), name)


def after(head: MedusaHead, token: int, logits: Tensor) -> Tensor:
    """A head's logits [V] corrected by the token before."""
    if head.pairs is None:
        return logits
    none = torch.zeros(1, VOCAB, dtype=logits.dtype)
    pairs = head.pairs.resized(VOCAB, logits.device)
    distribution = pairs.after(torch.tensor([[token]]), none, torch.full((1, 1, 1), WEIGHT))
    return logits + distribution[0, 0]


@pytest.mark.parametrize("head", [noisy_head, paired_head], ids=["no bigrams", "bigrams"])
def test_a_target_that_cannot_read_trees_is_drafted_a_chain(head: Any) -> None:
    """Each choice is the likeliest after the one before, whatever tree was asked for."""
    for tree in (None, MEDUSA_TREE):
        stage = Scene(head(), Sampling(), tree=tree, vocabulary=Chains())
        assert stage.drafter.max_draft_tokens == stage.drafter.deepest == 3
        for budget, length in ((2, 2), (9, 3)):
            result = stage.propose(budget)
            assert result.is_chain and result.tokens.shape == (3, length + 1)
            for row, chain in enumerate(result.tokens.tolist()):
                for step in range(length):
                    distribution = after(head(), chain[step], stage.logits[row, step])
                    assert int(distribution.argmax()) == chain[step + 1]
        asked = Scene(head(), Sampling(), tree=tree).propose(9, trees=False)
        assert asked.is_chain and torch.equal(asked.tokens, result.tokens)


def test_ranks_of_a_fixed_tree_are_those_after_the_parent() -> None:
    head = paired_head()
    stage = Scene(head, Sampling(), tree=MEDUSA_TREE)
    for budget in (2, 7):
        tree = stage.propose(budget)
        for row in range(3):
            wanted = set()
            for path in MEDUSA_TREE[:budget]:
                text = [int(stage.frontier.prefix.root[row])]
                for step, rank in enumerate(path):
                    distribution = after(head, text[-1], stage.logits[row, step])
                    text.append(int(distribution.argsort(descending=True)[rank]))
                wanted.add(tuple(text[1:]))
            assert drafted(tree, row).keys() == wanted


def test_trees_that_cannot_be_drafted_are_refused() -> None:
    for tree, words in (("oak", "oak.*dynamic.*mc_sim_7b_63"), ("mc_sim_7b_63", "4 deep.*3 heads"),
                        (((0,), (50,)), "51 choices.*40"), (((1,), (0, 0)), "no parent")):
        with pytest.raises((BadInput, DrafterMismatch, ValueError), match=words):
            Medusa(noisy_head(3), target(), tree)
    drafter = noisy_head(4).drafter(target())
    assert (drafter.tree, drafter.max_draft_tokens, drafter.deepest) == (None, NODES, 4)


@needs_kernels
@pytest.mark.parametrize(("layers", "known"), [(2, None), (2, 40), (0, None)],
                         ids=["all tokens", "a draft vocabulary", "no blocks"])
@both_forms
def test_packed_heads_match_the_operators(share: bool, layers: int, known: int | None) -> None:
    """And draft with bigrams: sampled in three rows, and greedily."""
    tables, dice = drafting.packed_target(), torch.Generator().manual_seed(0)
    head = noisy_head(share=share, vocabulary=tables, layers=layers)
    head.count(*torch.randint(96, (2, 3000), generator=dice))
    few = torch.randperm(96, generator=dice)[:known]
    if known is not None:
        head.limit_vocabulary(few, tables)
    drafter, hidden = Medusa(head, tables), torch.randn(3, 64, generator=dice).bfloat16()
    with torch.inference_mode():
        model, wanted = logits_of(drafter, hidden, 3).float(), torch.zeros(3, 3, 96)
        assert (drafter.packed is not None) == share
        for step, item in enumerate(head.heads):
            state = item(hidden.float())
            ours = head.own_projections[step] if not share else head.projection
            logits = ours(state) if ours is not None else tables.unembed(state.bfloat16())
            wanted[:, step, few if known is not None else slice(None)] = logits.float()
        assert (model[..., few] - wanted[..., few]).norm() < 0.02 * wanted.norm()
        for temperature in (0.0, 0.8):
            asked = frontier_of(TEXTS, 7, Sampling(temperature=temperature, seed=3))
            tree = drafter.propose(asked)
            drafting.assert_well_formed(tree, asked)
            assert tree.tokens.shape == (3, 8) and bool(tree.present.all())


@needs_kernels
@pytest.mark.parametrize("known", [None, 40], ids=["all tokens", "a draft vocabulary"])
def test_tokens_beyond_the_vocabulary_are_left_out(known: int | None) -> None:
    """A projection may be padded: nothing is written beyond the logits of the last row."""
    tables, dice = drafting.packed_target(), torch.Generator().manual_seed(0)
    head = noisy_head(share=True, vocabulary=tables, layers=1)
    if known is not None:
        head.limit_vocabulary(torch.randperm(96, generator=dice)[:known], tables)
    drafter, hidden = Medusa(head, tables), torch.randn(2, 64, generator=dice).bfloat16()
    with torch.inference_mode():
        wanted = logits_of(drafter, hidden, 3)
    library, packed, vocab = kernels(), drafter.packed, 90
    assert library is not None and packed is not None
    blocks, layers, projection, token_map = packed
    memory = torch.full((2 * 3 * vocab + 32,), 7.0).bfloat16()
    logits = memory[:-32].view(2, 3, vocab)
    work = hidden.new_empty(2 * 3 * (2 * 64 + projection.outputs))
    library("heads", blocks, projection, token_map, hidden, logits, work, 2, 3, layers, vocab)
    assert torch.equal(logits, wanted[..., :vocab])
    assert bool((memory[-32:] == 7).all())
