"""Between text and tokens: encoding, chat templates, and text from tokens one at a time. Knows tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from draftproof.errors import BadInput

_CONTEXT = 8
"""Prompt tokens a stream starts from, so that the first new token keeps its leading space."""

Messages = Sequence[dict[str, str]]


class Codec:
    """A tokenizer as the engine sees it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's special tokens unless told otherwise."""
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a chat in the model's own template, ready for the assistant's answer."""
        if not self.tokenizer.chat_template:
            raise BadInput(f"the tokenizer of {self.name} has no chat template; give plain text, or a chat model")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(str(text), special=False)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """A stream of the text behind `prompt`."""
        return TextStream(self.tokenizer, prompt)

    def same_ids(self, other: Codec) -> bool:
        """Whether every token both know has the same id in both."""
        mine, theirs = self.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        shared = mine.keys() & theirs.keys()
        smaller = min(len(mine), len(theirs))
        return len(shared) >= 0.99 * smaller and all(mine[token] == theirs[token] for token in shared)


class TextStream:
    """Turns new tokens into text as they come; special tokens are skipped, as in ``tokenizer.decode``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        self._sent = len(self._decoded())
        self._backend = getattr(tokenizer, "_tokenizer", None) if tokenizer.is_fast else None
        self._stream = DecodeStream(self._tokens, skip_special_tokens=True) if self._backend is not None else None

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        if self._stream is not None:
            piece = self._stream.step(self._backend, token) or ""  # type: ignore[arg-type]
        else:
            text = self._decoded()[self._sent :]
            piece = "" if text.endswith("\ufffd") else text
        self._sent += len(piece)
        return piece

    def finish(self) -> str:
        """What is left when no token follows: an incomplete character shows as the replacement character."""
        text = self._decoded()[self._sent :]
        self._sent += len(text)
        return text

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
