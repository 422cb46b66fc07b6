"""Operations on a CPU: by the C library where it has them for what is given, otherwise as torch
does them.

Each public function of `CpuOps` stands for the torch function of its name and has its arguments;
what is said there of results holds here. Tensors lie in the memory of a CPU; those that are written
to are contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops, P, R
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape
from draftproof.native.cpu_lookup import LookupFunctions, TreeBuffer, require
from draftproof.native.declarations import structure
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.structures import LANES, Native

Linear, Pairs, Recurrence = map(structure, ("Linear", "Pairs", "Recurrence"))


class PreparedHeads(NamedTuple):
    """Draft heads as the kernels read them: the blocks of all, so many of each head, and the layer
    behind them. The weights must live as long."""

    blocks: ctypes.Array[Native]
    layers: int
    head: Native


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
            own |= {name: getattr(part, name)
                    for part in parts for name in vars(type(part)) if not name.startswith("_")}
        self._own: dict[str, Callable[..., Any]] = own

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the library returns or, where that is NotImplemented, the function itself."""
        own = self._own.get(function.__name__)
        found: Any = NotImplemented if own is None else own(*args, **kwargs)
        return function(*args, **kwargs) if found is NotImplemented else found

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
    """Sampling, verifying and draft heads by the library: drafting.c, noise.c, heads.c."""

    def __init__(self, library: Kernels) -> None:
        self._call = library

    def stream(
        self, keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(*position.shape, 2, dtype=torch.int32)
        self._call("streams", keys, role, position, origin, out, *position.shape)
        return out

    def gumbel(self, streams: Tensor, vocab: int) -> Tensor:
        noise = torch.empty(*streams.shape[:-1], vocab)
        self._call("gumbel", streams, noise, streams.numel() // 2, vocab)
        return noise

    def sample(self, sampler: Sampler, logits: Tensor, paths: Paths) -> Any:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return NotImplemented
        rows, nodes, vocab = logits.shape
        require(rows == len(sampler.rows) and paths.first + nodes <= paths.tree.depths.shape[1])
        tokens = torch.empty(rows, nodes, dtype=torch.int64)
        given = (logits, *sampler.noise_at(paths, nodes, vocab), sampler.temperatures)
        self._call("sample", *given, nodes, rows * nodes, vocab, NO_TOKEN, tokens)
        return tokens

    def best_tokens(
        self, sampler: Sampler, logits: Tensor, paths: Paths, count: int, scale: float
    ) -> Any:
        if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
            return NotImplemented
        rows, nodes, vocab = logits.shape
        require(
            rows == len(sampler.rows) and paths.first + nodes <= paths.tree.depths.shape[1]
            and 0 < count <= vocab
        )
        columns = (sampler.temperatures, sampler.confidence_scales(scale))
        given = *sampler.noise_at(paths, nodes, vocab), *(one.expand(-1, nodes) for one in columns)
        scores = torch.empty(rows, nodes, count)
        tokens = torch.empty(rows, nodes, count, dtype=torch.int64)
        self._call("best_tokens", logits, *given, rows * nodes, vocab, count, scores, tokens)
        return scores, tokens

    def top_tokens(self, logits: Tensor, count: int) -> Any:
        """Of equals the earlier, and never NaN; where less than `count` are left, token 0 at -inf
        stands for them."""
        if logits.dtype != torch.bfloat16:
            return NotImplemented
        rows, nodes, vocab = logits.shape
        tokens = torch.empty(rows, nodes, count, dtype=torch.int64)
        best = torch.empty(tokens.shape)
        self._call("top_tokens", logits, rows * nodes, vocab, count, tokens, best)
        return tokens, best

    def accept_by_matching(self, tree: TokenTree, target_tokens: Tensor) -> Accepted:
        rows, nodes = target_tokens.shape
        require(tree.tokens.shape == target_tokens.shape)
        path = torch.empty(rows, tree.depth_limit + 1, dtype=torch.int64)
        found = torch.empty(4, rows, dtype=torch.int64)
        given = (tree.tokens, tree.parents, target_tokens, rows, nodes, path.shape[1], ABSENT)
        self._call("accept", *given, path, found)
        return Accepted(path, found[0], found[1], drafted=found[2:].T)

    def well_formed(self, tree: TokenTree, vocab: int) -> bool:
        sizes = (*tree.tokens.shape, tree.depth_limit, vocab, ABSENT)
        return bool(self._call("well_formed", tree.tokens, tree.parents, *sizes))

    def prepare_heads(self, medusa: Any) -> PreparedHeads | None:
        """None where heads have projections of their own, or some are not packed."""
        head, form, last = medusa.head, medusa.head.config, _projection(medusa)
        blocks = [block for one in head.heads for block in one.blocks]
        linears = _natives(blocks)
        fits = form.share_lm_head and form.hidden_size % LANES == 0 and len(linears) == len(blocks)
        if last is None or not fits:
            return None
        return PreparedHeads((Linear * len(linears))(*linears), form.num_layers, last)

    def heads_logits(self, medusa: Any, hidden: Tensor, heads: int) -> Any:
        if medusa.prepared is None:
            return NotImplemented
        blocks, layers, head = medusa.prepared
        (rows, size), vocab = hidden.shape, medusa.vocabulary.vocab_size
        logits = hidden.new_empty(rows, heads, vocab)
        work = hidden.new_empty(rows * heads * (2 * size + head.outputs))
        given = (blocks, head, medusa.head.token_map, hidden, logits, work)
        self._call("heads", *given, rows, heads, layers, vocab)
        return logits

    def bigram_tree(
        self, table: Any, logits: Tensor, frontier: Frontier, nodes: int, shape: TreeShape | None,
        weight: float
    ) -> Any:
        rows, heads, vocab = logits.shape
        sampling = frontier.sampler.draft_sampling(frontier.prefix, heads, vocab, 0)
        if logits.dtype != torch.bfloat16 or sampling is None:
            return NotImplemented
        pairs = Pairs(*map(Tensor.data_ptr, table[:4]))
        out, work = TreeBuffer(rows, nodes + 1), torch.empty(rows * heads * (vocab + LANES))
        children = nodes if shape is None else max(shape.ranks) + 1
        self._call(
            "bigram_tree", pairs, weight, None if shape is None else shape.child_ranks, logits,
            frontier.prefix.root, rows, heads, vocab, children, *sampling[:4], out.output, work
        )
        return out.tree(heads, shape)

    def prepare_recurrence(self, drafter: Any) -> ctypes.Structure | None:
        """None where the target's tables or some layers are not packed."""
        head, tables, token_map = drafter.head, drafter.vocabulary.native, drafter.head.token_map
        form, last = head.config, _projection(drafter)
        if last is None or form.hidden_size % LANES or form.exit_dim % LANES:
            return None
        narrow = [head.input_proj] if form.exit_dim != 2 * form.hidden_size else []
        blocks = [block.linear for block in head.lm_head[: form.num_layers]]
        layers = [head.rnn_w, head.rnn_u, *narrow, *blocks]
        linears, vocab = _natives(layers), len(tables.embeddings)
        known = vocab if token_map is None else len(token_map)
        if len(linears) < len(layers) or last.outputs != known:
            return None
        array = (Linear * len(blocks))(*linears[len(layers) - len(blocks) :])
        whole = Recurrence(
            *linears[:2], linears[2] if narrow else Linear(), last, ctypes.addressof(array),
            tables.embeddings.data_ptr(), None if token_map is None else token_map.data_ptr(),
            form.hidden_size, len(blocks), form.rnn_activation == "silu",
            not form.skip_u_at_first_step, vocab
        )
        whole.held = array
        return whole

    def beam_search(self, drafter: Any, frontier: Frontier, length: int, width: int) -> Any:
        head, vocab, root = drafter.prepared, drafter.vocabulary.vocab_size, frontier.prefix.root
        sampling = frontier.sampler.draft_sampling(frontier.prefix, length, vocab, frontier.floor)
        if head is None or sampling is None:
            return NotImplemented
        rows, context = len(root), drafter.hidden[: len(root)]
        require(width <= head.projection.outputs and len(context) == rows)
        out = TreeBuffer(rows, 1 + width + max(length - 1, 0) * width * width)
        each = 8 * head.hidden + 2 * head.projection.size + 3 * head.projection.outputs
        size = self._call(
            "beam_search", head, context, root, rows, width, length, *sampling[:4], sampling.floor,
            out.output, context.new_empty(rows * width * each)
        )
        tokens, parents, chances = (part[:, :size] for part in out.parts)
        return torch.where(chances > -torch.inf, tokens, ABSENT), parents, chances.exp()


def _natives(layers: Sequence[Any]) -> list[Native]:
    """Of those that are packed, what the kernels read."""
    return [one.native for one in layers if getattr(one, "native", None) is not None]


def _projection(drafter: Any) -> Native | None:
    """What a head projects with: the target's LM head, its rows of a draft vocabulary, or its own;
    None if it is not packed."""
    head, tables = drafter.head, drafter.vocabulary.native
    own = head.projection if head.config.share_lm_head else head.own_projections[-1]
    return tables and (tables.head if own is None else getattr(own, "native", None))
