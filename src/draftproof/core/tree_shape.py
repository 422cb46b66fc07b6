"""The static form of token trees: parents and children, without tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeShape:
    """A rank path per drafted node; ``(0, 2)`` is the third child of the first child.

    Nodes are ordered by (depth, path), so parents come before children and a level is a contiguous
    range. Node 0 is the root, with the empty path.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        for path in self.paths:
            if path == () or any(rank < 0 for rank in path):
                raise ValueError(f"tree path {path} must be ranks, without the root")
            if path[:-1] not in known:
                raise ValueError(f"tree path {path} has no parent; add {path[:-1]}")
        if len(known) != len(self.paths) + 1:
            raise ValueError("a tree path occurs more than once")
        ordered = sorted(self.paths, key=lambda path: (len(path), path))
        object.__setattr__(self, "paths", tuple(ordered))

    @classmethod
    @lru_cache(maxsize=256)
    def chain(cls, length: int) -> TreeShape:
        """A chain of `length` drafted tokens."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def branching(cls, children: Sequence[int]) -> TreeShape:
        """Every node of depth d has ``children[d]`` children; ``(2, 2, 1)`` drafts 2 + 4 + 4.

        Args:
            children: How many children the nodes of each level have.

        Returns:
            The shape.
        """
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for width in children:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls(tuple(paths))

    @classmethod
    def from_digits(cls, digits: Iterable[str]) -> TreeShape:
        """Paths written as digit strings, one digit per rank: ``["0", "1", "00"]``.

        Args:
            digits: The rank of the token at each level, for each node, as in the file of a
                published tree.

        Returns:
            The shape.
        """
        return cls(tuple(tuple(int(digit) for digit in path) for path in digits))

    @lru_cache(maxsize=256)  # noqa: B019 - shapes are few, small and live as long as the engine
    def within(self, nodes: int) -> TreeShape:
        """This shape with at most `nodes` drafted nodes: the first in order."""
        return self if nodes >= len(self.paths) else TreeShape(self.paths[:nodes])

    def __len__(self) -> int:
        return len(self.paths) + 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.paths)     # kept: shapes are looked up in every round

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """[N] index of each node's parent; -1 at the root."""
        index = {path: node for node, path in enumerate(((), *self.paths))}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """[N] which child of its parent each node is; 0 at the root."""
        return (0, *(path[-1] for path in self.paths))

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each depth, root level first."""
        depths = [0, *(len(path) for path in self.paths)]
        starts = [depths.index(depth) for depth in range(depths[-1] + 1)] + [len(depths)]
        return tuple(map(range, starts[:-1], starts[1:]))

    @cached_property
    def is_chain(self) -> bool:
        return all(len(level) == 1 for level in self.levels)

    @cached_property
    def child_ranks(self) -> Tensor:
        """[2, N] for our kernels: each node's parent, and its rank among the children."""
        return torch.tensor([self.parents, self.ranks])

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def children(self, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For the nodes of a level: the parent's index in the level above, and the rank among its
        children."""
        above, level = self.levels[depth - 1].start, self.levels[depth]
        parents = [self.parents[node] - above for node in level]
        ranks = [self.ranks[node] for node in level]
        return torch.tensor(parents, device=device), torch.tensor(ranks, device=device)


@dataclass(frozen=True)
class TreeForm:
    """Depths [B, N] and ancestors [B, N, N] of trees whose parents are known before their tokens.
    Ancestors of chains are None (a triangle)."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor | None = None

    def first(self, nodes: int) -> TreeForm:
        """The form of the first `nodes` nodes."""
        sees = self.ancestors[:, :nodes, :nodes] if self.ancestors is not None else None
        return TreeForm(self.parents[:, :nodes], self.depths[:, :nodes], sees)


@lru_cache(maxsize=512)
def chain_form(rows: int, nodes: int, device: torch.device) -> TreeForm:
    """The form of chains."""
    parents = torch.arange(-1, nodes - 1, device=device)
    return TreeForm(parents.repeat(rows, 1), (parents + 1).expand(rows, -1))


@lru_cache(maxsize=512)
def shape_form(shape: TreeShape, rows: int, device: torch.device) -> TreeForm:
    """The form of a static shape, in `rows` rows."""
    sees = torch.eye(len(shape), dtype=torch.bool)
    for node, parent in enumerate(shape.parents[1:], 1):
        sees[node] |= sees[parent]
    depths, parents = sees.sum(-1) - 1, torch.tensor(shape.parents, device=device)
    each = (table.to(device).expand(rows, *table.shape) for table in (depths, sees))
    return TreeForm(parents.repeat(rows, 1), *each)


@lru_cache(maxsize=64)
def triangle(nodes: int, device: torch.device) -> Tensor:
    """[nodes, nodes] the nodes that each node of a chain sees."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
