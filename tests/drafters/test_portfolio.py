"""A portfolio: what its members propose, each believed as far as it was right."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import Oracle, Watch, commit_of, drafted, medusa_head, per_round, texts
from tiny import CPU, model, prompts, sampler_of, target

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.medusa import Medusa
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.native.cpu_ops import CpuOps

pytestmark = pytest.mark.usefixtures("lookup")


class Says(Drafter):
    """Always the same paths after the root, with confidence or without."""

    name = "says"
    max_draft_tokens = 4

    def __init__(self, paths: list[list[int]], confidence: Sequence[float] | None = None) -> None:
        self.paths, self.confidence = paths, confidence
        self.told: list[Commit] = []
        self.asked: list[Frontier] = []

    def observe(self, commit: Commit) -> None:
        self.told.append(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        self.asked.append(frontier)
        root = frontier.prefix.root[:, None, None]
        paths = torch.tensor(self.paths).expand(len(root), -1, -1)
        paths = torch.cat([root.expand(-1, paths.shape[1], 1), paths], -1)
        if self.confidence is None:
            return TokenTree.from_paths(paths, frontier.max_draft_tokens + 1)
        steps = torch.tensor(self.confidence)[:, None].expand(-1, paths.shape[2] - 1)
        votes = torch.cat([torch.ones(len(self.confidence), 1), steps.cumprod(-1)], -1)
        return TokenTree.from_paths(paths, frontier.max_draft_tokens + 1, votes.expand_as(paths))


class Row:
    """One row without a target: its text goes on as the test says."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.tokens, self.size = drafter, torch.zeros(1, 200, dtype=torch.int64), 3
        drafter.start(1, 200, CPU)
        drafter.observe(commit_of([0], [[1, 2]]))
        self.tokens[0, :3] = torch.tensor([1, 2, 3])

    def round(self, truth: Sequence[int], budget: int = 4) -> dict[tuple[int, ...], float]:
        """What the drafter proposes, with its confidence; then the text continues with `truth`."""
        prefix = Prefix(self.tokens.clone(), torch.tensor([self.size - 1]))
        tree = self.drafter.propose(Frontier(prefix, sampler_of(Sampling()), budget))
        committed = [int(self.tokens[0, self.size - 1]), *truth[:-1]]
        self.drafter.observe(commit_of([0], [committed]))
        self.tokens[0, self.size : self.size + len(truth)] = torch.tensor(truth)
        self.size += len(truth)
        return drafted(tree)


def test_proposals_are_merged_by_confidence() -> None:
    """At first each member's confidence counts: the likeliest of all, with the best of theirs."""
    row = Row(Portfolio([Says([[5, 6], [7, 8]], [0.5, 0.4]), Says([[5, 9], [4, 4]], [0.6, 0.1])]))
    assert row.round([1]) == pytest.approx({(5,): 0.6, (7,): 0.4, (5, 9): 0.36, (5, 6): 0.25})


def test_trees_say_how_deep_they_are() -> None:
    """Not how deep they might have been: noise is made for so many tokens."""
    row = Row(Portfolio([PromptLookup(), SuffixDrafter(500), TokenRecycling(50)]))
    prefix = Prefix(torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2] + [0] * 9]), torch.tensor([7]))
    tree = row.drafter.propose(Frontier(prefix, sampler_of(Sampling()), 8))
    assert tree.depth_limit >= int(tree.depths.max()) > 0
    if CPU.library is not None and CpuOps.run is not Ops.run:   # kernels
        few = row.drafter.propose(Frontier(prefix, sampler_of(Sampling()), 3))
        assert few.depth_limit == int(few.depths.max()) < few.tokens.shape[1] - 1


def test_drafters_that_have_run_can_be_copied() -> None:
    """The copy has its own memory, and no address of the original's."""
    drafter = Portfolio([PromptLookup(), SuffixDrafter(500), TokenRecycling(50)])
    engine = Engine(target(), drafter, budget=4)
    wanted = engine.generate(prompts(1, seed=3), max_new_tokens=20)[0].tokens
    copied = copy.deepcopy(drafter)
    index = drafter.members[1]._indexes[torch.device("cpu")]
    before = index.counts.clone()
    again = Engine(target(), copied, budget=4).generate(prompts(1, seed=3), max_new_tokens=20)
    assert again[0].tokens == wanted and torch.equal(index.counts, before)


