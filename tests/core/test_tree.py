"""Token trees: shapes, ancestors, paths, and the packing of paths, against plain Python."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftproof.core.acceptance import accept_by_matching
from draftproof.core.tree import ABSENT, TokenTree, TreeShape

SHAPES = [
    TreeShape.chain(0),
    TreeShape.chain(4),
    TreeShape.branching((2, 2, 1)),
    TreeShape.branching((3,)),
    TreeShape.from_digits(["0", "1", "00", "01", "10", "000", "0000"]),
]


@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_a_shape_orders_parents_first_and_levels_together(shape: TreeShape) -> None:
    nodes = ((), *shape.paths)
    assert list(shape.paths) == sorted(shape.paths, key=lambda path: (len(path), path))
    for node in range(1, len(shape)):
        assert nodes[shape.parents[node]] == nodes[node][:-1] and shape.parents[node] < node
        assert shape.ranks[node] == nodes[node][-1]
    assert [node for level in shape.levels for node in level] == list(range(len(shape)))
    assert all(
        len(nodes[node]) == depth for depth, level in enumerate(shape.levels) for node in level
    )
    assert shape.is_chain == (len(shape.levels) == len(shape))


def test_shapes_by_name() -> None:
    assert TreeShape.chain(2).paths == ((0,), (0, 0))
    assert len(TreeShape.branching((2, 2, 1))) == 11
    assert TreeShape.from_digits(["1", "0", "10"]).paths == ((0,), (1,), (1, 0))


@pytest.mark.parametrize("paths", [((1, 0),), ((),), ((0,), (0,)), ((-1,),)])
def test_a_shape_that_is_no_tree_is_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="tree path"):
        TreeShape(paths)


@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_a_cut_shape_is_a_prefix_and_a_tree(shape: TreeShape) -> None:
    for nodes in range(len(shape) + 2):
        cut = shape.within(nodes)
        assert cut.paths == shape.paths[:nodes] and len(cut) <= nodes + 1


@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_ancestors_depths_and_paths_follow_the_parents(shape: TreeShape) -> None:
    """The cached tensors of a static shape and those computed from parents are the same, and
    right."""
    tokens = torch.arange(len(shape)).repeat(3, 1)
    static = TokenTree.shaped(tokens, shape)
    dynamic = TokenTree(tokens, static.parents.clone(), static.depth_limit)
    chains = [_ancestors(list(shape.parents), node) for node in range(len(shape))]
    for tree in (static, dynamic, *([TokenTree.chain(tokens)] if shape.is_chain else [])):
        for node, chain in enumerate(chains):
            assert tree.ancestors[1, node].nonzero()[:, 0].tolist() == chain
            assert int(tree.depths[2, node]) == len(chain) - 1
            path = tree.path_to(torch.full((3,), node))
            assert path[0].tolist() == [*chain, *range(len(chain), tree.depth_limit + 1)]


def _ancestors(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*_ancestors(parents, parents[node]), node]


@pytest.mark.parametrize("length", [2, 5, 9])
def test_chains_below_a_tree_are_rows_of_their_own(length: int) -> None:
    """Whichever is wider: of each row the nodes, depths and ancestors that it has alone."""
    chains = torch.randint(9, (2, length))
    chains[1, 1:] = ABSENT
    for shape in SHAPES:
        tree = TokenTree.shaped(torch.randint(9, (3, len(shape))), shape)
        both, (one, other) = tree.stack(chains), (tree, TokenTree.chain(chains))
        width = both.tokens.shape[1]
        assert width == max(len(shape), length) and both.is_chain == shape.is_chain
        assert both.depth_limit >= max(tree.depth_limit, length - 1)
        assert (
            torch.equal(both.present[:3, : len(shape)], tree.present)
            and not both.present[:3, len(shape) :].any()
        )
        assert (
            torch.equal(both.present[3:, :length], other.present)
            and not both.present[3:, length:].any()
        )
        for mine, rows, nodes in ((one, slice(3), len(shape)), (other, slice(3, None), length)):
            assert torch.equal(both.tokens[rows, :nodes], mine.tokens) and torch.equal(
                both.parents[rows, :nodes], mine.parents
            )
            assert torch.equal(both.depths[rows, :nodes], mine.depths)
            assert torch.equal(both.ancestors[rows, :nodes, :nodes], mine.ancestors)


def test_depths_of_deep_chains() -> None:
    """Squaring reaches every depth, also where it is no power of two."""
    for length in range(1, 20):
        tree = TokenTree(
            torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None] - 1, length - 1
        )
        assert tree.depths[0].tolist() == list(range(length))


def test_a_chain_of_any_length_is_made_at_once() -> None:
    """A prompt is read as one: what every pair of its tokens would have to say of each other waits
    until somebody asks."""
    tokens = torch.arange(2 * 5000).view(2, 5000)
    tree = TokenTree.chain(tokens)
    assert tree.is_chain and tree.depth_limit == 4999 and "ancestors" not in vars(tree)
    assert (
        torch.equal(tree.parents, (torch.arange(5000) - 1).repeat(2, 1))
        and tree.parents.is_contiguous()
    )
    assert torch.equal(tree.depths, torch.arange(5000).repeat(2, 1))


# Packing paths ------------------------------------------------------------------------------------


def test_the_oracle_of_recurrent_drafter() -> None:
    """Apple's own example: shared prefixes become shared nodes, in path-major order."""
    a = [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]
    b = [[93, 94, 95, 92], [93, 95, 96, 93], [93, 94, 97, 96]]
    tree = TokenTree.from_paths(torch.tensor([a, b]), 9)
    assert tree.tokens.tolist() == [
        [91, 92, 93, 95, 94, 96, 97, ABSENT, ABSENT], [93, 94, 95, 92, 95, 96, 93, 97, 96]
    ]
    assert tree.parents[0, :7].tolist() == [-1, 0, 1, 2, 1, 4, 2]
    assert tree.parents[1].tolist() == [-1, 0, 1, 2, 0, 4, 5, 1, 7]
    assert tree.depths[0, :7].tolist() == [0, 1, 2, 3, 2, 3, 3] and tree.depths[1].tolist() == [
        0, 1, 2, 3, 1, 2, 3, 2, 3
    ]
    mask = ["1000000", "1100000", "1110000", "1111000", "1100100", "1100110", "1110001"]
    assert ["".join(str(int(bit)) for bit in row) for row in tree.ancestors[0, :7, :7]] == mask


