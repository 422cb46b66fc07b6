"""Carry files to a machine without a network, in pieces.

    python recipes/gpu/pieces.py split OUT PATH ... [--megabytes 60]
    python recipes/gpu/pieces.py join PIECES INTO

`split` packs files and folders (wheels, models) into one archive and cuts it; `join` checks every
piece against the list that `split` wrote, and unpacks. Needs Python alone. For the wheels:

    pip download --dest wheels torch triton transformers ...
    pip wheel --no-deps --wheel-dir wheels .
    pip install --no-index --find-links wheels draftproof        # there, after `join`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LIST = "pieces.json"
CHUNK = 1 << 20


class Pieces:
    """A file to write, cut into files of at most so many bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most, self.hashes = folder, most, dict[str, str]()
        self._file: IO[bytes] | None = None
        self._hash, self._left = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write on, in the next piece where this one is full."""
        view = memoryview(data)
        while view:
            if self._left == 0:
                self._next()
            assert self._file is not None
            part, view = view[: self._left], view[self._left :]
            self._file.write(part)
            self._hash.update(part)
            self._left -= len(part)
        return len(data)

    def _next(self) -> None:
        self.close()
        self._file = (self.folder / f"piece-{len(self.hashes):04d}").open("wb")
        self._hash, self._left = hashlib.sha256(), self.most

    def close(self) -> None:
        """Finish the current piece."""
        if self._file is not None:
            self._file.close()
            self.hashes[Path(self._file.name).name] = self._hash.hexdigest()
            self._file = None


class Joined:
    """The pieces as one file to read; each is checked as a whole before anything of it is used."""

    def __init__(self, folder: Path, hashes: dict[str, str]) -> None:
        self._parts, self._rest = self._checked(folder, hashes), b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        while len(self._rest) < size and (part := next(self._parts, None)) is not None:
            self._rest += part
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    @staticmethod
    def _checked(folder: Path, hashes: dict[str, str]) -> Iterator[bytes]:
        for name, wanted in hashes.items():
            file = folder / name
            if not file.exists():
                sys.exit(f"{file} is missing; copy it again")
            data = file.read_bytes()
            if hashlib.sha256(data).hexdigest() != wanted:
                sys.exit(f"{file} is damaged; copy it again")
            yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))


def split(out: Path, paths: list[Path], megabytes: int) -> None:
    """Pack and cut; links are packed as what they lead to."""
    out.mkdir(parents=True, exist_ok=True)
    pieces = Pieces(out, megabytes * 1_000_000)
    with tarfile.open(mode="w|", fileobj=pieces, dereference=True, encoding="utf-8") as archive:
        for path in paths:
            archive.add(path, arcname=path.resolve().name)
    pieces.close()
    (out / LIST).write_text(json.dumps(pieces.hashes, indent=1) + "\n", encoding="utf-8")
    print(f"{len(pieces.hashes)} pieces of at most {megabytes} MB and {LIST} are in {out}")


def join(pieces: Path, into: Path) -> None:
    """Check and unpack."""
    hashes = json.loads((pieces / LIST).read_text(encoding="utf-8"))
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(mode="r|", fileobj=Joined(pieces, hashes), encoding="utf-8") as archive:
        archive.extractall(into, filter="data")
    print(f"{len(hashes)} pieces were unpacked into {into}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cut = commands.add_parser("split")
    cut.add_argument("out", type=Path)
    cut.add_argument("paths", type=Path, nargs="+")
    cut.add_argument("--megabytes", type=int, default=60)
    whole = commands.add_parser("join")
    whole.add_argument("pieces", type=Path)
    whole.add_argument("into", type=Path)
    args = parser.parse_args()
    if args.command == "split":
        split(args.out, args.paths, args.megabytes)
    else:
        join(args.pieces, args.into)


if __name__ == "__main__":
    main()
