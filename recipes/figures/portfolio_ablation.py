"""What each drafter of the default portfolio adds: tokens per round without it, on five kinds of
text, with a fixed budget.

    python recipes/figures/portfolio_ablation.py MODEL HumanEval.jsonl.gz spec_bench/question.jsonl

Texts are greedy, and the same with every set of drafters. "edits" asks for a HumanEval solution
again, with its variables renamed; "second turns" are the second turns of Spec-Bench's chats.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import draftproof as dp

BUDGET = 8
MEMBERS = {"prompt lookup": dp.PromptLookup, "suffix": dp.SuffixDrafter,
           "recycling": dp.TokenRecycling}
CHATS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def kinds(engine: dp.Engine, tasks: str, questions: str, count: int) -> dict[str, list[Any]]:
    with gzip.open(tasks, "rt", encoding="utf-8") as file:
        code = [json.loads(line) for line in file][:: 160 // count][:count]
    rows = [json.loads(line) for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    summaries = [row for row in rows if row["category"] == "summarization"][:count]
    chats = [row for row in rows if row["category"] in CHATS][:: 80 // count][:count]
    edit = "Write this again with all variables renamed, and nothing else:\n\n{}{}"
    second = list[Any]()
    for row in chats:
        first = user(row["turns"][0])
        answer = engine.generate([[first]], max_new_tokens=96)[0].text
        second.append([first, {"role": "assistant", "content": answer}, user(row["turns"][1])])
    return {
        "HumanEval": [task["prompt"] for task in code],
        "edits": [[user(edit.format(task["prompt"], task["canonical_solution"]))] for task in code],
        "summaries": [[user(row["turns"][0])] for row in summaries],
        "chats": [[user(row["turns"][0])] for row in chats], "second turns": second,
    }


def main(model: str, tasks: str, questions: str, count: str = "8", tokens: str = "64") -> None:
    loaded = dp.load(model, drafter="none")
    prompts = kinds(loaded, tasks, questions, int(count))
    ways = {"all": list(MEMBERS)} | {
        f"without {name}": [member for member in MEMBERS if member != name] for name in MEMBERS}
    print(f"{'':22}" + "".join(f"{kind:>14}" for kind in prompts))
    texts: dict[str, list[list[int]]] = {}
    for way, names in ways.items():
        line = f"{way:22}"
        for kind, of_kind in prompts.items():
            drafter = dp.Portfolio([MEMBERS[name]() for name in names])
            engine = dp.Engine(loaded.target, drafter, codec=loaded.codec, budget=BUDGET,
                               stop_tokens=loaded.stop_tokens)
            completions = [engine.generate([prompt], max_new_tokens=int(tokens))[0]
                           for prompt in of_kind]
            written = [completion.tokens for completion in completions]
            assert texts.setdefault(kind, written) == written, f"{way}: the texts changed"
            emitted = sum(completion.stats.emitted for completion in completions)
            line += f"{emitted / sum(completion.stats.rounds for completion in completions):14.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
