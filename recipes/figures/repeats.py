"""Text that repeats its prompt, with the default drafter, over plain decoding.

Code edits: a HumanEval function written again under other names. Summaries with quotes: an article
of Spec-Bench, and its first and third sentence quoted. Small models do neither, so the text is
dictated: a logits processor forbids all but its next token. What is drafted and accepted is real,
and so is its cost; that a model would write just this is supposed. A text is met once a round.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from run import Row, ratio
from torch import Tensor

import draftproof as dp
from draftproof.bench.methods import load_methods
from draftproof.requests.stats import RoundStats

ARTICLE, NEW = 1400, 160
"""Characters of an article; tokens that are dictated at most."""


class Task(NamedTuple):
    kind: str
    prompt: str
    text: str


class Dictation:
    """A logits processor: the next token of a text is all that is allowed."""

    def __init__(self, prompt: list[int], text: list[int]) -> None:
        self.start, self.text = len(prompt), text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = min(max(input_ids.shape[1] - self.start, 0), len(self.text) - 1)
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.text[place]] = 0
        return allowed


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl, or gzipped")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="texts of each kind")
    parser.add_argument("--rounds", type=int, default=2)


def run(given: argparse.Namespace) -> list[Row]:
    kinds = [(code_edits, given.human_eval), (summaries, given.spec_bench)]
    tasks = [task for make, file in kinds if file
             for task in islice(make(_rows(file)), given.limit)]
    if not tasks:
        raise SystemExit("there is nothing to write; give --human-eval or --spec-bench")
    plain, _ = load_methods(given.model, [], [], dtype=given.dtype)
    codec, target = plain.codec, plain.target
    seconds: dict[str, tuple[list[float], list[float], RoundStats]] = {}
    for _ in range(given.rounds):
        members = [dp.PromptLookup(), dp.SuffixDrafter(), dp.TokenRecycling()]
        ours = dp.Engine(target, dp.Portfolio(members), stop_tokens=plain.stop_tokens)
        for place, task in enumerate(tasks):
            prompt, text = codec.encode(task.prompt), codec.encode(task.text, special=False)[:NEW]
            if len(prompt) + len(text) + 16 > target.context:
                continue
            found = seconds.setdefault(task.kind, ([], [], RoundStats()))
            sampling = dp.Sampling(processors=(Dictation(prompt, text),), max_new_tokens=len(text))
            both = ((plain, found[0]), (ours, found[1]))
            for engine, spent in both if place % 2 else reversed(both):
                start = time.perf_counter()
                done = engine.generate([prompt], sampling=sampling)[0].checked()
                spent.append((time.perf_counter() - start) / len(text))
                assert done.tokens == text, f"written {done.tokens}, dictated {text}"
                if engine is ours:
                    found[2].add(done.stats)
    return [{"dictated": kind, "texts": len(plain), "plain tokens/s": len(plain) / sum(plain),
             "speed-up": ratio(plain, ours), "tokens/round": stats.tokens_per_round}
            for kind, (plain, ours, stats) in seconds.items()]


def code_edits(rows: Iterator[dict[str, str]]) -> Iterator[Task]:
    for row in rows:
        code, names = row["prompt"] + row["canonical_solution"], r"^\s+(\w{4,})\s*=[^=]"
        edited = code.replace(row["entry_point"], "run_" + row["entry_point"])
        for name in sorted(set(re.findall(names, row["canonical_solution"], re.M)), key=len)[-1:]:
            edited = re.sub(rf"\b{name}\b", f"new_{name}", edited)
        yield Task("code edits", f"{code}\nThe same with other names:\n\n", edited)


def summaries(rows: Iterator[dict[str, str]]) -> Iterator[Task]:
    for row in rows:
        if row.get("category") == "summarization":
            article = row["turns"][0].removeprefix("Summarize: ")[:ARTICLE]
            sentences = re.split(r"(?<=[.!?]) +", article)
            if len(sentences) > 3:
                text = f'The article says: "{sentences[0]}" It goes on: "{sentences[2]}"'
                yield Task("summaries with quotes", f"{article}\n\nIn short:\n", text)


def _rows(file: Path) -> Iterator[dict[str, str]]:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines)