def test_nodes_are_attributed_to_the_first_member_that_proposed_them() -> None:
    first, second = Says([[5, 6], [7, 8]], [0.5, 0.4]), Says([[5, 9], [7, 8]], [0.6, 0.4])
    first.name = "first"
    portfolio = Portfolio([first, second])
    row = Row(portfolio)
    prefix = Prefix(row.tokens, torch.tensor([2]))
    tree = portfolio.propose(Frontier(prefix, sampler_of(Sampling()), 5))
    out = dict(zip(drafted(tree), portfolio.drafted_by(tree)[0][1:], strict=True))
    assert out == {(5,): "first", (7,): "first", (5, 9): "says", (5, 6): "first", (7, 8): "first"}


def test_correct_members_gain_weight_even_if_their_nodes_were_cut() -> None:
    """An overconfident member fills the tree; the right one is compared too, and takes over."""
    row = Row(Portfolio([Says([[5, 5], [6, 6]], [0.9, 0.85]), Says([[7, 8], [9, 9]], [0.3, 0.2])]))
    first = row.round([7, 8, 3], budget=2)
    assert set(first) == {(5,), (6,)}, "what is right is not read"
    for _ in range(6):
        last = row.round([7, 8, 3], budget=2)
    assert set(last) == {(7,), (7, 8)}
    assert last[(7,)] > 0.6 > 0.3 > row.round([1])[(5,)]


@pytest.mark.parametrize(("truth", "right"), [([7], 0), ([5], 0), ([5, 1], 0), ([5, 6], 1)])
def test_nodes_with_unknown_outcomes_are_not_scored(truth: list[int], right: int) -> None:
    """Neither a node deeper than what was committed, nor one after a wrong node."""
    portfolio = Portfolio([Says([[5, 6]], [0.9])])
    row = Row(portfolio)
    row.round(truth)
    row.round([1])
    counts = portfolio._counts[row.tokens.device].sum(0)
    judged = counts - torch.tensor([float(truth[0] == 5), 1.0])     # of the first
    assert judged.tolist() == pytest.approx([right, float(len(truth) == 2)], abs=0.1)


def test_members_get_the_hidden_states_they_need_and_do_not_sample() -> None:
    members: list[Says] = []
    for layers in ((), (1,), (-1, 0), (-1, 0, 1)):
        members.append(Says([[5]], [0.5]))
        members[-1].hidden_layers = layers
    for drafter in (Portfolio(members[:3]), members[3]):
        engine = Engine(target(), drafter, acceptance="rejection", budget=2)
        engine.generate(prompts(2, seed=3), max_new_tokens=5)
    whole = members[3]
    assert len(whole.told) > 3 and all(frontier.needs_draft_probs for frontier in whole.asked)
    for member in members[:3]:
        assert not any(frontier.needs_draft_probs for frontier in member.asked)
        for told, all_told in zip(member.told, whole.told, strict=True):
            assert (told.hidden is None) == (not member.hidden_layers)
            if told.hidden is not None and all_told.hidden is not None:
                columns = [whole.hidden_layers.index(layer) for layer in member.hidden_layers]
                wanted = all_told.hidden[:, :1, columns]
                torch.testing.assert_close(told.hidden[:, :1], wanted)


def test_portfolios_combine_their_members_requirements() -> None:
    both = Portfolio([TokenRecycling(), Medusa(medusa_head(), target())])
    assert both.top_k_needed == TokenRecycling.top_k_needed and both.hidden_layers == (-1,)
    assert both.deepest == max(TokenRecycling.deepest or 0, medusa_head().config.num_heads)
    assert Portfolio([PromptLookup(), TokenRecycling()]).deepest is None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)],
                         ids=["greedy", "sampled"])
def test_portfolios_accept_nearly_as_much_as_their_best_member(sampling: Sampling) -> None:
    """Twice the same requests, so that all have learnt: the best is not drowned by the others, nor
    by one that errs always."""
    asked, options = prompts(4, seed=3), {"max_new_tokens": 40, "sampling": sampling}
    wanted = [completion.tokens for completion in Engine(target()).generate(asked, **options)]
    known = {tuple(prompt): answer for prompt, answer in zip(asked, wanted, strict=True)}
    ways: dict[str, Drafter] = {
        "lookup": PromptLookup(), "suffix": SuffixDrafter(), "recycling": TokenRecycling(),
        "all": Portfolio([Oracle(known, wrong=True), PromptLookup(), SuffixDrafter(),
                          TokenRecycling()]),
    }  # fmt: skip
    rates = {}
    for name, drafter in ways.items():
        engine = Engine(target(), Watch(drafter), budget=6)
        for _ in range(2):
            done = engine.generate(asked, **options, batch_size=3)
            assert [completion.tokens for completion in done] == wanted
        rates[name] = per_round(done)
    assert rates["all"] > 0.8 * max(rates.values()) > 2


