"""The proof as a whole: sections in turn, a report in two forms, a command with exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftproof.cli.app import app
from draftproof.cli.prove import Part
from draftproof.errors import BadInput
from draftproof.verify import prove as proving
from draftproof.verify.report import Section, silent

FIGURES = {"cases": 3, "max": 1e-16, "controls": {"planted <b>": 0.2}}


@pytest.fixture(autouse=True)
def sections(monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    """Sections that are decided beforehand."""
    result = {name: Section(name, "fine") for name in Part} | {
        "distribution": Section("distribution", "3 cases, nothing found", FIGURES)
    }
    for name in result:
        monkeypatch.setattr(proving, f"prove_{name}", lambda *_, name=name, **__: result[name])
    return result


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prove", *words])
    return result.exit_code, result.output


def test_sections_run_in_turn_and_the_engine_loads_only_when_needed() -> None:
    def engine() -> None:
        raise AssertionError("nobody asked for the model")

    names = ["sampling", "distribution", "distribution"]
    items = list(proving.prove(engine, names, progress=lambda name: silent))
    assert [section.name for section in items] == ["sampling", "distribution"]


def test_exit_codes_and_files(sections: dict[str, Section], tmp_path: Path) -> None:
    json_, html = tmp_path / "json", tmp_path / "html"
    code, out = command("--section", "distribution", "--json", str(json_), "--html", str(html))
    assert code == 0 and out.startswith("PASS distribution (0 s): 3 cases")
    body, page = json.loads(json_.read_text()), html.read_text()
    assert body["passed"] and body["about"]["torch"]
    assert body["sections"][0]["name"] == "distribution"
    assert "planted &lt;b&gt;" in page and "<b>" not in page and "3 cases, nothing found" in page
    sections["sampling"] = Section("sampling", "biased", failures=["rejection: p = 1e-9"])
    code, out = command("--section", "sampling", "--section", "distribution", "--html", str(html))
    assert code == 1 and out.strip().endswith("see sampling")
    for part in ("FAIL sampling", "rejection: p = 1e-9", "PASS distribution"):
        assert part in out and part in html.read_text()


def test_a_crashing_section_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "prove_distribution", lambda *_: 1 // 0)
    code, out = command("--section", "distribution", "--section", "sampling")
    assert code == 1 and "ZeroDivisionError: integer" in out and "PASS sampling" in out


def refuse(*_: object, **__: object) -> Section:
    raise BadInput("a tensor has the wrong size; correct it")


def test_a_refusal_fails_sections_of_our_own_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is a bug; of the user's model it is the answer."""
    for name in ("distribution", "bits"):
        monkeypatch.setattr(proving, f"prove_{name}", refuse)
    code, out = command("--section", "distribution", "--section", "sampling")
    assert code == 1 and "FAIL distribution" in out and "PASS sampling" in out
    result = CliRunner().invoke(app, ["prove", "--section", "bits"])
    assert isinstance(result.exception, BadInput)


def test_wrong_usage_is_told_before_anything_runs(tmp_path: Path) -> None:
    assert command("--section", "nothing")[0] == 2
    result = CliRunner().invoke(app, ["prove", "--json", str(tmp_path / "no" / "a.json")])
    assert result.exit_code == 1 and isinstance(result.exception, BadInput)
    assert "make it first" in str(result.exception)
