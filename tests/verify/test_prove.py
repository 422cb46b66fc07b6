"""The proof as a whole: sections in turn, a report in three forms, a command with exit codes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftproof.cli.app import app
from draftproof.errors import BadInput
from draftproof.model.device import versions
from draftproof.verify import prove as proving
from draftproof.verify.report import Report, Section, silent

FIGURES = {"cases": 3, "max": 1e-16, "controls": {"planted <b>": 0.2}}
GOOD = Section("law", "3 cases, nothing found", FIGURES, (), 1.5)
BAD = Section("bits", "1 of 3 texts differ", {"texts": 3}, ["behind token 4 | off by 0.3"], 2.0)


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    """Sections that are decided beforehand."""
    found = {name: Section(name, "fine") for name in proving.SECTIONS} | {"law": GOOD}
    for name in found:
        monkeypatch.setattr(proving, f"prove_{name}", lambda *_, name=name, **__: found[name])
    return found


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prove", *words])
    return result.exit_code, result.output


def test_a_report_in_three_forms() -> None:
    report = Report([GOOD, BAD], {"model": "demo", "date": "2026-02-03", **versions()})
    body = json.loads(report.as_json())
    assert body["passed"] is False and body["about"]["date"] == "2026-02-03"
    assert body["about"]["torch"]
    assert [section["name"] for section in body["sections"]] == ["law", "bits"]
    markdown, page = report.as_markdown(), report.as_html()
    for text in ("1 of 3 texts differ", "nothing found", "demo", "2026-02-03"):
        assert text in markdown and text in page
    assert "planted &lt;b&gt;" in page and "<b>" not in page and "http" not in page
    assert "off by 0.3" in markdown and "FAIL" in markdown
    HTMLParser().feed(page)
    assert Report([GOOD], {}).passed and not report.passed and "bits" in report.verdict


def test_sections_run_in_turn_and_the_engine_loads_only_when_needed(
    sections: dict[str, Section]
) -> None:
    def engine() -> None:
        raise AssertionError("nobody asked for the model")

    found = list(proving.prove(engine, ["sampling", "law", "law"], progress=lambda name: silent))
    assert [section.name for section in found] == ["sampling", "law"]


def test_exit_codes_and_files(sections: dict[str, Section], tmp_path: Path) -> None:
    forms = ("json", "html", "markdown")
    files = [word for form in forms for word in (f"--{form}", str(tmp_path / form))]
    code, out = command("--section", "law", *files)
    assert code == 0 and out.startswith("PASS law (0 s): 3 cases")
    assert json.loads((tmp_path / "json").read_text())["passed"]
    assert (tmp_path / "html").exists() and (tmp_path / "markdown").exists()
    sections["sampling"] = Section("sampling", "biased", failures=["rejection: p = 1e-9"])
    code, out = command("--section", "sampling", "--section", "law")
    assert code == 1
    assert all(part in out for part in ("FAIL sampling", "rejection: p = 1e-9", "PASS law"))
    assert out.strip().endswith("see sampling")


def test_wrong_usage_is_told_before_anything_runs(
    sections: dict[str, Section], tmp_path: Path
) -> None:
    assert command("--section", "nothing")[0] == 2
    result = CliRunner().invoke(app, ["prove", "--json", str(tmp_path / "no" / "a.json")])
    assert result.exit_code == 1 and isinstance(result.exception, BadInput)
    assert "make it first" in str(result.exception)
