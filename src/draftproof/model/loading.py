"""Models and tokenizers from folders, hub ids and objects; every failure in one sentence. Knows
transformers."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GgufConfig,
)
from transformers import PreTrainedModel as PreTrainedModel  # these two are for the folders below
from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import logging as transformers_logging

from draftproof.errors import BadInput, DraftproofError, ModelNotFound, UnsupportedModel, first_line
from draftproof.model.device import Device
from draftproof.model.kept import came_from

log = logging.getLogger("draftproof")

_EMBEDDED = Path(__file__).parent.parent / "embedded"

PACKAGES = {
    "gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"), "torchao": ("torchao",),
    "compressed-tensors": ("compressed-tensors",), "fp8": ("accelerate",), "mxfp4": ("accelerate",),
    "bitnet": ("accelerate",), "hqq": ("hqq",), "quanto": ("optimum-quanto", "accelerate"),
    "auto-round": ("auto-round",), "aqlm": ("aqlm", "accelerate"), "eetq": ("kernels", "accelerate")
}
"""What transformers needs beside itself to load a checkpoint that was quantised so."""

RENAMED = {
    "_orig_mod.": "torch.compile put _orig_mod. before its names: save the uncompiled model",
    "lora_": "it holds a LoRA adapter that is not merged: merge it with peft's merge_and_unload",
    "base_layer.": "it is split by an adapter (LoRA): merge it with peft's merge_and_unload",
    "module.": "DistributedDataParallel put module. before its names: save the model's .module",
}
"""What strange names of weights tell."""


def embedded(name: str = "demo") -> Path:
    """The folder of an embedded model ("demo" or "demo-draft"), which plain transformers loads as
    well."""
    folder = _EMBEDDED / name
    if not (folder / "config.json").is_file():
        known = ", ".join(sorted(path.parent.name for path in _EMBEDDED.glob("*/config.json")))
        raise ModelNotFound(f"there is no embedded model {name!r}; there are: {known}")
    return folder


def resolve(model: str | Path) -> str:
    """What transformers should load: the folder of an embedded name, a local folder, or a hub id as
    it is."""
    if str(model) and (_EMBEDDED / str(model) / "config.json").is_file():
        return str(_EMBEDDED / str(model))
    return str(model)


def load_model(
    model: str | Path, dtype: str | torch.dtype | None = None, device: str | None = None,
    sharding: Any = None, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM or an encoder-decoder in evaluation mode, of an image-text model what reads text.

    dtype None: the checkpoint's own, or float32 where bfloat16 is not native. sharding: a
    DistributedConfig of transformers, by which each rank loads its part and keeps it where it is
    put. Weights that the checkpoint lacks are an error, those that go unused a warning.
    """
    name = resolve(model)
    with _clear_errors(name), _quiet(Path(name).exists()):
        if Path(name, "adapter_config.json").is_file():
            raise UnsupportedModel(
                f"{name} holds an adapter (LoRA) that is not merged into its model; merge it with "
                "peft's merge_and_unload, save that, and name its folder"
            )
        folder, options = _source(name, trust_remote_code)
        config = AutoConfig.from_pretrained(folder, **options)
        kind = _kind_of(name, config)
        wanted = _dtype(dtype) or "auto"
        place = Device.found(device)
        place.must_compute(wanted if isinstance(wanted, torch.dtype) else torch.float32)
        where = place.where
        # blocks are unpacked, to what the file's floats have
        if "gguf_file" in options:
            options["quantization_config"] = GgufConfig(dequantize=True)
            wanted = place.dtype_for(torch.bfloat16) if wanted == "auto" else wanted
        elif (method := _quantised_with(config)) is not None:
            _check_quantiser(name, method)
            options |= {"device_map": {"": str(where)}} if _is_installed("accelerate") else {}
        if sharding is not None:
            options = options | {"distributed_config": sharding, "device_map": None}
        loaded, report = kind.from_pretrained(
            folder, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _check_report(name, type(loaded).__name__, report)
    if sharding is None:
        _drop_towers(loaded)
    if "gguf_file" in options:
        vars(loaded).pop("hf_quantizer", None)          # it is an ordinary model now
        vars(loaded.config).pop("quantization_config", None)
        loaded.config.name_or_path = name
    # neither to move nor to cast
    if sharding is not None or getattr(loaded, "hf_quantizer", None) is not None:
        return loaded.eval()
    if dtype is None and loaded.dtype != place.dtype_for(loaded.dtype):
        loaded = loaded.to(place.dtype_for(loaded.dtype))
    try:
        loaded = loaded.to(where).eval()
        came_from(loaded, name)
        return loaded
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        raise BadInput(
            f"{name} cannot be put on device {str(where)!r}: {first_line(error)}; choose another "
            "device"
        ) from error


def load_config(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model, without its weights."""
    name = resolve(model)
    with _clear_errors(name):
        folder, options = _source(name, trust_remote_code)
        return AutoConfig.from_pretrained(folder, **options)


def load_tokenizer(
    model: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, or in its GGUF file; None if there is none."""
    name = resolve(model)
    folder, options = _source(name, trust_remote_code)
    try:
        with _quiet(True):
            return AutoTokenizer.from_pretrained(folder, **options)
    # tokenizers raises no narrower class
    except Exception as error:
        files = ("tokenizer.json", "tokenizer_config.json")
        if Path(name).is_file() or any(Path(name, file).is_file() for file in files):
            raise ModelNotFound(
                f"the tokenizer in {name} cannot be read: {first_line(error)}"
            ) from error
        return None


def _source(name: str, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """What transformers is given to find a model: a folder or hub id, and options."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not (name.endswith(".gguf") and Path(name).is_file()):
        return name, options
    if util.find_spec("gguf") is None:
        raise BadInput(f"{name} is read by the package gguf: pip install 'draftproof[gguf]'")
    return str(Path(name).parent), {**options, "gguf_file": Path(name).name}


def _kind_of(name: str, config: Any) -> Any:
    """What loads a model of this configuration; refuses what writes no text."""
    if getattr(config, "is_encoder_decoder", False):
        for kind in (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq):
            if type(config) in kind._model_mapping:
                return kind
        raise UnsupportedModel(
            f"{name} is a {config.model_type} encoder-decoder, which transformers does not load as "
            "one that writes text"
        )
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) in AutoModelForCausalLM._model_mapping or own_code:
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    raise UnsupportedModel(
        f"{name} is a {config.model_type} model; transformers has no causal language model for it"
    )


def _drop_towers(model: PreTrainedModel) -> None:
    """Leave out what a model sees and hears with: it reads text, and need not be moved or held."""
    decoder = model if model.config.is_encoder_decoder else model.get_decoder()
    towers = [
        (parent, name)
        for parent in list(model.modules()) for name, child in parent.named_children()
        if isinstance(child, PreTrainedModel) and decoder is not child
        and decoder not in child.modules() and child not in decoder.modules()
    ]
    for parent, name in towers:
        setattr(parent, name, nn.Module())


def _check_report(name: str, kind: str, report: dict[str, Any]) -> None:
    """Refuse weights that transformers would make up; tell of those that nothing uses."""
    unused, lacking = sorted(report["unexpected_keys"]), sorted(report["missing_keys"])
    mismatched = {key: f" {list(a)} for {list(b)}" for key, a, b in report["mismatched_keys"]}
    reasons = {sign: why for sign, why in RENAMED.items() if any(sign in key for key in unused)}
    why = next(iter(reasons.values()), "fetch it, or write it, again")
    for keys, what in ((lacking, "lacks"), (sorted(mismatched), "has another size of")):
        if keys:
            raise ModelNotFound(
                f"the checkpoint {name} {what} {keys[0]}{mismatched.get(keys[0], '')}"
                f"{_and_more(keys)}, which {kind} would fill with random numbers; {why}"
            )
    if unused:
        what = f"{unused[0]}{_and_more(unused)} of {name}"
        log.warning("note: %s: unexpected in %s, and not used", what, kind)


def _and_more(keys: Sequence[str]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""


def stop_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The end tokens the model's generation_config names."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)


def _quantised_with(config: Any) -> str | None:
    """What a checkpoint says it was quantised with."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    # older ones of theirs do not say
    return str(getattr(method, "value", method) or "bitsandbytes")


def _check_quantiser(name: str, method: str) -> None:
    """Refuse what transformers would load as if it were not quantised, or fail to load for want of
    a package."""
    if not any(known.startswith(method) for known in AUTO_QUANTIZER_MAPPING):
        raise UnsupportedModel(
            f"{name} is quantised with {method}, which transformers does not know; choose another"
        )
    missing = [package for package in PACKAGES.get(method, ()) if not _is_installed(package)]
    if missing:
        raise UnsupportedModel(
            f"{name} is quantised with {method}, which needs {' and '.join(missing)}: pip install "
            f"{' '.join(missing)}"
        )


def _is_installed(package: str) -> bool:
    """Whether a distribution of this name is there."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    found = getattr(torch, names.get(dtype, dtype), None)
    if found not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise BadInput(f"dtype was {dtype!r}; choose one of bfloat16, float16, float32, float64")
    return found


@contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """One sentence for whatever loading can raise."""
    try:
        yield
    except DraftproofError:
        raise
    except OSError as error:
        if Path(name).exists():
            raise ModelNotFound(
                f"the model in {name} cannot be read: {first_line(error)}"
            ) from error
        if name.startswith((".", "/", "~")) or "\\" in name or name.endswith(".gguf"):
            raise ModelNotFound(
                f"there is no folder {name}; give a folder, 'demo', or a hub id such as org/model"
            ) from error
        raise ModelNotFound(
            f"{name} is not a local folder and cannot be fetched from the hub "
            f"({first_line(error)}); check the name and the network, or give a folder"
        ) from error
    except pickle.UnpicklingError as error:
        raise ModelNotFound(
            f"the weights of {name} are a pickle that runs code or is broken, and were not opened; "
            "get them as safetensors"
        ) from error
    except (ValueError, KeyError, RuntimeError, ImportError, json.JSONDecodeError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"{name} comes with code of its own, which would run on this machine; read it, and "
                "if you trust it give trust_remote_code (--trust-remote-code)"
            ) from error
        raise ModelNotFound(f"the model {name} cannot be loaded: {first_line(error)}") from error
    except Exception as error:
        known = type(error).__module__.startswith(("safetensors", "huggingface_hub", "httpx"))
        # a cut-off one raises whatever reading it can
        if known or name.endswith(".gguf"):
            raise ModelNotFound(f"the model {name} cannot be read: {first_line(error)}") from error
        raise


@contextmanager
def _quiet(local: bool) -> Iterator[None]:
    """No report of transformers' before ours, and no bar for what is local: a download keeps its
    bar."""
    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    if local:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if local and bars:
            transformers_logging.enable_progress_bar()
