"""Reads compiled by torch.compile, or recorded once for their shapes and replayed: CUDA graphs, HPU
graphs.

A small model's step goes into starting operators one by one; a graph starts them all. What is
recorded is the whole read: mask, forward, and the writing of keys and values into the cache, whose
storage must stay where it is. Closed shapes keep the number of graphs small.
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
"""Wider reads, of prompts above all, have enough to do for the device: they are not recorded."""


def compiled(target: Target, backend: str = "inductor") -> Target:
    """A target with its forward compiled, for each shape it meets.

    inductor keeps what it compiled on disk. Raises UnsupportedModel if the model has no fast
    forward, or if compiled it does not agree with the model's own.
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
    """A target whose reads are replayed. A reading lies where the last one of its shape lay: use it
    at once."""

    def __init__(self, target: Target, device: Device | None = None) -> None:
        if target.is_encoder_decoder:
            raise BadInput(f"{target.name} is an encoder-decoder; leave --use-hpu-graphs out")
        vars(self).update(vars(target))                                         # examined already
        self._recorder = device or Device(target.device)
        if not self._recorder.captures:
            raise BadInput(
                f"graphs were asked for, and {target.device.type} devices record none; leave "
                "--use-hpu-graphs out"
            )
        self._graphs = weakref.WeakKeyDictionary[KVCache, dict[object, _Graph]]()

    def read(self, tree: TokenTree, cache: KVCache, **how: Any) -> Reading:
        """As `Target.read`."""
        nodes = tree.tokens.shape[1]
        if nodes > NODES:
            return super().read(tree, cache, **how)
        # what the host decides of a read
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
        plain, weakly = super().read, weakref.ref(cache)    # no graph keeps its cache alive

        def read() -> Reading:
            alive = weakly()
            assert alive is not None, "a graph is replayed by reads of its cache alone"
            same = TokenTree(tokens, parents, depth, is_chain=chain)
            return plain(same, alive, **how)

        replay, reading = self._recorder.record(read)
        return _Graph((tokens, parents), replay, reading)
