"""Texts of a target, with the outputs of the target and of draft models from one pass each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import over_vocabulary
from draftproof.drafters.draft_model import CONFIDENCE_SCALE
from draftproof.engine.engine import Engine
from draftproof.model.target import Target

CHUNK, TOP = 64, 8
"""Tokens of a text read at once; likely tokens kept per position."""


class Text(NamedTuple):
    """A text of the target: its tokens, length of the prompt, and sampling; and the target's
    outputs at each position: hidden [S, T, H] or None, and the most likely tokens [S, k] with their
    logits."""

    tokens: list[int]
    prompt: int
    sampling: Sampling
    hidden: Tensor | None = None
    likeliest: tuple[Tensor, Tensor] | None = None


class Drafts(NamedTuple):
    """A draft model's outputs for a text: its choice after each position [S], with the
    log-probability [S] of that choice."""

    tokens: list[int]
    confidence: list[float]


@torch.inference_mode()
def _read(
    engine: Engine, text: Text, model: Target, hidden_layers: tuple[int, ...] = ()
) -> Iterator[tuple[Tensor, Tensor | None, Paths]]:
    """Read a text with `model` in chunks: logits, hidden states, and the chain of each chunk."""
    tokens = torch.tensor([text.tokens], device=model.device)
    cache = model.new_cache(1, len(text.tokens) + CHUNK)
    for start in range(0, tokens.shape[1], CHUNK):
        cache.set_max_length(start)
        chain = TokenTree.chain(tokens[:, start : start + CHUNK])
        reading = model.read(chain, cache, hidden_layers=hidden_layers)
        logits = over_vocabulary(reading.logits, engine.target.vocab_size)
        prefix = Prefix(tokens, torch.tensor([start], device=model.device))
        yield logits, reading.hidden, Paths(prefix, chain)
        cache.keep(None, torch.tensor([chain.tokens.shape[1]], device=model.device))


def recorded(engine: Engine, text: Text, hidden_layers: tuple[int, ...]) -> Text:
    """The text with the target's outputs at each position, for drafters that need them."""
    states, best = list[Tensor](), []
    for logits, hidden, _ in _read(engine, text, engine.target, hidden_layers):
        states += [hidden[0]] if hidden is not None else []
        best.append(logits[0].topk(min(TOP, logits.shape[-1]), -1))
    likeliest = torch.cat([top.indices for top in best]), torch.cat([top.values for top in best])
    return text._replace(hidden=torch.cat(states) if states else None, likeliest=likeliest)


def drafts_of(engine: Engine, text: Text, model: Target) -> Drafts:
    """A draft model's drafts within a text, for any start, as long as they are right."""
    limit = max(1, len(text.tokens) - text.prompt)
    params = engine.requests.params(text.sampling, text.tokens[: text.prompt], limit)
    sampler, drafts = Sampler([params], model.device), Drafts([], [])
    for logits, _, paths in _read(engine, text, model):
        confidence, tokens = sampler.best(logits, paths, 1, CONFIDENCE_SCALE)
        drafts.tokens.extend(tokens[0, :, 0].tolist())
        drafts.confidence.extend(confidence[0, :, 0].tolist())
    return drafts
