"""The C library: compiled once for each level, kept, done without where it cannot be had; one noise
on all machines."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.errors import BadInput
from draftproof.native import build as module
from draftproof.native.build import (
    ARM,
    BUILDS,
    FLAGS,
    ISA,
    LEVELS,
    SOURCES,
    SWITCH,
    X86,
    able,
    compiler,
    load,
    name_of,
    opened,
)  # fmt: skip
from draftproof.native.cpu_ops import CpuOps
from draftproof.native.kernels import Kernels, kernels, library

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler here")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "draftproof"


@needs_compiler
@pytest.mark.parametrize("build", list(BUILDS))
def test_noise_has_the_bits_of_the_operators_on_every_level(build: str) -> None:
    """10,000 pairs of a seed and a position; and everywhere from the likeliest token to the least.
    """
    if build not in able():
        pytest.skip(f"needs {build}")
    seeds = [seed * 0x9E3779B97F4A7C15 % 2**64 for seed in range(100)]
    keys, places = noise.row_keys(seeds, [0] * 100), torch.arange(100).expand(100, -1) * 997
    cpu_ops, streams = CpuOps(Kernels(opened(build))), noise.stream(keys, Role.TARGET, places)
    for sample, vocab in ((streams, 33), (streams[:1, :2], 151_936)):
        wanted = noise.gumbel(sample, vocab)
        assert torch.equal(cpu_ops.run(noise.gumbel, sample, vocab), wanted)
    assert float(wanted.max()) > 12 and float(wanted.min()) < -2.4


def test_noise_log_matches_the_exact_logarithm() -> None:
    numbers = torch.cat([torch.logspace(-9.6, 1.3, 100_000), torch.linspace(0.5, 2, 100_001)])
    torch.testing.assert_close(
        noise._log_(numbers.clone()), numbers.double().log().float(), rtol=3e-7, atol=1e-8
    )


@pytest.mark.skipif(kernels() is None, reason="no library here")
def test_two_processes_may_compile_at_once_and_the_next_finds_what_they_made(cached: Path) -> None:
    code = "from draftproof.native.kernels import library; print(library().build)"
    told = [sys.executable, "-c", code]
    both = [subprocess.Popen(told, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    build = able(os.environ.get(ISA, LEVELS[-1]))[0]
    assert [item.communicate(timeout=200)[0].strip() for item in both] == [build] * 2
    assert [item.name for item in cached.iterdir()] == [name_of(build)]
    made = module._library_file(build).stat()
    assert module._library_file(build).stat().st_mtime_ns == made.st_mtime_ns


def test_prebuilt_libraries_in_a_wheel_need_no_compiler(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HERE", cached.parent / "native")
    (module.HERE / "built").mkdir(parents=True)
    shipped = module.HERE / "built" / name_of("avx2")
    content = b"a library"
    shipped.write_bytes(content + hashlib.sha256(content).digest())
    monkeypatch.setattr(module, "compiler", lambda: None)
    assert module._library_file("avx2") == shipped and not cached.exists()
    shipped.write_bytes(content)                            # cut off
    with pytest.raises(FileNotFoundError, match="install gcc"):
        module._library_file("avx2")


def test_a_damaged_library_is_compiled_again(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, it would end the process. So is one that another user can write to."""
    sound, made = b"a library", list[str]()

    def compiled(target: Path, build: str, compiler: list[str]) -> None:
        made.append(build)
        target.unlink(missing_ok=True)
        target.write_bytes(sound + hashlib.sha256(sound).digest())
        target.chmod(0o644)

    monkeypatch.setattr(module, "compile_to", compiled)
    monkeypatch.setattr(module, "compiler", lambda: ["cc"])
    library = module._library_file("avx2")
    whole = library.read_bytes()
    assert library.parent == cached and made == ["avx2"]
    assert module._library_file("avx2") == library and made == ["avx2"]
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"A" + whole[1:], whole + b"x"):
        library.write_bytes(content)
        made.clear()
        assert module._library_file("avx2").read_bytes() == whole and made == ["avx2"]
    library.chmod(0o666)
    made.clear()
    assert module._library_file("avx2") == library and made == ["avx2"]


def test_a_cache_folder_that_others_may_write_to_is_closed(cached: Path) -> None:
    cached.mkdir()
    cached.chmod(0o777)
    assert module.cache_folder() == cached and cached.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_compiled_libraries_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES", [module.HERE / "noise.c"])           # the shortest
    target = tmp_path / "library.so"
    module.compile_to(target, able()[-1], compiler() or [])
    assert module.is_intact(target) and module.is_ours(target)
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_levels_are_lowered_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUILDS", X86)
    monkeypatch.setattr(module, "LEVELS", ("avx2", "avx512", "amx"))
    monkeypatch.setattr(module, "features", lambda: frozenset(X86["avx512"][0].split()))
    assert able("amx") == able("avx512") == ["avx512", "avx2"] and able("avx2") == ["avx2"]
    monkeypatch.setattr(module, "features", lambda: frozenset(X86["amx"][0].split()))
    assert able("avx512") == ["avx512", "avx2"] and able()[0] == "amx"
    of_amd = frozenset(X86["avx512-bf16"][0].split())
    monkeypatch.setattr(module, "features", lambda: of_amd)
    assert able() == ["avx512-bf16", "avx512", "avx2"]
    with pytest.raises(BadInput, match="choose one of avx2"):
        able("sse9")


