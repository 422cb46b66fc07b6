"""Quantised checkpoints as transformers models: our own readers unpack the weights.

For families that our forward does not know, and for other dtypes than bfloat16. The packages and
accelerators that the methods require are not needed.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.weights.quantized_checkpoint import (
    QuantizedSource,
    check_stored_as_numbers,
    layout_of,
    quantization_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

log = logging.getLogger("draftproof")

DESCRIPTION = "_draftproof_weights"
"""Attribute of a module that says what became of its quantised weights."""


def unpacked_checkpoint(
    name: str, kind: type[_BaseAutoModelClass], config: PreTrainedConfig, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Load a quantised folder into transformers' class, with transformers' report on its weights.

    Args:
        name: The folder, or a hub id.
        kind: The class that loads it.
        config: Its configuration, from which the quantisation is removed.
        dtype: The dtype that weights are unpacked to; "auto" is bfloat16.

    Returns:
        None if it is not quantised, and for methods and classes that are left to transformers.

    Raises:
        UnsupportedModel: Its weights are codes, and nothing says how to read them.
    """
    folder = Path(name)
    settings = config.to_dict()
    stated = quantization_of(folder, settings)
    if stated is None:
        with suppress(ModelNotFound):                   # transformers reads other files
            check_stored_as_numbers(name, folder)
        return None
    layout, own_code = layout_of(name, stated), type(config) not in kind._model_mapping
    if layout is None or own_code:
        return None
    folder = _folder(name)
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    source = QuantizedSource(folder, wanted, layout, "dense")
    for key in ("quantization_config", "compression_config"):
        vars(config).pop(key, None)
    weights = {key: source.tensor(key).to(wanted) for key in source}
    loaded, report = _class_of(kind, config).from_pretrained(
        None, config=config, state_dict=weights, dtype=wanted, output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    loaded.config.name_or_path = name
    method = stated.get("quant_method")
    what = (f"quantised with {method} and unpacked to {str(wanted).removeprefix('torch.')}, which "
            f"takes more memory and is slower: {type(loaded).__name__} is run by transformers")
    setattr(loaded, DESCRIPTION, what)
    log.warning("note: %s is %s", name, what)
    return loaded, report


def describe(model: PreTrainedModel, stated: object) -> None:
    """Note on a module how transformers loaded the quantised weights of its checkpoint.

    Args:
        model: The module that transformers loaded.
        stated: The quantization_config of its checkpoint.
    """
    values = stated if isinstance(stated, dict) else vars(stated)
    method = values.get("quant_method") or "bitsandbytes"
    dtype = str(model.dtype).removeprefix("torch.")
    done = (f"unpacked to {dtype} by transformers, which takes more memory and is slower"
            if getattr(model, "hf_quantizer", None) is None
            else "multiplied by transformers, which is slow on a CPU")
    setattr(model, DESCRIPTION, f"quantised with {getattr(method, 'value', method)} and {done}: "
                                "our kernels do not read this format")


def described(model: object) -> str | None:
    """How the quantised weights of a transformers module were loaded; None if it has none."""
    text: str | None = getattr(model, DESCRIPTION, None)
    return text


def _class_of(kind: type[_BaseAutoModelClass], config: PreTrainedConfig) -> Any:
    """The transformers class that `kind` makes for a configuration."""
    classes = kind._model_mapping[type(config)]
    if not isinstance(classes, (list, tuple)):
        return classes
    named = {choice.__name__: choice for choice in classes}
    return named.get((config.architectures or [""])[0], classes[0])


def _folder(name: str) -> Path:
    """The folder of a checkpoint's files, fetched from the hub if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    kinds = ["*.json", "*.safetensors"]
    folder = Path(snapshot_download(name, allow_patterns=kinds))
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(f"{name} has no safetensors files, in which alone quantised "
                               "checkpoints are read")
    return folder