def test_drafters_that_build_on_their_own_tree_and_empty_lists_are_refused() -> None:
    with pytest.raises(DrafterMismatch, match="alone"):
        Portfolio([PromptLookup(), DraftModel(target(), 40)])
    with pytest.raises(BadInput, match="at least one drafter"):
        Portfolio([])
    done = Engine(target(), Portfolio([Plain()]), budget=3).generate(prompts(2), max_new_tokens=8)
    assert all(completion.stats.accepted == 0 for completion in done)


def test_the_default_drafter_of_any_model_is_a_portfolio() -> None:
    engine, names = load(model()), ["prompt-lookup", "suffix", "recycling"]
    assert isinstance(engine.drafter, Portfolio)
    assert [member.name for member in engine.drafter.members] == names
    for name in [*names, "portfolio"]:
        assert load(model(), drafter=name).drafter.name == name
    wanted = texts(Engine(target()), prompts(3), max_new_tokens=20)
    assert texts(engine, prompts(3), max_new_tokens=20) == wanted


def test_every_member_learns_whose_text_it_is() -> None:
    """Whichever of them remembers texts, another owner is drafted nothing of it."""
    for members in ((SuffixDrafter(), Says([[9]])), (Says([[9]]), SuffixDrafter())):
        drafts = list[set[tuple[int, ...]]]()
        portfolio = Portfolio(members)
        for owner, text in ((1, [3, 4, 5, 6, 7]), (2, [3, 4]), (1, [3, 4])):
            portfolio.start(1, 64, CPU)
            portfolio.assign_owners([0], [owner])
            portfolio.observe(commit_of([0], [text[:-1]]))
            prefix = Prefix(torch.tensor([text]), torch.tensor([len(text) - 1]))
            tree = portfolio.propose(Frontier(prefix, sampler_of(Sampling()), 4))
            portfolio.observe(commit_of([0], [text[-1:]]))
            drafts.append(set(drafted(tree)))
        assert drafts[1] == {(9,)} and (5,) in drafts[2]


def test_drafters_are_merged_by_their_names() -> None:
    """Heads among them; a portfolio's members are the whole's; a draft model cannot be one."""
    mine = load("demo", drafter="none")
    for name, members in {"suffix+recycling": ["suffix", "recycling"],
                          "medusa+portfolio": ["medusa", "prompt-lookup", "suffix",
                                               "recycling"]}.items():
        engine = load("demo", drafter=name)
        assert isinstance(engine.drafter, Portfolio) and [
            member.name for member in engine.drafter.members
        ] == members
        text = [writer.generate("The cat and the", max_new_tokens=16)[0].text
                for writer in (mine, engine)]
        assert text[0] == text[1]
    for name, why in {
        "medusa+lookup": "drafter was 'lookup'; did you mean prompt-lookup",
        "suffix+demo-draft": "demo-draft is a draft model, which reads its own drafts",
        "suffix+": "drafter was ''. Choose none", "suffix+self-int8": "drafter was 'self-int8'"
    }.items():
        with pytest.raises(BadInput, match=why):
            load("demo", drafter=name)


def test_every_member_gets_its_hidden_layers_in_its_order() -> None:
    """A head reads them by their places, whatever layers the others want."""
    first, second, third = (Says([[5]]) for _ in range(3))
    first.hidden_layers, second.hidden_layers = (7, 2), (3,)
    portfolio = Portfolio([first, second, third])
    portfolio.start(1, 200, CPU)
    layers = torch.tensor(portfolio.hidden_layers, dtype=torch.float32)
    commit = commit_of([0], [[1, 2]])
    hidden = layers[:, None].expand(1, 2, -1, 4).contiguous()           # each holds its number
    portfolio.observe(replace(commit, hidden=hidden))
    for member, expected in ((first, [7, 2]), (second, [3])):
        (seen,) = (told.hidden for told in member.told)
        assert seen is not None and seen[0, 0, :, 0].tolist() == expected
    assert third.told[0].hidden is None
