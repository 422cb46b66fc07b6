"""Enumeration: the engine writes exactly the reference distribution, and wrong rules are found."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import examinations, reference
from helpers.reference import distribution_of_run, next_law
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance
from draftproof.core.messages import Accepted
from draftproof.core.params import Sampling
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.verify import exact
from draftproof.verify.enumeration import Ask, Case, Outcomes, distance, enumerate_texts, table
from draftproof.verify.exact import EXACT, SEEN, SETUPS, cases, examine, prove_law, weighing

UNIFORM = [0.0, 0.0, 0.0]


@pytest.mark.parametrize("option", exact.OPTIONS)
def test_plain_decoding_writes_the_reference_distribution(option: str) -> None:
    """Every option with every way to end, held against plain Python that shares no code."""
    for number, (end, stops) in enumerate(exact.ENDS.items()):
        want = replace(exact.OPTIONS[option], **stops)
        ask = Ask(want, exact.PROMPTS[number % len(exact.PROMPTS)], 3)
        (law,) = enumerate_texts(Case(end, [ask], exact.TARGET)).laws
        assert distance(law, examinations.reference(Case(end, [ask], exact.TARGET))[0]) < EXACT, end


@pytest.mark.parametrize("part", range(4))
def test_drafts_change_nothing(part: int) -> None:
    """Rules, drafts, options, ends: a sample of `prove`'s cases, and all special ones."""
    for number, case in enumerate(cases(every=149)):
        if number % 4 == part:
            apart, worlds, wrong = examine(case)
            assert not wrong and apart < EXACT and worlds, f"{case.name}: {wrong}"


def test_every_rule_option_end_and_way_is_covered() -> None:
    names = " | ".join(case.name for case in cases())
    special = ("mixed batch", "as on a device", "drafts for itself", "1 tokens", "comes and goes")
    for word in (*RULES, *exact.OPTIONS, *filter(None, exact.ENDS), *SETUPS, *special):
        assert word in names


def test_the_section_tells_what_was_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    some = list(itertools.islice(cases(every=67), 60, 64))
    monkeypatch.setattr(exact, "cases", lambda rules, every: iter(some))
    section = prove_law(quick=True)
    assert section.passed, section.failures
    assert section.figures["max_total_variation"] < EXACT and section.figures["outcomes"] > 4
    assert all(seen > 10 * SEEN for seen in section.figures["controls"].values())
    monkeypatch.setitem(exact.CONTROLS, "nothing wrong", acceptance.accept_by_rejection)
    section = prove_law(quick=True)
    assert not section.passed and "blind" in section.failures[0]


