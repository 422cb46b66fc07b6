"""How bugs are planted: attributes of the running code patched while a context lasts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager as Context
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from draftproof.core import noise
from draftproof.core.acceptance import KeyedChance
from draftproof.core.noise import Role
from draftproof.core.prefix import Paths
from draftproof.core.processors import LogitsProcessors
from draftproof.core.sampling import Sampler, argmax_token
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.sequence import SequenceState

DRAFT, SAMPLER = "drafters.draft_model:DraftModel.", "core.sampling:Sampler."
CACHE, ROW = "model.kv_cache:KVCache.", "engine.sequence:SequenceState."


def around(where: str, change: Callable[..., Any]) -> Callable[[], Context[Any]]:
    """Plants ``change(own, *args)`` in the place of the function or method at "module:name"."""
    def plant() -> Context[Any]:
        owner, name, own = found(where)
        return patch.object(owner, name, lambda *args, **how: change(own, *args, **how))

    return plant


def found(where: str) -> tuple[Any, str, Any]:
    """Owner, name and present value of "module:name" or "module:Class.name"."""
    module, _, path = where.partition(":")
    owner, *names = importlib.import_module(f"draftproof.{module}"), *path.split(".")
    for name in names[:-1]:
        owner = getattr(owner, name)
    return owner, names[-1], inspect.getattr_static(owner, names[-1])


def streams(of_role: Role | None, /, **change: Any) -> Callable[[], Context[Any]]:
    """Random streams of this role (None: all) with another role, position, origin or keys."""
    def changed(own: Any, keys: Tensor, of: Role, place: Tensor, origin: Any = None) -> Any:
        if of_role is None or of == of_role:
            keys = change.get("keys", lambda keys: keys)(keys)
            of, place, origin = (
                change.get("role", of), change.get("position", lambda p, o: p)(place, origin),
                None if "origin" in change else origin,
            )  # fmt: skip
        return own(keys, of, place, origin)

    return around("core.noise:stream", changed)


def keys(seed: Callable[[int], int], sample: Callable[[int], int] = lambda sample: sample) -> Any:
    def changed(own: Any, seeds: list[int], samples: list[int], *rest: Any) -> Tensor:
        return own([seed(one) for one in seeds], [sample(one) for one in samples], *rest)

    return around("core.noise:row_keys", changed)


def drafts(change: Callable[[TokenTree], TokenTree]) -> Any:
    """A draft model whose drawn proposals are changed."""
    def proposed(own: Any, self: DraftModel, frontier: Any) -> TokenTree:
        tree = own(self, frontier)
        return change(tree) if tree.draft_probs is not None else tree

    return around(DRAFT + "propose", proposed)


def softer(tree: TokenTree) -> TokenTree:
    law = tree.draft_probs.sqrt()
    return replace(tree, draft_probs=law / law.sum(-1, keepdim=True).clamp(min=1e-30))


def likeliest(tree: TokenTree) -> TokenTree:
    best = tree.draft_probs[:, 1:].argmax(-1)
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], best], 1))


def likely_only(tree: TokenTree) -> TokenTree:
    chance = tree.draft_probs.gather(-1, tree.tokens.clamp(min=0)[..., None])[..., 0]
    keep = (chance > 0.3)[:, 1:].cummin(1).values
    tokens = torch.where(keep, tree.tokens[:, 1:], ABSENT)
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], tokens], 1))


def rows(change: Callable[[Any, Any], Any]) -> Any:
    """Logits processors told of other requests: ``change(row, first row)`` in a row's place."""
    def init(own: Any, self: LogitsProcessors, given: Sequence[Any], *rest: Any) -> None:
        own(self, [change(row, given[0]) for row in given], *rest)

    return around("core.processors:LogitsProcessors.__init__", init)


def ask(row: Any, **wants: Any) -> Any:
    return replace(row, sampling=replace(row.sampling, **wants))


def longer_minimum(row: Any, first: Any) -> Any:
    return ask(row, min_new_tokens=row.sampling.min_new_tokens + 1)


def filtered(change: Callable[..., Tensor]) -> Any:
    """Other logits after the processors: ``change(own, self, logits, paths)``."""
    return around("core.processors:LogitsProcessors.filtered", change)


def _without(self: LogitsProcessors, **wants: Any) -> LogitsProcessors:
    return LogitsProcessors([ask(row, **wants) for row in self.rows], self.device)


def unpenalised(own: Any, self: Any, logits: Tensor, paths: Paths) -> Tensor:
    bare = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return own(self if logits.shape[1] == 1 else _without(self, **bare), logits, paths)


def heated_last(own: Any, self: Any, logits: Tensor, paths: Paths) -> Tensor:
    heat = torch.tensor([row.sampling.temperature or 1.0 for row in self.rows])[:, None, None]
    greedy = torch.tensor([row.sampling.temperature == 0 for row in self.rows])[:, None, None]
    cold = _without(self, temperature=1.0)
    return torch.where(greedy, own(self, logits, paths), own(cold, logits, paths) / heat)


def last_escapes(own: Any, self: Any, logits: Tensor, paths: Paths) -> Tensor:
    scores = own(self, logits, paths)
    if logits.shape[1] > 1:
        bare = own(_without(self, processors=()), logits, paths)
        scores = torch.cat([scores[:, :-1], bare[:, -1:]], 1)
    return scores


