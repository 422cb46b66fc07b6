"""Trees by odds: the likeliest nodes of paths, pools and several trees, against plain searches over
dictionaries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape

ROOT = 7
Text = tuple[int, ...]


def votes_of(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Random paths over three tokens, some cut short, and what each gives: at most 1 per prefix,
    falling along the path."""
    dice = torch.Generator().manual_seed(seed)
    paths = torch.randint(3, shape, generator=dice)
    paths[torch.rand(shape, generator=dice) < 0.1] = ABSENT
    paths[:, :, 0] = ROOT
    votes = torch.rand(shape, generator=dice, dtype=torch.float64).cumprod(-1) / shape[1]
    return paths, votes


def by_hand(paths: Tensor, votes: Tensor) -> dict[Text, float]:
    """The odds of every prefix of one row's paths."""
    confidence: dict[Text, float] = {}
    for path, gives in zip(paths.tolist(), votes.tolist(), strict=True):
        for size in range(2, len(path) + 1):
            if path[size - 1] == ABSENT:
                break
            confidence[tuple(path[:size])] = (
                confidence.get(tuple(path[:size]), 0.0) + gives[size - 1]
            )
    return confidence


def nodes_of(tree: TokenTree, row: int) -> dict[Text, float]:
    """Text and odds of each node that is there, the root aside; texts occur once."""
    assert tree.confidence is not None
    found: dict[Text, float] = {}
    for node in range(1, tree.tokens.shape[1]):
        if tree.tokens[row, node] != ABSENT:
            text = tuple(token for token in tree.texts[row, node].tolist() if token != NO_TOKEN)
            assert text not in found
            found[text] = float(tree.confidence[row, node])
    return found


def assert_is_best(tree: TokenTree, row: int, confidence: dict[Text, float], nodes: int) -> None:
    """The tree holds the `nodes - 1` likeliest of `confidence`, in falling order, each behind its
    parent."""
    found = nodes_of(tree, row)
    assert len(found) == min(nodes - 1, len(confidence))
    assert list(found.values()) == pytest.approx(
        sorted(confidence.values(), reverse=True)[: len(found)]
    )
    assert all(value == pytest.approx(confidence[text]) for text, value in found.items())
    assert tree.parents[row, 0] == -1 and (tree.parents[row, 1:] >= 0).all()
    assert (tree.parents[row] < torch.arange(tree.tokens.shape[1])).all()


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 30])
def test_voted_paths_keep_the_likeliest_prefixes(nodes: int) -> None:
    for seed in range(20):
        paths, votes = votes_of((3, 5, 5), seed)
        tree = TokenTree.from_paths(paths, nodes, votes)
        for row in range(3):
            assert_is_best(tree, row, by_hand(paths[row], votes[row]), nodes)


def test_voted_paths_and_unvoted_ones_are_one_tree_when_all_fits() -> None:
    paths, votes = votes_of((4, 4, 5), 1)
    voted, plain = TokenTree.from_paths(paths, 17, votes), TokenTree.from_paths(paths, 17)
    for row in range(4):
        rows = zip(plain.texts[row].tolist(), plain.tokens[row].tolist(), strict=True)
        texts = [text for text, token in rows if token != ABSENT]
        wanted = {tuple(token for token in text if token != NO_TOKEN) for text in texts}
        assert set(nodes_of(voted, row)) == wanted - {(ROOT,)}


def test_what_votes_nothing_is_not_there() -> None:
    paths = torch.tensor([[[ROOT, 1, 2], [ROOT, 3, 4]]])
    votes = torch.tensor([[[1.0, 0.5, 0.2], [0.0, 0.0, 0.0]]])
    assert nodes_of(TokenTree.from_paths(paths, 5, votes), 0) == pytest.approx(
        {(ROOT, 1): 0.5, (ROOT, 1, 2): 0.2}
    )


def test_equal_odds_keep_the_parent_before_the_child() -> None:
    tree = TokenTree.from_paths(torch.tensor([[[ROOT, 1, 2, 3]]]), 3, torch.ones(1, 1, 4))
    assert tree.tokens.tolist() == [[ROOT, 1, 2]] and tree.parents.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_trees_side_by_side_merge_into_the_best_of_all(nodes: int) -> None:
    """Each text once, with the best of its odds, wherever it came from; rows of other lengths,
    trees of other depths."""
    for seed in range(20):
        each = [votes_of((3, 4, depth), 100 * depth + seed) for depth in (3, 5, 2)]
        trees = [TokenTree.from_paths(paths, 8, votes) for paths, votes in each]
        pool = TokenTree.concat(trees)
        confidence = torch.cat(
            [tree.confidence for tree in trees if tree.confidence is not None], 1
        )
        merged = pool.merged(confidence, nodes)
        for row in range(3):
            best: dict[Text, float] = {}
            for tree in trees:
                for text, value in nodes_of(tree, row).items():
                    best[text] = max(value, best.get(text, 0.0))
            assert_is_best(merged, row, best, nodes)


