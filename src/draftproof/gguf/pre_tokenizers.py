"""Normalises and splits text before byte-level BPE, by the value of `tokenizer.ggml.pre`.

A GGUF file does not store the regular expressions of its tokenizer but a name, and readers have to
know them. Those here are from the named tokenizer.json files, as quoted in llama-vocab.cpp of
llama.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    PreTokenizer,
    Punctuation,
    Sequence,
    Split,
)

_ENDING = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _ENDING
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _ENDING
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
)
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS % ("", "") + r"|\p{N}" + _SLASHES
_GPT4O = _WORDS % ((_CONTRACTIONS + "?",) * 2) + r"|\p{N}{1,3}" + _SLASHES
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n"
    r"]*|\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+",
)
_SEED_CODER = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


class Splitting(NamedTuple):
    """The steps from text to the pieces that are merged.

    Attributes:
        pre_tokenizer: Splits text and maps bytes to letters.
        nfc: Whether text is composed (Unicode NFC) first.
        ignore_merges: Whether a piece that is a token is never split.
        adds_bos: Whether a beginning token comes before the text if the file does not say so.
    """

    pre_tokenizer: PreTokenizer
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(*patterns: str) -> PreTokenizer:
    splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> PreTokenizer:
    return Sequence([
        Punctuation("contiguous"), _gpt2(), Digits(individual_digits=False),
        Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ])  # fmt: skip


def _deepseek_coder() -> PreTokenizer:
    patterns = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
    splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, Digits(individual_digits=True), _byte_level()])


def splitting(pre: str) -> Splitting | None:
    """The splitting for a value of `tokenizer.ggml.pre`; None if the value is unknown."""
    if pre in ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2"):
        return Splitting(_byte_level(_LLAMA3), ignore_merges=True, adds_bos=True)
    if pre in ("glm4", "glm5", "chatglm-bpe"):
        return Splitting(_byte_level(_LLAMA3), ignore_merges=pre != "chatglm-bpe")
    if pre in ("dbrx", "smaug-bpe"):
        return Splitting(_byte_level(_LLAMA3))
    if pre in ("qwen2", "deepseek-r1-qwen", "megrez"):
        return Splitting(_byte_level(_QWEN2), nfc=True)
    if pre == "qwen35":
        return Splitting(_byte_level(_QWEN35), nfc=True)
    if pre == "tekken":
        return Splitting(_byte_level(_TEKKEN), ignore_merges=True, adds_bos=True)
    if pre in ("gpt-4o", "llama4", "minimax-m2"):
        return Splitting(_byte_level(_GPT4O))
    if pre in ("deepseek-v3", "joyai-llm"):
        return Splitting(_byte_level(*_DEEPSEEK3))
    if pre == "deepseek-coder":
        return Splitting(_deepseek_coder())
    if pre in ("smollm", "starcoder", "refact", "codeshell", "command-r"):
        return Splitting(_single_digits(), nfc=pre == "command-r")
    if pre in ("gpt-2", "phi-2"):
        return Splitting(_gpt2())
    if pre in ("olmo", "mpt"):
        return Splitting(_gpt2(), nfc=True)
    if pre == "falcon":
        return Splitting(_falcon())
    if pre == "seed-coder":
        return Splitting(_byte_level(_SEED_CODER))
    if pre == "bloom":
        return Splitting(_byte_level(_BLOOM))
    return None


OLDER = {
    "gpt2": "gpt-2", "starcoder": "starcoder", "starcoder2": "starcoder", "qwen2": "qwen2",
    "qwen2moe": "qwen2", "falcon": "falcon", "bloom": "bloom", "mpt": "mpt", "phi2": "phi-2",
    "command-r": "command-r", "qwen3": "qwen2", "qwen3moe": "qwen2",
}  # fmt: skip
"""What files without `tokenizer.ggml.pre` mean, by architecture: they were written before it
existed (April 2024)."""
