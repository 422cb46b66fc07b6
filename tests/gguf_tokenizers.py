"""Tiny tokenizers as they are published, and GGUF files of them."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from draftproof.gguf.file import GGUFFile

TEXTS = [
    "the cat sat on the mat, and THE CAT'S hat isn't here", "  two  spaces\tand\n\n\nlines \n x",
    "def f(x):\n    return x ** 2  # 1234567 and 3.14\n", "café déjà vu, naïve: Ünïcödé",
    "한국어 파일", "日本語のテキスト 漢字", "٣ ½ ² Ⅷ", "🦜👩‍👩‍👧 emoji", "a\r\nb\r\n", " ", "",
    "path/to/file.c // x += 1;", "<|end|>inside<|end|> <think> and <|endoftext|>",
    "x = y;\n/// note ;\n/// more ;\n/// end ;\n",
]  # fmt: skip
TEXTS += [unicodedata.normalize("NFD", text) for text in TEXTS]
SPECIAL = {"<|endoftext|>": 3, "<|end|>": 3, "<think>": 4}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    """As tokenizer.json files split by a regular expression."""
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
    "tekken": split(TEKKEN),
    "gpt-4o": split(GPT4O),
}


def published(pre: str) -> Tokenizer:
    """A small tokenizer of the kind that a name stands for, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PUBLISHED[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=alphabet,
        special_tokens=[token for token, kind in SPECIAL.items() if kind == 3],
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([token for token, kind in SPECIAL.items() if kind == 4])
    return tokenizer


def as_file(tokenizer: Tokenizer, path: Path, pre: str, **metadata: Any) -> GGUFFile:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [SPECIAL.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    if pre:
        values["tokenizer.ggml.pre"] = pre
    values |= {f"tokenizer.{key}": value for key, value in metadata.items()}
    gguf_files.write(path, {"x": np.ones(32)}, values)
    return GGUFFile.open(path)
