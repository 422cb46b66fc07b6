"""Medusa: heads beside the target's own, each foretelling one token further (Cai et al., arXiv 2401.10774).

All heads read the hidden state of the last committed token, so their choices do not know of each other; a tree of them
pairs the likely with the likely. Knows the heads, their training form and their tree; checkpoints are elsewhere.

Shape letters beyond the usual: K heads, R choices of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Commit, Features, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.base import Drafter, DraftHead, Vocabulary, lm_head_of, must_fit, over_vocabulary
from draftproof.drafters.bigram import WEIGHT, Pairs, first_choices, pairs_tree
from draftproof.drafters.medusa_trees import CHOICES, DYNAMIC
from draftproof.drafters.medusa_weights import Head, Weights
from draftproof.errors import BadInput, DrafterMismatch

NODES = 16
"""Draft tokens per row and round of a dynamic tree when nobody says."""
EXACT = 32
"""Up to this budget the dynamic tree is the best of all trees; beyond, of those whose nodes so many others do not excel."""

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class MedusaConfig:
    """The form of a set of heads.

    num_layers: residual blocks per head. vocab_size: tokens the ids refer to. share_lm_head: project with the target's
    own table. draft_vocab_size: how many tokens an own projection knows, if not all. base_model: the target trained for.
    tree: the calibrated tree, rank paths in order of addition, or None. pairs: how many pairs of tokens were counted.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    share_lm_head: bool = True
    bias: bool = True
    base_model: str = ""
    draft_vocab_size: int | None = None
    tree: tuple[RankPath, ...] | None = None
    pairs: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of Medusa heads was {getattr(self, name)}; it must be at least 1")
        if self.draft_vocab_size is not None and self.share_lm_head:
            raise BadInput("Medusa heads that share the target's projection know all its tokens; leave draft_vocab_size out")


class MedusaHead(DraftHead):
    """The weights of all heads. Made on its own it is zero; `fresh` makes one to train.

    Blocks start at zero, weight and bias, so that every head starts as the target's own. The original leaves the bias at
    random, which shifts the input of every head before it has learnt anything.
    """

    kind = "medusa"
    decay = 0.8
    token_map: Tensor | None
    """[draft_vocab_size] the id of each row of the projections, if they do not know all tokens."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        rows = None if config.share_lm_head else config.draft_vocab_size or config.vocab_size
        form = config.hidden_size, config.num_layers, config.bias, rows
        self.heads = nn.ModuleList(Head(*form) for _ in range(config.num_heads))
        self.pairs = Pairs(config.vocab_size, config.pairs) if config.pairs else None
        known = config.draft_vocab_size
        self.register_buffer("token_map", torch.arange(known) if known is not None else None)

    @classmethod
    def fresh(
        cls, vocabulary: Vocabulary, num_heads: int = 5, num_layers: int = 1, share_lm_head: bool = True
    ) -> MedusaHead:
        """Heads for this target that foretell what its own head says, in at least float32, on its device."""
        place = PurePath(vocabulary.name)                       # a folder's path means nothing elsewhere
        name = place.name if place.is_absolute() or len(place.parts) > 2 else vocabulary.name
        config = MedusaConfig(
            num_heads, num_layers, vocabulary.hidden_size, vocabulary.vocab_size, share_lm_head, base_model=name
        )
        dtype = torch.promote_types(vocabulary.dtype, torch.float32)
        head = cls(config).to(vocabulary.device, dtype)
        for one in head._each():
            if one.proj is not None:
                one.proj.weight.data.copy_(lm_head_of(vocabulary)[0])
        return head

    def unshared(self, vocabulary: Vocabulary) -> MedusaHead:
        """The same heads with projections of their own, copies of the target's: for layouts that must hold them."""
        if not self.config.share_lm_head:
            return self
        own = MedusaHead.fresh(vocabulary, self.config.num_heads, self.config.num_layers, share_lm_head=False)
        own = own.to(next(self.parameters()))
        own.load_state_dict(self.state_dict(), strict=False)
        own.pairs = self.pairs
        own.config = replace(self.config, share_lm_head=False, bias=True, vocab_size=vocabulary.vocab_size)
        return own

    def unpaired(self) -> MedusaHead:
        """The same heads as if nothing had been counted."""
        other = copy.copy(self)
        other._modules = {**self._modules, "pairs": None}
        other.config = replace(self.config, pairs=0)
        return other

    @property
    def steps(self) -> int:
        return self.config.num_heads

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        hidden = features.hidden[:, :, 0].to(next(self.parameters()).dtype)
        for step, head in enumerate(self._each()):
            inner = head(hidden[:, : max(hidden.shape[1] - 2 - step, 0)])
            logits = vocabulary.unembed(inner.to(vocabulary.dtype)) if head.proj is None else head.proj(inner)
            yield over_vocabulary(logits, vocabulary.vocab_size, self.token_map)

    def count(self, first: Tensor, second: Tensor) -> int:
        self.pairs = Pairs.counted(first, second, self.config.vocab_size)
        self.config = replace(self.config, pairs=len(self.pairs.tokens) if self.pairs is not None else 0)
        return self.config.pairs

    def behind(self, parents: Tensor, logits: Tensor) -> Tensor:
        if self.pairs is None:
            return logits
        return logits + WEIGHT * self.pairs.table(logits.shape[-1], logits.device).behind(parents).to(logits.dtype)

    def drafter(self, vocabulary: Vocabulary) -> Medusa:
        return Medusa(self, vocabulary)

    def _each(self) -> Iterator[Head]:
        return (cast(Head, head) for head in self.heads)


