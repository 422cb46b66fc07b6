"""Loads models and tokenizers from folders, hub ids and objects, and reports failures in one
sentence. Knows transformers."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from draftproof.errors import BadInput, DraftproofError, ModelNotFound, UnsupportedModel, first_line
from draftproof.gguf.config import model_of
from draftproof.gguf.file import GGUFFile
from draftproof.model.device import Device
from draftproof.model.end_tokens import stop_tokens as stop_tokens
from draftproof.model.names import (
    check_model,
    embedded_folder,
    embedded_names,
    not_on_the_hub,
)  # fmt: skip
from draftproof.model.names import resolve as resolve
from draftproof.model.quantized_model import describe, unpacked_checkpoint
from draftproof.tokenizer.fast_tokenizer import FastTokenizer, gguf_tokenizer
from draftproof.tokenizer.folder_tokenizer import folder_tokenizer
from draftproof.weights.disk_cache import record_source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel  # for the folders below
    from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
    from transformers.distributed import DistributedConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

log = logging.getLogger("draftproof")

def embedded(name: str = "demo") -> Path:
    """The folder of an embedded model ("demo" or "demo-draft"), which plain transformers can also
    load.

    Args:
        name: A name in `draftproof.embedded_names`, such as "demo".

    Returns:
        Its folder.
    """
    folder = embedded_folder(name)
    if folder is None:
        known = ", ".join(embedded_names())
        raise ModelNotFound(f"there is no embedded model {name!r}; there are: {known}")
    return folder


def load_model(
    model: str | Path, dtype: str | torch.dtype | None = None, device: str | None = None,
    sharding: DistributedConfig | None = None, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal LM, an encoder-decoder or the text part of an image-text model for evaluation.

    dtype None: the checkpoint's own, or float32 where bfloat16 is not native. sharding: a
    transformers DistributedConfig, by which each rank loads its part and keeps it in place.
    Missing weights are an error, unused ones a warning.
    """
    from transformers import AutoConfig

    name = resolve(model)
    with _clear_errors(name), _quiet(Path(name).exists()):
        if Path(name, "adapter_config.json").is_file():
            raise UnsupportedModel(
                f"{name} holds an adapter (LoRA) that is not merged into its model; merge it with "
                "peft's merge_and_unload, save that, and name its folder"
            )
        place, wanted = Device.from_name(device), dtype_named(dtype) or "auto"
        place.check_dtype(wanted if isinstance(wanted, torch.dtype) else torch.float32)
        if GGUFFile.recognises(name):
            if sharding is not None:
                raise UnsupportedModel(f"{name} is a GGUF file; only folders are sharded")
            return _load_gguf(name, wanted, place)
        options: dict[str, object] = {"trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(name, **options)
        kind = _kind_of(name, config)
        stated = getattr(config, "quantization_config", None)
        if stated is not None:
            _check_quantiser(name, stated)
            if util.find_spec("accelerate"):
                options["device_map"] = {"": str(place.torch_device)}
        if sharding is not None:
            options |= {"distributed_config": sharding, "device_map": None}
        on_cpu = place.torch_device.type == "cpu" and sharding is None
        to = wanted if dtype is not None else place.dtype_for(torch.bfloat16)
        unpacked = unpacked_checkpoint(name, kind, config, to) if on_cpu else None
        loaded, report = unpacked or kind.from_pretrained(
            name, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        if stated is not None and unpacked is None:
            describe(loaded, stated)
        _check_report(name, type(loaded).__name__, report)
        if sharding is None:
            _drop_towers(loaded)
        # it must not be moved or cast
        if sharding is not None or getattr(loaded, "hf_quantizer", None) is not None:
            return loaded.eval()
        if dtype is None and loaded.dtype != place.dtype_for(loaded.dtype):
            loaded = loaded.to(place.dtype_for(loaded.dtype))
        loaded = loaded.to(place.torch_device).eval()
        record_source(loaded, name)
        return loaded


def load_config(model: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model, without its weights."""
    from transformers import AutoConfig

    name = resolve(model)
    with _clear_errors(name):
        if not GGUFFile.recognises(name):
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        from draftproof.model.gguf_model import config_object, transformers_source

        file = GGUFFile.open(name)
        described = model_of(file)
        if described is not None:
            return config_object(described)
        source = transformers_source(file)
        return AutoConfig.from_pretrained(file.path.parent, gguf_file=source["gguf_file"])


def _load_gguf(name: str, dtype: torch.dtype | str, place: Device) -> PreTrainedModel:
    """The unpacked model of a GGUF file; transformers' reader reads architectures that only it
    knows."""
    from draftproof.model.gguf_model import transformers_source, unpacked

    file = GGUFFile.open(name)
    wanted = place.dtype_for(torch.bfloat16) if isinstance(dtype, str) else dtype
    described = model_of(file)
    if described is not None:
        loaded = unpacked(file, described, wanted)
    else:
        from transformers import AutoConfig

        source, folder = transformers_source(file), str(file.path.parent)
        kind = _kind_of(name, AutoConfig.from_pretrained(folder, gguf_file=source["gguf_file"]))
        loaded, report = kind.from_pretrained(
            folder, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, **source
        )
        _check_report(name, type(loaded).__name__, report)
        _drop_towers(loaded)
        vars(loaded).pop("hf_quantizer", None)              # it is an ordinary model from here on
        vars(loaded.config).pop("quantization_config", None)
        loaded.config.name_or_path = name
    loaded = loaded.to(place.torch_device).eval()
    record_source(loaded, name)
    return loaded


def load_tokenizer(
    model: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | FastTokenizer | None:
    """The tokenizer from a model's folder or GGUF file; None if there is none."""
    name = resolve(model)
    if GGUFFile.recognises(name):
        return gguf_tokenizer(name)
    if trust_remote_code:
        return _load_tokenizer(name, trust_remote_code=True)
    tokenizer: PreTrainedTokenizerBase | None = folder_tokenizer(
        name, lambda: _load_tokenizer(name, trust_remote_code=False)
    )
    return tokenizer


def _load_tokenizer(name: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Load a transformers tokenizer."""
    from transformers import AutoTokenizer

    try:
        with _quiet(True):
            return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    # tokenizers raises no more specific class
    except Exception as error:
        files = ("tokenizer.json", "tokenizer_config.json")
        if Path(name).is_file() or any(Path(name, file).is_file() for file in files):
            raise ModelNotFound(
                f"the tokenizer in {name} cannot be read: {first_line(error)}"
            ) from error
        return None


def _kind_of(name: str, config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
    """The class that loads a model of this configuration; refuses models that write no text."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    if is_encoder_decoder:
        kinds = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    elif "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    for kind in kinds:
        if type(config) in kind._model_mapping:
            return kind
    kind = "encoder-decoder that writes text" if is_encoder_decoder else "causal language model"
    raise UnsupportedModel(
        f"{name} is a {config.model_type} model; transformers has no {kind} for it"
    )


def _drop_towers(model: PreTrainedModel) -> None:
    """Remove the image towers of an image-text model, which are not needed to read text."""
    from transformers import PreTrainedModel

    reads = model if model.config.is_encoder_decoder else model.get_decoder()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            tower = isinstance(child, PreTrainedModel) and reads not in child.modules()
            if tower and child not in reads.modules():
                setattr(parent, name, nn.Module())


def _check_report(name: str, kind: str, report: Mapping[str, Iterable[Any]]) -> None:
    """Refuse missing weights, which transformers would make up; warn about unused ones."""
    unused, lacking = sorted(report["unexpected_keys"]), sorted(report["missing_keys"])
    sizes = {key: f"{key}: {list(a)} for {list(b)}" for key, a, b in report["mismatched_keys"]}
    for keys, what in ((lacking, "lacks"), (sorted(sizes.values()), "has another size of")):
        if keys:
            instead = f" (and has {_several(unused)} instead)" if unused else ""
            raise ModelNotFound(
                f"the checkpoint {name} {what} {_several(keys)}, which {kind} would fill with "
                f"random numbers{instead}; save the plain model, not compiled, wrapped or with an "
                "adapter (peft: merge_and_unload), or fetch it again"
            )
    if unused:
        what = f"{_several(unused)} of {name}"
        log.warning("note: %s: unexpected in %s, and not used", what, kind)


def _several(keys: Sequence[str]) -> str:
    return f"{keys[0]} and {len(keys) - 1} more" if len(keys) > 1 else keys[0]


def _check_quantiser(name: str, quantized: object) -> None:
    """Refuse quantised weights that transformers would load as if they were not quantised."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    asked = quantized if isinstance(quantized, dict) else vars(quantized)
    method = asked.get("quant_method") or "bitsandbytes"        # its older checkpoints do not say
    method = str(getattr(method, "value", method))
    if not any(known.startswith(method) for known in AUTO_QUANTIZER_MAPPING):
        raise UnsupportedModel(
            f"{name} is quantised with {method}, which transformers does not know; choose another"
        )


def dtype_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a full or short name; None for None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    named = getattr(torch, names.get(dtype, dtype), None)
    if named not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise BadInput(f"dtype was {dtype!r}; choose one of bfloat16, float16, float32, float64")
    return named


@contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Turn every error of loading into one sentence."""
    try:
        yield
    except DraftproofError:
        raise
    except Exception as error:
        why = first_line(error)
        if isinstance(error, OSError) and not Path(name).exists():
            check_model(name)
            message = not_on_the_hub(name, why)
        elif isinstance(error, pickle.UnpicklingError):
            message = (
                f"the weights of {name} are a pickle that runs code or is broken, and were not "
                "opened; get them as safetensors"
            )
        elif "trust_remote_code" in str(error):
            message = (
                f"{name} comes with code of its own, which would run on this machine; read it, and "
                "if you trust it give trust_remote_code (--trust-remote-code)"
            )
        else:
            message = f"the model {name} cannot be loaded: {why}"
        raise ModelNotFound(message) from error


@contextmanager
def _quiet(local: bool) -> Iterator[None]:
    """Silence transformers' report in favour of ours, and progress bars except for downloads."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    if local:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
