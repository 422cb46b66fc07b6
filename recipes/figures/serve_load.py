"""Put load on a running server with OpenAI's API: tokens per second, latencies, and whether each
text is the one that its request gets alone.

python serve_load.py http://127.0.0.1:8000 --concurrency 1 16 --requests 200 [--greedy]
Every concurrency sends the same requests; texts are compared with those of the first concurrency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

OPENINGS = ["Once upon a time", "Lily and Tom went to the park.", "The capital of France is",
            "def quicksort(items):", "One day, a boy found a big red ball", "The recipe needs"]
LONG = "Tom had a dog. The dog liked to run. Every day they went to the park and played. " * 6


class Done(NamedTuple):
    """A text, the number of its tokens, seconds to its first piece, and seconds between pieces."""

    text: str
    tokens: int
    first: float
    between: list[float]


def requests(count: int, tokens: int, greedy: bool, streamed: float) -> list[dict[str, Any]]:
    """Mixed requests: short and long prompts, greedy and sampled, streamed and whole."""
    dice, bodies = Random(0), []
    for seed in range(count):
        prompt = (LONG if dice.random() < 0.1 else "") + dice.choice(OPENINGS)
        stream = dice.random() < streamed
        bodies.append({
            "prompt": prompt, "max_tokens": dice.randrange(tokens // 2, tokens * 3 // 2),
            "temperature": 0 if greedy else dice.choice([0, 0.8]), "seed": seed, "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        })
    return bodies


async def ask(connection: tuple[Any, Any], body: dict[str, Any]) -> Done:
    """Send a request over its own connection, by a client that needs little CPU time."""
    reader, writer = connection
    sent, began, times, text, tokens = json.dumps(body), time.perf_counter(), list[float](), "", 0
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                 "Content-Type: application/json\r\n"
                 f"Content-Length: {len(sent)}\r\n\r\n{sent}".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if " 200 " not in head:
        raise SystemExit(head + (await reader.read(2000)).decode())
    if "content-length:" in head:
        size = int(head.split("content-length:")[1].split()[0])
        answer = json.loads(await reader.readexactly(size))
        return Done(answer["choices"][0]["text"], answer["usage"]["completion_tokens"], 0, [])
    while size := int(await reader.readline(), 16):
        part = (await reader.readexactly(size + 2)).decode()
        for line in part.split("\n"):
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
            if event["choices"] and event["choices"][0]["text"]:
                text += event["choices"][0]["text"]
                times.append(time.perf_counter())
    await reader.readline()
    between = [later - sooner for sooner, later in pairwise(times)]
    return Done(text, tokens, times[0] - began if times else 0, between)


async def load(url: str, bodies: list[dict[str, Any]], at_once: int) -> tuple[float, list[Done]]:
    """Send all requests; return the seconds taken, and the answers."""
    host, port = url.removeprefix("http://").strip("/").split(":")
    left, done = list(enumerate(bodies))[::-1], dict[int, Done]()

    async def work() -> None:
        while left:
            place, body = left.pop()
            connection = await asyncio.open_connection(host, int(port), limit=1 << 24)
            done[place] = await ask(connection, body)
            connection[1].close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return time.perf_counter() - began, [done[place] for place in range(len(bodies))]


def percentile(values: list[float], share: float) -> float:
    """A percentile of seconds, in milliseconds."""
    return 1000 * sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer, on average")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--streamed", type=float, default=0.5,
                        help="share of the requests that are streamed")
    args = parser.parse_args()
    bodies = requests(args.requests, args.tokens, args.greedy, args.streamed)
    asyncio.run(load(args.url, bodies[:2], 1))                      # warms up the server
    first: list[str] | None = None
    for at_once in args.concurrency:
        seconds, done = asyncio.run(load(args.url, bodies, at_once))
        texts, tokens = [answer.text for answer in done], sum(answer.tokens for answer in done)
        first = first or texts
        same = sum(text == other for text, other in zip(texts, first, strict=True))
        between = [gap for answer in done for gap in answer.between]
        begun = [answer.first for answer in done if answer.first]
        print(f"at once {at_once}: {tokens / seconds:.1f} tokens/s, {tokens} tokens, "
              f"{seconds:.1f} s; same text {same} of {len(texts)}; first token p50 "
              f"{percentile(begun, 0.5):.0f} p95 {percentile(begun, 0.95):.0f} ms; between "
              f"p50 {percentile(between, 0.5):.1f} p95 {percentile(between, 0.95):.1f} ms",
              flush=True)


if __name__ == "__main__":
    main()
