"""Medusa: heads beside the target's own, each predicting one token further (arXiv 2401.10774).

`Head` is section 2.1.1. All heads read the hidden state of the last committed token; a tree pairs
their choices (section 2.1.2): the likeliest paths of each round, or a published tree. Bigrams,
where they were counted, correct each choice by the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Features, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters import base
from draftproof.drafters.base import DraftHead, LastHidden, Vocabulary
from draftproof.drafters.bigram import WEIGHT, Bigrams, BigramTable, bigram_tree
from draftproof.drafters.medusa_trees import CHOICES, DYNAMIC
from draftproof.errors import BadInput, DrafterMismatch

NODES = 16
"""Draft tokens per row and round of a dynamic tree when nobody says."""

RankPath = tuple[int, ...]
"""Which choice of each head, by its rank."""


@dataclass(frozen=True)
class MedusaConfig:
    """The form of a set of heads.

    num_layers: residual blocks per head. vocab_size: tokens the ids refer to. share_lm_head:
    project with the target's own table. draft_vocab_size: how many tokens they know, if not all:
    so many rows of that table, or of each own projection. base_model: the target trained for.
    pairs: how many bigrams were counted.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    share_lm_head: bool = True
    bias: bool = True
    base_model: str = ""
    draft_vocab_size: int | None = None
    pairs: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of Medusa heads was {getattr(self, name)}; give at least 1")


class Head(nn.Module):
    """p = softmax(W (h + SiLU(A h + b))), with several such blocks; W may be the target's own."""

    def __init__(self, size: int, layers: int, bias: bool, rows: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(layers))
        self.proj = nn.Linear(size, rows, bias=False) if rows is not None else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class MedusaHead(DraftHead):
    """The weights of all heads. Made on its own it is zero; `fresh` makes one to train.

    Blocks start at zero, weight and bias, so that every head starts as the target's own. The
    original leaves the bias at random, which shifts every head before it has learnt anything.
    """

    kind = "medusa"
    decay = 0.8
    projection: nn.Linear | None
    """The target's rows of `token_map`, which all heads share and which are not stored."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        known = config.draft_vocab_size
        rows = None if config.share_lm_head else known or config.vocab_size
        form = config.hidden_size, config.num_layers, config.bias, rows
        self.heads = nn.ModuleList(Head(*form) for _ in range(config.num_heads))
        self.pairs = Bigrams(config.vocab_size, config.pairs) if config.pairs else None
        self.token_map = torch.arange(known) if known is not None else None
        self.projection = None

    @classmethod
    def fresh(
        cls, vocabulary: Vocabulary, num_heads: int = 5, num_layers: int = 1,
        share_lm_head: bool = True,
    ) -> MedusaHead:  # fmt: skip
        """Heads that predict what this target's own does, in at least float32, on its device."""
        place = PurePath(vocabulary.name)               # a folder's path means nothing elsewhere
        name = place.name if place.is_absolute() or len(place.parts) > 2 else vocabulary.name
        sizes = num_heads, num_layers, vocabulary.hidden_size, vocabulary.vocab_size
        head = cls(MedusaConfig(*sizes, share_lm_head, base_model=name))
        head.to(vocabulary.device, torch.promote_types(vocabulary.dtype, torch.float32))
        for one in head.each():
            if one.proj is not None:
                one.proj.weight.data.copy_(base.lm_head_of(vocabulary)[0])
        return head

    def unshared(self, vocabulary: Vocabulary) -> MedusaHead:
        """The same heads with their own copies of the target's projection, for other layouts."""
        if not self.config.share_lm_head:
            return self
        form = self.config.num_heads, self.config.num_layers
        own = MedusaHead.fresh(vocabulary, *form, share_lm_head=False).to(next(self.parameters()))
        own.load_state_dict(self.state_dict(), strict=False)
        own.pairs, size = self.pairs, vocabulary.vocab_size
        own.config = replace(self.config, share_lm_head=False, bias=True, vocab_size=size)
        if self.token_map is not None:
            own.limit_vocabulary(self.token_map, vocabulary)
        return own

    @property
    def steps(self) -> int:
        return self.config.num_heads

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        hidden = features.hidden[:, :, 0].to(next(self.parameters()).dtype)
        for step, head in enumerate(self.each()):
            inner = head(hidden[:, : max(hidden.shape[1] - 2 - step, 0)])
            own = head.proj if head.proj is not None else self.projection
            logits = vocabulary.unembed(inner.to(vocabulary.dtype)) if own is None else own(inner)
            known = self.token_map is not None
            yield logits if known else base.over_vocabulary(logits, vocabulary.vocab_size)

    def limit_vocabulary(self, tokens: Tensor, vocabulary: Vocabulary) -> None:
        self.token_map = tokens.to(vocabulary.device)
        self.config = replace(self.config, draft_vocab_size=len(tokens))
        if self.config.share_lm_head:
            like = next(self.heads.parameters())
            self.projection = base.lm_head_rows(vocabulary, self.token_map, like)
        for head in self.each():
            if head.proj is not None:
                head.proj.weight = nn.Parameter(head.proj.weight[self.token_map])

    def count(self, first: Tensor, second: Tensor) -> int:
        self.pairs = Bigrams.counted(first, second, self.config.vocab_size)
        count = len(self.pairs.tokens) if self.pairs is not None else 0
        self.config = replace(self.config, pairs=count)
        return count

    def drafter(self, vocabulary: Vocabulary) -> Medusa:
        return Medusa(self, vocabulary)

    def each(self) -> Iterator[Head]:
        return (cast(Head, head) for head in self.heads)


