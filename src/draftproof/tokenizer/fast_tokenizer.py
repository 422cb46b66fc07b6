"""A tokenizer that starts without transformers, which it loads only on demand.

Importing transformers takes as long as reading a small model. Encoding and decoding plain text
needs only the package tokenizers; chat templates, training and everything else use the transformers
tokenizer, which is made from the same parts on first use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from draftproof.gguf.file import GGUFFile
from draftproof.gguf.tokenizer import GGUFTokenizer, tokenizer_of
from draftproof.native.build import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftproof.tokenizer.codec import Messages

CACHE_SWITCH = "DRAFTPROOF_CACHE"
"""Environment variable; 0 disables the cache."""


class Encoded(dict[str, list[int]]):
    """The result of a call, whose keys are also attributes."""

    @property
    def input_ids(self) -> list[int]:
        """The tokens of the text."""
        return self["input_ids"]


class FastTokenizer:
    """Takes the place of a transformers tokenizer.

    Args:
        source: The tokenizer and its special tokens.
        name: The file or folder it was read from.

    Attributes:
        transformers: The transformers tokenizer with the same ids, made on first use.
    """

    is_fast = True

    def __init__(self, source: GGUFTokenizer, name: str) -> None:
        self.backend_tokenizer: Tokenizer = source.tokenizer
        self._tokenizer = source.tokenizer              # transformers' name for it
        self.name_or_path, self._roles = name, source.roles
        templates = source.chat_templates
        self.chat_template = templates if len(templates) > 1 else templates.get("default")
        self.special_tokens_map: dict[str, object] = {
            f"{role}_token": source.tokenizer.id_to_token(number)
            for role, number in source.roles.items() if role in ("bos", "eos", "unk", "pad")
        }
        self.added_tokens_decoder: dict[int, AddedToken] = (
            source.tokenizer.get_added_tokens_decoder()
        )

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        """Encode a text; further options are passed to transformers."""
        if options or not isinstance(text, str):
            return self.transformers(text, add_special_tokens=add_special_tokens, **options)
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Encoded(input_ids=encoding.ids)

    def decode(
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:  # fmt: skip
        """The text of tokens, without cleaning up spaces."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens."""
        return dict(self._tokenizer.get_vocab())

    def get_added_vocab(self) -> dict[str, int]:
        """The tokens that are found before a text is split."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def all_special_ids(self) -> list[int]:
        """The control tokens, which are left out of decoded text."""
        return [number for number, token in self.added_tokens_decoder.items() if token.special]

    @property
    def eos_token_id(self) -> int | None:
        """The first of the end tokens."""
        return self._roles.get("eos")

    @property
    def bos_token_id(self) -> int | None:
        """The token at the beginning of a text, if any."""
        return self._roles.get("bos")

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[object] | None = None
    ) -> str:
        """The template for conversations; raises ValueError if there is none."""
        known = self.chat_template
        if not isinstance(known, dict):
            template = known if chat_template is None else chat_template
        elif chat_template is not None:
            template = known.get(chat_template, chat_template)
        else:
            offered = tools is not None and "tool_use" in known
            template = known.get("tool_use" if offered else "default")
        if template is None:
            raise ValueError(f"{self.name_or_path} has no chat template")
        return template

    def apply_chat_template(
        self, conversation: Messages, tools: Sequence[object] | None = None,
        tokenize: bool = True, add_generation_prompt: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Render a conversation as text; transformers does it for tokens, or functions as tools."""
        if tokenize or any(not isinstance(tool, dict) for tool in tools or ()):
            return self.transformers.apply_chat_template(
                conversation, tools=tools, tokenize=tokenize,
                add_generation_prompt=add_generation_prompt, **options,
            )  # fmt: skip
        template = self.get_chat_template(options.pop("chat_template", None), tools)
        from draftproof.tokenizer.chat_template import render

        values = {**self.special_tokens_map, **options}
        return render(template, conversation, tools, add_generation_prompt=add_generation_prompt,
                      **values)

    @cached_property
    def transformers(self) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        # a copy, since transformers sets truncation and padding on it
        full = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(self._tokenizer.to_str()),
            **self.special_tokens_map,
            clean_up_tokenization_spaces=False, name_or_path=self.name_or_path,
        )  # fmt: skip
        full.chat_template = self.chat_template
        return full

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_tokenizer", "_roles"):
            raise AttributeError(name)
        return getattr(self.transformers, name)


def gguf_tokenizer(path: str | Path) -> FastTokenizer | None:
    """The tokenizer of a GGUF file; None if it has none.

    Raises:
        UnsupportedModel: Its kind is unknown.
        ModelNotFound: The file cannot be read.
    """
    file, cache = GGUFFile.open(path), None
    if file.metadata.get("tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none"):
        return None
    if os.environ.get(CACHE_SWITCH) != "0":
        with suppress(OSError):                         # without a home folder nothing is kept
            cache = cache_folder()
    return FastTokenizer(tokenizer_of(file, cache), str(path))
