"""Folders that hold draft heads: which files they have, how they are read and written. Knows files; the layouts know names.

Weights are read from .safetensors, in shards or not, and else from .pt and .bin, never running what a pickle says. Of a
merged model only the heads' own tensors are read.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftproof.drafters import medusa_layouts, redrafter_layouts
from draftproof.drafters.base import DraftHead, Vocabulary
from draftproof.errors import BadInput, ModelNotFound

CONFIG = "config.json"
NATIVE = "draftproof"
"""Our own layout."""
FILES = {"tgi": "medusa_lm_head.safetensors", "legacy": "medusa_lm_head.pt"}
"""What the weights are called in layouts that do not call them model.safetensors."""
_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "state")
"""Beginnings of .pt and .bin files that hold the state of a training run."""


_MARKS = ("speculator_type", "model_type", "architectures")
"""Settings that say what a folder is; where they differ, nothing is overwritten."""
_Answer = TypeVar("_Answer")


class Layouts(Protocol):
    """What a method's module of layouts offers."""

    @property
    def EXPORTS(self) -> Mapping[str, Callable[[Any], tuple[dict[str, Any], dict[str, Tensor]]]]: ...
    def recognises(self, config: dict[str, Any], names: Collection[str]) -> bool: ...
    def from_tensors(self, config: dict[str, Any], tensors: Mapping[str, Tensor], vocabulary: Vocabulary) -> DraftHead: ...


LAYOUTS: dict[str, Layouts] = {"redrafter": redrafter_layouts, "medusa": medusa_layouts}
"""By the kind of head; a recurrent drafter may look like a Medusa head, but says that it is none."""


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds, or says that it holds, a draft head of a kind known here. Never raises."""
    try:
        folder = Path(folder)
        config = _settings(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        return config.get("speculator_type") in LAYOUTS or _recognised(folder) is not None
    except (ModelNotFound, OSError):
        return False


def read_head(folder: str | Path, vocabulary: Vocabulary) -> DraftHead:
    """The head in a folder, of any method and layout, in the dtype of its file.

    Raises ModelNotFound if there is none or it cannot be read, DrafterMismatch if it is not for this target.
    """
    found = _recognised(Path(folder))
    if found is None:
        raise ModelNotFound(f"{folder} holds no draft head in a layout known here ({', '.join(LAYOUTS)}); give another folder")
    layouts, config, tensors = found
    try:
        return layouts.from_tensors(config, tensors, vocabulary)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, BadInput):
            raise
        raise ModelNotFound(f"the settings in {Path(folder, CONFIG)} do not describe a draft head: {_line(error)}") from error


def write_head(head: DraftHead, folder: str | Path, layout: str = NATIVE) -> None:
    """Write a head so that `read_head`, and the engines of that layout, read it.

    The settings come last: what a crash leaves is not taken for a head. Overwrites a head of the same layout; raises
    BadInput for a folder that holds other weights.
    """
    exports = LAYOUTS[head.kind].EXPORTS
    if layout not in exports:
        raise BadInput(f"the layout was {layout!r}; {head.kind} heads are written as {', '.join(exports)}")
    config, tensors = exports[layout](head)
    folder, name = Path(folder), FILES.get(layout, "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    _must_be_free(folder, name, config)
    Path(folder, CONFIG).unlink(missing_ok=True)
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    _replace(folder / name, lambda file: _save(plain, file))
    _replace(folder / CONFIG, lambda file: file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8"))


def _must_be_free(folder: Path, name: str, config: dict[str, Any]) -> None:
    """Refuse a folder that holds anything but a head of the same layout."""
    others = [file.name for file in (*_safetensors(folder), *_pickles(folder)) if file.name != name]
    old = _settings(folder / CONFIG) if (folder / CONFIG).is_file() else config
    others += [CONFIG] if any(old.get(mark) != config.get(mark) for mark in _MARKS) else []
    if others:
        raise BadInput(f"{folder} holds something else already ({others[0]}); write the head to a folder of its own")


class _Tensors(Mapping[str, Tensor]):
    """The tensors of some files by name; each is read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._pickles: dict[Path, dict[str, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        if file.suffix == ".safetensors":
            tensor: Tensor = _read(file, lambda opened: opened.get_tensor(name))
            return tensor
        if file not in self._pickles:
            self._pickles[file] = _unpickled(file)
        return self._pickles[file][name].clone()                    # a copy, lest the file stay mapped

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _recognised(folder: Path) -> tuple[Layouts, dict[str, Any], _Tensors] | None:
    """Who can read the folder, its settings, and its tensors by name."""
    if not (folder / CONFIG).is_file():
        return None
    config = _settings(folder / CONFIG)
    for files in (_safetensors, _pickles):
        tensors = _Tensors(_by_name(folder, files(folder)))
        for layouts in LAYOUTS.values():
            if tensors and layouts.recognises(config, tensors.keys()):
                return layouts, config, tensors
    return None


def _settings(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"the settings {file} cannot be read: {_line(error)}; write them again") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"the settings {file} are not a JSON object; write them again")
    return config


def _safetensors(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _pickles(folder: Path) -> list[Path]:
    found = sorted([*folder.glob("*.pt"), *folder.glob("*.bin")])
    return [file for file in found if not file.name.startswith(_STATE)]


def _by_name(folder: Path, files: list[Path]) -> dict[str, Path]:
    """Which file holds which tensor; files that an index speaks of are not opened."""
    where: dict[str, Path] = {}
    indexed: set[str] = set()
    for index in sorted(folder.glob("*.index.json")):
        listed = {name: folder / str(file) for name, file in _settings(index).get("weight_map", {}).items()}
        where |= {name: file for name, file in listed.items() if file in files}
        indexed |= {file.name for file in listed.values()}
    for file in files:
        for name in _names(file) if file.name not in indexed else ():
            if name in where:
                raise ModelNotFound(
                    f"{name} is in {where[name].name} and in {file.name} of {folder}; if they are parts for several "
                    "devices, write them as one, else keep one of them"
                )
            where[name] = file
    return where


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        return _read(file, lambda opened: list(opened.keys()))
    return list(_unpickled(file))


def _read(file: Path, ask: Callable[[Any], _Answer]) -> _Answer:
    try:
        with safe_open(file, framework="pt") as opened:
            return ask(opened)
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"the weights {file} cannot be read: {_line(error)}; fetch them again") from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped where its format allows."""
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):                          # the format before torch 1.6
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelNotFound(f"the weights {file} cannot be read: {_line(error)}; fetch them again") from error
    found = loaded if isinstance(loaded, dict) else {}
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Readable for whom any other new file is: safetensors itself would make it private."""
    file.touch()
    mode = file.stat().st_mode
    if ".safetensors" in file.name:
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        torch.save(tensors, file)
    file.chmod(mode)


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file and then put it in its place."""
    beside = file.with_name(f".{file.name}.part")
    try:
        write(beside)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
