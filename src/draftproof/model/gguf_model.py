"""GGUF files as transformers models: weights are unpacked without transformers' own reader.

For families that our forward does not know, and for `--dtype`. transformers' reader is used for
architectures that are mapped only there.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

import torch
import transformers
from transformers import AutoConfig, GgufConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.utils import is_gguf_arch_supported

from draftproof.errors import ModelNotFound, UnsupportedModel
from draftproof.gguf.config import Model
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.weights import numbers_of
from draftproof.model.gguf_source import note_unused


def unpacked(file: GGUFFile, model: Model, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of transformers' class, in evaluation mode.

    Args:
        file: The file.
        model: The file's description of its model.
        dtype: The dtype that blocks are unpacked to.

    Raises:
        ModelNotFound: The weights of the file and of the class differ.
    """
    note_unused(file, model)
    config = config_object(model)
    weights = {name: numbers_of(file, stored, dtype) for name, stored in model.tensors.items()}
    kind = getattr(transformers, model.config["architectures"][0])
    loaded, report = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"],
                        *(key for key, *_ in report["mismatched_keys"])}):
        raise ModelNotFound(
            f"{file.path} has other weights than {kind.__name__} ({wrong[0]}, of {len(wrong)}); "
            "fetch it again"
        )
    loaded.config.name_or_path = str(file.path)
    return loaded.eval()


def config_object(model: Model) -> object:
    """The configuration of a model as a transformers object."""
    settings = dict(model.config)
    architectures = settings.pop("architectures")
    config = AutoConfig.for_model(**settings)
    config.architectures = architectures
    return config


def transformers_source(file: GGUFFile) -> dict[str, object]:
    """Arguments of `from_pretrained` for a file whose architecture is not mapped here.

    Raises:
        UnsupportedModel: transformers cannot read it either.
    """
    name = file.architecture
    known = {re.sub("[-_]", "", key) for key in GGUF_CONFIG_MAPPING}
    if not is_gguf_arch_supported(name) and re.sub("[-_]", "", name) not in known:
        raise UnsupportedModel(
            f"{file.path} is a {name} model, which cannot be read from a GGUF file here; give the "
            "folder or hub id of the model itself"
        )
    if len(file.parts) > 1:
        raise UnsupportedModel(
            f"{file.path} is one of {len(file.parts)} parts of a {name} model, and parts of this "
            "architecture cannot be read; join them with llama-gguf-split --merge"
        )
    if find_spec("accelerate") is None:
        raise UnsupportedModel(
            f"{file.path} is a {name} model, whose files are read by transformers with accelerate: "
            "pip install accelerate"
        )
    return {"gguf_file": file.path.name, "quantization_config": GgufConfig(dequantize=True)}
