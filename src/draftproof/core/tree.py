"""Token trees: what may come next. The only tree code in the project; knows tokens and parents, nothing of models.

Shape letters: B rows, N nodes, D path length in nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ABSENT = -1
"""The token of a node that is not there: rows with fewer nodes than the tree is wide."""

NOTHING = -2
"""The pick where nothing may be picked: every token forbidden, or NaN logits. No node carries it, so it ends a path."""


CHUNKS = (32, 128, 256)
"""Tokens of a prompt that are read at once: the last of these, or, where shapes are closed, one of these, padded."""


def padded(tokens: int) -> int:
    """The least of `CHUNKS` that holds so many tokens; the last if none does."""
    return next((size for size in CHUNKS if tokens <= size), CHUNKS[-1])


@dataclass(frozen=True)
class TreeShape:
    """The static form of a tree: one rank path per drafted node; ``(0, 2)`` is the third child of the first child.

    Nodes are ordered by (depth, path), so parents come before children and a level is a contiguous range.
    Node 0 is the root, with the empty path.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        for path in self.paths:
            if path == () or any(rank < 0 for rank in path):
                raise ValueError(f"tree path {path} is not a sequence of ranks; the root is implied")
            if path[:-1] not in known:
                raise ValueError(f"tree path {path} has no parent; add {path[:-1]}")
        if len(known) != len(self.paths) + 1:
            raise ValueError("tree paths are given more than once")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @classmethod
    @lru_cache(maxsize=256)
    def chain(cls, length: int) -> TreeShape:
        """A chain of `length` drafted tokens."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def branching(cls, children: Sequence[int]) -> TreeShape:
        """Every node of depth d has ``children[d]`` children: ``(2, 2, 1)`` drafts 2 + 4 + 4 nodes."""
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for width in children:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls(tuple(paths))

    @classmethod
    def from_digits(cls, digits: Iterable[str]) -> TreeShape:
        """Paths written as digit strings, one digit per rank: ``["0", "1", "00"]``."""
        return cls(tuple(tuple(int(digit) for digit in path) for path in digits))

    @lru_cache(maxsize=256)  # noqa: B019 - shapes are few, small and live as long as the engine
    def within(self, nodes: int) -> TreeShape:
        """This shape with at most `nodes` drafted nodes: the first in order, hence closed under parents."""
        return self if nodes >= len(self.paths) else TreeShape(self.paths[:nodes])

    def __len__(self) -> int:
        return len(self.paths) + 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.paths)                                             # once: shapes are looked up in every round

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
        return tuple(range(depths.index(d), depths.index(d) + depths.count(d)) for d in range(depths[-1] + 1))

    @cached_property
    def is_chain(self) -> bool:
        return all(len(level) == 1 for level in self.levels)

    @cached_property
    def births_of_all(self) -> Tensor:
        """[2, N] for our kernels: each node's parent, and which of its children it is."""
        return torch.tensor([self.parents, self.ranks])

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def births(self, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For the nodes of a level: each parent's place in the level above, and which of its children each is."""
        above = self.levels[depth - 1].start
        parents = [self.parents[node] - above for node in self.levels[depth]]
        ranks = [self.ranks[node] for node in self.levels[depth]]
        return torch.tensor(parents, device=device), torch.tensor(ranks, device=device)


@dataclass(frozen=True)
class TreeForm:
    """What is known of trees whose parents were known before their tokens: depths [B, N] and ancestors [B, N, N].

    ancestors: None in chains, where they are a triangle.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor | None = None

    def first(self, nodes: int) -> TreeForm:
        """Of the first `nodes` nodes."""
        sees = self.ancestors[:, :nodes, :nodes] if self.ancestors is not None else None
        return TreeForm(self.parents[:, :nodes], self.depths[:, :nodes], sees)


@dataclass(frozen=True)
class TokenTree:
    """What may come next in each row. Node 0 is the root: chosen by the target, not yet read by it.

    tokens: [B, N] int64, ABSENT where a row has fewer nodes (an absent node has only absent descendants).
    parents: [B, N] int64, a parent comes before its children; -1 at the root.
    depth_limit: the longest root-to-leaf path of any row, in edges; a Python number, so shapes stay static.
    draft_probs: [B, N, V] the law each node was drawn from, or None if tokens were chosen, not drawn. Siblings
        are drawn without replacement in node order and carry the law of the first draw.
    is_chain: each node's parent is the node before it, in every row.
    ranked: nodes come in falling order of their odds, so that the tree of fewer nodes is the beginning of this one.
    odds: [B, N] what the drafter takes for the chance that a node will stand: 1 at the root, 0 where absent, never more
        than the parent's; None if it does not say. What is exact does not depend on it.
    turns: [B, N] int64 in a batch that shares what it drafts: with how many nodes per row each would be among the likeliest.
    form: of a chain or a static shape; None where depths and ancestors follow from the parents.
    """

    tokens: Tensor
    parents: Tensor
    depth_limit: int
    draft_probs: Tensor | None = None
    is_chain: bool = False
    confidence: Tensor | None = None
    ranked: bool = False
    turns: Tensor | None = None
    form: TreeForm | None = None

    @classmethod
    def root(cls, tokens: Tensor) -> TokenTree:
        """Only the root: `tokens` [B]. Plain autoregressive decoding."""
        return cls.chain(tokens[:, None])

    @classmethod
    def chain(cls, tokens: Tensor, draft_probs: Tensor | None = None) -> TokenTree:
        """A chain per row: `tokens` [B, N], the root first. Of any length: a prompt is read as one."""
        form = _line(*tokens.shape, tokens.device)
        return cls(tokens, form.parents, tokens.shape[1] - 1, draft_probs, is_chain=True, form=form)

    def above(self, tokens: Tensor) -> TokenTree:
        """This tree with further rows below it, each a chain of its own: `tokens` [b, M], ABSENT behind the shorter ones."""
        width = max(self.tokens.shape[1], tokens.shape[1])
        mine, theirs = (F.pad(part, (0, width - part.shape[1]), value=ABSENT) for part in (self.tokens, tokens))
        both = torch.cat([mine, theirs])
        if self.is_chain:
            return TokenTree.chain(both)
        parents = torch.cat([F.pad(self.parents, (0, width - self.parents.shape[1])), _line(*theirs.shape, tokens.device).parents])
        return TokenTree(both, parents, max(self.depth_limit, tokens.shape[1] - 1))

    @classmethod
    def shaped(
        cls, tokens: Tensor, shape: TreeShape, draft_probs: Tensor | None = None, confidence: Tensor | None = None
    ) -> TokenTree:
        """The same static shape in every row: `tokens` [B, N] in the shape's node order."""
        form = _beside(shape, len(tokens), tokens.device)
        return cls(tokens, form.parents, len(shape.levels) - 1, draft_probs, shape.is_chain, confidence, form=form)

    @classmethod
    def from_paths(cls, paths: Tensor, nodes: int, votes: Tensor | None = None) -> TokenTree:
        """Merge paths with shared prefixes into one tree: `paths` [B, W, D] tokens, column 0 the root in all.

        The first `nodes` distinct prefixes in path-major order are kept (at least D); rows with fewer get ABSENT.
        An ABSENT token ends its path. No host synchronisation. Recurrent Drafter (arXiv 2403.09919), section 3.2.
        votes: [B, W, D] what each path adds to the odds of each of its prefixes, falling along the path; of the
        prefixes, whose odds are sums over the paths that share them, the likeliest `nodes` are kept instead.
        """
        rows, width, length = paths.shape
        same = (paths[:, :, None] == paths[:, None]).cumprod(-1).bool()             # [B, W, W, D]
        owner = same.int().argmax(2)                                                # [B, W, D] first path with it
        absent = (paths == ABSENT).cumsum(-1) > 0
        head = (owner == torch.arange(width, device=paths.device)[:, None]) & ~absent
        if votes is not None:
            confidence = (same * votes[:, None]).sum(2).gather(1, owner).cummin(-1).values.clamp(max=1)
            place = owner * length + torch.arange(length, device=paths.device)      # [B, W, D] of each prefix in the pool
            parents = torch.cat([place[..., :1], place[..., :-1]], -1)
            return cls.likeliest(paths.flatten(1), parents.flatten(1), (confidence * head).flatten(1), nodes, length - 1)
        rank = head.flatten(1).cumsum(1).sub(1).view(rows, width, length)
        slot = rank.gather(1, owner)                                                # [B, W, D] node of each prefix
        slot = torch.where(absent, nodes, slot)
        target = torch.where(head & (slot < nodes), slot, nodes).flatten(1)         # column `nodes` is a dump
        parent = torch.cat([torch.full_like(slot[..., :1], -1), slot[..., :-1]], -1)
        tokens = paths.new_full((rows, nodes + 1), ABSENT).scatter_(1, target, paths.flatten(1))
        parents = paths.new_zeros((rows, nodes + 1)).scatter_(1, target, parent.flatten(1))
        return cls(tokens[:, :nodes], _rooted(parents[:, :nodes]), length - 1)

    @classmethod
    def likeliest(cls, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, depth_limit: int) -> TokenTree:
        """The tree of the `nodes` likeliest nodes of a pool, in falling order of their `confidence`, all [B, M].

        The root is the pool's node 0; what has odds of 0 is not there. A parent comes before its children and is
        no less likely. No host synchronisation.
        """
        nodes = min(nodes, tokens.shape[1])
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        best = torch.where(first, 1.0, confidence).sort(dim=1, descending=True, stable=True)      # of equals the parent comes first
        order, confidence = best.indices[:, :nodes], best.values[:, :nodes]
        there = confidence > 0
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(best.indices)
        place = torch.empty_like(numbers).scatter_(1, best.indices, numbers)                # place in the pool → new node
        above = torch.where(there, place.gather(1, parents.gather(1, order)), 0)
        drafted = torch.where(there, tokens.gather(1, order), ABSENT)
        return cls(drafted, _rooted(above), min(depth_limit, nodes - 1), confidence=torch.where(there, confidence, 0), ranked=True)

    @classmethod
    def found(cls, tokens: Tensor, parents: Tensor, confidence: Tensor, depth_limit: int) -> TokenTree:
        """What a search found best first: nodes in falling order of their `confidence`, parents -1 at the root, all [B, N]."""
        return cls(tokens, parents, min(depth_limit, tokens.shape[1] - 1), confidence=confidence, ranked=True)

    @classmethod
    def beside(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Trees of the same roots side by side, each with a root of its own: a pool of nodes, no tree until `merged`."""
        sizes = [tree.tokens.shape[1] for tree in trees]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        shifted = [torch.where(tree.parents < 0, -1, tree.parents + start) for tree, start in zip(trees, starts, strict=True)]
        tokens = torch.cat([tree.tokens for tree in trees], 1)
        return cls(tokens, torch.cat(shifted, 1), max(tree.depth_limit for tree in trees))

    def merged(self, confidence: Tensor, nodes: int) -> TokenTree:
        """The tree of the likeliest `nodes` by `confidence` [B, M]: what stands more than once, once, with the best of its odds."""
        best = torch.where(self.twins, confidence[:, None], 0).amax(2)
        first = self.firsts == torch.arange(best.shape[1], device=best.device)
        parents = self.firsts.gather(1, self.parents.clamp(min=0))
        return self.likeliest(self.tokens, parents, torch.where(first, best, 0), nodes, self.depth_limit)

    def shared(self, nodes: int) -> TokenTree:
        """The likeliest nodes by `confidence`, of all rows together `nodes` for each; a tree that tells no odds as it is."""
        if self.confidence is None:
            return self
        rows, width = self.tokens.shape
        falling = self.confidence[:, 1:].T.flatten()                                      # of equals a parent comes first
        order = falling.sort(descending=True, stable=True)
        turns = torch.empty_like(order.indices).scatter_(0, order.indices, torch.arange(len(falling), device=falling.device))
        turns = F.pad(turns.view(width - 1, rows).T // rows + 1, (1, 0))
        there = self.present & (turns <= nodes)
        end = 1 + int((there * torch.arange(width, device=there.device)).amax())
        tokens, parents = torch.where(there, self.tokens, ABSENT)[:, :end], self.parents[:, :end]
        limit = min(self.depth_limit, end - 1)
        form = self.form.first(end) if self.form is not None else None
        return replace(
            self, tokens=tokens, parents=parents, depth_limit=limit, confidence=self.confidence[:, :end], turns=turns[:, :end], form=form
        )

    def trunk(self) -> TokenTree:
        """The chain with the most expected tokens by `confidence`, for targets that cannot read trees."""
        assert self.confidence is not None, "without odds there is no telling which path is best"
        worth = (self.ancestors * self.confidence[:, None]).sum(-1)                       # [B, N]
        node = torch.where(self.present, worth, -1).argmax(1)
        tokens = self.tokens.gather(1, self.path_to(node))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return TokenTree.chain(torch.where(places <= self.depths.gather(1, node[:, None]), tokens, ABSENT))

    @cached_property
    def sizes(self) -> list[int]:
        """[B] nodes behind the root that are there; on the host."""
        return [len(tokens) - 1 - tokens.count(ABSENT) for tokens in self.tokens.tolist()]

    @cached_property
    def drafted(self) -> Tensor:
        """[B, 2] how many nodes behind the root are there, and the depth of the deepest of these."""
        return torch.stack([self.present.sum(1) - 1, torch.where(self.present, self.depths, 0).amax(1)], 1)

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: node i sees node j, that is j is i or one of its ancestors."""
        rows, nodes = self.tokens.shape
        if self.is_chain:
            return _triangle(nodes, self.tokens.device).expand(rows, -1, -1)
        if self.form is not None and self.form.ancestors is not None:
            return self.form.ancestors
        numbers = torch.arange(nodes, device=self.tokens.device)
        sees = (self.parents[:, :, None] == numbers) | torch.eye(nodes, dtype=torch.bool, device=numbers.device)
        reach, ways = 1, sees.float()
        while reach < self.depth_limit:                                             # squaring doubles the reach
            ways = (ways @ ways).clamp(max=1)
            reach *= 2
        return ways > 0

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] edges from the root."""
        return self.form.depths if self.form is not None else self.ancestors.sum(-1) - 1

    def positions(self, lengths: Tensor, limit: int) -> Tensor:
        """[B, N] where each node stands behind `lengths` [B] tokens; beyond `limit` lies nothing to emit."""
        return (lengths[:, None] + self.depths).clamp(max=limit - 1)

    @cached_property
    def texts(self) -> Tensor:
        """[B, N, D] the tokens from the root to each node; NOTHING behind them."""
        rows, nodes = self.tokens.shape
        place = torch.where(self.ancestors, self.depths[:, None], self.depth_limit + 1)
        text = self.tokens.new_full((rows, nodes, self.depth_limit + 2), NOTHING)
        return text.scatter_(2, place, self.tokens[:, None].expand_as(place))[..., :-1]

    @cached_property
    def twins(self) -> Tensor:
        """[B, N, N] bool: nodes i and j have the same text, as they may in trees side by side."""
        return (self.texts[:, :, None] == self.texts[:, None]).all(-1)

    @cached_property
    def firsts(self) -> Tensor:
        """[B, N] the first node with the same text as each node."""
        return self.twins.to(torch.uint8).argmax(2)

    @cached_property
    def present(self) -> Tensor:
        """[B, N] bool: the node is there."""
        return self.tokens != ABSENT

    def path_to(self, node: Tensor) -> Tensor:
        """Node indices from the root to `node` [B], as [B, D]; places beyond the path hold their own index."""
        length = self.depth_limit + 1
        rows, nodes = self.tokens.shape
        pick = node[:, None, None].expand(-1, 1, nodes)
        on_path = self.ancestors.gather(1, pick)[:, 0]                              # [B, N]
        place = torch.where(on_path, self.depths, length)
        numbers = torch.arange(nodes, device=node.device).expand(rows, -1)
        path = torch.arange(length + 1, device=node.device).repeat(rows, 1)
        return path.scatter_(1, place, numbers)[:, :length]


def well_formed(tree: TokenTree, vocab: int) -> bool:
    """Whether tokens are below `vocab` or ABSENT, parents come before children, and paths are no deeper than said."""
    tokens, parents, numbers = tree.tokens, tree.parents, torch.arange(tree.tokens.shape[1])
    before = ((parents >= 0) & (parents < numbers)) | ((numbers == 0) & (parents == -1))
    known = (tokens >= ABSENT) & (tokens < vocab)
    if not bool((before & known).all()):
        return False
    depths = replace(tree, depth_limit=tokens.shape[1], form=None).depths
    return bool((depths <= tree.depth_limit)[tree.present].all())


def _rooted(parents: Tensor) -> Tensor:
    """`parents` [B, N] with -1 at the root; written anew, since graph compilers do not follow writes through a view."""
    first = torch.arange(parents.shape[1], device=parents.device) == 0
    return torch.where(first, -1, parents)


@lru_cache(maxsize=512)
def _line(rows: int, nodes: int, device: torch.device) -> TreeForm:
    """Of chains."""
    parents = torch.arange(-1, nodes - 1, device=device)
    return TreeForm(parents.repeat(rows, 1), (parents + 1).expand(rows, -1))


@lru_cache(maxsize=64)
def _triangle(nodes: int, device: torch.device) -> Tensor:
    """[nodes, nodes] whom each node of a chain sees."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


@lru_cache(maxsize=512)
def _beside(shape: TreeShape, rows: int, device: torch.device) -> TreeForm:
    """The tensors of a static shape in so many rows."""
    parents, depths, sees = _static(shape, device)
    return TreeForm(parents.repeat(rows, 1), depths.expand(rows, -1), sees.expand(rows, -1, -1))


@lru_cache(maxsize=512)
def _static(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents and depths [N], and ancestors [N, N], of a static shape, made once per device."""
    nodes = len(shape)
    sees = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(shape.parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    depths = sees.sum(-1) - 1
    return torch.tensor(shape.parents, device=device), depths.to(device), sees.to(device)
