"""The library of other processors and systems: compiled for them, and run by an emulator where
there is one, with the results of this machine's library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from draftproof.native.build import (
    ARM,
    BUILDS,
    HERE,
    SOURCES,
    X86,
    able,
    cache_folder,
    compile_to,
    compiler,
    flags_of,
    name_of,
    opened,
)  # fmt: skip

DRIVER = Path(__file__).parent / "c" / "exercise.c"
CROSS_GCC = ("aarch64-linux-gnu-gcc",)
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
ZIG = (sys.executable, "-m", "ziglang", "cc", "-target")
WINE = shutil.which("wine64", path=f"{os.environ.get('PATH', '')}:/usr/lib/wine")
_RETURNS = "void|int64_t|int"
Results = dict[str, npt.NDArray[np.generic]]
ROUNDED_OTHERWISE = {"i8mm": ("linear/16", "linear/joint")}
"""Products of bfloat16 by instructions that round in another way."""

needs_x86 = pytest.mark.skipif(BUILDS is not X86 or not able(), reason="no kernels for x86-64 here")
needs_zig = pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed")


def sources() -> str:
    """All C files without comments."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def declared(folder: Path) -> None:
    """Write declared.h: structures of the sources, and a pointer for each function."""
    text = sources()
    functions = re.findall(rf"^(?:{_RETURNS}) draftproof_\w+\([^)]*\)(?=\s*\{{)", text, re.M)
    used = set(re.findall(r"\b[A-Z]\w+", " ".join(functions)))
    structures = [match[0] for match in re.finditer(r"typedef struct \{[^}]*\} (\w+);", text)
                  if match[1] in used]
    pointers, loads = [], []
    for function in functions:
        name = re.search(r"draftproof_(\w+)", function)
        assert name is not None
        pointers.append(function.replace(f"draftproof_{name[1]}", f"(*{name[1]})", 1) + ";")
        loads.append(f'if (!(*(void **)&library.{name[1]} = FIND(made, "{name[0]}"))) return 0;')
    (folder / "declared.h").write_text("\n".join([
        '#include "model.h"', '#include "searches.h"', *structures,
        "#ifdef _WIN32",                                    # windows.h has names of ours
        "__declspec(dllimport) void *LoadLibraryA(const char *);",
        "__declspec(dllimport) void *GetProcAddress(void *, const char *);",
        "#define OPEN LoadLibraryA", "#define FIND GetProcAddress",
        "#else", "#include <dlfcn.h>", "#define OPEN(path) dlopen(path, RTLD_NOW)",
        "#define FIND dlsym", "#endif",
        "static struct {", *pointers, "} library;",
        "static int load_library(const char *path) {", "void *made = OPEN(path);",
        "if (!made) return 0;", *loads, "return 1;", "}",
    ]), encoding="utf-8")  # fmt: skip


def library_of(build: str, command: Sequence[str], target: str) -> Path:
    """A build for another platform; kept, as the builds of this machine are."""
    file = cache_folder() / f"{target}-{name_of(build)}"
    if not file.exists():
        compile_to(file, build, command)
    return file


