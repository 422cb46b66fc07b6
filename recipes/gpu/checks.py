"""The parts of first_contact.py, each run as `python checks.py PART SPEC`; SPEC is JSON.

Every row is written when it is known, so that a part that crashes or runs out of time leaves what
it found. A problem is a sentence about what is not as promised.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import draftproof as dp
from draftproof.bench.workloads import GENERAL, STORIES, read_prompts
from draftproof.model.device import Device, versions
from draftproof.requests.completion import first_difference

ROOT = Path(__file__).resolve().parents[2]
HEADS = {"demo": ("medusa", "redrafter"),
         "smollm2-135m": ("smollm2-135m-medusa", "smollm2-135m-redrafter"),
         "qwen-coder-1.5b": ("qwen2.5-coder-1.5b-redrafter",
                             "qwen2.5-coder-1.5b-redrafter+portfolio")}
"""Heads in the package, by the names of folders."""
NEAR_TIE = 0.25
"""Log-probability between two tokens, in 16 bits, up to which rounding may exchange them."""
DEVICE_TESTS = ("tests/engine/test_exact.py", "tests/engine/test_static_shapes.py",
                "tests/engine", "tests/verify")


class Part:
    """What one part is asked, and what it finds."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.model, self.device, self.quick = spec["model"], spec["device"], spec["quick"]
        self.assistant, self.graphs = spec["assistant"], spec["graphs"]
        self.seconds, self.file = spec["seconds"], Path(spec["result"])
        self.rows, self.problems = list[dict[str, Any]](), list[str]()
        self.started = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds before it is stopped."""
        return float(self.seconds) - (time.monotonic() - self.started)

    def add(self, row: dict[str, Any], problem: str | None = None) -> None:
        """A row, and what is wrong about it."""
        self.rows.append(row)
        self.problems += [problem] if problem else []
        print(row, problem or "", flush=True)
        part = self.file.with_suffix(".tmp")
        body = {"rows": self.rows, "problems": self.problems}
        part.write_text(json.dumps(body), encoding="utf-8")
        part.replace(self.file)

    def prompts(self, count: int) -> list[Any]:
        """Prompts that the model knows something about."""
        return read_prompts(STORIES if self.model == "demo" else GENERAL)[:count]

    def drafters(self) -> list[dict[str, Any]]:
        """Every drafter that fits the model, as options of `dp.load`; the first is plain."""
        names: list[dict[str, Any]] = [{"drafter": "none"}, {"drafter": "portfolio"}]
        names += [{"drafter": name} for name in HEADS.get(Path(self.model).name, ())]
        draft = "demo-draft" if self.model == "demo" else self.assistant
        return [*names, {"assistant_model": draft}] if draft else names

    def load(self, graphs: bool = False, **options: Any) -> dp.Engine:
        """The engine; the memory of the one before is free."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return dp.load(self.model, device=self.device, graphs=graphs, **options)


def name_of(options: dict[str, Any]) -> str:
    """A drafter in a word."""
    return Path(str(options.get("assistant_model") or options["drafter"])).name


def machine(part: Part) -> None:
    """What is here."""
    device = Device.from_name(part.device)
    free, total = device.memory()
    facts = {**versions(), "device": f"{part.device}: {device.name}",
             "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
             "cores": os.cpu_count(), "CUDA": torch.version.cuda,
             "bfloat16": device.bf16_is_native}
    for name, value in facts.items():
        part.add({"fact": name, "value": str(value)})
    left = torch.randn(256, 256, device=part.device, dtype=torch.float32)
    error = float((left @ left - (left.cpu() @ left.cpu()).to(part.device)).abs().max())
    part.add({"fact": "largest error of a product of 256", "value": f"{error:.2g}"},
             f"a product is {error:.2g} off" if error > 0.5 else None)


def doctor(part: Part) -> None:
    """Exactness classes: which reads give the same bits."""
    from draftproof.model.exactness import probe

    widest = Device(torch.device(part.device)).widest
    kinds = [torch.bfloat16, torch.float16, torch.float32, widest]
    for dtype in dict.fromkeys(kinds[:1] + kinds[2:] if part.quick else kinds):
        word = str(dtype).removeprefix("torch.")
        engine = part.load(drafter="none", dtype=word)
        forced = 48 if part.quick else 96
        probed = probe(engine.target, forced=forced)
        worst = max(probed.differ.values(), default=0.0)
        bound = {"bfloat16": 2.0, "float16": 0.5, "float32": 1e-2}.get(word, 1e-8)
        part.add({"dtype": word, "same bits": len(probed.same), "other bits": len(probed.differ),
                  "largest difference of logits": worst, "exact nodes": probed.exact_nodes,
                  "exact tree nodes": probed.exact_tree_nodes},
                 f"{word}: logits differ by {worst:.2g}, more than rounding" if worst > bound
                 else None)


