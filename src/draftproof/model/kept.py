"""What took long to find out or to make of a model on disk, kept in the user's cache folder: the
verdict of the check at load, and quantised weights.

Kept under everything that it depends on; what is cut off, foreign or of other files is made anew.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from draftproof.model.copies import Snapshot
from draftproof.native import build
from draftproof.native.kernels import library

SWITCH = "DRAFTPROOF_CACHE"
"""Environment: 0 to keep nothing."""
SLOW = 1.0
"""Seconds beyond which a result is worth keeping."""
_SOURCE = "_draftproof_source"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
           torch.uint8: "U8"}


class Kept:
    """A place for one result; `found` is None if there is none, or none that holds together."""

    def __init__(self, model: str, files: str, key: str) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache")
        self.folder, self.model, self.files, self.key = base / "draftproof", model, files, key

    @property
    def file(self) -> Path:
        return self.folder / f"{self.model}-{self.files}-{self.key}.safetensors"

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """What was written: facts, and tensors by name."""
        try:
            if self.folder.stat().st_uid != os.getuid():
                return None
            with safe_open(self.file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                names = list(opened.keys())
                tensors = {name: opened.get_tensor(name) for name in names}             # mapped
            facts: dict[str, Any] = json.loads(metadata["facts"])
            whole = facts["sums"] == {name: _sum(one) for name, one in tensors.items()}
            return (facts, tensors) if whole and metadata["key"] == self.key else None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None

    def write(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Complete or not at all, in the place of what was kept of the model's earlier files; a
        full or read-only disk keeps nothing."""
        part = self.file.with_suffix(f".{os.getpid()}.part")
        said = json.dumps({**facts, "sums": {name: _sum(one) for name, one in tensors.items()}})
        with suppress(OSError, SafetensorError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                _save(part, tensors, {"key": self.key, "facts": said})
                for old in self.folder.glob(f"{self.model}-*.safetensors"):
                    if not old.name.startswith(f"{self.model}-{self.files}-"):
                        old.unlink(missing_ok=True)
                part.replace(self.file)
            finally:
                part.unlink(missing_ok=True)

    @contextmanager
    def if_slow(self) -> Iterator[dict[str, Any]]:
        """A dict to be filled with facts and, as "tensors", tensors; kept if that took long."""
        start, made = time.perf_counter(), dict[str, Any]()
        yield made
        if time.perf_counter() - start > SLOW:
            self.write(made, made.pop("tensors", {}))


def came_from(model: nn.Module, name: str) -> None:
    """Remember the files that a model was just loaded from."""
    found = try_to_load_from_cache(name, "config.json") if not Path(name).exists() else None
    place = Path(found).parent if isinstance(found, str) else Path(name)
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    kinds = (".json", ".safetensors", ".bin", ".gguf", ".py")
    sizes = [(one.name, one.stat().st_size, one.stat().st_mtime_ns)
            for one in files if one.suffix in kinds]
    setattr(model, _SOURCE, (str(place.resolve()), sizes, Snapshot.of(model)))


def kept(model: Any, what: str, *more: object, changed: bool = False) -> Kept | None:
    """Where `what` is kept of a model that was loaded from files; None if it was not, or is none of
    `changed` and has since been written to, or exchanged in parts."""
    source: tuple[str, object, Snapshot] | None = getattr(model, _SOURCE, None)
    if source is None or os.environ.get(SWITCH) == "0":
        return None
    place, files, loaded = source
    if not changed and not Snapshot.of(model).same(loaded):
        return None
    kinds = sorted(Counter(type(one).__name__ for one in model.modules()).items())
    kernel = library().build and build._key(library().build)
    here = (files, _code(), torch.__version__, transformers.__version__)
    what_of = (str(model.config), kinds, str(model.dtype), str(model.device), kernel, what, *more)
    return Kept(*(
        hashlib.sha256(repr(one).encode()).hexdigest()[:16] for one in (place, here, what_of)
    ))


def _code() -> str:
    """A digest of the code that checks and packs, which is finer than a version."""
    files = sorted(Path(__file__).parents[1].glob("[mn]*/*.py"))      # model, native
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """As safetensors does, but from a whole page on: weights are read where they lie, by lines of
    the processor's cache."""
    header, end = dict[str, Any](__metadata__=metadata), 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, one in ordered:
        place = [end, end := end + one.nbytes]
        header[name] = {"dtype": _DTYPES[one.dtype], "shape": one.shape, "data_offsets": place}
    said = json.dumps(header).encode()
    said += b" " * (-(8 + len(said)) % mmap.PAGESIZE)
    with file.open("wb") as out:
        out.write(len(said).to_bytes(8, "little") + said)
        for _, one in ordered:
            out.write(one.contiguous().flatten().view(torch.uint8).numpy().data)


def _sum(tensor: Tensor) -> int:
    """Of all bytes, eight at a time: what a cut-off or overwritten file has not."""
    wide = tensor.nbytes % 8 == 0
    return int(tensor.flatten().view(torch.int64 if wide else torch.uint8).sum())
