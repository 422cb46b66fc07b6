"""The beams of a search, as tensors: W beams of each row, R children of a beam."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.tree import TokenTree, TreeShape


class Beams(NamedTuple):
    """Paths [B, W, d + 1] from the root, their log-probabilities, the states before their last
    tokens, and which of the nodes weighed last they end in [B, W]."""

    paths: Tensor
    scores: Tensor
    state: Tensor | None
    place: Tensor

    def tree(self) -> tuple[TokenTree, int]:
        """The paths as branches of one tree, and the first of the nodes that end them."""
        width, depth = self.paths.shape[1], self.paths.shape[2] - 1
        shape, root = _comb(width, depth), self.paths[:, 0, :1]
        tokens = torch.cat([root, self.paths[..., 1:].transpose(1, 2).flatten(1)], 1)
        return TokenTree.shaped(tokens, shape), len(shape) - width


class Level(NamedTuple):
    """One step: `tokens` [B, W, R] after `beams`, log-probabilities of their paths, new states."""

    beams: Beams
    tokens: Tensor
    scores: Tensor
    state: Tensor

    def best(self, width: int) -> Beams:
        """The `width` most likely paths."""
        scores, place = self.scores.flatten(1).topk(width)                              # [B, W']
        beam = (place // self.tokens.shape[2])[..., None]
        tokens = self.tokens.flatten(1).gather(1, place)[..., None]
        paths = self.beams.paths.gather(1, beam.expand(-1, -1, self.beams.paths.shape[2]))
        state = self.state.gather(1, beam.expand(-1, -1, self.state.shape[2]))
        return Beams(torch.cat([paths, tokens], -1), scores, state, place)


@lru_cache(maxsize=256)
def _comb(width: int, depth: int) -> TreeShape:
    """As many chains as beams, side by side."""
    return TreeShape.branching((width, *[1] * (depth - 1)) if depth else ())
