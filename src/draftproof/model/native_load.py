"""Decides which folders are read natively, and reads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from draftproof.errors import ModelNotFound
from draftproof.forward.native_config import read_config, why_not_native
from draftproof.model.device import Device
from draftproof.model.native_model import EMBEDDING, NativeModel
from draftproof.model.native_quantize import KeptSource
from draftproof.native.kernels import kernels
from draftproof.weights.disk_cache import kept_of_files
from draftproof.weights.quantized_checkpoint import (
    QuantizedSource,
    check_stored_as_numbers,
    layout_of,
    quantization_of,
)
from draftproof.weights.quantized_linear import QuantizedLinear
from draftproof.weights.tensor_source import SafetensorsSource, TensorSource

log = logging.getLogger("draftproof")

QUANTIZATION = ("quantization_config", "compression_config")
"""Settings that say how a checkpoint is quantised."""
IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Ends of the names of tensors that need not be read: tables computed again, and tied heads."""


class NativeFolder(NamedTuple):
    """A folder that is read natively.

    Attributes:
        name: The folder.
        settings: Its config.json.
        source: Its weights.
        dtype: The dtype of computation.
    """

    name: str
    settings: dict[str, object]
    source: SafetensorsSource
    dtype: torch.dtype

    def model(self) -> NativeModel:
        """The model with weights in `dtype`, or in blocks for a quantised checkpoint; reports
        unused tensors.

        Raises:
            ModelNotFound: Tensors are missing, or have a wrong size.
        """
        made = self._quantized() if isinstance(self.source, QuantizedSource) else self._built(
            self.source)
        unused = [name for name in self.source.unread if not name.endswith(IGNORED)]
        if unused and not isinstance(made.source, KeptSource):
            log.warning("note: %s of %s: unexpected in %s, and not used", _several(unused),
                        self.name, made.architecture)
        return made

    def _built(self, source: TensorSource) -> NativeModel:
        return NativeModel(self.settings, source, dtype=self.dtype, name=self.name)

    def _quantized(self) -> NativeModel:
        """The model of a quantised checkpoint; its blocks are kept in the cache folder."""
        source = self.source
        assert isinstance(source, QuantizedSource)
        place = kept_of_files(self.name, "checkpoint", str(self.dtype), str(source.layout))
        known = place.read()
        if known is not None:
            source.stored_as.update(known["stored_as"])
            source.unpacked_because.update(known["unpacked_because"])
            return self._built(KeptSource(source, known["layers"]))
        with place.save_if_slow() as facts:
            made = self._built(source)
            facts["stored_as"] = dict(source.stored_as)
            facts["unpacked_because"] = source.unpacked_because
            facts["layers"] = {name: layer.state for name, layer in made.named_linears.items()
                               if isinstance(layer, QuantizedLinear)}
        return made


def native_folder(
    name: str, dtype: torch.dtype | None, device: str | None, *, trust_remote_code: bool = False
) -> NativeFolder | None:
    """A folder of safetensors that our own forward can read; None if transformers has to.

    The families of `native_config` are native in bfloat16 on a CPU with kernels, if the folder has
    the usual files.

    Args:
        name: The folder.
        dtype: The user's dtype; None: the checkpoint's own.
        device: The user's device; None: the best one available.
        trust_remote_code: Whether to run code in the folder, which only transformers does.
    """
    folder = Path(name)
    settings = read_config(folder) if folder.is_dir() else None
    if settings is None or kernels() is None:
        return None
    layout, stated = None, quantization_of(folder, settings)
    if stated is not None:
        layout = layout_of(name, stated)
        settings = {key: value for key, value in settings.items() if key not in QUANTIZATION}
    if why_not_native(settings) is not None or (stated is not None and layout is None):
        return None
    if (folder / "adapter_config.json").is_file() or (trust_remote_code and "auto_map" in settings):
        return None
    place = Device.from_name(device)
    stored = settings.get("dtype", settings.get("torch_dtype"))
    if dtype is None and (stored == "bfloat16" or layout is not None):
        dtype = place.dtype_for(torch.bfloat16)
    if dtype != torch.bfloat16 or place.torch_device.type != "cpu":
        return None
    try:
        source = (SafetensorsSource(folder, dtype) if layout is None
                  else QuantizedSource(folder, dtype, layout))
        if layout is None:
            check_stored_as_numbers(name, folder)
    except ModelNotFound:
        return None
    return NativeFolder(name, settings, source, dtype) if f"{EMBEDDING}.weight" in source else None


def _several(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