class Medusa(LastHidden):
    """Drafts a tree of the heads' likeliest choices after the last committed token.

    tree: rank paths in order of addition, of which a smaller budget takes the first; the name of a
    published set; or "dynamic", as for None, the most likely paths of each round. For a target that
    cannot read trees it drafts the chain of first choices.
    """

    name = "medusa"

    def __init__(
        self, head: MedusaHead, vocabulary: Vocabulary,
        tree: str | Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vocabulary)
        base.must_fit("the set of Medusa heads", head.config, vocabulary)
        self.config, trees = head.config, vocabulary.reads_trees
        self.tree = _tree(tree, self.config, vocabulary)
        heads = self.config.num_heads
        self.deepest = max(map(len, self.tree)) if self.tree and trees else heads
        self.default_budget = heads if not trees else len(self.tree) if self.tree else NODES
        with torch.device("meta"):
            empty, rows = MedusaHead(self.config).heads, head.projection
            own = nn.ModuleList([nn.Linear(*rows.weight.T.shape)] if rows is not None else [])
        base.decoding_copy(head.heads, empty, vocabulary)
        self.heads = [cast(Head, one) for one in empty]
        if rows is not None:
            base.decoding_copy(nn.ModuleList([rows]), own, vocabulary)
        self.projection = own[0] if rows is not None else None
        place, vocab_size = vocabulary.device, vocabulary.vocab_size
        self.token_map = head.token_map.to(place) if head.token_map is not None else None
        self.bigrams = (head.pairs or Bigrams(vocab_size, 0)).table(vocab_size, place)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        tables, shared = self.vocabulary.native, None
        if tables is not None and self.config.share_lm_head:
            shared = getattr(self.projection, "native", None) if self.projection else tables.head
        blocks = [block for head in self.heads for block in head.blocks]
        asked = (blocks, self.config.num_layers, shared, self.token_map, self.bigrams, WEIGHT)
        self.prepared = ops.run(prepare_heads, *asked)

    def propose(self, frontier: Frontier) -> TokenTree:
        heads, nodes, shape = self.config.num_heads, frontier.budget, None
        if not (frontier.trees and self.vocabulary.reads_trees):
            shape = TreeShape.chain(min(nodes, heads))
        elif self.tree is not None:
            shape = _prefix(self.tree, nodes)
        if shape is not None:
            heads, nodes = len(shape.levels) - 1, len(shape) - 1
        return self.ops.run(medusa_tree, self, frontier, min(heads, nodes), nodes, shape)

    def logits(self, rows: int, heads: int) -> Tensor:
        """[rows, heads, V] what the first heads say of the first rows."""
        vocab_size, hidden = self.vocabulary.vocab_size, self.hidden[:rows]
        logits = self.ops.run(heads_logits, self, hidden, heads).transpose(0, 1)
        return base.over_vocabulary(logits, vocab_size, self.token_map)


def prepare_heads(
    blocks: Sequence[nn.Module], layers: int, head: object, token_map: Tensor | None,
    bigrams: BigramTable, weight: float,
) -> object | None:
    """What ops need to compute all heads in one call, if they can; see `Medusa.prepared`.

    blocks: all blocks, those of one head side by side. head: the target's own, or its rows of
    `token_map`, if heads share it.
    """
    return None


def heads_logits(medusa: Medusa, hidden: Tensor, heads: int) -> Tensor:
    """[heads, B, rows of the projection] logits of the first heads for hidden states [B, H]."""
    states = [head(hidden) for head in medusa.heads[:heads]]
    if medusa.projection is not None:
        some: Tensor = medusa.projection(torch.stack(states))
        return some
    if medusa.config.share_lm_head:
        return medusa.vocabulary.unembed(torch.stack(states))
    both = zip(medusa.heads, states, strict=False)
    return torch.stack([head.proj(state) for head, state in both if head.proj is not None])


def medusa_tree(
    medusa: Medusa, frontier: Frontier, heads: int, nodes: int, shape: TreeShape | None
) -> TokenTree:
    """The tree of the likeliest `nodes` nodes, or the one of this shape, by the first heads."""
    logits = medusa.logits(len(frontier.prefix.root), heads)
    return medusa.ops.run(bigram_tree, medusa.bigrams, logits, frontier, nodes, shape, WEIGHT)


@lru_cache(maxsize=256)
def _prefix(tree: tuple[RankPath, ...], nodes: int) -> TreeShape:
    return TreeShape(tree[:nodes])


def _tree(
    tree: str | Sequence[Sequence[int]] | None, config: MedusaConfig, vocabulary: Vocabulary
) -> tuple[RankPath, ...] | None:
    """Rank paths that the heads can fill, parents first; None for the dynamic tree."""
    if tree is None or tree == DYNAMIC:
        return None
    if isinstance(tree, str):
        if tree not in CHOICES:
            names = ", ".join((DYNAMIC, *CHOICES))
            raise BadInput(f"the Medusa tree was {tree!r}; give rank paths, or one of {names}")
        tree = CHOICES[tree]
    paths, known = tuple(tuple(path) for path in tree), set[RankPath]([()])
    for path in paths:
        if path in known or path[:-1] not in known or min(path) < 0:
            raise BadInput(
                f"the Medusa tree's path {path} comes twice, or before its parent; give each once, "
                "parents first"
            )
        known.add(path)
    if not paths:
        raise BadInput("the Medusa tree is empty; give at least one path, or use a budget of 0")
    deepest, widest = max(map(len, paths)), max(map(max, paths)) + 1
    if deepest > config.num_heads:
        raise DrafterMismatch(
            f"the Medusa tree is {deepest} deep and there are {config.num_heads} heads; "
            "give a flatter one"
        )
    if widest > vocabulary.vocab_size:
        raise DrafterMismatch(
            f"the Medusa tree takes {widest} choices of {vocabulary.vocab_size} tokens; "
            "give a narrower one"
        )
    return paths
