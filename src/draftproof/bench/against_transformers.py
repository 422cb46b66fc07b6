"""transformers' own ``generate`` as a way to write, plain and assisted: stock forward, stock loop, the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from draftproof.bench.measure import Bare, Chunk, Clock, Reads, Task, Written
from draftproof.core.params import Sampling
from draftproof.model.loading import PreTrainedModel, stop_tokens


class Generate:
    """``model.generate``, with an assistant model if given. It is left as it is shipped; only lengths are ours."""

    def __init__(self, name: str, model: PreTrainedModel, assistant: PreTrainedModel | None = None) -> None:
        self.name, self.model, self.assistant = name, model, assistant
        self.most = 1 if assistant is not None else None            # assisted generation writes one text at a time
        self.ends = set(stop_tokens(model))
        self.weights = sum(_bytes(one) for one in (model, assistant) if one is not None)

    def write(self, task: Task, clock: Clock) -> list[Written]:
        """So many rows at a time; each lot waits for its longest."""
        lots = [task._replace(prompts=task.prompts[at : at + task.rows]) for at in range(0, len(task.prompts), task.rows)]
        return [text for lot in lots for text in self._lot(lot.prompts, lot.wanted, lot.new_tokens, clock)]

    def _lot(self, prompts: Sequence[list[int]], wanted: Sampling, new_tokens: int, clock: Clock) -> list[Written]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
        arrivals = _Arrivals(clock, len(prompts))
        torch.manual_seed(wanted.seed)
        out: Any = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=min(new_tokens, self._room(longest)),
            streamer=arrivals,
            pad_token_id=min(self.ends, default=0),
            **_law(wanted),
            **({"assistant_model": self.assistant} if self.assistant is not None else {}),
        )
        return [self._written(row[longest:].tolist(), arrivals.chunks) for row in out]

    def reads(self) -> Reads:
        return {}

    def spent(self) -> None:
        return None

    def bare(self, reads: Reads, task: Task) -> Bare | None:
        return None

    def _written(self, tokens: list[int], chunks: Sequence[Chunk]) -> Written:
        """Up to the first end token; what was padded behind it never came."""
        length = next((place + 1 for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        kept, left = [], length
        for chunk in chunks:
            if left > 0:
                kept.append(Chunk(chunk.at, min(chunk.tokens, left)))
                left -= chunk.tokens
        return Written(tokens[:length], kept, prefilled=self.assistant is None)

    def _room(self, longest: int) -> int:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) - longest if limit else 1 << 30


def _law(wanted: Sampling) -> dict[str, Any]:
    """The same law, in generate's words. Penalties and the like come to both from the model's generation_config."""
    if wanted.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {
        "do_sample": True,
        "temperature": wanted.temperature,
        "top_k": wanted.top_k,
        "top_p": wanted.top_p,
        "min_p": wanted.min_p or None,
    }


class _Arrivals(BaseStreamer):                                       # type: ignore[misc]
    """Notes when tokens come; the prompt comes first and does not count."""

    def __init__(self, clock: Clock, rows: int) -> None:
        self.clock, self.rows = clock, rows
        self.chunks: list[Chunk] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.chunks.append(Chunk(self.clock(), value.numel() // self.rows))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def _bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nelement() * parameter.element_size() for parameter in model.parameters())
