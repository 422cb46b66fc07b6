"""The prompts whose answers draft heads are trained on: chats and code, without evaluation prompts.

They are the questions of Spec-Bench, except every third of a category, which is held out; GSM8K's
training questions; and functions of Python's standard library to complete, explain and change. None
is from HumanEval. `questions.py` lets the target write more questions.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LINES = (4, 40)
"""The least and the most lines of a function in a prompt."""
TASKS = (
    "Complete the following Python function.\n\n```python\n{opening}\n```",
    "Write a Python function `{name}`. {summary}",
    "Explain what this Python function does, step by step.\n\n```python\n{source}\n```",
    "Rewrite this function with type hints and a clearer docstring.\n\n```python\n{source}\n```",
    "Write unit tests for this function.\n\n```python\n{source}\n```",
    "Is there a bug in this code? If so, fix it.\n\n```python\n{source}\n```",
    "{opening}",
)
"""Questions of a chat about a function."""
STARTS = ("{opening}\n", "from typing import List\n\n\ndef {name}(")
"""Texts that the target continues as they are, not in a chat."""


def chat(text: str, category: str) -> Row:
    return {"messages": [{"role": "user", "content": text}], "category": category}


def spec_bench(file: Path) -> tuple[list[Row], list[Row]]:
    """The questions to train on, and every third of a category, to evaluate on."""
    by_category: dict[str, list[Row]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_category[row["category"]].append(chat(row["turns"][0], row["category"]))
    rows = [(at, row) for group in by_category.values() for at, row in enumerate(group)]
    return [row for at, row in rows if at % 3], [row for at, row in rows if at % 3 == 0]


def functions() -> Iterator[tuple[str, str, str, str]]:
    """Name, summary, signature with docstring, and source of the standard library's functions."""
    warnings.simplefilter("ignore")
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(file.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            summary, body = ast.get_docstring(node), node.body
            last = node.end_lineno or 0
            if not summary or not LINES[0] <= last - node.lineno <= LINES[1] or len(body) < 2:
                continue
            source = lines[node.lineno - 1 : last]
            indent = len(source[0]) - len(source[0].lstrip())
            source = [line[indent:] for line in source]
            opening = source[: (body[0].end_lineno or 0) - node.lineno + 1]
            first = summary.split("\n\n")[0].replace("\n", " ")
            yield node.name, first, "\n".join(opening), "\n".join(source)


def code(seed: int, most: int) -> list[Row]:
    """Up to `most` rows: two tasks and two starts for each function, shuffled."""
    rng, rows = random.Random(seed), []
    for name, summary, opening, source in functions():
        known = {"name": name, "summary": summary, "opening": opening, "source": source}
        rows += [chat(task.format(**known), "code") for task in rng.sample(TASKS, 2)]
        for start in STARTS:
            rows.append({"prompt": start.format(**known), "category": "completion"})
    return rng.sample(rows, min(most, len(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench, gsm8k")
    parser.add_argument("--out", type=Path, required=True, help="for prompts.jsonl, judged.jsonl")
    parser.add_argument("--code", type=int, default=12000)
    parser.add_argument("--sums", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train, judged = spec_bench(options.data / "spec_bench" / "question.jsonl")
    sums = (options.data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rng = random.Random(options.seed)
    train += [chat(json.loads(line)["question"], "gsm8k")
              for line in rng.sample(sums, options.sums)]
    train += code(options.seed, options.code)
    rng.shuffle(train)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("prompts", train), ("judged", judged)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{len(rows):,} {name}")


if __name__ == "__main__":
    main()
