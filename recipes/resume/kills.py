"""Kill a batch file and a training run at random moments, resume them, and compare the results:

    python recipes/resume/kills.py [--kills 20] [--seed 0] [batch] [train]

Each is run once to its end. Then it is started again and again and killed (SIGKILL) at a random
moment of its start, or of the next part of its work, until it was killed so often; a last start
runs to the end. Fails if the file of results, or the weights of the heads, is not what the run
without kills made, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAM = [sys.executable, "-m", "draftproof"]


def batch(folder: Path) -> tuple[list[str], Callable[[], str]]:
    """A file of prompts: the command, and what it wrote."""
    rows, out = folder / "rows.jsonl", folder / "out.jsonl"
    rows.write_text("".join(
        json.dumps({"prompt": f"Once upon a time there were {number}", "seed": number}) + "\n"
        for number in range(400)
    ), encoding="utf-8")
    command = [*PROGRAM, "run", "demo", "--prompts", str(rows), "--out", str(out),
               "--max-new-tokens", "60", "--temperature", "0.8"]

    def written() -> str:
        texts = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        return json.dumps([(row["index"], row["text"], row["tokens"]) for row in texts])

    return command, written


def train(folder: Path) -> tuple[list[str], Callable[[], str]]:
    """Heads for the embedded model: the command, and a digest of their weights."""
    texts, out = folder / "texts.txt", folder / "heads"
    texts.write_text("\n\n".join(
        f"Once upon a time there was a cat number {number}. It ran and ran, and then it slept."
        for number in range(300)
    ), encoding="utf-8")
    command = [*PROGRAM, "train", "medusa", "demo", "--data", str(texts), "--out", str(out),
               "--steps", "60", "--heads", "2", "--length", "64", "--batch", "2"]

    def written() -> str:
        return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()

    return command, written


RUNS: dict[str, Callable[[Path], tuple[list[str], Callable[[], str]]]] = {
    "batch": batch, "train": train}


def run_once(command: list[str], folder: Path) -> tuple[float, float]:
    """Run a command to its end: seconds until its first result was written, and until the end."""
    start, first = time.monotonic(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        written = [folder / "out.jsonl", folder / "heads" / "state.pt"]
        if not first and any(file.exists() and file.stat().st_size for file in written):
            first = time.monotonic() - start
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"FAIL: {' '.join(command)} ended with {process.returncode}")
    return first, time.monotonic() - start


def killed_often(
    command: list[str], kills: int, dice: random.Random, first: float, seconds: float
) -> int:
    """Start a command and kill it, again and again; how often it was. Each start goes on from what
    the last one wrote, so that all parts of the run are met."""
    done = 0
    for _ in range(2 * kills):
        if done == kills:
            break
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        part = dice.uniform(0, 1.5 * (seconds - first) / kills)
        time.sleep(first * dice.uniform(0.5, 1.0) + part if dice.random() < 0.8 else part)
        if process.poll() is None:
            process.kill()
            done += 1
        elif process.wait() != 0:
            raise SystemExit(f"FAIL: {' '.join(command)} ended with {process.returncode}")
    return done


def main() -> None:
    """Run both, or one, and exit with 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="batch|train", help="both without it")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.runs:               # argparse refuses a default among several choices
        if name not in RUNS:
            parser.error(f"there is no {name!r}; there are {', '.join(RUNS)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    dice, failed = random.Random(options.seed), False
    for name in options.runs or RUNS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            command, written = RUNS[name](folder)
            first, seconds = run_once(command, folder)
            wanted = written()
            for result in (folder / "out.jsonl", folder / "heads"):
                shutil.rmtree(result, ignore_errors=True) if result.is_dir() else \
                    result.unlink(missing_ok=True)
            kills = killed_often(command, options.kills, dice, first, seconds)
            subprocess.run(command, check=True, capture_output=True)
            same = written() == wanted
            failed |= not same
            print(f"{name}: killed {kills} times, then resumed: "
                  f"{'the same result: PASS' if same else 'ANOTHER RESULT: FAIL'}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
