"""Quantised native models, packed from the source and compared with it layer by layer.

The original is never held as a whole: each layer is read from the file, packed, multiplied and
released. The packed layers and the result of the comparison are kept in the cache folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache, tree_mask
from draftproof.cache.layout import LogitScaling
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput
from draftproof.model.native_model import DecoderBuilder, NativeModel
from draftproof.weights.disk_cache import kept_of_files
from draftproof.weights.packed_linear import JointLinear
from draftproof.weights.quantize import Quantization
from draftproof.weights.quantized_linear import QuantizedLinear, slow_because
from draftproof.weights.tensor_source import TensorSource
from draftproof.weights.token_table import TokenTable

KINDS = ("int8", "int4")
ROWS = 32
"""Positions compared at a time: the logits of a whole text would take as much memory as a model."""


class KeptSource:
    """A source with matrices that were packed earlier.

    Args:
        source: The source of everything else.
        layers: States of packed layers, by the name of their first module.
    """

    def __init__(self, source: TensorSource, layers: Mapping[str, Mapping[str, object]]) -> None:
        self.source, self.layers, self.kind = source, layers, source.kind

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def with_kind(self, kind: str | None) -> TensorSource:
        return self.source.with_kind(kind)

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(name)

    def embedding(self, name: str) -> TokenTable:
        return self.source.embedding(name)

    def linear(self, names: Sequence[str], bias: bool) -> JointLinear:
        state = self.layers.get(names[0])
        if state is None:
            return self.source.linear(names, bias)
        return QuantizedLinear.restored(state)


def quantized_and_compared(
    settings: dict[str, object], source: TensorSource, kind: str,
    text: Callable[[], Tensor | None], *, dtype: torch.dtype, name: str, text_key: object = None,
) -> tuple[NativeModel, Quantization]:  # fmt: skip
    """A quantised native model, and the cost of quantising it.

    Args:
        settings: The configuration.
        source: The original weights.
        kind: "int8" or "int4".
        text: Returns [S] token ids for the comparison, or None for no comparison. It is called once
            the model is quantised, so a tokenizer may be loaded in the meantime.
        dtype: The dtype of computation.
        name: The folder or file, by which earlier results are found.
        text_key: What the text depends on, besides the files.

    Raises:
        BadInput: The kind is not available on a CPU.
    """
    if kind not in KINDS:
        raise BadInput(
            "8-bit floats are emulated on a CPU, far slower than bfloat16; choose int8 or int4"
            if kind == "fp8" else f"quantize was {kind!r}; choose one of {', '.join(KINDS)}"
        )
    place = kept_of_files(name, kind, text_key, str(dtype))
    known, packed = place.read(), source.with_kind(kind)
    if known is not None:
        kept = KeptSource(packed, known["layers"])
        return NativeModel(settings, kept, dtype=dtype, name=name), Quantization(*known["cost"])
    with place.save_if_slow(wait=False) as facts:
        model = NativeModel(settings, packed, dtype=dtype, name=name)
        cost = _compared(model, source, kind, text())
        facts["cost"] = tuple(cost)
        facts["layers"] = {name: layer.state for name, layer in model.named_linears.items()
                           if isinstance(layer, QuantizedLinear)}
    return model, cost


def _compared(
    model: NativeModel, source: TensorSource, kind: str, text: Tensor | None
) -> Quantization:
    """Compare a quantised model with the weights of the source on a text."""
    config = model.config
    embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    before = 2 * (model.weight_count + embeddings)
    slow = slow_because(kind, model.dtype)
    if text is None or not len(text):
        return Quantization(kind, 0.0, 1.0, 0, before, model.nbytes, slow)
    scaling, head = LogitScaling.of(model.config), model.decoder.head
    with torch.inference_mode():
        ours = _own_states(model, text)
        theirs, their_head = original_states(model, source, text)
        divergence, same = 0.0, 0
        for start in range(0, len(text), ROWS):
            rows = slice(start, start + ROWS)
            truth = scaling.apply(their_head(theirs[rows])).float().log_softmax(-1)
            other = scaling.apply(head(ours[rows])).float().log_softmax(-1)
            divergence += float((truth.exp() * (truth - other)).sum())
            same += int((truth.argmax(-1) == other.argmax(-1)).sum())
    count = len(text)
    return Quantization(kind, divergence / count, same / count, count, before, model.nbytes, slow)


def _own_states(model: NativeModel, text: Tensor) -> Tensor:
    """[S, H] the states of a text after the final norm."""
    from draftproof.model.target import Target

    features = Target(model).features(text[None], torch.ones(1, len(text), dtype=torch.float32))
    return features.hidden[0, :, 0]


def original_states(
    model: NativeModel, source: TensorSource, text: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Compute the states [S, H] of a text after the final norm with the weights of the source, and
    its head; a layer is held only while it is read."""
    builder = DecoderBuilder(model.config, source.with_kind(None), model.dtype)
    tree, size, forward = TokenTree.chain(text[None]), len(text), model.forward
    positions = torch.arange(size)[None]
    shapes = model.facts.layout.shapes[:1]
    cache = KVCache.empty(shapes, 1, size, model.dtype, text.device)
    span, hidden = cache.write_at(0, size), forward.embedded(text[None])
    for layer in builder.layers():
        window = builder.kinds[layer.kind].window
        mask = tree_mask(tree, cache.lengths, span, model.dtype, 0, window)
        hidden = forward.layer(layer, cache.layers[0], hidden, positions, mask)
        builder.linears.clear()                         # or they would hold the whole original
    return model.decoder.norm(hidden)[0], builder.head().forward
