"""Open the model that a configuration names, its tokenizer and its sampling defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.core.params import Sampling
from draftproof.core.progress import doing
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput
from draftproof.gguf.file import GGUFFile
from draftproof.model import loading
from draftproof.model.device import Device
from draftproof.model.generation_file import native_defaults
from draftproof.model.gguf_source import native_gguf
from draftproof.model.native_load import NativeFolder, native_folder
from draftproof.model.native_model import NativeModel
from draftproof.model.native_quantize import quantized_and_compared
from draftproof.model.parallel import ALONE, ProcessGroup, load_sharded
from draftproof.model.target import Target, target_of
from draftproof.tokenizer.codec import Codec
from draftproof.weights.packed_linear import pack_linears
from draftproof.weights.quantize import PASSAGE

if TYPE_CHECKING:
    from draftproof.model.loading import PreTrainedModel, PreTrainedTokenizerBase

NATIVE = "mtp"
"""The drafter in a model's own checkpoint."""


def native_source(model: str | Path | PreTrainedModel, config: EngineConfig) -> NativeFolder | None:
    """A model folder for our own forward, without transformers' class of the model.

    None if a transformers module is needed: to compile or record its forward, or for the drafter
    in the model's own checkpoint, whose layer has the class of the model's layers.
    """
    needs_module = config.compile or config.graphs or config.parallel is not None
    needs_module |= NATIVE in str(config.drafter).split("+")
    if needs_module or not isinstance(model, (str, Path)):
        return None
    dtype = loading.dtype_named(config.dtype)
    return native_folder(loading.resolve(model), dtype, config.device,
                         trust_remote_code=config.trust_remote_code)


def native_target(
    native: NativeFolder, config: EngineConfig, codec: Callable[[], Codec | None]
) -> Target:
    """The target of such a folder, quantised while it is read if that was asked for. codec: returns
    the tokenizer, which is needed last."""
    if config.quantize is None:
        return target_of(native.model(), kv_cache=config.kv_cache)
    doing(f"quantising to {config.quantize}")
    in_files = config.tokenizer is None                 # then these determine the text
    model, cost = quantized_and_compared(
        native.settings, native.source, config.quantize, lambda: passage_of(codec(), 1 << 20),
        dtype=native.dtype, name=native.name,
        text_key=PASSAGE if in_files else _ids(passage_of(codec(), 1 << 20)),
    )  # fmt: skip
    target = target_of(model, kv_cache=config.kv_cache)
    target.quantization = cost
    return target


def _ids(text: Tensor | None) -> list[int] | None:
    return None if text is None else text.tolist()


def passage_of(codec: Codec | None, context: int) -> Tensor | None:
    """The text that a quantised model is compared on; None without a tokenizer."""
    return torch.tensor(codec.encode(PASSAGE)[:context]) if codec is not None else None


def defaults_of(model: object, ignored: str | None) -> tuple[Sampling, tuple[int, ...]]:
    """The sampling defaults in a model's own generation_config, and its end tokens."""
    if isinstance(model, NativeModel):
        return native_defaults(model, ignored)
    from draftproof.model.generation_defaults import default_sampling

    return default_sampling(model, ignored), loading.stop_tokens(model)


def open_model(
    model: str | Path | PreTrainedModel, config: EngineConfig, *, packs: bool,
    group: ProcessGroup = ALONE,
) -> PreTrainedModel | NativeModel:
    """Load the model. One that is loaded here may be packed for speed; a model object that was
    passed in is never changed."""
    if not isinstance(model, (str, Path)):
        return model
    if config.parallel is not None and not group.is_single:
        return load_sharded(model, config.dtype, config.device, config.parallel, group)
    if (native := native_file(model, config)) is not None:
        return native
    trusted = config.trust_remote_code
    loaded = loading.load_model(model, config.dtype, config.device, trust_remote_code=trusted)
    if packs:
        pack_linears(loaded)
    return loaded


def codec_of(
    tokenizer: PreTrainedTokenizerBase | str | Path | None, model: str | Path | PreTrainedModel,
    loaded: PreTrainedModel | NativeModel, trust: bool
) -> Codec | None:
    """The tokenizer of the options, or of the model's folder; None if there is neither."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return Codec(tokenizer)
    where = tokenizer or (model if isinstance(model, (str, Path)) else loaded.config.name_or_path)
    opened = loading.load_tokenizer(where, trust_remote_code=trust) if str(where) else None
    if opened is None and tokenizer is not None:
        raise BadInput(f"there is no tokenizer in {tokenizer}")
    return Codec(opened, str(where)) if opened is not None else None


def native_file(model: str | Path, config: EngineConfig) -> NativeModel | None:
    """A GGUF file of a family that our forward reads, in the file's own format or in `dtype`.

    None if a transformers module is needed: on other devices, and to compile.
    """
    if not GGUFFile.recognises(model) or config.compile or config.graphs:
        return None
    device = Device.from_name(config.device)
    if config.quantize == "fp8" or device.torch_device.type != "cpu":
        return None
    dtype = loading.dtype_named(config.dtype)
    if dtype == torch.float64:
        return None
    return native_gguf(model, dtype or device.dtype_for(torch.bfloat16), unpack=dtype is not None)
