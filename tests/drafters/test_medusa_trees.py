"""The published Medusa trees: ours are the buffers of FasterDecoding/Medusa, at every size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.medusa_trees import CHOICES

Path = tuple[int, ...]
PER_DEPTH = {
    "mc_sim_7b_63": [10, 28, 23, 2], "vicuna_7b_stage1": [10, 32, 20, 1],
    "vicuna_7b_stage1_ablation": [10, 21, 25, 7], "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_13b_stage1": [10, 29, 23, 1], "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage1": [10, 34, 19, 0], "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
}  # fmt: skip


class Published:
    """The buffers of FasterDecoding/Medusa, written down plainly from their description."""

    def __init__(self, choices: Sequence[Path]) -> None:
        order = sorted(choices, key=lambda path: (len(path), path))
        node = {path: index + 1 for index, path in enumerate(order)}
        width = len(order) + 1
        self.mask = [[int(column in (0, row)) for column in range(width)] for row in range(width)]
        self.places, self.indices = [0] * width, [0] * width
        for path in order:
            for size in range(1, len(path)):
                self.mask[node[path]][node[path[:size]]] = 1
            self.places[node[path]] = len(path)
            self.indices[node[path]] = path[-1] + 10 * (len(path) - 1) + 1
        covered: set[Path] = set()
        self.retrieve: list[list[int]] = []
        for path in reversed(order):
            if path not in covered:
                self.retrieve.append([0, *(node[path[:size]] for size in range(1, len(path) + 1))])
                covered |= {path[:size] for size in range(1, len(path) + 1)}
        longest = max(map(len, self.retrieve))
        self.retrieve = [[*row, *[-1] * (longest - len(row))] for row in self.retrieve]


SMALL = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
TREES = {**CHOICES, "small": SMALL}


def test_the_reference_itself_gives_the_known_vector() -> None:
    known = Published(SMALL)
    rows = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1101001"]
    assert ["".join(map(str, row)) for row in known.mask] == rows
    assert known.indices == [0, 1, 2, 11, 12, 11, 21] and known.places == [0, 1, 1, 2, 2, 2, 3]
    assert known.retrieve == [[0, 1, 3, 6], [0, 2, 5, -1], [0, 1, 4, -1]]


@pytest.mark.parametrize("name", TREES)
def test_our_trees_are_the_published_buffers(name: str) -> None:
    known, shape = Published(TREES[name]), TreeShape(TREES[name])
    tree = TokenTree.shaped(torch.zeros(1, len(shape), dtype=torch.int64), shape)
    assert tree.ancestors[0].int().tolist() == known.mask
    assert tree.depths[0].tolist() == known.places
    leaves = [node for node in range(len(shape)) if node not in shape.parents]
    ours = [tree.path_to(torch.tensor([leaf]))[0].tolist() for leaf in reversed(leaves)]
    ends = [known.places[leaf] + 1 for leaf in reversed(leaves)]
    longest = tree.depth_limit + 1
    cut = [[*path[:end], *[-1] * (longest - end)] for path, end in zip(ours, ends, strict=True)]
    assert cut == known.retrieve


@pytest.mark.parametrize("name", CHOICES)
def test_published_sets_are_trees_at_every_size(name: str) -> None:
    paths = CHOICES[name]
    assert len(paths) == len(set(paths)) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == PER_DEPTH[name]
    for size in range(1, 64):
        # refuses a path without its parent
        assert len(TreeShape(paths[:size])) == size + 1
    assert max(map(max, paths)) == 9
