"""Operations on a CPU: by the C library where it has them for what is given, otherwise as torch does them.

Each public function of `CpuOps` stands for the torch function of its name and has its arguments; what is said there of
results holds here. Tensors lie in the memory of a CPU; those that are written to are contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops, P, R
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.structures import LANES, Counts, Grown, Heads, Index, Linear, Member, Pairs, Recurrence, Table, Texts  # fmt: skip


class Declined:
    """What an implementation returns for arguments that it leaves to the torch function."""


DECLINED = Declined()


class Same(IntEnum):
    """Nodes of a pool that have the same text: there are none, the likeliest counts, or their chances add up."""

    NONE = 0
    LIKELIEST = 1
    SUMMED = 2


class Pool(NamedTuple):
    """Members' trees side by side, [rows, M]: tokens, parents (-1 at each root), and the kinds of nodes."""

    texts: Tensor
    parents: Tensor
    kinds: Tensor


class CpuOps(Ops):
    """Runs C in the place of torch functions that it has by name. library: None where there is none."""

    on_host = True

    def __init__(self, library: Kernels | None = None) -> None:
        super().__init__()
        self.library = kernels() if library is None else library
        own = {"append_tokens": append_tokens}
        if self.library is not None:
            functions = _Functions(self.library)
            own |= {name: getattr(functions, name) for name in vars(_Functions) if not name.startswith("_")}
        self._own: dict[str, Callable[..., Any]] = own

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        own = self._own.get(function.__name__)
        if own is not None:
            found: R | Declined = own(*args, **kwargs)
            if not isinstance(found, Declined):
                return found
        return function(*args, **kwargs)

    def to_host(self, *columns: Tensor) -> list[list[list[Any]]]:
        return list(map(Tensor.tolist, columns))                            # no frame of Python for each


def append_tokens(text: Tensor, position: Tensor, tokens: Tensor, accepted: Accepted) -> Tensor:
    """As in core/messages.py, by numbers on the host."""
    new = torch.empty_like(tokens)
    lines, said, page = new.numpy(), tokens.numpy(), text.numpy()
    columns = (position.tolist(), accepted.count.tolist(), accepted.root.tolist())
    for row, (start, count, root) in enumerate(zip(*columns, strict=True)):
        line = lines[row]
        line[: count - 1], line[count - 1 :] = said[row, 1:count], root
        page[row, start + 1 : start + 1 + count] = line[:count]
        page[row, start + count] = max(root, 0)
    return new


