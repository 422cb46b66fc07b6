"""Operations on a CPU: C in place of torch functions, where there is C for what is given.

`cpu_kernel(function)` registers the C for one torch function. It belongs to that function object,
not to its name: another function that has the same name runs as it is written. The C for functions
of `core` is here; a drafter registers that for its own functions next to them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Concatenate, Final, cast

import torch
from torch import Tensor

from draftproof.core import messages, noise
from draftproof.core.acceptance import accept_by_matching
from draftproof.core.messages import Accepted
from draftproof.core.noise import Role
from draftproof.core.ops import Ops, P, R
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Sampler, best_tokens, sample
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, well_formed
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.trees import TreeBuffer


class Unsupported(Enum):
    """The type of `UNSUPPORTED`."""

    UNSUPPORTED = auto()


UNSUPPORTED: Final = Unsupported.UNSUPPORTED
"""What a kernel returns for arguments it is not made for; the torch function runs instead."""
Kernel = Callable[Concatenate[Kernels, P], R | Unsupported]

_KERNELS: dict[Callable[..., object], Callable[..., object]] = {}
_ON_HOST: dict[Callable[..., object], Callable[..., object]] = {}


def cpu_kernel(function: Callable[P, R]) -> Callable[[Kernel[P, R]], Kernel[P, R]]:
    """Decorate what calls the C library in place of a torch function.

    Args:
        function: The torch function. What is decorated takes the library and then the same
            arguments, gives the same results, and changes the same tensors in place. It returns
            `UNSUPPORTED` for arguments it is not made for.

    Example:
        >>> @cpu_kernel(top_tokens)
        ... def _top_tokens(library: Kernels, logits: Tensor, count: int) -> ...:
        ...     library("top_tokens", logits, ...)
    """
    def register(kernel: Kernel[P, R]) -> Kernel[P, R]:
        _KERNELS[function] = kernel
        return kernel

    return register


def on_host(function: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate what does the same as a torch function with numbers on the host, without C."""
    def register(replacement: Callable[P, R]) -> Callable[P, R]:
        _ON_HOST[function] = replacement
        return replacement

    return register


