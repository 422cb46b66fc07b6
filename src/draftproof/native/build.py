"""The C library: compiled from the sources next to this file for a level of the processor, kept,
and loaded.

A wheel brings it for every level (setup.py). From a source tree it is compiled at first use, into
the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from draftproof.errors import BadInput

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.c"))
FLAGS = ("-std=gnu11", "-O3", "-pthread", "-Wno-psabi")
SWITCH, ISA = "DRAFTPROOF_KERNELS", "DRAFTPROOF_ISA"
"""Environment variables: 0 disables the library; and the highest instruction set to use."""
_AVX2 = "avx2 fma f16c bmi1 bmi2 abm movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
_WIDE = "-march=x86-64-v4 -mavx512vnni"
X86 = {
    "amx": (f"{_AVX512} avx512_bf16 amx_tile amx_int8 amx_bf16",
            f"{_WIDE} -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16"),
    # AMD's, which have SSE4A; Intel's multiply pairs of bfloat16 more slowly than single numbers
    "avx512-bf16": (f"{_AVX512} avx512_bf16 sse4a", f"{_WIDE} -mavx512bf16"),
    "avx512": (_AVX512, _WIDE),
    "avx2-vnni": (f"{_AVX2} avx_vnni", "-march=x86-64-v3 -mavxvnni"),
    "avx2": (_AVX2, "-march=x86-64-v3"),
}
ARM = {
    "i8mm": ("asimd asimddp i8mm bf16", "-march=armv8.2-a+dotprod+i8mm+bf16"),
    "dotprod": ("asimd asimddp", "-march=armv8.2-a+dotprod"),
    "neon": ("asimd", "-march=armv8-a"),
}
"""What each build needs of the processor, as Linux names it, and what compilers are told; the
quickest first."""
MACHINE = platform.machine().lower()
BUILDS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(MACHINE, {})
"""The builds for the processors of this machine's architecture."""
LEVELS = ("neon", "dotprod", "i8mm") if BUILDS is ARM else ("avx2", "avx512", "amx")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


class Library(NamedTuple):
    """The loaded library, or None; which of `BUILDS` it is; and why it is not a quicker one, in
    words."""

    loaded: ctypes.CDLL | None
    build: str
    reason: str


@cache
def features() -> frozenset[str]:
    """What this processor has, as Linux names it."""
    if not sys.platform.startswith("linux"):
        return _features_by_torch()
    if BUILDS is ARM:
        return _features_of_arm(*_hardware_capabilities())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _hardware_capabilities() -> tuple[int, int]:
    """The words `AT_HWCAP` and `AT_HWCAP2` of Linux: what every core has, emulated ones too.

    On ARM, `/proc/cpuinfo` is that of the host where qemu emulates the processor, and of one core
    where cores differ.
    """
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return getauxval(16), getauxval(26)


def _features_of_arm(first: int, second: int) -> frozenset[str]:
    """The features in the two words of `_hardware_capabilities` that `ARM` asks for."""
    bits = {"asimd": first >> 1, "asimddp": first >> 20, "i8mm": second >> 13, "bf16": second >> 14}
    return frozenset(name for name, word in bits.items() if word & 1)


