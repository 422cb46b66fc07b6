"""Medusa: heads next to the target's own, each predicting one token further (arXiv 2401.10774).

`Head` is section 2.1.1. All heads read the hidden state of the last committed token; a tree pairs
their choices (section 2.1.2): the likeliest paths of each round, or a published tree. Bigrams,
where they were counted, correct each choice by the one before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Features, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters import base, heads
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.bigram import WEIGHT, Bigrams, bigram_tree
from draftproof.drafters.heads import DraftHead, HeadConfig, HeadDrafter, packed
from draftproof.drafters.medusa_trees import CHOICES, DYNAMIC
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.native.cpu_ops import UNSUPPORTED, Unsupported, cpu_kernel
from draftproof.native.declarations import array_of
from draftproof.native.kernels import Kernels
from draftproof.native.structures import LANES, Native

NODES = 16
"""Default draft tokens per row and round of a dynamic tree."""
RankPath = tuple[int, ...]
"""Which choice of each head, by its rank."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """The form of a set of heads, of `num_layers` blocks each."""

    num_heads: int


class Head(nn.Module):
    """p = softmax(W (h + SiLU(A h + b))), with several such blocks; W may be the target's own."""

    def __init__(self, size: int, layers: int, rows: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.proj = nn.Linear(size, rows, bias=False) if rows is not None else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] what W reads."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class MedusaHead(DraftHead):
    """The weights of all heads. The constructor gives zeros; `fresh` makes one to train.

    Blocks start at zero, weight and bias, so that every head starts as the target's own. The
    original leaves the bias at random, which shifts every head before it has learnt anything.

    Args:
        config: Sizes: heads, blocks of each, hidden size and vocabulary of the target.

    Attributes:
        pairs: Bigrams, if they were counted.
    """

    kind = "medusa"
    decay = 0.8
    pairs: Bigrams | None = None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        rows = None if config.share_lm_head else config.draft_vocab_size or config.vocab_size
        form = config.hidden_size, config.num_layers, rows
        self.heads = nn.ModuleList(Head(*form) for _ in range(config.num_heads))

    @classmethod
    def fresh(
        cls, vocabulary: Vocabulary, num_heads: int = 5, num_layers: int = 1,
        share_lm_head: bool = True,
    ) -> MedusaHead:  # fmt: skip
        """Heads that predict the same as the target's LM head, in at least float32, on its device.

        Args:
            vocabulary: The target's embeddings and head.
            num_heads: How many tokens ahead are predicted.
            num_layers: Residual blocks of each head.
            share_lm_head: Whether the target's own head is used.

        Returns:
            A head to train.
        """
        head = cls(MedusaConfig(
            num_heads=num_heads, num_layers=num_layers, hidden_size=vocabulary.hidden_size,
            vocab_size=vocabulary.vocab_size, share_lm_head=share_lm_head,
            base_model=vocabulary.name,
        ))  # fmt: skip
        head.to(vocabulary.device, torch.promote_types(vocabulary.dtype, torch.float32))
        for linear in head.own_projections:
            linear.weight.data.copy_(heads.lm_head_of(vocabulary)[0])
        return head

    @property
    def steps(self) -> int:
        return len(self.heads)

    @property
    def own_projections(self) -> list[nn.Linear]:
        projections = (cast(Head, head).proj for head in self.heads)
        return [linear for linear in projections if linear is not None]

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        hidden = features.hidden[:, :, 0].to(next(self.parameters()).dtype)
        for step, head in enumerate(self.heads):
            inner = head(hidden[:, : max(hidden.shape[1] - 2 - step, 0)])
            projection = cast(Head, head).proj
            logits = self.unembed(inner, vocabulary) if projection is None else projection(inner)
            known = self.token_map is not None
            yield logits if known else base.over_vocabulary(logits, vocabulary.vocab_size)

    def count(self, first: Tensor, second: Tensor) -> int:
        bigrams = Bigrams.counted(first, second, self.config.vocab_size)
        self.pairs = bigrams if len(bigrams.tokens) else None
        return len(bigrams.tokens)

    def drafter(self, vocabulary: Vocabulary) -> Medusa:
        return Medusa(self, vocabulary)


