"""Knows the embedded target model's shape and how it is trained on the stories."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data import AGAIN, StoryStream, Tokens, encode, join, load, windows
from loop import MACHINE, Trainer, arguments_of, export, llama, plan_of
from transformers import AutoTokenizer, LlamaForCausalLM

WHOLE_EVERY = (
    4  # one step in four sees whole windows; the others see them halved, which is a third faster
)


def nats(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token over the rows, in bfloat16 where that is safe."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.inference_mode()
def retold(
    model: LlamaForCausalLM, stories: Sequence[Tokens], again: Tokens
) -> tuple[float, float]:
    """Mean cross-entropy of stories told for the first time and told again."""
    first, second, tokens = 0.0, 0.0, 0
    for story in stories:
        row = torch.from_numpy(
            join([np.concatenate([story, again, story])])[None, :-1].astype(np.int64)
        )
        losses = F.cross_entropy(
            model(input_ids=row).logits[0, :-1].float(), row[0, 1:], reduction="none"
        )
        first += losses[: len(story)].sum().item()
        second += losses[-len(story) :].sum().item()
        tokens += len(story)
    return first / tokens, second / tokens


def main() -> None:
    """Train (or resume), then export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="TinyStories jsonl files")
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments_of(parser, steps=1130, batch=6, length=1024)
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    stories = load(arguments.files)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    again = encode(tokenizer, [AGAIN])[0]
    source = StoryStream(
        encode(tokenizer, stories.train), again, plan.length, plan.batch, plan.seed
    )
    held_out = windows(join(encode(tokenizer, stories.held_out)), plan.length)
    held_out = held_out[: len(held_out) // plan.batch * plan.batch]
    model = llama(layers=12, hidden=288, intermediate=768, heads=6, kv_heads=2)
    trainer = Trainer(model, source, plan, arguments.out)
    fast = nats if arguments.no_compile else torch.compile(nats, dynamic=False)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        whole = trainer.step % WHOLE_EVERY == 0
        return fast(model, rows if whole else rows.view(2 * len(rows), -1))

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            parts = [fast(model, rows).item() for rows in torch.split(held_out, plan.batch)]
        return {"held_out": sum(parts) / len(parts)}

    if not arguments.export_only and not trainer.fit(loss, evaluate):
        return
    short = [story for story in encode(tokenizer, stories.held_out) if len(story) < 400][:50]
    first, second = retold(model, short, again)
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plan": asdict(plan),
        "steps": trainer.step,
        "steps_planned_from": trainer.plans,
        "tokens": trainer.tokens,
        "passes": round(source.passes, 1),
        "held_out_stories": len(stories.held_out),
        "held_out_nats_per_token": round(evaluate()["held_out"], 4),
        "first_telling_nats_per_token": round(first, 4),
        "second_telling_nats_per_token": round(second, 4),
        "training_seconds": round(trainer.seconds),
        "machine": MACHINE,
        "data_sha256": stories.files,
    }
    export(model, tokenizer, arguments.export, record)
    print(record)


if __name__ == "__main__":
    main()
