"""Packs the matrices of a GGUF file on another thread while PyTorch is imported.

The import takes a second of one processor. Packing takes as long, mostly to get memory, and needs
nothing of PyTorch. So this module does not import torch either.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

from draftproof.gguf.header import Entry, Header, read_header
from draftproof.native import build
from draftproof.native.formats import BLOCKS, FORMATS, STRIP

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
MATRICES = {"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up",
            "ffn_down"}
"""The matrices of layers that our own forward reads. A file with others is not packed ahead, since
transformers runs it, in unpacked weights."""


class Packing(ctypes.Structure):
    """A matrix to pack: the structure of this name in linear.c."""

    _fields_ = (("rows", ctypes.c_void_p), ("records", ctypes.c_void_p),
                ("format", ctypes.c_int64), ("outputs", ctypes.c_int64),
                ("blocks", ctypes.c_int64))  # fmt: skip


class PackAhead:
    """Packs matrices in the order of the file, on a thread of its own, from now on.

    Args:
        header: The header of the file.
        entries: The matrices, each of one of `FORMATS`.
        library: The C library.
    """

    def __init__(self, header: Header, entries: list[Entry], library: ctypes.CDLL) -> None:
        self._file, self._count = header.data, len(entries)
        self._matrices = (Packing * len(entries))()
        self._library, self._taken = library, ctypes.c_int64(0)
        self._ready = dict[int, tuple[Packing, mmap.mmap]]()
        start = ctypes.addressof(ctypes.c_char.from_buffer(header.data))
        for place, entry in enumerate(entries):
            inputs, nbytes = BLOCKS[entry.type]
            outputs, blocks = entry.shape[0], entry.shape[1] // inputs
            records = mmap.mmap(-1, -(-outputs // STRIP) * STRIP * blocks * nbytes)
            self._matrices[place] = Packing(
                start + entry.offset, ctypes.addressof(ctypes.c_char.from_buffer(records)),
                FORMATS.index(entry.type) + 1, outputs, blocks,
            )
            self._ready[start + entry.offset] = self._matrices[place], records
        self._thread = threading.Thread(target=self._pack, name="pack ahead")
        self._thread.start()

    def _pack(self) -> None:
        """Pack what no thread has taken."""
        self._library.draftproof_pack_matrices(
            self._matrices, ctypes.c_int64(self._count), ctypes.byref(self._taken)
        )

    def take(self, address: int, format: str, outputs: int, blocks: int) -> mmap.mmap | None:
        """The packed form of a matrix, which is forgotten here.

        Args:
            address: The address of its rows in the mapped file.
            format: One of `FORMATS`.
            outputs: The number of its rows.
            blocks: The number of blocks in a row.

        Returns:
            Its records; None if it was not packed ahead.
        """
        if address not in self._ready:
            return None
        matrix, records = self._ready[address]
        same = FORMATS[matrix.format - 1] == format
        if not same or (matrix.outputs, matrix.blocks) != (outputs, blocks):
            return None
        if self._thread.is_alive():                             # both threads pack the rest
            self._pack()
            self._thread.join()
        del self._ready[address]
        return records

    def stop(self) -> None:
        """Pack no further matrix, and wait for those that are being packed."""
        self._taken.value = self._count
        self._thread.join()


_running: PackAhead | None = None


def start(path: str | Path) -> None:
    """Begin to pack the matrices of a GGUF file; nothing is done where it would not help.

    Raises:
        ModelNotFound: The file is damaged.
        UnsupportedModel: Its version or a type of tensor is unknown.
    """
    global _running
    header = read_header(Path(path))
    if header.metadata.integer("split.count", 1) > 1:
        return
    entries = matrices_of(header.entries)
    library = build.load().loaded if entries else None
    stop()
    if library is not None:
        _running = PackAhead(header, entries, library)


def take(address: int, format: str, outputs: int, blocks: int) -> mmap.mmap | None:
    """As `PackAhead.take`; None if nothing is packed ahead."""
    return _running.take(address, format, outputs, blocks) if _running is not None else None


def stop() -> None:
    """End packing ahead, and free what nobody took."""
    global _running
    if _running is not None:
        _running.stop()
    _running = None


def matrices_of(entries: list[Entry]) -> list[Entry]:
    """The matrices that a model of our own forward multiplies; none if it has others as well."""
    head = HEAD if any(entry.name == HEAD for entry in entries) else EMBEDDING
    chosen = list[Entry]()
    for entry in entries:
        block, _, name = entry.name.partition(".")
        kind = name.partition(".")[2].removesuffix(".weight") if block == "blk" else ""
        if len(entry.shape) < 2 or entry.name in {EMBEDDING, HEAD} - {head}:
            continue
        if len(entry.shape) > 2 or (entry.name != head and kind not in MATRICES):
            return []
        if entry.type in FORMATS:
            chosen.append(entry)
    return chosen
