"""The result of a proof: sections with verdicts, as JSON, Markdown and one page of HTML."""

from __future__ import annotations

import html
import json
import platform
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
STYLE = "body{font:15px/1.5 sans-serif;max-width:52rem;margin:2rem auto}td{padding:.2rem .6rem}"


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
        forms = {"h1": "# {}\n", "h2": "\n## {}\n", "p": "{}\n", "li": "- {}"}
        forms["table"] = "| | |\n|---|---|"
        lines = [
            f"| {text[0]} | {text[1]} |" if kind == "tr" else forms[kind].format(*text)
            for kind, *text in self._page(lambda text: text.replace("|", "\\|"))
        ]
        return "\n".join(lines) + "\n"

    def as_html(self) -> str:
        """The same page, self-contained."""
        lines = [
            f"<tr><td>{text[0]}<td>{text[1]}" if kind == "tr" else f"<{kind}>{''.join(text)}"
            for kind, *text in self._page(html.escape)
        ]
        title = "<!doctype html><meta charset=utf-8><title>Lossless decoding</title>"
        head = f"{title}<style>{STYLE}</style>"
        return "\n".join([head, *lines]) + "\n"

    def _page(self, escape: Callable[[str], str]) -> Iterator[tuple[str, ...]]:
        """(kind, text) of every line of the certificate."""
        yield "h1", "Certificate of lossless decoding"
        yield from [("p", escape(self.verdict)), ("table",)]
        yield from (("tr", escape(key), escape(_cell(value))) for key, value in self.about.items())
        for section in self.sections:
            word = "PASS" if section.passed else "FAIL"
            yield "h2", f"{section.name.capitalize()}: {word} ({section.seconds:.0f} s)"
            yield "p", escape(section.verdict)
            yield from (("li", escape(failure)) for failure in section.failures)
            yield ("table",)
            for key, value in section.figures.items():
                rows = value.items() if isinstance(value, Mapping) else [("", value)]
                for name, inner in rows:
                    yield "tr", escape(f"{key}: {name}".rstrip(": ")), escape(_cell(inner))
        yield "p", escape(SCOPE)


def versions() -> dict[str, str]:
    """Of everything that could change a result."""
    import torch
    import transformers

    from draftproof import __version__

    python = platform.python_version()
    own = {"draftproof": __version__, "torch": str(torch.__version__)}
    return {**own, "transformers": str(transformers.__version__), "python": python}


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
