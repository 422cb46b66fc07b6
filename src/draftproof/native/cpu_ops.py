"""Operations on a CPU, by the C library where it has them for what is given; otherwise as torch does them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.noise import Role
from draftproof.core.ops import Ops, P, R
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, NOTHING, TokenTree, TreeShape
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.lookup import Counts, Index, Member, Pool, Table, Twins
from draftproof.native.structures import Pairs


class Declined:
    """What an implementation returns for arguments that it leaves to the torch function."""


DECLINED = Declined()


class CpuOps(Ops):
    """Each method below stands for the torch function of its name, with its arguments; it declines what it has no code for.

    library: None where there is no C library.
    """

    on_host = True

    def __init__(self) -> None:
        super().__init__()
        self.library = kernels()
        self._own: dict[str, Callable[..., Any]] = {"append_tokens": append_tokens}
        if self.library is not None:
            self._own |= {name: getattr(found, name) for found in (_Drafting(self.library), _Lookup(self.library)) for name in found.names}

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        own = self._own.get(function.__name__)
        if own is not None:
            found: R | Declined = own(*args, **kwargs)
            if not isinstance(found, Declined):
                return found
        return function(*args, **kwargs)

    def to_host(self, *columns: Tensor) -> list[list[list[Any]]]:
        return [column.tolist() for column in columns]


def append_tokens(text: Tensor, position: Tensor, tokens: Tensor, accepted: Accepted) -> Tensor:
    new = torch.empty_like(tokens)
    lines, said, page = new.numpy(), tokens.numpy(), text.numpy()
    columns = (position.tolist(), accepted.count.tolist(), accepted.root.tolist())
    for row, (start, count, root) in enumerate(zip(*columns, strict=True)):
        line = lines[row]
        line[: count - 1], line[count - 1 :] = said[row, 1:count], root
        page[row, start + 1 : start + 1 + count] = line[:count]
        page[row, start + count] = max(root, 0)
    return new


class _Drafting:
    """What drafting.c has: sampling, verifying, and trees of draft heads."""

    names = (
        "stream", "gumbel", "sample", "best_tokens", "top_tokens", "accept_by_matching", "likeliest",
        "heads_tree", "pairs_tree", "beam_search",
    )  # fmt: skip

    def __init__(self, library: Kernels) -> None:
        self.library = library

    def stream(self, keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None) -> Tensor:
        return self.library.streams(keys, int(role), position, origin)

    def gumbel(self, streams: Tensor, vocab: int) -> Tensor:
        return self.library.gumbel(streams, vocab)

    def sample(self, sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor | Declined:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return DECLINED
        noise = sampler.noise_at(paths, *logits.shape[1:])
        return self.library.pick(logits, *noise, sampler.temperatures, NOTHING)

    def best_tokens(self, sampler: Sampler, logits: Tensor, paths: Paths, count: int, sure: float) -> tuple[Tensor, Tensor] | Declined:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return DECLINED
        rows, nodes, vocab = logits.shape
        temperatures, scales = (_each(column, nodes) for column in (sampler.temperatures, sampler.scales(sure)))
        noise, places = sampler.noise_at(paths, nodes, vocab)
        confidence, tokens = self.library.best(logits.reshape(-1, vocab), noise, places, temperatures, scales, count)
        return confidence.view(rows, nodes, count), tokens.view(rows, nodes, count)

    def top_tokens(self, logits: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor] | Declined:
        return self.library.top(logits, count) if logits[0].dtype == torch.bfloat16 else DECLINED

    def accept_by_matching(self, tree: TokenTree, target_tokens: Tensor) -> Accepted:
        rows, nodes = target_tokens.shape
        if nodes == 1:
            return Accepted(*_root_alone(rows), root=target_tokens[:, 0], drafted=_none_drafted(rows))
        path, found = self.library.settle(tree.tokens, tree.parents, target_tokens, tree.depth_limit + 1, ABSENT)
        return Accepted(path, found[0], found[1], drafted=found[2:].T)

    def likeliest(self, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, depth_limit: int) -> TokenTree:
        return TokenTree.found(*self.library.lookup.grow(tokens, parents, confidence, nodes, Twins.APART, ABSENT), depth_limit)

    def heads_tree(
        self, medusa: Any, frontier: Any, root: Tensor, heads: int, nodes: int, shape: TreeShape | None
    ) -> TokenTree | Declined:
        sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, medusa.vocabulary.vocab_size, 0)
        if medusa.together is None or sampling is None:
            return DECLINED
        hidden, (children, births) = medusa.hidden[: len(root)], _births(shape, nodes)
        drafted = self.library.medusa(medusa.together, heads, hidden, root, nodes, children, sampling, ABSENT, births)
        return _drafted(drafted, shape, heads)

    def pairs_tree(
        self, pairs: Any, logits: Tensor, frontier: Any, root: Tensor, nodes: int, shape: TreeShape | None, weight: float
    ) -> TokenTree | Declined:
        sampling = frontier.sampler.draft_sampling(frontier.prefix, logits.shape[1], logits.shape[2], 0)
        if logits.dtype != torch.bfloat16 or sampling is None:
            return DECLINED
        children, births = _births(shape, nodes)
        drafted = self.library.paired(Pairs(*_places(pairs.parts)), weight, logits, root, nodes, children, sampling, ABSENT, births)
        return _drafted(drafted, shape, logits.shape[1])

    def beam_search(
        self, drafter: Any, frontier: Any, root: Tensor, length: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor] | Declined:
        sampling = frontier.sampler.draft_sampling(frontier.prefix, length, drafter.vocabulary.vocab_size, frontier.floor)
        if drafter.recurrence is None or sampling is None:
            return DECLINED
        found = self.library.search(drafter.recurrence, drafter.context[: len(root)], root[:, 0], width, length, sampling)
        tokens, parents, chances = found
        return torch.where(chances > -torch.inf, tokens, ABSENT), parents, chances.exp()


class _Lookup:
    """What lookup.c has: drafting from what was read before."""

    names = ("match_prompt", "learn_text", "continue_text", "recycle", "learn_pairs", "likely_successors", "judge", "merge_trees")

    def __init__(self, library: Kernels) -> None:
        self.library = library.lookup

    def match_prompt(self, prefix: Prefix, sizes: tuple[int, int, int, int], budget: int, trees: bool) -> TokenTree | Declined:
        if not trees:
            return DECLINED
        return TokenTree.found(*self.library.match(prefix.tokens, prefix.position, *sizes, budget, ABSENT), budget)

    def learn_text(self, index: Any, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor) -> None:
        self.library.index(Index(*_places(index.parts), *index.numbers), tail, end, tokens, count)

    def continue_text(self, index: Any, prefix: Prefix, rows: Any, own: float, paths: int, budget: int) -> TokenTree:
        lying = Index(*_places(index.parts), *index.numbers)
        return TokenTree.found(*self.library.go_on(lying, prefix.tokens, prefix.position, rows, own, paths, budget), budget)

    def recycle(self, table: Any, tail: Tensor, seen: Any) -> None:
        lying, tree = Table(*_places(table.parts), *table.numbers), seen.tree
        self.library.recycle(lying, tree.tokens, tree.parents, tail, seen.tokens, seen.logits)

    def learn_pairs(self, table: Any, before: Tensor, tokens: Tensor, successors: Tensor, odds: float) -> None:
        self.library.told(Table(*_places(table.parts), *table.numbers), before, tokens, successors, odds)

    def likely_successors(self, table: Any, prefix: Prefix, tail: Tensor, sizes: tuple[int, int, int], nodes: int) -> TokenTree:
        lying = Table(*_places(table.parts), *table.numbers)
        return TokenTree.found(*self.library.remember(lying, prefix.tokens, prefix.position, tail, *sizes, nodes), sizes[2])

    def judge(self, counts: Any, asked: Any, prefix: Prefix) -> None:
        told = Counts(*_places((counts.rows, counts.all)), *counts.numbers)
        self.library.judge(told, asked.said, asked.parents, asked.kinds, asked.position, prefix.tokens, prefix.position, ABSENT)

    def merge_trees(self, trees: Sequence[TokenTree], counts: Any, everyone: Tensor, nodes: int) -> tuple[Pool, TokenTree]:
        members = [Member(tree.tokens, tree.parents, tree.confidence) for tree in trees]
        told = Counts(*_places((counts.rows, counts.all)), *counts.numbers)
        pool, grown = self.library.merge(told, everyone, members, nodes, ABSENT)
        return pool, TokenTree.found(*grown, max(tree.depth_limit for tree in trees))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors lie, whose owner keeps them alive."""
    return [tensor.data_ptr() for tensor in tensors]


def _each(column: Tensor, nodes: int) -> Tensor:
    """[B, nodes] a number per row, as many times."""
    return column if nodes == 1 else column.expand(-1, nodes).contiguous()


def _births(shape: TreeShape | None, nodes: int) -> tuple[int, Tensor | None]:
    """How many children a node may have, and the shape as the library takes it."""
    return (nodes, None) if shape is None else (max(shape.ranks) + 1, shape.births_of_all)


def _drafted(drafted: tuple[Tensor, Tensor, Tensor], shape: TreeShape | None, deepest: int) -> TokenTree:
    tokens, _, confidence = drafted
    return TokenTree.found(*drafted, deepest) if shape is None else TokenTree.shaped(tokens, shape, confidence=confidence)


@lru_cache(maxsize=64)
def _root_alone(rows: int) -> tuple[Tensor, Tensor]:
    """[rows, 1] the nodes that are accepted where only the root was read, and [rows] how many they are. Nobody writes in these."""
    return torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)


@lru_cache(maxsize=64)
def _none_drafted(rows: int) -> Tensor:
    """[rows, 2] `Accepted.drafted` where only the root was read."""
    return torch.zeros(rows, 2, dtype=torch.int64)
