"""No token is read twice, no broken tree is read, and budgets are told what came of a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import Counted, admit, decoder, running
from drafting import DRAFTERS, LEARNERS, Fading, commit_of
from tiny import CPU, prompts, target

from draftproof.core.acceptance import RULES
from draftproof.core.messages import Accepted, Commit, Frontier, Successors
from draftproof.core.ops import TORCH, Ops
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.batch import Batch, _joined
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import DrafterMismatch
from draftproof.native.cpu_ops import CpuOps
from draftproof.requests.stats import Round


def test_the_target_reads_each_kept_token_exactly_once() -> None:
    """Every read starts where the committed text ends, also with several samples."""
    counting = Counted(target())
    item = decoder(PromptLookup(), ours=counting)
    prompt = list(range(2, 14))
    admit(item, [running(prompt, limit=12, temperature=1.0, sample=sample) for sample in range(3)])
    assert [tokens.tolist() for tokens, _ in counting.reads] == [[prompt]]
    while item.running:
        before = item.batch.view.lengths.clone()
        counting.reads.clear()
        item.step()
        ((_, starts),) = counting.reads
        assert starts.equal(before)


def test_a_draft_reads_each_prompt_token_once() -> None:
    """What its cache has is not read again; after rounds without a draft it catches up once."""
    counting = Counted(target(seed=1))
    drafter = DraftModel(counting, 40)
    batched = decoder(drafter, rows=2, budget=Fading(5))
    admit(batched, [running(list(range(2, 30)), limit=40)])
    covered = 0
    while batched.running:
        counting.reads.clear()
        batched.step()
        for _tokens, lengths in counting.reads:
            assert int(lengths[0]) >= covered - 1, "read again"
            covered = max(covered, int(lengths[0]))
        if drafter.cache is not None and batched.running:
            assert int(drafter.cache.lengths[0]) <= int(batched.batch.cache.lengths[0])


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("plain", "guess")])
def test_joined_commits_of_plain_rounds_give_the_same_drafts(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows, unless drafters learn from the others in the order in which they write."""
    told, tell = list[int](), Batch.notify_drafter

    def drafts() -> list[list[list[int]]]:
        inner, items = DRAFTERS[drafter](target()), list[TokenTree]()

        class Heard(type(inner)):  # type: ignore[misc]
            def propose(self, frontier: Frontier) -> TokenTree:
                items.append(super().propose(frontier))
                return items[-1]

            def observe(self, commit: Commit) -> None:
                told.append(commit.tokens.shape[1])
                super().observe(commit)

        inner.__class__ = Heard
        batched = decoder(inner, budget=Fading(3))
        for prompt in prompts(1 if drafter in LEARNERS else 3, seed=4):
            admit(batched, [running(prompt, limit=25)])
            for _ in range(3):                          # rows join before and after plain rounds
                batched.step()
        told.clear()
        while batched.running:
            batched.step()
        return [[tree.tokens.tolist(), tree.parents.tolist()] for tree in items]

    together = drafts()
    assert max(told, default=2) >= 2
    monkeypatch.setattr(Batch, "notify_drafter",
                        lambda self, commit, plain: tell(self, commit, False))
    assert together and drafts() == together


def _broken(frontier: Frontier, kind: str) -> TokenTree:
    """A tree with one thing wrong."""
    tokens = frontier.prefix.root[:, None].repeat(1, 4)
    tree = TokenTree.shaped(tokens, TreeShape.branching((1, 2)))
    parents = tree.parents.clone()
    if kind in ("parent after", "parent beyond", "two roots"):
        parents[:, 2] = {"parent after": 3, "parent beyond": 1 << 40, "two roots": -1}[kind]
    elif kind in ("unknown token", "negative token"):
        tokens[:, 3] = 1 << 40 if kind == "unknown token" else -5
    tokens = {"int32": tokens.int(), "more rows": tokens.repeat(2, 1)}.get(kind, tokens)
    return TokenTree(tokens, parents, 1 if kind == "deeper than said" else 2)


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["kernels", "operators"])
@pytest.mark.parametrize("kind", [
    "parent after", "parent beyond", "two roots", "unknown token", "negative token", "int32",
    "more rows", "deeper than said"])  # fmt: skip
def test_invalid_trees_are_refused(kind: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Drafter):
        def propose(self, frontier: Frontier) -> TokenTree:
            return _broken(frontier, kind)

    monkeypatch.setattr(CpuOps, "run", ops.run)
    with pytest.raises(DrafterMismatch, match="proposed no tree"):
        Engine(target(), Broken(), budget=5).generate([[1, 2], [3]], max_new_tokens=4)


def test_drafters_that_exceed_their_budget_are_refused() -> None:
    class Greedy(Drafter):
        name = "greedy"

        def propose(self, frontier: Frontier) -> TokenTree:
            root = frontier.prefix.root[:, None]
            return TokenTree.chain(root.repeat(1, frontier.max_draft_tokens + 3))

    engine = Engine(target(), Greedy(), budget=2)
    with pytest.raises(DrafterMismatch, match="greedy proposed 4 nodes, 2 were allowed"):
        engine.generate([[1, 2, 3]], max_new_tokens=8)


@pytest.mark.parametrize("closed", [False, True], ids=["at hand", "closed"])
@pytest.mark.parametrize("drafter",
                         ["medusa, pairs", "redrafter", "target itself", "medusa, fixed tree"])
def test_rounds_report_the_accepted_nodes(drafter: str, closed: bool) -> None:
    """By number where nodes are ranked, so that a budget can tell what fewer would have given."""
    items, told = list[Accepted](), list[Round]()
    batched = decoder(DRAFTERS[drafter](target()), budget=6, shapes=ShapePolicy(closed=closed))
    batched.budget.record = told.append

    def noted(tree: TokenTree, logits: torch.Tensor, frontier: Frontier) -> Accepted:
        items.append(RULES["match"].accept(tree, logits, frontier))
        return items[-1]

    batched.rule = batched.rule._replace(accept=noted)
    for prompt in prompts(3, seed=4):
        admit(batched, [running(prompt, limit=20, logprobs=closed)])
    accepted = 0
    while batched.running:
        rows, before = list(batched.running), [row.stats.accepted for row in batched.running]
        batched.step()
        nodes = [node for row in range(len(rows))
                 for node in items[-1].nodes[row, 1 : items[-1].count[row]].tolist()]
        assert told[-1].accepted == nodes and all(1 <= node <= 6 for node in nodes)
        counted = sum(row.stats.accepted for row in rows) - sum(before)
        assert len(nodes) >= counted  # what an end cut off was accepted as well
        accepted += counted
    assert accepted > 0


def test_plain_rounds_are_joined_in_the_order_of_the_text() -> None:
    commits = list[Commit]()
    for number in range(4):
        commit = commit_of([0, 1], [[number], [10 + number]], torch.full((2, 1, 1, 3), number))
        top = commit.tokens[..., None].expand(-1, -1, 2)
        tree = TokenTree.chain(commit.tokens)
        commits.append(replace(commit, successors=Successors(tree, top, top.float())))
    joined, texts = _joined(commits), torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])
    assert torch.equal(joined.tokens, texts) and joined.count.tolist() == [4, 4]
    assert joined.hidden is not None and joined.hidden[:, :, 0, 0].tolist() == [[0, 1, 2, 3]] * 2
    assert joined.successors is not None and torch.equal(joined.successors.tokens[..., 1], texts)
    assert torch.equal(joined.successors.logits[..., 0], texts.float())
