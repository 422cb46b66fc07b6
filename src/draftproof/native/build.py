"""The C library: compiled from the sources beside this file for a level of the processor, kept, and
loaded.

A wheel brings it for every level (setup.py). From a source tree it is compiled at first use, into
the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from draftproof.errors import BadInput

HERE = Path(__file__).parent
_NAMES = ("noise", "layers", "attention", "linear", "drafting", "heads", "lookup", "ensemble")
SOURCES = [HERE / f"{name}.c" for name in _NAMES]
LEVELS = ("portable", "avx2", "avx512", "amx")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi")
UNFUSED = {"noise": LEVELS, "layers": LEVELS[:1]}
"""Levels at which every operation of a source is rounded by itself, so that all machines compute
the same bits."""
SWITCH, ISA = "DRAFTPROOF_KERNELS", "DRAFTPROOF_ISA"
"""Environment: 0 to do without the library; and the highest level to use of those that the
processor has."""
_AVX2 = {
    "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi1": "bmi", "bmi2": "bmi2", "abm": "lzcnt",
    "popcnt": "popcnt",
}  # fmt: skip
_AVX512 = {f"avx512{one}": f"avx512{one}" for one in ("f", "bw", "vl", "dq")} | {
    f"avx512_{one}": f"avx512{one}" for one in ("vnni", "bf16")
}
_AMX = {f"amx_{one}": f"amx-{one}" for one in ("tile", "int8", "bf16")}
BUILDS = {
    "amx": _AVX2 | _AVX512 | _AMX,
    "avx512": _AVX2 | _AVX512,
    "avx2-vnni": _AVX2 | {"avx_vnni": "avxvnni"},
    "avx2": _AVX2,
    "portable": {},
}
"""What each build needs of the processor, as Linux names it, and as compilers do; the quickest
first."""


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
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return frozenset(
            next(one for one in lines if one.startswith(("flags", "Features"))).split()
        )
    except (OSError, StopIteration):
        return frozenset()


def able(level: str) -> list[str]:
    """The builds that this processor can run, the quickest first, none above `level`."""
    if level not in LEVELS:
        raise BadInput(f"{ISA} is {level!r}; choose one of {', '.join(LEVELS)}")
    names = [build for build, needs in BUILDS.items() if features() >= set(needs)]
    return [name for name in names if LEVELS.index(name.partition("-")[0]) <= LEVELS.index(level)]


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
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            reason = reason or f"no {build}: {getattr(error, 'stderr', None) or error}"
    return Library(None, "", reason)


def opened(build: str) -> ctypes.CDLL:
    """One build, compiled if it has to be; raises OSError or SubprocessError if it cannot be had.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    names = ("libgomp", "libiomp5", "libomp")
    openmp = [path for path in paths if Path(path).name.startswith(names)]
    if not openmp:
        raise OSError("this torch has no OpenMP; install one that has")
    # torch's own threads: a second pool would compete with them
    ctypes.CDLL(openmp[0], mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_found(build)))
    if not library.draftproof_usable():
        raise OSError("the kernel of the system does not let programs use it")
    return library


def options(build: str, source: Path) -> list[str]:
    """What a compiler is told of one source of a build."""
    alone = build.partition("-")[0] in UNFUSED.get(source.stem, ())
    own = (f"-m{name}" for name in BUILDS[build].values())
    return [*FLAGS, *own, *["-ffp-contract=off"] * alone]


def compile_to(target: Path, build: str, compiler: str) -> None:
    """Compile one build; the library, and its size and hash beside it, appear complete or not at
    all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        done, digest = Path(folder) / "library", Path(folder) / "digest"
        objects = {source: str(Path(folder) / f"{source.stem}.o") for source in SOURCES}
        _run(*([compiler, *options(build, source), "-c", str(source), "-o", made]
               for source, made in objects.items()))
        # OpenMP is torch's
        _run([compiler, "-shared", *objects.values(), "-o", str(done), "-lm"])
        digest.write_text(_digest(done))
        done.replace(target)
        digest.replace(target.with_suffix(".digest"))


def _run(*commands: list[str]) -> None:
    """All at once; raises CalledProcessError with what the first that failed said."""
    running = [
        subprocess.Popen(one, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for one in commands
    ]
    for one, said in [(one, one.communicate()[1]) for one in running]:
        if one.returncode:
            raise subprocess.CalledProcessError(one.returncode, one.args, stderr=said)


def shipped(build: str) -> Path:
    """Where a wheel holds a build of these sources."""
    return HERE / "built" / f"{build}-{_key(build)}.so"


def compiler() -> str | None:
    """The C compiler of this machine."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def _found(build: str) -> Path:
    """The library of a build: the wheel's, or one that was compiled before, or now."""
    if _intact(shipped(build)):
        return shipped(build)
    found = compiler()
    if found is None:
        raise FileNotFoundError("there is no C compiler; install gcc")
    version = subprocess.run(
        [found, "--version"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    temporary = Path(tempfile.gettempdir()) / f"draftproof-{os.getuid()}"
    for folder in (Path(base) / "draftproof", temporary):
        target = folder / f"{build}-{_key(build, found, version, platform.machine())}.so"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():         # what another user put there is not run
                continue
            if not _intact(target):
                compile_to(target, build, found)
            return target
        except OSError:                                     # read-only, full
            continue
    raise OSError(f"no folder to keep it in; make {base} writable")


def _key(build: str, *more: str) -> str:
    texts = [path.read_text() for path in (*sorted(HERE.glob("*.h")), *SOURCES)]
    said = repr([texts, *(options(build, one) for one in SOURCES), more])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _digest(library: Path) -> str:
    content = library.read_bytes()
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}"


def _intact(library: Path) -> bool:
    """Whether a library is what was compiled, byte for byte: a truncated one would end the process.
    """
    try:
        return library.with_suffix(".digest").read_text() == _digest(library)
    except OSError:
        return False
