"""Questions that a chat model asks itself: it continues the beginning of a user's turn.

After Magpie (arXiv 2406.08464): an instruct model that gets only the part of its chat template
before the user's text writes what its users write.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from draftproof.core.params import Sampling
from draftproof.engine.load import load
from draftproof.model import loading
from draftproof.tokenizer.codec import Codec
from draftproof.training.self_generate import Writer, by_engine, by_transformers

MARK = "\x00"
STARTS = (
    "", "", "", "Write a Python ", "How do I ", "What is ", "Explain ", "Write a ", "Can you ",
    "Summarize ", "Translate ", "I have a Python ", "Fix ", "Give me ", "Why ",
)  # fmt: skip
"""How the questions begin, in turn; an empty string leaves that to the model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=32, help="questions that are written at a time")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = loading.load_tokenizer(options.model)
    assert tokenizer is not None, "the folder has no tokenizer"
    codec = Codec(tokenizer)
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False))
    before, after = text.split(MARK)
    end = codec.encode(after.strip().split("\n")[0], special=False)[0]
    if options.device in (None, "cpu"):
        writer: Writer = partial(by_engine, load(options.model, drafter="none", quantize="int8"))
    else:
        model = loading.load_model(options.model, None, options.device)
        writer = partial(by_transformers, model, [end])
    starts = [STARTS[at % len(STARTS)] for at in range(options.count)]
    prompts = [codec.encode(before + start, special=False) for start in starts]
    wanted = [Sampling(temperature=0.8, seed=at, max_new_tokens=96) for at in range(options.count)]
    questions: dict[str, None] = {}
    with torch.inference_mode():
        for index, tokens, finish in writer(prompts, wanted, options.rows):
            question = (starts[index] + tokenizer.decode(tokens, skip_special_tokens=True)).strip()
            if finish == "stop" and 8 <= len(question) <= 1500:
                questions[question] = None
    chats = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    rows = [json.dumps(chat) + "\n" for chat in chats]
    options.out.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows):,} questions of {options.count:,}")


if __name__ == "__main__":
    main()
