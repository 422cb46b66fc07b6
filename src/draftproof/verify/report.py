"""The result of a proof: sections with verdicts, as JSON, Markdown and one page of HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Tick = Callable[[float, str], None]
"""``tick(share, doing)``: how much of a section is done, and what it does now."""
SCOPE = (
    "What this says: the emitted text follows the target model. What it does not: the same text "
    "across machines, dtypes or forward shapes that round differently, and nothing about lossy "
    "modes. See docs/lossless.md."
)
TITLE = "Certificate of lossless decoding"
PAGE = "<!doctype html><meta charset=utf-8><title>{}</title><pre style=white-space:pre-wrap>{}\n"


def silent(share: float, doing: str) -> None:
    """A `Tick` that shows nothing."""


def failed(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass(frozen=True)
class Section:
    """One examination. verdict: one sentence with the figures. failures: one sentence each, none if
    it passed. figures: plain values, among them every tolerance and every negative control."""

    name: str
    verdict: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Report:
    """All sections of one proof. about: model, drafter, device, dtype, versions, seed, date."""

    sections: Sequence[Section]
    about: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return all(section.passed for section in self.sections)

    @property
    def verdict(self) -> str:
        """One sentence."""
        broken = [section.name for section in self.sections if not section.passed]
        if broken:
            return f"FAIL: a promise is broken; see {', '.join(broken)}"
        names = ", ".join(section.name for section in self.sections)
        return f"PASS: {names}: nothing was found that plain decoding would not do"

    def as_json(self) -> str:
        """Everything, for machines."""
        sections = [{**asdict(one), "passed": one.passed} for one in self.sections]
        body = {"passed": self.passed, "verdict": self.verdict, "about": dict(self.about)}
        return json.dumps({**body, "sections": sections}, indent=2, default=str)

    def as_markdown(self) -> str:
        """One page to attach to a release."""
        lines = [f"# {TITLE}", "", self.verdict, "", *_table(self.about)]
        for section in self.sections:
            word = "PASS" if section.passed else "FAIL"
            lines += ["", f"## {section.name.capitalize()}: {word} ({section.seconds:.0f} s)", ""]
            lines += [section.verdict, "", *(f"- {failure}" for failure in section.failures), ""]
            lines += _table(section.figures)
        return "\n".join([*lines, "", SCOPE]) + "\n"

    def as_html(self) -> str:
        """The same page for a browser, self-contained."""
        return PAGE.format(TITLE, html.escape(self.as_markdown()))


def _table(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for key, value in figures.items():
        rows = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, cell in rows:
            text = f"{cell:.3g}" if isinstance(cell, float) else " ".join(str(cell).split())
            yield "| {} | {} |".format(f"{key}: {name}".rstrip(": "), text.replace("|", "\\|"))
