"""What a round's messages hold."""

import pytest
import torch

from draftproof.core.messages import Accepted, Commit, Reading
from draftproof.core.tree import TokenTree, TreeShape


@pytest.mark.parametrize("rows", [1, 2])
def test_a_commit_holds_the_tokens_and_hidden_states_of_the_nodes_that_stand(rows: int) -> None:
    """One row alone is read out otherwise than several."""
    tree = TokenTree.shaped(
        torch.arange(10, 10 + 5 * rows).view(rows, 5),
        TreeShape.from_digits(["0", "1", "10", "100"])
    )
    hidden = torch.randn(rows, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    nodes = torch.tensor([[0, 2, 3, 4], [0, 1, 2, 3]])[:rows]
    accepted = Accepted(nodes, torch.tensor([4, 2])[:rows], torch.tensor([7, 8])[:rows])
    commit = Commit.of(range(rows), tree, Reading(torch.zeros(rows, 5, 40), hidden), accepted)
    assert commit.hidden is not None and commit.hidden.shape == (rows, 4, 2, 3)
    for row in range(rows):
        assert torch.equal(commit.tokens[row], tree.tokens[row, nodes[row]])
        assert torch.equal(commit.hidden[row], hidden[row, nodes[row]])
