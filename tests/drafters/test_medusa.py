"""Medusa: the best tree of a budget, chains, memory, and one call for heads and bigrams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import drafting
import pytest
import torch
from drafting import MEDUSA_TREE, commit_of, drafted, frontier_of, needs_kernels, paired_head, texts
from test_medusa_heads import features, logits_of, noisy_head
from test_medusa_trees import TREES, Published
from tiny import CPU, VOCAB, prompts, target
from torch import Tensor

from draftproof.core.messages import Commit
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.medusa import NODES, Medusa, MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.engine.engine import Engine
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


@pytest.mark.parametrize("name", TREES)
def test_drafted_tokens_are_those_of_the_published_indices(name: str) -> None:
    """Greedy: flat candidates [root, ten of head 0, ten of head 1, ...] at the tree's indices."""
    stage = Scene(noisy_head(4), Sampling(), tree=TREES[name])
    tree = stage.propose(63)
    best = stage.logits.topk(10, -1).indices.flatten(1)
    flat = torch.cat([tree.tokens[:, :1], best], 1)
    assert torch.equal(tree.tokens, flat[:, Published(TREES[name]).indices])


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("budget", [1, 2, 5, 16, 31])
def test_the_dynamic_tree_holds_the_most_likely_paths(budget: int, ops: Ops) -> None:
    """Of all paths of all tokens: 40 + 40^2 + 40^3."""
    stage = Scene(noisy_head(seed=2), Sampling(), ops=ops)
    tree = stage.propose(budget)
    laws = stage.logits.log_softmax(-1)
    for row in range(3):
        values: dict[Path, float] = {}
        for depth in (1, 2, 3):
            steps = laws[row, :depth].tolist()
            for path in itertools.product(range(VOCAB), repeat=depth):
                values[path] = sum(step[token] for step, token in zip(steps, path, strict=True))
        best = sorted(values, key=lambda path: -values[path])[:budget]
        assert drafted(tree, row).keys() == set(best)


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
    cold, warm = (
        Scene(noisy_head(seed=5), Sampling(temperature=one)).propose(20) for one in (0.0, 1e-5)
    )
    assert all(drafted(cold, row).keys() == drafted(warm, row).keys() for row in range(3))


def test_forbidden_tokens_are_absent_with_all_below_them() -> None:
    for tree in ("dynamic", "mc_sim_7b_63"):
        stage = Scene(noisy_head(4), Sampling(temperature=1.0, top_k=2), tree=tree)
        found = stage.propose(30)
        for row in range(3):
            paths = drafted(found, row)
            assert 0 < len(paths) <= 30 and {path[:-1] for path in paths} <= {(), *paths}
            assert len({path[0] for path in paths}) <= 2


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


def test_broken_heads_draft_nothing() -> None:
    """NaN is no token, and no reason to lose the root."""
    head = noisy_head()
    head.heads[1].blocks[0].weight.data.fill_(torch.nan)    # type: ignore[union-attr, index]
    for tree in ("dynamic", MEDUSA_TREE):
        stage = Scene(head, Sampling(temperature=1.0), tree=tree)
        found = stage.propose(7)
        assert torch.equal(found.tokens[:, 0], stage.prefix.root)
        assert all({len(path) for path in drafted(found, row)} == {1} for row in range(3))
        engine = Engine(target(), drafting.Watch(Medusa(head, target(), tree)))
        plain = texts(Engine(target()), prompts(2), max_new_tokens=9)
        assert texts(engine, prompts(2), max_new_tokens=9) == plain


def test_a_smaller_budget_takes_the_first_paths() -> None:
    tree = CHOICES["vicuna_33b_stage1"]
    stage = Scene(noisy_head(4), Sampling(), tree="vicuna_33b_stage1")
    best = stage.logits.topk(10, -1).indices
    for budget in (0, 1, 2, 7, 40, 63, 100):
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


@pytest.mark.parametrize("tree", [None, "dynamic", MEDUSA_TREE], ids=["none", "dynamic", "fixed"])
@pytest.mark.parametrize("head", [noisy_head, paired_head], ids=["no bigrams", "bigrams"])
def test_a_target_that_cannot_read_trees_is_drafted_a_chain(head: Any, tree: Any) -> None:
    """Each choice is the likeliest after the one before."""
    stage = Scene(head(), Sampling(), tree=tree, vocabulary=Chains())
    assert stage.drafter.default_budget == stage.drafter.deepest == 3
    for budget, length in ((0, 0), (2, 2), (9, 3)):
        found = stage.propose(budget)
        assert found.is_chain and found.tokens.shape == (3, length + 1)
        for step in range(length):
            corrected = head().given_previous(found.tokens[:, step], stage.logits[:, step])
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
                    law = head.given_previous(torch.tensor(text[-1:]), logits)[0]
                    text.append(int(law.argsort(descending=True)[rank]))
                wanted.add(tuple(text[1:]))
            assert drafted(found, row).keys() == wanted


def test_what_a_drafter_says_of_itself() -> None:
    head = noisy_head(4)
    for tree, budget, depth in ((None, NODES, 4), ("zephyr_stage2", 63, 4), (((0,), (1,)), 2, 1)):
        drafter = Medusa(head, target(), tree)
        assert (drafter.default_budget, drafter.deepest) == (budget, depth)
    head.config = MedusaConfig(4, 2, 32, VOCAB, tree=MEDUSA_TREE)
    assert Medusa(head, target(), "dynamic").tree is None
    drafter = head.drafter(target())
    assert drafter.hidden_layers == (-1,) and drafter.tree == MEDUSA_TREE


def test_it_remembers_the_last_committed_state_of_each_row() -> None:
    drafter = Medusa(noisy_head(), target())
    drafter.start(5, 64, CPU)
    hidden = torch.randn(3, 4, 1, 32, dtype=torch.float64)

    def observe(rows: Sequence[int], *counts: int) -> list[Tensor]:
        """Commits of so many tokens, with the first of `hidden`; the last states."""
        places = torch.arange(4).repeat(len(rows), 1)
        drafter.observe(Commit(rows, places, places, torch.tensor(counts), hidden[: len(rows)]))
        return [hidden[index, count - 1, 0] for index, count in enumerate(counts)]

    one, two, three = observe(range(3), 1, 4, 2)
    assert torch.equal(drafter.hidden[:3], torch.stack([one, two, three]))
    drafter.select([2, 0, 0, 1])
    assert torch.equal(drafter.hidden[:4], torch.stack([three, one, one, two]))
    four, five = observe([1, 2], 3, 2)
    assert torch.equal(drafter.hidden[:4], torch.stack([three, four, five, two]))
    (six,) = observe([2], 4)
    assert torch.equal(drafter.hidden[:4], torch.stack([three, four, six, two]))


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
