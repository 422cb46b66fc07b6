"""What the frozen target makes of a batch: read anew each time, or kept on disk between epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.training.files import whole
from draftproof.training.rows import Batch


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
        layers, logits = self.hidden_layers, self.logits
        return self.target.features(tokens, weights, hidden_layers=layers, logits=logits)


class Cached:
    """As `Streamed`, but hidden states are kept in bfloat16 on disk, a file per row, up to a size.

    They are rounded to bfloat16 when they are read first, too, so that keeping them changes
    nothing. folder: one for each target, hidden layers and rows.
    """

    def __init__(self, streamed: Streamed, folder: Path, gigabytes: float) -> None:
        self.streamed, self.folder = streamed, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._free = int(gigabytes * 1e9) - sum(file.stat().st_size for file in folder.iterdir())
        if streamed.logits:
            self._check_logits()

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        target, files = self.streamed.target, [self.folder / f"{row}.pt" for row in batch.rows]
        if all(file.exists() for file in files):
            hidden = torch.nn.utils.rnn.pad_sequence([torch.load(file) for file in files], True)
            hidden = F.pad(hidden, (0, 0, 0, 0, 0, batch.tokens.shape[1] - hidden.shape[1]))
        else:
            hidden = self.streamed(batch).hidden.bfloat16()
            for states, size, file in zip(hidden.cpu(), batch.sizes, files, strict=True):
                self._keep(states[:size].clone(), file)
        hidden = hidden.to(target.device, target.dtype)
        logits = self._logits(hidden) if self.streamed.logits else None
        tokens, weights = batch.tokens.to(target.device), batch.weights.to(target.device)
        return Features(tokens, hidden, weights, logits)

    def _keep(self, states: Tensor, file: Path) -> None:
        size = states.numel() * 2 + 2048                                 # with the file's header
        if self._free >= size and not file.exists():
            self._free -= size
            with whole(file) as part:
                torch.save(states, part)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.streamed.target.unembed(hidden[:, :, self.streamed.hidden_layers.index(-1)])

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Refuse a family whose logits do not follow from the last hidden states by `unembed`."""
        target = self.streamed.target
        tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
        found = target.features(tokens, torch.ones_like(tokens, dtype=torch.float32), logits=True)
        assert found.logits is not None
        ours, theirs = target.unembed(found.hidden[:, :, 0]).float(), found.logits.float()
        same = torch.allclose(ours, theirs, rtol=0.02, atol=0.05)
        if not same or -1 not in self.streamed.hidden_layers:
            why = f"the logits of {target.name} do not follow from its hidden states"
            raise BadInput(f"{why}, which is what a cache keeps; leave out --cache-gb")
