"""Checks names of models and drafters before anything is loaded.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from draftproof.errors import NoSuchModel

EMBEDDED = Path(__file__).parent.parent / "embedded"
"""Models and draft heads that come with the package, each in a folder."""
HEADS_PACKAGE = "draftproof_heads"
"""The package of the draft heads that are too large for a wheel of ours; a clone has them."""
WEIGHTS = ("config.json", "adapter_config.json")
"""Files by which a folder of a model, of draft heads or of an adapter is recognised."""


def _embedded_folders() -> list[Path]:
    """Folders that contain a folder for each model or draft head."""
    package = find_spec(HEADS_PACKAGE)
    locations = package.submodule_search_locations if package is not None else None
    return [EMBEDDED, *map(Path, locations or ())]


def embedded_folder(name: str) -> Path | None:
    """The folder of the embedded model or draft heads of this name; None if there is none."""
    folders = (folder / name for folder in _embedded_folders() if name)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def resolve(model: str | Path) -> str:
    """Resolve a name: the folder of an embedded name, a local folder, or an unchanged hub id."""
    return str(embedded_folder(str(model)) or model)


def embedded_names() -> list[str]:
    return sorted({path.parent.name for folder in _embedded_folders()
                   for path in folder.glob("*/config.json")})


def is_file_name(name: str) -> bool:
    """Whether a name can only be a file or folder, not a hub id."""
    path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
    return path or name.lower().endswith((".gguf", ".safetensors", ".bin"))


def is_import(name: str) -> bool:
    """Whether a drafter's name is `module:Class`."""
    module, colon, attribute = name.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def check_model(model: str | Path) -> None:
    """Raise NoSuchModel for a file or folder that does not exist. Hub ids pass."""
    name = str(model)
    if Path(resolve(model)).exists() or not (isinstance(model, Path) or is_file_name(name)):
        return
    what = "file" if name.lower().endswith(".gguf") else "folder"
    raise NoSuchModel(
        f"there is no {what} {name}{near(name)}; give a folder, a .gguf file, a hub id "
        f"(org/model), or 'demo'"
    )


def not_on_the_hub(name: str, why: str) -> str:
    """The sentence for a name that is neither a local folder nor fetched from the hub."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        why = "HF_HUB_OFFLINE is set, and it was not downloaded before"
        what = "unset that"
    else:
        why, what = f"it cannot be fetched from the hub: {why}", "check the name and the network"
    return (f"{name} is not a local folder{near(name)}, and {why}; {what}, or give a folder or a "
            ".gguf file")


def near(name: str, known: Iterable[str] = ()) -> str:
    """`` (near it: X, Y)``: files and folders with similar names, or an empty text."""
    choices = {*_models_near(Path(name)), *known, *embedded_names()}
    wanted = Path(name).name
    by_name = {Path(choice).name.lower(): choice for choice in choices}
    matches = get_close_matches(wanted.lower(), by_name, 3, 0.6)
    matches += [key for key in by_name if key.startswith(Path(wanted).stem.lower()) and wanted]
    paths = list(dict.fromkeys(by_name[key] for key in matches))[:3]
    return f" (near it: {', '.join(paths)})" if paths else ""


def _models_near(path: Path) -> Iterator[str]:
    """Models in the folder where a missing one was expected."""
    try:
        entries = list(path.expanduser().parent.iterdir())[:2000]
    except OSError:
        return
    for entry in entries:
        is_folder = any((entry / file).is_file() for file in WEIGHTS)
        if is_folder or entry.suffix.lower() == ".gguf":
            yield str(path.parent / entry.name)
