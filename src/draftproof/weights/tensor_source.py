"""Sources of a native model's weights: `TensorSource`, and safetensors folders.

A native model (`native_model`) is built from a configuration and a source, without an instance of
the transformers class. Modules and tensors are named as in Hugging Face checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftproof.errors import ModelNotFound, first_line
from draftproof.native.pages import release
from draftproof.weights.pack import pack
from draftproof.weights.packed_linear import JointLinear, PackedLinear
from draftproof.weights.quantized_linear import QuantizedLinear
from draftproof.weights.token_table import DenseTable, TokenTable

INDEX = "model.safetensors.index.json"
DTYPES = {
    "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""Names of dtypes in the header of a safetensors file."""


class TensorSource(Protocol):
    """The weights of one model by their Hugging Face names.

    A source decides how matrices are stored (16, 8 or 4 bits, or the blocks of a GGUF file); the
    model only multiplies. Every name is requested once, layer by layer, so a source may read its
    file in order and keep nothing.
    """

    kind: str | None
    """How matrices are stored; see `pack.pack`."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor with this full name, such as "lm_head.weight"."""

    def tensor(self, name: str) -> Tensor:
        """A tensor as numbers: norms, biases, sinks.

        Args:
            name: Its full name, such as "model.norm.weight".

        Returns:
            The tensor in the model's dtype (float32 where the file is more precise).

        Raises:
            ModelNotFound: The file has no such tensor.
        """

    def linear(self, names: Sequence[str], bias: bool) -> JointLinear:
        """Linear layers that read the same inputs, as one.

        Args:
            names: The modules whose outputs are concatenated, in this order, such as
                ["model.layers.0.self_attn.q_proj", "...k_proj", "...v_proj"]. For a head tied to
                the embeddings this is ["model.embed_tokens"].
            bias: Whether each module has a `bias` next to its `weight`.

        Returns:
            The packed layer.
        """

    def with_kind(self, kind: str | None) -> TensorSource:
        """The same weights, with matrices stored in another kind; see `pack.pack`."""

    def embedding(self, name: str) -> TokenTable:
        """The table of token embeddings.

        Args:
            name: The module, "model.embed_tokens".

        Returns:
            The table; a tied head shares its memory if the format allows that.
        """


class SafetensorsSource:
    """The weights of a folder of safetensors files, memory-mapped.

    Args:
        folder: The folder of model.safetensors, or of an index and its parts.
        dtype: The dtype that tensors are converted to.
        kind: How matrices are packed; see `pack.pack`.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, kind: str | None = None) -> None:
        self.folder, self.dtype, self.kind = folder, dtype, kind
        self._files: dict[str, Any] = {
            name: safe_open(path, framework="pt") for name, path in _paths(folder)
        }
        self._file_of = {key: name for name, file in self._files.items() for key in [*file.keys()]}
        self._read = set[str]()
        numbers = (re.search(r"\.(\d+)\.", key) for key in self._file_of)
        self._layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)

    def with_kind(self, kind: str | None) -> SafetensorsSource:
        """The same files, with matrices packed in another kind."""
        return SafetensorsSource(self.folder, self.dtype, kind)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    @property
    def unread(self) -> list[str]:
        """Tensors that were not requested."""
        return sorted(self._file_of.keys() - self._read)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor in its file, from the header alone."""
        kind = self._files[self._file_of[name]].get_slice(name).get_dtype()
        return DTYPES.get(kind, torch.float32)

    def stored(self, name: str) -> Tensor:
        """A tensor as it is in its file.

        Raises:
            ModelNotFound: There is none, or it cannot be read.
        """
        self._read.add(name)
        if name not in self._file_of:
            raise ModelNotFound(
                f"the checkpoint {self.folder} lacks {name}; fetch it again, and save the plain "
                "model, not compiled, wrapped or with an adapter (peft: merge_and_unload)"
            )
        try:
            tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(
                f"{name} of {self.folder} cannot be read: {first_line(error)}; fetch it again"
            ) from error
        return tensor

    def tensor(self, name: str) -> Tensor:
        return self.stored(name).to(self.dtype)

    def linear(self, names: Sequence[str], bias: bool) -> JointLinear:
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        bias_of_all = torch.cat(biases) if biases else None
        layer = pack(names, weights, bias_of_all, self.kind, self._layers)
        if isinstance(layer, (PackedLinear, QuantizedLinear)):      # these hold copies
            for weight in weights:          # or mapped pages would stay resident
                release(weight)
        return layer

    def embedding(self, name: str) -> TokenTable:
        return DenseTable(self.tensor(f"{name}.weight"))


def _paths(folder: Path) -> list[tuple[str, Path]]:
    """The files of a checkpoint by name."""
    if (folder / "model.safetensors").is_file():
        return [("model.safetensors", folder / "model.safetensors")]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1 and not (folder / INDEX).is_file():      # under another name
        return [(files[0].name, files[0])]
    try:
        text = (folder / INDEX).read_text(encoding="utf-8")
        index: Mapping[str, str] = json.loads(text)["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(
            f"{folder} has no model.safetensors and no readable {INDEX}; give a folder of a model"
        ) from error
    return [(name, folder / name) for name in sorted({*index.values()})]
