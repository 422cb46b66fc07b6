"""Planted bugs: the sound code is not accused, and each bug is seen by the examination it names."""

from __future__ import annotations

import pytest
from helpers import examinations
from helpers.examinations import WATCHES
from helpers.mistakes import BLOCK_MISTAKES, TOKEN_MISTAKES, block_rule, token_rule
from helpers.mutants import MUTANTS, Mutant

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.native.kernels import kernels
from draftproof.verify.cases import SETUPS, Ask, by_model, case, toy
from draftproof.verify.exact import SEEN, examine, weighing


@pytest.mark.parametrize("name", examinations.law_cases())
def test_the_sound_code_writes_the_reference_distribution(name: str) -> None:
    assert examinations.by_law(name) == ""


@pytest.mark.parametrize("watch", ["bits", "noise", "streams", "draws"])
def test_the_sound_code_is_not_accused(watch: str) -> None:
    assert WATCHES[watch]() == ""


def test_the_sound_code_is_counted_right() -> None:
    assert [examinations.by_count(rule) for rule in RULES] == [""] * len(RULES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_seen(mutant: Mutant) -> None:
    if mutant.name.startswith("the kernel's") and kernels() is None:
        pytest.skip("no C compiler here")
    if mutant.watch == "law":
        for name in mutant.options:
            examinations.wanted(name)                    # of the sound code
    examinations.sound_accepted()
    with mutant.plant():
        try:
            seen = WATCHES[mutant.watch](*mutant.options)
        except Exception as error:                  # a bug may break the run itself: that is seen
            seen = str(error) or type(error).__name__
    assert seen, f"{mutant.name} ({mutant.seen_in}): nobody saw it"


@pytest.mark.parametrize("mistake", TOKEN_MISTAKES)
def test_a_wrong_token_rule_is_seen(mistake: str) -> None:
    rule = weighing(lambda tree, probs, chance: token_rule(tree, probs, chance, mistake))
    setups = (SETUPS["chain"], SETUPS["smaller draft"], SETUPS["tree of 3"])
    ask = Ask(Sampling(temperature=1.0))
    found = (examine(case(mistake, rule, setup, ask)) for setup in setups)
    assert any(distance > SEEN for distance, _, _ in found)


@pytest.mark.parametrize("mistake", BLOCK_MISTAKES)
def test_a_wrong_block_rule_is_seen(mistake: str) -> None:
    rule = weighing(lambda tree, probs, chance: block_rule(tree, probs, chance, mistake))
    ask = Ask(Sampling(temperature=1.0), (1,), 4)
    assert "total variation" in examine(case(mistake, rule, SETUPS["chain"], ask))[2]


def test_the_rules_written_row_by_row_are_exact() -> None:
    for rule in (token_rule, block_rule):
        one = case("", weighing(rule), SETUPS["chain"], Ask(Sampling(temperature=1.0)))
        assert not examine(one)[2]


def test_a_match_without_its_ancestors_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample-and-match: a node whose parent was rejected, or the first unseen, may not count."""
    def careless(tree, logits, frontier):                           # type: ignore[no-untyped-def]
        parents = tree.parents.clamp(max=0)                 # every node hangs from the root
        hung = type(tree)(tree.tokens, parents, tree.depth_limit)
        return acceptance.match(hung, logits, frontier)

    rule = RULES["match"]._replace(accept=careless)
    one = case("", rule, by_model(toy(12, 3), 2), Ask(Sampling(temperature=1.0)))
    assert examine(one)[0] > SEEN
