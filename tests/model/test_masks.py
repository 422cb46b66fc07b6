"""Masks say who sees whom: checked slot by slot against the definition."""

from __future__ import annotations

import pytest
import torch

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.model.masks import tree_mask

SHAPE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("first", [0, 3])
def test_a_node_sees_the_committed_text_and_its_ancestors(dtype: torch.dtype, window: int | None, first: int) -> None:
    lengths, capacity = torch.tensor([0, 4, 9]), 18
    tree = TokenTree.shaped(torch.zeros(3, len(SHAPE), dtype=torch.int64), SHAPE)
    mask = tree_mask(tree, lengths, capacity, dtype, first, window)
    assert mask.shape == (3, 1, len(SHAPE) - first, capacity) and mask.dtype == dtype
    for row, length in enumerate(lengths.tolist()):
        for node in range(first, len(SHAPE)):
            for slot in range(capacity):
                there = slot - length
                seen = slot < length or (there < len(SHAPE) and bool(tree.ancestors[row, node, there]))
                if seen and window is not None:
                    position = slot if slot < length else length + int(tree.depths[row, there])
                    seen = length + int(tree.depths[row, node]) - position < window
                assert mask[row, 0, node - first, slot] == (0 if seen else torch.finfo(dtype).min), (row, node, slot)


def test_a_mask_adds_and_never_reads_as_true_or_false() -> None:
    """Additive: under eager attention a boolean mask would be added as 0 and 1, silently."""
    tree = TokenTree.chain(torch.zeros(1, 3, dtype=torch.int64))
    mask = tree_mask(tree, torch.tensor([2]), 8, torch.float32)
    assert mask.dtype.is_floating_point and (mask <= 0).all()
    assert (mask == 0).any(-1).all(), "every node sees something: softmax of nothing is NaN"
