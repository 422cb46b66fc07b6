"""Prompts as callers have them: text, token ids, chats, and what tokenizers return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.model.tokenizer import Messages

Prompt = str | Sequence[int] | Messages | Tensor | Mapping[str, Any]
"""Text, token ids (a list, tensor or array, [S] or [1, S]), a chat as ``[{"role": ..., "content":
...}, ...]``, or a tokenizer's BatchEncoding, whose attention mask says what is padding."""
_WANTED = "give text, token ids, a chat, what a tokenizer returns, or a list of these"


def several(given: Any) -> list[Any]:
    """One prompt or many, as a list of prompts, each for `one`. Raises BadInput for others."""
    given = _plain(given)
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping):
        return list(_rows(given))
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise BadInput(f"the prompts were of type {type(given).__name__}; {_WANTED}")
    first = _plain(given[0]) if len(given) else None
    single = isinstance(first, (int, float, Mapping)) and not _is_encoding(first)
    return [given] if single else list(given)


def one(given: Any) -> str | list[int] | list[Any]:
    """One prompt as text, token ids or a chat. Raises BadInput for anything else."""
    given = _plain(given)
    if isinstance(given, str):
        return given
    if _is_encoding(given):
        given = _rows(given)
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise BadInput(f"a prompt was of type {type(given).__name__}; {_WANTED}")
    if len(given) == 1 and isinstance(inner := _plain(given[0]), list):            # [1, S]
        given = inner
    parts = [part.tolist() if hasattr(part, "tolist") else part for part in given]
    if parts and all(isinstance(part, Mapping) for part in parts):
        return parts
    strange = next((part for part in parts if type(part) is not int), None)
    if strange is not None:
        raise BadInput(
            f"a prompt holds {strange!r:.60} of type {type(strange).__name__}; token ids are whole "
            "numbers, a chat is a list of messages"
        )
    return parts


def without_padding(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The text of each row of [B, S], padded on the left. Raises BadInput for other padding."""
    there = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
    if there.shape != ids.shape or bool((there[:, 1:] < there[:, :-1]).any()):
        raise BadInput(
            f"the attention mask, of shape {list(there.shape)}, has zeros behind the first one of "
            f"a row, or another shape than the ids, {list(ids.shape)}; pad batches on the left"
        )
    lengths = there.sum(1).tolist()
    return [row[len(row) - size :] for row, size in zip(ids.tolist(), lengths, strict=True)]


def _plain(given: Any) -> Any:
    """Tensors and arrays as lists."""
    return given.tolist() if hasattr(given, "tolist") else given


def _is_encoding(given: Any) -> bool:
    return isinstance(given, Mapping) and "input_ids" in given


def _rows(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of each row of a BatchEncoding, without padding."""
    if not _is_encoding(encoding):
        raise BadInput(f"the prompt was one {type(encoding).__name__} without input_ids; {_WANTED}")
    ids, mask = _plain(encoding["input_ids"]), _plain(encoding.get("attention_mask"))
    if ids and not isinstance(ids[0], Sequence):
        ids, mask = [ids], mask and [mask]
    if mask is None:
        mask = [[1] * len(row) for row in ids]
    if [len(row) for row in ids] != [len(row) for row in mask]:
        raise BadInput("input_ids and attention_mask have different shapes; give those of one call")
    return [_unpadded(one(row), read) for row, read in zip(ids, mask, strict=True)]


def _unpadded(ids: list[Any] | str, mask: Sequence[int]) -> list[int]:
    places = [place for place, read in enumerate(mask) if read]
    if not places:
        return []
    first, last = places[0], places[-1] + 1
    if len(places) != last - first:
        raise BadInput("an attention mask hides tokens inside the prompt; it may hide padding only")
    return [int(token) for token in ids[first:last]]