def _trie(paths: list[list[int]], nodes: int) -> list[tuple[int, ...]]:
    """The first distinct prefixes in path-major order; ABSENT ends a path."""
    seen: list[tuple[int, ...]] = []
    for path in paths:
        for size in range(1, len(path) + 1):
            prefix = tuple(path[:size])
            if prefix[-1] == ABSENT:
                break
            if prefix not in seen:
                seen.append(prefix)
    return seen[:nodes]


def test_packing_is_a_trie() -> None:
    """200 random cases with gaps and too little room: the nodes are the trie's, and closed under
    parents."""
    dice = torch.Generator().manual_seed(0)
    for case in range(200):
        rows, width, length = 1 + case % 3, 1 + case % 5, 1 + case % 4
        paths = torch.randint(1 + case % 3, (rows, width, length), generator=dice)
        paths[torch.rand(paths.shape, generator=dice) < 0.1 * (case % 2)] = ABSENT
        paths[:, :, 0] = torch.arange(rows)[:, None] + 7
        nodes = length + case % 9
        tree = TokenTree.from_paths(paths, nodes)
        for row in range(rows):
            wanted = _trie(paths[row].tolist(), nodes)
            assert tree.tokens[row].tolist() == [
                *(prefix[-1] for prefix in wanted),
                *[ABSENT] * (tree.tokens.shape[1] - len(wanted))
            ]
            assert tree.parents[row, : len(wanted)].tolist() == [
                wanted.index(p[:-1]) if len(p) > 1 else -1 for p in wanted
            ]
            for node, prefix in enumerate(wanted):
                assert tree.tokens[row, tree.ancestors[row, node]].tolist() == list(prefix)
                assert tree.tokens[
                    row, tree.path_to(torch.full((rows,), node))[row, : len(prefix)]
                ].tolist() == list(prefix)


def test_trees_are_made_without_reading_the_device() -> None:
    """Everything runs on tensors that have no values."""
    with FakeTensorMode():
        tree = TokenTree.from_paths(torch.zeros(2, 3, 4, dtype=torch.int64), 8)
        accepted = accept_by_matching(tree, torch.zeros(2, 8, dtype=torch.int64))
        assert tree.ancestors.shape == (2, 8, 8) and accepted.nodes.shape == (2, 4)
