"""GGUF files by draftproof and by llama.cpp, interleaved, as a table, as JSON and as a picture:

    python recipes/figures/gguf_speed.py FILE.gguf ... --human-eval HumanEval.jsonl.gz
        [--llama-bench PATH] [--prompts 6] [--new-tokens 96] [--read 512 2000] [--json FILE]
        [--plot docs/speed.png docs/speed-dark.png]

The same file runs in its own format everywhere, so the weights are of equal quality. For each
prompt in turn, draftproof decodes plainly and with its default drafter, timed after the prompt is
read, and `llama-bench` generates as many tokens once (without a prompt, so its context is shorter).
Tokens per second are medians; whiskers are the quartiles. Greedy texts of the drafter are compared
with the plain ones, and a difference ends the command. `--read` also measures how fast prompts of
so many tokens are read, three times by each engine in turn.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import draftproof as dp
from draftproof.plots.style import theme_of

PLAIN, DEFAULT, LLAMA = "draftproof, plain", "draftproof, default", "llama.cpp, plain"
SERIES = {LLAMA: 0, PLAIN: 3, DEFAULT: 1}
"""Engines in the order of their bars, and which of the theme's series their colour is."""


def human_eval(path: Path, count: int) -> list[str]:
    """The first prompts of HumanEval."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(count), strict=False)]


def ours(engine: dp.Engine, prompt: str, new_tokens: int) -> tuple[str, float]:
    """The text, and tokens per second after the prompt was read."""
    start = time.perf_counter()
    [done] = engine.generate(prompt, max_new_tokens=new_tokens)
    seconds = time.perf_counter() - start - done.stats.seconds["prefill"]
    return done.text, len(done.tokens) / seconds


def llama(program: str, file: Path, new_tokens: int, prompt: int = 0) -> float:
    """Tokens per second of one generation, or of reading one prompt, by llama-bench."""
    threads = str(torch.get_num_threads())
    command = [program, "-m", str(file), "-p", str(prompt), "-n", str(new_tokens), "-r", "1",
               "-t", threads, "-o", "json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)[0]["avg_ts"])


def measured(file: Path, prompts: list[str], args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of every engine, one figure per prompt."""
    plain, default = dp.load(str(file), drafter="none"), dp.load(str(file))
    engines = [PLAIN, DEFAULT, *([LLAMA] if args.llama_bench else [])]
    speeds = {engine: list[float]() for engine in engines}
    for engine in (plain, default):
        engine.generate("def main():", max_new_tokens=16)
    for prompt in prompts:
        text, speed = ours(plain, prompt, args.new_tokens)
        drafted, faster = ours(default, prompt, args.new_tokens)
        if drafted != text:
            sys.exit(f"{file.name}: the drafter changed the text after {prompt[:60]!r}")
        speeds[PLAIN].append(speed)
        speeds[DEFAULT].append(faster)
        if args.llama_bench:
            speeds[LLAMA].append(llama(args.llama_bench, file, args.new_tokens))
    return speeds


def reading(file: Path, text: str, lengths: list[int], program: str | None) -> dict[str, float]:
    """Medians of prompt tokens read per second."""
    engine = dp.load(str(file), drafter="none")
    assert engine.codec is not None
    tokens = engine.codec.encode(text)
    speeds: dict[str, list[float]] = {}
    for turn in range(4):
        for length in lengths:
            prompt = (tokens * (1 + length // len(tokens)))[:length]
            [done] = engine.generate([prompt], max_new_tokens=1)
            taken = {"draftproof": length / done.stats.seconds["prefill"]}
            if program:
                taken["llama.cpp"] = llama(program, file, 0, length)
            for name, speed in taken.items():
                speeds.setdefault(f"{name}, {length:,} tokens", []).extend([speed] * bool(turn))
    return {name: statistics.median(values) for name, values in speeds.items()}


def picture(figures: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Bars with quartiles, one panel per file, since their speeds differ by ten times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    theme = theme_of(path)
    plot, panels = plt.subplots(1, len(figures), figsize=(3.2 * len(figures), 3.2), squeeze=False,
                                facecolor=theme.background)
    for panel, (name, speeds) in zip(panels[0], figures.items(), strict=True):
        engines = [engine for engine in SERIES if engine in speeds]
        for place, engine in enumerate(engines):
            values = speeds[engine]
            middle = statistics.median(values)
            low, _, high = (statistics.quantiles(values) if len(values) > 1 else [middle] * 3)
            panel.bar(place, middle, color=theme.color(SERIES[engine]), label=engine, width=0.75)
            panel.errorbar(place, middle, [[middle - low], [high - middle]], color=theme.text,
                           capsize=3)
            panel.text(place, high * 1.02, f"{middle:.0f}", ha="center", va="bottom",
                       color=theme.text)
        panel.set_title(name, fontsize=10, color=theme.text)
        panel.set_xticks([])
        panel.margins(y=0.15)
        panel.set_facecolor(theme.background)
        panel.tick_params(colors=theme.faint)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(theme.grid)
    panels[0][0].set_ylabel("tokens per second", color=theme.text)
    handles, labels = panels[0][0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False,
                labelcolor=theme.text)
    plot.tight_layout(rect=(0, 0.08, 1, 1))
    plot.savefig(path, dpi=150, facecolor=theme.background)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--human-eval", type=Path, required=True)
    parser.add_argument("--llama-bench")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--read", type=int, nargs="*", default=[], metavar="TOKENS",
                        help="measure reading prompts of these lengths, too")
    parser.add_argument("--plot", type=Path, nargs="*", default=[],
                        help="files; of a name that ends in -dark, for dark pages")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = human_eval(args.human_eval, args.prompts)
    figures: dict[str, dict[str, list[float]]] = {}
    for file in args.files:
        figures[file.stem] = speeds = measured(file, prompts, args)
        for engine, values in speeds.items():
            print(f"{file.stem:24} {engine:20} {statistics.median(values):7.1f} tokens/s "
                  f"({min(values):.1f} to {max(values):.1f})", flush=True)
        if args.read:
            read = reading(file, "\n".join(prompts), args.read, args.llama_bench)
            for name, speed in read.items():
                print(f"{file.stem:24} reading, {name:28} {speed:7.1f} tokens/s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    for path in args.plot:
        picture(figures, path)


if __name__ == "__main__":
    main()
