"""Build the wheel, install it with each extra into an empty environment, run a command for each.

    python recipes/packaging/check_extras.py [--extra gguf] [--torch-index URL] [--constraint FILE]

Needs the network: pip takes the newest versions that the declared ranges allow. Prints a line per
extra, and exits with 1 if a command failed or another library wrote on stderr.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of PyTorch without CUDA, which is a tenth of the size."""
RUN = ["run", "demo", "-p", "Once upon a time", "--max-new-tokens", "8"]
COMMANDS: dict[str, list[str]] = {
    "": RUN,
    "gguf": ["run", "{gguf}", "-p", "Once upon a time", "--max-new-tokens", "8"],
    "quantize": [*RUN, "--quantize", "int8"],
    "server": ["serve", "--help"],
    "train": ["train", "--help"],
    "heads": RUN,
    "plot": ["bench", "--help"],
    "ray": ["run", "--help"],
}
"""The command of each extra; those that need a cluster or a GPU only show their help."""
IMPORTS = {"server": "draftproof.server.api", "train": "peft", "ray": "ray", "gguf": "gguf",
           "quantize": "torchao", "heads": "draftproof_heads", "plot": "matplotlib"}


def check(
    wheel: Path, extra: str, sources: list[str], torch: list[str], gguf: str | None, folder: Path
) -> str | None:
    """What went wrong with an extra; None if nothing did.

    Args:
        wheel: The wheel of draftproof.
        extra: The name of the extra; empty for the base installation.
        sources: Arguments of pip that say where our packages are and give constraints.
        torch: Arguments of pip for torch alone.
        gguf: A GGUF file to run.
        folder: Where the environment is created.
    """
    command = COMMANDS[extra]
    if "{gguf}" in command and gguf is None:
        command = ["doctor", "--help"]
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    requirement = f"{wheel}[{extra}]" if extra else str(wheel)
    for packages in (["torch", *torch], [requirement]):
        install = [python, "-m", "pip", "install", "--quiet", *sources, *packages]
        if (done := subprocess.run(install, capture_output=True, text=True)).returncode:
            return f"pip install {packages[0]} failed: {done.stderr.strip()[-300:]}"
    if extra in IMPORTS:
        done = subprocess.run([python, "-c", f"import {IMPORTS[extra]}"], capture_output=True,
                              text=True)
        if done.returncode:
            return f"import {IMPORTS[extra]} failed: {done.stderr.strip()[-300:]}"
    filled = [part.replace("{gguf}", gguf or "") for part in command]
    done = subprocess.run([python, "-m", "draftproof", *filled], capture_output=True, text=True)
    if done.returncode:
        return f"draftproof {' '.join(filled)}: exit code {done.returncode}: {done.stderr[-300:]}"
    if "Warning" in done.stderr or "it/s" in done.stderr:
        return f"another library wrote on stderr: {done.stderr[-300:]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra", choices=[*filter(None, COMMANDS)], action="append")
    parser.add_argument("--torch-index", default=CPU_INDEX)
    parser.add_argument("--constraint", help="a constraints file for pip, instead of --torch-index")
    parser.add_argument("--gguf", help="a GGUF file to run; without it, only the import is tested")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temp_folder:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", temp_folder,
                 ROOT, ROOT / "packaging" / "heads"]
        subprocess.run(build, check=True)
        (wheel,) = Path(temp_folder).glob("draftproof-*.whl")
        sources, torch = ["--find-links", temp_folder], ["--index-url", options.torch_index]
        if options.constraint:
            sources, torch = [*sources, "--constraint", options.constraint], []
        for extra in options.extra or COMMANDS:
            folder = Path(temp_folder, extra or "base")
            why = check(wheel, extra, sources, torch, options.gguf, folder)
            failed |= why is not None
            print(f"{extra or 'base':10} {why or 'ok'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
