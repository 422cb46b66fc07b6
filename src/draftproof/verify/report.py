"""The results of a proof: sections with verdicts, as JSON and as a page of HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

Tick = Callable[[float, str], None]
"""``tick(share, doing)``: how much of a section is done, and what it does now."""
QUESTIONS = {
    "distribution": "Does every possible text come out exactly as often as the model alone would "
                    "write it? All texts of small models are listed, and their probabilities "
                    "compared.",
    "sampling": "Are sampled texts as frequent as the model says, with real random numbers? "
                "Thousands of texts are drawn and counted.",
    "bits": "Does your model, here, write the same text with drafts as without, number for number? "
            "Texts and scores are compared bit by bit.",
    "configurations": "Is that so in every way a model can be run? Long texts, large vocabularies, "
                      "8-bit weights and remembered prompts are compared in the same way.",
    "architectures": "Is that so for every kind of model that is supported? Small random models "
                     "of each kind write with drafts and without.",
    "mutants": "Would a mistake be noticed? Bugs are planted one at a time in a copy of the "
               "source, and this proof or a test must fail for each.",
    "fuzz": "Is that so for requests of any kind? Random prompts, options, batches, cancelled runs "
            "and threads are run on random models, and each text is compared.",
}
"""What each section asks, in plain words."""
SCOPE = (
    "What this says: the emitted text follows the target model. What it does not: the same text "
    "across machines, dtypes or forward shapes that round differently, and nothing about lossy "
    "modes. See docs/lossless.md."
)


BROKE = "it broke"
"""The verdict of a section that ended in an error of its own."""


def silent(share: float, doing: str) -> None:
    """A `Tick` that shows nothing."""


def failed(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass(frozen=True)
class Section:
    """One section of the proof. verdict: one sentence with the figures. failures: one sentence
    each, none if it passed. figures: plain values, including all tolerances and negative controls.
    """

    name: str
    verdict: str
    figures: Mapping[str, object] = field(default_factory=dict)
    failures: Sequence[str] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        word = "FAIL" if self.failures else "PASS"
        return f"{word} {self.name} ({self.seconds:.0f} s): {self.verdict}"


@dataclass(frozen=True)
class Report:
    """All sections of one proof. about: model, drafter, device, dtype, versions, seed, date."""

    sections: Sequence[Section]
    about: Mapping[str, object]

    @property
    def passed(self) -> bool:
        return not any(section.failures for section in self.sections)

    def __str__(self) -> str:
        if not self.passed:
            broken = ", ".join(section.name for section in self.sections if section.failures)
            return f"FAIL: a promise is broken; see {broken}"
        names = ", ".join(section.name for section in self.sections)
        return f"PASS: {names}: nothing was found that plain decoding would not do"

    def as_json(self) -> str:
        sections = [
            {**asdict(section), "passed": not section.failures} for section in self.sections
        ]
        body = {"passed": self.passed, "verdict": str(self), "about": self.about}
        return json.dumps({**body, "sections": sections}, indent=2, default=str)