@pytest.mark.skipif(kernels() is None, reason="no library here")
def test_the_environment_chooses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        monkeypatch.setenv(ISA, level)
        loaded = load()
        assert loaded.loaded is not None and loaded.build == able(level)[0]


def test_without_a_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, cached: Path) -> None:
    monkeypatch.setattr(module, "compiler", lambda: None)
    assert load().loaded is None and ("install gcc" in load().reason or not able())
    monkeypatch.setattr(module, "features", lambda: frozenset())
    assert load().loaded is None and "AVX2" in load().reason
    monkeypatch.setattr(module, "BUILDS", {})
    assert load().loaded is None and "not made for" in load().reason
    monkeypatch.setenv(SWITCH, "0")
    assert load().loaded is None and SWITCH in load().reason


def test_all_works_without_a_compiler(tmp_path: Path) -> None:
    """No library, no compiler: torch's operators write, drafted or not, the same text; and doctor
    says why."""
    code = (
        "import sys; sys.modules['ziglang'] = None\n"
        "import draftproof as dp; from draftproof.native.kernels import kernels\n"
        "from draftproof.model.diagnosis import paths\n"
        "told = dict(max_new_tokens=12, sampling=dp.Sampling(temperature=0.8, seed=3))\n"
        "engine = dp.load('demo', drafter='prompt-lookup')\n"
        "done = engine.generate('Lily had a cat. Lily had', n=2, **told)\n"
        "drafted = [one.tokens for one in done]\n"
        "alone = engine.generate('Lily had a cat. Lily had', **told)[0].tokens\n"
        "print(kernels() is None, drafted[0] == alone, len(alone) > 9)\n"
        "print('there is no C compiler; install' in paths(engine.target)['layers'])"
    )
    bare = {"PATH": "", "CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **bare}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr
    # once, whatever runs; torchao, which transformers imports if it is there, logs lines of its own
    (note,) = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert "slower" in note and "there is no C compiler; install gcc" in note


def test_disabled_kernels_cause_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTPROOF_KERNELS", "0")
    assert library.__wrapped__().loaded is None and not caplog.messages


def test_features_have_the_names_of_linux_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names the same features of this processor as /proc/cpuinfo does."""
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this torch does not know the processor")
    needed = {name for needs, _ in BUILDS.values() for name in needs.split()}
    monkeypatch.setattr(sys, "platform", "darwin")
    module.features.cache_clear()
    named = module.features() & needed
    monkeypatch.undo()
    module.features.cache_clear()
    assert named == module.features() & needed


def test_features_of_arm_are_the_capabilities_that_the_kernel_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bits of asm/hwcap.h; /proc/cpuinfo, which is the host's under qemu, is not read."""
    monkeypatch.setattr(module, "BUILDS", ARM)
    monkeypatch.setattr(sys, "platform", "linux")
    cortex_a53, cortex_a76, neoverse_v1 = (0xFF, 0), (0x100FFF, 0), (0xECFFFFFB, 0x7F877FFF)
    expected = [{"asimd"}, {"asimd", "asimddp"}, {"asimd", "asimddp", "i8mm", "bf16"}]
    for words, names in zip((cortex_a53, cortex_a76, neoverse_v1), expected, strict=True):
        monkeypatch.setattr(module, "_hardware_capabilities", lambda words=words: words)
        assert module.features.__wrapped__() == names


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="getauxval is of Linux")
def test_capabilities_are_read_from_the_kernel() -> None:
    assert module._hardware_capabilities()[0] > 0


def test_compilers_are_told_the_processor_as_they_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """zig has names of its own, and code for Windows is never fixed to a place."""
    zig = ("python", "-m", "ziglang", "cc", "-target")
    assert "-mcpu=x86_64_v3" in module.flags_of("avx2", (*zig, "x86_64-windows-gnu"))
    assert "-fPIC" not in module.flags_of("avx2", (*zig, "x86_64-windows-gnu"))
    assert "-mcpu=generic+v8_2a+dotprod" in module.flags_of("dotprod", (*zig, "aarch64-macos"))
    assert {"-march=armv8-a", "-fPIC"} <= set(module.flags_of("neon", ["gcc"]))
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    command = compiler()
    assert command is None or command[1:4] == ["-m", "ziglang", "cc"]


@pytest.mark.skipif(shutil.which("gcc") is None or not able(), reason="no gcc here")
@pytest.mark.parametrize("build", list(BUILDS))
def test_every_build_compiles_without_a_warning(build: str) -> None:
    told = ["gcc", *FLAGS, *BUILDS[build][1].split(), *map(str, SOURCES)]
    checks = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run([*told, *checks], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
