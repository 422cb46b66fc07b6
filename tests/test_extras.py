"""What the package imports is declared: of the base installation, and of each extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import draftproof

SOURCE = Path(draftproof.__file__).parent
PROJECT = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
NAMES = {"huggingface_hub": "huggingface-hub", "lm_eval": "lm-eval", "llguidance": "llguidance",
         "prometheus_client": "prometheus-client"}
EXTRA_OF = {
    "fastapi": "server", "uvicorn": "server", "httptools": "server", "llguidance": "server",
    "prometheus_client": "server", "starlette": "server", "pydantic": "server", "ray": "ray",
    "deepspeed": "deepspeed", "lm_eval": "eval", "peft": "train",
    "accelerate": "gguf", "torchao": "quantize", "matplotlib": "plot",
}
"""Imports that only an extra brings."""
INDIRECT = {"starlette": "fastapi", "pydantic": "fastapi", "tokenizers": "transformers",
            "click": "typer"}
"""Packages that a declared one always brings."""
OPTIONAL = {"habana_frameworks", "optimum", "triton"}
"""Found on machines that have them, and never asked for. PyTorch for GPUs brings triton."""


def declared(extra: str | None) -> set[str]:
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") for line in lines}


def imports() -> dict[str, str]:
    """Top-level names that the source imports from elsewhere, and one file that does."""
    result: dict[str, str] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                result.setdefault(name.partition(".")[0], file.name)
    known = {*sys.stdlib_module_names, "draftproof", "__future__"}
    return {name: file for name, file in result.items() if name not in known}


@pytest.mark.parametrize(("name", "file"), sorted(imports().items()))
def test_every_import_is_declared(name: str, file: str) -> None:
    package = INDIRECT.get(name, NAMES.get(name, name)).lower().replace("_", "-")
    extra = EXTRA_OF.get(name)
    assert name in OPTIONAL or package in declared(extra), (
        f"{file} imports {name}, which {extra or 'the base installation'} does not bring")


def test_what_transformers_wants_for_a_gguf_file_is_in_its_extra() -> None:
    assert "accelerate" in declared("gguf") and "gguf" in declared("gguf") | declared(None)


def test_install_hints_name_published_packages_only() -> None:
    for file in SOURCE.rglob("*.py"):
        assert "draftproof[" not in file.read_text("utf-8"), file.name
