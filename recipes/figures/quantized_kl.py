"""How much quantised weights change the predictions of a model, on prose, code and chat:

    python recipes/figures/quantized_kl.py FOLDER [--kinds int8 int4] [--gguf FILE ...]
        [--data DATA] [--windows 8]

Prints the mean KL divergence from the folder's model in bfloat16, in nats, and the share of
positions with the same most likely token. Texts are cut into windows of 512 tokens, whose second
halves are scored. DATA has gutenberg/*.txt, humaneval/HumanEval.jsonl.gz and
mt_bench/question.jsonl; kinds of text that are missing are left out. A GGUF file runs in its own
block format, and is compared with the folder's model, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from draftproof.core.tree import TokenTree
from draftproof.model.gguf_source import native_gguf
from draftproof.model.native_model import NativeModel
from draftproof.model.native_target import NativeTarget
from draftproof.weights.tensor_source import SafetensorsSource

WINDOW, CHUNK = 512, 64
"""Tokens of a window, and tokens that are read at a time."""


class Distance(NamedTuple):
    """Mean KL divergence in nats, share of equal most likely tokens, and positions compared."""

    kl: float
    same: float
    positions: int


def texts(data: Path) -> Iterator[tuple[str, str]]:
    """Each kind of text that DATA has, as one string."""
    books = sorted((data / "gutenberg").glob("*.txt"))
    if books:
        # the middle of each book, without licence and table of contents
        yield "prose", "\n\n".join(
            text[len(text) // 3 : len(text) // 3 + 40_000]
            for text in (book.read_text(encoding="utf-8") for book in books))
    code = data / "humaneval" / "HumanEval.jsonl.gz"
    if code.is_file():
        with gzip.open(code, "rt", encoding="utf-8") as file:
            tasks = [json.loads(line) for line in file]
        yield "code", "\n\n".join(task["prompt"] + task["canonical_solution"] for task in tasks)
    chat = data / "mt_bench" / "question.jsonl"
    if chat.is_file():
        lines = chat.read_text(encoding="utf-8").splitlines()
        turns = [turn for line in lines for turn in json.loads(line)["turns"]]
        yield "chat", "\n\n".join(turns)


def windows(tokenizer: Tokenizer, text: str, count: int) -> Tensor:
    """[windows, WINDOW] token ids, spread over the text."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    step = max(1, len(whole) // count)
    return whole[::step][:count]


def log_probs(model: NativeModel, window: Tensor) -> Tensor:
    """[WINDOW / 2, vocab] log probabilities after each token of the second half."""
    target = NativeTarget(model)
    cache, parts = target.plain_cache(1, WINDOW + CHUNK), list[Tensor]()
    for start in range(0, WINDOW, CHUNK):
        chunk = TokenTree.chain(window[None, start : start + CHUNK])
        scored = start >= WINDOW // 2
        reading = target.read(chunk, cache, last_only=not scored)
        cache.keep(None, torch.full_like(cache.lengths, CHUNK))
        if scored:
            parts.append(reading.logits[0].float().log_softmax(-1))
    return torch.cat(parts)


def distance(truth: Sequence[Tensor], other: Sequence[Tensor]) -> Distance:
    """The distance between log probabilities, given window by window."""
    kls = [(true.float().exp() * (true.float() - guess)).sum(-1)
           for true, guess in zip(truth, other, strict=True)]
    same = [true.argmax(-1) == guess.argmax(-1) for true, guess in zip(truth, other, strict=True)]
    count = sum(map(len, kls))
    return Distance(float(sum(kl.double().sum() for kl in kls)) / count,
                    float(sum(equal.sum() for equal in same)) / count, count)


def folder_model(folder: Path, kind: str | None) -> NativeModel:
    """The model of a folder, in bfloat16 or quantised."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    source = SafetensorsSource(folder, torch.bfloat16, kind)
    return NativeModel(settings, source, dtype=torch.bfloat16, name=str(folder))


def main() -> None:
    """Measure all kinds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="*", default=["int8", "int4"])
    parser.add_argument("--gguf", nargs="*", default=[], type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--windows", type=int, default=8, help="windows of each kind of text")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    every = {name: windows(tokenizer, text, options.windows) for name, text in texts(options.data)}
    if not every:
        parser.error(f"{options.data} has none of the texts; give --data")
    original = folder_model(options.folder, None)
    truth = {name: [log_probs(original, window) for window in all_windows]
             for name, all_windows in every.items()}
    table = Table(title=f"{options.folder.name}, KL to bfloat16 in nats, same most likely token",
                  title_justify="left")
    for column in ("weights", "MiB", *every):
        table.add_column(column, justify="right")
    table.add_row("bfloat16", f"{original.nbytes / 2**20:.0f}", *[""] * len(every))
    del original
    for name in [*options.kinds, *options.gguf]:
        model = (native_gguf(name, torch.bfloat16) if isinstance(name, Path)
                 else folder_model(options.folder, name))
        assert model is not None, f"{name} cannot be run natively"
        cells = []
        for text, all_windows in every.items():
            result = distance(truth[text], [log_probs(model, window) for window in all_windows])
            cells.append(f"{result.kl:.5f}, {result.same:.1%} of {result.positions}")
        table.add_row(getattr(name, "name", name), f"{model.nbytes / 2**20:.0f}", *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
