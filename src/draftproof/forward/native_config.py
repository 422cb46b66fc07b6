"""Reads the native families' configurations in Hugging Face's format without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from draftproof.forward.rope import ROPE_TYPES, RopeParameters

GELU = "gelu_pytorch_tanh"
_LLAMA: dict[str, object] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None,
    "attention_bias": False, "mlp_bias": False, "rope_theta": 1e4, "sliding_window": None,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_QWEN: dict[str, object] = {
    **_LLAMA, "max_position_embeddings": 32768, "num_key_value_heads": 32,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_MISTRAL: dict[str, object] = {
    **_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, object]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "phi3": {
        **_LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "eos_token_id": 32000, "pad_token_id": 32000,
    },
    "granite": {
        **_LLAMA, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "smollm3": {
        **_LLAMA, "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6,
        "tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4,
        "use_sliding_window": False, "bos_token_id": 128000, "eos_token_id": 128001,
        "pad_token_id": 128004,
    },
    "seed_oss": {
        **_LLAMA, "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True, "attention_out_bias": False, "bos_token_id": 0,
        "pad_token_id": 1,
    },
    "gemma3_text": {
        **_LLAMA, "hidden_activation": GELU, "max_position_embeddings": 131072, "head_dim": 256,
        "num_key_value_heads": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "final_logit_softcapping": None, "attn_logit_softcapping": None,
        "use_bidirectional_attention": False, "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0,
    },
}  # fmt: skip
"""What a configuration of each model type may leave out, as in transformers' classes."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3", "GraniteForCausalLM": "granite", "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss", "Gemma3ForCausalLM": "gemma3_text",
}  # fmt: skip
"""Classes of transformers whose forward is ours as well, and their model types."""
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads")
_LOCAL_THETA = 1e4
_GEMMA_PATTERN = 6


class NativeConfig:
    """The completed configuration of a native family; attributes are named as in config.json.

    Attributes:
        settings: The dictionary it was made from, as in the file.
        name_or_path: Where the model was read from.
        layer_types: The kind of each layer.
        rope_parameters: The rope parameters of each kind of layer, or of all under "".
    """

    is_encoder_decoder = False
    layer_types: list[str]
    rope_parameters: dict[str, RopeParameters]
    name_or_path: str
    head_dim: int
    num_key_value_heads: int
    hidden_act: str
    sliding_window: int | None
    no_rope_layers: Any

    def __init__(self, settings: Mapping[str, Any], name: str = "") -> None:
        self.settings, self.name_or_path = dict(settings), name
        values = {**DEFAULTS[settings["model_type"]], **settings}
        values.pop("rope_scaling", None)
        vars(self).update(deepcopy(values))
        heads = self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // heads
        self.num_key_value_heads = self.num_key_value_heads or heads
        self.hidden_act = getattr(self, "hidden_activation", None) or self.hidden_act
        self.layer_types = _layer_types(self)
        self.rope_parameters = _rope_parameters(self, settings)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this configuration has no {name}")

    def get_text_config(self, decoder: bool = False) -> NativeConfig:
        """Return this configuration: the native families read only text."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The dictionary it was made from."""
        return deepcopy(self.settings)

    def window_of(self, layer: int) -> int | None:
        """How many positions back a layer sees; None: all."""
        sliding = self.layer_types[layer] == "sliding_attention"
        window: int | None = self.sliding_window if sliding else None
        return window

    def rope_of(self, layer: int) -> tuple[str | None, RopeParameters | None]:
        """A layer's rope: its name, if there are several, and its parameters; None without rope."""
        if self.model_type == "smollm3" and not self.no_rope_layers[layer]:
            return None, None
        kind = self.layer_types[layer] if self.model_type == "gemma3_text" else None
        return kind, self.rope_parameters[kind or ""]


