"""The longest gap between pieces of a stream while a long prompt arrives.

python recipes/server/longest_gap.py MODEL [--prompt-tokens 4000] [--prefix-cache MiB]

It drives the server's scheduler without HTTP: a text is written, and after 60 steps a prompt
arrives that is not in the prefix cache. Before it, a loop of arithmetic is timed, which shows how
long the machine itself stalls.
"""

from __future__ import annotations

import argparse
import statistics
import time

import draftproof as dp
from draftproof.engine.prefix_cache import PrefixCache

TEXT = "The history of rivers and cities is long. " * 10


def report_stalls(seconds: float = 6.0) -> None:
    """Print how long a short loop takes, usually and at most."""
    times, end = list[float](), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        sum(range(100_000))
        times.append(1000 * (time.perf_counter() - start))
    usual = statistics.median(times)
    slow = sum(duration for duration in times if duration > 1.5 * usual) / sum(times)
    print(f"the machine alone: a loop of {usual:.1f} ms took up to {max(times):.1f} ms; {slow:.0%} "
          "of the time went to loops that took more than 1.5 times as long as usual")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--prefix-cache", type=int, default=512)
    parser.add_argument("--drafter")
    args = parser.parse_args()
    report_stalls()
    engine = dp.load(args.model, dtype="bfloat16", drafter=args.drafter)
    engine.prefixes = PrefixCache(args.prefix_cache << 20)
    tokens = min(args.prompt_tokens, engine.target.context - 600)
    scheduler = engine.new_scheduler(8, tokens + 600, interleave=True)
    sampling = dp.Sampling(temperature=0.8, seed=1, stop_tokens=())
    (stream,) = engine.read([TEXT], max_new_tokens=4000, sampling=sampling)
    numbers = [number * 7919 % (engine.target.vocab_size - 300) + 200 for number in range(tokens)]
    (prompt,) = engine.read([numbers], max_new_tokens=2, sampling=dp.Sampling())
    scheduler.add(stream)
    gaps, last, arrived, steps, since = list[tuple[float, int, str]](), 0.0, 0.0, 0, 0
    while since < 60 and not stream.finished:
        updates = scheduler.step()
        now, steps = time.perf_counter(), steps + 1
        if any(update.request is stream for update in updates):
            clock = scheduler.decoder.clock if scheduler.decoder else None
            times = (f"chunk {1000 * clock.prefill.took:.0f} ms, round "
                     f"{1000 * clock.decide.took:.0f} ms" if clock else "")
            gaps += [(now - last, steps, times)] if last else []
            last = now
        if steps == 60:
            scheduler.add(prompt)
            arrived = now
        if prompt.finished and not since:
            print(f"the prompt of {tokens} tokens was read in {now - arrived:.1f} s")
        since += prompt.finished
    all_gaps = sorted(gaps, reverse=True)
    longest = all_gaps[0][0]
    before = statistics.median(seconds for seconds, step, _ in gaps if step <= 60)
    during = statistics.median(seconds for seconds, step, _ in gaps if 60 < step <= steps - 60)
    print(f"{len(gaps)} gaps: longest {1000 * longest:.1f} ms; median during the prompt "
          f"{1000 * during:.1f} ms (longest: {longest / during:.1f} times that), before the prompt "
          f"{1000 * before:.1f} ms ({longest / before:.1f})")
    for seconds, step, times in all_gaps[:8]:
        print(f"  {1000 * seconds:.1f} ms at step {step}: {times}")


if __name__ == "__main__":
    main()
