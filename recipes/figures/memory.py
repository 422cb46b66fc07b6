"""Peak memory of loading a model and generating, over the size of its weights; Linux only.

Resident memory of this process at its peak, less what it held after a small generation of the demo.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import psutil
import torch
from run import Row

import draftproof as dp
from draftproof.model.loading import resolve


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--assistant-model")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)


def run(given: argparse.Namespace) -> list[Row]:
    dp.load("demo", assistant_model="demo-draft").generate([[1, 2, 3]], max_new_tokens=8)
    gc.collect()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")                      # the peak starts anew
    drafter = {"assistant_model": given.assistant_model}
    engine = dp.load(given.model, dtype=given.dtype,
                     **(drafter if given.assistant_model else {"drafter": "none"}))
    loaded = _peak() - before
    dice = torch.Generator().manual_seed(0)
    size = (given.prompt_tokens,)
    prompt = torch.randint(engine.target.vocab_size, size, generator=dice).tolist()
    engine.generate([prompt] * given.rows, max_new_tokens=given.new_tokens)
    peak = _peak() - before
    folders = [Path(resolve(model)) for model in (given.model, given.assistant_model) if model]
    weights = sum(file.stat().st_size for one in folders for file in one.glob("*.safetensors"))
    return [{"weights, MiB": weights / 2**20, "peak of loading, MiB": loaded / 2**20,
             "peak of all, MiB": peak / 2**20, "over the weights": peak / weights}]


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
