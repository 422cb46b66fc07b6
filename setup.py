"""Puts the C library, compiled for every level of the processor, into the wheel, where there is a
compiler."""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).parent / "src"))
from draftproof.native import build as native

COMPILER = native.compiler()


class Build(build_py):
    """Copies Python files, then compiles. An editable install compiles at first use."""

    def run(self) -> None:
        super().run()
        if COMPILER is None or self.editable_mode:
            return
        folder = Path(self.build_lib) / "draftproof" / "native" / "built"
        folder.mkdir(parents=True, exist_ok=True)
        for build in native.BUILDS:
            try:
                native.compile_to(folder / native.name_of(build), build, COMPILER)
            except subprocess.CalledProcessError as error:
                print(f"draftproof: no {build} in this wheel: {error.stderr}", file=sys.stderr)


class Wheel(bdist_wheel):
    """For any Python, on this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class Compiled(Distribution):
    def has_ext_modules(self) -> bool:
        return COMPILER is not None


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Compiled)