class _Functions:
    """The functions that the library has, each with the arguments of its namesake in torch."""

    def __init__(self, library: Kernels) -> None:
        self._library = library

    # Sampling and verifying: drafting.c, noise.c ---------------------------------------------------

    def stream(self, keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None) -> Tensor:
        keys, position = keys.contiguous(), position.contiguous()
        origin = None if origin is None else origin.contiguous()
        out = torch.empty(*position.shape, 2, dtype=torch.int32)
        where = _places(position, origin, out)
        self._library.streams(keys.data_ptr(), int(role), *where, *position.shape)
        return out

    def gumbel(self, streams: Tensor, vocab: int) -> Tensor:
        streams = streams.contiguous()
        noise, rows = torch.empty(*streams.shape[:-1], vocab), streams.numel() // 2
        self._library.gumbel(*_places(streams, noise), rows, vocab, torch.get_num_threads())
        return noise

    def sample(self, sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor | Declined:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return DECLINED
        (rows, nodes, vocab), logits = logits.shape, logits.contiguous()
        _must_hold(rows == len(sampler.rows) and paths.first + nodes <= paths.tree.depths.shape[1])
        noise, places = sampler.noise_at(paths, nodes, vocab)
        tokens = torch.empty(rows, nodes, dtype=torch.int64)
        given = _places(logits, noise, places, sampler.temperatures)
        sizes = (nodes, rows * nodes, vocab, NO_TOKEN)
        self._library.pick(*given, *sizes, tokens.data_ptr(), torch.get_num_threads())
        return tokens

    def best_tokens(
        self, sampler: Sampler, logits: Tensor, paths: Paths, count: int, sure: float
    ) -> tuple[Tensor, Tensor] | Declined:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return DECLINED
        (rows, nodes, vocab), logits = logits.shape, logits.contiguous()
        _must_hold(rows == len(sampler.rows) and paths.first + nodes <= paths.tree.depths.shape[1] and 0 < count <= vocab)
        noise, places = sampler.noise_at(paths, nodes, vocab)
        columns = [column.expand(-1, nodes).contiguous() for column in (sampler.temperatures, sampler.scales(sure))]
        scores, tokens = torch.empty(rows, nodes, count), torch.empty(rows, nodes, count, dtype=torch.int64)
        given, out = _places(logits, noise, places, *columns), _places(scores, tokens)
        self._library.best(*given, rows * nodes, vocab, count, *out, torch.get_num_threads())
        return scores, tokens

    def top_tokens(self, logits: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor] | Declined:
        """Of equals the earlier, and never NaN; where less than `count` are left, token 0 at -inf stands for them."""
        if logits[0].dtype != torch.bfloat16:
            return DECLINED
        lying = [part.contiguous() for part in logits]
        (rows, nodes, vocab), parts = lying[0].shape, len(lying)
        tokens = torch.empty(rows, parts * nodes, count, dtype=torch.int64)
        best, places = torch.empty(tokens.shape), (ctypes.c_void_p * parts)(*_places(*lying))
        self._library.top(places, parts, rows, nodes, vocab, count, *_places(tokens, best), torch.get_num_threads())
        return tokens, best

    def accept_by_matching(self, tree: TokenTree, target_tokens: Tensor) -> Accepted:
        rows, nodes = target_tokens.shape
        _must_hold(tree.tokens.shape == target_tokens.shape)
        if nodes == 1:
            return Accepted(*_root_alone(rows), root=target_tokens[:, 0], drafted=_none_drafted(rows))
        tokens, parents, deep = tree.tokens.contiguous(), tree.parents.contiguous(), tree.depth_limit + 1
        path, found = torch.empty(rows, deep, dtype=torch.int64), torch.empty(4, rows, dtype=torch.int64)
        given = _places(tokens, parents, target_tokens)
        self._library.settle(*given, rows, nodes, deep, ABSENT, *_places(path, found))
        return Accepted(path, found[0], found[1], drafted=found[2:].T)

    def well_formed(self, tree: TokenTree, vocab: int) -> bool:
        (rows, nodes), parts = tree.tokens.shape, (tree.tokens.contiguous(), tree.parents.contiguous())
        return bool(self._library.well_formed(*_places(*parts), rows, nodes, tree.depth_limit, vocab, ABSENT))

    # Trees of draft heads: drafting.c --------------------------------------------------------------

    def prepare_heads(
        self, blocks: Sequence[Any], layers: int, head: Linear | None, bigrams: Any, weight: float
    ) -> PreparedHeads | None:
        """None where some blocks are not packed."""
        linears = [block.native for block in blocks if getattr(block, "native", None) is not None]
        if len(linears) < len(blocks) or blocks[0].in_features % LANES:
            return None
        array, table = (Linear * len(linears))(*linears), Pairs(*_places(*bigrams[:4]))
        whole = Heads(ctypes.addressof(array), head, table, layers, weight) if head is not None else None
        return PreparedHeads(array, layers, head, whole)

    def heads_logits(self, medusa: Any, hidden: Tensor, heads: int) -> Tensor | Declined:
        prepared = medusa.prepared
        if prepared is None or prepared.head is None:
            return DECLINED
        states = self._library.residual_blocks(prepared.blocks, heads, prepared.layers, hidden)
        return self._library.multiply(prepared.head, states)

    def medusa_tree(
        self, medusa: Any, frontier: Frontier, heads: int, nodes: int, shape: TreeShape | None
    ) -> TokenTree | Declined:
        vocab, prepared, root = medusa.vocabulary.vocab_size, medusa.prepared, frontier.prefix.root
        sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, vocab, 0)
        if sampling is None or prepared is None or prepared.whole is None or prepared.head.outputs != vocab:
            return DECLINED
        rows, size = len(root), medusa.hidden.shape[1]
        _must_hold(rows <= len(medusa.hidden))
        out, (children, child_ranks) = _Tree(rows, nodes + 1), _child_ranks(shape, nodes)
        states = medusa.hidden.new_empty(rows * heads * (2 * size + vocab))
        work = torch.empty(rows * heads * (vocab + LANES))
        given = (ctypes.addressof(prepared.whole), *_places(medusa.hidden, child_ranks, root))
        spare = (*out.places, *_places(states, work), torch.get_num_threads())
        self._library.medusa(*given, rows, heads, nodes, children, *_places(*sampling[:4]), ABSENT, *spare)
        return out.tree(shape, heads)

    def bigram_tree(
        self, table: Any, logits: Tensor, frontier: Frontier, nodes: int, shape: TreeShape | None, weight: float
    ) -> TokenTree | Declined:
        (rows, heads, vocab), logits = logits.shape, logits.contiguous()
        sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, vocab, 0)
        if logits.dtype != torch.bfloat16 or sampling is None:
            return DECLINED
        out, (children, child_ranks), root = _Tree(rows, nodes + 1), _child_ranks(shape, nodes), frontier.prefix.root
        pairs, work = Pairs(*_places(*table[:4])), torch.empty(rows * heads * (vocab + LANES))
        given = (ctypes.addressof(pairs), weight, *_places(child_ranks, logits, root))
        spare = (*out.places, work.data_ptr(), torch.get_num_threads())
        self._library.paired(*given, rows, heads, vocab, nodes, children, *_places(*sampling[:4]), ABSENT, *spare)
        return out.tree(shape, heads)

    def prepare_recurrence(self, head: Any, tables: Any) -> PreparedHeads | None:
        """None where the target's tables or some layers are not packed."""
        form = head.config
        if tables is None or form.hidden_size % LANES or form.exit_dim % LANES:
            return None
        recurs = [head.rnn_w, head.rnn_u] if form.rnn else []
        narrow = [head.input_proj] if form.exit_dim != 2 * form.hidden_size else []
        layers = [*recurs, *narrow, *(block.linear for block in head.lm_head[:-1])]
        linears = [layer.native for layer in layers if getattr(layer, "native", None) is not None]
        last = tables.head if form.share_lm_head else getattr(head.lm_head[-1], "native", None)
        if len(linears) < len(layers) or last is None or last.outputs != len(tables.embeddings):
            return None
        first, blocks = linears[: len(layers) - form.num_layers], linears[len(layers) - form.num_layers :]
        first = [*([] if recurs else [Linear(), Linear()]), *first, *([] if narrow else [Linear()]), last]
        array = (Linear * len(blocks))(*blocks)
        sizes = (tables.embeddings.data_ptr(), form.hidden_size, len(blocks))
        flags = (form.rnn, form.rnn_activation == "silu", not form.skip_u_at_first_step)
        whole = Recurrence(*first, ctypes.addressof(array), *sizes, *flags)
        return PreparedHeads(array, len(blocks), last, whole)

    def beam_search(
        self, drafter: Any, frontier: Frontier, root: Tensor, length: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor] | Declined:
        prepared, vocab = drafter.prepared, drafter.vocabulary.vocab_size
        sampling = frontier.sampler.draft_sampling(frontier.prefix, length, vocab, frontier.floor)
        if prepared is None or sampling is None:
            return DECLINED
        head, rows, nodes = prepared.whole, len(root), 1 + width + max(length - 1, 0) * width * width
        out, context = _Tree(rows, nodes), drafter.hidden[:rows].contiguous()
        _must_hold(len(context) == rows)
        each = 8 * head.hidden + 2 * head.projection.size + head.projection.outputs
        work = context.new_empty(rows * width * each)
        given = (ctypes.addressof(head), *_places(context, root), rows, width, length)
        spare = (*out.places, nodes, work.data_ptr(), torch.get_num_threads())
        size = self._library.search(*given, *_places(*sampling[:4]), sampling.floor, *spare)
        tokens, parents, chances = (part[:, :size] for part in out.parts)
        return torch.where(chances > -torch.inf, tokens, ABSENT), parents, chances.exp()

    # Drafting from what was read before: lookup.c --------------------------------------------------

    def likeliest(
        self, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, depth_limit: int, same: Same = Same.NONE
    ) -> TokenTree:
        rows, size = tokens.shape
        parts = [part.contiguous() for part in (tokens, parents, confidence.float())]
        out = _Tree(rows, min(nodes, size))
        self._library.grow(*_places(*parts), rows, size, same, out.grown)
        return out.likeliest(depth_limit)

    def match_prompt(
        self, prefix: Prefix, sizes: tuple[int, int, int, int], budget: int, trees: bool
    ) -> TokenTree | Declined:
        if not trees:
            return DECLINED
        out = _Tree(len(prefix.position), 1 + budget)
        self._library.match(_texts(prefix), *sizes, budget, out.grown)
        return out.likeliest(budget)

    def learn_text(self, index: Any, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor) -> None:
        tokens, count = tokens.contiguous(), count.contiguous()
        _must_hold(len(tail) == len(end) == len(tokens) == len(count))
        lying = Index(*_places(*index.parts), *index.numbers)
        self._library.index(ctypes.addressof(lying), *_places(tail, end, tokens, count), *tokens.shape)

    def continue_text(self, index: Any, prefix: Prefix, rows: Any, own: float, paths: int, budget: int) -> TokenTree:
        lying, out = Index(*_places(*index.parts), *index.numbers), _Tree(len(prefix.position), 1 + budget)
        _must_hold(len(rows.end) == len(prefix.position))
        given = (ctypes.addressof(lying), _texts(prefix), *_places(*rows), own, paths, budget)
        getattr(self._library, "continue")(*given, out.grown)
        return out.likeliest(budget)

    def recycle(self, table: Any, tail: Tensor, seen: Any) -> None:
        lying = Table(*_places(*table.parts), *table.numbers)
        tensors = (seen.tree.tokens, seen.tree.parents, tail, seen.tokens, seen.logits.float())
        parts = [part.contiguous() for part in tensors]
        _must_hold(len(tail) == len(seen.tokens) and seen.tokens.shape[:2] == seen.tree.tokens.shape)
        self._library.recycle(ctypes.addressof(lying), *_places(*parts), *seen.tokens.shape)

    def learn_pairs(self, table: Any, before: Tensor, tokens: Tensor, successors: Tensor, chance: float) -> None:
        lying = Table(*_places(*table.parts), *table.numbers)
        parts = [part.contiguous() for part in (before, tokens, successors)]
        self._library.told(ctypes.addressof(lying), *_places(*parts), tokens.numel(), chance)

    def likely_successors(
        self, table: Any, prefix: Prefix, tail: Tensor, sizes: tuple[int, int, int], nodes: int
    ) -> TokenTree:
        lying, out = Table(*_places(*table.parts), *table.numbers), _Tree(len(tail), nodes)
        _must_hold(len(tail) == len(prefix.position))
        self._library.remember(ctypes.addressof(lying), _texts(prefix), tail.data_ptr(), *sizes, out.grown)
        return out.likeliest(sizes[2])

    def judge(self, counts: Any, proposed: Any, prefix: Prefix) -> None:
        lying = Counts(*_places(counts.rows, counts.all), *counts.numbers)
        where = _places(proposed.texts, proposed.parents, proposed.kinds, proposed.position)
        _must_hold(len(prefix.position) == len(proposed.texts) == len(counts.rows))
        self._library.judge(ctypes.addressof(lying), *where, proposed.texts.shape[1], _texts(prefix), ABSENT)

    def merge_trees(
        self, trees: Sequence[TokenTree], counts: Any, everyone: Tensor, nodes: int
    ) -> tuple[Pool, TokenTree]:
        lying, rows = Counts(*_places(counts.rows, counts.all), *counts.numbers), len(trees[0].tokens)
        held = [
            [tree.tokens.contiguous(), tree.parents.contiguous(), None if chances is None else chances.float().contiguous()]
            for tree in trees for chances in (tree.confidence,)
        ]
        _must_hold(rows == len(counts.rows) and all(tree.tokens.shape == tree.parents.shape for tree in trees))
        _must_hold(all(len(tree.tokens) == rows and tree.tokens.dtype == tree.parents.dtype == torch.int64 for tree in trees))
        sizes = [tree.tokens.shape[1] for tree in trees]
        members = (Member * len(trees))(*(Member(*_places(*h), size) for h, size in zip(held, sizes, strict=True)))
        pool, out = Pool(*torch.empty(3, rows, sum(sizes), dtype=torch.int64)), _Tree(rows, min(nodes, sum(sizes)))
        given = (ctypes.addressof(lying), everyone.data_ptr(), members, len(trees), rows)
        self._library.merge(*given, *_places(*pool), out.grown)
        return pool, out.likeliest(max(tree.depth_limit for tree in trees))


