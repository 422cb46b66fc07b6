"""The C library: compiled once for each level, kept whole, done without where it cannot be had; one
noise on all machines."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.errors import BadInput
from draftproof.native import build as module
from draftproof.native.build import (
    BUILDS,
    ISA,
    LEVELS,
    SOURCES,
    SWITCH,
    able,
    compile_to,
    compiler,
    load,
    opened,
)  # fmt: skip
from draftproof.native.cpu_ops import CpuOps
from draftproof.native.kernels import Kernels, kernels

HERE = [build for build in BUILDS if build in able(LEVELS[-1])]
ARM, QEMU = (
    shutil.which("aarch64-linux-gnu-gcc"),
    shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static"),
)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler here")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for a library of one source, which is soon compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SOURCES", SOURCES[:1])
    return tmp_path / "draftproof"


def keys(count: int) -> Tensor:
    """[count, 100, 2] streams, of seeds of 64 bits at 100 positions each."""
    seeds = [seed * 0x9E3779B97F4A7C15 % 2**64 for seed in range(count)]
    return noise.stream(
        noise.row_keys(seeds, [0] * count), Role.TARGET, torch.arange(100).expand(count, -1) * 997
    )


@needs_compiler
@pytest.mark.parametrize("build", list(BUILDS))
def test_noise_has_the_bits_of_the_operators_on_every_level(build: str) -> None:
    """10,000 pairs of a seed and a position; and everywhere from the likeliest token to the least.
    """
    if build not in HERE:
        pytest.skip(f"needs {build}")
    found, streams = CpuOps(Kernels(opened(build))), keys(100)
    for some, vocab in ((streams, 33), (streams[:1, :2], 151_936)):
        wanted = noise.gumbel(some, vocab)
        assert torch.equal(found.run(noise.gumbel, some, vocab), wanted)
    assert float(wanted.max()) > 12 and float(wanted.min()) < -2.4


def test_the_logarithm_of_noise_is_one() -> None:
    numbers = torch.cat([torch.logspace(-9.6, 1.3, 100_000), torch.linspace(0.5, 2, 100_001)])
    torch.testing.assert_close(
        noise._log_(numbers.clone()), numbers.double().log().float(), rtol=3e-7, atol=1e-8
    )


@needs_compiler
@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:5000]), lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(Path(torch.__file__).read_bytes()), lambda path: path.unlink(),
], ids=["truncated", "empty", "foreign", "absent"])  # fmt: skip
def test_a_damaged_library_is_compiled_again(
    cached: Path, damage: Callable[[Path], object]
) -> None:
    assert module._found("portable").parent == cached
    [library] = cached.glob("*.so")
    whole = library.read_bytes()
    damage(library)
    assert module._found("portable") == library
    assert library.read_bytes() == whole and len(list(cached.iterdir())) == 2, (
        "and nothing else is left behind"
    )


@needs_compiler
def test_a_library_is_kept_and_not_taken_from_somebody_else(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = module._found("portable")
    made = library.stat().st_ino
    assert module._found("portable").stat().st_ino == made
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(cached.parent))
    with pytest.raises(OSError, match="no folder"):
        module._found("portable")


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    code = "from draftproof.native.kernels import library; print(library().build)"
    told = {**os.environ, ISA: "portable", "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=told, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=200)[0].strip() for one in both] == ["portable"] * 2
    assert len(list((tmp_path / "draftproof").iterdir())) == 2


@needs_compiler
def test_what_a_wheel_brought_needs_no_compiler(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = cached.parent / "native"
    (home / "built").mkdir(parents=True)
    for path in module.HERE.glob("*.h"):
        shutil.copy(path, home)
    monkeypatch.setattr(module, "HERE", home)
    compile_to(module.shipped("portable"), "portable", str(compiler()))
    monkeypatch.setattr(module, "compiler", lambda: None)
    assert module._found("portable").parent == home / "built" and not cached.exists()


def test_levels_are_lowered_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "features", lambda: frozenset(BUILDS["avx512"]))
    assert able("amx") == able("avx512") == ["avx512", "avx2", "portable"]
    assert able("avx2") == ["avx2", "portable"] and able("portable") == ["portable"]
    with pytest.raises(BadInput, match="choose one of portable, avx2"):
        able("sse9")


def test_without_a_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, cached: Path) -> None:
    monkeypatch.setattr(module, "compiler", lambda: None)
    assert load().loaded is None and "install gcc" in load().reason
    monkeypatch.setenv(SWITCH, "0")
    assert load().loaded is None and SWITCH in load().reason


def test_all_works_without_a_compiler(tmp_path: Path) -> None:
    """No library, no compiler: torch's operators write, drafted or not, the same text."""
    code = (
        "import draftproof as dp; from draftproof.native.kernels import kernels\n"
        "told = dict(max_new_tokens=12, sampling=dp.Sampling(temperature=0.8, seed=3))\n"
        "engine = dp.load('demo', drafter='prompt-lookup')\n"
        "done = engine.generate('Lily had a cat. Lily had', n=2, **told)\n"
        "drafted = [one.tokens for one in done]\n"
        "alone = engine.generate('Lily had a cat. Lily had', **told)[0].tokens\n"
        "print(kernels() is None, drafted[0] == alone, len(alone) > 9)"
    )
    bare = {"PATH": "", "CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path),
            "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **bare}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr


DRIVER = """
#include <stdio.h>
#include "lanes.h"
void draftproof_gumbel(const int32_t *, float *, int64_t, int64_t, int64_t);
int main(void) {
    static float noise[64 * 333];
    static int32_t streams[128];
    for (int i = 0; i < 128; i++) streams[i] = (int32_t)(i * 0x9E3779B9u);
    draftproof_gumbel(streams, noise, 64, 333, 1);
    return fwrite(noise, sizeof noise, 1, stdout) != 1;
}
"""


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")
@pytest.mark.parametrize("build", [build for build in BUILDS if build not in HERE])
def test_builds_for_processors_that_are_not_here_compile(build: str) -> None:
    checks = [[str(compiler()), *module.options(build, one), "-fsyntax-only", "-Wall", "-Werror",
               str(one)] for one in SOURCES]
    module._run(*checks)


@pytest.mark.skipif(ARM is None, reason="needs aarch64-linux-gnu-gcc")
def test_aarch64_compiles_without_warnings(tmp_path: Path) -> None:
    flags = [*module.FLAGS, "-Wall", "-Wextra", "-Werror", "-c"]
    for source in SOURCES:
        module._run([str(ARM), *flags, str(source), "-o", str(tmp_path / "one.o")])


@pytest.mark.skipif(ARM is None or QEMU is None, reason="needs aarch64-linux-gnu-gcc and qemu-user")
def test_noise_has_the_bits_of_the_operators_on_aarch64(tmp_path: Path) -> None:
    driver, made = tmp_path / "driver.c", str(tmp_path / "driver")
    driver.write_text(DRIVER)
    noisy = module.HERE / "noise.c"
    flags = [one for one in module.options("portable", noisy) if one != "-fopenmp"]
    where = ["-I", str(module.HERE), "-static", str(noisy), str(driver), "-o", made, "-lm"]
    module._run([str(ARM), *flags, *where])
    done = subprocess.run([str(QEMU), made], check=True, capture_output=True, timeout=200)
    streams = (torch.arange(128) * 0x9E3779B9).to(torch.int32).view(64, 2)
    found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(64, 333)
    assert torch.equal(found, noise.gumbel(streams, 333))


def test_the_environment_chooses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels() is None:
        pytest.skip("no library here")
    for level in LEVELS:
        monkeypatch.setenv(ISA, level)
        found = load()
        assert isinstance(found.loaded, ctypes.CDLL) and found.build == able(level)[0]
