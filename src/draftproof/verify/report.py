"""What a proof leaves behind: sections with verdicts, as JSON, Markdown and one page of HTML. Knows no models."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Tick = Callable[[float, str], None]
"""``tick(share, doing)``: how much of a section is done, and what it does now."""


def silent(share: float, doing: str) -> None:
    """A `Tick` that shows nothing."""


@dataclass(frozen=True)
class Section:
    """One examination and what came of it.

    verdict: one sentence with the figures. failures: one sentence each, smallest case first; empty if it passed.
    figures: plain values for machines, among them every tolerance and every negative control.
    """

    name: str
    passed: bool
    verdict: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[str] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All sections of one proof, and where it was made. `about`: model, drafter, device, dtype, seeds, date."""

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
        body = {"passed": self.passed, "verdict": self.verdict, "about": dict(self.about)}
        return json.dumps({**body, "sections": [asdict(section) for section in self.sections]}, indent=2, default=str)

    def as_markdown(self) -> str:
        """One page to attach to a release."""
        lines = ["# Certificate of lossless decoding", "", f"**{self.verdict}**", ""]
        lines += ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in self.about.items())]
        for section in self.sections:
            lines += ["", f"## {section.name.capitalize()}: {_word(section)} ({section.seconds:.0f} s)", "", section.verdict]
            lines += ["", *(f"- {failure}" for failure in section.failures)] if section.failures else []
            lines += ["", "| figure | value |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in _flat(section))]
        return "\n".join([*lines, "", f"*{_SCOPE}*", ""])

    def as_html(self) -> str:
        """The same page, self-contained."""
        parts = [f"<h1>Certificate of lossless decoding</h1><p class={_word(self).lower()}>{html.escape(self.verdict)}</p>"]
        parts.append(_table(self.about.items()))
        for section in self.sections:
            word = _word(section)
            parts.append(f"<h2>{html.escape(section.name.capitalize())} <span class={word.lower()}>{word}</span>")
            parts.append(f"<small>{section.seconds:.0f} s</small></h2><p>{html.escape(section.verdict)}</p>")
            parts += ["<ul>", *(f"<li>{html.escape(failure)}</li>" for failure in section.failures), "</ul>"]
            parts.append(f"<details><summary>Figures</summary>{_table(_flat(section))}</details>")
        body = "\n".join([*parts, f"<footer>{html.escape(_SCOPE)}</footer>"])
        head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Lossless decoding</title><style>{_STYLE}</style>"
        return f"{head}\n{body}\n</html>\n"


_SCOPE = (
    "What this says: the emitted text follows the target model. What it does not: the same text across machines, dtypes or "
    "forward shapes that round differently, and nothing about lossy modes. See docs/lossless.md."
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%;font-size:13px}"
    "td{border-top:1px solid #ddd;padding:.2rem .6rem;vertical-align:top}"
    "td:first-child{color:#666;width:16rem}.pass{color:#137333;font-weight:600}.fail{color:#b3261e;font-weight:600}"
    "h2{margin-top:1.6rem;font-size:1.15rem}small,footer{color:#666;font-weight:400}footer{margin-top:2rem;font-size:12px}"
)


def versions() -> dict[str, str]:
    """Of everything that could change a result."""
    import torch
    import transformers

    from draftproof import __version__

    return {
        "draftproof": __version__,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "python": platform.python_version(),
    }


def _word(judged: Section | Report) -> str:
    return "PASS" if judged.passed else "FAIL"


def _flat(section: Section) -> list[tuple[str, Any]]:
    """Figures as rows: a mapping within becomes rows of its own."""
    rows: list[tuple[str, Any]] = []
    for key, value in section.figures.items():
        rows += [(f"{key}: {name}", inner) for name, inner in value.items()] if isinstance(value, Mapping) else [(key, value)]
    return rows


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = (f"<tr><td>{html.escape(str(key))}<td>{html.escape(_cell(value))}" for key, value in rows)
    return f"<table>{''.join(cells)}</table>"
