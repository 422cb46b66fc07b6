"""Splitting of text, for each value of `tokenizer.ggml.pre`, as the published expressions say.

These are from the named models' tokenizer.json, as llama-vocab.cpp of llama.cpp quotes them, and
applied here by the package `regex`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import regex
from gguf_tokenizers import GPT4O, LLAMA3, TEKKEN, TEXTS

from draftproof.gguf.pre_tokenizers import OLDER, splitting
from draftproof.tokenizer.token_bytes import BYTES

LETTERS = {byte: letter for letter, byte in BYTES.items()}
BYTE_LETTERS = "bytes as letters"
"""The step after which later expressions see GPT-2's letters instead of the text."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2, BYTE_LETTERS, r"\p{N}+", "[0-9][0-9][0-9]")
SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Published(NamedTuple):
    """How a family splits text."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


WHOLE_WORDS = Published((LLAMA3,), ignore_merges=True)
SINGLE_DIGITS = Published((r"\p{N}", GPT2))
BY_NAME = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2"),
                    WHOLE_WORDS._replace(adds_bos=True)),
    **dict.fromkeys(("glm4", "glm5"), WHOLE_WORDS),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "smaug-bpe"), Published((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Published((QWEN2,), nfc=True)),
    "qwen35": Published((QWEN35,), nfc=True),
    "tekken": Published((TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Published((GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), Published(DEEPSEEK3)),
    "deepseek-coder": Published(DEEPSEEK_CODER),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), SINGLE_DIGITS),
    "command-r": SINGLE_DIGITS._replace(nfc=True),
    **dict.fromkeys(("gpt-2", "phi-2"), Published((GPT2,))),
    **dict.fromkeys(("olmo", "mpt"), Published((GPT2,), nfc=True)),
    "falcon": Published(FALCON),
    "seed-coder": Published((SEED_CODER,)),
    "bloom": Published((BLOOM,)),
}  # fmt: skip
SAMPLES = [
    *TEXTS, "I'LL say we'Re 'sixty, don'T", "fooBar HTTPServer's ABC'D eXtra ǅungla",
    "(_name.attr) #tag\n\n $5+3=8 ^~|` «a»", "हिन्दी में ३३ वाक्य।", "ทดสอบ ภาษาไทย", "Ā́x a͏b",
    "price: 12,345.67 and 1234567 at 0x1F", "½6789 x²y м 999 12½3456",
    "漢字カナ混じり text 那里 中文", "한글 가 ࠀ퟿", "\u3000wide\u00a0no-break\u2028line",
    "a \n b\t\n\n  c \r\n\r\n  ", "// x/\n/\r\n!!!\n\n???",
    " leading", "trailing   ", "…。，、।۔، (x|y)",
]  # fmt: skip


def pieces(text: str, patterns: tuple[str, ...]) -> list[bytes]:
    """The parts of a text: what an expression matches, and what is between, one by one."""
    parts, in_letters = [text], False
    for pattern in patterns:
        if pattern is BYTE_LETTERS:
            parts = ["".join(LETTERS[byte] for byte in part.encode()) for part in parts]
            in_letters = True
            continue
        cuts = []
        for part in parts:
            edges = {edge for match in regex.finditer(pattern, part) for edge in match.span()}
            places = sorted({0, *edges, len(part)})
            cuts += [part[start:end] for start, end in pairwise(places)]
        parts = cuts
    return [bytes(BYTES[letter] for letter in part) if in_letters else part.encode()
            for part in parts]  # fmt: skip


def known_names() -> set[str]:
    """Every name for which `splitting` has an answer, from the constants of its code."""
    constants = splitting.__code__.co_consts
    names = {name for constant in constants
             for name in (constant if isinstance(constant, tuple) else (constant,))}
    return {name for name in names if isinstance(name, str) and splitting(name) is not None}


def test_every_name_has_a_published_reference() -> None:
    assert known_names() == {*BY_NAME}


@pytest.mark.parametrize("pre", BY_NAME)
def test_texts_are_split_as_the_published_expressions_say(pre: str) -> None:
    read, published = splitting(pre), BY_NAME[pre]
    assert read is not None
    assert read[1:] == published[1:]
    for text in SAMPLES:
        split = read.pre_tokenizer.pre_tokenize_str(text)
        ours = [bytes(BYTES[letter] for letter in piece) for piece, _ in split]
        assert ours == pieces(text, published.patterns), text


@pytest.mark.parametrize(("architecture", "pre"), [
    ("gpt2", "gpt-2"), ("starcoder", "starcoder"), ("starcoder2", "starcoder"),
    ("qwen2", "qwen2"), ("qwen2moe", "qwen2"), ("qwen3", "qwen2"), ("qwen3moe", "qwen2"),
    ("falcon", "falcon"), ("bloom", "bloom"), ("mpt", "mpt"), ("phi2", "phi-2"),
    ("command-r", "command-r"),
])  # fmt: skip
def test_files_of_before_the_name_are_split_as_their_models_are(
    architecture: str, pre: str
) -> None:
    assert OLDER[architecture] == pre
