"""Write the lists of docs/models.md from the results of `draftproof prove --section architectures`.

    draftproof prove --section architectures --json found.json
    python recipes/figures/model_lists.py found.json docs/models.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from draftproof.verify.architectures import Kind
from draftproof.verify.small_models import encoder_decoders

HEADING = "## By type in `config.json`"
"""Everything after it is replaced."""
WORDS = {Kind.exact: "Trees", Kind.chains: "Chains"}
REFUSED = "Refused, with this sentence"
UNMADE = "Not tested, since they could not be made so small"


def listed(results: Mapping[str, Mapping[str, str]]) -> str:
    """The results of the section in Markdown. results: by kind, model types and reasons."""
    lines, whole = [HEADING], encoder_decoders()
    for kind, words in WORDS.items():
        names = results[kind]
        parts = {words: [name for name in names if name not in whole],
                 f"{words}, encoder–decoders": [name for name in names if name in whole]}
        lines += [f"**{what}**: {', '.join(part)}." for what, part in parts.items() if part]
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(results[Kind.refused].items()):
        reasons.setdefault(_without_name(why), []).append(name)
    refused = [f"- {', '.join(names)}: {why}" for why, names in sorted(reasons.items())]
    unmade = [f"- {', '.join(sorted(results[Kind.unmade]))}."]
    for title, rows in ((REFUSED, refused), (UNMADE, unmade)):
        lines.append("\n".join([f"**{title}**:", *rows]))
    return "\n\n".join(lines) + "\n"


def _without_name(why: str) -> str:
    """A reason without the name of the model's class and the message in brackets."""
    reason = re.sub(r"^\w+(?:For\w+|Model\w*) ", "", " ".join(why.split()))
    return re.sub(r" \(.*\);", ";", reason)


if __name__ == "__main__":
    report, page = map(Path, sys.argv[1:])
    (section,) = json.loads(report.read_text(encoding="utf-8"))["sections"]
    before = page.read_text(encoding="utf-8").partition(HEADING)[0]
    page.write_text(before + listed(section["figures"]), encoding="utf-8")
