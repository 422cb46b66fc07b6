"""GGUF files: what is read, and that nothing hostile gets further than one sentence."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import torch
from gguf_files import entry, key, raw, string

from draftproof.errors import DraftproofError, ModelNotFound, UnsupportedModel
from draftproof.gguf.blocks import dequantize
from draftproof.gguf.file import GGUFFile

NUMBERS = {
    "token_embd.weight": np.arange(96.0).reshape(3, 32),
    "blk.0.attn_q.weight": np.linspace(-1, 1, 128).reshape(2, 64),
    "rope_freqs.weight": np.ones(4),
}
METADATA = {
    ".block_count": 3, ".rope.freq_base": 5e5, "general.name": "Größe", "a.flag": True,
    "tokenizer.ggml.tokens": ["a", "é", "日本", ""], "tokenizer.ggml.scores": [0.5, -1.0],
    "a.flags": [True, False],
}  # fmt: skip


def sound(path: Path, **options: object) -> Path:
    return gguf_files.write(path, NUMBERS, METADATA, types={"blk.0.attn_q.weight": "Q8_0"},
                            **options)  # fmt: skip


def test_metadata_and_tensors_are_what_was_written(tmp_path: Path) -> None:
    file = GGUFFile.open(sound(tmp_path / "model.GGUF"))
    assert GGUFFile.recognises(file.path) and not GGUFFile.recognises(tmp_path)
    assert file.architecture == "llama" and file.parts == [file.path]
    assert file.metadata.integer("llama.block_count") == 3
    assert file.metadata.number("llama.rope.freq_base") == 5e5
    assert file.metadata.text("general.name") == "Größe" and file.metadata.flag("a.flag")
    assert list(file.metadata.strings("tokenizer.ggml.tokens")) == ["a", "é", "日本", ""]
    assert file.metadata.numbers("tokenizer.ggml.scores") == [0.5, -1.0]
    assert file.metadata.numbers("a.flags") == [True, False]
    assert list(file.tensors) == list(NUMBERS)
    types = [tensor.type for tensor in file.tensors.values()]
    assert types == ["F32", "Q8_0", "F32"]
    for name, numbers in NUMBERS.items():
        assert file.tensors[name].shape == numbers.shape
        torch.testing.assert_close(
            dequantize(file.tensors[name]), torch.from_numpy(numbers).float(), atol=1e-2, rtol=0
        )


def test_a_file_that_was_written_to_is_read_again(tmp_path: Path) -> None:
    """In place, and with as many bytes as before."""
    path = sound(tmp_path / "model.gguf")
    assert GGUFFile.open(path).metadata.text("general.name") == "Größe"
    time, data = path.stat().st_mtime_ns, path.read_bytes()
    path.write_bytes(data.replace("Größe".encode(), b"Breite!"))
    os.utime(path, ns=(time + 1, time + 1))
    assert GGUFFile.open(path).metadata.text("general.name") == "Breite!"


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    metadata = GGUFFile.open(sound(tmp_path / "model.gguf")).metadata
    with pytest.raises(ModelNotFound, match=r"'llama\.block_count' must be a string"):
        metadata.text("llama.block_count")
    with pytest.raises(ModelNotFound, match=r"'a\.flag' must be a whole number"):
        metadata.integer("a.flag")
    with pytest.raises(ModelNotFound, match=r"'general\.name' must be an array of numbers"):
        metadata.numbers("general.name")
    with pytest.raises(ModelNotFound, match=r"has no 'llama\.context_length'"):
        metadata.integer("llama.context_length")


def test_writing_to_a_tensor_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = sound(tmp_path / "model.gguf")
    before = path.read_bytes()
    GGUFFile.open(path).tensors["token_embd.weight"].data.zero_()
    assert path.read_bytes() == before


def test_the_parts_of_a_split_file_are_read_from_any_of_them(tmp_path: Path) -> None:
    sound(tmp_path / "m.gguf", split_max_tensors=1)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        file = GGUFFile.open(part)
        assert file.parts == parts and sorted(file.tensors) == sorted(NUMBERS)
        assert file.metadata.integer("llama.block_count") == 3
        assert torch.equal(dequantize(file.tensors["token_embd.weight"]).flatten(),
                           torch.arange(96.0))  # fmt: skip
    identity = GGUFFile.open(parts[0]).identity()
    parts[2].touch()
    assert GGUFFile.open(parts[1]).identity() != identity
    moved = parts[1].rename(tmp_path / "elsewhere.gguf")
    for part in (parts[0], parts[2]):
        with pytest.raises(ModelNotFound, match=r"part . of 3, and m-00002-of-00003.gguf is miss"):
            GGUFFile.open(part)
    with pytest.raises(ModelNotFound, match=r"part 2 of 3; the parts must be called NAME-00001-of"):
        GGUFFile.open(moved)
    parts[0].rename(parts[1])
    parts[2].rename(parts[0])
    moved.rename(parts[2])
    with pytest.raises(ModelNotFound, match=r"says that it is part 3 of 3; part 1"):
        GGUFFile.open(parts[2])


def test_truncated_files_are_reported_as_truncated(tmp_path: Path) -> None:
    whole = sound(tmp_path / "whole.gguf").read_bytes()[:-16]      # ends with 16 bytes of padding
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    GGUFFile.open(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelNotFound, match=r"cut off|is empty|not a GGUF file"):
            GGUFFile.open(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelNotFound, match=rf"has {len(whole) - 1} bytes of the \d+"):
        GGUFFile.open(path)
    with pytest.raises(ModelNotFound, match=r"is not a file"):
        GGUFFile.open(tmp_path)


LONG = struct.pack("<Q", 1 << 63)
HUGE = struct.pack("<Q", (1 << 64) - 8)
HOSTILE = {
    "another file": (b"PK\3\4" + bytes(64), "is not a GGUF file"),
    "version 1": (raw([], [], version=1), "version 1; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of big-endian byte order"),
    "many keys": (raw([], [], key_count=1 << 60), "promises 1152921504606846976 metadata keys"),
    "many tensors": (raw([], [], tensor_count=1 << 60), "promises 1152921504606846976 tensors"),
    "more tensors than bytes": (raw([], [entry("a")], tensor_count=9), "cut off"),
    "long key": (raw([LONG], []), "metadata key 0 has 9223372036854775808 bytes"),
    "key that is no text": (raw([key(b"\xff", 4, bytes(4))], []), "is not UTF-8 text"),
    "long string": (raw([key("a", 8, LONG)], []), "has 9223372036854775808 bytes"),
    "string beyond the end": (raw([key("a", 8, struct.pack("<Q", 999))], []), "cut off"),
    "no such type": (raw([key("a", 99, bytes(8))], []), "unknown type 99"),
    "no such type in an array": (raw([key("a", 9, struct.pack("<IQ", 77, 1))], []),
                                 "unknown type 77"),
    "array of arrays": (raw([key("a", 9, struct.pack("<IQ", 9, 1) * 3)], []), "array of arrays"),
    "long array": (raw([key("a", 9, struct.pack("<I", 10) + HUGE)], []), "cut off"),
    "many strings": (raw([key("a", 9, struct.pack("<I", 8) + HUGE)], []), "strings"),
    "long string in an array": (raw([key("a", 9, struct.pack("<IQ", 8, 2) + HUGE)], []), "cut off"),
    "key twice": (raw([key("a", 4, bytes(4))] * 2, []), "'a' occurs twice"),
    "tensor twice": (raw([], [entry("a")] * 2, bytes(256)), "'a' occurs twice"),
    "long tensor name": (raw([], [entry("a" * 300)], bytes(256)), "300 bytes"),
    "five dimensions": (raw([], [entry("a", (1,) * 5)], bytes(256)), "5 dimensions"),
    "dimensions": (raw([], [string("a") + struct.pack("<I", 1 << 31)], bytes(256)), "dimensions"),
    "no numbers": (raw([], [entry("a", (32, 0))], bytes(256)), r"sizes \[32, 0\]"),
    "sizes beyond 64 bits": (raw([], [entry("a", (1 << 62, 1 << 62))], bytes(256)), "cut off"),
    "part of a block": (raw([], [entry("a", (33,), 8)], bytes(256)), r"Q8_0 has the sizes \[33\]"),
    "no such block": (raw([], [entry("a", (32,), 4)], bytes(256)), "block type 4"),
    "offset beyond the end": (raw([], [entry("a", offset=1 << 40)], bytes(256)), "cut off"),
    "offset beyond 63 bits": (raw([], [entry("a", offset=(1 << 64) - 32)], bytes(256)), "cut off"),
    "unaligned": (raw([], [entry("a", offset=4)], bytes(256)), "does not begin at 32"),
    "overlapping": (raw([], [entry("a"), entry("b", offset=96)], bytes(256)), "'b' overlaps"),
    "alignment 3": (raw([key("general.alignment", 4, struct.pack("<I", 3))], []), "alignment is 3"),
    "alignment as text": (raw([key("general.alignment", 8, string("x"))], []), "a whole number"),
    "many parts": (raw([key("split.count", 4, struct.pack("<I", 1 << 31))], []), "the parts must"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_malicious_files_raise_a_clear_error(what: str, tmp_path: Path) -> None:
    data, reason = HOSTILE[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises((ModelNotFound, UnsupportedModel), match=reason) as error:
        GGUFFile.open(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_strings_that_are_no_text_are_refused_when_they_are_read(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", 8, 2) + string("fine") + string(b"\xc3")
    (tmp_path / "model.gguf").write_bytes(raw([key("words", 9, strings)], []))
    words = GGUFFile.open(tmp_path / "model.gguf").metadata.strings("words")
    with pytest.raises(ModelNotFound, match=r"string 1 of .* is not UTF-8"):
        list(words)


def test_mutated_files_never_cause_out_of_bounds_reads(tmp_path: Path) -> None:
    """Bytes, lengths and counts of a sound file are changed at random."""
    whole, chance = sound(tmp_path / "whole.gguf").read_bytes(), random.Random(7)
    path, opened, words = tmp_path / "changed.gguf", 0, (0, 1, 255, 1 << 31, 1 << 63, (1 << 64) - 1)
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            place = chance.randrange(len(data) - 8)
            if chance.random() < 0.5:
                data[place] = chance.randrange(256)
            else:
                data[place : place + 8] = struct.pack("<Q", chance.choice(words))
        path.write_bytes(data[: chance.choice((len(data), len(data), chance.randrange(len(data))))])
        try:
            file = GGUFFile.open(path)
            for tensor in file.tensors.values():
                assert dequantize(tensor).shape == tensor.shape
            list(file.metadata.get("tokenizer.ggml.tokens", []))
            opened += 1
        except DraftproofError as error:
            assert "\n" not in str(error)
    assert opened > 50


def test_vocabulary_strings_are_decoded_lazily(tmp_path: Path) -> None:
    """Strings are decoded when they are read, not when the file is opened."""
    strings = struct.pack("<IQ", 8, 200_000) + string("a token") * 200_000
    (tmp_path / "model.gguf").write_bytes(raw([key("words", 9, strings)], []))
    words = GGUFFile.open(tmp_path / "model.gguf").metadata.strings("words")
    assert words._items is None and len(words) == 200_000
    assert words[199_999] == "a token"
