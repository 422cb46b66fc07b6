"""Knows how the byte-level BPE tokenizer of 4,096 tokens is trained, checked and saved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from data import AGAIN, EOS, load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

VOCAB = 4096
END = "<|endoftext|>"
CONTEXT = 1024
PROBES = (
    "",
    " two  spaces , and . ",
    "don't 's\n\n\ttab",
    "naïve \u2013 “x” 日本語 🦊👩\u200d👩\u200d👧 \u0000\u200b\ufeff",
    f"a{END}b",
)


def train(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from the texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([*texts, *[AGAIN] * 100], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save under the class name that both transformers 4 and 5 know."""
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    fields = {
        name: value
        for name, value in fields.items()
        if name not in ("is_local", "local_files_only")
    }
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def check(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Raise unless the size, the special ids and exact round trips are as promised."""
    if len(tokenizer) != VOCAB or tokenizer.eos_token_id != EOS or tokenizer.pad_token_id != EOS:
        raise ValueError("the tokenizer has the wrong size or special ids")
    for text in [*PROBES, *texts]:
        if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
            raise ValueError(f"does not round-trip: {text!r}")


def main() -> None:
    """Train on the training stories and save to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="TinyStories jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="folder to save the tokenizer in")
    arguments = parser.parse_args()
    stories = load(arguments.files)
    save(train(stories.train), arguments.out)
    tokenizer = AutoTokenizer.from_pretrained(arguments.out)
    check(tokenizer, stories.held_out)
    tokens = sum(len(ids) for ids in tokenizer(stories.train)["input_ids"])
    size = sum(map(len, stories.train))
    print(f"{len(stories.train)} stories, {tokens:,} tokens of {size / tokens:.2f} characters")


if __name__ == "__main__":
    main()
