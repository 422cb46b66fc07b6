"""Trees and texts as the C library writes and reads them."""

from __future__ import annotations

import torch

from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.errors import BadInput
from draftproof.native.declarations import Structure, structure

MOST_AHEAD = 1536
"""The most tokens that the library drafts after a text: it keeps them on its stack."""
Texts, TreeOutput, Member = map(structure, ("Texts", "TreeOutput", "Member"))


class TreeBuffer:
    """Where the library writes trees, [rows, nodes] each: tokens, parents and confidence."""

    def __init__(self, rows: int, nodes: int) -> None:
        tokens, parents = torch.empty(2, rows, nodes, dtype=torch.int64)
        self.parts = (tokens, parents, torch.empty(rows, nodes, dtype=torch.float32))
        # the library sets the widest
        self.output = TreeOutput(*self.parts, nodes, ABSENT, 1, rows)

    def tree(self, depth_limit: int, shape: TreeShape | None = None) -> TokenTree:
        """The trees written there, as wide as the widest; of this shape if there is one."""
        tokens, parents, confidence = self.parts
        if shape is not None:
            return TokenTree.shaped(tokens, shape, confidence=confidence)
        width = min(self.output.widest, tokens.shape[1])
        tokens, parents, confidence = (part[:, :width] for part in self.parts)
        deepest = self.output.deepest or depth_limit
        limit = min(depth_limit, deepest, width - 1)
        return TokenTree(tokens, parents, limit, confidence=confidence)


def texts_of(prefix: Prefix, ahead: int) -> Structure:
    """The texts of all rows, each up to its root.

    Args:
        prefix: The texts.
        ahead: Tokens that are drafted after each root.

    Raises:
        BadInput: They are not int64 on the CPU, there are fewer texts than rows, or `ahead` is more
            than `MOST_AHEAD`.
    """
    if not 0 <= ahead <= MOST_AHEAD:
        raise BadInput(f"{ahead} tokens were to be drafted after each text; the kernels draft at "
                       f"most {MOST_AHEAD}")
    text, position = prefix.tokens, prefix.position
    return Texts(text, position, len(position), text.shape[1])


def search_member(rows: int, **searches: Structure) -> Structure:
    """A member of a portfolio that the library asks itself.

    Args:
        rows: Rows that are searched.
        **searches: `prompt`, `index` or `table`, and the search.
    """
    parts = (searches.get(name) for name in ("prompt", "index", "table"))
    return Member(None, None, None, 0, rows, *parts)
