"""Prompts in callers' formats: text, token ids, chats, and the results of tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.tokenizer.codec import Messages

Prompt = str | Sequence[int] | Messages | Tensor | Mapping[str, object]
"""Text, token ids (a list, tensor or array, [S] or [1, S]), a chat as ``[{"role": ..., "content":
...}, ...]``, or a tokenizer's BatchEncoding, whose attention mask says what is padding."""


def split_prompts(prompts: object) -> list[Any]:
    """Split one or many prompts into a list for `parse_prompt`. Raises BadInput for others."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return list(_rows(prompts))
    prompts = _list(prompts)
    first = _plain(prompts[0]) if prompts else None
    single = isinstance(first, (int, float)) or _is_message(first)
    return [prompts] if single else prompts


def parse_prompt(prompt: object) -> str | list[int] | list[Any]:
    """Convert a prompt to text, token ids or a chat. Raises BadInput for anything else."""
    if isinstance(prompt, str):
        return prompt
    parts = _rows(prompt) if isinstance(prompt, Mapping) else _list(prompt)
    if len(parts) == 1 and isinstance(inner := _plain(parts[0]), list):            # [1, S]
        parts = inner
    parts = [_plain(part) for part in parts]
    if parts and all(map(_is_message, parts)):
        return parts
    for part in parts:
        if type(part) is not int:
            raise BadInput(
                f"a prompt holds {part!r:.60} of type {type(part).__name__}; token ids are whole "
                "numbers, a chat is a list of messages"
            )
    return parts


def without_padding(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The tokens of each row of [B, S], padded on the left. Raises BadInput for other padding."""
    there = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
    if there.shape != ids.shape or bool((there[:, 1:] < there[:, :-1]).any()):
        raise BadInput(
            f"the attention mask, of shape {list(there.shape)}, has zeros after the first one of "
            f"a row, or another shape than the ids, {list(ids.shape)}; pad batches on the left"
        )
    lengths = there.sum(1).tolist()
    return [row[len(row) - size :] for row, size in zip(ids.tolist(), lengths, strict=True)]


def _plain(value: object) -> Any:
    """Convert tensors and arrays to lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _list(value: object) -> list[Any]:
    value = _plain(value)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise BadInput(
            f"a prompt was of type {type(value).__name__}; give text, token ids, a chat, what a "
            "tokenizer returns, or a list of these"
        )
    return list(value)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "input_ids" not in value


def _rows(encoding: Mapping[str, object]) -> list[list[int]]:
    """The token ids of each row of a BatchEncoding, without padding on either side."""
    ids, mask = _plain(encoding.get("input_ids")), _plain(encoding.get("attention_mask"))
    if ids and not isinstance(ids[0], Sequence):
        ids, mask = [ids], mask and [mask]
    try:
        mask = mask or [[1] * len(row) for row in ids]
        kept = [[token for token, read in zip(*row, strict=True) if read]
                for row in zip(ids, mask, strict=True)]
        holes = ["0" in "".join(str(int(read)) for read in row).strip("0") for row in mask]
    except (TypeError, ValueError):
        holes = [True]
    if any(holes):
        raise BadInput(
            "a prompt is a dict without input_ids, or has an attention mask of another shape, or "
            "one that hides more than padding; give what one call of a tokenizer returns, and a "
            "chat as a list of messages"
        )
    return kept
