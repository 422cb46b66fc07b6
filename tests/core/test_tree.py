"""Token trees: shapes, ancestors, paths and the likeliest nodes, against plain Python."""

from __future__ import annotations

import pytest
import torch
from drafting import drafted
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftproof.core.acceptance import accept_by_matching
from draftproof.core.messages import Accepted, Commit, Reading
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape

SHAPES = [TreeShape.chain(0), TreeShape.chain(4), TreeShape.branching((2, 2, 1)),
          TreeShape.branching((3,)),
          TreeShape.from_digits(["0", "1", "00", "01", "10", "000", "0000"])]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=len)


@shapes
def test_a_shape_orders_parents_first_and_levels_together(shape: TreeShape) -> None:
    nodes = ((), *shape.paths)
    assert list(shape.paths) == sorted(shape.paths, key=lambda path: (len(path), path))
    for node in range(1, len(shape)):
        assert nodes[shape.parents[node]] == nodes[node][:-1] and shape.parents[node] < node
        assert shape.ranks[node] == nodes[node][-1]
    assert [node for level in shape.levels for node in level] == list(range(len(shape)))
    assert all(len(nodes[node]) == depth for depth, level in enumerate(shape.levels)
               for node in level)
    assert shape.is_chain == (len(shape.levels) == len(shape))
    for size in range(len(shape) + 2):
        assert shape.within(size).paths == shape.paths[:size]


@pytest.mark.parametrize("paths", [((1, 0),), ((),), ((0,), (0,)), ((-1,),)])
def test_shapes_that_are_not_trees_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="tree path"):
        TreeShape(paths)


@shapes
def test_ancestors_depths_and_paths_follow_the_parents(shape: TreeShape) -> None:
    """Cached tensors of a static shape are those computed from parents, and right."""
    def ancestors(node: int) -> list[int]:
        return [] if node < 0 else [*ancestors(shape.parents[node]), node]

    tokens = torch.arange(len(shape)).repeat(3, 1)
    static = TokenTree.shaped(tokens, shape)
    dynamic = TokenTree(tokens, static.parents.clone(), static.depth_limit)
    for tree in (static, dynamic, *([TokenTree.chain(tokens)] if shape.is_chain else [])):
        for node in range(len(shape)):
            chain = ancestors(node)
            assert tree.ancestors[1, node].nonzero()[:, 0].tolist() == chain
            assert int(tree.depths[2, node]) == len(chain) - 1
            path = tree.path_to(torch.full((3,), node))
            assert path[0].tolist() == [*chain, *range(len(chain), tree.depth_limit + 1)]
            text = [token for token in tree.texts[0, node].tolist() if token != NO_TOKEN]
            assert text == chain


def test_depths_of_deep_chains() -> None:
    """Squaring reaches every depth, also where it is no power of two; and a prompt is a chain that
    is made at once: what its pairs of tokens say of each other waits until somebody asks."""
    for length in range(1, 20):
        parents = torch.arange(length)[None] - 1
        tree = TokenTree(torch.zeros(1, length, dtype=torch.int64), parents, length - 1)
        assert tree.depths[0].tolist() == list(range(length))
    tree = TokenTree.chain(torch.arange(2 * 5000).view(2, 5000))
    assert tree.is_chain and tree.depth_limit == 4999 and "ancestors" not in vars(tree)
    assert torch.equal(tree.depths, torch.arange(5000).repeat(2, 1))


# Packing paths ------------------------------------------------------------------------------------


def test_packing_matches_the_published_example() -> None:
    """Apple's own example: shared prefixes become shared nodes, in path-major order."""
    a = [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]
    b = [[93, 94, 95, 92], [93, 95, 96, 93], [93, 94, 97, 96]]
    tree = TokenTree.from_paths(torch.tensor([a, b]), 9)
    assert tree.tokens.tolist() == [[91, 92, 93, 95, 94, 96, 97, ABSENT, ABSENT],
                                    [93, 94, 95, 92, 95, 96, 93, 97, 96]]
    assert tree.parents[0, :7].tolist() == [-1, 0, 1, 2, 1, 4, 2]
    assert tree.parents[1].tolist() == [-1, 0, 1, 2, 0, 4, 5, 1, 7]
    assert tree.depths[0, :7].tolist() == [0, 1, 2, 3, 2, 3, 3]


