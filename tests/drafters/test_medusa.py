"""Medusa: the best tree of a budget, chains, memory, and one call for heads and bigrams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import drafting
import pytest
import torch
from drafting import MEDUSA_TREE, commit_of, drafted, frontier_of, needs_kernels, paired_head
from test_medusa_heads import features, logits_of, noisy_head
from tiny import CPU, VOCAB, target
from torch import Tensor

from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.bigram import WEIGHT
from draftproof.drafters.medusa import NODES, Medusa, MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.model.target import Target

Path = tuple[int, ...]
TEXTS = [[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5]]


def test_tokens_that_heads_do_not_know_are_never_drafted() -> None:
    """A smaller table, a larger one, and one of chosen rows."""
    torch.manual_seed(0)
    known = torch.tensor([3, 9, 11, 20, 38])
    for rows, token_map in ((VOCAB - 7, None), (VOCAB + 5, None), (5, known)):
        size = VOCAB if token_map is not None else rows
        few = 5 if token_map is not None else None
        head = MedusaHead(MedusaConfig(3, 1, 32, size, False, draft_vocab_size=few)).double()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
        if token_map is not None:
            head.token_map = token_map
        tree = Scene(head, Sampling(temperature=1.0)).propose(30)
        found = tree.tokens[:, 1:]
        allowed = set(known.tolist()) if token_map is not None else set(range(min(rows, VOCAB)))
        assert set(found[found != ABSENT].tolist()) <= allowed and (found != ABSENT).any()
        size = VOCAB if token_map is None else len(known)
        assert all(logits.shape[-1] == size for logits in head.predict(features(), target()))


class Scene:
    """Three rows with random hidden states and texts, and a drafter that observed them."""

    def __init__(
        self, head: MedusaHead, *params: Sampling, tree: Any = "dynamic", vocabulary: Any = None,
        ops: Ops = CPU
    ) -> None:
        self.drafter = Medusa(head, vocabulary if vocabulary is not None else target(), tree)
        self.frontier = frontier_of(TEXTS, 1, *params, ops=ops)
        self.prefix, self.sampler = self.frontier.prefix, self.frontier.sampler
        dice = torch.Generator().manual_seed(4)
        hidden = torch.randn(3, 1, 1, 32, generator=dice, dtype=torch.float64)
        self.drafter.start(6, 64, ops)
        self.drafter.observe(commit_of(range(3), [[0]] * 3, hidden))
        with torch.no_grad():
            self.logits: Tensor = self.drafter.logits(3, head.config.num_heads)

    def propose(self, budget: int, trees: bool = True) -> TokenTree:
        with torch.inference_mode():
            return self.drafter.propose(replace(self.frontier, budget=budget, trees=trees))


def test_layers_are_distinct_and_weights_are_copied() -> None:
    head = noisy_head(layers=2)
    first, second = head.heads[0].blocks                # type: ignore[union-attr, misc]
    assert not torch.equal(first.weight, second.weight)
    stage = Scene(head, Sampling())
    before = stage.propose(16).tokens
    for parameter in head.parameters():
        parameter.data.zero_()
    assert torch.equal(stage.propose(16).tokens, before)


PER_DEPTH = {"mc_sim_7b_63": [10, 28, 23, 2], "vicuna_7b_stage1": [10, 32, 20, 1],
             "vicuna_7b_stage1_ablation": [10, 21, 25, 7], "vicuna_7b_stage2": [10, 23, 23, 7],
             "vicuna_13b_stage1": [10, 29, 23, 1], "vicuna_13b_stage2": [10, 19, 25, 9],
             "vicuna_33b_stage1": [10, 34, 19, 0], "vicuna_33b_stage2": [10, 24, 24, 5],
             "zephyr_stage2": [10, 27, 23, 3]}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_published_sets_are_trees_at_every_size(name: str) -> None:
    paths = CHOICES[name]
    assert len(paths) == len(set(paths)) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == PER_DEPTH[name]
    for size in range(1, 64):
        assert len(TreeShape(paths[:size])) == size + 1         # refuses a path without its parent
    assert max(map(max, paths)) == 9


def flat_indices(paths: Sequence[Path]) -> list[int]:
    """FasterDecoding/Medusa's places of nodes among [root, ten of head 0, ten of head 1, ...]."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    return [0, *(path[-1] + 10 * (len(path) - 1) + 1 for path in ordered)]


