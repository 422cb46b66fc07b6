"""Decoder layers of transformers' families, without a model, for drafters that have layers.

Knows transformers; knows nothing of how tokens are drafted.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache, tree_mask
from draftproof.cache.kv_layer import LayerShape
from draftproof.cache.layout import cache_argument
from draftproof.core.tree import TokenTree
from draftproof.errors import (
    DrafterMismatch,
    ModelNotFound,
    UnsupportedModel,
    first_line,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Mask = Callable[[int | None], Tensor | None]
"""The additive mask of a read for layers with this window."""
BENIGN = {
    "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version",
    "_name_or_path", "rope_theta", "rope_scaling", "use_cache", "_attn_implementation",
}  # fmt: skip
"""Settings of any checkpoint that say nothing about its layers, or are read by their family."""


class DraftLayers:
    """Decoder layers before weights are loaded, with their rotary embeddings and windows.

    norm: makes the family's norm of a given width, as a module without weights.
    """

    def __init__(
        self, config: PreTrainedConfig, layers: Sequence[nn.Module], rotary: nn.Module
    ) -> None:
        self.config, self.rotary, self.layers = config, rotary, list[Any](layers)
        window = getattr(config, "sliding_window", None)
        usual = "sliding_attention" if window else "full_attention"     # Mistral's have no types
        kinds = getattr(config, "layer_types", None) or [usual] * len(self.layers)
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]
        strange = set(kinds) - {"full_attention", "sliding_attention"}
        if strange or not all(hasattr(layer, "self_attn") for layer in self.layers):
            what = ", ".join(sorted(strange)) or "no attention"
            raise UnsupportedModel(f"the draft layers have {what}, which nothing here drafts with")
        self._cache_argument = cache_argument(inspect.signature(self.layers[0].forward).parameters)

    def norm(self, size: int) -> nn.Module:
        kind: type[nn.Module] = type(self.layers[0].input_layernorm)
        return kind(size, eps=self.config.rms_norm_eps)

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [B, N], in the dtype of `hidden`."""
        cos, sin = self.rotary(hidden, positions)
        return cos, sin

    def run(
        self, number: int, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Mask, cache: KVCache
    ) -> Tensor:
        """[B, N, H] a layer's output for `hidden`; keys and values are written to the cache."""
        out = self.layers[number](
            hidden, position_embeddings=angles, attention_mask=mask(self.windows[number]),
            **{self._cache_argument: _for_module(cache)},
        )  # fmt: skip
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def attend(
        self, number: int, inputs: Tensor, angles: tuple[Tensor, Tensor], mask: Mask, cache: KVCache
    ) -> Tensor:
        """[B, N, H] the output of a layer's attention alone for `inputs`."""
        out = self.layers[number].self_attn(
            hidden_states=inputs, position_embeddings=angles,
            attention_mask=mask(self.windows[number]), **{self._cache_argument: _for_module(cache)},
        )  # fmt: skip
        return cast(Tensor, out[0])

    def keys_values(
        self, number: int, inputs: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """[B, heads, N, D] the keys and values of a layer's attention for `inputs`."""
        attention = self.layers[number].self_attn
        heads = (*inputs.shape[:2], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(inputs).view(heads)).transpose(1, 2)
        cos, sin = (part[:, None] for part in angles)
        half = keys.shape[-1] // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
        values = attention.v_proj(inputs).view(heads).transpose(1, 2)
        return keys * cos + turned * sin, values

    def shapes(self, width: Callable[[int], int]) -> list[LayerShape]:
        """What each layer stores per token, where its attention reads `width(number)` numbers."""
        from transformers import DynamicCache

        shapes, cache = list[LayerShape](), DynamicCache()
        for number, layer in enumerate(self.layers):
            weight = next(layer.parameters())
            inputs = torch.zeros(1, 1, width(number), dtype=weight.dtype, device=weight.device)
            angles = self.angles(inputs, torch.zeros(1, 1, dtype=torch.int64, device=weight.device))
            self.attend(number, inputs, angles, lambda _: None, cast(Any, cache))
            keys, values = cache.layers[number].keys, cache.layers[number].values
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
        return shapes


def layers_of(settings: Mapping[str, object], known: Collection[str], name: str) -> DraftLayers:
    """Make the layers that a checkpoint's settings describe, by their `model_type`.

    known: settings that the caller reads. A setting that neither the caller nor the family reads is
    refused, since ignoring it would make drafts worse.
    """
    from transformers import AutoConfig, AutoModel

    kind = str(settings.get("model_type", "llama"))
    try:
        rest = {key: value for key, value in settings.items() if key != "model_type"}
        config = AutoConfig.for_model(kind, **rest)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            body = AutoModel.from_config(config)
        rotary = type(body.rotary_emb)(config)
    except Exception as error:                      # families raise errors of any class
        raise DrafterMismatch(
            f"the layers of {name} ({kind}) cannot be made: {first_line(error)}; fetch its "
            "config.json again"
        ) from error
    fields = {field.name for field in dataclasses.fields(type(config))}
    refuse_unknown(settings, {*fields, *known, *BENIGN}, name)
    return DraftLayers(config, body.layers, rotary)


def base_settings() -> set[str]:
    """Settings of every transformers configuration, which describe no layer."""
    from transformers import PreTrainedConfig

    return {field.name for field in dataclasses.fields(PreTrainedConfig)}


def refuse_unknown(settings: Mapping[str, object], known: Collection[str], name: str) -> None:
    """Refuse settings that nothing reads, unless their value switches a feature off."""
    for key, value in settings.items():
        off = value is None or value in (False, 0, "", [], {})
        if key not in known and not off:
            refuse_setting(key, value, name)


def refuse_setting(key: str, value: object, name: str) -> NoReturn:
    """Refuse a drafter whose settings need something that is not implemented."""
    raise DrafterMismatch(
        f"{name} has the setting {key} = {value!r:.60}, which is not known here; it would draft "
        "worse without it, and is not loaded"
    )


def layers_like(model: Any, count: int) -> DraftLayers:
    """Make layers of the same class as a model's last layer, with full attention, as in its
    multi-token prediction.

    Args:
        model: A transformers module, or a native model, whose configuration names the class.
        count: The number of layers.
    """
    module = hasattr(model, "get_decoder")
    body: Any = model.get_decoder() if module else None
    config = copy.deepcopy(body.config) if module else _config_of(model.config.settings)
    config.num_hidden_layers = count
    for name, value in (
        ("layer_types", ["full_attention"] * count), ("first_k_dense_replace", 0),
        ("mlp_only_layers", []), ("mlp_layer_types", None),
    ):  # fmt: skip
        if getattr(config, name, None) is not None:
            setattr(config, name, value if value is not None else ["sparse"] * count)
    config._attn_implementation = "sdpa"
    if module:
        kind = type(body.layers[-1])
        with torch.device("meta"):
            layers = [kind(config, number) for number in range(count)]
        return DraftLayers(config, layers, body.rotary_emb)
    from transformers import AutoModel

    with torch.device("meta"):
        body = AutoModel.from_config(config)
    return DraftLayers(config, body.layers, type(body.rotary_emb)(config))


def family_settings(model: Any, changed: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Every setting of a model's configuration, including defaults.

    Args:
        model: A transformers module or a native model.
        changed: Settings to replace.
    """
    native = hasattr(model.config, "settings")
    config = _config_of(model.config.settings) if native else model.config.get_text_config()
    result = dict(config.to_dict())
    if not changed:
        return result
    return dict(type(config)(**{**result, **changed}).to_dict())


def _config_of(settings: Mapping[str, object]) -> PreTrainedConfig:
    from transformers import AutoConfig

    rest = {key: value for key, value in settings.items() if key != "model_type"}
    return AutoConfig.for_model(str(settings.get("model_type", "llama")), **rest)


def sparse_mlp(config: PreTrainedConfig, settings: Mapping[str, object]) -> nn.Module:
    """A mixture of experts with a shared expert, as in Qwen3-Next, without weights.

    Args:
        config: The configuration of its layers.
        settings: `num_experts`, `num_experts_per_tok`, `moe_intermediate_size`,
            `shared_expert_intermediate_size` and `norm_topk_prob`.
    """
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size",
             "shared_expert_intermediate_size", "norm_topk_prob")  # fmt: skip
    stated = {name: settings[name] for name in names if settings.get(name) is not None}
    config = Qwen3NextConfig(hidden_size=config.hidden_size, hidden_act=config.hidden_act, **stated)
    with torch.device("meta"):
        return cast(nn.Module, Qwen3NextSparseMoeBlock(config))


def layer_count(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def checkpoint_folder(model: PreTrainedModel) -> Path:
    """The folder of a model's weights; raises ModelNotFound if it cannot be found."""
    from transformers.utils.hub import cached_file

    name = str(model.config.name_or_path)
    if name and Path(name).is_dir():
        return Path(name)
    try:
        path = cached_file(name, "config.json", local_files_only=True) if name else None
    except OSError:
        path = None
    if path is None:
        raise ModelNotFound(
            f"the folder that {name or 'the model'} was loaded from is not there; load the model "
            "from its checkpoint"
        )
    return Path(path).parent


def masks(
    tree: TokenTree, cache: KVCache, span: int, dtype: torch.dtype, first: int, hidden: int = 0
) -> Mask:
    """The masks of a read of the nodes `first:`, which hide all slots below `hidden`."""
    made: dict[int | None, Tensor] = {}

    def mask(window: int | None) -> Tensor:
        if window not in made:
            made[window] = tree_mask(tree, cache.lengths, span, dtype, first, window)
            made[window][..., :hidden] = torch.finfo(dtype).min
        return made[window]

    return mask


def _for_module(cache: object) -> object:
    """A cache in the form that transformers' layers take."""
    return cache.for_module() if isinstance(cache, KVCache) else cache
