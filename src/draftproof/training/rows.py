"""Rows of tokens, and the batches they make. Knows documents and a codec; nothing of models.

Which rows make which batch is a pure function of (seed, step): a resumed run sees what an uninterrupted one sees.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from draftproof.model.tokenizer import Codec
from draftproof.training.chats import Marked, marked_chats
from draftproof.training.texts import Document

SHORTEST = 3
"""Tokens a row needs: step 0 of a head reads the first and foretells the third."""


@dataclass(frozen=True)
class Batch:
    """Rows side by side, padded on the right: tokens [B, S] int64, weights [B, S] float32, numbers of the rows [B].

    read: tokens without the padding.
    """

    tokens: Tensor
    weights: Tensor
    rows: Sequence[int]

    read: int

    @property
    def size(self) -> int:
        """Tokens that count."""
        return int((self.weights > 0).sum())


class Rows:
    """Many short texts: `tokens` and `counts` of all of them, end to end, and where each begins."""

    def __init__(self, texts: Iterable[Marked], length: int) -> None:
        tokens, counts, starts = array("i"), bytearray(), [0]
        for piece in (piece for text in texts for piece in _cut(text, length)):
            tokens.extend(piece.tokens)
            counts.extend(piece.counts)
            starts.append(len(tokens))
        self.tokens, self.counts = np.array(tokens, dtype=np.int32), np.array(counts, dtype=np.bool_)
        self.starts, self.length = np.array(starts), length

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counted(self) -> int:
        """Tokens that count."""
        return int(self.counts.sum())

    @cached_property
    def digest(self) -> str:
        """A name for exactly these rows."""
        found = hashlib.sha256(self.tokens.tobytes())
        found.update(self.counts.tobytes())
        found.update(self.starts.tobytes())
        return found.hexdigest()[:32]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Tokens that have one behind them that counts, and these."""
        behind = self.counts[1:].copy()
        behind[self.starts[1:-1] - 1] = False                       # another row begins
        return torch.from_numpy(self.tokens[:-1][behind]), torch.from_numpy(self.tokens[1:][behind])

    def sizes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.diff(self.starts)

    def batch(self, numbers: Sequence[int], width: int) -> Batch:
        """These rows, padded to `width`."""
        tokens, weights = torch.zeros(len(numbers), width, dtype=torch.int64), torch.zeros(len(numbers), width)
        for place, number in enumerate(numbers):
            begin, end = self.starts[number], self.starts[number + 1]
            tokens[place, : end - begin] = torch.from_numpy(self.tokens[begin:end])
            weights[place, : end - begin] = torch.from_numpy(self.counts[begin:end])
        return Batch(tokens, weights, numbers, int(self.sizes()[list(numbers)].sum()))


class Batches:
    """An endless sequence of batches of about `size` rows of full length, or as many more of shorter ones."""

    def __init__(self, rows: Rows, size: int, seed: int) -> None:
        self.rows, self.size, self.seed = rows, size, seed
        unit = max(16, rows.length // 32)
        self._widths = np.minimum(-(-rows.sizes() // unit) * unit, rows.length)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._epoch(0))

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, len(self))
        width, numbers = self._epoch(epoch)[index]
        return self.rows.batch(numbers, width)

    def sample(self, tokens: int) -> list[Batch]:
        """Batches until `tokens` of them count, or all rows once."""
        found: list[Batch] = []
        for width, numbers in self._epoch(0):
            if sum(batch.size for batch in found) < tokens:
                found.append(self.rows.batch(numbers, width))
        return found

    @lru_cache(maxsize=2)       # noqa: B019  (one or two of these live as long as the program)
    def _epoch(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Rows of one width side by side; what is left of a width joins the next wider; then all in random order."""
        dice = np.random.default_rng((self.seed, epoch))
        order = dice.permutation(len(self.rows))
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
        return [found[index] for index in dice.permutation(len(found))]


def marked(document: Document, codec: Codec, end: int | None) -> list[Marked]:
    """A document as tokens, the ones that count marked; `end`: the token behind a text that is over."""
    if document.messages:
        return marked_chats(codec, document.messages)
    if document.is_question:
        return []
    before = codec.encode(document.prompt) if document.prompt is not None else []
    text = codec.encode(document.text, special=document.prompt is None)
    if end is not None and (not text or text[-1] != end):
        text.append(end)
    return [Marked(before + text, [False] * len(before) + [True] * len(text))]


def _cut(text: Marked, length: int) -> Iterable[Marked]:
    """Pieces of at most `length` tokens in which something can be learnt."""
    for start in range(0, len(text.tokens), length):
        piece = Marked(text.tokens[start : start + length], text.counts[start : start + length])
        if len(piece.tokens) >= SHORTEST and any(piece.counts[SHORTEST - 1 :]):
            yield piece