@pytest.mark.parametrize("name", CHOICES)
def test_drafted_tokens_are_those_of_the_published_indices(name: str) -> None:
    known = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert flat_indices(known) == [0, 1, 2, 11, 12, 11, 21]
    stage = Scene(noisy_head(4), Sampling(), tree=name)
    tree = stage.propose(63)
    best = stage.logits.topk(10, -1).indices.flatten(1)
    flat = torch.cat([tree.tokens[:, :1], best], 1)
    assert torch.equal(tree.tokens, flat[:, flat_indices(CHOICES[name])])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}]
)
def test_drafts_are_what_the_target_would_choose_with_these_logits(params: dict[str, Any]) -> None:
    """The first choice of each head is the target's own sample, with its noise."""
    stage = Scene(noisy_head(), Sampling(**params), tree=((0,), (0, 0), (0, 0, 0)))
    tree = stage.propose(3)
    chain = TokenTree.chain(tree.tokens[:, :3])
    sampled = stage.sampler.sample(stage.logits, Paths(stage.prefix, chain))
    assert torch.equal(sampled, tree.tokens[:, 1:])


def test_a_temperature_near_0_drafts_as_greedy_decoding() -> None:
    cold, warm = (Scene(noisy_head(seed=5), Sampling(temperature=one)).propose(20)
                  for one in (0.0, 1e-5))
    assert all(drafted(cold, row).keys() == drafted(warm, row).keys() for row in range(3))


@pytest.mark.parametrize("tree", ["dynamic", MEDUSA_TREE], ids=["dynamic", "fixed"])
def test_confidence_is_the_product_of_what_the_heads_say(tree: Any) -> None:
    """1 at the root, at most the parent's, 0 where absent; the heads' own if greedy."""
    stage = Scene(noisy_head(), Sampling(), tree=tree)
    found, laws = stage.propose(7), stage.logits.softmax(-1)
    assert found.confidence is not None and (found.confidence[:, 0] == 1).all()
    for row in range(3):
        for path, confidence in drafted(found, row).items():
            steps = [float(laws[row, head, token]) for head, token in enumerate(path)]
            assert confidence == pytest.approx(math.prod(steps))
    warm = Scene(noisy_head(4), Sampling(temperature=1.3, top_k=3), tree=tree).propose(40)
    assert warm.confidence is not None and torch.equal(warm.confidence > 0, warm.present)
    assert (warm.confidence <= warm.confidence.gather(1, warm.parents.clamp(min=0))).all()


def test_a_smaller_budget_takes_the_first_paths() -> None:
    tree = CHOICES["vicuna_33b_stage1"]
    stage = Scene(noisy_head(4), Sampling(), tree="vicuna_33b_stage1")
    best = stage.logits.topk(10, -1).indices
    for budget in (1, 2, 7, 40, 63, 100):
        found = stage.propose(budget)
        for row in range(3):
            ranks = [list(enumerate(path)) for path in tree[:budget]]
            wanted = {tuple(int(best[row, head, rank]) for head, rank in path) for path in ranks}
            assert drafted(found, row).keys() == wanted


class Chains:
    """The target, if it could not read trees."""

    def __init__(self) -> None:
        self.reads_trees = False

    def __getattr__(self, name: str) -> Any:
        return getattr(target(), name)


def given_previous(head: MedusaHead, previous: Tensor, logits: Tensor) -> Tensor:
    """A head's logits [P, V] corrected by the tokens before, [P]."""
    if head.pairs is None:
        return logits
    table = head.pairs.table(VOCAB, logits.device)
    tokens, place = table.of(previous)
    gains = table.rest[previous][:, None].repeat(1, VOCAB + 1)          # the last is for ABSENT
    gains = gains.scatter(1, tokens % (VOCAB + 1), table.gains[place])[:, :VOCAB]
    return logits + WEIGHT * gains.to(logits.dtype)


@pytest.mark.parametrize("tree", [None, "dynamic", MEDUSA_TREE], ids=["none", "dynamic", "fixed"])
@pytest.mark.parametrize("head", [noisy_head, paired_head], ids=["no bigrams", "bigrams"])
def test_a_target_that_cannot_read_trees_is_drafted_a_chain(head: Any, tree: Any) -> None:
    """Each choice is the likeliest after the one before."""
    stage = Scene(head(), Sampling(), tree=tree, vocabulary=Chains())
    assert stage.drafter.default_budget == stage.drafter.deepest == 3
    for budget, length in ((2, 2), (9, 3)):
        found = stage.propose(budget)
        assert found.is_chain and found.tokens.shape == (3, length + 1)
        for step in range(length):
            corrected = given_previous(head(), found.tokens[:, step], stage.logits[:, step])
            assert torch.equal(corrected.argmax(-1), found.tokens[:, step + 1])
    asked = Scene(head(), Sampling(), tree=tree).propose(9, trees=False)
    assert asked.is_chain and torch.equal(asked.tokens, found.tokens)