def trie(paths: list[list[int]], nodes: int) -> list[tuple[int, ...]]:
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
    """Random cases with gaps and too little room: the trie's nodes, closed under parents."""
    dice = torch.Generator().manual_seed(0)
    for case in range(200):
        rows, width, length = 1 + case % 3, 1 + case % 5, 1 + case % 4
        paths = torch.randint(1 + case % 3, (rows, width, length), generator=dice)
        paths[torch.rand(paths.shape, generator=dice) < 0.1 * (case % 2)] = ABSENT
        paths[:, :, 0] = torch.arange(rows)[:, None] + 7
        nodes = length + case % 9
        tree = TokenTree.from_paths(paths, nodes)
        for row in range(rows):
            wanted = trie(paths[row].tolist(), nodes)
            assert int(tree.present[row].sum()) == len(wanted)
            for node, prefix in enumerate(wanted):
                assert tree.tokens[row, tree.ancestors[row, node]].tolist() == list(prefix)
                parent = wanted.index(prefix[:-1]) if node else -1
                assert int(tree.parents[row, node]) == parent


def test_trees_are_built_without_host_synchronisation() -> None:
    """Everything runs on tensors that have no values."""
    with FakeTensorMode():
        tree = TokenTree.from_paths(torch.zeros(2, 3, 4, dtype=torch.int64), 8)
        accepted = accept_by_matching(tree, torch.zeros(2, 8, dtype=torch.int64))
        assert tree.ancestors.shape == (2, 8, 8) and accepted.nodes.shape == (2, 4)


@pytest.mark.parametrize("rows", [1, 2])
def test_commits_hold_tokens_and_states_of_accepted_nodes(rows: int) -> None:
    """One row alone is read out otherwise than several."""
    tree = TokenTree.shaped(torch.arange(10, 10 + 5 * rows).view(rows, 5),
                            TreeShape.from_digits(["0", "1", "10", "100"]))
    hidden = torch.randn(rows, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    nodes = torch.tensor([[0, 2, 3, 4], [0, 1, 2, 3]])[:rows]
    accepted = Accepted(nodes, torch.tensor([4, 2])[:rows], torch.tensor([7, 8])[:rows])
    commit = Commit.of(range(rows), tree, Reading(torch.zeros(rows, 5, 40), hidden), accepted)
    assert commit.hidden is not None and commit.hidden.shape == (rows, 4, 2, 3)
    for row in range(rows):
        assert torch.equal(commit.tokens[row], tree.tokens[row, nodes[row]])
        assert torch.equal(commit.hidden[row], hidden[row, nodes[row]])


ROOT = 7
Text = tuple[int, ...]


def votes_of(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Random paths, some cut short, and what each gives: at most 1 per prefix, falling along it."""
    dice = torch.Generator().manual_seed(seed)
    paths = torch.randint(3, shape, generator=dice)
    paths[torch.rand(shape, generator=dice) < 0.1] = ABSENT
    paths[:, :, 0] = ROOT
    votes = torch.rand(shape, generator=dice, dtype=torch.float64).cumprod(-1) / shape[1]
    return paths, votes


def by_hand(paths: Tensor, votes: Tensor) -> dict[Text, float]:
    """The probabilities of every beginning of one row's paths, the root left out."""
    confidence: dict[Text, float] = {}
    for path, gives in zip(paths.tolist(), votes.tolist(), strict=True):
        for size in range(2, len(path) + 1):
            if path[size - 1] == ABSENT:
                break
            text = tuple(path[1:size])
            confidence[text] = confidence.get(text, 0.0) + gives[size - 1]
    return confidence


def assert_is_best(tree: TokenTree, row: int, confidence: dict[Text, float], nodes: int) -> None:
    """It holds the `nodes - 1` likeliest of `confidence`, falling, each after its parent."""
    drafts, best = drafted(tree, row), sorted(confidence.values(), reverse=True)
    assert len(drafts) == min(nodes - 1, len(confidence)) == int(tree.present[row].sum()) - 1
    assert list(drafts.values()) == pytest.approx(best[: len(drafts)])
    assert drafts == pytest.approx({text: confidence[text] for text in drafts})
    assert tree.parents[row, 0] == -1 and (tree.parents[row, 1:] >= 0).all()
    assert (tree.parents[row] < torch.arange(tree.tokens.shape[1])).all()


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 30])
def test_voted_paths_keep_the_likeliest_prefixes(nodes: int) -> None:
    for seed in range(20):
        paths, votes = votes_of((3, 5, 5), seed)
        tree = TokenTree.from_paths(paths, nodes, votes)
        for row in range(3):
            assert_is_best(tree, row, by_hand(paths[row], votes[row]), nodes)