@pytest.mark.parametrize("wrong", exact.CONTROLS.values())
def test_a_wrong_rule_fails_the_section(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    own = exact.cases
    monkeypatch.setattr(exact, "cases", lambda rules, every: itertools.islice(own(rules, every), 1))
    section = prove_law(quick=True, rules={"wrong": weighing(wrong)})
    assert not section.passed and section.failures[0].startswith("wrong: ")


@pytest.mark.parametrize("setup", ["chain", "tree of 3", "smaller draft", "lookup"])
def test_traversal_verification_is_not_accused(setup: str) -> None:
    """Leaf to root (Weng et al., 2505.12398), on chains and trees; what forgets to update is."""
    ask = Ask(Sampling(temperature=1.0))
    assert not examine(exact.case("", weighing(traversal), SETUPS[setup], ask))[2]
    if setup in ("tree of 3", "smaller draft"):
        stubborn = weighing(partial(traversal, update=False))
        assert examine(exact.case("", stubborn, SETUPS[setup], ask))[0] > SEEN


def traversal(tree: TokenTree, probs: Tensor, chance: Chance, update: bool = True) -> Accepted:
    """Every node is once a leaf, children before parents in the order drawn."""
    assert tree.draft_probs is not None
    rows, nodes = tree.tokens.shape
    row, parents = torch.arange(rows), tree.parents[0].tolist()
    children = [[node for node in range(nodes) if parents[node] == one] for one in range(nodes)]
    law, left = probs.clone(), torch.zeros_like(probs)              # P and Q behind every node
    for parent, own in enumerate(children):
        if own:
            first = tree.present[:, own[0], None]
            left[:, parent] = torch.where(first, tree.draft_probs[:, own[0]], 0)
    weight = torch.ones(rows, nodes, dtype=probs.dtype)                         # r
    stands_at = torch.full((rows,), -1)

    def descend(node: int) -> None:
        for child in children[node]:
            token = tree.tokens[:, child].clamp(min=0)
            there = tree.present[:, child] & (stands_at < 0)
            ratio = law[row, node, token] / left[row, node, token].clamp(min=1e-300)
            weight[:, child] = (weight[:, node] * ratio).clamp(max=1)
            descend(child)
            fell = there & (stands_at < 0)
            rest = (weight[:, node, None] * law[:, node] - left[:, node]).clamp(min=0)
            mass = rest.sum(-1)
            final = mass / (mass + 1 - weight[:, node]).clamp(min=1e-300)
            new = rest / mass.clamp(min=1e-300)[:, None]
            fell = fell & (mass > 0) if update else torch.zeros_like(fell)
            empty = there & (stands_at < 0) & (mass <= 0)
            weight[:, node] = torch.where(fell, final, torch.where(empty, 0.0, weight[:, node]))
            law[:, node] = torch.where(fell[:, None], new, law[:, node])
            without = left[:, node].scatter(1, token[:, None], 0.0)
            without = without / without.sum(-1, keepdim=True).clamp(min=1e-300)
            left[:, node] = torch.where(there[:, None], without, left[:, node])
        odds = torch.where((stands_at < 0) & tree.present[:, node], weight[:, node], 0.0)
        stood = chance.flip(odds, node) if node else stands_at < 0
        stands_at[:] = torch.where((stands_at < 0) & stood & tree.present[:, node], node, stands_at)

    descend(0)
    depth = tree.depths.gather(1, stands_at[:, None])[:, 0]
    return Accepted(tree.path_to(stands_at), depth + 1, chance.draw(law[row, stands_at], depth))


# The parts


def test_outcomes_are_everything_that_can_happen() -> None:
    """Two draws in turn, the second by the first: each path once, with its probability."""
    second = {0: [0.5, 0.5, 0.0], 1: [0.0, 0.25, 0.75]}
    plans, seen = torch.full((1, 4), -1), {}
    while len(plans):
        outcomes, worlds = Outcomes(plans), torch.arange(len(plans))
        first = outcomes.take(worlds, torch.tensor([[0.4, 0.6]]).double().expand(len(plans), -1))
        laws = torch.tensor([second[int(one)] for one in first]).double()
        twice = torch.cat([worlds, worlds])                     # a copy of a row draws as it does
        then = outcomes.take(twice, torch.cat([laws, laws]))
        assert torch.equal(then[: len(plans)], then[len(plans) :])
        for one, other, probability in zip(first, then, outcomes.probs.tolist(), strict=False):
            seen[int(one), int(other)] = probability
        plans = torch.cat([plan for _, plan in outcomes.others])
    assert seen == pytest.approx({(0, 0): 0.2, (0, 1): 0.2, (1, 1): 0.15, (1, 2): 0.45})


def test_the_table_sees_its_text() -> None:
    scores = table(3, 1).model.scores
    assert scores((1, 2)) != scores((2, 1)) != scores((2,)) and exact.plain_error() < EXACT


def test_the_reference_knows_nothing_of_draftproof() -> None:
    source = Path(reference.__file__).read_text()
    assert "import draftproof" not in source and "from draftproof" not in source


@pytest.mark.parametrize(
    ("want", "text", "law"),
    [
        (Sampling(), [0], [1, 0, 0]),
        (Sampling(temperature=1.0), [0], [1 / 3] * 3),
        (Sampling(temperature=1.0, no_repeat_ngram=2), [0, 1, 0], [0.5, 0, 0.5]),
        (Sampling(temperature=1.0, banned_words=((2,), (0, 1))), [0], [1, 0, 0]),
        (Sampling(temperature=1.0, stop_tokens=(1,), min_new_tokens=1), [0], [0.5, 0, 0.5]),
        (Sampling(temperature=1.0, logit_bias={2: float("-inf")}), [0], [0.5, 0.5, 0]),
    ],
)
def test_reference_laws(want: Sampling, text: list[int], law: list[float]) -> None:
    assert next_law(UNIFORM, text, 1, want) == pytest.approx(law)


def test_reference_filters_and_ends() -> None:
    def law(**wants: float) -> list[float]:
        want = Sampling(temperature=1.0, **wants)                   # type: ignore[arg-type]
        return next_law([2.0, 1.0, 0.0], [0], 1, want)

    assert law() == pytest.approx([0.6652, 0.2447, 0.0900], abs=1e-4)
    assert law(top_p=0.7) == law(min_p=0.2) == pytest.approx([0.7311, 0.2689, 0], abs=1e-4)
    assert law(top_k=1) == [1, 0, 0]
    want = Sampling(temperature=1.0, stop=("ab",), stop_tokens=(0,))
    ends = distribution_of_run(lambda _: UNIFORM, (0,), want, 2)
    assert ends[(0,), "a", "stop"] == pytest.approx(1 / 3)
    assert ends[(1, 1), "bb", "length"] == pytest.approx(1 / 9)
    assert sum(ends.values()) == pytest.approx(1)


def test_a_rule_that_accepts_absent_nodes_is_found() -> None:
    def greedy_for_nodes(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
        accepted = acceptance.accept_by_rejection(tree, probs, chance)
        last = accepted.nodes.gather(1, accepted.count[:, None] - 1)[:, 0]
        last = torch.where(tree.tokens[:, -1] == ABSENT, tree.tokens.shape[1] - 1, last)
        count = tree.depths.gather(1, last[:, None])[:, 0] + 1
        return Accepted(tree.path_to(last), count, accepted.root)

    ask = Ask(Sampling(temperature=1.0))
    case = exact.case("", weighing(greedy_for_nodes), SETUPS["smaller draft"], ask)
    assert examine(case)[0] > SEEN