def test_ranks_of_a_fixed_tree_are_those_after_the_parent() -> None:
    head = paired_head()
    stage = Scene(head, Sampling(), tree=MEDUSA_TREE)
    for budget in (2, 7):
        found = stage.propose(budget)
        for row in range(3):
            wanted = set()
            for path in MEDUSA_TREE[:budget]:
                text = [int(stage.prefix.root[row])]
                for step, rank in enumerate(path):
                    logits = stage.logits[row, step][None]
                    law = given_previous(head, torch.tensor(text[-1:]), logits)[0]
                    text.append(int(law.argsort(descending=True)[rank]))
                wanted.add(tuple(text[1:]))
            assert drafted(found, row).keys() == wanted


def test_what_a_drafter_says_of_itself() -> None:
    head = noisy_head(4)
    for tree, budget, depth in ((None, NODES, 4), ("zephyr_stage2", 63, 4), (((0,), (1,)), 2, 1)):
        drafter = Medusa(head, target(), tree)
        assert (drafter.default_budget, drafter.deepest) == (budget, depth)
    drafter = head.drafter(target())
    assert drafter.hidden_layers == (-1,) and drafter.tree is None


@pytest.mark.parametrize(("tree", "words"), [
    ("oak", "oak.*dynamic.*mc_sim_7b_63"), ("mc_sim_7b_63", "4 deep.*3 heads"),
    (((0,), (0, 50)), "51 choices.*40"), (((0, 0), (0,)), "before its parent"),
    (((0,), (0,)), "comes twice"), ((), "empty"),
])  # fmt: skip
def test_trees_that_cannot_be_drafted_are_refused(tree: Any, words: str) -> None:
    with pytest.raises((BadInput, DrafterMismatch), match=words):
        Medusa(noisy_head(3), target(), tree)


def packed_head(**form: Any) -> tuple[Target, MedusaHead]:
    """A target whose heads our kernels read, and three heads of which no two are alike."""
    tables, dice = drafting.packed_target(), torch.Generator().manual_seed(0)
    head = MedusaHead.fresh(tables, num_heads=3, **form)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice)
    return tables, head


@needs_kernels
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own projections"])
@pytest.mark.parametrize("layers", [1, 2])
def test_kernels_say_what_operators_say(shared: bool, layers: int) -> None:
    """Logits of all heads, as closely as bfloat16 can."""
    tables, head = packed_head(num_layers=layers, share_lm_head=shared)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    drafter = Medusa(head, tables)
    with torch.inference_mode():
        wanted = logits_of(drafter, hidden, 3, TORCH)
        assert drafter.prepared is None
        for heads in (1, 3):
            found = logits_of(drafter, hidden, heads)
            assert found.shape == (5, heads, 96)
            assert (drafter.prepared.whole is not None) == shared       # type: ignore[union-attr]
            assert (found - wanted[:, :heads]).float().norm() < 0.01 * wanted.float().norm()


@needs_kernels
@pytest.mark.parametrize("tree", ["dynamic", MEDUSA_TREE], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("rows", "known"), [(1, None), (3, None), (3, 40)])
def test_heads_and_bigrams_in_one_call_draft_the_same(
    rows: int, known: int | None, temperature: float, tree: Any
) -> None:
    (tables, head), dice = packed_head(num_layers=2), torch.Generator().manual_seed(0)
    head.count(*torch.randint(96, (2, 3000), generator=dice))
    if known is not None:
        head.limit_vocabulary(torch.randperm(96, generator=dice)[:known], tables)
    frontier = frontier_of(TEXTS[:rows], 7, Sampling(temperature=temperature, seed=3))
    hidden, trees = torch.randn(rows, 64, generator=dice).bfloat16(), list[TokenTree]()
    for apart in (False, True):
        drafter = Medusa(head, tables, tree)
        drafter.start(4, 64, CPU)
        drafter.hidden[:rows] = hidden
        assert drafter.prepared.whole is not None                       # type: ignore[union-attr]
        if apart:
            drafter.prepared = drafter.prepared._replace(whole=None)    # type: ignore[union-attr]
        with torch.inference_mode():
            trees.append(drafter.propose(frontier))
    one, other = trees
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)
    assert one.confidence is not None and other.confidence is not None
    assert torch.equal(one.confidence, other.confidence) and one.tokens.shape == (rows, 8)
    assert bool((one.confidence > 0).all()) and bool((one.confidence[:, 0] == 1).all())
    assert rows == 1 or not torch.equal(one.tokens[0], one.tokens[1])
