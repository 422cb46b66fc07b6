"""What the default drafter does after long texts, as a table: the time to the first token, tokens
per second and tokens per round after 1,000, 4,000 and 16,000 tokens of three kinds of text.

    python recipes/figures/long_context.py MODEL HumanEval.jsonl.gz BOOK.txt [--quantize int8]
        [--kv-cache int8] [--lengths 1000 4000 16000] [--new-tokens 64] [--json FILE]

"quotation" asks for a paragraph of the book again, word for word. "repository" completes a file
after other files of this project. "chat" is a conversation of many turns about HumanEval's tasks.
Plain decoding and the default drafter write each text once, after they have read all of it, and
must write the same. Speeds are those after the first token; the one of plain decoding is the
median over its tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import draftproof as dp

SOURCES = Path(__file__).parents[2] / "src" / "draftproof"


@dataclass(frozen=True)
class Measured:
    """One text by one engine: seconds to its first token, and tokens per second and per round."""

    tokens: list[int]
    first: float
    speed: float
    per_round: float


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def prompts(engine: dp.Engine, tasks: Path, book: Path, length: int) -> dict[str, list[int]]:
    """A prompt of each kind with nearly `length` tokens."""
    codec = engine.codec
    assert codec is not None
    paragraphs = [part for part in book.read_text(encoding="utf-8").split("\n\n")
                  if len(part) > 300]
    story, kept = "", list[str]()
    while len(codec.encode(story)) < length - 200 and len(kept) < len(paragraphs):
        kept.append(paragraphs[len(kept)])
        story = "\n\n".join(kept)
    wanted = kept[len(kept) // 2]
    quotation = [user(f"{story}\n\nRepeat the paragraph that begins with \"{wanted[:50]}\", word "
                      "for word.")]
    files = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*/*.py"))]
    repository = codec.encode("\n\n".join(files)[: 8 * length])
    chat = list[dict[str, str]]()
    with gzip.open(tasks, "rt", encoding="utf-8") as lines:
        for task in map(json.loads, lines):
            chat.append(user(f"Complete this function:\n\n{task['prompt']}"))
            if len(codec.encode_chat(chat)) >= length - 100:
                break
            solution = task["prompt"] + task["canonical_solution"]
            chat.append({"role": "assistant", "content": solution})
    return {"quotation": codec.encode_chat(quotation), "repository": repository[:length],
            "chat": codec.encode_chat(chat)}


def measure(engine: dp.Engine, prompt: list[int], new_tokens: int) -> Measured:
    """Complete a prompt once."""
    began, seconds, completion = time.perf_counter(), list[float](), None
    sampling = dp.Sampling(stop_tokens=())
    for update in engine.stream(prompt, max_new_tokens=new_tokens, sampling=sampling):
        seconds.append(time.perf_counter() - began)
        completion = update.completion
    assert completion is not None
    rounds = [after - before for before, after in pairwise(seconds)]
    per_round = completion.stats.emitted / max(1, completion.stats.rounds)
    plain = isinstance(engine.drafter, dp.Plain)
    speed = (1 / statistics.median(rounds) if plain
             else (len(completion.tokens) - 1) / (seconds[-1] - seconds[0]))
    return Measured(completion.tokens, seconds[0], speed, per_round)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("book", type=Path, help="a text file of at least 16,000 tokens")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--kv-cache", choices=("int8",))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="every number")
    args = parser.parse_args()
    options = {name: value for name, value in (("quantize", args.quantize),
                                               ("kv_cache", args.kv_cache)) if value}
    default = dp.load(args.model, **options)
    plain = dp.Engine(default.target, codec=default.codec)
    for engine in (plain, default):
        engine.generate("def main():", max_new_tokens=16)
    results = list[dict[str, object]]()
    print("| text | tokens | first token, s | plain, tokens/s | default, tokens/s | speed-up "
          "| tokens per round |\n|---|---|---|---|---|---|---|")
    for length in args.lengths:
        for kind, prompt in prompts(default, args.tasks, args.book, length).items():
            alone, drafted = (measure(engine, prompt, args.new_tokens)
                              for engine in (plain, default))
            if drafted.tokens != alone.tokens:
                sys.exit(f"the drafter changed the text of {kind} after {len(prompt)} tokens")
            print(f"| {kind} | {len(prompt):,} | {drafted.first:.1f} | {alone.speed:.1f} "
                  f"| {drafted.speed:.1f} | {drafted.speed / alone.speed:.2f} "
                  f"| {drafted.per_round:.2f} |", flush=True)
            results.append({"kind": kind, "length": len(prompt), "plain": asdict(alone),
                            "default": asdict(drafted)})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
