"""The certificate of `draftproof prove --html`: verdict, question, and all sections."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from draftproof.verify.report import QUESTIONS, SCOPE

if TYPE_CHECKING:
    from draftproof.verify.report import Report, Section

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b1f24, #e6e8eb);
  --soft: light-dark(#57606a, #9aa4ae); --page: light-dark(#fff, #14171a);
  --card: light-dark(#f6f8fa, #1d2125); --line: light-dark(#d0d7de, #353b42);
  --good: light-dark(#116329, #57c774); --bad: light-dark(#b42318, #ff7b72); }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0; }
.verdict { font-size: 1.9rem; line-height: 1.25; font-weight: 650; margin: .3rem 0 1rem; }
.pass { color: var(--good); } .fail { color: var(--bad); }
h2 { font-size: 1.05rem; margin: 0; } p { margin: .5rem 0; }
table { border-collapse: collapse; width: 100%; margin: 1.5rem 0; font-size: .93rem; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; } td { overflow-wrap: anywhere; } td.n { white-space: nowrap; }
th { font-weight: 600; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.2rem; margin: 1rem 0; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); }
.soft { color: var(--soft); } li { overflow-wrap: anywhere; }
@media print { details { display: none; } }
"""


def page(report: Report) -> str:
    """A page of HTML without scripts, pictures or requests."""
    about = report.about
    model, drafter = about.get("model", "the small models that come with it"), about.get("drafter")
    word = "pass" if report.passed else "fail"
    verdict = ("No difference was found: with drafts, the text is the model's own." if report.passed
               else "A difference was found: the text may not be the model's own.")
    with_drafter = f" when {strong(drafter)} drafts for it" if drafter else ""
    summary = "".join(
        f"<tr><td>{escape(section.name)}</td><td class='n {_word(section)}'>"
        f"{'failed' if section.failures else 'passed'}</td><td class=n>{section.seconds:.0f} s</td>"
        "</tr>" for section in report.sections
    )
    facts = "".join(_row(name, value) for name, value in about.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>Lossless decoding: {escape(str(model))}</title><style>{STYLE}</style><main>"
        f"<h1>Certificate of lossless decoding</h1><p class='verdict {word}'>{verdict}</p>"
        f"<p>What was asked: does {strong(model)} write exactly what it would write alone"
        f"{with_drafter}? Examined on {escape(str(about.get('date', 'an unknown day')))}, "
        f"{escape(str(about.get('extent', 'full')))}.</p>"
        f"<table><tr><th>section</th><th>result</th><th>time</th></tr>{summary}</table>"
        + "".join(map(_section, report.sections))
        + f"<details><summary>Model, machine and versions</summary><table>{facts}</table></details>"
        f"<p class=soft>{escape(SCOPE)}</p></main></html>\n"
    )


def strong(text: object) -> str:
    return f"<strong>{escape(str(text))}</strong>"


def _word(section: Section) -> str:
    return "fail" if section.failures else "pass"


def _section(section: Section) -> str:
    failures = "".join(f"<li class=fail>{escape(failure)}</li>" for failure in section.failures)
    rows = "".join(_row(name, value) for name, value in section.figures.items())
    figures = (f"<details><summary>{len(section.figures)} figures</summary><table>{rows}</table>"
               "</details>" if rows else "")
    question = escape(QUESTIONS.get(section.name, ""))
    result = "FAIL" if section.failures else "PASS"
    return (f"<section><h2 class={_word(section)}>{result} {escape(section.name)}</h2>"
            f"<p>{question}</p><p class=soft>Found: {escape(section.verdict)}.</p>"
            f"{f'<ul>{failures}</ul>' if failures else ''}{figures}</section>")


def _row(name: str, value: object) -> str:
    """A row with a fact, with a nested table for a mapping; empty for an empty value."""
    if value in ("", None, (), [], {}):
        return ""
    if isinstance(value, Mapping):
        rows = "".join(_row(str(key), inner) for key, inner in value.items())
        return f"<tr><td>{escape(name)}</td><td><table>{rows}</table></td></tr>" if rows else ""
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
