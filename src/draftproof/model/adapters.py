"""LoRA adapters in peft's format, merged into a copy of a model. Knows transformers and peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from draftproof.errors import BadInput, first_line
from draftproof.model.loading import load_model, resolve

ADAPTER = "adapter_config.json"
"""The file by which a folder of peft's is recognised."""


class MergedAdapter:
    """A model with an adapter merged into its weights, in a folder that this object deletes.

    A merged copy takes as much memory as its model, and runs as quickly.
    """

    def __init__(self, model: str | Path, adapter: Path) -> None:
        """
        Args:
            model: A folder or a hub id.
            adapter: A folder in peft's format.

        Raises:
            BadInput: The folder has no adapter, or the model is a GGUF file.
        """
        self.model, self.adapter = model, adapter
        self._folder: TemporaryDirectory[str] | None = None
        if not (adapter / ADAPTER).is_file():
            raise BadInput(f"{adapter} has no {ADAPTER}; give the folder of a LoRA adapter of peft")
        if str(model).lower().endswith(".gguf"):
            raise BadInput(f"an adapter was given for {model}, a GGUF file; give the folder of the "
                           "model that it was trained for")

    @property
    def size(self) -> int:
        """The approximate size of the merged weights in bytes."""
        return weight_bytes(self.model)

    def folder(self) -> Path:
        """The folder of the merged model, made on first use.

        Raises:
            BadInput: peft is not installed, or the adapter does not fit the model.
        """
        if self._folder is None:
            try:
                from peft import PeftModel
            except ImportError:
                raise BadInput("an adapter needs another package: pip install peft") from None
            merged = TemporaryDirectory(prefix="draftproof-adapter-")
            base = load_model(self.model)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = PeftModel.from_pretrained(base, str(self.adapter)).merge_and_unload()
            except Exception as error:                  # peft raises errors of any class
                merged.cleanup()
                raise BadInput(f"the adapter {self.adapter} does not fit {self.model}: "
                               f"{first_line(error)}") from error
            model.save_pretrained(merged.name)
            self._folder = merged
        return Path(self._folder.name)


def weight_bytes(model: str | Path) -> int:
    """The size of a model's weight files in bytes; 0 if it is not on this machine yet."""
    place = Path(resolve(model))
    if place.is_file():
        return place.stat().st_size
    if not place.is_dir():
        return 0
    return sum(file.stat().st_size for ending in ("*.safetensors", "*.bin", "*.gguf")
               for file in place.glob(ending))


def models_in(folder: Path) -> list[Path]:
    """The models in a folder that is not a model: folders with a config.json, and GGUF files."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return []
    return sorted(path for path in folder.iterdir()
                  if (path / "config.json").is_file() or path.suffix.lower() == ".gguf")
