"""Planted bugs: they go in, they are caught, they come out again."""

from __future__ import annotations

import pytest
import torch

from draftproof.core.acceptance import KeyedChance, accept_by_rejection
from draftproof.verify import mutants
from draftproof.verify.mutants import MUTANTS, Mutant, planted, prove_mutants
from draftproof.verify.report import Section

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
HANDFUL = [
    "draft drawn from the filtered law, weighed by the raw one", "block verification stops at the first failed coin",
    "penalties see the committed text only", "draft cache keeps rejected tokens", "tokens behind an end token kept",
    "accepted branch not moved to its place", "replacement drawn with the draft's noise",
]


def test_there_are_many_each_of_its_own_with_a_reference() -> None:
    assert len(MUTANTS) >= 50 and len(BY_NAME) == len(MUTANTS)
    assert len({mutant.seen_in.split(":")[0] for mutant in MUTANTS}) >= 15
    assert all(": " in mutant.seen_in and mutant.old != mutant.new for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_snippet_is_where_it_says(mutant: Mutant) -> None:
    """The code may move on; then the mutant must follow."""
    function = mutants._function(mutant.where)
    sound = function.__code__
    with planted(mutant):
        assert function.__code__ is not sound
    assert function.__code__ is sound


def test_a_handful_is_caught_and_the_sound_code_is_not_accused() -> None:
    section = prove_mutants(mutants=[BY_NAME[name] for name in HANDFUL])
    assert section.passed, section.failures
    assert section.figures["caught"] == len(HANDFUL)
    assert section.figures["first_to_catch"]["replacement drawn with the draft's noise"] == "sampling"


def test_a_mutant_that_survives_fails_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "WATCHES", {"law": lambda: Section("law", True, "sees nothing")})
    section = prove_mutants(mutants=[BY_NAME["residual softmaxed"]])
    assert not section.passed and "nobody saw it" in section.failures[0]


def test_watches_that_accuse_everything_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "WATCHES", {"law": lambda: Section("law", False, "", failures=["always"])})
    section = prove_mutants(mutants=[BY_NAME["residual softmaxed"]])
    assert not section.passed and "the sound code fails law" in section.failures[0]


def test_a_snippet_that_is_gone_is_an_error() -> None:
    gone = Mutant("x", "0: x", "core.tree:TokenTree.root", "no such code", "")
    with pytest.raises(ValueError, match="0 times, wanted once"), planted(gone):
        pass
    section = prove_mutants(mutants=[gone])
    assert not section.passed and "could not be planted" in section.failures[0]


def test_planting_changes_every_reference_and_comes_out_after_an_error() -> None:
    before, tiny = KeyedChance.flip.__code__, torch.zeros(1)
    with pytest.raises(ZeroDivisionError), planted(BY_NAME["the same coins in every round"]):
        assert KeyedChance.flip.__code__ is not before
        raise ZeroDivisionError
    assert KeyedChance.flip.__code__ is before and callable(accept_by_rejection) and float(tiny) == 0
