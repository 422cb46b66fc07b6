"""Check and measure everything we promise, on a device where nothing has run before.

    python recipes/gpu/first_contact.py --model smollm2-135m --model qwen-coder-1.5b \
        [--assistant qwen-coder-1.5b=qwen-coder-0.5b] [--device cuda] [--out first-contact]
        [--minutes 10] [--quick] [--only PART ...] [--again]

The parts, checks first, are machine, doctor, prove, tests, texts, launches, exact bits and speed.
Each part runs in its own process with a time limit, so that a crash or a hang costs only that part.
Its results are written at once: the same command, called again, runs the parts that are not done
yet. report.json and report.md in --out hold all results. No network is needed; pieces.py transfers
files. `--device cpu --quick` is a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKS = HERE / "checks.py"
DONE = ("passed", "failed")


class Part(NamedTuple):
    """A function of checks.py, the model that it runs on, if any, and its time limit."""

    check: str
    model: str | None
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.check}, {Path(self.model).name}" if self.model else self.check

    @property
    def file(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")


def parts_of(args: argparse.Namespace) -> list[Part]:
    """All checks first, then speed; the smallest models first."""
    quick, models = args.quick, ["demo", *args.model]
    parts = [Part("machine", None, 60)]
    parts += [Part("doctor", model, 120) for model in models]
    parts += [Part("prove", None, 240), Part("tests", None, 120 if quick else 240)]
    parts += [Part("texts", model, 150 if quick else 240) for model in models]
    parts += [Part("launches", model, 60) for model in models]
    parts += [Part("exact bits", None, 60)]
    parts += [Part("speed", model, 120 if quick else 240) for model in models]
    wanted = set(args.only or ())
    if unknown := wanted - {part.check for part in parts}:
        sys.exit(f"there is no part {min(unknown)}; parts: machine, doctor, prove, tests, texts, "
                 "launches, exact bits, speed")
    return [part for part in parts if not wanted or part.check in wanted]


def run_part(part: Part, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The results of a part, even if it crashed or was stopped."""
    result_file, log = args.out / f"{part.file}.part.json", args.out / f"{part.file}.log"
    result_file.unlink(missing_ok=True)
    spec = {"model": part.model or "demo", "device": args.device, "quick": args.quick,
            "assistant": dict(pair.split("=", 1) for pair in args.assistant).get(part.model or ""),
            "result": str(result_file), "seconds": seconds, "graphs": not args.no_graphs}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1",
                   "PYTHONPATH": str(ROOT / "src")}
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen([sys.executable, str(CHECKS), part.check, json.dumps(spec)],
                                   stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    result: dict[str, Any] = {"rows": [], "problems": []}
    if result_file.exists():
        result = json.loads(result_file.read_text(encoding="utf-8"))
        result_file.unlink()
    state = "passed" if code == 0 and not result["problems"] else "failed"
    if code is None:
        state, why = "out of time", f"stopped after {seconds:.0f} s"
        result["problems"].append(why)
    elif code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        result["problems"].append(f"exited with code {code}: {lines[-1] if lines else 'no output'}")
    return {"part": part.name, "state": state, "seconds": round(time.monotonic() - start, 1),
            "log": log.name, **result}


def markdown(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """The report in Markdown: verdicts, then the rows of each part."""
    lines = [f"# First contact: {args.device}", "", "| part | state | seconds | problems |",
             "|---|---|---|---|"]
    for result in results:
        problems = "; ".join(result["problems"][:3])
        more = len(result["problems"]) - 3
        problems += f"; and {more} more" if more > 0 else ""
        lines.append(f"| {result['part']} | {result['state']} | {result['seconds']:.0f} | "
                     f"{problems.replace('|', '/')} |")
    for result in results:
        if not result["rows"]:
            continue
        lines += ["", f"## {result['part']}", ""]
        columns = list(dict.fromkeys(name for row in result["rows"] for name in row))
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in result["rows"]:
            cells = (shown(row.get(name)).replace("|", "/") for name in columns)
            lines.append("| " + " | ".join(cells) + " |")
    command = " ".join(["python", *map(str, sys.argv)])
    return "\n".join([*lines, "", f"Command: `{command}`", ""])


def shown(value: Any) -> str:
    """The text of a cell."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def main(device: str = "cuda") -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", default=[], help="a folder; the embedded demo is always run")
    add("--assistant", action="append", default=[], metavar="MODEL=DRAFT",
        help="a draft model for one of the models")
    add("--device", default=device)
    add("--out", type=Path, default=Path("first-contact"))
    add("--minutes", type=float, default=10.0, help="time limit for all parts of this call")
    add("--quick", action="store_true", help="fewer prompts, tokens and batches")
    add("--no-graphs", action="store_true")
    add("--only", nargs="+", metavar="PART")
    add("--again", action="store_true", help="run parts that are done already, too")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start, results, parts = time.monotonic(), [], parts_of(args)
    for number, part in enumerate(parts, 1):
        kept, left = args.out / f"{part.file}.json", 60 * args.minutes - (time.monotonic() - start)
        if kept.exists() and not args.again:
            results.append(json.loads(kept.read_text(encoding="utf-8")))
            continue
        if left < 5:
            results.append({"part": part.name, "state": "not run", "seconds": 0, "rows": [],
                            "problems": ["no time was left; call the same command again"]})
            continue
        print(f"[{number}/{len(parts)}] {part.name} ...", end=" ", flush=True)
        result = run_part(part, args, min(part.seconds, left))
        print(f"{result['state']} in {result['seconds']:.0f} s", *result["problems"][:1],
              flush=True)
        if result["state"] in DONE:
            kept.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        results.append(result)
        write_report(results, args)
    write_report(results, args)
    print(f"report.md and report.json are in {args.out}")
    sys.exit(any(result["state"] != "passed" for result in results))


def write_report(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write both reports with the results so far."""
    text = json.dumps({"device": args.device, "parts": results}, indent=1) + "\n"
    (args.out / "report.json").write_text(text, encoding="utf-8")
    (args.out / "report.md").write_text(markdown(results, args), encoding="utf-8")


if __name__ == "__main__":
    main()
