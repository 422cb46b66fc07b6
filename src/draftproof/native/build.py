"""The C library: compiled from the sources next to this file for a level of the processor, kept,
and loaded.

A wheel brings it for every level (setup.py). From a source tree it is compiled at first use, into
the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from draftproof.errors import BadInput

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.c"))
LEVELS = ("avx2", "avx512", "amx")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi")
SWITCH, ISA = "DRAFTPROOF_KERNELS", "DRAFTPROOF_ISA"
"""Environment: 0 to do without the library; and the highest level to use of those that the
processor has."""
_AVX2 = "avx2 fma f16c bmi1 bmi2 abm movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
_WIDE = "-march=x86-64-v4 -mavx512vnni"
BUILDS = {
    "amx": (f"{_AVX512} avx512_bf16 amx_tile amx_int8 amx_bf16",
            f"{_WIDE} -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16"),
    "avx512-bf16": (f"{_AVX512} avx512_bf16", f"{_WIDE} -mavx512bf16"),
    "avx512": (_AVX512, _WIDE),
    "avx2-vnni": (f"{_AVX2} avx_vnni", "-march=x86-64-v3 -mavxvnni"),
    "avx2": (_AVX2, "-march=x86-64-v3"),
}
"""What each build needs of the processor, as Linux names it, and what compilers are told; the
quickest first."""


class Library(NamedTuple):
    """The loaded library, or None; which of `BUILDS` it is; and why it is not a quicker one, in
    words."""

    loaded: ctypes.CDLL | None
    build: str
    reason: str


@cache
def features() -> frozenset[str]:
    """What this processor has, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def able(level: str = LEVELS[-1]) -> list[str]:
    """The builds that this processor can run, the quickest first, none above `level`."""
    if level not in LEVELS:
        raise BadInput(f"{ISA} is {level!r}; choose one of {', '.join(LEVELS)}")
    return [
        build for build, (needs, _) in BUILDS.items() if features() >= set(needs.split())
        and LEVELS.index(build.partition("-")[0]) <= LEVELS.index(level)
    ]


def load() -> Library:
    """The library of the quickest build that can be had."""
    if os.environ.get(SWITCH) == "0":
        return Library(None, "", f"{SWITCH} is 0; unset it to have the C library")
    if not sys.platform.startswith("linux"):
        return Library(None, "", f"the C library needs Linux, and this is {sys.platform}")
    level, reason = os.environ.get(ISA, ""), ""
    for build in able(level or LEVELS[-1]):
        try:
            return Library(opened(build), build, reason or (f"{ISA} is {level}" if level else ""))
        except (OSError, subprocess.SubprocessError) as error:
            reason = reason or f"no {build}: {getattr(error, 'stderr', None) or error}"
    return Library(None, "", reason or "the C library needs a processor with AVX2")


def opened(build: str) -> ctypes.CDLL:
    """One build, compiled if it has to be; raises OSError or SubprocessError if it cannot be had.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    names = ("libgomp", "libiomp5", "libomp")
    openmp = [path for path in paths if Path(path).name.startswith(names)]
    if not openmp:
        raise OSError("this torch has no OpenMP; install one that has")
    # torch's own threads: a second pool would compete with them
    ctypes.CDLL(openmp[0], mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_library_file(build)))
    if not library.draftproof_usable():
        raise OSError("the kernel of the system does not let programs use it")
    return library


def compile_to(target: Path, build: str, compiler: str) -> None:
    """Compile one build; the library appears complete or not at all, with its digest at the end."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiling = ["-c", *FLAGS, *BUILDS[build][1].split(), *map(str, SOURCES)]
        # without OpenMP, which is torch's
        linked = ["-shared", *(f"{source.stem}.o" for source in SOURCES), "-o", target.name, "-lm"]
        for arguments in (compiling, linked):
            subprocess.run(
                [compiler, *arguments], check=True, cwd=folder, capture_output=True, text=True,
                env={**os.environ, "TMPDIR": folder},                # /tmp may be full
            )  # fmt: skip
        made = Path(folder) / target.name
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        put_in_place(made, target)


def is_intact(library: Path) -> bool:
    """Whether a compiled library has the digest that `compile_to` wrote at its end.

    One that is cut off would end the process when it is loaded, and one that is damaged would
    compute something else.
    """
    content = library.read_bytes()
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def is_ours(file: Path) -> bool:
    """Whether a file is this user's, or the system's, and no other user can write to it."""
    try:
        status = file.lstat()
    except OSError:
        return False
    owners = {0, os.getuid()} if hasattr(os, "getuid") else {status.st_uid}
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & 0o022


def put_in_place(part: Path, target: Path) -> None:
    """Give a complete file its name, also if the power fails meanwhile."""
    part.chmod(0o644)
    _flush(part)
    part.replace(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compiler() -> str | None:
    """The C compiler of this machine."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")


def name_of(build: str) -> str:
    """The file of a build of these sources."""
    texts = [path.read_text(encoding="utf-8") for path in (*sorted(HERE.glob("*.h")), *SOURCES)]
    digest = hashlib.sha256(repr([texts, FLAGS, BUILDS[build]]).encode()).hexdigest()
    return f"{build}-{digest[:16]}.so"


def cache_folder() -> Path:
    """Where what took long is kept between starts: in the user's cache, or where that cannot be
    written among temporary files. What another user can put there is not run: raises OSError."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache")
    user = os.getuid() if hasattr(os, "getuid") else 0
    for folder in (base / "draftproof", Path(tempfile.gettempdir()) / f"draftproof-{user}"):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            owners = {folder.stat().st_uid, folder.lstat().st_uid}      # also of a link to it
            if owners == {user} and os.access(folder, os.W_OK):
                if folder.stat().st_mode & 0o022:
                    folder.chmod(0o700)                                 # nobody else writes there
                return folder
    raise OSError(f"no folder of this user's can be written in {base}; set XDG_CACHE_HOME")


def _library_file(build: str) -> Path:
    """The library of a build: the wheel's, or one that was compiled before, or now. What is damaged
    is not loaded but compiled again, and so is what another user may have written."""
    name = name_of(build)
    shipped = HERE / "built" / name
    if shipped.exists() and is_intact(shipped):
        return shipped
    target = cache_folder() / name
    if not (is_ours(target) and is_intact(target)):
        path = compiler()
        if path is None:
            raise FileNotFoundError("there is no C compiler; install gcc")
        compile_to(target, build, path)
    return target
