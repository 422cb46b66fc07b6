"""The tokenizer of a folder, without importing transformers from the second start on.

transformers builds the tokenizer of a folder by rules of its own (some classes rebuild the
pipeline from the vocabulary), so what it built is kept in the cache folder at the first start and
read from there at later ones: the same tokens, seconds sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from draftproof.gguf.tokenizer import GGUFTokenizer
from draftproof.tokenizer.fast_tokenizer import FastTokenizer
from draftproof.weights.disk_cache import kept_of_files

FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""One of these is in a folder with a tokenizer."""
OVERRIDES = {"_decode", "decode", "_encode_plus", "apply_chat_template", "__call__"}
"""Methods by which a class of transformers does more than its backend."""


class FolderTokenizer(FastTokenizer):
    """A tokenizer that transformers built earlier.

    Args:
        state: What `state_of` gave.
        name: The folder.
        load: Loads transformers' tokenizer, for what is not here.
    """

    def __init__(self, state: dict[str, Any], name: str, load: Callable[[], Any]) -> None:
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
    def transformers(self) -> Any:
        return self._load()


def folder_tokenizer(name: str, load: Callable[[], Any]) -> Any:
    """The tokenizer of a folder: as it was kept, or else as `load` loads it, which is kept.

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
    """What encodes and decodes as a tokenizer of transformers does.

    Returns:
        None for one that is not fast, or does more than its backend.
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
