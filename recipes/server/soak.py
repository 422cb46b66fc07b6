"""Send mixed requests with random disconnects, from two keys, to three models.

python recipes/server/soak.py [--requests 2000] [--at-once 12]

Every text must be the one that its request gets alone, and the memory of the server must not grow.
Needs `pip install '.[dev]'`. It starts a server of the embedded models: the demo, its draft model,
and a LoRA adapter of the draft model with random weights. At the end it measures what another key
can learn about a prompt that a key has sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import httpx
import psutil

import draftproof as dp
from draftproof.model.adapters import MergedAdapter
from draftproof.model.loading import embedded, load_model

KEYS = ("first-key", "second-key")
OPENINGS = ["Once upon a time", "Lily and Tom went to the park.", "One day, a boy found a ball",
            "The dog", "In the morning the sun", "A bird sat on the old tree and"]
LONG = "Tom had a dog. The dog liked to run. Every day they went to the park and played. " * 8
LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--kinds", type=int, default=120, help="number of different requests")
    parser.add_argument("--prefix-cache", type=int, default=512, metavar="MiB",
                        help="size for each model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        adapter = make_adapter(Path(folder) / "adapter")
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(KEYS), encoding="utf-8")
        kinds = requests(args.kinds)
        began = time.perf_counter()
        add_solo_texts(kinds, adapter)
        print(f"{len(kinds)} texts alone: {time.perf_counter() - began:.0f} s", flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "draftproof", "serve", str(embedded("demo-draft")), "--port",
             "0", "--lora", f"adapter={adapter}", "--also", "demo", "--api-keys", str(keys),
             "--max-model-len", str(LENGTH), "--prefix-cache", str(args.prefix_cache),
             "--no-access-log"], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        matches = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stderr)
        url = next(match.group() for match in matches if match)
        Thread(target=lambda: sys.stderr.writelines(process.stderr), daemon=True).start()
        try:
            wrong = asyncio.run(soak(url, kinds, args, psutil.Process(process.pid)))
            measure_keys(url)
        finally:
            process.terminate()
        if wrong:
            raise SystemExit(f"{wrong} texts differ from those that their requests get alone")


def make_adapter(folder: Path) -> Path:
    """A LoRA adapter of the draft model, with random weights."""
    import peft
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(load_model("demo-draft"), config).save_pretrained(folder)
    return folder


def requests(count: int) -> list[dict[str, Any]]:
    """Different requests: models, long and short prompts, greedy and sampled, stops, schemas."""
    dice, bodies = Random(0), []
    schema = {"type": "object", "additionalProperties": False, "required": ["a"],
              "properties": {"a": {"enum": ["red", "green", "blue"]}}}
    for seed in range(count):
        body: dict[str, Any] = {
            "model": dice.choice(["demo-draft", "adapter", "demo"]),
            "prompt": (LONG if dice.random() < 0.15 else "") + dice.choice(OPENINGS),
            "max_tokens": dice.randrange(4, 60), "temperature": dice.choice([0, 0.8, 1.0]),
            "seed": seed, "n": dice.choice([1, 1, 1, 2]),
        }  # fmt: skip
        if dice.random() < 0.2:
            body["stop"] = [dice.choice([".", " the", "dog"])]
        if dice.random() < 0.1:
            body["response_format"] = {"type": "json_object", "schema": schema}
        if dice.random() < 0.2:
            body["draftproof"] = {"drafter": "none"}
            body["n"] = 1
        bodies.append(body)
    return bodies


def add_solo_texts(kinds: list[dict[str, Any]], adapter: Path) -> None:
    """Add to each request the texts that it gets alone and without drafts."""
    from draftproof.server.hosted_model import HostedModel, Limits
    from draftproof.server.metrics import Metrics
    from draftproof.server.request_queue import Worker
    from draftproof.server.schema import Completion

    folders: dict[str, Any] = {
        "demo-draft": embedded("demo-draft"), "demo": "demo",
        "adapter": (merged := MergedAdapter(embedded("demo-draft"), adapter)).folder()}
    for name, folder in folders.items():
        tokenizer = embedded("demo-draft") if name == "adapter" else None
        engine = dp.load(folder, drafter="none", dtype="bfloat16", tokenizer=tokenizer)
        hosted = HostedModel(engine, name, Limits(length=LENGTH), Worker(), Metrics(name))
        for body in (body for body in kinds if body["model"] == name):
            (request,), _ = hosted.read(Completion.model_validate(body))
            with engine.scheduled([request], 1) as scheduler:
                while scheduler.has_unfinished_requests():
                    scheduler.step()
            body["texts"] = [sequence.text for sequence in request.sequences]
    del merged


async def soak(
    url: str, kinds: list[dict[str, Any]], args: argparse.Namespace, process: psutil.Process
) -> int:
    """Send all requests; return how many texts were wrong."""
    dice, left, wrong, memory = Random(1), args.requests, 0, list[float]()
    counts = {"complete": 0, "left": 0}
    client = httpx.AsyncClient(base_url=url, timeout=300,
                               limits=httpx.Limits(max_connections=None))

    async def work() -> None:
        nonlocal left, wrong
        while left > 0:
            left -= 1
            if left % 50 == 0:
                memory.append(process.memory_info().rss / 2**20)
                cached = await prefix_bytes(client) / 2**20
                print(f"{left} left, {memory[-1]:.0f} MiB, {cached:.1f} of it in prefix "
                      f"caches, {wrong} wrong", flush=True)
            body, stream = dice.choice(kinds), dice.random() < 0.6
            pieces = dice.randrange(0, 8) if dice.random() < 0.3 else None
            texts, complete = await ask(client, body, stream, pieces, dice.choice(KEYS))
            counts["complete" if complete else "left"] += 1
            same = (texts == body["texts"] if complete else all(
                whole.startswith(text) for text, whole in zip(texts, body["texts"],
                                                              strict=True)))
            if not same:
                wrong += 1
                print("WRONG", body["model"], json.dumps(body)[-200:], texts, flush=True)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(args.at_once)))
    await client.aclose()
    settled = memory[len(memory) // 4 :]
    print(f"{args.requests} requests in {time.perf_counter() - began:.0f} s: {counts['complete']} "
          f"complete, {counts['left']} left early, {wrong} wrong texts; memory after the first "
          f"quarter {min(settled):.0f} to {max(settled):.0f} MiB "
          f"({100 * (max(settled) / min(settled) - 1):.1f} %)", flush=True)
    return wrong


async def prefix_bytes(client: httpx.AsyncClient) -> float:
    """The bytes in the prefix caches of all models."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    text = (await client.get("/metrics", headers=headers)).text
    return sum(map(float, re.findall(r"^draftproof:prefix_cache_bytes\{.*\} (\S+)$", text, re.M)))


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], stream: bool, pieces: int | None, key: str
) -> tuple[list[str], bool]:
    """The texts of a request, and whether they are complete; disconnects after `pieces` pieces."""
    sent = {name: value for name, value in body.items() if name != "texts"} | {"stream": stream}
    headers, texts = {"Authorization": f"Bearer {key}"}, [""] * body["n"]
    if not stream and pieces is not None:
        try:
            await asyncio.wait_for(client.post("/v1/completions", json=sent, headers=headers),
                                   0.01 * pieces)
        except TimeoutError:
            return texts, False
    if not stream:
        answer = await client.post("/v1/completions", json=sent, headers=headers)
        if answer.status_code != 200:
            raise SystemExit(answer.text)
        return [choice["text"] for choice in answer.json()["choices"]], True
    async with client.stream("POST", "/v1/completions", json=sent, headers=headers) as answer:
        if answer.status_code != 200:
            raise SystemExit((await answer.aread()).decode())
        count = 0
        async for line in answer.aiter_lines():
            if pieces is not None and count >= pieces:
                return texts, False
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                    count += 1
    return texts, True


