"""Matrices of a GGUF file that are packed while PyTorch is imported."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf_files
import gguf_models
import pytest
import torch

from draftproof.errors import ModelNotFound
from draftproof.gguf.blocks import BlockTensor
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.header import Entry
from draftproof.gguf.types import BLOCK_SIZES, TYPE_NAMES, row_bytes
from draftproof.native.declarations import structure
from draftproof.native.formats import FORMATS
from draftproof.native.kernels import kernels
from draftproof.weights import pack_ahead
from draftproof.weights.block_linear import pack_blocks
from draftproof.weights.pack_ahead import Packing

library = kernels()
pytestmark = pytest.mark.skipif(library is None, reason="no library here")
LONG = 35_000_000
"""Bytes of a matrix whose rows are read in several parts."""


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    pack_ahead.stop()


def file_of(path: Path, matrices: dict[str, tuple[str, int, int]]) -> GGUFFile:
    """A file of matrices of random bytes: type, outputs and inputs by name."""
    entries, data = list[bytes](), b""
    dice = torch.Generator().manual_seed(1)
    for name, (type, outputs, inputs) in matrices.items():
        number = next(number for number, known in TYPE_NAMES.items() if known == type)
        entries.append(gguf_files.entry(name, (inputs, outputs), number, len(data)))
        count = outputs * row_bytes(type, inputs)
        stored = torch.randint(0, 256, (count,), generator=dice, dtype=torch.uint8)
        data += stored.numpy().tobytes() + b"\0" * (-count % 32)
    path.write_bytes(gguf_files.raw([], entries, data))
    return GGUFFile.open(path)


def packed_ahead(tensor: BlockTensor) -> bool:
    """Whether the packed form is there; it is forgotten then."""
    blocks = tensor.data.shape[1] // BLOCK_SIZES[tensor.type].nbytes
    address = tensor.data.data_ptr()
    return pack_ahead.take(address, tensor.type, len(tensor.data), blocks) is not None


def test_the_result_is_that_of_packing_later(tmp_path: Path) -> None:
    assert library is not None
    matrices = {f"blk.{number}.ffn_up.weight": (type, 70, 512)
                for number, type in enumerate(FORMATS)}
    matrices["output.weight"] = ("Q8_0", LONG // 34_816, 32_768)
    file = file_of(tmp_path / "m.gguf", matrices)
    later = {name: pack_blocks(tensor, library) for name, tensor in file.tensors.items()}
    for _ in range(2):                              # the second time by its dropped pages
        pack_ahead.start(file.path)
        ready = {name: pack_blocks(tensor, library) for name, tensor in file.tensors.items()}
        assert not any(map(packed_ahead, file.tensors.values())), "each is taken once"
        assert all(torch.equal(ready[name], wanted) for name, wanted in later.items())


def test_the_structure_is_that_of_the_c_sources() -> None:
    declared = structure("Packing")
    assert [name for name, _ in declared._fields_] == [name for name, _ in Packing._fields_]
    assert all(getattr(declared, name).offset == getattr(Packing, name).offset
               for name, _ in Packing._fields_)  # fmt: skip
    assert ctypes.sizeof(declared) == ctypes.sizeof(Packing)


def test_only_the_whole_matrix_is_taken(tmp_path: Path) -> None:
    assert library is not None
    file = file_of(tmp_path / "m.gguf", {"blk.0.attn_q.weight": ("Q4_0", 64, 64)})
    pack_ahead.start(file.path)
    (whole,) = file.tensors.values()
    assert not packed_ahead(whole.rows(slice(0, 32)))
    assert not packed_ahead(whole.rows(slice(32, 64)))
    assert not packed_ahead(whole.rows(torch.arange(64).flip(0)))
    assert packed_ahead(whole)


@pytest.mark.parametrize(("names", "wanted"), [
    (["token_embd", "blk.0.attn_q"], ["token_embd", "blk.0.attn_q"]),
    (["token_embd", "output", "blk.0.attn_q"], ["output", "blk.0.attn_q"]),
    (["token_embd", "blk.0.attn_q", "blk.1.ssm_in"], []),
    (["token_embd", "blk.0.ffn_gate_exps"], []),
    (["token_embd", "blk.0.attn_q", "enc.blk.0.attn_q"], []),
])  # fmt: skip
def test_matrices_unused_by_the_native_forward_are_skipped(
    tmp_path: Path, names: list[str], wanted: list[str]
) -> None:
    matrices = {f"{name}.weight": ("Q8_0", 32, 32) for name in names}
    file = file_of(tmp_path / "m.gguf", matrices)
    pack_ahead.start(file.path)
    tensors = file.tensors.items()
    ready = [name.removesuffix(".weight") for name, tensor in tensors if packed_ahead(tensor)]
    assert ready == wanted


def test_three_dimensional_expert_tensors_are_not_packed_ahead() -> None:
    matrix = Entry("blk.0.ffn_up.weight", "Q8_0", (32, 32), 0, 32 * 34)
    assert pack_ahead.matrices_of([matrix]) == [matrix]
    assert pack_ahead.matrices_of([matrix._replace(shape=(4, 32, 32))]) == []


def test_stopping_frees_unclaimed_matrices(tmp_path: Path) -> None:
    file = file_of(tmp_path / "m.gguf", {"blk.0.attn_q.weight": ("Q8_0", 4096, 4096)})
    pack_ahead.start(file.path)
    pack_ahead.stop()
    assert not any(map(packed_ahead, file.tensors.values()))


def test_split_files_are_not_packed_ahead(tmp_path: Path) -> None:
    model = gguf_models.tiny("qwen2")
    pack_ahead.start(gguf_models.save(model, tmp_path / "whole.gguf", "Q8_0"))
    assert pack_ahead._running is not None
    gguf_models.save(model, tmp_path / "m.gguf", "Q8_0", parts=20)
    (first,) = tmp_path.glob("m-00001-of-00002.gguf")
    pack_ahead.stop()
    pack_ahead.start(first)
    assert pack_ahead._running is None


def test_a_damaged_file_is_refused_before_pytorch_is_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    file_of(path, {"blk.0.attn_q.weight": ("Q8_0", 64, 64)})
    path.write_bytes(path.read_bytes()[:-1000])
    code = f"from draftproof.weights import pack_ahead; pack_ahead.start({str(path)!r})"
    run = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True,
                         text=True, check=False)
    assert "is cut off" in run.stderr
    assert "| torch\n" not in run.stderr
    with pytest.raises(ModelNotFound, match="is cut off"):
        pack_ahead.start(path)


def test_the_command_packs_ahead_and_writes_the_same_text(tmp_path: Path) -> None:
    path = gguf_models.save(gguf_models.tiny("qwen2"), tmp_path / "m.gguf", "Q8_0")
    code = f"""
import sys
from draftproof.cli import setup
from draftproof.engine.config import EngineConfig
from draftproof.weights import pack_ahead
taken, take = [], pack_ahead.take
pack_ahead.take = lambda *matrix: taken.append(take(*matrix)) or taken[-1]
assert "torch" not in sys.modules
config = EngineConfig({str(path)!r}, drafter="none")
setup.start_pytorch(config, {{}})
engine = setup.engine_of(config)
assert len(taken) > 7 and None not in taken, taken
assert pack_ahead.take(0, "Q8_0", 1, 1) is None
print(engine.generate([[1, 2, 3]], max_new_tokens=8)[0].tokens)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    import draftproof as dp

    engine = dp.load(path, drafter="none")
    assert run.stdout.strip() == str(engine.generate([[1, 2, 3]], max_new_tokens=8)[0].tokens), \
        run.stderr
