"""Rows of tokens with a loss mask, and batches of them. Knows documents and a tokenizer.

The rows of a batch are a function of (seed, step): a resumed run has the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.tokenizer.codec import Codec
from draftproof.training.texts import Document

OPENING = 64
"""The most tokens of a plain text that serve as a prompt."""


class Example(NamedTuple):
    """Tokens, and the mask of those to predict (the loss mask)."""

    tokens: list[int]
    mask: list[bool]


class Batch(NamedTuple):
    """Rows padded on the right: tokens [B, S] int64, weights [B, S] float32 (the loss mask).

    rows: their indices. sizes: their numbers of tokens without padding.
    """

    tokens: Tensor
    weights: Tensor
    rows: Sequence[int]
    sizes: Sequence[int]

    @property
    def loss_tokens(self) -> int:
        return int((self.weights > 0).sum())


class Rows:
    """Many short texts, cut at `length`: the tokens of each, with the loss mask.

    The first two of each are given: a head reads a token and predicts the one after the next.
    """

    def __init__(self, examples: Iterable[Example], length: int) -> None:
        self.rows, self.length = list[tuple[Tensor, Tensor]](), length
        for tokens, mask in examples:
            for start in range(0, len(tokens), length):
                part = slice(start, start + length)
                if any(mask[part][2:]):
                    row = torch.tensor(tokens[part], dtype=torch.int32), torch.tensor(mask[part])
                    self.rows.append(row)
        self.sizes = np.array([len(tokens) for tokens, _ in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def loss_token_ids(self) -> Tensor:
        """The tokens in the loss from all rows."""
        return torch.cat([row[mask] for row, mask in self.rows])

    def most_common(self, count: int) -> Tensor:
        """The most frequent tokens in the loss, at most `count`, in ascending order."""
        counts = torch.bincount(self.loss_token_ids)
        best = counts.argsort(descending=True, stable=True)[:count]
        return best[counts[best] > 0].sort().values

    def bigrams(self) -> tuple[Tensor, Tensor]:
        """Pairs of adjacent tokens within rows whose second one is in the loss."""
        pairs = [torch.stack([tokens[:-1], tokens[1:]])[:, mask[1:]] for tokens, mask in self.rows]
        first, second = torch.cat(pairs, 1)
        return first, second

    def batch(self, numbers: Sequence[int], width: int) -> Batch:
        """These rows, padded to `width`."""
        tokens = torch.zeros(len(numbers), width, dtype=torch.int64)
        weights = torch.zeros(len(numbers), width, dtype=torch.float32)
        for place, number in enumerate(numbers):
            row, mask = self.rows[number]
            tokens[place, : len(row)], weights[place, : len(row)] = row, mask.float()
        return Batch(tokens, weights, numbers, self.sizes[list(numbers)].tolist())


class Batches:
    """An endless sequence of batches of about `size` full rows, or more of shorter ones."""

    def __init__(self, rows: Rows, size: int, seed: int) -> None:
        self.rows, self.size, self.seed = rows, size, seed
        unit = max(16, rows.length // 32)
        self._widths = np.minimum(-(-rows.sizes // unit) * unit, rows.length)
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """The number of batches per epoch."""
        return len(self._epoch(0))

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, len(self))
        width, numbers = self._epoch(epoch)[index]
        return self.rows.batch(numbers, width)

    def sample(self, tokens: int) -> list[Batch]:
        """Batches with at least `tokens` tokens in the loss, or with all rows once."""
        sample: list[Batch] = []
        while len(sample) < len(self) and sum(batch.loss_tokens for batch in sample) < tokens:
            sample.append(self[len(sample)])
        return sample

    def _shuffled(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Groups of rows by width, in random order; a width's remainder joins the next larger."""
        rng = np.random.default_rng((self.seed, epoch))
        order, left, groups = rng.permutation(len(self.rows)), list[int](), []
        for width in np.unique(self._widths).tolist():
            left += order[self._widths[order] == width].tolist()
            fit = max(1, self.size * self.rows.length // width)
            full = len(left) - len(left) % fit
            groups += [(width, left[start : start + fit]) for start in range(0, full, fit)]
            left = left[full:]
        if left:
            groups.append((max(self._widths[left].tolist()), left))
        return [groups[index] for index in rng.permutation(len(groups))]


def tokenized(document: Document, codec: Codec, end: int | None) -> list[Example]:
    """The tokens of a document, with `end` after a complete text; empty without an answer."""
    if document.messages:
        return tokenized_chat(document.messages, codec)
    if not document.text:
        return []
    before = codec.encode(document.prompt) if document.prompt is not None else []
    text = codec.encode(document.text, special=document.prompt is None)
    if end is not None and text[-1:] != [end]:
        text.append(end)
    return [Example(before + text, [False] * len(before) + [True] * len(text))]


def tokenized_chat(messages: Sequence[Mapping[str, object]], codec: Codec) -> list[Example]:
    """The tokens of a chat in the model's own template, with the assistant's in the loss.

    One example if the template only appends to a growing chat; otherwise (templates that drop the
    thoughts of earlier turns) one per answer, each as the model saw it then.
    """
    tokenizer = codec.tokenizer
    if not tokenizer.chat_template:
        raise BadInput(f"the tokenizer of {codec.name} has no chat template; give texts")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []

    def rendered(size: int, ask: bool = False) -> str:
        options: dict[str, bool] = {"tokenize": False, "add_generation_prompt": ask}
        return str(tokenizer.apply_chat_template(list(messages[:size]), **options))

    try:
        text = rendered(answers[-1] + 1)
        spans = [(rendered(index, ask=True), rendered(index + 1)) for index in answers]
    except Exception as error:                           # templates are programs
        raise BadInput(f"the chat template of {codec.name} refuses a chat: {error}") from error
    if all(text.startswith(part) for span in spans for part in span):
        return [_masked(codec, text, [(len(start), len(end)) for start, end in spans])]
    begins = [len(os.path.commonprefix(span)) for span in spans]  # noqa: RUF071  (characters)
    return [_masked(codec, end, [(i, len(end))]) for i, (_, end) in zip(begins, spans, strict=True)]


def prompt_of(document: Document, codec: Codec, turn: int = -1) -> list[int]:
    """The text to continue: a chat up to its user message `turn`, a prompt, or an opening."""
    if document.messages:
        questions = [
            index for index, message in enumerate(document.messages) if message["role"] == "user"
        ]
        until = questions[turn % len(questions)] + 1 if questions else len(document.messages)
        return codec.encode_chat(list(document.messages[:until]))
    if document.prompt is not None:
        return codec.encode(document.prompt)
    return codec.encode(document.text[: 20 * OPENING])[:OPENING]


def _masked(codec: Codec, text: str, spans: Sequence[tuple[int, int]]) -> Example:
    """Tokenize a text, with the tokens that begin inside a span of characters in the loss."""
    if not codec.tokenizer.is_fast:
        raise BadInput(f"the tokenizer of {codec.name} tells no offsets; give texts, not chats")
    out = codec.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = [begin for begin, _ in out["offset_mapping"]]
    mask = [any(start <= begin < end for start, end in spans) for begin in begins]
    return Example(list(out["input_ids"]), mask)
