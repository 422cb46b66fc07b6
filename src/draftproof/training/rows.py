"""Rows of tokens with a loss mask, and the batches they make. Knows documents and a tokenizer.

Which rows make which batch is a function of (seed, step): a resumed run sees the same ones.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec
from draftproof.training.texts import Document, Message

FIRST = 2
"""The first token of a row that a head can learn: it reads one and predicts the next but one."""
OPENING = 64
"""Tokens of a plain text that serve as a prompt, at most."""


class Example(NamedTuple):
    """Tokens, and which of them to learn to predict (the loss mask)."""

    tokens: list[int]
    mask: list[bool]


class Batch(NamedTuple):
    """Rows padded on the right: tokens [B, S] int64, weights [B, S] float32 (the loss mask).

    rows: their numbers. sizes: their tokens without the padding.
    """

    tokens: Tensor
    weights: Tensor
    rows: Sequence[int]
    sizes: Sequence[int]

    @property
    def loss_tokens(self) -> int:
        return int((self.weights > 0).sum())


class Rows:
    """Many short texts: `tokens` and `mask` of all of them, end to end, and where each starts."""

    def __init__(self, examples: Iterable[Example], length: int) -> None:
        tokens, mask, starts = array("i"), bytearray(), [0]
        for example in examples:
            for start in range(0, len(example.tokens), length):
                flags = example.mask[start : start + length]
                if any(flags[FIRST:]):
                    tokens.extend(example.tokens[start : start + length])
                    mask.extend(flags)
                    starts.append(len(tokens))
        self.tokens, self.mask = np.array(tokens, dtype=np.int32), np.array(mask, dtype=np.bool_)
        self.starts, self.length = np.array(starts), length

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def loss_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def sizes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.diff(self.starts)

    @cached_property
    def digest(self) -> str:
        """A name for exactly these rows."""
        parts = b"".join(part.tobytes() for part in (self.tokens, self.mask, self.starts))
        return hashlib.sha256(parts).hexdigest()[:32]

    def bigrams(self) -> tuple[Tensor, Tensor]:
        """Tokens that have one behind them that is in the loss, and these; within rows."""
        behind = self.mask[1:].copy()
        behind[self.starts[1:-1] - 1] = False
        pairs = self.tokens[:-1][behind], self.tokens[1:][behind]
        return torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1])

    def batch(self, numbers: Sequence[int], width: int) -> Batch:
        """These rows, padded to `width`."""
        tokens = torch.zeros(len(numbers), width, dtype=torch.int64)
        weights = torch.zeros(len(numbers), width)
        for place, number in enumerate(numbers):
            begin, end = self.starts[number : number + 2]
            tokens[place, : end - begin] = torch.from_numpy(self.tokens[begin:end])
            weights[place, : end - begin] = torch.from_numpy(self.mask[begin:end])
        return Batch(tokens, weights, numbers, self.sizes[list(numbers)].tolist())


class Batches:
    """An endless sequence of batches of about `size` full rows, or more of shorter ones."""

    def __init__(self, rows: Rows, size: int, seed: int) -> None:
        self.rows, self.size, self.seed = rows, size, seed
        unit = max(16, rows.length // 32)
        self._widths = np.minimum(-(-rows.sizes // unit) * unit, rows.length)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._epoch(0))

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, len(self))
        width, numbers = self._epoch(epoch)[index]
        return self.rows.batch(numbers, width)

    def sample(self, tokens: int) -> list[Batch]:
        """Batches until `tokens` of them are in the loss, or all rows once."""
        found: list[Batch] = []
        while len(found) < len(self) and sum(batch.loss_tokens for batch in found) < tokens:
            found.append(self[len(found)])
        return found

    @lru_cache(maxsize=2)  # noqa: B019  (one or two of these live as long as the program)
    def _epoch(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Rows by width; what is left of a width joins the next wider; all in random order."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.rows))
        found: list[tuple[int, list[int]]] = []
        left: list[int] = []
        for width in sorted({int(width) for width in self._widths}):
            left += order[self._widths[order] == width].tolist()
            fit = max(1, self.size * self.rows.length // width)
            while len(left) >= fit:
                found.append((width, left[:fit]))
                left = left[fit:]
        if left:
            found.append((int(max(self._widths[number] for number in left)), left))
        return [found[index] for index in rng.permutation(len(found))]


def tokenized(document: Document, codec: Codec, end: int | None) -> list[Example]:
    """A document as tokens, `end` behind a text that is over; nothing if it lacks its answer."""
    if document.messages:
        return tokenized_chat(document.messages, codec)
    if not document.text:
        return []
    before = codec.encode(document.prompt) if document.prompt is not None else []
    text = codec.encode(document.text, special=document.prompt is None)
    if end is not None and text[-1:] != [end]:
        text.append(end)
    return [Example(before + text, [False] * len(before) + [True] * len(text))]


def tokenized_chat(messages: Sequence[Message], codec: Codec) -> list[Example]:
    """The chat in the model's own template, with the assistant's tokens in the loss.

    One example where the template writes a chat the same way while it grows; otherwise (templates
    that drop the thoughts of earlier turns) one per answer, each as the model saw it then.
    """
    tokenizer = codec.tokenizer
    if not tokenizer.chat_template:
        raise BadInput(f"the tokenizer of {codec.name} has no chat template; give texts")
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        return []
    chat = [message.as_dict() for message in messages[: answers[-1] + 1]]

    def rendered(size: int, ask: bool = False) -> str:
        options: dict[str, bool] = {"tokenize": False, "add_generation_prompt": ask}
        return str(tokenizer.apply_chat_template(chat[:size], **options))

    try:
        whole = rendered(len(chat))
        spans = [(rendered(index, ask=True), rendered(index + 1)) for index in answers]
    except Exception as error:                           # templates are programs
        raise BadInput(f"the chat template of {codec.name} refuses a chat: {error}") from error
    if all(whole.startswith(part) for span in spans for part in span):
        return [_masked(codec, whole, [(len(start), len(end)) for start, end in spans])]
    begins = [len(os.path.commonprefix(span)) for span in spans]  # noqa: RUF071  (characters)
    return [_masked(codec, end, [(i, len(end))]) for i, (_, end) in zip(begins, spans, strict=True)]


def prompt_of(document: Document, codec: Codec, turn: int = -1) -> list[int]:
    """What the target goes on with: a chat to its user message `turn`, a prompt, or an opening."""
    if document.messages:
        asked = [index for index, one in enumerate(document.messages) if one.role == "user"]
        until = asked[turn % len(asked)] + 1 if asked else len(document.messages)
        return codec.encode_chat([message.as_dict() for message in document.messages[:until]])
    if document.prompt is not None:
        return codec.encode(document.prompt)
    return codec.encode(document.text[: 20 * OPENING])[:OPENING]


def _masked(codec: Codec, text: str, spans: Sequence[tuple[int, int]]) -> Example:
    """Tokens that begin inside a span of characters are in the loss."""
    if not codec.tokenizer.is_fast:
        raise BadInput(f"the tokenizer of {codec.name} tells no offsets; give texts, not chats")
    out = codec.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = [begin for begin, _ in out["offset_mapping"]]
    mask = [any(start <= begin < end for start, end in spans) for begin in begins]
    return Example(list(out["input_ids"]), mask)

