"""Which form of a recurrent head is better, on the same text? A rehearsal that a CPU can run.

    python recipes/smollm2/variants.py [MODEL] [--prompts FILE.jsonl] [--tokens 12000] [--steps 300]
        [--rank 64] [--device cpu] [--json FILE]

The target writes texts after the prompts. Its hidden states are kept: the last ones, and those at
a quarter, a half and three quarters of its layers. Every variant of a ReDrafter is then trained on
the same batches and judged on the same held-out texts:

- base: the last hidden state and the tokens drafted since, as `draftproof train redrafter` has it;
- markov: and a bias of low rank that depends on the previous token alone, as DSpark has it;
- taps: the hidden states of four layers, projected to one;
- both.

Tokens per round are those of a chain of first choices, with a 95 % interval over texts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import draftproof as dp
from draftproof.bench.report import Interval
from draftproof.bench.workloads import GENERAL, STORIES, read_prompts
from draftproof.model.loading import load_model

DEPTH = 4
"""Tokens that a head drafts."""
VARIANTS = {"base": (False, False), "markov": (True, False), "taps": (False, True),
            "both": (True, True)}
"""With a Markov bias; with several layers."""


class Text(NamedTuple):
    """Tokens [S], where the target's own begin, and hidden states [S, layers, H]."""

    tokens: Tensor
    start: int
    hidden: Tensor


class Head(nn.Module):
    """A ReDrafter with what a variant adds; the LM head and embeddings are the target's."""

    def __init__(self, embeddings: Tensor, lm_head: Tensor, layers: int, markov: bool, taps: bool,
                 rank: int) -> None:
        super().__init__()
        width = embeddings.shape[1]
        self.embeddings, self.project = embeddings, lm_head
        self.context = nn.Linear(layers * width, width, bias=False) if taps else None
        if self.context is not None:                            # begins as the last layer alone
            with torch.no_grad():
                self.context.weight.zero_()
                self.context.weight[:, -width:] = torch.eye(width)
        self.rnn_w, self.rnn_u = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.mix, self.block = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.bias = nn.Embedding(len(embeddings), rank) if markov else None
        self.unfold = nn.Linear(rank, width, bias=False) if markov else None
        if self.unfold is not None:
            nn.init.zeros_(self.unfold.weight)
        with torch.no_grad():
            self.mix.weight[:, :width] += torch.eye(width)
            self.mix.weight[:, width:] *= 0.1

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[n, DEPTH, V] logits, after states [n, layers, H] and the tokens [n, DEPTH] that follow:
        the root, and the right tokens after it."""
        last = hidden[:, -1] if self.context is None else self.context(hidden.flatten(1))
        state, out = None, []
        for step in range(DEPTH):
            mixed = self.rnn_w(F.embedding(tokens[:, step], self.embeddings))
            mixed = mixed + (self.rnn_u.bias if state is None else self.rnn_u(state))
            state = F.silu(mixed)
            made = self.mix(torch.cat([last, state], -1))
            made = made + F.silu(self.block(made))
            if self.bias is not None and self.unfold is not None:
                made = made + self.unfold(self.bias(tokens[:, step]))
            out.append(made @ self.project.T)
        return torch.stack(out, 1)


def written(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of prompts with what the target writes after them, and where that begins, first."""
    engine = dp.load(args.model, drafter="none", device=args.device)
    default = STORIES if args.model == "demo" else GENERAL
    prompts = [engine.requests.tokens(prompt) for prompt in read_prompts(args.prompts or default)]
    texts: list[list[int]] = []
    count, seed = 0, 0
    while count < args.tokens:
        sampling = dp.Sampling(temperature=0.8 * (seed % 3 > 0), seed=seed, max_new_tokens=args.new)
        for prompt, done in zip(prompts, engine.generate(prompts, sampling=sampling, batch_size=8),
                                strict=True):
            texts.append([len(prompt), *prompt, *done.tokens])
            count += len(done.tokens)
        seed += 1
    return texts


