"""Does llama.cpp's server keep the text when it speculates?

    python recipes/engines/llama_cpp.py --server PATH --gguf FILE [--draft-gguf FILE]
        --human-eval HumanEval.jsonl.gz [--prompts 6] [--new-tokens 300]
        [--reference FOLDER [--samples 4000]] [--modes ngram-simple draft-simple] --json FILE

For each way of speculating, a server is started and writes the greedy text of every prompt, which
is compared token by token with that of a server that does not speculate, with the same file and
the same number of threads. With --reference, the folder with the same weights, `draftproof audit`
then tests whether sampled texts follow the model's distribution. It knows the distribution of the
original weights, so give it a file in F32 or BF16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from greedy import PLAIN, compared, human_eval

REPEATING = ("I like red apples. I like green apples. I like red apples. I like green apples. "
             "I like red")
"""The prompt of the audit: its n-grams come again, so n-gram drafting finds something to draft."""
PROXYLESS = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def arguments_of(mode: str, args: argparse.Namespace) -> list[str]:
    """What the server is told about speculation."""
    if mode == PLAIN:
        return []
    drafted = ["--spec-type", mode, "--spec-draft-n-max", "4"]
    return [*drafted, "--spec-draft-model", str(args.draft_gguf)] if "draft" in mode else drafted


@contextlib.contextmanager
def serving(mode: str, args: argparse.Namespace) -> Iterator[str]:
    """The address of a server in this mode, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.server, "--model", args.gguf, "--port", port, "--ctx-size", 8192, "--parallel",
               4, "--threads", os.cpu_count(), *arguments_of(mode, args)]
    print("   ", " ".join(map(str, command)), flush=True)
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    address, since = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with code {process.returncode} while loading")
            with contextlib.suppress(urllib.error.URLError, OSError):
                PROXYLESS.open(f"{address}/health", timeout=5).close()
                break
            if time.monotonic() - since > 300:
                raise SystemExit("the server did not load the model within 300 seconds")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def completion(address: str, prompt: str, new_tokens: int) -> dict[str, Any]:
    """A greedy text: its token ids, and what the server counts."""
    body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "top_k": 0,
            "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"}, method="POST")
    with PROXYLESS.open(request, timeout=600) as answer:
        answered: dict[str, Any] = json.load(answer)
    return answered


def audited(address: str, args: argparse.Namespace) -> dict[str, Any]:
    """The verdict of `draftproof audit` on the server."""
    command = [sys.executable, "-m", "draftproof", "audit", "--endpoint", address, "--model",
               "model", "--reference", str(args.reference), "--samples", str(args.samples),
               "--prompt", REPEATING, "--length", "3"]
    print("   ", " ".join(command[2:]), flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    return {"code": done.returncode, "output": done.stdout + done.stderr}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--server", type=Path, required=True)
    add("--gguf", type=Path, required=True)
    add("--draft-gguf", type=Path)
    add("--modes", nargs="+", default=["ngram-simple"])
    add("--human-eval", type=Path, required=True)
    add("--prompts", type=int, default=6)
    add("--new-tokens", type=int, default=300)
    add("--reference", type=Path)
    add("--samples", type=int, default=4000)
    add("--not-audited", nargs="*", default=[], help="modes whose greedy texts are enough")
    add("--json", type=Path, required=True)
    args = parser.parse_args()
    prompts = human_eval(args.human_eval, args.prompts)
    report: dict[str, Any] = {"file": args.gguf.name, "prompts": len(prompts), "modes": {}}
    plain: list[list[int]] = []
    for mode in (PLAIN, *args.modes):
        print(f"{args.gguf.name}, {mode}", flush=True)
        with serving(mode, args) as address:
            answers = [completion(address, prompt, args.new_tokens) for prompt in prompts]
            texts = [answer["tokens"] for answer in answers]
            plain = plain or texts
            entry = compared(texts, plain)
            drafted = sum(answer["timings"].get("draft_n", 0) for answer in answers)
            accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
            seconds = sum(answer["timings"]["predicted_ms"] for answer in answers) / 1000
            entry |= {"drafted": drafted, "accepted": accepted,
                      "tokens_per_second": entry["tokens"] / seconds}
            print(f"    {accepted} of {drafted} draft tokens accepted", flush=True)
            report["modes"][mode] = entry
            if args.reference and mode not in args.not_audited:
                entry["audit"] = audited(address, args)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
