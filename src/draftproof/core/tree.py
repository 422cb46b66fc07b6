"""Token trees: possible continuations. This knows tokens and parents, no models.

Shape letters: B rows, N nodes, D path length in nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.tree_shape import TreeForm, chain_form, shape_form, triangle
from draftproof.core.tree_shape import TreeShape as TreeShape

ABSENT = -1
"""The token of an absent node, in rows with fewer nodes than the tree is wide."""
NO_TOKEN = -2
"""The choice if no token is allowed, or if logits are NaN. No node has this token, so it ends a
path."""


@dataclass(frozen=True)
class TokenTree:
    """Possible continuations of each row. Node 0 is the root: chosen by the target, but not yet
    read.

    tokens: [B, N] int64, ABSENT where a row has fewer nodes (with all descendants).
    parents: [B, N] int64, a parent comes before its children; -1 at the root.
    depth_limit: the longest path of any row, in edges: a number, so that shapes stay static.
    draft_probs: [B, N, V] the probabilities that each node was drawn from; None if tokens were
        chosen. Siblings are drawn without replacement in node order and have those of the first.
    is_chain: each node's parent is the node before it, in every row.
    confidence: [B, N] the drafter's estimate of the probability that a node is accepted: 1 at the
        root, 0 if absent, never more than the parent's; or None. It never changes what is exact.
    budget_rank: [B, N] int64, if rows share draft tokens: the smallest number of nodes per row
        with which the node would be among the likeliest.
    form: of a chain or a static shape; None if depths and ancestors follow from the parents.
    """

    tokens: Tensor
    parents: Tensor
    depth_limit: int
    draft_probs: Tensor | None = None
    is_chain: bool = False
    confidence: Tensor | None = None
    budget_rank: Tensor | None = None
    form: TreeForm | None = None

    @classmethod
    def root(cls, tokens: Tensor) -> TokenTree:
        """Only the root: `tokens` [B]. Plain autoregressive decoding.

        Args:
            tokens: The roots, int64 [B].

        Returns:
            Trees of one node.
        """
        return cls.chain(tokens[:, None])

    @classmethod
    def chain(cls, tokens: Tensor, draft_probs: Tensor | None = None) -> TokenTree:
        """A chain per row: `tokens` [B, N], the root first. A prompt is read as one.

        Args:
            tokens: Root and draft tokens, int64 [B, N].
            draft_probs: What each token was drawn from, if it was drawn.

        Returns:
            Trees of one path.
        """
        form, limit = chain_form(*tokens.shape, tokens.device), tokens.shape[1] - 1
        return cls(tokens, form.parents, limit, draft_probs, is_chain=True, form=form)

    @classmethod
    def shaped(
        cls, tokens: Tensor, shape: TreeShape, draft_probs: Tensor | None = None,
        confidence: Tensor | None = None,
    ) -> TokenTree:  # fmt: skip
        """The same static shape in every row: `tokens` [B, N] in the shape's node order.

        Args:
            tokens: Root and draft tokens, int64 [B, N].
            shape: The parents of the nodes.
            draft_probs: What each token was drawn from, if it was drawn.
            confidence: The probability that each node is accepted.

        Returns:
            Trees of this shape.
        """
        form, limit = shape_form(shape, len(tokens), tokens.device), len(shape.levels) - 1
        return cls(tokens, form.parents, limit, draft_probs, shape.is_chain, confidence, form=form)

    @classmethod
    def from_paths(cls, paths: Tensor, nodes: int, votes: Tensor | None = None) -> TokenTree:
        """Merge paths with shared prefixes (ReDrafter, 2403.09919, section 3.2): `paths` [B, W, D]
        tokens, with the root in column 0; ABSENT ends a path.

        The first `nodes` distinct prefixes in path-major order are kept (at least D). votes:
        [B, W, D] what each path adds to the confidence of each of its prefixes, descending along
        the path. With votes, the `nodes` of highest confidence are kept. No host synchronisation.

        Args:
            paths: Token ids from the root on, for each row.
            nodes: The most nodes of a tree.
            votes: The weight of each path.

        Returns:
            Trees with each common prefix once.
        """
        width, length = paths.shape[1:]
        same = (paths[:, :, None] == paths[:, None]).cumprod(-1).bool()             # [B, W, W, D]
        owner = same.int().argmax(2)                            # [B, W, D] first path with it
        number = torch.arange(width, device=paths.device)[:, None]
        first = (owner == number) & ((paths == ABSENT).cumsum(-1) == 0)
        if votes is None:
            chances = 1 / first.flatten(1).cumsum(1).clamp(min=1).view_as(owner).float()
        else:
            chances = (same * votes[:, None]).sum(2).gather(1, owner).cummin(-1).values.clamp(max=1)
        place = owner * length + torch.arange(length, device=paths.device)          # in the pool
        parents = torch.cat([place[..., :1], place[..., :-1]], -1)
        flat, above, chances = (part.flatten(1) for part in (paths, parents, chances * first))
        tree = cls.likeliest(flat, above, chances, nodes, length - 1)
        return tree if votes is not None else replace(tree, confidence=None)

    @classmethod
    def likeliest(
        cls, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, depth_limit: int
    ) -> TokenTree:
        """The tree of the `nodes` most confident nodes of a pool, descending, all [B, M].

        The root is the pool's node 0; nodes of confidence 0 are absent. A parent comes before its
        children and is no less likely. No host synchronisation.

        Args:
            tokens: Tokens of a pool of nodes, int64 [B, P].
            parents: Their parents in the pool.
            confidence: The probability that each is accepted.
            nodes: How many to keep.
            depth_limit: The depth that no node exceeds.

        Returns:
            Trees of the likeliest nodes.
        """
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        nodes = min(nodes, len(numbers))
        best = torch.where(numbers == 0, 1.0, confidence).sort(dim=1, descending=True, stable=True)
        order, confidence = best.indices[:, :nodes], best.values[:, :nodes]
        there = confidence > 0
        place = torch.empty_like(best.indices)                  # place in the pool → new node
        place.scatter_(1, best.indices, numbers.expand_as(place))
        above = torch.where(there, place.gather(1, parents.gather(1, order)), 0)
        drafted = torch.where(there, tokens.gather(1, order), ABSENT)
        above = torch.where(numbers[:nodes] == 0, -1, above)
        confidence = torch.where(there, confidence, 0)
        return cls(drafted, above, min(depth_limit, nodes - 1), confidence=confidence)

    @classmethod
    def concat(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Put trees of the same roots side by side, each with its own root: a pool, not yet a tree.

        Args:
            trees: Trees of the same rows.

        Returns:
            A pool of all nodes.
        """
        parents, start = list[Tensor](), 0
        for tree in trees:
            parents.append(torch.where(tree.parents < 0, -1, tree.parents + start))
            start += tree.tokens.shape[1]
        tokens = torch.cat([tree.tokens for tree in trees], 1)
        return cls(tokens, torch.cat(parents, 1), max(tree.depth_limit for tree in trees))

    def merged(self, confidence: Tensor, nodes: int) -> TokenTree:
        """The tree of the likeliest `nodes` of a pool. Among nodes with the same text, the best
        counts.

        Args:
            confidence: The probability that each node is accepted.
            nodes: How many to keep.

        Returns:
            Trees in which each path occurs once.
        """
        same = (self.texts[:, :, None] == self.texts[:, None]).all(-1)
        best = torch.where(same, confidence[:, None], 0).amax(2)
        first = same.to(torch.uint8).argmax(2)                  # [B, N] node with the same text
        is_first = first == torch.arange(best.shape[1], device=best.device)
        parents = first.gather(1, self.parents.clamp(min=0))
        chances = torch.where(is_first, best, 0)
        return self.likeliest(self.tokens, parents, chances, nodes, self.depth_limit)

    def within_budget(self, nodes: int) -> TokenTree:
        """The likeliest nodes, `nodes` per row on average; unchanged if there is no confidence.

        Args:
            nodes: The most nodes after the root.

        Returns:
            Trees without the other nodes.
        """
        if self.confidence is None:
            return self
        rows, width = self.tokens.shape
        falling = self.confidence[:, 1:].T.flatten()            # among equals, a parent comes first
        order = falling.sort(descending=True, stable=True).indices
        numbers = torch.arange(len(falling), device=falling.device)
        rank = torch.empty_like(order).scatter_(0, order, numbers).view(width - 1, rows).T
        rank = F.pad(rank // rows + 1, (1, 0))
        there = self.present & (rank <= nodes)
        end = 1 + int((there * torch.arange(width, device=there.device)).amax())
        tokens = torch.where(there, self.tokens, ABSENT)[:, :end]
        return replace(
            self, tokens=tokens, parents=self.parents[:, :end], budget_rank=rank[:, :end],
            depth_limit=min(self.depth_limit, end - 1), confidence=self.confidence[:, :end],
            form=self.form.first(end) if self.form is not None else None,
        )  # fmt: skip

    def best_chain(self) -> TokenTree:
        """The chain with the most expected tokens, for targets that cannot read trees."""
        assert self.confidence is not None, "without confidence no path is best"
        worth = (self.ancestors * self.confidence[:, None]).sum(-1)                 # [B, N]
        node = torch.where(self.present, worth, -1).argmax(1)
        tokens = self.tokens.gather(1, self.path_to(node))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        there = places <= self.depths.gather(1, node[:, None])
        return TokenTree.chain(torch.where(there, tokens, ABSENT))

    @cached_property
    def sizes(self) -> list[int]:
        """[B] nodes present after the root; on the host."""
        return [len(tokens) - 1 - tokens.count(ABSENT) for tokens in self.tokens.tolist()]

    @cached_property
    def drafted(self) -> Tensor:
        """[B, 2] the number of nodes present after the root, and their greatest depth."""
        reach = torch.where(self.present, self.depths, 0).amax(1)
        return torch.stack([self.present.sum(1) - 1, reach], 1)

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: node i sees node j, that is j is i or one of its ancestors."""
        (rows, nodes), device = self.tokens.shape, self.tokens.device
        if self.is_chain:
            return triangle(nodes, device).expand(rows, -1, -1)
        if self.form is not None and self.form.ancestors is not None:
            return self.form.ancestors
        sees = self.parents[:, :, None] == torch.arange(nodes, device=device)
        sees = (sees | torch.eye(nodes, dtype=torch.bool, device=device)).float()
        reach = 1
        while reach < self.depth_limit:                         # squaring doubles the reach
            sees, reach = (sees @ sees).clamp(max=1), 2 * reach
        return sees > 0

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] edges from the root."""
        return self.form.depths if self.form is not None else self.ancestors.sum(-1) - 1

    def positions(self, lengths: Tensor, limit: int) -> Tensor:
        """[B, N] the position of each node, after `lengths` [B] tokens, below `limit`.

        Args:
            lengths: Committed tokens of each row, int64 [B].
            limit: One more than the last position.

        Returns:
            int64 [B, N].
        """
        return (lengths[:, None] + self.depths).clamp(max=limit - 1)

    @cached_property
    def texts(self) -> Tensor:
        """[B, N, D] the tokens from the root to each node; NO_TOKEN after them."""
        rows, nodes = self.tokens.shape
        place = torch.where(self.ancestors, self.depths[:, None], self.depth_limit + 1)
        text = self.tokens.new_full((rows, nodes, self.depth_limit + 2), NO_TOKEN)
        return text.scatter_(2, place, self.tokens[:, None].expand_as(place))[..., :-1]

    @cached_property
    def present(self) -> Tensor:
        """[B, N] bool: the node is present."""
        return self.tokens != ABSENT

    def path_to(self, node: Tensor) -> Tensor:
        """[B, D] indices from the root to `node` [B]; places beyond hold their own index.

        Args:
            node: The node of each row, int64 [B].

        Returns:
            Indices of nodes, from the root on.
        """
        length, (rows, nodes) = self.depth_limit + 1, self.tokens.shape
        on_path = self.ancestors.gather(1, node[:, None, None].expand(-1, 1, nodes))[:, 0]
        place = torch.where(on_path, self.depths, length)
        numbers = torch.arange(nodes, device=node.device).expand(rows, -1)
        path = torch.arange(length + 1, device=node.device).repeat(rows, 1)
        return path.scatter_(1, place, numbers)[:, :length]


def well_formed(tree: TokenTree, vocab: int) -> bool:
    """Whether tokens and parents are in range, and no path exceeds `depth_limit`."""
    tokens, parents, numbers = tree.tokens, tree.parents, torch.arange(tree.tokens.shape[1])
    before = ((parents >= 0) & (parents < numbers)) | ((numbers == 0) & (parents == -1))
    if not bool((before & (tokens >= ABSENT) & (tokens < vocab)).all()):
        return False
    depths = replace(tree, depth_limit=tokens.shape[1], form=None).depths
    return bool((depths <= tree.depth_limit)[tree.present].all())
