"""Enumeration: the engine writes exactly the reference distribution, and wrong rules are found."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import checks

from draftproof.core.acceptance import RULES, accept_by_rejection, weighing
from draftproof.core.params import Sampling
from draftproof.verify import cases as table
from draftproof.verify import exact, reference
from draftproof.verify.cases import PLAIN, SETUPS, TARGET, Case, CaseRequest, cases, logits_after
from draftproof.verify.enumeration import Outcomes, distance, enumerate_texts
from draftproof.verify.exact import EXACT, SEEN, check_case, prove_distribution
from draftproof.verify.reference import distribution_of_run, next_token_probs

UNIFORM = [0.0, 0.0, 0.0]


@pytest.mark.parametrize("option", table.OPTIONS)
def test_plain_decoding_writes_the_reference_distribution(option: str) -> None:
    """Every option with every way to end, held against plain Python that shares no code."""
    for number, (end, stops) in enumerate(table.ENDS.items()):
        want = replace(table.OPTIONS[option], **stops)
        prompt = table.PROMPTS[number % len(table.PROMPTS)]
        plain = Case(end, RULES["match"], PLAIN, [CaseRequest(want, prompt)])
        (distribution,) = enumerate_texts(plain).distributions
        assert distance(distribution, checks.reference(plain)[0]) < EXACT, end


@pytest.mark.parametrize("part", range(4))
def test_drafts_change_nothing(part: int) -> None:
    """Rules, drafts, options, ends: a sample of `prove`'s cases, and all special ones."""
    for case in itertools.islice(cases(every=149), part, None, 4):
        apart, branches, wrong = check_case(case)
        assert not wrong and apart < EXACT and branches, f"{case.name}: {wrong}"


def test_cases_cover_every_rule_option_ending_and_setup() -> None:
    names = " | ".join(case.name for case in cases())
    special = ("mixed batch", "as on a device", "drafts for itself", "1 tokens", "comes and goes")
    for word in (*RULES, *table.OPTIONS, *filter(None, table.ENDS), *SETUPS, *special):
        assert word in names


def test_the_section_tells_what_was_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(itertools.islice(cases(every=67), 60, 64))
    monkeypatch.setattr(exact, "cases", lambda rules, every: iter(items))
    section = prove_distribution(quick=True)
    assert not section.failures
    assert section.figures["max_total_variation"] < EXACT and section.figures["outcomes"] > 4
    assert all(seen > 10 * SEEN for seen in section.figures["controls"].values())
    monkeypatch.setitem(exact.CONTROLS, "nothing wrong", accept_by_rejection)
    assert "blind" in prove_distribution(quick=True).failures[0]


@pytest.mark.parametrize("wrong", exact.CONTROLS.values())
def test_a_wrong_rule_fails_the_section(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "cases", lambda rules, every: itertools.islice(cases(rules), 1))
    section = prove_distribution(quick=True, rules={"wrong": weighing(wrong)})
    assert section.failures[0].startswith("wrong: ")


def test_outcomes_are_enumerated_once_each() -> None:
    """Two draws in turn, the second by the first: each path once, with its probability."""
    second = {0: [0.5, 0.5, 0.0], 1: [0.0, 0.25, 0.75]}
    plans, seen = torch.full((1, 4), -1), {}
    while len(plans):
        outcomes, branches = Outcomes(plans), torch.arange(len(plans))
        probs = torch.tensor([[0.4, 0.6]]).double().expand(len(plans), -1)
        first = outcomes.choose(branches, probs)
        distributions = torch.tensor([second[int(each)] for each in first]).double()
        twice = torch.cat([branches, branches])             # a copy of a row draws as it does
        then = outcomes.choose(twice, torch.cat([distributions, distributions]))
        assert torch.equal(then[: len(plans)], then[len(plans) :])
        for item, other, probability in zip(first, then, outcomes.mass.tolist(), strict=False):
            seen[int(item), int(other)] = probability
        plans = torch.cat([plan for _, plan in outcomes.others])
    assert seen == pytest.approx({(0, 0): 0.2, (0, 1): 0.2, (1, 1): 0.15, (1, 2): 0.45})


def test_the_model_sees_its_text() -> None:
    texts = itertools.product(range(3), repeat=4)
    seen = {tuple(round(x, 3) for x in logits_after(TARGET, text)) for text in texts}
    assert len(seen) > 70


def test_the_reference_knows_nothing_of_draftproof() -> None:
    source = Path(reference.__file__).read_text()
    assert "import draftproof" not in source and "from draftproof" not in source


@pytest.mark.parametrize(
    ("logits", "wants", "text", "probs"),
    [
        (UNIFORM, {"temperature": 0.0}, [0], [1, 0, 0]),
        (UNIFORM, {}, [0], [1 / 3] * 3),
        (UNIFORM, {"no_repeat_ngram": 2}, [0, 1, 0], [0.5, 0, 0.5]),
        (UNIFORM, {"banned_words": ((2,), (0, 1))}, [0], [1, 0, 0]),
        (UNIFORM, {"stop_tokens": (1,), "min_new_tokens": 1}, [0], [0.5, 0, 0.5]),
        (UNIFORM, {"logit_bias": {2: float("-inf")}}, [0], [0.5, 0.5, 0]),
        ([2.0, 1.0, 0.0], {}, [0], [0.6652, 0.2447, 0.0900]),
        ([2.0, 1.0, 0.0], {"top_p": 0.7}, [0], [0.7311, 0.2689, 0]),
        ([2.0, 1.0, 0.0], {"min_p": 0.2}, [0], [0.7311, 0.2689, 0]),
        ([2.0, 1.0, 0.0], {"top_k": 1}, [0], [1, 0, 0]),
    ],
)
def test_the_reference_knows_distributions_computed_by_hand(logits, wants, text, probs) -> None:
    want = Sampling(**{"temperature": 1.0, **wants})
    assert next_token_probs(logits, text, 1, want) == pytest.approx(probs, abs=1e-4)


def test_the_reference_ends_where_it_should() -> None:
    want = Sampling(temperature=1.0, stop=("ab",), stop_tokens=(0,))
    ends = distribution_of_run(lambda _: UNIFORM, (0,), want, 2)
    assert ends[(0,), "a", "stop"] == pytest.approx(1 / 3)
    assert ends[(1, 1), "bb", "length"] == pytest.approx(1 / 9)
    assert sum(ends.values()) == pytest.approx(1)
