"""A model built from a configuration and a source of tensors, without its transformers class.

Describes how the families differ: which matrices have a bias or are stored as one, whether heads
are normed, and Gemma's additional norms.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.cache.kv_layer import LayerShape
from draftproof.cache.layout import Layout, context_of
from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.forward.decoder_layers import AttentionKind, Decoder, DecoderLayer, Linear, rms_norm
from draftproof.forward.fast_forward import FastForward
from draftproof.forward.native_config import GELU, NativeConfig, why_not_native
from draftproof.forward.rope import RotaryTable
from draftproof.model.facts import Facts
from draftproof.model.generation_file import read_generation
from draftproof.weights.packed_linear import JointLinear
from draftproof.weights.tensor_source import TensorSource

log = logging.getLogger("draftproof")

EMBEDDING = "model.embed_tokens"


class NativeModel:
    """A decoder of a known family that only our own forward reads.

    It takes the place of a transformers module (`target.model`).

    Args:
        settings: The configuration in Hugging Face's format.
        source: The source of the weights.
        dtype: The dtype of activations, keys and values.
        name: The folder or file that it was read from.

    Attributes:
        config: The completed configuration, with attributes named as in config.json.
        forward: The forward over its layers.
        named_linears: Every packed matrix, by the name of its first module.

    Raises:
        UnsupportedModel: Our forward does not know the family or a setting.
    """

    device = torch.device("cpu")
    training = False

    def __init__(
        self, settings: dict[str, Any], source: TensorSource, *, dtype: torch.dtype, name: str = ""
    ) -> None:
        if (why := why_not_native(settings)) is not None:
            raise UnsupportedModel(f"{name or 'the model'} cannot be built natively: {why}")
        self.config, self.source, self.dtype = NativeConfig(settings, name), source, dtype
        builder = DecoderBuilder(self.config, source, dtype)
        self.decoder, self.named_linears = builder.decoder(), builder.linears
        self.forward = FastForward(self.decoder)

    @property
    def name(self) -> str:
        return self.config.name_or_path or str(self.config.architectures[0])

    @property
    def architecture(self) -> str:
        """The transformers class that the configuration names."""
        return str(self.config.architectures[0])

    @property
    def facts(self) -> Facts:
        """The facts of the target, known without a check."""
        layer = self.decoder.layers[0]
        shape = LayerShape(layer.key_heads, self.decoder.head_dim, self.decoder.head_dim)
        count = len(self.decoder.layers)
        windows = {kind: self.config.window_of(number)
                   for number, kind in enumerate(self.config.layer_types)}
        layout = Layout([shape] * count, [()] * count, windows, self.vocab_size, self.dtype)
        checked = "built by draftproof; its tests compare the family with transformers' forward"
        return Facts(layout, reads_trees=True, fast=True, fused=self.forward.fused is not None,
                     checked=checked)

    @cached_property
    def generation_config(self) -> Any:
        """The folder's generation_config.json; None where there is none.

        It is a transformers.GenerationConfig only where a setting needs transformers to read it.
        """
        folder = Path(self.config.name_or_path)
        if (settings := read_generation(folder)) is not None:
            return SimpleNamespace(**{"eos_token_id": None, "do_sample": None, **settings})
        if not (folder / "generation_config.json").is_file():
            return None
        from transformers import GenerationConfig

        return GenerationConfig.from_pretrained(folder)

    @property
    def head(self) -> JointLinear:
        """The layer that computes logits."""
        return list(self.named_linears.values())[-1]

    @property
    def vocab_size(self) -> int:
        """The number of logits per token."""
        return self.head.out_features

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes; embeddings tied to the head count once."""
        table = self.decoder.embed.weight
        vectors = sum(weight.nbytes for layer in self.decoder.layers for weight in layer.weights
                      if weight is not None)
        shared = self.config.tie_word_embeddings and self.source.kind is None
        embeddings = 0 if table is None or shared else table.nbytes
        return sum(linear.nbytes for linear in self.named_linears.values()) + vectors + embeddings

    @property
    def weight_count(self) -> int:
        """The count of numbers in the matrices that are multiplied for each token."""
        return sum(
            linear.in_features * linear.out_features for linear in self.named_linears.values()
        )

    def modules(self) -> Iterator[JointLinear]:
        """Every packed matrix, like `modules` of a torch module."""
        return iter(self.named_linears.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unpacked tensors: the embeddings, if they are dense, and the final norm."""
        if self.decoder.embed.weight is not None:
            yield f"{EMBEDDING}.weight", self.decoder.embed.weight
        yield "model.norm.weight", self.source.tensor("model.norm.weight")

    def parameters(self) -> Iterator[Tensor]:
        """The tensors of `named_parameters`, without names."""
        return (weight for _, weight in self.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """No tensors: computed tables belong to the forward."""
        return iter(())

    def first_layers(self, count: int) -> NativeModel:
        """The same model with only its first `count` layers; weights are shared."""
        other = object.__new__(NativeModel)
        vars(other).update(vars(self))
        settings = {**self.config.settings, "num_hidden_layers": count}
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][:count]
        other.config = NativeConfig(settings, self.config.name_or_path)
        fields = {**vars(self.decoder), "layers": self.decoder.layers[:count]}
        other.decoder = Decoder(**fields)
        linears = list(self.named_linears.items())
        other.named_linears = dict([*linears[: 4 * count], linears[-1]])
        other.forward = self.forward.with_decoder(other.decoder)
        return other


class _Names(NamedTuple):
    """The modules of a layer, grouped by those that are multiplied as one."""

    qkv: Sequence[str]
    gate_up: Sequence[str]


SEPARATE = _Names(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
)
JOINED = _Names(("self_attn.qkv_proj",), ("mlp.gate_up_proj",))


class DecoderBuilder:
    """Builds the parts of one decoder, layer by layer."""

    def __init__(
        self, config: NativeConfig, source: TensorSource, dtype: torch.dtype
    ) -> None:
        self.config, self.source, self.dtype = config, source, dtype
        self.linears = dict[str, JointLinear]()
        kind = config.model_type
        self.names = JOINED if kind == "phi3" else SEPARATE
        self.gemma, self.norms_heads = kind == "gemma3_text", kind in ("qwen3", "gemma3_text")
        biased = kind not in ("mistral", "ministral", "phi3") and config.attention_bias
        self.qkv_bias = kind == "qwen2" or bool(biased)
        self.output_bias = bool(biased) and kind != "qwen2"
        if kind == "seed_oss":
            self.output_bias = bool(config.attention_out_bias)
        self.mlp_bias = kind in ("llama", "granite", "smollm3", "seed_oss") and config.mlp_bias
        self.tables = dict[str | None, RotaryTable]()
        self.kinds = list[AttentionKind]()

    def decoder(self) -> Decoder:
        config = self.config
        embed = self.source.embedding(EMBEDDING)
        layers = list(self.layers())
        norm_weight = self._norm_weight("model.norm")
        logits = self.head()
        return Decoder(
            dtype=self.dtype, device=torch.device("cpu"), hidden_size=config.hidden_size,
            head_dim=config.head_dim, context=context_of(config), embed=embed,
            embed_scale=self._embed_scale(),
            residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
            gelu=config.hidden_act == GELU, norm=self._norm(norm_weight),
            norm_weight=norm_weight, epsilon=config.rms_norm_eps, kinds=self.kinds, layers=layers,
            head=logits.forward, native_head=logits.native, angles=partial(_angles, self.tables),
            dtypes={self.dtype},
        )  # fmt: skip

    def head(self) -> JointLinear:
        """The layer that computes logits, tied to the embeddings or not."""
        name = "lm_head" if not self.config.tie_word_embeddings else EMBEDDING
        return self._linear([name], False, self.config.hidden_size, self.config.vocab_size)

    def layers(self) -> Iterator[DecoderLayer]:
        """Build the layers in order."""
        for number in range(self.config.num_hidden_layers):
            yield self._layer(number)

    def _layer(self, number: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{number}."
        names = [[prefix + name for name in group] for group in self.names]
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        width = config.head_dim * heads
        qkv = self._linear(
            names[0], self.qkv_bias, hidden, width + 2 * config.head_dim * key_heads
        )
        output = self._linear([prefix + "self_attn.o_proj"], self.output_bias, width, hidden)
        gate_up = self._linear(names[1], self.mlp_bias, hidden, 2 * inner)
        down = self._linear([prefix + "mlp.down_proj"], self.mlp_bias, inner, hidden)
        middle = "post_attention_layernorm"
        weights = {
            "input": self._norm_weight(prefix + "input_layernorm"),
            "mlp": self._norm_weight(prefix + (
                "pre_feedforward_layernorm" if self.gemma else middle)),
            "query": self._norm_weight(prefix + "self_attn.q_norm") if self.norms_heads else None,
            "key": self._norm_weight(prefix + "self_attn.k_norm") if self.norms_heads else None,
            "attended": self._norm_weight(prefix + middle) if self.gemma else None,
            "fed": self._norm_weight(prefix + "post_feedforward_layernorm")
            if self.gemma else None,
        }
        norm = self._norm
        return DecoderLayer(
            input_norm=norm(weights["input"]), qkv=qkv.forward,
            head_norm=self._head_norm(weights["query"], weights["key"]), output=output.forward,
            post_attention=norm(weights["attended"]) if self.gemma else None,
            mlp_norm=norm(weights["mlp"]), gate_up=gate_up.forward, down=down.forward,
            post_mlp=norm(weights["fed"]) if self.gemma else None, heads=heads,
            key_heads=key_heads, inner_size=config.intermediate_size, scale=self._scale(),
            kind=self._kind(number), weights=tuple(weights.values()),
            natives=(qkv.native, output.native, gate_up.native, down.native),
        )  # fmt: skip

    def _kind(self, number: int) -> int:
        """The index of a layer's kind of attention, which is added if it is new."""
        config = self.config
        name, rope = config.rope_of(number)
        rotated = 0
        if rope is not None:
            if name not in self.tables:
                self.tables[name] = RotaryTable.of(
                    rope, config.head_dim, config.max_position_embeddings
                )
            rotated = 2 * len(self.tables[name].inv_freq)
        kind = AttentionKind(name, rotated, config.window_of(number))
        if kind not in self.kinds:
            self.kinds.append(kind)
        return self.kinds.index(kind)

    def _linear(
        self, names: Sequence[str], bias: bool, inputs: int, outputs: int
    ) -> JointLinear:
        layer = self.source.linear(names, bias)
        if (layer.in_features, layer.out_features) != (inputs, outputs):
            raise ModelNotFound(
                f"{names[0]} of {self.config.name_or_path} has {layer.out_features} outputs of "
                f"{layer.in_features} inputs, and its configuration says {outputs} of {inputs}; "
                "fetch it again"
            )
        self.linears[names[0]] = layer
        return layer

    def _norm_weight(self, name: str) -> Tensor:
        """[.] the float32 factors of a norm; Gemma stores them less one."""
        weight = self.source.tensor(f"{name}.weight").float()
        return 1.0 + weight if self.gemma else weight

    def _norm(self, weight: Tensor | None) -> Linear:
        assert weight is not None
        return rms_norm(weight, self.dtype, len(weight), self.config.rms_norm_eps)

    def _head_norm(self, query: Tensor | None, key: Tensor | None) -> Linear | None:
        """The norms of query and key heads as one norm, each head with its own kind's weight."""
        if query is None or key is None:
            return None
        heads, key_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        weight = torch.cat([query.expand(heads, -1), key.expand(key_heads, -1)])[:, None]
        return rms_norm(weight, self.dtype, weight.shape[-1], self.config.rms_norm_eps)

    def _scale(self) -> float:
        """The factor of the products of queries and keys."""
        config = self.config
        if config.model_type == "granite":
            return float(config.attention_multiplier)
        return float((config.query_pre_attn_scalar if self.gemma else config.head_dim) ** -0.5)

    def _embed_scale(self) -> float:
        """The factor of the embeddings; Gemma's is rounded like the embeddings."""
        if self.gemma:
            return float(torch.tensor(self.config.hidden_size**0.5).to(self.dtype))
        return float(getattr(self.config, "embedding_multiplier", 1.0))


def _angles(
    tables: dict[str | None, RotaryTable], kind: AttentionKind, positions: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not kind.rotary_dim:
        nothing = torch.empty(*positions.shape, 0, dtype=dtype)
        return nothing, nothing
    return tables[kind.rope].angles(positions, dtype)
