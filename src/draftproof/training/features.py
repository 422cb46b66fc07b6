"""What the frozen target makes of a batch: computed anew each time, or kept on disk between epochs, bounded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.training.rows import Batch, Rows


class Reader(Protocol):
    """Hidden states, and if asked for logits, of a batch."""

    def __call__(self, batch: Batch) -> Features: ...


class Streamed:
    """The target reads every batch when it is needed. logits: give its own logits as well."""

    def __init__(self, target: Target, hidden_layers: tuple[int, ...], logits: bool) -> None:
        self.target, self.hidden_layers, self.logits = target, hidden_layers, logits

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        tokens, weights = batch.tokens.to(self.target.device), batch.weights.to(self.target.device)
        return self.target.features(tokens, weights, hidden_layers=self.hidden_layers, logits=self.logits)


class Cached:
    """As `Streamed`, but the hidden states of rows that were read once are kept in bfloat16 on disk, up to a size.

    States are rounded to bfloat16 when they are read first, too, so that keeping them changes nothing.
    identity: names target and rows; states of others are not used.
    """

    def __init__(self, streamed: Streamed, rows: Rows, folder: Path, gigabytes: float, identity: str) -> None:
        self.streamed, self.rows = streamed, rows
        self._last = streamed.hidden_layers.index(-1) if -1 in streamed.hidden_layers else None
        if streamed.logits:
            self._check_logits()
        size = len(streamed.hidden_layers) * streamed.target.hidden_size
        self.kept = int(np.searchsorted(rows.starts, gigabytes * 1e9 / (2 * size), side="right")) - 1   # whole rows
        if self.kept:
            tokens = int(rows.starts[self.kept])
            name = f"{identity} {streamed.hidden_layers} {size} {tokens} {rows.digest}"
            folder = folder / hashlib.sha256(name.encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
            self._states = _mapped(folder / "hidden.bf16", np.int16, (tokens, size))
            self._known = _mapped(folder / "known.bool", np.bool_, (self.kept,))

    def __call__(self, batch: Batch) -> Features:
        target = self.streamed.target
        kept = [(place, number) for place, number in enumerate(batch.rows) if number < self.kept]
        if len(kept) == len(batch.rows) and all(self._known[number] for _, number in kept):
            shape = (*batch.tokens.shape, len(self.streamed.hidden_layers), target.hidden_size)
            hidden = torch.zeros(shape, dtype=torch.bfloat16)
            for place, number in kept:
                states = torch.from_numpy(self._states[slice(*self.rows.starts[number : number + 2])])
                hidden[place, : len(states)] = states.view(torch.bfloat16).view(len(states), *shape[2:])
        else:
            hidden = self.streamed(batch).hidden.bfloat16()
            flat = hidden.cpu().view(torch.int16).flatten(2)                            # [B, S, T*H]
            for place, number in kept:
                begin, end = self.rows.starts[number : number + 2]
                self._states[begin:end] = flat[place, : end - begin].numpy()
                self._known[number] = True
        hidden = hidden.to(target.device, target.dtype)
        logits = self._logits(hidden) if self.streamed.logits else None
        return Features(batch.tokens.to(target.device), hidden, batch.weights.to(target.device), logits)

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.streamed.target.unembed(hidden[:, :, self._last or 0])

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Refuse a family that does to its logits what `unembed` does not: hidden states alone do not give them."""
        target = self.streamed.target
        tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
        found = target.features(tokens, torch.ones(1, 8, device=target.device), logits=True)
        assert found.logits is not None
        ours = target.unembed(found.hidden[:, :, 0]).float()
        if self._last is None or not torch.allclose(ours, found.logits.float(), rtol=0.02, atol=0.05):
            raise BadInput(f"the logits of {target.name} do not follow from its last hidden states; leave out --cache-gb")


def _mapped(file: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """An array on disk; zeros if it is new."""
    return np.memmap(file, dtype, "r+" if file.exists() else "w+", shape=shape)