def measure_keys(url: str) -> None:
    """Time prompts that a key sends, then another key, then the first key again."""
    seconds: dict[str, list[float]] = {"new": [], "of another key": [], "its own again": []}
    drafts: dict[str, list[int]] = {name: [] for name in seconds}
    with httpx.Client(base_url=url, timeout=300) as client:
        for turn in range(30):
            body = {"model": "demo", "prompt": f"{LONG} {turn} {OPENINGS[turn % 6]}",
                    "max_tokens": 60, "temperature": 0.8, "seed": turn}
            for name, key in zip(seconds, (KEYS[0], KEYS[1], KEYS[0]), strict=True):
                began = time.perf_counter()
                answer = client.post("/v1/completions", json=body,
                                     headers={"Authorization": f"Bearer {key}"})
                seconds[name].append(time.perf_counter() - began)
                usage = answer.json()["usage"]["completion_tokens_details"]
                drafts[name].append(usage["accepted_prediction_tokens"])
    for name, times in seconds.items():
        quarter = statistics.quantiles(times, n=4)
        print(f"a prompt that is {name}: {1000 * statistics.median(times):.0f} ms (quartiles "
              f"{1000 * quarter[0]:.0f} to {1000 * quarter[2]:.0f}), "
              f"{statistics.mean(drafts[name]):.1f} draft tokens accepted", flush=True)


if __name__ == "__main__":
    main()
