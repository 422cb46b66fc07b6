"""Seconds from the command to the first token and to the end, as a table:

    python recipes/figures/start_time.py MODEL ... [--option=--quantize=int8] [--llama PATH]
        [--new-tokens 64] [--rounds 5] [--json FILE]

Each MODEL is a GGUF file or a folder; `draftproof run` completes a prompt with it in a new process.
PATH is llama.cpp's `llama-completion`, which does the same with the GGUF files, greedily and with
as many threads. The engines take turns; times are medians, with the range in brackets. The first
run of each command is left out, as it loads the files into the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "def quicksort(items):\n    "


def seconds(command: list[str]) -> tuple[float, float]:
    """Seconds from the start of a command to its first output and to its last.

    Raises:
        SystemExit: The command failed.
    """
    start = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        first = last = 0.0
        while os.read(process.stdout.fileno(), 4096):
            last = time.perf_counter() - start
            first = first or last
        errors = process.stderr.read().decode(errors="replace")
    if process.returncode or not first:
        sys.exit(f"{' '.join(command)}: exit {process.returncode}\n{errors[-2000:]}")
    return first, last


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="GGUF files and folders")
    parser.add_argument("--option", action="append", default=[],
                        help="an option of draftproof run, such as --option=--quantize=int8")
    parser.add_argument("--llama", help="llama.cpp's llama-completion")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count, threads = str(options.new_tokens), str(len(os.sched_getaffinity(0)))
    commands = dict[str, list[str]]()
    for model in options.models:
        name = Path(model).name
        commands[f"draftproof {' '.join(options.option)} {name}".replace("  ", " ")] = [
            sys.executable, "-m", "draftproof", "run", model, "-p", PROMPT, "--max-new-tokens",
            count, *options.option]  # fmt: skip
        if options.llama and model.lower().endswith(".gguf"):
            commands[f"llama.cpp {name}"] = [
                options.llama, "-m", model, "-p", PROMPT, "-n", count, "--temp", "0", "-t", threads,
                "-no-cnv", "--no-display-prompt", "--ignore-eos"]  # fmt: skip
    taken = {name: list[tuple[float, float]]() for name in commands}
    for turn in range(options.rounds + 1):
        for name, command in commands.items():
            result = seconds(command)
            if turn:
                taken[name].append(result)
    print(f"| command | first token | last of {count} tokens |\n|---|---|---|")
    for name, results in taken.items():
        first, last = (list(values) for values in zip(*results, strict=True))
        print(f"| {name} | {shown(first)} | {shown(last)} |")
    if options.json:
        options.json.write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
