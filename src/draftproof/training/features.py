"""What the frozen target makes of a batch: computed anew each time, or kept on disk between epochs, bounded.

Knows the target and batches; nothing of heads.
"""

from __future__ import annotations

import json
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
        device = self.target.device
        return self.target.features(
            batch.tokens.to(device), batch.weights.to(device), hidden_layers=self.hidden_layers, logits=self.logits
        )


class Cached:
    """As `Streamed`, but the hidden states of rows that were read once are kept in bfloat16 on disk, up to a size.

    States are rounded to bfloat16 when they are read first, too, so that keeping them changes nothing. `identity` names
    target and rows: states of others are thrown away.
    """

    def __init__(self, streamed: Streamed, rows: Rows, folder: Path, gigabytes: float, identity: str) -> None:
        self.streamed, self.rows = streamed, rows
        size = len(streamed.hidden_layers) * streamed.target.hidden_size
        self.kept = int(np.searchsorted(rows.starts, gigabytes * 1e9 / (2 * size), side="right")) - 1     # whole rows
        self._last = -1 in streamed.hidden_layers and streamed.hidden_layers.index(-1)
        if streamed.logits:
            self._check_logits()
        shape = (int(rows.starts[self.kept]), size)
        stale = not _same(folder / "identity.json", {"of": identity, "tokens": shape[0], "size": size})
        folder.mkdir(parents=True, exist_ok=True)
        if shape[0]:
            self._states = _mapped(folder / "hidden.bf16", np.int16, shape, stale)
            self._known = _mapped(folder / "known.bool", np.bool_, (self.kept,), stale)
        (folder / "identity.json").write_text(json.dumps({"of": identity, "tokens": shape[0], "size": size}))

    def __call__(self, batch: Batch) -> Features:
        if all(number < self.kept and self._known[number] for number in batch.rows):
            return self._recalled(batch)
        found = self.streamed(batch)
        hidden = found.hidden.bfloat16()
        self._keep(batch, hidden)
        return self._with_logits(batch, hidden)

    def _with_logits(self, batch: Batch, hidden: Tensor) -> Features:
        target = self.streamed.target
        hidden = hidden.to(target.device, target.dtype)
        with torch.no_grad():
            logits = target.unembed(hidden[:, :, int(self._last)]) if self.streamed.logits else None
        return Features(batch.tokens.to(target.device), hidden, batch.weights.to(target.device), logits)

    def _recalled(self, batch: Batch) -> Features:
        target, hidden_layers = self.streamed.target, len(self.streamed.hidden_layers)
        hidden = torch.zeros(*batch.tokens.shape, hidden_layers, target.hidden_size, dtype=torch.bfloat16)
        for place, number in enumerate(batch.rows):
            begin, end = int(self.rows.starts[number]), int(self.rows.starts[number + 1])
            row = torch.from_numpy(self._states[begin:end]).view(torch.bfloat16)
            hidden[place, : end - begin] = row.view(end - begin, hidden_layers, -1)
        return self._with_logits(batch, hidden)

    def _keep(self, batch: Batch, hidden: Tensor) -> None:
        states = hidden.cpu().view(torch.int16).flatten(2)                            # [B, S, T*H]
        for place, number in enumerate(batch.rows):
            if number < self.kept and not self._known[number]:
                begin, end = int(self.rows.starts[number]), int(self.rows.starts[number + 1])
                self._states[begin:end] = states[place, : end - begin].numpy()
                self._known[number] = True

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Some family may do to its logits what is not known here: then states alone do not say what the target thinks."""
        target = self.streamed.target
        tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
        found = target.features(tokens, torch.ones(1, 8, device=target.device), logits=True)
        assert found.logits is not None
        ours = target.unembed(found.hidden[:, :, 0]).float()
        if self._last is False or not torch.allclose(ours, found.logits.float(), rtol=0.02, atol=0.05):
            raise BadInput(f"{target.name} changes its logits in a way that a cache does not keep; leave out --cache-gb")


def _mapped(file: Path, dtype: type[np.generic], shape: tuple[int, ...], anew: bool) -> np.memmap[Any, Any]:
    """An array on disk."""
    return np.memmap(file, dtype, "w+" if anew else "r+", shape=shape)


def _same(file: Path, identity: dict[str, object]) -> bool:
    try:
        return bool(json.loads(file.read_text()) == identity)
    except (OSError, ValueError):
        return False
