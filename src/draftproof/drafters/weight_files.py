"""Files of tensors and settings: read lazily, written atomically.

Weights come from .safetensors, in shards or not, otherwise from .pt and .bin without running code
in pickles. Weights of a GGUF file have the names of the original checkpoint. This knows files, no
heads. """

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftproof.errors import DrafterMismatch, ModelNotFound, first_line
from draftproof.gguf.config import model_of
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.weights import numbers_of

CONFIG = "config.json"
GGUF = ".gguf"
TRAINING_FILES = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "state")
"""Prefixes of .pt and .bin files that hold the state of a training run."""
BROKEN = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError)
"""Exceptions from reading a file that is damaged or of another kind."""


def read_settings(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The settings in a folder; raises ModelNotFound if they cannot be read."""
    file = folder / name
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"the settings {file} cannot be read: {first_line(error)}; write them again"
        raise ModelNotFound(why) from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"the settings {file} are not a JSON object; write them again")
    return config


LIMITS = {
    "num_hidden_layers": 1024, "num_attention_heads": 4096, "num_key_value_heads": 4096,
    "head_dim": 1 << 14, "hidden_size": 1 << 20, "target_hidden_size": 1 << 20,
    "intermediate_size": 1 << 22, "vocab_size": 1 << 24, "draft_vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30, "block_size": 1024, "selector_top_k": 4096,
    "selector_rank": 1 << 16, "conv_kernel_size": 256, "conv_group_size": 1 << 16,
    "num_target_layers": 4096, "steps": 64, "redrafter_draft_len_per_beam": 64,
    "num_experts": 1 << 14, "num_local_experts": 1 << 14, "n_routed_experts": 1 << 14,
}  # fmt: skip
"""Settings that are sizes, with values beyond those of any model: larger ones are errors."""


def must_be_possible(settings: Mapping[str, object], name: str) -> None:
    """Check sizes in a settings file before anything is allocated.

    Args:
        settings: As read; settings within settings are checked as well.
        name: Whose settings they are, for the error.

    Raises:
        DrafterMismatch: A number is beyond what any model has.
    """
    for key, value in settings.items():
        if isinstance(value, dict):
            must_be_possible(value, name)
        most = LIMITS.get(str(key))
        if most is not None and isinstance(value, (int, float)) and not -1 <= value <= most:
            raise DrafterMismatch(
                f"the setting {key} of {name} is {value!r:.20}, and at most {most} is possible; "
                "fetch its config.json again"
            )


def numbered(numbers: Iterable[int], name: str) -> int:
    """The number of items that are numbered 0, 1, 2, ... in the names of tensors.

    Args:
        numbers: Those in the names; they may come several times.
        name: What such a name begins with, for the error.

    Raises:
        DrafterMismatch: A number is missing.
    """
    known = set(numbers)
    missing = next(number for number in range(len(known) + 1) if number not in known)
    if missing != len(known):
        raise DrafterMismatch(
            f"the weights lack {name}.{missing}, and have {name}.{max(known)!r:.20}; the file is "
            "incomplete or damaged, fetch it again"
        )
    return missing


def weight_files(folder: Path) -> Iterator[list[Path]]:
    """The .safetensors of a folder, then its pickles."""
    yield sorted(folder.glob("*.safetensors"))
    files = sorted([*folder.glob("*.pt"), *folder.glob("*.bin")])
    yield [file for file in files if not file.name.startswith(TRAINING_FILES)]


def tensor_files(folder: Path, files: list[Path]) -> dict[str, Path]:
    """The file of each tensor, by name. Files that an index lists are not opened."""
    where = dict[str, Path]()
    for index in sorted(folder.glob("*.index.json")):
        listed = read_settings(folder, index.name).get("weight_map", {})
        if not isinstance(listed, dict):
            raise ModelNotFound(f"{folder / index.name} lists no weights by name; fetch it again")
        where |= {name: folder / str(file) for name, file in listed.items()
                  if folder / str(file) in files}  # fmt: skip
    for file in sorted({*files} - {*where.values()}):
        for name in _opened(file, None):
            if name in where:
                raise ModelNotFound(
                    f"{name} is in {where[name].name} and in {file.name} of {folder}; if they are "
                    "parts for several devices, write them as one, else keep one of them"
                )
            where[name] = file
    return where


def names_in(file: Path) -> list[str]:
    """The names of the tensors in one file."""
    return [*_opened(file, None)]


def read_tensors(names: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors called `names.values()` in their `files`, by the keys of `names`."""
    read = dict[str, Tensor]()
    for file in {files[name] for name in names.values()}:
        read |= _opened(file, [name for name in names.values() if files[name] == file])
    return {ours: read[theirs] for ours, theirs in names.items()}


def all_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, .safetensors or else a pickle; ModelNotFound if none."""
    for files in weight_files(folder):
        if where := tensor_files(folder, files):
            return where
    raise ModelNotFound(f"there are no weights in {folder}; give the folder that holds them")


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of `all_files`."""
    where = all_files(folder)
    return read_tensors({name: name for name in where}, where)


def read_file(file: Path) -> dict[str, Tensor]:
    """Every tensor in one file."""
    return _opened(file, list(_opened(file, None)))


def _opened(file: Path, wanted: Collection[str] | None) -> dict[str, Tensor]:
    """The tensors of these names in a file; None: all names, without values where that is cheap."""
    if file.suffix.lower() == GGUF:
        return _in_gguf(file, wanted)
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                if wanted is None:
                    return dict.fromkeys(opened.keys(), torch.empty(0, dtype=torch.float32))
                return {name: opened.get_tensor(name) for name in wanted}
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except BROKEN as error:
        why = f"the weights {file} cannot be read: {first_line(error)}; fetch them again"
        raise ModelNotFound(why) from error
    state = loaded if isinstance(loaded, dict) else {}
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if wanted is None:
        return tensors
    return {name: tensors[name].clone() for name in wanted}         # so that the file is unmapped


def _in_gguf(file: Path, wanted: Collection[str] | None) -> dict[str, Tensor]:
    """Tensors of a model and of its layers for prediction, by their Hugging Face names."""
    opened = GGUFFile.open(file)
    model = model_of(opened)
    stored = {**model.tensors, **model.prediction} if model is not None else {}
    if wanted is None:
        return dict.fromkeys(stored, torch.empty(0, dtype=torch.float32))
    return {name: numbers_of(opened, stored[name]) for name in wanted}


def write(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], name: str
) -> None:
    """Write weights to the file `name`, then the settings; after a crash there are no settings."""
    folder.mkdir(parents=True, exist_ok=True)
    Path(folder, CONFIG).unlink(missing_ok=True)
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    text = json.dumps(config, indent=2) + "\n"
    for file, content in ((name, save(plain, {"format": "pt"})), (CONFIG, text.encode())):
        part = folder / f".{file}.part"
        part.write_bytes(content)
        part.replace(folder / file)
