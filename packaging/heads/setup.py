"""Copies the draft heads that are too large for draftproof's own wheel out of the clone."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EMBEDDED = Path(__file__).resolve().parents[2] / "src" / "draftproof" / "embedded"


class Build(build_py):
    def run(self) -> None:
        super().run()
        package = Path(self.build_lib) / "draftproof_heads"
        for config in EMBEDDED.glob("*/config.json"):
            if not config.parent.name.startswith("demo"):
                shutil.copytree(config.parent, package / config.parent.name, dirs_exist_ok=True)


setup(cmdclass={"build_py": Build})