def results_of(
    build: str, library: Path, command: Sequence[str], folder: Path, emulator: Sequence[str] = ()
) -> Results:
    """What the functions of a library return."""
    declared(folder)
    program, results = folder / "exercise.exe", folder / "results"
    flags = [flag for flag in flags_of(build, command) if flag not in ("-O3", "-fPIC")]
    subprocess.run(
        [*command, *flags, "-O1", "-I", str(folder), "-I", str(HERE), str(DRIVER), "-o",
         str(program), *([] if "windows" in " ".join(command) else ["-ldl", "-Wl,--no-as-needed"]),
         "-lm"],
        check=True, capture_output=True, cwd=folder
    )  # fmt: skip
    done = subprocess.run(
        [*emulator, str(program), str(library), str(results)], capture_output=True, text=True,
        env={**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": str(folder / "wine")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr or f"exit code {done.returncode}"
    return read_results(results.read_bytes())


def read_results(content: bytes) -> Results:
    """The results that exercise.c wrote, by name. Of rounded numbers: as float32."""
    types: dict[str, npt.DTypeLike] = {"integers": np.int64, "float": np.uint32,
                                       "near": np.float32, "bf16": np.uint16, "bytes": np.uint8}
    results = Results()
    while content:
        line, _, content = content.partition(b"\n")
        name, kind, size = line.decode().split()
        held, content = content[: int(size)], content[int(size) :]
        if kind == "about":                                     # bfloat16, rounded at the end
            wide = np.frombuffer(held, np.uint16).astype(np.uint32) << 16
            results[name] = wide.view(np.float32)
        else:
            results[name] = np.frombuffer(held, types[kind])
    return results


def differences(wanted: Results, results: Results, about: Sequence[str] = ()) -> list[str]:
    """The names of results that differ: in their bits, or, of rounded numbers, by more than sums in
    another order differ."""
    differ = [] if list(wanted) == list(results) else ["the names of results"]
    for name in wanted.keys() & results.keys():
        a, b = wanted[name], results[name]
        if name in about:
            a, b = ((part.astype(np.uint32) << 16).view(np.float32) for part in (a, b))
        if a.dtype != np.float32:
            same = np.array_equal(a, b)
        else:
            rough = a.size > 0 and (name in about or name.split("/")[0] in (
                "forward", "logits", "heads", "residual"))
            same = np.allclose(a, b, rtol=0.02 if rough else 1e-5, atol=0.02 if rough else 1e-6,
                               equal_nan=True)
        if not same:
            differ.append(name)
    return sorted(differ)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of this machine's library, of the lowest level."""
    command = compiler()
    if command is None or not able():
        pytest.skip("no C compiler here, or no kernels for this processor")
    build, folder = able()[-1], tmp_path_factory.mktemp("reference")
    opened(build)
    return results_of(build, cache_folder() / name_of(build), command, folder)


def test_every_function_is_exercised(reference: Results) -> None:
    called = set(re.findall(r"library\.(\w+)\(", DRIVER.read_text(encoding="utf-8")))
    functions = re.findall(rf"^(?:{_RETURNS}) draftproof_(\w+)\(", sources(), re.M)
    inner = {"attention", "norm", "gate"}           # of forward
    assert set(functions) - inner == called
    assert all(np.isfinite(numbers).all() for name, numbers in reference.items()
               if numbers.dtype == np.float32 and not name.startswith("best_tokens"))


@needs_x86
@pytest.mark.skipif(shutil.which(CROSS_GCC[0]) is None, reason=f"no {CROSS_GCC[0]} here")
@pytest.mark.skipif(shutil.which(QEMU[0]) is None, reason=f"no {QEMU[0]} here")
@pytest.mark.parametrize("build", list(ARM))
def test_the_kernels_for_arm_compute_the_same(
    build: str, reference: Results, tmp_path: Path
) -> None:
    library = library_of(build, CROSS_GCC, "linux-aarch64")
    results = results_of(build, library, CROSS_GCC, tmp_path, QEMU)
    assert not differences(reference, results, ROUNDED_OTHERWISE.get(build, ()))


@needs_zig
@pytest.mark.parametrize("build", ["dotprod", "i8mm"])
def test_the_library_compiles_for_macos(build: str) -> None:
    assert library_of(build, (*ZIG, "aarch64-macos"), "macos-arm64").stat().st_size > 100_000


@needs_zig
@pytest.mark.parametrize("build", ["avx2", "amx"])
def test_the_library_compiles_for_windows(build: str) -> None:
    target = "x86_64-windows-gnu"
    assert library_of(build, (*ZIG, target), target).stat().st_size > 100_000


@needs_x86
@needs_zig
@pytest.mark.skipif(WINE is None, reason="no wine here")
def test_the_kernels_compute_the_same_on_windows(reference: Results, tmp_path: Path) -> None:
    target = "x86_64-windows-gnu"
    library = library_of("avx2", (*ZIG, target), target)
    results = results_of("avx2", library, (*ZIG, target), tmp_path, [str(WINE)])
    # clang rounds sums of the search for 4-bit scales elsewhere than gcc does
    assert set(differences(reference, results)) <= {"quantize/2", "quantize_bf16/2"}