def _features_by_torch() -> frozenset[str]:
    """What torch says of this processor; nothing if it is too old to say anything."""
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        return frozenset()
    renamed = {
        "fma3": "fma", "bmi": "bmi1", "lzcnt": "abm", "neon": "asimd", "dot": "asimddp",
        **{f"avx512_{part}": f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")},
    }  # fmt: skip
    features = torch.cpu.get_capabilities().items()
    names = {renamed.get(name, name) for name, is_there in features if is_there is True}
    # torch does not name MOVBE, which every processor with BMI2 has
    return frozenset(names | ({"movbe"} if "bmi2" in names else set()))


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
    if sys.platform not in ("linux", "darwin", "win32") or not BUILDS:
        return Library(None, "", f"the C library is not made for {sys.platform} on {MACHINE}")
    level, reason = os.environ.get(ISA, ""), ""
    for build in able(level or LEVELS[-1]):
        try:
            return Library(opened(build), build, reason or (f"{ISA} is {level}" if level else ""))
        except (OSError, subprocess.SubprocessError) as error:
            reason = reason or f"no {build}: {getattr(error, 'stderr', None) or error}"
    return Library(None, "", reason or "the C library needs a processor with AVX2 or NEON")


def opened(build: str) -> ctypes.CDLL:
    """One build, compiled if it has to be; raises OSError or SubprocessError if it cannot be had.
    """
    library = ctypes.CDLL(str(_library_file(build)))
    if not library.draftproof_usable():
        raise OSError("the kernel of the system does not let programs use it")
    return library


def compile_to(target: Path, build: str, compiler: Sequence[str]) -> None:
    """Compile one build; the library appears complete or not at all, with its digest at the end.

    Args:
        target: The file of the library.
        build: One of `X86` or `ARM`.
        compiler: The command of a compiler for such processors, such as `compiler()`.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        flags = flags_of(build, compiler)
        compiling = [["-c", *flags, str(source), "-o", f"{source.stem}.o"] for source in SOURCES]
        objects = [f"{source.stem}.o" for source in SOURCES]
        linked = ["-shared", "-pthread", *objects, "-o", target.name, "-lm"]
        for arguments in (*compiling, linked):
            subprocess.run(
                [*compiler, *arguments], check=True, cwd=folder, capture_output=True, text=True,
                env={**os.environ, "TMPDIR": folder},                # /tmp may be full
            )  # fmt: skip
        made = Path(folder) / target.name
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        put_in_place(made, target)


def flags_of(build: str, compiler: Sequence[str]) -> list[str]:
    """What a compiler is told for a build; zig names processors in another way."""
    flags = [*FLAGS, *(X86 | ARM)[build][1].split()]
    if "windows" not in " ".join(compiler) and sys.platform != "win32":
        flags.append("-fPIC")                                   # there all code is
    if "ziglang" not in compiler:
        return flags
    return [flag.replace("-march=armv8-a", "-mcpu=generic")
                .replace("-march=armv8.2-a", "-mcpu=generic+v8_2a")
                .replace("-march=x86-64-", "-mcpu=x86_64_") for flag in flags]


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
    if not hasattr(os, "getuid"):                       # Windows: others cannot write to a profile
        return stat.S_ISREG(status.st_mode)
    owners = {0, os.getuid()}
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & 0o022


def put_in_place(part: Path, target: Path) -> None:
    """Give a complete file its name, also if the power fails meanwhile."""
    part.chmod(0o644)
    _flush(part)
    part.replace(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if sys.platform == "win32" and path.is_dir():               # cannot be opened there
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compiler() -> list[str] | None:
    """The command of this machine's C compiler; None if there is none.

    The package `ziglang` brings a compiler for all systems. It is the only one for Windows, where
    gcc does not align vectors on the stack and others have no threads of POSIX.
    """
    names = () if sys.platform == "win32" else (os.environ.get("CC") or "gcc", "cc")
    for name in names:
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is None:
        return None
    system = {"win32": "windows-gnu", "darwin": "macos"}.get(sys.platform, "linux-gnu")
    target = f"{'aarch64' if BUILDS is ARM else 'x86_64'}-{system}"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def name_of(build: str) -> str:
    """The file of a build of these sources."""
    texts = [path.read_text(encoding="utf-8") for path in (*sorted(HERE.glob("*.h")), *SOURCES)]
    digest = hashlib.sha256(repr([texts, FLAGS, (X86 | ARM)[build]]).encode()).hexdigest()
    return f"{build}-{digest[:16]}{SUFFIX}"


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
        command = compiler()
        if command is None:
            raise FileNotFoundError(
                f"there is no C compiler; install {'ziglang' if sys.platform == 'win32' else 'gcc'}"
            )
        compile_to(target, build, command)
    return target
