"""The tokenizer of a folder, which needs no import of transformers from the second start on.

transformers builds a folder's tokenizer by its own rules (some classes rebuild the pipeline from
the vocabulary), so the result of the first start is kept in the cache folder and read by later
ones: the same tokens, seconds earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from draftproof.gguf.tokenizer import GGUFTokenizer
from draftproof.tokenizer.fast_tokenizer import FastTokenizer
from draftproof.weights.disk_cache import kept_of_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""A folder with a tokenizer has one of these files."""
OVERRIDES = {"_decode", "decode", "_encode_plus", "apply_chat_template", "__call__"}
"""Methods by which a class of transformers does more than its backend."""


class FolderTokenizer(FastTokenizer):
    """A tokenizer that transformers built earlier.

    Args:
        state: The result of `state_of`.
        name: The folder.
        load: Loads transformers' tokenizer for everything that is not supported here.
    """

    def __init__(
        self, state: dict[str, Any], name: str, load: Callable[[], PreTrainedTokenizerBase]
    ) -> None:
        backend = Tokenizer.from_str(state["backend"])
        backend.no_truncation()
        backend.no_padding()
        templates = state["chat_template"] or {}
        named = templates if isinstance(templates, dict) else {"default": templates}
        super().__init__(GGUFTokenizer(backend, state["roles"], (), named), name)
        self.special_tokens_map = state["special"]
        self._special_ids, self._load = state["special_ids"], load

    @property
    def all_special_ids(self) -> list[int]:
        return list(self._special_ids)

    @cached_property
    def transformers(self) -> PreTrainedTokenizerBase:
        return self._load()


def folder_tokenizer(name: str, load: Callable[[], Any]) -> Any:
    """The tokenizer of a folder, as it was kept, or else from `load`, and kept.

    Args:
        name: The folder.
        load: Loads transformers' tokenizer of the folder; None if there is none.
    """
    if not any(Path(name, file).is_file() for file in FILES):
        return load()
    place = kept_of_files(name, "tokenizer")
    state = place.read()
    if state is not None:
        return FolderTokenizer(state, name, load)
    loaded = load()
    state = state_of(loaded)
    if state is not None:
        place.write(state)
    return loaded


def state_of(tokenizer: Any) -> dict[str, Any] | None:
    """The parts of a transformers tokenizer that encode and decode.

    Returns:
        None if it is not a fast tokenizer, or does more than its backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or backend is None:
        return None
    kinds = [kind for kind in type(tokenizer).__mro__ if ".models." in kind.__module__]
    if any(OVERRIDES & vars(kind).keys() for kind in kinds):
        return None
    special = {
        name: [str(token) for token in value] if isinstance(value, (list, tuple)) else str(value)
        for name, value in tokenizer.special_tokens_map.items()
    }
    roles = {name.removesuffix("_token"): tokenizer.convert_tokens_to_ids(value)
             for name, value in special.items() if isinstance(value, str)}
    return {"backend": backend.to_str(), "chat_template": tokenizer.chat_template,
            "special": special, "roles": roles, "special_ids": list(tokenizer.all_special_ids)}
