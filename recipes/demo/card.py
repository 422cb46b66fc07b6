"""Knows what the model cards of the embedded target and draft say, and writes them from ``training.json``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from loop import model_of
from transformers import AutoTokenizer

SAMPLES, TEMPERATURE, LENGTH = 10, 0.7, 320

HEAD = """---
license: other
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [tiny, speculative-decoding, tinystories]
---

# {name}

{purpose}

| | |
|---|---|
| architecture | `LlamaForCausalLM`, {layers} layers, hidden {hidden}, intermediate {intermediate} |
| attention | {heads} heads, {kv_heads} key-value heads, size {head_dim}; rotary, theta 10,000 |
| parameters | {parameters:,} (embeddings tied) |
| vocabulary | 4,096, byte-level BPE |
| special token | `<|endoftext|>`, id 0: begins every training document; bos, eos and pad |
| context | 1,024 tokens |
| weights | bfloat16 safetensors |
| trained on | {machine}, {minutes} minutes, {tokens:,} tokens in {steps:,} steps, seed {seed} |

## Data

TinyStories: Ronen Eldan and Yuanzhi Li, "TinyStories: How Small Can Language Models Be and Still Speak
Coherent English?", 2023; synthetic stories shared under the
[Community Data License Agreement - Sharing - Version 1.0](https://cdla.dev/sharing-1-0/). 6,723 stories in
two files (a cleaned part of TinyStoriesV2-GPT4 and the head of TinyStoriesV2-GPT4), quotes and spaces
normalised; 200 stories of the first file, chosen by a fixed seed, are held out. One story in ten is told
twice in training, with `Tell it again.` between, to make the model quote what it has read.

{hashes}
"""

TARGET = """
## Result

Held-out loss: {loss:.3f} nats a token (with this tokenizer; {held_out} stories packed into windows of 1,024).
The stories are seen {passes} times in training. When a held-out story is told again after `Tell it again.`,
the loss is {second:.3f} against {first:.3f} the first time: the nearer they are, the less the model quotes.

## Use and limits

For demonstrating, testing and measuring decoding on a machine with nothing to download: short children's
stories in simple English, started by an opening such as `Once upon a time` or by `<|endoftext|>`. It knows
nothing else, follows no instruction, loses the thread of its own stories, and must not be used for anything
that matters.

## Samples

Unedited and not selected: seeds 0 to 9, temperature {temperature}, no top-k or top-p, started by
`<|endoftext|>` alone, at most {length} tokens, computed in float32.
"""

DRAFT = """
## Result

Distilled from the embedded target: KL(target || draft) and half the cross-entropy on the target's own choice,
at every position of text the target wrote ({own:,} tokens: greedy and at temperatures 0.7 and 1 from openings
of training stories, after stories to tell again, and from nothing) and of packed training stories
({dataset:,} tokens).

Held-out text: KL {kl:.3f} nats a token. Acceptance a token, teacher-forced, on what the target writes after
the first 40 tokens of held-out stories (200 new tokens or its end of text):

| target decodes | acceptance | positions |
|---|---|---|
| greedily: share of positions with the same choice | {greedy:.3f} | {greedy_positions:,} |
| at temperature 1: mean of the sum of min(p, q) | {sampled:.3f} | {sampled_positions:,} |

## Use and limits

Only as the draft model of the embedded target, with the same tokenizer. On its own it writes poorly.
"""

TAIL = """
## Recipe

The code is in `recipes/demo` of the repository; `training.json` beside this card has the settings, the hashes
of the data and the figures. With the two files as `$STORIES`:

```sh
python recipes/demo/tokenizer.py $STORIES --out run/tokenizer
python recipes/demo/train_target.py $STORIES --tokenizer run/tokenizer --out run/target --export demo
python recipes/demo/distill_draft.py $STORIES --target demo \\
    --self-text run/text --out run/draft --export demo-draft
python recipes/demo/card.py --target demo --draft demo-draft
```
"""


def table(record: dict[str, Any], folder: Path, name: str, purpose: str) -> str:
    """The part of the card both models have."""
    config = json.loads((folder / "config.json").read_text())
    hashes = "\n".join(f"- `{file}` sha256 `{value}`" for file, value in record["data_sha256"].items())
    return HEAD.format(
        name=name,
        purpose=purpose,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        parameters=record["parameters"],
        machine=record["machine"],
        minutes=round(record["training_seconds"] / 60),
        tokens=record["tokens"],
        steps=record["steps"],
        seed=record["plan"]["seed"],
        hashes=hashes,
    )


@torch.inference_mode()
def samples(folder: Path) -> list[str]:
    """What the model writes from nothing with the first seeds."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = model_of(folder, torch.float32)
    start = torch.tensor([[tokenizer.bos_token_id]])
    texts: list[str] = []
    for seed in range(SAMPLES):
        torch.manual_seed(seed)
        written = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            max_new_tokens=LENGTH,
        )
        texts.append(str(tokenizer.decode(written[0], skip_special_tokens=True)))
    return texts


def target_card(folder: Path) -> str:
    """The target's card, with its samples."""
    record = json.loads((folder / "training.json").read_text())
    purpose = "A small story-telling language model, made to be the embedded target of speculative decoding."
    result = TARGET.format(
        loss=record["held_out_nats_per_token"],
        held_out=record["held_out_stories"],
        passes=record["passes"],
        first=record["first_telling_nats_per_token"],
        second=record["second_telling_nats_per_token"],
        temperature=TEMPERATURE,
        length=LENGTH,
    )
    stories = "\n".join(
        f"\n### Seed {seed}\n\n```text\n{text}\n```" for seed, text in enumerate(samples(folder))
    )
    return table(record, folder, "demo", purpose) + TAIL + result + stories + "\n"


def draft_card(folder: Path) -> str:
    """The draft's card, with its acceptance figures."""
    record = json.loads((folder / "training.json").read_text())
    result = DRAFT.format(
        own=record["own_text_tokens"],
        dataset=record["dataset_tokens"],
        kl=record["held_out_kl_nats_per_token"],
        greedy=record["greedy_acceptance"],
        greedy_positions=record["greedy_positions"],
        sampled=record["sampled_t1_acceptance"],
        sampled_positions=record["sampled_t1_positions"],
    )
    purpose = "The draft model of the embedded target `demo`."
    return table(record, folder, "demo-draft", purpose) + TAIL + result


def main() -> None:
    """Write README.md into the given folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="folder of the exported target")
    parser.add_argument("--draft", type=Path, help="folder of the exported draft")
    arguments = parser.parse_args()
    if arguments.target:
        (arguments.target / "README.md").write_text(target_card(arguments.target))
    if arguments.draft:
        (arguments.draft / "README.md").write_text(draft_card(arguments.draft))


if __name__ == "__main__":
    main()
