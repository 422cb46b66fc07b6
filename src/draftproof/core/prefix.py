"""The text of rows, and the text that ends at each node of a tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftproof.core.tree import TokenTree


@dataclass(frozen=True)
class Prefix:
    """The committed tokens of each row, followed by the root.

    tokens: [B, capacity] int64; ``tokens[b, position[b]]`` is the root, beyond it lies scratch.
    position: [B] int64, the root's place: the number of committed tokens.
    ahead: how many tokens a draft may reach beyond the root; the round's noise covers them all.
    longest: no row has more committed tokens; None if the host knows no bound.
    roots: [B] the roots, where they are known apart from the text.
    """

    tokens: Tensor
    position: Tensor
    ahead: int = 0
    longest: int | None = None
    roots: Tensor | None = None

    @cached_property
    def root(self) -> Tensor:
        """[B] the token the target has chosen but not yet read."""
        if self.roots is not None:
            return self.roots
        return self.tokens.gather(1, self.position[:, None])[:, 0]


@dataclass(frozen=True)
class Paths:
    """The text that ends at each of the nodes `first:` of a tree."""

    prefix: Prefix
    tree: TokenTree
    first: int = 0

    @cached_property
    def lengths(self) -> Tensor:
        """[B, N] tokens up to and including the node: the position of the token chosen there."""
        return self.prefix.position[:, None] + self.tree.depths[:, self.first :] + 1

    @cached_property
    def sequences(self) -> Tensor:
        """[B, N, S] int64: the whole text of each node; undefined beyond its length."""
        position, tokens = self.prefix.position, self.prefix.tokens
        length = tokens.shape[1] + self.tree.depth_limit + 1
        rows, nodes = self.tree.tokens.shape
        sees = self.tree.ancestors[:, self.first :]                                 # [B, n, N]
        text = torch.nn.functional.pad(tokens, (0, length - tokens.shape[1] + 1))
        text = text[:, None].repeat(1, sees.shape[1], 1)
        place = (position[:, None] + self.tree.depths)[:, None]
        place = torch.where(sees, place, length)       # a dump for the other nodes
        drafted = self.tree.tokens.clamp(min=0)[:, None].expand(rows, sees.shape[1], nodes)
        return text.scatter_(2, place, drafted)[..., :length]
