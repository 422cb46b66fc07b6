"""Drafting with layers and a KV cache of one's own from hidden states of the target: what EAGLE-3,
MTP and DFlash share.

Keys and values of the text are made of what the target made of it; those of drafted tokens are
never kept. A search weighs nodes by what the network says after them, and the likeliest of all are
the draft (EAGLE-2, 2406.16858); where tokens are drawn it is a chain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import LayerShape
from draftproof.core.messages import Commit, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters import beams
from draftproof.drafters.base import Drafter, Vocabulary
from draftproof.forward.draft_layers import DraftLayers, masks

WIDTH, DEEPEST, NODES = 4, 7, 16
"""Nodes that a search reads per level, levels, and draft tokens per round when nobody says."""


class Network(nn.Module):
    """Layers that draft for a target; weights have the names of published checkpoints.

    width: numbers of a feature. hidden_layers: of the target that features are made of.
    """

    hidden_layers: tuple[int, ...]
    token_map: Tensor | None = None
    """The target's id of each row of the head, if it does not know all tokens."""

    def __init__(self, layers: DraftLayers, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.parts, self.vocabulary = layers, vocabulary
        self.layers, self.width = nn.ModuleList(layers.layers), int(layers.config.hidden_size)

    @abstractmethod
    def fuse(self, hidden: Tensor) -> Tensor:
        """[..., width] the feature of hidden states [..., T, H] of the target."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] over the target's tokens."""

    def embed(self, tokens: Tensor) -> Tensor:
        """By its own table, or else by the target's."""
        if hasattr(self, "embed_tokens"):
            return cast(Tensor, cast(Any, self.embed_tokens)(tokens))
        return self.vocabulary.embed(tokens, raw=True)

    def attention_width(self, number: int) -> int:
        """Numbers that the attention of a layer reads."""
        return self.width

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """What each layer's cache stores of a token."""
        return self.parts.shapes(self.attention_width)


class FeatureDrafter(Drafter):
    """Drafts with a network: the likeliest nodes of a search, or a chain."""

    reads_every_state = True
    scratch = 1
    """Tokens that it reads after a text beyond those of the draft."""

    def __init__(self, network: Network, name: str, deepest: int) -> None:
        self.network, self.name, self.deepest = network, name, deepest
        self.hidden_layers = network.hidden_layers
        self.default_budget = max(NODES, deepest) if network.vocabulary.reads_trees else deepest

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        like, places = self.network.vocabulary, capacity + self.scratch
        self.cache = KVCache.empty(self.network.shapes, rows, places, like.dtype, like.device)
        self.rows = 0

    def fused(self, commit: Commit) -> tuple[KVCache, Tensor]:
        """The cache of a commit's rows, empty if they are new, and the features of its tokens."""
        assert commit.hidden is not None, "it reads the target's hidden states"
        stop = commit.rows[-1] + 1
        self.cache.lengths[self.rows : stop] = 0
        self.rows = max(self.rows, stop)
        return self.cache.rows(commit.rows[0], stop), self.network.fuse(commit.hidden)

    @abstractmethod
    def reader(self, frontier: Frontier) -> tuple[beams.Read, int]:
        """What says the logits after nodes of a draft, level by level, and how many there are."""

    def propose(self, frontier: Frontier) -> TokenTree:
        longest = frontier.prefix.longest
        self.cache.bound(longest if longest is not None else self.cache.capacity - self.scratch)
        read, levels = self.reader(frontier)
        if frontier.drawn:
            return self._drawn(frontier, read, levels)
        width = min(WIDTH, frontier.budget, self.network.vocabulary.vocab_size)
        tree = beams.likeliest(frontier, read, width if frontier.trees else 1, levels)
        return tree if frontier.trees else tree.best_chain()

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.rows = len(rows)

    def _drawn(self, frontier: Frontier, read: beams.Read, levels: int) -> TokenTree:
        """A chain of tokens that are drawn in turn, with their probabilities."""
        sampler, tokens, probs = frontier.sampler, frontier.prefix.root[:, None], list[Tensor]()
        for place in range(levels):
            tree = TokenTree.chain(tokens)
            logits, paths = read(tree, place), Paths(frontier.prefix, tree, place)
            best, token = sampler.gumbel_logits(logits, paths, Role.DRAFT).max(-1)
            probs.append(sampler.probs(logits, paths).nan_to_num(0))
            there = (best > -torch.inf) & (tokens[:, -1:] != ABSENT)
            tokens = torch.cat([tokens, torch.where(there, token, ABSENT)], 1)
        return TokenTree.chain(tokens, torch.cat([torch.zeros_like(probs[0]), *probs], 1))


class PairDrafter(FeatureDrafter):
    """Drafts with a network that pairs the feature of token t with token t + 1 and says what token
    t + 2 may be; what it makes of a pair is the feature of the next, drafted one.

    network: of features [B, N, width], tokens [B, N], positions of the features, a `Mask` and a
    cache, it makes [B, N, H], which `logits` reads, and features. Slot s of the cache is for the
    token at position s, paired with the feature before; slot 0 has none, and nobody sees it.
    """

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        like = self.network.vocabulary
        self.last = torch.zeros(rows, self.network.width, dtype=like.dtype, device=like.device)

    def observe(self, commit: Commit) -> None:
        cache, features = self.fused(commit)
        last = self.last[commit.rows[0] : commit.rows[-1] + 1]              # before these tokens
        features = torch.cat([last[:, None], features], 1)
        self._read(cache, features[:, :-1], TokenTree.chain(commit.tokens))
        cache.keep(None, commit.count)
        last.copy_(_at(features, commit.count[:, None])[:, 0])

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.last[: len(rows)] = self.last[list(rows)]

    def reader(self, frontier: Frontier) -> tuple[beams.Read, int]:
        rows, budget = len(frontier.prefix.root), frontier.budget
        made = list[Tensor]()                                   # features after nodes, by level

        def read(tree: TokenTree, first: int) -> Tensor:
            before = self.last[:rows, None]
            if first:
                before = _at(torch.cat(made, 1), tree.parents[:, first:])
            hidden, features = self._read(self.cache.rows(0, rows), before, tree, first)
            made.append(features)
            return self.network.logits(hidden)

        fits = 1 + budget // min(WIDTH, budget) if frontier.trees and not frontier.drawn else budget
        return read, min(DEEPEST, budget, fits)

    def _read(
        self, cache: KVCache, features: Tensor, tree: TokenTree, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """What is made of the nodes `first:` of a tree after these features."""
        like, nodes = self.network.vocabulary, tree.tokens.shape[1]
        span = cache.write_at(first, nodes)
        positions = (tree.positions(cache.lengths, like.context) - 1).clamp(min=0)[:, first:]
        tokens = tree.tokens[:, first:].clamp(0, like.vocab_size - 1)
        mask = masks(tree, cache, span, like.dtype, first, hidden=1)
        outputs: tuple[Tensor, Tensor] = self.network(features, tokens, positions, mask, cache)
        return outputs


def _at(states: Tensor, places: Tensor) -> Tensor:
    """[B, n, H] of states [B, N, H] those at places [B, n]."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
