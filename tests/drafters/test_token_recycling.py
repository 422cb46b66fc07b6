"""Token Recycling: drafts what the target found likely, at rejected nodes too; pairs first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafting import commit_of, drafted, proposed
from tiny import CPU, VOCAB, prompts, target

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.token_recycling import DEPTH, TokenRecycling
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.requests.stats import Round, State

Best = dict[int, float]
pytestmark = pytest.mark.usefixtures("lookup")


def read(tree: TokenTree, path: Sequence[int], best: dict[int, Best], row: int = 0) -> Commit:
    """A tree was read in one row and `path` accepted; `best` tokens after each node."""
    nodes = tree.tokens.shape[1]
    width = max(map(len, best.values()))
    tokens = torch.zeros(1, nodes, width, dtype=torch.int64)
    logits = torch.full(tokens.shape, -30.0)
    for node, successors in best.items():
        for rank, (token, confidence) in enumerate(successors.items()):
            tokens[0, node, rank], logits[0, node, rank] = token, torch.tensor(confidence).log()
    at = torch.tensor([path])
    came, count = tree.tokens.gather(1, at), torch.tensor([len(path)])
    return Commit([row], came, at, count, successors=Successors(tree, tokens, logits))


def started(memory: int = 1 << 12) -> TokenRecycling:
    drafter = TokenRecycling(memory)
    drafter.start(4, 64, CPU)
    drafter.observe(commit_of([0], [[30]]))
    return drafter


def even(*tokens: int) -> Best:
    """So many tokens, each half as likely as the one before it, the last two alike."""
    confidence = [2.0 ** -(rank + 1) for rank in range(len(tokens))]
    confidence[-1] *= 2
    return dict(zip(tokens, confidence, strict=True))


def test_likely_successors_are_drafted_with_path_probabilities() -> None:
    """5 before 6 or 7, 6 before 8 or 9: the tree is the product, the likeliest first."""
    drafter = started()
    tree = TokenTree.chain(torch.tensor([[5, 6]]))
    drafter.observe(read(tree, [0], {0: {6: 0.6, 7: 0.4}, 1: {8: 0.9, 9: 0.1}}))
    drafter.observe(commit_of([0], [[31]]))
    drafts = drafted(proposed(drafter, [[30, 5, 31, 5]], budget=4))
    assert drafts == pytest.approx({(6,): 0.6, (6, 8): 0.54, (7,): 0.4, (6, 9): 0.06}, rel=1e-4)
    assert list(drafts) == [(6,), (6, 8), (7,), (6, 9)]


def test_rejected_nodes_teach_and_absent_ones_do_not() -> None:
    drafter = started()
    tree = TokenTree.shaped(torch.tensor([[5, 11, 12, ABSENT]]), TreeShape.branching((3,)))
    best = {node: even(11 + 2 * node, 12 + 2 * node) for node in range(4)}
    drafter.observe(read(tree, [0, 1], best))
    assert (15,) in drafted(proposed(drafter, [[30, 5, 11, 12]])), "12 was rejected, and read"
    for strange in range(32):
        assert (17,) not in drafted(proposed(drafter, [[30, 5, 11, strange]]))


def test_bigrams_precede_unigrams_and_newer_entries_older_ones() -> None:
    drafter = started()
    for first, last in ((5, 8), (4, 20)):
        tree = TokenTree.chain(torch.tensor([[first, 6]]))
        drafter.observe(read(tree, [0, 1], {0: even(6, 7), 1: even(last, last + 1)}))
    newest = drafted(proposed(drafter, [[30, 5, 6, 4, 6]]))
    assert (20,) in newest, "the last token is 6, the newest of it"
    drafter.observe(commit_of([0], [[5]]))
    alone = proposed(drafter, [[30, 5, 6, 4, 6, 5, 6]])
    assert (8,) in drafted(alone) and (20,) not in drafted(alone), "after 5, 6 came 8"
    drafter.observe(commit_of([0], [[6]]))
    drafter.observe(commit_of([0], [[3]]))
    newest = drafted(proposed(drafter, [[30, 5, 6, 4, 6, 5, 6, 3, 6]]))
    assert (20,) in newest, "after 3, 6 nothing came: 6 alone"


def test_texts_of_another_owner_teach_nothing() -> None:
    drafter = TokenRecycling(1 << 12)
    drafter.start(4, 64, CPU)
    drafter.assign_owners([0, 1], [1 << 61 | 91735, -(1 << 60) - 1573951923])
    for row in range(2):
        drafter.observe(commit_of([row], [[30]]))
        best = {0: even(6 + 10 * row, 7 + 10 * row)}
        drafter.observe(read(TokenTree.chain(torch.tensor([[5]])), [0], best, row))
    drafter.observe(commit_of([0, 1], [[30], [30]]))
    tree = proposed(drafter, [[30, 5, 30, 5], [30, 5, 30, 5]])
    for row, first in enumerate((6, 16)):
        assert set(tree.tokens[row][tree.present[row]].tolist()) == {5, first, first + 1}
    drafter.select([1, 0])
    tree = proposed(drafter, [[30, 5, 30, 5], [30, 5, 30, 5]])
    assert 16 in tree.tokens[0] and 6 in tree.tokens[1]


def test_the_later_of_two_reads_of_a_token_is_kept() -> None:
    """In both rows, in one commit: never the tokens of one with the confidence of another."""
    drafter = started()
    tree = TokenTree.chain(torch.tensor([[6, 6, 6]]))
    drafter.observe(read(tree, [0], {0: even(7, 8), 1: even(9, 10), 2: even(11, 12)}))
    drafts = drafted(proposed(drafter, [[30, 6, 1, 6]]))
    assert {path[0] for path in drafts} == {11, 12}


def test_a_small_memory_forgets_but_does_not_mix_entries() -> None:
    """Two slots, many tokens: whatever is proposed came out after that very token."""
    dice = torch.Generator().manual_seed(0)
    drafter = started(memory=2)
    known: dict[int, set[int]] = {}
    for _ in range(60):
        tokens = torch.randint(30, (1, 4), generator=dice)
        best = {node: even(*torch.randperm(30, generator=dice)[:3].tolist()) for node in range(4)}
        drafter.observe(read(TokenTree.chain(tokens), [0, 1], best))
        for node, token in enumerate(tokens[0].tolist()):
            known.setdefault(token, set()).update(best[node])
        root = int(torch.randint(30, (), generator=dice))
        tree = proposed(drafter, [[30, root]])
        children = tree.tokens[0][(tree.parents[0] == 0) & tree.present[0]].tolist()
        assert set(children) <= known.get(root, set()) and len(set(children)) == len(children)


class Ask(Drafter):
    """Writes down what it is told; drafts the root again and again, or nothing."""

    name = "ask"
    max_draft_tokens = 3

    def __init__(self, wants: int, draws: bool = True) -> None:
        self.top_k_needed, self.draws, self.commits = wants, draws, list[Commit]()

    def observe(self, commit: Commit) -> None:
        self.commits.append(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        ahead = frontier.max_draft_tokens if self.draws else 0
        return TokenTree.chain(frontier.prefix.root[:, None].repeat(1, 1 + ahead))


@pytest.mark.parametrize("wants", [0, 3, 1000])
def test_the_target_passes_top_tokens_to_drafters_that_need_them(wants: int) -> None:
    """The best after every node read in rounds, not in prompts; nothing to who does not ask."""
    drafter, read = Ask(wants), 0
    done = Engine(target(), drafter, budget=3).generate(prompts(1, seed=1), max_new_tokens=12)[0]
    prompt, *rounds = drafter.commits
    assert prompt.successors is None and len(rounds) > 3
    for commit in rounds:
        assert (commit.successors is None) == (wants == 0)
        if (result := commit.successors) is not None:
            assert result.tokens.shape == (1, 4, min(wants, VOCAB))
            assert (result.logits.diff(dim=-1) <= 0).all()
            best = result.tokens[0, commit.nodes[0, : int(commit.count)], 0].tolist()
            assert best == done.tokens[read + 1 : read + 1 + len(best)]
            read += len(best)


class Third(Budget):
    """Drafts in each third round, and rests meanwhile."""

    max_draft_tokens = 3

    def choose(self, state: State) -> int:
        return 3

    def record(self, done: Round) -> None:
        self.cooldown = self.cooldown - 1 if self.cooldown else 2


def test_rounds_and_cooldowns_are_recorded_separately() -> None:
    """Plain rounds are told later; the target's best tokens are unknown while drafting rests."""
    drafter = Ask(3, draws=False)
    Engine(target(), drafter, budget=Third()).generate(prompts(1, seed=1), max_new_tokens=14)
    told = [(item.tokens.shape[1], item.successors is not None) for item in drafter.commits[1:]]
    assert told == [(1, True), (2, False)] * 4 + [(1, True)]


def test_it_keeps_to_its_depth() -> None:
    drafter = started()
    for _ in range(8):
        tree = TokenTree.chain(torch.tensor([[5]]))
        drafter.observe(read(tree, [0], {0: {5: 0.99, 6: 0.01}}))
    depths = proposed(drafter, [[30, *[5] * 9]], budget=30).depths
    assert int(depths.max()) == DEPTH == TokenRecycling.deepest


def test_successors_of_a_root_depend_on_the_previous_token() -> None:
    """Not by any token of the tree: its nodes come after the root."""
    drafter = started()
    for last, follows in ((3, 8), (4, 20)):
        drafter.observe(commit_of([0], [[last]]))
        tree = TokenTree.chain(torch.tensor([[5, 11, 12]]))
        best = {0: even(follows, follows + 1), 1: even(13, 14), 2: even(13, 14)}
        drafter.observe(read(tree, [0], best))
    for last, follows in ((3, 8), (4, 20)):
        drafter.observe(commit_of([0], [[last]]))
        drafts = drafted(proposed(drafter, [[30, last, 5]], budget=2))
        assert (follows,) in drafts, f"after {last}, 5 came {follows}"