def command(part: Part, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours or of pytest, in the time that is left."""
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True,
                          check=False, cwd=ROOT, timeout=max(5.0, part.left - 2))


def prove(part: Part) -> None:
    """`draftproof prove` on this device, without the planted bugs."""
    sections = ("sampling", "bits") if part.quick else (
        "distribution", "sampling", "bits", "configurations")
    for section in sections:
        start = time.monotonic()
        done = command(part, "draftproof", "prove", "demo", "--quick", "--device", part.device,
                       "--section", section)
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        part.add({"section": section, "seconds": time.monotonic() - start, "verdict": lines[0]},
                 f"{section}: {lines[-1]}" if done.returncode else None)


def tests(part: Part) -> None:
    """The tests that make sense on a device."""
    os.environ["DRAFTPROOF_TEST_DEVICE"] = part.device
    for file in DEVICE_TESTS[: 2 if part.quick else None]:
        done = command(part, "pytest", "-x", "-p", "no:cacheprovider", file)
        lines = done.stdout.strip().splitlines() or ["no output"]
        part.add({"file": file, "result": lines[-1]},
                 f"{file}: {lines[-1]}" if done.returncode not in (0, 5) else None)


def texts(part: Part) -> None:
    """Texts of every drafter against plain decoding: greedy and sampled, in batches, as graphs."""
    new, batches = (12, (1, 4)) if part.quick else (48, (1, 8, 32))
    small = Path(part.model).name in ("demo", "smollm2-135m")
    wide = str(Device(torch.device(part.device)).widest).removeprefix("torch.")
    graphs = (False, True) if part.graphs and Device(torch.device(part.device)).captures else (
        False,)
    for dtype in ((wide, "bfloat16") if small else ("bfloat16",)):
        plain: dict[tuple[int, float], list[Any]] = {}
        for options in part.drafters():
            for recorded in graphs:
                engine = part.load(graphs=recorded, dtype=dtype, **options)
                for batch in batches:
                    prompts = (part.prompts(8) * 4)[:batch]
                    for temperature in (0.0, 0.8):
                        sampling = dp.Sampling(temperature=temperature, seed=3, max_new_tokens=new)
                        done = engine.generate(prompts, sampling=sampling, batch_size=batch)
                        wanted = plain.setdefault((batch, temperature), done)
                        add_texts(part, engine, prompts, done, wanted, {
                            "dtype": dtype, "drafter": name_of(options), "graphs": recorded,
                            "batch": batch, "temperature": temperature})
                        if part.left < 3:
                            part.add({"dtype": "the rest was not run"}, "no time was left")
                            return


def add_texts(part: Part, engine: dp.Engine, prompts: list[Any], done: list[Any],
              wanted: list[Any], row: dict[str, Any]) -> None:
    """A row for one way of writing. In 16 bits a near-tie may fall either way; else nothing may
    differ."""
    places = [first_difference(text.checked().tokens, plain.tokens)
              for text, plain in zip(done, wanted, strict=True)]
    differ = [index for index, place in enumerate(places) if place is not None]
    row |= {"same": f"{len(done) - len(differ)}/{len(done)}",
            "first difference": min((place for place in places if place is not None), default=None)}
    problem, label = None, ", ".join(f"{name} {value}" for name, value in row.items())
    if differ and row["dtype"] not in ("bfloat16", "float16"):
        problem = f"{label}: the text is another one"
    elif differ and row["temperature"] == 0:
        gaps = [gap_at(engine, prompts[index], done[index], wanted[index]) for index in differ[:3]]
        row["gap"] = max(gaps)
        problem = f"{label}: no near-tie, {max(gaps):.2g}" if max(gaps) > NEAR_TIE else None
    part.add(row, problem)


def gap_at(engine: dp.Engine, prompt: Any, text: Any, wanted: Any) -> float:
    """Log-probability between the two tokens where texts part; infinite if one is none of the
    likeliest."""
    place = first_difference(text.tokens, wanted.tokens) or 1
    ids = [*engine.requests.tokens(prompt), *wanted.tokens[: place - 1]]
    asked = dp.Sampling(max_new_tokens=1, logprobs=True, top_logprobs=5)
    [done] = engine.generate([ids], sampling=asked)
    likely = dict(done.top_logprobs[0]) if done.top_logprobs else {}
    tokens = [texts[place - 1] for texts in (text.tokens, wanted.tokens) if len(texts) >= place]
    scores = [likely.get(token, float("-inf")) for token in tokens]
    return float(max(scores) - min(scores)) if len(scores) == 2 else float("inf")


def launches(part: Part) -> None:
    """Operators, kernels, graphs and copies to the host of a plain token and of a drafted round."""
    from torch.profiler import ProfilerActivity, profile

    cuda = part.device == "cuda"
    kinds = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    names = ("cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaStreamSynchronize")
    for options in part.drafters():
        for recorded in (False, True) if cuda and part.graphs else (False,):
            engine = part.load(graphs=recorded, dtype="bfloat16", budget=5, **options) \
                if name_of(options) != "none" else part.load(graphs=recorded, dtype="bfloat16",
                                                             **options)
            [prompt] = part.prompts(1)
            engine.generate([prompt], max_new_tokens=24)
            with profile(activities=kinds) as profiled:
                [done] = engine.generate([prompt], max_new_tokens=24)
            rounds, events = max(1, done.stats.rounds), profiled.events()
            counted = {name: sum(event.name.startswith(name) for event in events) / rounds
                       for name in names} if cuda else {"operators": len(events) / rounds}
            part.add({"drafter": name_of(options), "graphs": recorded, "rounds": rounds,
                      "tokens per round": done.stats.tokens_per_round, **counted})


def exact_bits(part: Part) -> None:
    """Row-invariant kernels: the same bits for every number of rows, and what they cost."""
    if part.device != "cuda":
        part.add({"exact bits": "only on cuda; tests/forward/test_exact_bits.py interprets them"})
        return
    try:
        from draftproof.forward import exact_bits as kernels
    except ImportError as error:
        part.add({"exact bits": f"not run: {error}"})
        return
    for dtype in (torch.float32, torch.bfloat16):
        gaps = kernels.invariance(part.device, dtype)
        wrong = gaps["our product"] or gaps["our attention"]
        part.add({"dtype": str(dtype).removeprefix("torch."), **gaps},
                 f"{dtype}: bits depend on the rows" if wrong else None)
    weight = torch.randn(8960, 1536, device=part.device, dtype=torch.bfloat16)
    for rows in (1, 8, 32):
        x = torch.randn(rows, 1536, device=part.device, dtype=torch.bfloat16)
        row = {"rows": rows}
        for name, multiply in (("our product", kernels.linear),
                               ("torch's product", torch.nn.functional.linear)):
            for count in (3, 100):                          # the first three compile and warm up
                start = time.perf_counter()
                for _ in range(count):
                    multiply(x, weight)
                torch.cuda.synchronize()
                row[f"{name}, microseconds"] = 1e6 * (time.perf_counter() - start) / count
        part.add(row)


def speed(part: Part) -> None:
    """Tokens per second: transformers, plain, every drafter; with and without graphs."""
    new, batches = (16, (1,)) if part.quick else (128, (1, 8, 32))
    dtype, prompts = "bfloat16", part.prompts(8)
    for label, make in transformers_runs(part):
        seconds, tokens = make(prompts[:2], new)
        part.add({"engine": label, "batch": 1, "tokens/s": tokens / seconds})
    captures = Device(torch.device(part.device)).captures and part.graphs
    plain: dict[int, float] = {}
    for options in part.drafters():
        for recorded in (False, True) if captures else (False,):
            engine = part.load(graphs=recorded, dtype=dtype, **options)
            for batch in batches:
                if part.left < 5:
                    part.add({"engine": "the rest was not run"}, "no time was left")
                    return
                chosen = (prompts * 4)[: max(batch, 2)]
                engine.generate(chosen[:batch], max_new_tokens=8, batch_size=batch)
                start = time.perf_counter()
                done = engine.generate(chosen, max_new_tokens=new, batch_size=batch)
                Device(engine.target.device).synchronize()
                rate = sum(len(text.tokens) for text in done) / (time.perf_counter() - start)
                plain[batch] = max(plain.get(batch, 0.0), rate) if name_of(options) == "none" \
                    else plain[batch]
                part.add({"engine": name_of(options), "graphs": recorded, "batch": batch,
                          "tokens/s": rate, "over plain": rate / plain[batch],
                          "tokens per round": engine.stats.tokens_per_round})


def transformers_runs(part: Part) -> Iterator[tuple[str, Callable[..., tuple[float, int]]]]:
    """`generate` of transformers: as it comes, and with its static cache, compiled on a GPU."""
    from draftproof.model.loading import load_model, load_tokenizer

    model, tokenizer = load_model(part.model, "bfloat16", part.device), load_tokenizer(part.model)
    assert tokenizer is not None

    def run(prompts: list[Any], new: int, **options: Any) -> tuple[float, int]:
        seconds, tokens = 0.0, 0
        for warm in (True, False):
            for prompt in prompts:
                text = prompt if isinstance(prompt, str) else str(prompt)
                ids = tokenizer(text, return_tensors="pt").input_ids.to(part.device)
                start = time.perf_counter()
                out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                     max_new_tokens=new, pad_token_id=0, **options)
                Device(ids.device).synchronize()
                if not warm:
                    seconds += time.perf_counter() - start
                    tokens += out.shape[1] - ids.shape[1]
        return seconds, tokens

    yield "transformers, eager", run
    if part.device == "cuda":
        yield "transformers, static cache, compiled", lambda prompts, new: run(
            prompts, new, cache_implementation="static")


PARTS: dict[str, Callable[[Part], None]] = {
    "machine": machine, "doctor": doctor, "prove": prove, "tests": tests, "texts": texts,
    "launches": launches, "exact bits": exact_bits, "speed": speed,
}  # fmt: skip


def main() -> None:
    part = Part(json.loads(sys.argv[2]))
    with torch.inference_mode() if sys.argv[1] == "doctor" else nullcontext():
        PARTS[sys.argv[1]](part)
    part.add({}) if not part.rows else None


if __name__ == "__main__":
    main()