@torch.no_grad()
def read(args: argparse.Namespace, rows: Sequence[list[int]]) -> tuple[list[Text], Tensor, Tensor]:
    """The texts with the target's hidden states; its embeddings and LM head."""
    model = load_model(args.model, "float32", args.device)
    texts = []
    for start, *row in rows:
        tokens = torch.tensor(row, device=args.device)
        states = model.model(tokens[None], output_hidden_states=True).hidden_states
        count = len(states) - 1
        picked = [states[count * part // 4][0] for part in (1, 2, 3)] + [states[-1][0]]
        texts.append(Text(tokens, start, torch.stack(picked, 1)))
    return texts, model.get_input_embeddings().weight.clone(), model.lm_head.weight.clone()


def places(text: Text) -> Tensor:
    """Positions whose hidden state is read: the token after them is the root of a draft."""
    return torch.arange(text.start - 1, len(text.tokens) - DEPTH - 1, device=text.tokens.device)


def batch_of(text: Text, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, root and tokens after it, and what is to be predicted."""
    steps = torch.arange(1, DEPTH + 1, device=at.device)
    return text.hidden[at], text.tokens[at[:, None] + steps], text.tokens[at[:, None] + steps + 1]


def trained(head: Head, texts: Sequence[Text], args: argparse.Namespace) -> None:
    """The same batches for every variant."""
    dice = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, weight_decay=0.0)
    weights = 0.8 ** torch.arange(DEPTH, device=args.device)
    for step in range(args.steps):
        picks = torch.randint(len(texts), (args.batch,), generator=dice).tolist()
        parts = [batch_of(texts[pick], places(texts[pick])) for pick in picks]
        hidden, tokens, wanted = (torch.cat(part) for part in zip(*parts, strict=True))
        losses = F.cross_entropy(head(hidden, tokens).flatten(0, 1), wanted.flatten(),
                                 reduction="none").view(-1, DEPTH)
        (losses.mean(0) * weights).sum().backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20) * (1 - step / args.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def judged(head: Head, texts: Sequence[Text]) -> Interval:
    """Tokens per round of a chain of first choices: the median over texts."""
    rates = []
    for text in texts:
        hidden, tokens, wanted = batch_of(text, places(text))
        right = (head(hidden, tokens).argmax(-1) == wanted).long().cumprod(1)
        rates.append(1 + float(right.sum(1).float().mean()))
    return Interval.of(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", default="demo")
    add("--prompts", type=Path)
    add("--tokens", type=int, default=12000)
    add("--new", type=int, default=128, help="new tokens of each text")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=4, help="texts of a step")
    add("--lr", type=float, default=1e-3)
    add("--rank", type=int, default=64, help="of the Markov bias")
    add("--device", default="cpu")
    add("--json", type=Path)
    args = parser.parse_args()
    rows = [row for row in written(args) if len(row) - row[0] > DEPTH + 2]
    texts, embeddings, lm_head = read(args, rows)
    prompts = list(dict.fromkeys(tuple(row[1 : 1 + row[0]]) for row in rows))
    held = set(prompts[::6])                                    # of a prompt all texts, or none
    parts = {True: list[Text](), False: list[Text]()}
    for row, text in zip(rows, texts, strict=True):
        parts[tuple(row[1 : 1 + row[0]]) in held].append(text)
    held_out, train = parts[True], parts[False]
    print(f"{len(train)} texts to train on, {len(held_out)} held out", flush=True)
    report = {}
    for name, (markov, taps) in VARIANTS.items():
        torch.manual_seed(0)
        head = Head(embeddings, lm_head, 4, markov, taps, args.rank).to(args.device)
        start = time.perf_counter()
        trained(head, train, args)
        rate, count = judged(head, held_out), sum(part.numel() for part in head.parameters())
        report[name] = {"tokens_per_round": rate.median, "low": rate.low, "high": rate.high,
                        "parameters": count, "seconds": time.perf_counter() - start}
        print(f"{name:8} {rate.median:.3f} tokens per round "
              f"({rate.low or 0:.3f} to {rate.high or 0:.3f}), "
              f"{count / 1e6:.2f} million parameters", flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
