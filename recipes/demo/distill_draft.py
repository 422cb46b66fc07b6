"""The embedded draft model: its shape, and its distillation on text that the target wrote."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from data import AGAIN, EOS, StoryStream, Stream, encode, join, load, windows
from loop import MACHINE, Trainer, arguments_of, export, llama, model_of, plan_of
from self_text import Labelled, label, own_text, write
from transformers import AutoTokenizer, LlamaForCausalLM

AGREE = 0.5  # weight of the cross-entropy on the target's own choice
PROMPT, NEW = 40, 200  # of the acceptance figures


class LabelledStream(Stream[Labelled]):
    """Batches over chunks of rows, all of the same number of tokens."""

    def __init__(self, chunks: Sequence[Labelled], tokens: int, seed: int) -> None:
        self._chunks, self._tokens, self._seed = chunks, tokens, seed
        super().__init__()

    def shuffled(self) -> list[Labelled]:
        generator = torch.Generator().manual_seed(self._seed * 100003 + self.epoch)
        batches: list[Labelled] = []
        for chunk in self._chunks:
            rows, length = chunk.tokens.shape
            size = self._tokens // length
            order = torch.randperm(rows, generator=generator)
            parts = torch.split(order, size)
            batches += [chunk.pick(part) for part in parts if len(part) == size]
        return [batches[int(index)] for index in torch.randperm(len(batches), generator=generator)]


def divergence(
    model: LlamaForCausalLM, tokens: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL(target || draft), the cross-entropy on the target's choice, and the share of positions
    with the same choice. KL counts the tokens outside the target's best as a single token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    logits = logits.float()
    draft_logp = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    p = logp.exp()
    rest = (1 - p.sum(-1)).clamp(min=1e-6)
    draft_rest = (1 - draft_logp.exp().sum(-1)).clamp(min=1e-6)
    kl = (p * (logp - draft_logp)).sum(-1) + rest * (rest.log() - draft_rest.log())
    same = (logits.detach().argmax(-1) == ids[..., 0]).float()
    return kl.mean(), -draft_logp[..., 0].mean(), same.mean()


def columns(batch: Labelled) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch in the dtypes that the loss uses."""
    return batch.tokens.long(), batch.ids.long(), batch.logp.float()


def begin(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Give the draft the principal directions of the target's embeddings, at a moderate scale."""
    weight = target.model.embed_tokens.weight.detach().float()
    u, s, _ = torch.linalg.svd(weight - weight.mean(0), full_matrices=False)
    size = draft.config.hidden_size
    reduced = u[:, :size] * s[:size]
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(reduced * (0.05 / reduced.std()))


@torch.inference_mode()
def acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: torch.Tensor, seed: int
) -> dict[str, float]:
    """Teacher-forced acceptance per token on the target's continuations of the prompts."""
    figures: dict[str, float] = {}
    size = prompts.shape[1]
    for name, temperature in (("greedy", 0.0), ("sampled_t1", 1.0)):
        generator = torch.Generator().manual_seed(seed)
        total, positions = 0.0, 0
        for part in torch.split(prompts, 50):
            temperatures = torch.full((len(part),), temperature)
            rows = write(target, part, temperatures, size + NEW, generator).tokens.long()
            new = rows[:, size:]
            q = draft(input_ids=rows, use_cache=False).logits[:, size - 1 : -1].float()
            if temperature:
                p = target(input_ids=rows, use_cache=False).logits[:, size - 1 : -1].float()
                accepted = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
            else:
                accepted = (q.argmax(-1) == new).float()
            counted = (new == EOS).cumsum(1) - (new == EOS).long() == 0
            total += accepted[counted].sum().item()
            positions += int(counted.sum())
        figures[f"{name}_acceptance"] = round(total / positions, 4)
        figures[f"{name}_positions"] = positions
    return figures


def main() -> None:
    """Write the text, distil the draft model (or resume), measure acceptance, and export it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="TinyStories jsonl files")
    parser.add_argument("--target", type=Path, required=True, help="folder of the exported target")
    parser.add_argument(
        "--self-text", type=Path, required=True, help="folder that keeps the target's text"
    )
    parser.add_argument(
        "--chunks", type=int, default=24, help="chunks of 65,536 tokens that the target writes"
    )
    parser.add_argument(
        "--dataset-rows", type=int, default=960, help="windows of dataset text to add"
    )
    arguments_of(parser, steps=5000, batch=4, length=1024)
    parser.set_defaults(weight_decay=0.01)
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    stories = load(arguments.files)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = model_of(arguments.target, torch.bfloat16)
    documents, held_out = encode(tokenizer, stories.train), encode(tokenizer, stories.held_out)
    again = encode(tokenizer, [AGAIN])[0]
    chunks: list[Labelled] = []
    if not arguments.export_only:
        chunks = own_text(
            target, documents, again, arguments.self_text, arguments.chunks, plan.seed
        )
        path = arguments.self_text / f"dataset-{arguments.dataset_rows}.pt"
        if not path.exists():
            dataset = StoryStream(documents, again, 1024, arguments.dataset_rows, plan.seed)
            label(target, dataset.next()).save(path)
        chunks.append(Labelled.read(path))
    source = LabelledStream(chunks, plan.batch * plan.length, plan.seed)
    rows = windows(join(held_out), plan.length)
    exam = label(target, rows[: len(rows) // plan.batch * plan.batch])
    openings = [story for story in held_out if len(story) >= PROMPT]
    prompts = torch.stack([torch.from_numpy(story[:PROMPT].astype("int64")) for story in openings])
    draft = llama(layers=2, hidden=144, intermediate=384, heads=3, kv_heads=1)
    begin(draft, target)
    trainer = Trainer(draft, source, plan, arguments.out)
    fast = divergence if arguments.no_compile else torch.compile(divergence, dynamic=False)

    def loss(batch: Labelled) -> torch.Tensor:
        kl, choice, _ = fast(draft, *columns(batch))
        return kl + AGREE * choice

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            parts = [
                torch.stack(fast(draft, *columns(exam.pick(part))))
                for part in torch.split(torch.arange(len(exam.tokens)), plan.batch)
            ]
        kl, choice, same = torch.stack(parts).mean(0).tolist()
        return {"held_out_kl": kl, "held_out_choice": choice, "held_out_same": same}

    if not arguments.export_only and not trainer.fit(loss, evaluate):
        return
    record = {
        "parameters": sum(p.numel() for p in draft.parameters()),
        "plan": asdict(plan),
        "steps": trainer.step,
        "steps_planned_from": trainer.plans,
        "tokens": trainer.tokens,
        "own_text_tokens": sum(chunk.tokens.numel() for chunk in chunks[:-1]),
        "dataset_tokens": chunks[-1].tokens.numel() if chunks else 0,
        "held_out_kl_nats_per_token": round(evaluate()["held_out_kl"], 4),
        "training_seconds": round(trainer.seconds),
        "machine": MACHINE,
        "data_sha256": stories.files,
    }
    export(draft, tokenizer, arguments.export, record)
    exported = model_of(arguments.export, torch.bfloat16)
    record |= acceptance(target, exported, prompts, plan.seed)
    export(draft, tokenizer, arguments.export, record)
    print(record)


if __name__ == "__main__":
    main()