def test_a_tree_beside_nothing_is_itself() -> None:
    paths, votes = votes_of((2, 4, 4), 3)
    tree = TokenTree.from_paths(paths, 6, votes)
    assert tree.confidence is not None
    again = TokenTree.concat([tree]).merged(tree.confidence, 6)
    assert torch.equal(again.tokens, tree.tokens) and torch.equal(again.parents, tree.parents)


def test_the_trunk_is_the_path_with_the_most_expected_tokens() -> None:
    for seed in range(20):
        paths, votes = votes_of((3, 5, 5), seed)
        tree = TokenTree.from_paths(paths, 12, votes)
        best = tree.best_chain()
        assert best.is_chain
        for row in range(3):
            confidence = nodes_of(tree, row)
            worth = {
                text: sum(confidence[text[:size]] for size in range(2, len(text) + 1))
                for text in confidence
            }
            said = tuple(token for token in best.tokens[row].tolist() if token != ABSENT)
            assert worth.get(said, 0.0) == pytest.approx(max(worth.values(), default=0.0))
            assert (best.tokens[row, len(said) :] == ABSENT).all()


def test_the_text_of_a_node_is_its_path() -> None:
    shape = TreeShape.from_digits(["0", "1", "00", "10", "11", "110"])
    tree = TokenTree.shaped(torch.arange(10, 17)[None], shape)
    texts = [[token for token in text if token != NO_TOKEN] for text in tree.texts[0].tolist()]
    assert texts == [
        [10], [10, 11], [10, 12], [10, 11, 13], [10, 12, 14], [10, 12, 15], [10, 12, 15, 16]
    ]
    assert torch.equal(tree.same_text[0], torch.eye(7, dtype=torch.bool))


def sharing(rows: int, seed: int) -> TokenTree:
    """A ragged tree per row, some with equal odds, of a shape."""
    dice = torch.Generator().manual_seed(seed)
    shape = TreeShape.branching((3, 2, 2))
    nodes = len(shape)
    tokens, confidence = torch.randint(3, (rows, nodes), generator=dice), torch.ones(rows, nodes)
    steps = torch.rand(rows, nodes, generator=dice).mul(4).ceil() / 4
    for node, parent in enumerate(shape.parents[1:], start=1):
        gone = (tokens[:, parent] == ABSENT) | (torch.rand(rows, generator=dice) < 0.2)
        tokens[:, node] = torch.where(gone, ABSENT, tokens[:, node])
        confidence[:, node] = torch.where(gone, 0, confidence[:, parent] * steps[:, node])
    return TokenTree.shaped(tokens, shape, confidence=confidence)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_share_what_may_be_drafted(rows: int) -> None:
    """Of all rows together the likeliest are kept, whole paths, and each says with how many it
    would be."""
    for seed in range(20):
        tree = sharing(rows, seed)
        assert tree.confidence is not None
        drafted = tree.present[:, 1:]
        falling = sorted(tree.confidence[:, 1:][drafted].tolist(), reverse=True)
        for nodes in (1, 3, 8, 30):
            kept = tree.within_budget(nodes)
            assert kept.confidence is not None and kept.budget_rank is not None
            there = kept.present[:, 1:]
            assert (
                sorted(kept.confidence[:, 1:][there].tolist(), reverse=True)
                == falling[: nodes * rows]
            )
            assert sorted(kept.budget_rank[:, 1:][there].tolist()) == [
                at // rows + 1 for at in range(int(there.sum()))
            ]
            assert (kept.present.gather(1, kept.parents.clamp(min=0)) | ~kept.present).all()
            # no wider than it must be
            assert not kept.tokens.shape[1] > 1 or there[:, -1].any()
            fewer = tree.within_budget(max(1, nodes - 1))
            wanted = torch.where(kept.budget_rank <= max(1, nodes - 1), kept.tokens, ABSENT)
            assert torch.equal(fewer.tokens, wanted[:, : fewer.tokens.shape[1]])
            plain = TokenTree(kept.tokens, kept.parents, kept.depth_limit)
            assert torch.equal(kept.depths, plain.depths) and torch.equal(
                kept.ancestors, plain.ancestors
            )


def test_a_tree_that_tells_no_odds_is_shared_as_it_is() -> None:
    tree = TokenTree.chain(torch.tensor([[7, 1, 2], [7, 3, ABSENT]]))
    assert tree.within_budget(1) is tree
