"""Read a drafter from a folder or file, in any known format.

Every module of this package that declares `FORMATS` is found automatically, so a further format is
one file. Settings and names of tensors decide the format; no tensor is loaded for that.
"""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import draftproof.drafters as package
from draftproof.drafters import head_files
from draftproof.drafters.base import Drafter, Vocabulary
from draftproof.drafters.checkpoint import METHOD, Checkpoint, Format, target_name
from draftproof.drafters.head_files import write_head
from draftproof.drafters.heads import DraftHead
from draftproof.errors import DrafterMismatch, DraftproofError, ModelNotFound

__all__ = ["describe", "formats", "is_head", "load_drafter", "read_head", "recognise", "write_head"]

UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError)
"""Exceptions from building a network with senseless settings."""


@lru_cache(maxsize=1)
def formats() -> tuple[Format, ...]:
    """All known formats."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = (import_module(f"{package.__name__}.{name}") for name in names)
    return tuple(layout for module in modules for layout in getattr(module, "FORMATS", ()))


def recognise(path: str | Path) -> tuple[Checkpoint, Format] | None:
    """A drafter's checkpoint and its format; None for anything else, such as a draft model.

    Raises:
        DrafterMismatch: It is a drafter of an unknown kind.
        ModelNotFound: Its settings cannot be read.
    """
    path = Path(path)
    weights = path.is_file() and path.suffix in (".safetensors", ".pt", ".bin")
    if not weights and not path.is_dir():
        return None
    result = Checkpoint(path)
    if not result.settings and path.is_dir() and not any(path.glob("*.safetensors")):
        return None
    known = next((layout for layout in formats() if layout.recognises(result)), None)
    if known is not None:
        return result, known
    if METHOD in result.settings:
        kinds = ", ".join(dict.fromkeys(layout.title for layout in formats()))
        raise DrafterMismatch(
            f"{path} is a {result.settings[METHOD]!r} drafter of speculators, which is not known "
            f"here; known are {kinds}"
        )
    if weights:
        raise DrafterMismatch(
            f"{path} holds no drafter that is known here; give the folder of its config.json"
        )
    return None


def is_head(folder: str | Path) -> bool:
    """Whether a folder contains, or claims to contain, Medusa or recurrent heads. Never raises."""
    try:
        result = recognise(folder)
    except (DraftproofError, OSError):
        return False
    return result is not None and result[1] in head_files.FORMATS


def load_drafter(path: str | Path, target: Vocabulary) -> Drafter:
    """The drafter in a folder or file, in any format; its `description` says what it is.

    Args:
        path: A folder with config.json and weights, or a file of weights.
        target: The target to draft for.

    Raises:
        ModelNotFound: There is no drafter, or it cannot be read.
        DrafterMismatch: It is for another target, or part of it is unknown.
    """
    result = recognise(path)
    if result is None:
        raise ModelNotFound(f"{path} holds no drafter that is known here; give another folder")
    checkpoint, known = result
    try:
        drafter = known.load(checkpoint, target)
    except DraftproofError:
        raise
    except UNREADABLE as error:
        raise DrafterMismatch(f"{path} cannot be read ({error!r}); fetch it again") from error
    drafter.description = describe(checkpoint, known, target)
    return drafter


def describe(checkpoint: Checkpoint, known: Format, target: Vocabulary) -> str:
    """A description such as "DSpark head for Qwen3-4B, block 8"."""
    settings = checkpoint.settings
    trained = target_name(settings) or str(target.name).rstrip("/").rpartition("/")[2]
    size = settings.get("block_size")
    for key in known.nested:
        inner = settings.get(key)
        size = size or (inner.get("block_size") if isinstance(inner, dict) else None)
    return f"{known.title} for {trained}" + (f", block {size}" if size else "")


def read_head(folder: str | Path, vocabulary: Vocabulary) -> DraftHead:
    """The Medusa or recurrent head in a folder, in any layout, in the dtype of its file.

    Args:
        folder: Where it is.
        vocabulary: The target.

    Raises:
        ModelNotFound: There is none, or it cannot be read.
        DrafterMismatch: It is not for this target.
    """
    result = recognise(folder)
    for kind, known in zip(head_files.NAMES, head_files.FORMATS, strict=True):
        if result is not None and result[1] is known:
            return head_files.read(kind, result[0], vocabulary)
    raise ModelNotFound(f"{folder} holds no draft head known here; give another folder")