class Medusa(Drafter):
    """Drafts a tree of the heads' best choices behind the last committed token.

    tree: rank paths in order of addition, of which a smaller budget takes the first; the name of a published set;
    "dynamic", the most likely paths of each round; or None, the tree the heads were calibrated for, else "dynamic".
    For a target that cannot read trees it drafts the chain of first choices. Where pairs were counted, what is likely
    depends on the token before, and ranks are those behind the parent.
    """

    name = "medusa"
    hidden_layers = (-1,)

    def __init__(
        self, head: MedusaHead, vocabulary: Vocabulary, tree: str | Sequence[Sequence[int]] | None = None
    ) -> None:
        self.config, self.vocabulary = head.config, vocabulary
        must_fit("the set of Medusa heads", head.config, vocabulary)
        self.tree = _tree(tree if tree is not None else head.config.tree, head.config, vocabulary)
        trees, heads = vocabulary.reads_trees, head.config.num_heads
        self.deepest = max(map(len, self.tree)) if self.tree and trees else heads
        self.default_budget = heads if not trees else len(self.tree) if self.tree else NODES
        self._weights = Weights.of(list(head._each()), head.token_map, vocabulary)
        self.pairs = head.pairs.table(vocabulary.vocab_size, vocabulary.device) if head.pairs is not None else None
        self.together = None                                       # heads and pairs as our kernels read them, where they do
        if self.pairs is not None and self._weights.own is not None:
            self.together = self._weights.own.with_pairs(self.pairs.parts, WEIGHT, vocabulary)
        self.hidden = torch.zeros(0, vocabulary.hidden_size)       # [rows, H] of each row's last committed token
        self._shapes: dict[int, TreeShape] = {}

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        where = self.vocabulary
        self.hidden = torch.zeros(rows, where.hidden_size, dtype=where.dtype, device=where.device)

    def observe(self, commit: Commit) -> None:
        assert commit.hidden is not None, "the heads read the target's last hidden states"
        states = commit.hidden[:, :, 0]                                                     # [b, D, H]
        last = (commit.count - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        first, end = commit.rows[0], commit.rows[-1] + 1
        side_by_side = list(commit.rows) == list(range(first, end))             # a slice needs no copy to the device
        rows = slice(first, end) if side_by_side else list(commit.rows)
        self.hidden[rows] = states.gather(1, last)[:, 0].to(self.hidden.dtype)

    def select(self, rows: Sequence[int]) -> None:
        self.hidden[: len(rows)] = self.hidden[list(rows)]

    def propose(self, frontier: Frontier) -> TokenTree:
        root, trees = frontier.prefix.root[:, None], frontier.trees and self.vocabulary.reads_trees
        if frontier.budget == 0:
            return TokenTree.chain(root)
        if self.pairs is not None:
            shaped = not trees or self.tree is not None
            return self._paired(frontier, root[:, 0], self._shape(frontier.budget, trees) if shaped else None)
        shape = self._shape(frontier.budget, trees)
        plan = _plan(shape, root.device)
        steps, choices = self._choices(frontier, root, plan)                                # [B, K, R] both
        confidence = F.pad(steps.exp().flatten(1), (0, 1), value=1)[:, plan.path].prod(-1)        # [B, N - 1]
        confidence = F.pad(confidence, (1, 0), value=1)
        tokens = torch.where(confidence[:, 1:] > 0, choices.flatten(1)[:, plan.last], ABSENT)
        tree = TokenTree.shaped(torch.cat([root, tokens], 1), shape, confidence=confidence)
        if len(shape) <= frontier.budget + 1:
            return tree
        pool = (tree.tokens, tree.parents.clamp(min=0), confidence)
        return self.ops.run(TokenTree.likeliest, *pool, frontier.budget + 1, plan.depth)

    def _paired(self, frontier: Frontier, root: Tensor, shape: TreeShape | None) -> TokenTree:
        """The tree of this shape, or the likeliest paths, where each choice depends on the one before."""
        nodes = frontier.budget if shape is None else len(shape) - 1
        deepest = self.config.num_heads if shape is None else len(shape.levels) - 1
        return self.ops.run(heads_tree, self, frontier, root, min(deepest, nodes), nodes, shape)

    def logits(self, heads: int, rows: int) -> Tensor:
        """[rows, heads, V] what the first heads say behind the first rows."""
        return self._weights.logits(self.hidden[:rows], heads, self.vocabulary)

    def _choices(self, frontier: Frontier, root: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        """[B, K, R] the logarithms of the chances of each head's choices, and these, as the target will choose."""
        logits = self.logits(plan.depth, len(root))
        return frontier.sampler.best(logits, first_choices(frontier, root[:, 0], logits), plan.width)

    def _shape(self, budget: int, trees: bool) -> TreeShape:
        """The tree of this budget or, where it is chosen in the round, what it is chosen from."""
        if not trees:
            return TreeShape.chain(min(budget, self.config.num_heads))
        if self.tree is None:
            return candidates(budget, self.config.num_heads, self.vocabulary.vocab_size)
        if budget not in self._shapes:
            self._shapes[budget] = TreeShape(self.tree[:budget])
        return self._shapes[budget]


@lru_cache(maxsize=256)
def candidates(nodes: int, heads: int, vocab: int) -> TreeShape:
    """The rank paths that can be among the `nodes` most likely, whatever the heads say.

    A path is never more likely than those it excels in no rank: each of its beginnings with any lower ranks. With
    itself these are sum_j prod_{i<=j} (rank_i + 1), so a path where this exceeds `nodes` has `nodes` others before it.
    """
    most = min(nodes, EXACT)
    found: list[RankPath] = []
    level: list[tuple[RankPath, int, int]] = [((), 1, 0)]       # path, lower ranks at its end, all that excel it
    for _ in range(heads):
        level = [
            ((*path, rank), width * (rank + 1), before + width * (rank + 1))
            for path, width, before in level
            for rank in range(min((most - before) // width, vocab))
        ]
        found += [path for path, _, _ in level]
    return TreeShape(tuple(found))


def heads_tree(medusa: Medusa, frontier: Frontier, root: Tensor, heads: int, nodes: int, shape: TreeShape | None) -> TokenTree:
    """The tree of the likeliest `nodes` nodes behind roots [B], or the one of this shape, by the first heads and their pairs."""
    assert medusa.pairs is not None
    return medusa.ops.run(pairs_tree, medusa.pairs, medusa.logits(heads, len(root)), frontier, root, nodes, shape, WEIGHT)


class _Plan(NamedTuple):
    """Where the nodes of a shape find their tokens among the choices [K, R] of all heads, flat."""

    depth: int
    width: int
    path: Tensor            # [N - 1, K] the choices along each node's path; beyond its end K * R
    last: Tensor            # [N - 1] the node's own choice


@lru_cache(maxsize=256)
def _plan(shape: TreeShape, device: torch.device) -> _Plan:
    depth, width = len(shape.levels) - 1, max(shape.ranks) + 1
    flat = [[head * width + rank for head, rank in enumerate(path)] for path in shape.paths]
    padded = torch.tensor([[*places, *[depth * width] * (depth - len(places))] for places in flat])
    return _Plan(depth, width, padded.to(device), torch.tensor([places[-1] for places in flat], device=device))


def _tree(
    tree: str | Sequence[Sequence[int]] | None, config: MedusaConfig, vocabulary: Vocabulary
) -> tuple[RankPath, ...] | None:
    """Rank paths that the heads can fill, every beginning of which is a tree; None for the dynamic tree."""
    if tree is None or tree == DYNAMIC:
        return None
    if isinstance(tree, str):
        if tree not in CHOICES:
            raise BadInput(f"the Medusa tree was {tree!r}; give {DYNAMIC}, rank paths, or one of {', '.join(CHOICES)}")
        tree = CHOICES[tree]
    paths = tuple(tuple(path) for path in tree)
    deepest, widest = max(map(len, paths), default=0), max((max(path, default=0) for path in paths), default=0) + 1
    if deepest > config.num_heads:
        raise DrafterMismatch(f"the Medusa tree is {deepest} deep and there are {config.num_heads} heads; give a flatter one")
    if widest > vocabulary.vocab_size:
        raise DrafterMismatch(f"the Medusa tree takes {widest} choices of {vocabulary.vocab_size} tokens; give a narrower one")
    _must_grow(paths)
    return paths


def _must_grow(paths: tuple[RankPath, ...]) -> None:
    known: set[RankPath] = {()}
    for path in paths:
        if path in known or path[:-1] not in known or min(path) < 0:
            raise BadInput(f"the Medusa tree's path {path} comes twice, or before its parent; give each once, parents first")
        known.add(path)
    if len(known) == 1:
        raise BadInput("the Medusa tree is empty; give at least one path, or use a budget of 0")
