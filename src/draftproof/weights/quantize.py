"""Copies of a model in 8 or 4 bits, and the cost of quantising.

Quantised layers are ours on a CPU, and torchao's elsewhere.

A quantised model writes the text of its own weights, which never depends on the drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from draftproof.errors import BadInput, first_line
from draftproof.native.pages import release
from draftproof.weights.block_formats import quantized_blocks
from draftproof.weights.disk_cache import kept
from draftproof.weights.packed_linear import (
    JointLinear,
    PackedLinear,
    PackedSlice,
    bytes_of,
    fusable_groups,
    replace_modules,
)
from draftproof.weights.quantized_linear import QuantizedLinear, slow_because
from draftproof.weights.snapshot import shallow_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("int8", "int4", "fp8")
"""8-bit weights and activations; 4-bit weights; 8-bit floats, on accelerators alone."""
SMALLEST = 32
"""Layers of fewer outputs stay as they are: gates and routers, which cost nothing and matter."""


class Quantization(NamedTuple):
    """The cost and savings of quantising, compared with the original on one text.

    kl: mean KL divergence of the quantised distribution from the original's, in nats. agreement:
    share of positions with the same greedy token. tokens: positions compared; 0 without a text.
    before, after: bytes of weights. slow: why it is not faster here; None if it is.
    """

    kind: str
    kl: float
    agreement: float
    tokens: int
    before: int
    after: int
    slow: str | None = None

    def __str__(self) -> str:
        size = f"{self.kind}: {self.before / 2**20:.1f} MiB of weights in {self.after / 2**20:.1f}"
        slow = f"; not quicker than the original here: {self.slow}" if self.slow else ""
        if not self.tokens:
            return size + slow
        agreed = f"the same greedy token at {self.agreement:.0%} of {self.tokens} positions"
        return f"{size}; from the original: mean KL {self.kl:.2g} nats, {agreed}{slow}"


def quantized(
    model: PreTrainedModel, kind: str, *, give_up: bool = False,
    ready: Mapping[str, QuantizedLinear] | None = None
) -> PreTrainedModel:
    """A shallow copy of `model` with quantised linear layers; all other parts are shared.

    kind: one of `KINDS`. give_up: release the originals layer by layer, which makes `model` itself
    unusable. ready: quantised layers made earlier, by name. A head tied to the embeddings gets its
    own weights. Formats are those of weights/block_formats.py. Raises BadInput where this is not
    possible.
    """
    if kind not in KINDS:
        raise BadInput(f"quantize was {kind!r}; choose one of {', '.join(KINDS)}")
    if is_quantized(model):
        raise BadInput(
            f"{_name(model)} is quantised already; do not ask for {kind}, or give the original"
        )
    if model.device.type != "cpu":
        return _by_torchao(shallow_copy(model), kind)
    if kind == "fp8":
        raise BadInput(
            "8-bit floats are emulated on a CPU, far slower than bfloat16; choose int8 or int4"
        )
    made = shallow_copy(model)
    owners = Counter(
        id(parameter) for module in made.modules() for parameter in module._parameters.values()
    )
    head, changed = made.get_output_embeddings(), False
    count = getattr(made.config.get_text_config(), "num_hidden_layers", None)
    for path, module in list(made.named_modules()):
        single = {
            name: layer for name, layer in module._modules.items()
            if layer is not None and _is_linear(layer) and not isinstance(module, PackedSlice)
        }
        for group in fusable_groups(single, _form):
            first = f"{path}.{next(iter(group))}".removeprefix(".")
            names = [f"{path}.{name}".removeprefix(".") for name in group]
            names = ["lm_head"] if head in group.values() else names
            whole = _quantised(group, names, kind, count) if ready is None else ready.get(first)
            if whole is None:
                continue
            changed = True
            widths = {name: _outputs(layer) for name, layer in group.items()}
            replace_modules(module, widths, whole)
            for layer in group.values() if give_up else ():
                if isinstance(layer, nn.Linear):
                    release(layer.weight, read_again=owners[id(layer.weight)] > 1)
    if not changed:
        raise BadInput(f"{_name(model)} has no linear layers to quantise; do not ask for {kind}")
    return made


def quantized_and_compared(
    model: PreTrainedModel, kind: str, text: Tensor | None, *, give_up: bool = False
) -> tuple[PreTrainedModel, Quantization]:
    """As `quantized`, with the cost on `text`, token ids [S]; None: no comparison. For an unchanged
    model from disk, both are kept on disk."""
    place = kept(model, kind, None if text is None else text.tolist())
    known = place.read()
    if known is not None:
        ready = {name: QuantizedLinear.restored(state) for name, state in known["layers"].items()}
        made = quantized(model, kind, give_up=give_up, ready=ready)
        return made, Quantization(*known["cost"])
    with place.save_if_slow() as facts:
        before, truth = weight_bytes(model), _log_probs(model, text)
        made = quantized(model, kind, give_up=give_up)
        after, log_probs = weight_bytes(made), _log_probs(made, text)
        kl, same = 0.0, 1.0
        if len(truth):
            kl = float((truth.exp() * (truth - log_probs)).sum(-1).mean())
            same = float((truth.argmax(-1) == log_probs.argmax(-1)).double().mean())
        slow = slow_because(kind, model.dtype) if made.device.type == "cpu" else None
        cost = Quantization(kind, kl, same, len(truth), before, after, slow)
        facts["cost"] = tuple(cost)
        facts["layers"] = {name.removesuffix(".whole"): module.state
                           for name, module in made.named_modules()
                           if isinstance(module, QuantizedLinear)}
    return made, cost


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer was quantised by us, by torchao, or by the checkpoint's own method.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return True
    weights = (getattr(module, "weight", None) for module in model.modules())
    ours = any(isinstance(module, QuantizedLinear) for module in model.modules())
    return ours or any(type(weight).__module__.startswith("torchao") for weight in weights)


def weight_bytes(model: nn.Module) -> int:
    """The bytes of a model's weights, including packed and quantised ones; shared ones count once.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    joint_bytes = sum(
        module.nbytes for module in model.modules() if isinstance(module, JointLinear)
    )
    return joint_bytes + bytes_of(*shared.values())