def _with_siblings(own: Any) -> property:
    def sequences(self: Paths) -> Tensor:
        tree = self.tree
        seen = torch.ones_like(tree.ancestors).tril()
        names = ("tokens", "depths", "depth_limit", "is_chain")
        tree = SimpleNamespace(**{name: getattr(tree, name) for name in names}, ancestors=seen)
        return own.func(SimpleNamespace(prefix=self.prefix, tree=tree, first=self.first))

    return property(sequences)


def committed_only() -> Context[Any]:
    def lengths(self: Paths) -> Tensor:
        return self.prefix.position[:, None] + 1 + 0 * self.tree.depths[:, self.first :]

    return patch.object(Paths, "lengths", property(lengths))


def siblings_seen() -> Context[Any]:
    return patch.object(Paths, "sequences", _with_siblings(found("core.prefix:Paths.sequences")[2]))


def by_slot(own: Any, self: Sampler, logits: Tensor, paths: Paths) -> Tensor:
    return own(self, logits, Paths(paths.prefix, TokenTree.chain(paths.tree.tokens), paths.first))


def smallest(self: KeyedChance, weights: Tensor, depth: Tensor) -> Tensor:
    place = noise.stream(self.keys, Role.RECOVER, self.position + depth[:, None] + 1, self.position)
    return argmax_token(weights.log() - noise.gumbel(place, weights.shape[-1])[:, 0])


def falls_at_zero(own: Any, self: KeyedChance, probability: Tensor, node: int) -> Tensor:
    return own(self, torch.nextafter(probability, torch.ones_like(probability)), node)


def as_the_luckiest(own: Any, self: Any, nodes: Any, count: Tensor) -> Any:
    return own(self, nodes, count.amax().expand_as(count).contiguous())


def by_place(own: Any, self: TokenTree, lengths: Tensor, limit: int) -> Tensor:
    return own(TokenTree.chain(self.tokens), lengths, limit)


def unmoved(own: Any, self: Any, order: Sequence[int]) -> Any:
    return own(self, range(len(order)))


def reordered(own: Any, self: Any, order: Sequence[int], *rest: Any) -> Any:
    """Rows rearranged wrongly when one retires."""
    order = list(order)
    return own(self, order[::-1] if len(order) > 1 and order != sorted(order) else order, *rest)


def with_rest(own: Any, self: SequenceState, tokens: Sequence[int], *rest: Any, **how: Any) -> int:
    taken = own(self, tokens, *rest, **how)
    if self.finish_reason is not None:
        self.tokens += list(tokens[taken:])
    return int(taken)


def one_more(own: Any, self: SequenceState, *args: Any, **how: Any) -> int:
    self.limit += 1
    try:
        return int(own(self, *args, **how))
    finally:
        self.limit -= 1


def stop_kept(own: Any, self: SequenceState, piece: str, drafted: bool) -> None:
    before = self.text + "".join(text for text, _ in self._held)
    own(self, piece, drafted)
    if self.finish_reason == "stop" and self.params.sampling.stop:
        self.text = before + piece


def last_piece(own: Any, self: SequenceState, piece: str, drafted: bool) -> None:
    own(self, piece, drafted)
    if self.finish_reason is None:
        self._release(sum(len(text) for text, _ in self._held))


def forgetful(own: Any, self: DraftModel, commit: Any) -> None:
    if commit.tokens.shape[1] > 1 or self.scratch is not None:      # plain rounds are ignored
        own(self, commit)


def everything(own: Any, self: DraftModel, commit: Any) -> None:
    own(self, replace(commit, count=torch.full_like(commit.count, commit.tokens.shape[1])))


def all_but_last(own: Any, self: DraftModel, prefix: Any, *rest: Any) -> Any:
    lengths = self._cache(len(prefix.position)).lengths.clone()
    return own(self, replace(prefix, position=lengths), *rest)


def logprobs_elsewhere() -> Context[Any]:
    """Log-probabilities taken at the root, wherever the token stands in the draft."""
    def changed(own: Any, logits: Tensor, nodes: Tensor, *rest: Any) -> Tensor:
        return own(logits, torch.zeros_like(nodes), *rest)

    return around("engine.row_output:logprobs", changed)()


def mask(change: Callable[..., Tensor]) -> Any:
    return around("model.target:tree_mask", change)


def blind_to_last(own: Any, tree: Any, lengths: Tensor, span: int, *rest: Any) -> Tensor:
    made = own(tree, lengths, span, *rest)
    last = torch.arange(span) == lengths[:, None, None, None] - 1
    return made.masked_fill(last & (lengths[:, None, None, None] > 1), torch.finfo(made.dtype).min)


def sees_siblings(own: Any, tree: TokenTree, *rest: Any) -> Tensor:
    return own(TokenTree.chain(tree.tokens), *rest)


def counted(
    own: Any, self: Any, width: int, drafted: int, reach: int, accepted: int, *rest: Any
) -> None:
    own(self, width, drafted, reach, accepted, accepted + 1, *rest[1:])


def only_first(own: Any, self: Any, keys: Tensor, role: Role, place: Tensor, *rest: Any) -> Tensor:
    """A kernel whose noise repeats: every position gets the first one's."""
    return own(self, keys, role, place[:, :1].expand_as(place), *rest)


def nothing(*args: Any, **how: Any) -> None:
    """Does not do it."""


def text_left(own: Any, self: Any, order: Sequence[int], *rest: Any) -> Any:
    """Rows of the text stay where they are when a row retires."""
    before = self.text.clone()
    done = own(self, order, *rest)
    self.text.copy_(before)
    return done
