"""Enumeration: the installed decoder follows plain decoding exactly, wrong rules are found, unusual ones are not accused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance
from draftproof.core.messages import Accepted
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.verify import exact, reference
from draftproof.verify.exact import CONTROLS, EXACT, SEEN, Weigher, prove_law, weighing, whole_cases
from draftproof.verify.exact_decoder import Outcomes, Table, examine
from draftproof.verify.reference import Wanted, Written, distribution_of_run, next_law

UNIFORM = [0.0, 0.0, 0.0]


def test_the_quick_section_passes() -> None:
    section = prove_law(quick=True)
    assert section.passed, section.failures
    assert section.figures["max_total_variation"] < EXACT and section.figures["outcomes"] > 5000
    assert all(seen > SEEN for seen in section.figures["controls"].values())
    assert f"{section.figures['cases']} cases" in section.verdict


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_are_far_from_the_law(control: str) -> None:
    assert CONTROLS[control]() > 10 * SEEN


def test_a_blind_examination_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loosening what a control must show, or a control that shows nothing, breaks the section."""
    monkeypatch.setitem(exact.CONTROLS, "nothing wrong", lambda: 0.0)
    section = prove_law(quick=True, rules={"match": RULES["match"]}, weighers={})
    assert not section.passed and "blind" in section.failures[0]


@pytest.mark.parametrize("wrong", [exact.boastful, exact.forgetful])
def test_a_wrong_rule_is_found_in_tables_and_in_the_decoder(wrong) -> None:
    tables = prove_law(quick=True, rules={}, weighers={"wrong": Weigher(wrong)})
    whole = prove_law(glance=True, rules={"wrong": weighing(wrong)}, weighers={})
    assert not tables.passed and not whole.passed
    assert whole.failures[0].startswith("wrong: ")


def test_traversal_verification_is_not_accused() -> None:
    """Leaf to root (Weng et al., 2505.12398), on chains and trees, in tables and in the decoder."""
    section = prove_law(quick=True, rules={"traversal": weighing(traversal)}, weighers={"traversal": Weigher(traversal)})
    assert section.passed, section.failures