def read_config(folder: Path) -> dict[str, Any] | None:
    """Read the config.json of a folder; None if there is none or it cannot be read."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def why_not_native(settings: Mapping[str, Any]) -> str | None:
    """The reason why a configuration is not built natively; None if it is.

    Args:
        settings: A configuration in Hugging Face's format.
    """
    architecture = (settings.get("architectures") or [""])[0]
    kind = ARCHITECTURES.get(architecture)
    if kind is None or settings.get("model_type") != kind:
        name = architecture or settings.get("model_type")
        return f"{name} is none of the families that our kernels read whole"
    lacking = [key for key in REQUIRED if not isinstance(settings.get(key), int)]
    if lacking:
        return f"its configuration has no {lacking[0]}"
    if settings.get("quantization_config") is not None:
        return "its checkpoint is quantised"
    config = NativeConfig(settings)
    odd = {
        "hidden_act": config.hidden_act not in ("silu", GELU),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None) is not None,
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", False),
        "layer_types": kind == "mistral" and "layer_types" in settings,
        "sliding_window": kind in ("llama", "granite", "seed_oss") and config.sliding_window,
        "rope_parameters": any(kind.get("rope_type", "default") not in ROPE_TYPES
                               for kind in config.rope_parameters.values()),
    }
    strange = next((name for name, is_odd in odd.items() if is_odd), None)
    return None if strange is None else f"its {strange} is not known to our forward"


def _layer_types(config: NativeConfig) -> list[str]:
    """The kind of each layer, for configurations that do not list them."""
    count, kind = config.num_hidden_layers, config.model_type
    if kind in ("qwen2", "qwen3") and not config.use_sliding_window:
        config.sliding_window = None
    if kind == "smollm3" and config.no_rope_layers is None:
        interval = config.no_rope_layer_interval
        config.no_rope_layers = [int((layer + 1) % interval != 0) for layer in range(count)]
    listed = config.settings.get("layer_types")
    if listed is not None and kind != "mistral":
        return list(listed)
    window = config.sliding_window
    slides = [window is not None] * count
    if kind in ("qwen2", "qwen3"):
        slides = [window is not None and layer >= config.max_window_layers
                  for layer in range(count)]
    elif kind == "smollm3":
        on = config.use_sliding_window and window is not None
        slides = [on and not config.no_rope_layers[layer] for layer in range(count)]
    elif kind == "gemma3_text":
        pattern = config.settings.get("sliding_window_pattern", _GEMMA_PATTERN)
        slides = [bool((layer + 1) % pattern) for layer in range(count)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rope_parameters(
    config: NativeConfig, settings: Mapping[str, Any]
) -> dict[str, RopeParameters]:
    """Complete rope parameters by kind of layer ("" for all), from the new and older formats."""
    if config.model_type == "gemma3_text":
        kinds: dict[str, RopeParameters] = deepcopy(settings.get("rope_parameters") or {})
        full: RopeParameters = kinds.get("full_attention") or {}
        local: RopeParameters = kinds.get("sliding_attention") or {}
        scaling: RopeParameters | None = settings.get("rope_scaling")
        full |= scaling or {}
        full.setdefault("rope_theta", settings.get("rope_theta", 1e6))
        local.setdefault("rope_theta", settings.get("rope_local_base_freq", _LOCAL_THETA))
        return {"full_attention": _completed(config, full),
                "sliding_attention": _completed(config, local)}
    stated: RopeParameters | None = settings.get("rope_scaling") or settings.get("rope_parameters")
    return {"": _completed(config, deepcopy(stated or {}))}


def _completed(config: NativeConfig, rope: RopeParameters) -> RopeParameters:
    """Add the type, theta and original context to rope parameters."""
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.rope_theta)
    partial = config.settings.get("partial_rotary_factor")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if kind in ("llama3", "yarn", "longrope", "su"):
        original = getattr(config, "original_max_position_embeddings", None)
        if original is not None:
            rope["original_max_position_embeddings"] = original
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if config.model_type == "phi3" and kind in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    return rope
