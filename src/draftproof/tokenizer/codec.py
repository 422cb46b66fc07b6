"""Converts between text and tokens: encoding, chat templates, and text from single tokens. Knows
tokenizers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from draftproof.errors import BadInput
from draftproof.tokenizer.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 8
"""Prompt tokens a stream starts from, so that the first new token keeps its leading space."""

_PART_TOKENS = 3
"""Tokens that a character which is not complete may have: UTF-8 has up to four bytes."""

Messages = Sequence[Mapping[str, object]]


class Codec:
    """A tokenizer with the interface that the engine needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "") -> None:
        self.tokenizer = tokenizer
        self.name = name or tokenizer.name_or_path or type(tokenizer).__name__
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = ((token, entry) for token, entry in added.items() if entry.special)
        self.special_tokens = {token: str(entry.content) for token, entry in special}

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.tokenizer)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's special tokens unless `special` is false."""
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise BadInput(
                f"{text!r:.40} has half of a surrogate pair, a cut emoji perhaps; give whole "
                "characters"
            )
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)

    def encode_chat(
        self, messages: Messages, tools: Sequence[object] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:  # fmt: skip
        """Token ids of a chat in the model's own template, ready for the assistant's answer.

        Args:
            messages: The chat, in OpenAI's format.
            tools: Functions that the model may call, in OpenAI's format.
            options: Further options of the template, such as `enable_thinking` and `documents`.

        Raises:
            BadInput: If there is no template, or it refuses these messages, or never reads one of
                the options.
        """
        return self.encode(self.chat_text(messages, tools, options), special=False)

    def chat_text(
        self, messages: Messages, tools: Sequence[object] | None = None,
        options: Mapping[str, object] | None = None, answer: bool = True,
    ) -> str:  # fmt: skip
        """The text of a chat in the template, which `encode_chat` encodes.

        answer: whether to end with the beginning of the assistant's answer."""
        self._refuse_unread(tools, options or {})
        try:
            return str(self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=answer,
                **(options or {}),
            ))
        # templates are programs, with errors of any class
        except Exception as error:
            why = f"the chat template of {self.name} refuses these messages: {error}"
            if not self.tokenizer.chat_template:
                why = f"{self.name} has no chat template; give plain text, or a chat model"
            raise BadInput(why) from error

    def _refuse_unread(self, tools: Sequence[object] | None, options: Mapping[str, object]) -> None:
        """Raise BadInput for an option that the template never reads."""
        if not options or not self.tokenizer.chat_template:
            return
        template = str(self.tokenizer.get_chat_template(None, list(tools) if tools else None))
        reserved = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, "messages"}
        for name in options:
            if (name in reserved and name != "documents") or not re.search(
                rf"\b{re.escape(name)}\b", template
            ):
                raise BadInput(
                    f"the chat template of {self.name} does not read {name!r:.60}; leave it out"
                )

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """A stream of the text after `prompt`."""
        return TextStream(self.tokenizer, prompt, self.special_tokens)

    def marked_stream(self, prompt: Sequence[int], shown: Mapping[int, str]) -> TextStream:
        """A stream of the text after `prompt` that shows the names of some special tokens."""
        return TextStream(self.tokenizer, prompt, self.special_tokens, shown)

    def same_ids(self, other: Codec) -> bool:
        """Whether all tokens in both vocabularies have the same ids."""
        mine, theirs = self.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        shared = mine.keys() & theirs.keys()
        smaller = min(len(mine), len(theirs))
        same = all(mine[token] == theirs[token] for token in shared)
        return same and len(shared) >= 0.99 * smaller


class TextStream:
    """Converts new tokens to text one at a time; special tokens are skipped, as in
    ``tokenizer.decode``.

    A prompt may end inside a character: then its last tokens are pending, and only the text that
    new tokens add to them is returned.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int],
        special: Mapping[int, str] | None = None, shown: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        self._tokenizer, self._special, self._shown = tokenizer, special or {}, shown or {}
        # decides about the first space, and is not returned
        self._before, pending = self._context(prompt)
        self._pending: list[int] = []                        # tokens whose text is pending
        self._backend = getattr(tokenizer, "_tokenizer", None) if tokenizer.is_fast else None
        self._stream = DecodeStream(self._before, skip_special_tokens=True)
        self._prompt_text = ""              # text of the prompt's pending tokens
        for token in pending:
            self.push(token)
        if self._pending:
            whole = self._decoded(self._before + self._pending)
            self._prompt_text = whole[len(self._decoded(self._before)) :]

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""
        if token in self._shown:
            piece = self.finish() + self._shown[token]
            self._before, self._stream = [], DecodeStream(skip_special_tokens=True)
            return piece
        self._pending.append(token)
        if self._backend is None:
            piece = self._slow_step()
        else:
            try:
                piece = self._stream.step(self._backend, token) or ""
            # a stray byte breaks the previous character, whose text was returned
            except Exception:
                piece = self._restarted()
        if piece:
            self._before, self._pending = (self._before + self._pending)[-_CONTEXT:], []
        return self._without_prompt_text(piece) if self._prompt_text else piece

    def special(self, token: int) -> str:
        """The text of a special token, which `push` skips; empty for any other."""
        return self._special.get(token, "")

    def finish(self) -> str:
        """The remaining text after the last token; an incomplete character becomes the replacement
        character."""
        pending, self._pending = self._pending, []
        return self._without_prompt_text(self._decoded(pending))

    def _without_prompt_text(self, piece: str) -> str:
        """A piece without the part that belongs to the prompt."""
        if piece and self._prompt_text:
            pairs = zip(piece, self._prompt_text, strict=False)
            piece = piece[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
            self._prompt_text = ""
        return piece

    def _restarted(self) -> str:
        """The text of the pending tokens, from a new stream."""
        self._stream = DecodeStream(skip_special_tokens=True)
        step, backend = self._stream.step, self._backend
        pieces = (step(backend, token) for token in self._pending)  # type: ignore[arg-type]
        return "".join(piece or "" for piece in pieces)

    def _slow_step(self) -> str:
        text = self._decoded(self._before + self._pending)[len(self._decoded(self._before)) :]
        return "" if text.endswith("\ufffd") else text

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
        """The last tokens of the prompt that form whole characters (cut bytes would spoil all that
        follows), and the tokens after them."""
        for size in range(_CONTEXT, _CONTEXT + 4):
            context = list(prompt[-size:])
            for end in range(len(context), max(0, len(context) - _PART_TOKENS - 1), -1):
                text = self._decoded(context[:end])
                if not (text.startswith("\ufffd") or text.endswith("\ufffd")):
                    return context[:end], context[end:]
        return [], list(prompt[-_PART_TOKENS:])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ))
