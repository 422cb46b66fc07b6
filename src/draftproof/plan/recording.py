"""Texts of a target, and what it and draft models say of them, by one pass each."""

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
from draftproof.training.draft_trees import RANKS

CHUNK, TOP = 64, 8
"""Tokens of a text read at once; likely tokens kept per position."""


class Text(NamedTuple):
    """A text of the target: tokens, how many are the prompt, how it was sampled; and what the
    target knew at each position: hidden [S, T, H] or None, the likeliest `tokens` [S, k] with their
    logits and chances, and the entropy [S] of its choice in nats."""

    tokens: list[int]
    prompt: int
    sampling: Sampling
    hidden: Tensor | None = None
    likeliest: tuple[Tensor, Tensor, Tensor] | None = None
    entropy: Tensor | None = None


class Drafts(NamedTuple):
    """What a draft model says of a text: its choice behind each position [S], the log-probability
    it gives that [S], and which of its choices the text's next token is [S]."""

    tokens: list[int]
    confidence: list[float]
    ranks: Tensor


class _Read(NamedTuple):
    start: int
    logits: Tensor
    hidden: Tensor | None
    sampler: Sampler
    paths: Paths


@torch.inference_mode()
def _read(
    engine: Engine, text: Text, model: Target, hidden_layers: tuple[int, ...] = ()
) -> Iterator[_Read]:
    """A text as `model` reads it, by chunk, with the sampler that wrote it."""
    limit = max(1, len(text.tokens) - text.prompt)
    params = engine.requests.params(text.sampling, text.tokens[: text.prompt], limit)
    tokens = torch.tensor([text.tokens], device=model.device)
    cache, sampler = model.new_cache(1, len(text.tokens) + CHUNK), Sampler([params], model.device)
    for start in range(0, tokens.shape[1], CHUNK):
        cache.bound(start)
        chain = TokenTree.chain(tokens[:, start : start + CHUNK])
        reading = model.read(chain, cache, hidden_layers=hidden_layers)
        logits = over_vocabulary(reading.logits, engine.target.vocab_size)
        prefix = Prefix(tokens, torch.tensor([start], device=model.device))
        yield _Read(start, logits, reading.hidden, sampler, Paths(prefix, chain))
        cache.keep(None, torch.tensor([chain.tokens.shape[1]], device=model.device))


def recorded(engine: Engine, text: Text, hidden_layers: tuple[int, ...]) -> Text:
    """With what the target knows at each position, for drafters that want it."""
    hidden, best, chances, entropies = list[Tensor](), [], [], []
    for read in _read(engine, text, engine.target, hidden_layers):
        hidden += [read.hidden[0]] if read.hidden is not None else []
        best.append(read.logits[0].topk(min(TOP, read.logits.shape[-1]), -1))
        probs = read.sampler.filtered(read.logits, read.paths)[0].float().softmax(-1)
        chances.append(probs.topk(best[-1].values.shape[-1], -1).values)
        entropies.append(torch.special.entr(probs).sum(-1))
    likeliest = ([one.indices for one in best], [one.values for one in best], chances)
    tokens, logits, shares = (torch.cat(some) for some in likeliest)
    return text._replace(hidden=torch.cat(hidden) if hidden else None,
                         likeliest=(tokens, logits, shares), entropy=torch.cat(entropies))


def drafts_of(engine: Engine, text: Text, model: Target) -> Drafts:
    """What a draft model would draft of a text: wherever a draft begins, as long as it is right."""
    tokens, confidence, ranks = list[Tensor](), list[Tensor](), list[Tensor]()
    following = torch.tensor([*text.tokens[1:], 0], device=model.device)
    for start, logits, _, sampler, paths in _read(engine, text, model):
        count = min(RANKS, logits.shape[-1])
        chances, children = sampler.best(logits, paths, count, CONFIDENCE_SCALE)
        hit = children[0] == following[start : start + CHUNK, None]
        tokens.append(children[0, :, 0])
        confidence.append(chances[0, :, 0])
        ranks.append(torch.where(hit.any(-1), hit.int().argmax(-1), RANKS))
    chosen, sure, came = (torch.cat(some).cpu() for some in (tokens, confidence, ranks))
    return Drafts(chosen.tolist(), sure.tolist(), came)
