"""Several layers for multi-token prediction, each of which drafts one token.

Layer k pairs the token at slot s with the output of layer k - 1 at slot s - 1; layer 0 pairs it
with
the target's state there. So all layers have read the same tokens, and the first k + 1 slots, which
have no such state, are masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree
from draftproof.drafters.features import FeatureDrafter, Reader, gather_states
from draftproof.forward.draft_layers import masks


class SeveralLayers(FeatureDrafter):
    """Drafts with as many layers as tokens; a network as of `PairDrafter`, whose forward takes the
    number of the layer."""

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        like, count = self.network.vocabulary, len(self.network.layers)
        size = (rows, count, self.network.width)
        # [B, layers, H] what each layer's next token is paired with
        self.last = torch.zeros(size, dtype=like.dtype, device=like.device)

    def observe(self, commit: Commit) -> None:
        cache, features = self.fused(commit)
        last = self.last[commit.rows[0] : commit.rows[-1] + 1]
        tree, place = TokenTree.chain(commit.tokens), commit.count[:, None]
        for number in range(len(self.network.layers)):
            features = torch.cat([last[:, number, None], features], 1)
            last[:, number] = gather_states(features, place)[:, 0]
            features = self._layer(number, cache, features[:, :-1], tree, 0)
        cache.keep(None, commit.count)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.last[: len(rows)] = self.last[list(rows)]

    def reader(self, frontier: Frontier) -> Reader:
        rows, count = len(frontier.prefix.root), len(self.network.layers)
        cache = self.cache.rows(0, rows)
        made = [list[Tensor]() for _ in range(count)]       # by layer, of the nodes it has read

        def read(tree: TokenTree, first: int) -> Tensor:
            depth, logits = tree.depth_limit, None
            new = list[Tensor | None]()
            for number in range(count):
                if first == 0:
                    before = self.last[:rows, number, None]
                elif number >= depth:
                    before = gather_states(torch.cat(made[number - 1], 1), tree.parents[:, first:])
                else:
                    new.append(None)
                    continue
                out = self._layer(number, cache, before, tree, first)
                new.append(out)
                if number == depth:
                    logits = self.network.logits(out)
            for number, states in enumerate(new):
                if states is None:      # never read; it keeps node indices aligned
                    states = made[number][0].expand(-1, tree.tokens.shape[1] - first, -1)
                made[number].append(states)
            assert logits is not None
            return logits

        return Reader(read, min(self.deepest or count, frontier.max_draft_tokens))

    def _layer(
        self, number: int, cache: KVCache, features: Tensor, tree: TokenTree, first: int
    ) -> Tensor:
        """A layer's output for the nodes `first:` of a tree after these features."""
        like, nodes = self.network.vocabulary, tree.tokens.shape[1]
        span = cache.write_at(first, nodes)
        positions = tree.positions(cache.lengths, like.context)[:, first:] - 1
        tokens = tree.tokens[:, first:].clamp(0, like.vocab_size - 1)
        mask = masks(tree, cache, span, like.dtype, first, hidden=number + 1)
        positions = positions.clamp(min=0)
        out: tuple[Tensor, Tensor] = self.network(features, tokens, positions, mask, cache, number)
        return out[0]