PASSAGE = """\
The lighthouse keeper climbed the stairs every evening at six, carrying a lamp, a book and a \
piece of bread. "Nobody
reads up there," said his daughter, "the wind turns the pages too fast." He laughed, because she \
was right.

By 1893 the station had been automated: the mechanism needed 12 kilograms of oil a week and one \
visit in three days.
Scientists from the University of Copenhagen measured the intensity of the light and published \
their results.

def mean(values):
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

Question: What is the capital of France?
Answer: The capital of France is Paris, a city of about two million people on the river Seine.
"""
"""What a quantised model is compared on."""


def _log_probs(model: PreTrainedModel, text: Tensor | None) -> Tensor:
    """[S, V] log-probabilities after every token of a text."""
    if text is None or not len(text):
        return torch.empty(0, 1, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=text[None].to(model.device), use_cache=False).logits
        return logits[0].float().log_softmax(-1)


def _quantised(
    layers: dict[str, Any], names: Sequence[str], kind: str, count: int | None
) -> QuantizedLinear | None:
    """One quantised layer to replace `layers`; None if they are too small."""
    weights = [_dense(layer) for layer in layers.values()]
    if sum(map(len, weights)) < SMALLEST:
        return None
    biases = [layer.bias.detach() for layer in layers.values() if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    return quantized_blocks(names, weights, bias, kind, count)


def _outputs(layer: Any) -> int:
    """The number of outputs of a layer."""
    return int(layer.nf if _is_conv1d(layer) else layer.out_features)


def _is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a plain matrix, packed or not, without hooks."""
    known = type(layer) in (nn.Linear, PackedLinear, PackedSlice)
    known |= type(layer).__name__ == "FalconLinear" or _is_conv1d(layer)
    return known and not (layer._forward_hooks or layer._forward_pre_hooks)


def _is_conv1d(layer: object) -> bool:
    """Whether a layer is transformers' Conv1D (GPT-2), whose weight is transposed."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _form(layer: Any) -> object:
    """The form of a layer; layers of the same form can be joined."""
    if isinstance(layer, PackedSlice):
        return id(layer.whole)
    return getattr(layer, "in_features", None), layer.bias is None


def _dense(layer: Any) -> Tensor:
    """The weight of a layer, [outputs, inputs]."""
    if isinstance(layer, (PackedLinear, PackedSlice)):
        return layer.dense()
    weight: Tensor = layer.weight.detach()
    return weight.t() if _is_conv1d(layer) else weight


def _by_torchao(made: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Quantise on an accelerator: torchao replaces the weights of the copy's layers."""
    head = made.get_output_embeddings()

    def body(layer: nn.Module, _: str) -> bool:
        return _is_linear(layer) and layer is not head and len(_dense(layer)) >= SMALLEST

    try:
        from torchao.quantization import quantize_

        quantize_(made, _torchao(kind), body)
        of_head = _torchao("int8" if kind == "int4" else kind)
        quantize_(made, of_head, lambda layer, _: layer is head and _is_linear(layer))
    except ModuleNotFoundError as error:
        missing = (error.name or "torchao").partition(".")[0]
        raise BadInput(
            f"{kind} on {made.device.type} needs {missing}: pip install {missing}"
        ) from error
    except (
        AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError
    ) as error:
        raise BadInput(
            f"torchao cannot quantise {_name(made)} to {kind} on {made.device}: {first_line(error)}"
        ) from error
    return made


def _torchao(kind: str) -> object:
    """torchao's configuration for a kind, with scales per token where activations are quantised."""
    from torchao import quantization as ao

    if kind == "int8":
        return ao.Int8DynamicActivationInt8WeightConfig()
    if kind == "int4":
        return ao.Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d")
    return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())


def _name(model: PreTrainedModel) -> str:
    return model.config.name_or_path or type(model).__name__