class Medusa(HeadDrafter[MedusaHead]):
    """Drafts a tree of the heads' likeliest choices after the last committed token.

    Medusa (arXiv 2401.10774, sections 2.1.1 and 2.1.2). For a target that cannot read trees it
    drafts the chain of first choices.

    Args:
        head: The heads; they are copied in the target's dtype.
        vocabulary: The target, which embeds and unembeds.
        tree: Rank paths, of which a smaller budget uses the first; the name of a published set; or
            "dynamic" (also None): the most likely paths of each round.

    Raises:
        DrafterMismatch: The heads are for another target.

    Example:
        >>> engine = dp.load("demo", drafter="medusa")
    """

    name = "medusa"
    packed: PackedHeads | None = None

    def __init__(
        self, head: MedusaHead, vocabulary: Vocabulary,
        tree: str | Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(head, vocabulary)
        heads, vocab_size, trees = head.steps, vocabulary.vocab_size, vocabulary.reads_trees
        self.tree = _tree(tree, heads, vocab_size)
        self.deepest = max(map(len, self.tree)) if self.tree and trees else heads
        self.max_draft_tokens = heads if not trees else len(self.tree) if self.tree else NODES
        bigrams = head.pairs or Bigrams.none(vocab_size)
        self.bigrams = bigrams.resized(vocab_size, vocabulary.device)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.packed = self._packed()

    def propose(self, frontier: Frontier) -> TokenTree:
        heads, nodes, shape = self.head.steps, frontier.max_draft_tokens, None
        if not (frontier.trees and self.vocabulary.reads_trees):
            shape = TreeShape.chain(min(nodes, heads))
        elif self.tree is not None:
            shape = _prefix(self.tree, nodes)
        if shape is not None:
            heads, nodes = len(shape.levels) - 1, len(shape) - 1
        logits = self.logits(len(frontier.prefix.root), min(heads, nodes))
        return self.ops.run(bigram_tree, self.bigrams, logits, frontier, nodes, shape, WEIGHT)

    def logits(self, rows: int, heads: int) -> Tensor:
        """[rows, heads, V] logits of the first heads for the first rows.

        Args:
            rows: Rows to draft for.
            heads: How many heads to run.

        Returns:
            Logits [B, heads, V].
        """
        return self.ops.run(heads_logits, self, self.hidden[:rows], heads)

    def _packed(self) -> PackedHeads | None:
        """The heads for our kernels; None if they have projections of their own, or a layer is not
        packed."""
        head, form = self.head, self.head.config
        blocks = packed(block for part in head.heads for block in cast(Head, part).blocks)
        projection = self.packed_projection(None)
        fits = form.share_lm_head and form.hidden_size % LANES == 0
        if not fits or blocks is None or projection is None:
            return None
        return PackedHeads(array_of("Linear", blocks), form.num_layers, projection, head.token_map)


class PackedHeads(NamedTuple):
    """Heads for our kernels: the blocks of each head in turn, then the projection.

    token_map: [D] the tokens of the projection; None: all. The weights must outlive the result.
    """

    blocks: ctypes.Array[Native]
    layers: int
    projection: Native
    token_map: Tensor | None


def heads_logits(medusa: Medusa, hidden: Tensor, heads: int) -> Tensor:
    """[B, heads, V] logits of the first heads for hidden states [B, H]."""
    projections = medusa.head.own_projections
    states = torch.stack([head(hidden) for head in medusa.head.heads[:heads]], 1)
    if projections:
        logits = torch.stack(
            [projections[head](state) for head, state in enumerate(states.unbind(1))], 1
        )
    else:
        logits = medusa.head.unembed(states, medusa.vocabulary)
    return base.over_vocabulary(logits, medusa.vocabulary.vocab_size, medusa.head.token_map)


@cpu_kernel(heads_logits)
def _heads_logits(
    library: Kernels, medusa: Medusa, hidden: Tensor, heads: int
) -> Tensor | Unsupported:
    if medusa.packed is None:
        return UNSUPPORTED
    blocks, layers, projection, token_map = medusa.packed
    (rows, size), vocab = hidden.shape, medusa.vocabulary.vocab_size
    logits = hidden.new_empty(rows, heads, vocab)
    work = hidden.new_empty(rows * heads * (2 * size + projection.outputs))
    library(
        "heads", blocks, projection, token_map, hidden, logits, work, rows, heads, layers, vocab
    )
    return logits


@lru_cache(maxsize=256)
def _prefix(tree: tuple[RankPath, ...], nodes: int) -> TreeShape:
    return TreeShape(tree[:nodes])


def _tree(
    tree: str | Sequence[Sequence[int]] | None, heads: int, vocab_size: int
) -> tuple[RankPath, ...] | None:
    """Rank paths that the heads can fill; None for the dynamic tree."""
    if tree is None or tree == DYNAMIC:
        return None
    if isinstance(tree, str) and tree not in CHOICES:
        names = ", ".join((DYNAMIC, *CHOICES))
        raise BadInput(f"the Medusa tree was {tree!r}; give rank paths, or one of {names}")
    paths = tuple(tuple(path) for path in (CHOICES[tree] if isinstance(tree, str) else tree))
    shape = TreeShape(paths)
    deepest, widest = len(shape.levels) - 1, max(shape.ranks) + 1
    if deepest > heads or widest > vocab_size:
        raise DrafterMismatch(
            f"the Medusa tree is {deepest} deep with {widest} choices, for {heads} heads of "
            f"{vocab_size} tokens; give a smaller one"
        )
    return paths