class PreparedHeads(NamedTuple):
    """Draft heads as drafting.c reads them: `whole` points into `blocks`; the weights must live as long."""

    blocks: ctypes.Array[Linear]
    layers: int
    head: Linear | None
    whole: Heads | Recurrence | None


class _Tree:
    """Where the library writes trees, [rows, nodes] each: tokens, parents and confidence."""

    def __init__(self, rows: int, nodes: int) -> None:
        tokens, parents = torch.empty(2, rows, nodes, dtype=torch.int64)
        self.parts = (tokens, parents, torch.empty(rows, nodes))
        self.places, self.nodes = _places(*self.parts), nodes
        self.grown = (Grown * 1)(Grown(*self.places, nodes, ABSENT, 1))     # for lookup.c, which tells the widest

    def likeliest(self, depth_limit: int) -> TokenTree:
        """The trees grown there, as wide as the widest."""
        width = self.grown[0].widest
        tokens, parents, confidence = self.parts if width == self.nodes else (part[:, :width] for part in self.parts)
        return TokenTree.found(tokens, parents, confidence, depth_limit)

    def tree(self, shape: TreeShape | None, depth_limit: int) -> TokenTree:
        """The trees written there, of this shape if there is one."""
        tokens, parents, confidence = self.parts
        if shape is None:
            return TokenTree.found(tokens, parents, confidence, depth_limit)
        return TokenTree.shaped(tokens, shape, confidence=confidence)


