"""Operations on a CPU: by the C library where it has them for what is given, otherwise as torch
does them.

Each public function of `CpuOps` stands for the torch function of its name and has its arguments;
what is said there of results holds here. Tensors lie in the memory of a CPU; those that are written
to are contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops, P, R
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape
from draftproof.native.arguments import (
    DECLINED,
    Declined,
    PreparedHeads,
    TreeBuffer,
    pointers,
    ranks_of,
    require,
)
from draftproof.native.cpu_lookup import LookupFunctions
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.structures import LANES, Heads, Linear, Pairs, Recurrence


class CpuOps(Ops):
    """Runs C in the place of torch functions that it has by name. library: None where there is
    none."""

    on_host = True

    def __init__(self, library: Kernels | None = None) -> None:
        super().__init__()
        self.library = kernels() if library is None else library
        own = {"append_tokens": append_tokens}
        if self.library is not None:
            parts = (DraftFunctions(self.library), LookupFunctions(self.library))
            own |= {
                name: getattr(part, name)
                for part in parts for name in vars(type(part)) if not name.startswith("_")
            }
        self._own: dict[str, Callable[..., Any]] = own

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        own = self._own.get(function.__name__)
        if own is not None:
            found: R | Declined = own(*args, **kwargs)
            if not isinstance(found, Declined):
                return found
        return function(*args, **kwargs)

    def to_host(self, *columns: Tensor) -> list[list[list[Any]]]:
        # no frame of Python for each
        return list(map(Tensor.tolist, columns))


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


class DraftFunctions:
    """Sampling, verifying and draft heads by the library: functions with the arguments of their
    namesakes in torch."""

    def __init__(self, library: Kernels) -> None:
        self._library = library

    # Sampling and verifying: drafting.c, noise.c

    def stream(
        self, keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None
    ) -> Tensor:
        keys, position = keys.contiguous(), position.contiguous()
        origin = None if origin is None else origin.contiguous()
        out = torch.empty(*position.shape, 2, dtype=torch.int32)
        where = pointers(position, origin, out)
        self._library.streams(keys.data_ptr(), int(role), *where, *position.shape)
        return out

    def gumbel(self, streams: Tensor, vocab: int) -> Tensor:
        streams = streams.contiguous()
        noise, rows = torch.empty(*streams.shape[:-1], vocab), streams.numel() // 2
        self._library.gumbel(*pointers(streams, noise), rows, vocab, torch.get_num_threads())
        return noise

    def sample(self, sampler: Sampler, logits: Tensor, paths: Paths) -> Tensor | Declined:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return DECLINED
        (rows, nodes, vocab), logits = logits.shape, logits.contiguous()
        require(rows == len(sampler.rows) and paths.first + nodes <= paths.tree.depths.shape[1])
        noise, places = sampler.noise_at(paths, nodes, vocab)
        tokens = torch.empty(rows, nodes, dtype=torch.int64)
        given = pointers(logits, noise, places, sampler.temperatures)
        sizes = (nodes, rows * nodes, vocab, NO_TOKEN)
        self._library.sample(*given, *sizes, tokens.data_ptr(), torch.get_num_threads())
        return tokens

    def best_tokens(
        self, sampler: Sampler, logits: Tensor, paths: Paths, count: int, sure: float
    ) -> tuple[Tensor, Tensor] | Declined:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return DECLINED
        (rows, nodes, vocab), logits = logits.shape, logits.contiguous()
        require(
            rows == len(sampler.rows) and paths.first + nodes <= paths.tree.depths.shape[1]
            and 0 < count <= vocab
        )
        noise, places = sampler.noise_at(paths, nodes, vocab)
        columns = [
            column.expand(-1, nodes).contiguous()
            for column in (sampler.temperatures, sampler.scales(sure))
        ]
        scores = torch.empty(rows, nodes, count)
        tokens = torch.empty(rows, nodes, count, dtype=torch.int64)
        given, out = pointers(logits, noise, places, *columns), pointers(scores, tokens)
        self._library.best_tokens(*given, rows * nodes, vocab, count, *out, torch.get_num_threads())
        return scores, tokens

    def top_tokens(self, logits: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor] | Declined:
        """Of equals the earlier, and never NaN; where less than `count` are left, token 0 at -inf
        stands for them."""
        if logits[0].dtype != torch.bfloat16:
            return DECLINED
        logits = [part.contiguous() for part in logits]
        (rows, nodes, vocab), parts = logits[0].shape, len(logits)
        tokens = torch.empty(rows, parts * nodes, count, dtype=torch.int64)
        best, places = torch.empty(tokens.shape), (ctypes.c_void_p * parts)(*pointers(*logits))
        self._library.top_tokens(
            places, parts, rows, nodes, vocab, count, *pointers(tokens, best),
            torch.get_num_threads()
        )
        return tokens, best

    def accept_by_matching(self, tree: TokenTree, target_tokens: Tensor) -> Accepted:
        rows, nodes = target_tokens.shape
        require(tree.tokens.shape == target_tokens.shape)
        if nodes == 1:
            alone, count, drafted = _root_alone(rows)
            return Accepted(alone, count, target_tokens[:, 0], drafted=drafted)
        tokens, parents = tree.tokens.contiguous(), tree.parents.contiguous()
        deep = tree.depth_limit + 1
        path = torch.empty(rows, deep, dtype=torch.int64)
        found = torch.empty(4, rows, dtype=torch.int64)
        given = pointers(tokens, parents, target_tokens)
        self._library.accept(*given, rows, nodes, deep, ABSENT, *pointers(path, found))
        return Accepted(path, found[0], found[1], drafted=found[2:].T)

    def well_formed(self, tree: TokenTree, vocab: int) -> bool:
        parts = (tree.tokens.contiguous(), tree.parents.contiguous())
        sizes = (*tree.tokens.shape, tree.depth_limit, vocab, ABSENT)
        return bool(self._library.well_formed(*pointers(*parts), *sizes))

    # Trees of draft heads: heads.c

    def prepare_heads(self, medusa: Any, weight: float) -> PreparedHeads | None:
        """None where heads have projections of their own, or some are not packed."""
        head, layers = medusa.head, medusa.head.config.num_layers
        blocks = [block for one in head.heads for block in one.blocks]
        linears = [block.native for block in blocks if getattr(block, "native", None) is not None]
        last = _projection(medusa) if head.config.share_lm_head else None
        if last is None or len(linears) < len(blocks) or head.config.hidden_size % LANES:
            return None
        require(medusa.token_map is None or len(medusa.token_map) == last.outputs)
        array, table = (Linear * len(linears))(*linears), Pairs(*pointers(*medusa.bigrams[:4]))
        form = (*pointers(medusa.token_map), table, layers, len(medusa.bigrams.rest), weight)
        return PreparedHeads(array, layers, last, Heads(ctypes.addressof(array), last, *form))

    def medusa_tree(
        self, medusa: Any, frontier: Frontier, heads: int, nodes: int, shape: TreeShape | None
    ) -> TokenTree | Declined:
        vocab, prepared, root = medusa.vocabulary.vocab_size, medusa.prepared, frontier.prefix.root
        sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, vocab, 0)
        if sampling is None or prepared is None:
            return DECLINED
        if prepared.head.outputs != vocab and medusa.token_map is None:
            return DECLINED
        rows, size = len(root), medusa.hidden.shape[1]
        require(rows <= len(medusa.hidden))
        out, (children, child_ranks) = TreeBuffer(rows, nodes + 1), ranks_of(shape, nodes)
        room = 2 * size + vocab + prepared.head.outputs
        states = medusa.hidden.new_empty(rows * heads * room)
        work = torch.empty(rows * heads * (vocab + LANES))
        given = (ctypes.addressof(prepared.whole), *pointers(medusa.hidden, child_ranks, root))
        spare = (*out.places, *pointers(states, work), torch.get_num_threads())
        self._library.medusa_tree(
            *given, rows, heads, nodes, children, *pointers(*sampling[:4]), ABSENT, *spare
        )
        return out.tree(shape, heads)

    def bigram_tree(
        self, table: Any, logits: Tensor, frontier: Frontier, nodes: int, shape: TreeShape | None,
        weight: float
    ) -> TokenTree | Declined:
        (rows, heads, vocab), logits = logits.shape, logits.contiguous()
        sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, vocab, 0)
        if logits.dtype != torch.bfloat16 or sampling is None:
            return DECLINED
        out, root = TreeBuffer(rows, nodes + 1), frontier.prefix.root
        children, child_ranks = ranks_of(shape, nodes)
        pairs, work = Pairs(*pointers(*table[:4])), torch.empty(rows * heads * (vocab + LANES))
        given = (ctypes.addressof(pairs), weight, *pointers(child_ranks, logits, root))
        spare = (*out.places, work.data_ptr(), torch.get_num_threads())
        self._library.bigram_tree(
            *given, rows, heads, vocab, nodes, children, *pointers(*sampling[:4]), ABSENT, *spare
        )
        return out.tree(shape, heads)

    def prepare_recurrence(self, drafter: Any) -> PreparedHeads | None:
        """None where the target's tables or some layers are not packed."""
        head, token_map, tables = drafter.head, drafter.token_map, drafter.vocabulary.native
        form, last = head.config, _projection(drafter)
        if last is None or form.hidden_size % LANES or form.exit_dim % LANES:
            return None
        narrow = [head.input_proj] if form.exit_dim != 2 * form.hidden_size else []
        blocks = [block.linear for block in head.lm_head[: form.num_layers]]
        layers = [head.rnn_w, head.rnn_u, *narrow, *blocks]
        linears = [layer.native for layer in layers if getattr(layer, "native", None) is not None]
        vocab = len(tables.embeddings)
        known = vocab if token_map is None else len(token_map)
        if len(linears) < len(layers) or last.outputs != known:
            return None
        count = len(layers) - form.num_layers
        first = [*linears[:count], *([] if narrow else [Linear()]), last]
        array = (Linear * form.num_layers)(*linears[count:])
        sizes = (*pointers(tables.embeddings, token_map), form.hidden_size, form.num_layers)
        flags = (True, form.rnn_activation == "silu", not form.skip_u_at_first_step, vocab)
        whole = Recurrence(*first, ctypes.addressof(array), *sizes, *flags)
        return PreparedHeads(array, form.num_layers, last, whole)

    def beam_search(
        self, drafter: Any, frontier: Frontier, length: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor] | Declined:
        prepared, vocab = drafter.prepared, drafter.vocabulary.vocab_size
        sampling = frontier.sampler.draft_sampling(frontier.prefix, length, vocab, frontier.floor)
        if prepared is None or sampling is None:
            return DECLINED
        head, root = prepared.whole, frontier.prefix.root
        rows = len(root)
        require(width <= head.projection.outputs)
        nodes = 1 + width + max(length - 1, 0) * width * width
        out, context = TreeBuffer(rows, nodes), drafter.hidden[:rows].contiguous()
        require(len(context) == rows)
        each = 8 * head.hidden + 2 * head.projection.size + head.projection.outputs
        work = context.new_empty(rows * width * each)
        given = (ctypes.addressof(head), *pointers(context, root), rows, width, length)
        spare = (*out.places, nodes, work.data_ptr(), torch.get_num_threads())
        size = self._library.beam_search(*given, *pointers(*sampling[:4]), sampling.floor, *spare)
        tokens, parents, chances = (part[:, :size] for part in out.parts)
        return torch.where(chances > -torch.inf, tokens, ABSENT), parents, chances.exp()


def _projection(drafter: Any) -> Linear | None:
    """What a head projects with: the target's LM head, its rows of a draft vocabulary, or its own;
    None if it is not packed."""
    head, tables = drafter.head, drafter.vocabulary.native
    own = head.projection if head.config.share_lm_head else head.own_projections[-1]
    return tables and (tables.head if own is None else getattr(own, "native", None))


@lru_cache(maxsize=64)
def _root_alone(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted nodes [rows, 1] where only the root was read, how many [rows], and what was
    drafted [rows, 2]. Nobody writes in these."""
    nodes, drafted = (torch.zeros(rows, size, dtype=torch.int64) for size in (1, 2))
    return nodes, torch.ones(rows, dtype=torch.int64), drafted