def test_zero_votes_remove_nodes_and_ties_keep_the_parent() -> None:
    paths = torch.tensor([[[ROOT, 1, 2], [ROOT, 3, 4]]])
    votes = torch.tensor([[[1.0, 0.5, 0.2], [0.0, 0.0, 0.0]]])
    tree = TokenTree.from_paths(paths, 5, votes)
    assert drafted(tree) == pytest.approx({(1,): 0.5, (1, 2): 0.2})
    tree = TokenTree.from_paths(torch.tensor([[[ROOT, 1, 2, 3]]]), 3, torch.ones(1, 1, 4))
    assert tree.tokens.tolist() == [[ROOT, 1, 2]] and tree.parents.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_concatenated_trees_merge_into_the_best_tree(nodes: int) -> None:
    """Each text once, with the best of its probabilities; rows of other lengths, trees of other
    depths."""
    for seed in range(20):
        each = [votes_of((3, 4, depth), 100 * depth + seed) for depth in (3, 5, 2)]
        trees = [TokenTree.from_paths(paths, 8, votes) for paths, votes in each]
        confidence = torch.cat([tree.confidence for tree in trees if tree.confidence is not None],
                               1)
        merged = TokenTree.concat(trees).merged(confidence, nodes)
        for row in range(3):
            best: dict[Text, float] = {}
            for tree in trees:
                for text, value in drafted(tree, row).items():
                    best[text] = max(value, best.get(text, 0.0))
            assert_is_best(merged, row, best, nodes)


def test_best_chain_has_the_most_expected_tokens() -> None:
    for seed in range(20):
        paths, votes = votes_of((3, 5, 5), seed)
        tree = TokenTree.from_paths(paths, 12, votes)
        best = tree.best_chain()
        assert best.is_chain
        for row in range(3):
            confidence = drafted(tree, row)
            worth = {text: sum(confidence[text[:size]] for size in range(1, len(text) + 1))
                     for text in confidence}
            output = tuple(token for token in best.tokens[row].tolist() if token != ABSENT)
            assert worth.get(output[1:], 0.0) == pytest.approx(max(worth.values(), default=0.0))
            assert (best.tokens[row, len(output) :] == ABSENT).all()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_share_the_draft_budget(rows: int) -> None:
    """Of all rows the likeliest are kept, whole paths; each says with how many it would be."""
    shape = TreeShape.branching((3, 2, 2))
    for seed in range(20):
        dice = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, (rows, len(shape)), generator=dice)
        confidence = torch.ones(rows, len(shape))
        for node, parent in enumerate(shape.parents[1:], start=1):          # ragged, with equals
            gone = (tokens[:, parent] == ABSENT) | (torch.rand(rows, generator=dice) < 0.2)
            step = torch.rand(rows, generator=dice).mul(4).ceil() / 4
            tokens[gone, node] = ABSENT
            confidence[:, node] = torch.where(gone, 0, confidence[:, parent] * step)
        tree = TokenTree.shaped(tokens, shape, confidence=confidence)
        falling = sorted(confidence[:, 1:][tree.present[:, 1:]].tolist(), reverse=True)
        for nodes in (1, 3, 8, 30):
            kept = tree.within_budget(nodes)
            assert kept.confidence is not None and kept.budget_rank is not None
            there = kept.present[:, 1:]
            assert (sorted(kept.confidence[:, 1:][there].tolist(), reverse=True)
                    == falling[: nodes * rows])
            assert sorted(kept.budget_rank[:, 1:][there].tolist()) == [
                at // rows + 1 for at in range(int(there.sum()))
            ]
            assert (kept.present.gather(1, kept.parents.clamp(min=0)) | ~kept.present).all()
            assert not kept.tokens.shape[1] > 1 or there[:, -1].any()  # no wider than it must be
            plain = TokenTree(kept.tokens, kept.parents, kept.depth_limit)
            assert torch.equal(kept.depths, plain.depths)
            assert torch.equal(kept.ancestors, plain.ancestors)
    tree = TokenTree.chain(torch.tensor([[7, 1, 2], [7, 3, ABSENT]]))
    assert tree.within_budget(1) is tree, "no confidence, nothing to share"
