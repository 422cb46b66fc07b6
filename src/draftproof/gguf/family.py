"""Describes a model family for the reader of GGUF files; names that many families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from draftproof.errors import ModelNotFound
from draftproof.gguf.file import GGUFFile

GELU = "gelu_pytorch_tanh"
PARAMETERS = (
    "mlp.experts.", "feed_forward.experts.", "experts.", "mlp.gate.e_score", "router.scale",
    "router.per_expert_scale", "layer_scalar", "self_attn.sinks", "linear_attn.A_log",
    "linear_attn.dt_bias",
)  # fmt: skip
"""Prefixes of names that are parameters of their own, without `.weight`."""
UNSHIFTED = ("linear_attn.norm",)
"""Norms to which nothing is added in any architecture."""

Restorers = Callable[[dict[str, Any]], dict[str, Callable[..., Tensor]]]


class Family(NamedTuple):
    """The correspondence of a llama.cpp architecture and a transformers class.

    Attributes:
        architecture: The class.
        model_type: The model_type of its configuration.
        layer: Modules of a layer, and the tensors of a block. Tensors of `PARAMETERS` have full
            names; two joined by "+" are one parameter.
        permuted: Whether rows of queries and keys are stored in the order of pairs.
        shift: The number that was added to the weights of norms.
        more: Further settings.
        layer_of: The modules of one layer, where layers differ.
        restorers: Functions from the file's numbers to the checkpoint's, by module.
        norm: The names of the last norm in the checkpoint and in the file.
        outside: Optional modules outside of the layers, and their tensors.
    """

    architecture: str
    model_type: str
    layer: dict[str, str]
    permuted: bool = False
    shift: float = 0.0
    more: Callable[[GGUFFile, dict[str, Any]], None] | None = None
    layer_of: Callable[[GGUFFile, int], dict[str, str]] | None = None
    restorers: Restorers | None = None
    norm: tuple[str, str] = ("model.norm.weight", "output_norm.weight")
    outside: tuple[tuple[str, str], ...] = ()


def decimal(number: float) -> float:
    """The shortest decimal that rounds to this float32, which is the intended number."""
    return float(str(np.float32(number)))


def per_layer(file: GGUFFile, key: str, count: int) -> list[int]:
    """A setting for each layer; a file may have one number for all.

    Args:
        file: The file.
        key: The key in the metadata, after the architecture.
        count: The number of layers.
    """
    numbers = [int(number) for number in file.metadata.numbers(f"{file.architecture}.{key}")]
    if len(numbers) == 1:
        return numbers * count
    if len(numbers) < count:
        raise ModelNotFound(
            f"{file.path} has {len(numbers)} numbers for {key} and {count} layers; fetch it again"
        )
    return numbers[:count]


QKV = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
REST = {
    "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.down_proj": "ffn_down",
}  # fmt: skip
DENSE = {**QKV, **MLP, **REST}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_exps.weight+ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
SHARED_EXPERTS = {
    **EXPERTS, "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
CHOICE_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
"""What is added to the scores of experts when they are chosen."""
