"""Reads compiled by torch.compile, or recorded once per shape and replayed as CUDA or HPU
graphs.

A small model's step is mostly spent on starting operators one by one; a graph starts them all. The
whole read is recorded: mask, forward, and the writing of keys and values into the cache, whose
storage must not move. A fixed set of shapes keeps the number of graphs small.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Reading
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.device import Device
from draftproof.model.inspection import CHECK_TREE, ReferenceForward
from draftproof.model.module_target import ModuleTarget
from draftproof.model.target import Target

NODES = 64
"""Wider reads, such as those of prompts, are not recorded: they keep the device busy anyway."""


def compiled(target: Target, backend: str = "inductor") -> Target:
    """A target whose forward is compiled for each shape.

    inductor keeps compiled code on disk. Raises UnsupportedModel if the model has no fast forward,
    or if the compiled forward does not agree with the model's own.
    """
    if not isinstance(target, ModuleTarget) or target.fast is None or target.fast.native:
        raise UnsupportedModel(
            f"{target.name} is read by kernels that are compiled already, or by the model's own "
            "forward, which is not compiled; leave --compile out"
        )
    other = target.with_model(target.model)
    assert other.fast is not None
    other.fast.compile(backend)
    with torch.inference_mode():
        text = torch.arange(10, device=target.device) % target.vocab_size
        error = ReferenceForward.of(target, text, CHECK_TREE, together=True).error(other)
    if not error <= 6 * target.tolerance:
        raise UnsupportedModel(
            f"{target.name} cannot be compiled here, or gives other logits when compiled "
            f"({error:.1g} off); leave --compile out"
        )
    return other


class _Graph(NamedTuple):
    inputs: tuple[Tensor, Tensor]
    replay: Callable[[], None]
    reading: Reading


class GraphReplay(ModuleTarget):
    """A target whose reads are replayed. A reading overwrites the last one of its shape: use it at
    once."""

    def __init__(self, target: Target, device: Device | None = None) -> None:
        if target.is_encoder_decoder:
            raise BadInput(f"{target.name} is an encoder-decoder; leave --use-hpu-graphs out")
        vars(self).update(vars(target))                                         # checked already
        self._recorder = device or Device(target.device)
        if not self._recorder.captures:
            raise BadInput(
                f"graphs were asked for, and {target.device.type} devices record none; leave "
                "--use-hpu-graphs out"
            )
        self._graphs = weakref.WeakKeyDictionary[KVCache, dict[object, _Graph]]()

    def read(self, tree: TokenTree, cache: KVCache, **how: Any) -> Reading:
        """See `Target.read`."""
        nodes = tree.tokens.shape[1]
        if nodes > NODES:
            return super().read(tree, cache, **how)
        # everything that the host decides about a read
        seen = cache.reserve(nodes), cache.holds(nodes)
        key = (tree.tokens.shape, tree.depth_limit, tree.is_chain, *sorted(how.items()), seen)
        graphs = self._graphs.setdefault(cache, {})
        if key not in graphs:
            graphs[key] = self._recorded(tree, cache, how)
        graph = graphs[key]
        for place, values in zip(graph.inputs, (tree.tokens, tree.parents), strict=True):
            place.copy_(values)
        graph.replay()
        return graph.reading

    def _recorded(self, tree: TokenTree, cache: KVCache, how: dict[str, Any]) -> _Graph:
        tokens, parents = tree.tokens.clone(), tree.parents.clone()
        depth, chain = tree.depth_limit, tree.is_chain
        plain, weakly = super().read, weakref.ref(cache)    # graphs do not keep their cache alive

        def read() -> Reading:
            alive = weakly()
            assert alive is not None, "a graph is replayed by reads of its cache alone"
            same = TokenTree(tokens, parents, depth, is_chain=chain)
            return plain(same, alive, **how)

        replay, reading = self._recorder.record(read)
        return _Graph((tokens, parents), replay, reading)