def _must_hold(fits: bool) -> None:
    if not fits:
        raise IndexError("tensors of other rows, or of other sizes, than the batch has were given; the library cannot read them")


def _places(*tensors: Tensor | None) -> list[int | None]:
    """Where tensors lie; the caller keeps them alive."""
    places: list[int | None] = []
    for tensor in tensors:                                                  # no frame of Python of its own
        places.append(None if tensor is None else tensor.data_ptr())
    return places


def _texts(prefix: Prefix) -> ctypes.Array[Texts]:
    text, position = prefix.tokens, prefix.position
    _must_hold(text.stride(1) == 1 and position.is_contiguous() and len(position) <= len(text))
    return (Texts * 1)(Texts(text.data_ptr(), position.data_ptr(), len(text), text.stride(0)))


def _child_ranks(shape: TreeShape | None, nodes: int) -> tuple[int, Tensor | None]:
    """How many children a node may have, and the shape as the library takes it."""
    return (nodes, None) if shape is None else (max(shape.ranks) + 1, shape.child_ranks)


@lru_cache(maxsize=64)
def _root_alone(rows: int) -> tuple[Tensor, Tensor]:
    """[rows, 1] the accepted nodes where only the root was read, and [rows] how many. Nobody writes in these."""
    return torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)


@lru_cache(maxsize=64)
def _none_drafted(rows: int) -> Tensor:
    """[rows, 2] `Accepted.drafted` where only the root was read."""
    return torch.zeros(rows, 2, dtype=torch.int64)
