"""Speed-up of the default drafter over plain decoding, with text that repeats its prompt.

Code edits: a HumanEval function is written again with other names. Summaries with quotes: a summary
of an article of Spec-Bench quotes its first and third sentences. Small models can do neither, so
the text is dictated: a logits processor forbids all tokens but the text's next token. What is
drafted and accepted, and what that costs, is measured; that a model would write this very text is
assumed. Each round starts with a new drafter, which sees every text once.
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
"""The most characters of an article, and the most tokens that are dictated."""


class Task(NamedTuple):
    kind: str
    prompt: str
    text: str


class Dictation:
    """A logits processor that allows only the next token of a text."""

    def __init__(self, prompt: list[int], text: list[int]) -> None:
        self.start, self.text = len(prompt), text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = min(max(input_ids.shape[1] - self.start, 0), len(self.text) - 1)
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.text[place]] = 0
        return allowed


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl, gzipped or not")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="number of texts of each kind")
    parser.add_argument("--rounds", type=int, default=2)


def run(args: argparse.Namespace) -> list[Row]:
    kinds = [(code_edits, args.human_eval), (summaries, args.spec_bench)]
    tasks = [task for make, file in kinds if file
             for task in islice(make(_rows(file)), args.limit)]
    if not tasks:
        raise SystemExit("there is nothing to write; give --human-eval or --spec-bench")
    plain, _ = load_methods(args.model, [], [], dtype=args.dtype)
    codec, target = plain.codec, plain.target
    measured: dict[str, tuple[list[float], list[float], RoundStats]] = {}
    for _ in range(args.rounds):
        members = [dp.PromptLookup(), dp.SuffixDrafter(), dp.TokenRecycling()]
        drafting = dp.Engine(target, dp.Portfolio(members), stop_tokens=plain.stop_tokens)
        for place, task in enumerate(tasks):
            prompt, text = codec.encode(task.prompt), codec.encode(task.text, special=False)[:NEW]
            if len(prompt) + len(text) + 16 > target.context:
                continue
            plain_seconds, drafting_seconds, stats = measured.setdefault(
                task.kind, ([], [], RoundStats()))
            sampling = dp.Sampling(processors=(Dictation(prompt, text),), max_new_tokens=len(text))
            both = ((plain, plain_seconds), (drafting, drafting_seconds))
            for engine, spent in both if place % 2 else reversed(both):
                start = time.perf_counter()
                done = engine.generate([prompt], sampling=sampling)[0].checked()
                spent.append((time.perf_counter() - start) / len(text))
                assert done.tokens == text, f"written {done.tokens}, dictated {text}"
                if engine is drafting:
                    stats.add(done.stats)
    return [{"dictated": kind, "texts": len(plain_seconds),
             "plain tokens/s": len(plain_seconds) / sum(plain_seconds),
             "speed-up": ratio(plain_seconds, drafting_seconds),
             "tokens/round": stats.tokens_per_round}
            for kind, (plain_seconds, drafting_seconds, stats) in measured.items()]


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
