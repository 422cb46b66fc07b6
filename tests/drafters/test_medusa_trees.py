"""The published Medusa trees: ours are the buffers of FasterDecoding/Medusa, at every size."""

from __future__ import annotations

import pytest

from draftproof.core.tree import TreeShape
from draftproof.drafters.medusa_trees import CHOICES

Path = tuple[int, ...]
PER_DEPTH = {
    "mc_sim_7b_63": [10, 28, 23, 2], "vicuna_7b_stage1": [10, 32, 20, 1],
    "vicuna_7b_stage1_ablation": [10, 21, 25, 7], "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_13b_stage1": [10, 29, 23, 1], "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage1": [10, 34, 19, 0], "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_published_sets_are_trees_at_every_size(name: str) -> None:
    paths = CHOICES[name]
    assert len(paths) == len(set(paths)) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == PER_DEPTH[name]
    for size in range(1, 64):
        # refuses a path without its parent
        assert len(TreeShape(paths[:size])) == size + 1
    assert max(map(max, paths)) == 9
