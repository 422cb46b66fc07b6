"""The bytes of each token of a vocabulary. Knows tokenizers.

A token may be a part of a character (an emoji has up to four tokens), so its text is not enough.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPACES = "Ġ▁"
"""What byte-level tokenizers, and those of SentencePiece, write for a space."""


class TokenBytes:
    """The bytes of a tokenizer's tokens, by id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._literal = {*tokenizer.all_special_ids, *added}
        self._byte_level = is_byte_level(list(tokenizer.get_vocab()))

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token, or of a special token's name; empty for an unused id."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""
        if token in self._literal:
            return name.encode(errors="ignore")
        return bytes_of(name, self._byte_level)

    def text(self, token: int) -> str:
        """A token as text, with parts of characters in OpenAI's format, ``bytes:\\xf0\\x9f``."""
        data = self[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            letters = (chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data)
            return "bytes:" + "".join(letters)


def is_byte_level(names: list[str]) -> bool:
    """Whether names of tokens are byte-level (GPT-2), not SentencePiece's."""
    byte_level, sentencepiece = (sum(name.startswith(mark) for name in names) for mark in SPACES)
    return byte_level >= sentencepiece


def bytes_of(name: str, byte_level: bool) -> bytes:
    """The bytes of an ordinary token from its name in its kind of tokenizer."""
    if byte_level:
        if all(letter in BYTES for letter in name):
            return bytes(BYTES[letter] for letter in name)
        return name.encode(errors="ignore")
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
        return bytes([int(match[1], 16)])
    return name.replace("▁", " ").encode(errors="ignore")


def _byte_letters() -> dict[str, int]:
    """The byte for each letter of a byte-level token (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTES = _byte_letters()
