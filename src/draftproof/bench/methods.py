"""The methods that are measured: our engines, and transformers' ``generate``, plain or assisted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from draftproof.bench.inflate import load_inflated
from draftproof.bench.measure import PLAIN, Clock, Method, Output, Prompts
from draftproof.core.params import Sampling
from draftproof.engine.config import TRAINING_FREE
from draftproof.engine.engine import Engine
from draftproof.engine.load import HEADS, load
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput
from draftproof.model.loading import PreTrainedModel, load_model, stop_tokens
from draftproof.model.packed_linear import pack_linears


class OurEngine:
    """An engine as a user calls it; a single prompt is streamed, to see its first token come."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    def write(self, prompts: Prompts, sampling: Sampling, batch: int, clock: Clock) -> Output:
        first, total = None, RoundStats()
        if len(prompts) == 1:
            chunks = self.engine.stream(prompts[0], sampling=sampling)
            arrived = [(clock(), chunk.completion) for chunk in chunks]
            first, done = arrived[0][0], [one for _, one in arrived if one is not None]
        else:
            done = self.engine.generate(prompts, sampling=sampling, batch_size=batch)
        for completion in done:
            total.add(completion.checked().stats)
        return Output([completion.tokens for completion in done], first, total)


class Transformers:
    """``model.generate`` as it is shipped; with an assistant model it runs one row at a time."""

    def __init__(self, name: str, model: PreTrainedModel, assistant: PreTrainedModel | None = None):
        self.name, self.model, self.assistant = name, model, assistant
        self.stop_tokens = set(stop_tokens(model))

    def write(self, prompts: Prompts, sampling: Sampling, batch: int, clock: Clock) -> Output:
        """`batch` rows at a time, each batch waiting for its longest row."""
        first, tokens, device = _FirstToken(clock), list[list[int]](), self.model.device
        rows = batch if self.assistant is None else 1
        torch.manual_seed(sampling.seed)
        for start in range(0, len(prompts), rows):
            some = prompts[start : start + rows]
            longest = max(map(len, some))
            ids = [[0] * (longest - len(prompt)) + prompt for prompt in some]
            mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some]
            out: Any = self.model.generate(
                torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device),
                assistant_model=self.assistant, pad_token_id=min(self.stop_tokens, default=0),
                streamer=first, **_arguments(sampling))
            for row in (row[longest:].tolist() for row in out):         # padding is behind the stop
                ends = (i + 1 for i, token in enumerate(row) if token in self.stop_tokens)
                tokens.append(row[: next(ends, len(row))])
        return Output(tokens, first.at)


class _FirstToken(BaseStreamer):                                       # type: ignore[misc]
    """Notes when the first new token comes; generate puts the prompt before it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls, self.at = clock, 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        self.at = self.clock() if self.calls == 2 else self.at

    def end(self) -> None:
        """Nothing is held back."""


def _arguments(sampling: Sampling) -> dict[str, Any]:
    """The same distribution for generate; penalties come from the model's generation_config."""
    hot, names = sampling.temperature > 0, ("temperature", "top_k", "top_p", "min_p")
    values = {name: (getattr(sampling, name) or None) if hot else None for name in names}
    return {"do_sample": hot, "max_new_tokens": sampling.max_new_tokens, **values}


def load_methods(
    model: str, drafters: Sequence[str], assistants: Sequence[str], inflate: str | None = None,
    against_transformers: bool = False, **options: Any,
) -> tuple[Engine, list[Method]]:
    """Plain decoding, each drafter and draft model around the same target, transformers' generate.

    options: of `load`. Returns the plain engine, too. Raises BadInput for names that do not fit.
    """
    names = [*drafters, *assistants]
    if len(set(names)) < len(names):
        raise BadInput(f"{max(names, key=names.count)} was given twice; once is enough")
    light = [name for name in drafters if set(name.split("+")) <= {*TRAINING_FREE, *HEADS}]
    if options.get("quantize_draft") is not None and light == names:
        raise BadInput("--quantize-draft is for draft models, and none was named; leave it out")
    where: dict[str, Any] = {name: options.get(name) for name in ("dtype", "device")}
    own = where | {name: options.get(name) for name in ("quantize", "kv_cache")}
    source: Any = load_inflated(model, inflate, **where) if inflate is not None else model
    if inflate is not None and own["quantize"] is None:
        pack_linears(source)
    plain = load(source, drafter="none", **own)
    methods: list[Method] = [OurEngine(PLAIN, plain)]
    for name in names:
        asked = options | {"assistant_model" if name in assistants else "drafter": name}
        asked |= {"quantize_draft": None} if name in light else {}
        if name.startswith("self-") and own["quantize"] is not None:    # drafts by the original
            source = load_inflated(model, inflate, **where)
        else:
            source, asked["quantize"] = plain.target.model, None
        engine = load(source, tokenizer=plain.codec and plain.codec.tokenizer, **asked)
        methods.append(OurEngine(name, engine))
    if against_transformers:
        stock = load_inflated(model, inflate, **where)
        methods.append(Transformers("transformers", stock))
        methods += [Transformers(f"transformers, {name}", stock, load_model(name, **where))
                    for name in assistants]
    return plain, methods
