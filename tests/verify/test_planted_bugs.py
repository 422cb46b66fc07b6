"""The list of planted bugs fits the source, and a bug that nothing notices fails the section."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from draftproof.errors import BadInput
from draftproof.verify import mutants as planting
from draftproof.verify.mutants import CHECKOUT, Mutant, crashed, mutants, prove_mutants
from draftproof.verify.report import BROKE, QUESTIONS, Report, Section

BUGS = mutants()


def test_there_are_many_and_each_is_named_once() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted_and_what_must_see_it_is_there(bug: Mutant) -> None:
    source = bug.planted()
    if bug.file.endswith(".py"):
        ast.parse(source)
    assert bug.seen_by
    for watch in bug.seen_by:
        if not watch.startswith("tests/"):
            assert watch in QUESTIONS
            continue
        file, _, test = watch.partition("::")
        text = (CHECKOUT / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text, f"{watch} is not there"


def test_a_bug_that_nothing_notices_fails_the_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is seen and one that is none, in a copy of the source; the source stays as it is."""
    before = Path(planting.PACKAGE, "core/noise.py").read_bytes()
    harmless = Mutant("no bug", "core/noise.py", "class Role", "# harmless\nclass Role",
                      ["tests/core/test_noise.py::test_draws_are_independent_of_the_batch"])
    seen = Mutant("a bug", "core/noise.py", "_mix(keys[:, None, 0]", "_mix(keys[:1, None, 0]",
                  harmless.seen_by)
    monkeypatch.setattr(planting, "mutants", lambda words: [harmless, seen])
    failures = prove_mutants().failures
    assert [failure.partition(":")[0] for failure in failures] == ["no bug"]
    assert Path(planting.PACKAGE, "core/noise.py").read_bytes() == before


def test_a_crashing_check_does_not_count_as_detection(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for failed, is_crash in (
        (Section("bits", BROKE, failures=["TypeError: no"]), True),
        (Section("bits", "1 text differs", failures=["text 1 differs"]), False),
    ):
        sound = Section("sampling", "nothing differs")
        report.write_text(Report([sound, failed], {}).as_json())
        assert crashed(report) == is_crash


def test_wrong_names_and_texts_that_are_not_there_are_refused() -> None:
    with pytest.raises(BadInput, match="no mutant is named like"):
        mutants(["nothing of the kind"])
    with pytest.raises(BadInput, match="0 times"):
        Mutant("old", "core/noise.py", "no such text", "", []).planted()