class CpuOps(Ops):
    """Runs C in place of the torch functions that it is registered for.

    library: None for that of this machine; where there is none, torch runs everything.
    """

    on_host = True

    def __init__(self, library: Kernels | None = None) -> None:
        super().__init__()
        self.library = kernels() if library is None else library

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the kernel of `function` returns or, where there is none, the function itself."""
        try:
            kernel, replacement = _KERNELS.get(function), _ON_HOST.get(function, function)
        except TypeError:                                       # a callable that has no hash
            return function(*args, **kwargs)
        if kernel is not None and self.library is not None:
            result = kernel(self.library, *args, **kwargs)
            if result is not UNSUPPORTED:
                return cast(R, result)
        return cast(R, replacement(*args, **kwargs))

    def to_host(self, *columns: Tensor) -> list[list[list[Any]]]:
        # no frame of Python for each
        return list(map(Tensor.tolist, columns))


@on_host(messages.append_tokens)
def append_tokens(text: Tensor, position: Tensor, tokens: Tensor, accepted: Accepted) -> Tensor:
    """As in core/messages.py, by numbers on the host."""
    new = torch.empty_like(tokens)
    lines, drafted, page = new.numpy(), tokens.numpy(), text.numpy()
    columns = (position.tolist(), accepted.count.tolist(), accepted.root.tolist())
    for row, (start, count, root) in enumerate(zip(*columns, strict=True)):
        line = lines[row]
        line[: count - 1], line[count - 1 :] = drafted[row, 1:count], root
        page[row, start + 1 : start + 1 + count] = line[:count]
        page[row, start + count] = max(root, 0)
    return new


@cpu_kernel(noise.stream)
def _stream(
    library: Kernels, keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None
) -> Tensor:
    out = torch.empty(*position.shape, 2, dtype=torch.int32)
    library("streams", keys, role, position, origin, out, *position.shape)
    return out


@cpu_kernel(noise.gumbel)
def _gumbel(library: Kernels, streams: Tensor, vocab: int) -> Tensor:
    out = torch.empty(*streams.shape[:-1], vocab, dtype=torch.float32)
    library("gumbel", streams, out, streams.numel() // 2, vocab)
    return out


@cpu_kernel(sample)
def _sample(
    library: Kernels, sampler: Sampler, logits: Tensor, paths: Paths
) -> Tensor | Unsupported:
    if logits.dtype != torch.bfloat16 or not sampler.only_temperature:
        return UNSUPPORTED
    rows, nodes, vocab = logits.shape
    tokens = torch.empty(rows, nodes, dtype=torch.int64)
    noises, places = sampler.noise_at(paths, nodes, vocab)
    library(
        "sample", logits, noises, places, sampler.temperatures, nodes, rows * nodes, vocab,
        NO_TOKEN, tokens
    )
    return tokens


@cpu_kernel(best_tokens)
def _best_tokens(
    library: Kernels, sampler: Sampler, logits: Tensor, paths: Paths, count: int, scale: float
) -> tuple[Tensor, Tensor] | Unsupported:
    rows, nodes, vocab = logits.shape
    fits = logits.dtype == torch.bfloat16 and 0 < count <= vocab
    if not fits or not sampler.only_temperature:
        return UNSUPPORTED
    noises, places = sampler.noise_at(paths, nodes, vocab)
    columns = (sampler.temperatures, sampler.confidence_scales(scale))
    temperatures, scales = (column.expand(-1, nodes) for column in columns)
    scores = torch.empty(rows, nodes, count, dtype=torch.float32)
    tokens = torch.empty(rows, nodes, count, dtype=torch.int64)
    library(
        "best_tokens", logits, noises, places, temperatures, scales, rows * nodes, vocab, count,
        scores, tokens
    )
    return scores, tokens


@cpu_kernel(messages.top_tokens)
def _top_tokens(
    library: Kernels, logits: Tensor, count: int
) -> tuple[Tensor, Tensor] | Unsupported:
    """Of equals the earlier, and never NaN; where less than `count` are left, token 0 at -inf
    stands for them."""
    rows, nodes, vocab = logits.shape
    if logits.dtype != torch.bfloat16 or not 0 < count <= vocab:
        return UNSUPPORTED
    tokens = torch.empty(rows, nodes, count, dtype=torch.int64)
    best = torch.empty(rows, nodes, count, dtype=torch.float32)
    library("top_tokens", logits, rows * nodes, vocab, count, tokens, best)
    return tokens, best


@cpu_kernel(accept_by_matching)
def _accept(library: Kernels, tree: TokenTree, target_tokens: Tensor) -> Accepted:
    rows, nodes = target_tokens.shape
    path = torch.empty(rows, tree.depth_limit + 1, dtype=torch.int64)
    counts = torch.empty(4, rows, dtype=torch.int64)
    library(
        "accept", tree.tokens, tree.parents, target_tokens, rows, nodes, path.shape[1], ABSENT,
        path, counts
    )
    return Accepted(path, counts[0], counts[1], drafted=counts[2:].T)


@cpu_kernel(well_formed)
def _well_formed(library: Kernels, tree: TokenTree, vocab: int) -> bool:
    sizes = (*tree.tokens.shape, tree.depth_limit, vocab, ABSENT)
    return bool(library("well_formed", tree.tokens, tree.parents, *sizes))


@cpu_kernel(TokenTree.likeliest)
def _likeliest(
    library: Kernels, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int,
    depth_limit: int
) -> TokenTree:
    rows, size = tokens.shape
    out = TreeBuffer(rows, min(nodes, size))
    library("likeliest", tokens, parents, confidence.float(), rows, size, out.output)
    return out.tree(depth_limit)
