"""Random pools of nodes, and whether two trees are alike."""

from __future__ import annotations

import pytest
import torch
from drafting import drafted
from torch import Tensor

from draftproof.core.tree import ABSENT, TokenTree


def assert_alike(tree: TokenTree, other: TokenTree) -> None:
    """The same nodes with the same probabilities, but for which of several with equal probabilities
    came last; in falling order."""
    for row in range(len(tree.tokens)):
        ours, theirs = drafted(tree, row), drafted(other, row)
        falling = sorted(ours.values(), reverse=True)
        assert list(ours.values()) == falling
        assert falling == pytest.approx(list(theirs.values()), rel=1e-5, abs=1e-7)
        sure = {text for text, chance in ours.items() if chance > falling[-1] * 1.0001}
        assert sure <= set(theirs)
        for text in ours.keys() & theirs.keys():
            assert ours[text] == pytest.approx(theirs[text], rel=1e-5)


def pools(
    dice: torch.Generator, rows: int, size: int, vocab: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Random forests: tokens, parents, and probabilities that fall along every path; some nodes,
    and all below them, are not there."""
    tokens = torch.randint(vocab, (rows, size), generator=dice)
    parents = (torch.rand(rows, size, generator=dice) * torch.arange(size)).long()
    confidence = 0.3 + 0.69 * torch.rand(rows, size, generator=dice)
    confidence[torch.rand(rows, size, generator=dice) < 0.1] = 0
    confidence[:, 0], parents[:, 0] = 1, -1
    for node in range(1, size):
        confidence[:, node] *= confidence[:, :node].gather(1, parents[:, node, None])[:, 0]
    return torch.where(confidence > 0, tokens, ABSENT), parents, confidence