def test_traversal_that_forgets_to_update_is_found() -> None:
    def stubborn(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
        return traversal(tree, probs, chance, update=False)

    assert not prove_law(quick=True, rules={}, weighers={"stubborn": Weigher(stubborn)}).passed


def traversal(tree: TokenTree, probs: Tensor, chance: Chance, update: bool = True) -> Accepted:
    """Every node is once a leaf, children before parents in the order drawn; the first that stands ends the path."""
    assert tree.draft_probs is not None
    rows, nodes = tree.tokens.shape
    row, parents = torch.arange(rows), tree.parents[0].tolist()
    children: list[list[int]] = [[node for node in range(nodes) if parents[node] == parent] for parent in range(nodes)]
    law, left = probs.clone(), torch.zeros_like(probs)                          # P and Q behind every node
    for parent, own in enumerate(children):
        if own:
            left[:, parent] = torch.where(tree.present[:, own[0], None], tree.draft_probs[:, own[0]], 0)
    weight = torch.ones(rows, nodes, dtype=probs.dtype)                         # r
    stands_at = torch.full((rows,), -1)

    def descend(node: int) -> None:
        for child in children[node]:
            token, there = tree.tokens[:, child].clamp(min=0), tree.present[:, child] & (stands_at < 0)
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


# The parts ------------------------------------------------------------------------------------------------------------


def test_outcomes_are_everything_that_can_happen() -> None:
    """Two draws in turn, the second depending on the first: each path once, with its probability."""
    second = {0: [0.5, 0.5, 0.0], 1: [0.0, 0.25, 0.75]}
    plans, seen = torch.full((1, 4), -1), {}
    while len(plans):
        outcomes = Outcomes(plans)
        worlds = torch.arange(len(plans))
        first = outcomes.take(worlds, torch.tensor([[0.4, 0.6]]).double().expand(len(plans), -1))
        then = outcomes.take(worlds, torch.tensor([second[int(one)] for one in first]).double())
        for path, odds in zip(zip(first.tolist(), then.tolist(), strict=True), outcomes.odds.tolist(), strict=True):
            assert path not in seen
            seen[path] = odds
        plans = torch.cat([plan for _, plan in outcomes.others])
    assert seen == pytest.approx({(0, 0): 0.2, (0, 1): 0.2, (1, 1): 0.15, (1, 2): 0.45})


def test_the_worlds_of_a_case_sum_to_one_and_the_table_sees_its_text() -> None:
    case = next(case for case in whole_cases(RULES, every=97) if "mixed" in case.name)
    found = examine(case)
    assert found.distance < EXACT and found.worlds > 10
    table = Table(3, 1)
    assert table.logits((1, 2)) != table.logits((2, 1)) != table.logits((2,))


def test_every_rule_option_end_and_way_is_covered() -> None:
    names = " | ".join(case.name for case in whole_cases(RULES))
    words = (*RULES, *exact.OPTIONS, *filter(None, exact.ENDS), *exact.WAYS, "mixed batch", "drafts for itself", "1 tokens")
    for word in words:
        assert word in names


def test_plain_python_knows_nothing_of_draftproof() -> None:
    from pathlib import Path

    assert "import draftproof" not in (source := Path(reference.__file__).read_text()) and "from draftproof" not in source


@pytest.mark.parametrize(
    ("want", "text", "law"),
    [
        (Wanted(), [0], [1, 0, 0]),
        (Wanted(temperature=1.0), [0], [1 / 3] * 3),
        (Wanted(temperature=1.0, no_repeat_ngram=2), [0, 1, 0], [0.5, 0, 0.5]),
        (Wanted(temperature=1.0, banned_words=((2,), (0, 1))), [0], [1, 0, 0]),
        (Wanted(temperature=1.0, stop_tokens=(1,), min_new_tokens=1), [0], [0.5, 0, 0.5]),
        (Wanted(temperature=1.0, logit_bias={2: float("-inf")}), [0], [0.5, 0.5, 0]),
    ],
)
def test_plain_laws(want: Wanted, text: list[int], law: list[float]) -> None:
    assert next_law(UNIFORM, text, 1, want) == pytest.approx(law)


def test_plain_filters_and_ends() -> None:
    logits = [2.0, 1.0, 0.0]
    full = next_law(logits, [0], 1, Wanted(temperature=1.0))
    assert full == pytest.approx([0.6652, 0.2447, 0.0900], abs=1e-4)
    assert next_law(logits, [0], 1, Wanted(temperature=1.0, top_p=0.7)) == pytest.approx([0.7311, 0.2689, 0], abs=1e-4)
    assert next_law(logits, [0], 1, Wanted(temperature=1.0, min_p=0.2)) == pytest.approx([0.7311, 0.2689, 0], abs=1e-4)
    assert next_law(logits, [0], 1, Wanted(temperature=1.0, top_k=1)) == [1, 0, 0]
    ends = distribution_of_run(lambda _: UNIFORM, (0,), Wanted(temperature=1.0, stop=("ab",), stop_tokens=(0,)), 2)
    assert ends[Written((0,), "a", "stop")] == pytest.approx(1 / 3)
    assert ends[Written((1, 1), "bb", "length")] == pytest.approx(1 / 9)
    assert sum(ends.values()) == pytest.approx(1)


def test_a_rule_that_takes_absent_nodes_is_found() -> None:
    """A rule that counts an absent node as drafted emits what was never a token."""
    def greedy_for_nodes(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
        accepted = acceptance.accept_by_rejection(tree, probs, chance)
        last = accepted.nodes.gather(1, accepted.count[:, None] - 1)[:, 0]
        last = torch.where(tree.tokens[:, -1] == ABSENT, tree.tokens.shape[1] - 1, last)
        return Accepted(tree.path_to(last), tree.depths.gather(1, last[:, None])[:, 0] + 1, accepted.root)

    cases = [case for case in whole_cases({"greedy": weighing(greedy_for_nodes)}, every=5) if "smaller draft" in case.name]
    results = []
    for case in itertools.islice(cases, 4):
        try:
            results.append(examine(case).distance)
        except Exception:
            results.append(1.0)
    assert max(results) > SEEN
