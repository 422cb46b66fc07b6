"""Text that repeats its prompt, and the drafters that need no training: what comes when no drafter is named.

    python -m draftproof.bench.repeats [MODEL] --human-eval FILE --spec-bench FILE [--inflate 0.5B] [--limit N] [--rounds R]

Code edits: a function of HumanEval (JSONL, may be gzipped), to be written again under another name, with its longest variable
renamed. Summaries with quotes: an article of Spec-Bench's summarization, and its first and third sentence quoted. The small
models at hand do neither, so the text is *dictated*: a logits processor forbids all but the next token of the wanted text. What
is read, drafted, verified and accepted is real, and so is its cost; that a model would write just this is supposed.
Plain decoding and the default drafter write every text in turn; the default has met none of them before in any turn, but learns
from one to the next.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import draftproof as dp
from draftproof.bench.figures import Ratio
from draftproof.bench.inflate import inflated
from draftproof.engine.load import training_free
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput, DraftproofError
from draftproof.model.packed_linear import pack_linears

ARTICLE = 1400
"""Characters of an article: what the embedded model's context has room for."""
NEW = 160
"""Tokens that are written at most."""


class Task(NamedTuple):
    """A prompt and the text that is dictated behind it."""

    kind: str
    prompt: str
    text: str


class Dictation:
    """A logits processor: the next token of a text is all that is allowed."""

    def __init__(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        self.start, self.text = len(prompt), list(text)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = min(max(input_ids.shape[1] - self.start, 0), len(self.text) - 1)
        wanted = torch.full_like(scores, -torch.inf)
        wanted[:, self.text[place]] = 0
        return wanted


@dataclass
class Found:
    """Seconds per token of the texts of one kind, in both ways, and the rounds of the default drafter."""

    plain: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)


def code_edits(file: Path) -> Iterator[Task]:
    """Functions of HumanEval under new names."""
    for row in _rows(file):
        code = row["prompt"] + row["canonical_solution"]
        names = set(re.findall(r"^\s+(\w{4,})\s*=[^=]", row["canonical_solution"], re.M))
        edited = code.replace(row["entry_point"], "run_" + row["entry_point"])
        for name in sorted(names, key=len)[-1:]:
            edited = re.sub(rf"\b{name}\b", f"new_{name}", edited)
        yield Task("code edit", f"{code}\nThe same with other names:\n\n", edited)


def summaries(file: Path) -> Iterator[Task]:
    """Articles of Spec-Bench, quoted."""
    for row in _rows(file):
        if row.get("category") == "summarization":
            article = row["turns"][0].removeprefix("Summarize: ")[:ARTICLE]
            sentences = re.split(r"(?<=[.!?]) +", article)
            if len(sentences) > 3:
                told = f'The article says: "{sentences[0]}" It goes on: "{sentences[2]}"'
                yield Task("summary with quotes", f"{article}\n\nIn short:\n", told)


def _rows(file: Path) -> Iterator[dict[str, str]]:
    """Of a JSONL file, gzipped or not."""
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            yield from (json.loads(line) for line in lines)
    except (OSError, ValueError) as error:
        told = f"{file} could not be read as JSONL ({error}); give HumanEval.jsonl or Spec-Bench's question.jsonl"
        raise BadInput(told) from None


def measure(plain: dp.Engine, tasks: Sequence[Task], rounds: int) -> dict[str, Found]:
    """Every text in both ways in turn, by kind; tasks that the model has no room for are left out."""
    found: dict[str, Found] = {}
    codec, target = plain.codec, plain.target
    assert codec is not None, "the model needs a tokenizer for the prompts"
    written = 0
    for turn in range(rounds):
        ours = dp.Engine(target, training_free(), stop_tokens=plain.stop_tokens)
        for task in track(tasks, f"turn {turn + 1} of {rounds}", console=Console(stderr=True), transient=True):
            prompt, text = codec.encode(task.prompt), codec.encode(task.text)[:NEW]
            if len(prompt) + len(text) + 16 > target.context:
                continue
            wanted = dp.Sampling(processors=(Dictation(prompt, text),))
            one = found.setdefault(task.kind, Found())
            for engine, seconds in ((plain, one.plain), (ours, one.ours))[:: 1 if written % 2 else -1]:
                start = time.perf_counter()
                done = engine.generate([prompt], max_new_tokens=len(text), sampling=wanted)[0].checked()
                seconds.append((time.perf_counter() - start) / len(text))
                if done.tokens != text:
                    raise AssertionError(f"another text was written than was dictated: {done.tokens} for {text}")
                if engine is ours:
                    one.stats.add(done.stats)
            written += 1
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl, or gzipped")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--inflate", help="make the model as heavy as one of this size, such as 0.5B")
    parser.add_argument("--limit", type=int, default=8, help="texts of each kind")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    try:
        kinds = [(code_edits, given.human_eval), (summaries, given.spec_bench)]
        tasks = [task for make, file in kinds if file is not None for task in islice(make(file), given.limit)]
        if not tasks or given.rounds < 1:
            raise BadInput("there is nothing to write; give --human-eval or --spec-bench, 1 or more as --limit and --rounds")
        model = inflated(given.model, given.inflate)
        pack_linears(model)
        title = given.model + (f", inflated to {given.inflate}" if given.inflate else "")
        engine = dp.load(model, drafter="none")
        gc.freeze()                                                     # as the command does
        _print(measure(engine, tasks, given.rounds), title)
    except DraftproofError as error:
        parser.error(str(error))


def _print(found: dict[str, Found], model: str) -> None:
    title = f"{model}: dictated text, no drafter named, {torch.get_num_threads()} threads"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in ("kind", "texts", "plain, tokens/s", "speed-up", "95 %", "tokens/round"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, one in found.items():
        ratio = Ratio.of(one.plain, one.ours)
        tokens = len(one.plain) / sum(one.plain)
        speeds = (f"{tokens:.0f}", f"{ratio.value:.2f}×", f"{ratio.low:.2f}-{ratio.high:.2f}")
        table.add_row(kind, str(len(one.plain)), *speeds, f"{one.stats.tokens_per_round:.2f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
