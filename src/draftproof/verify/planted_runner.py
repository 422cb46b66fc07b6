"""Runs commands in copies of the package, each in a forked process. A script, not a module: it must
not import the package itself, but imports slow dependencies once.

Reads lines of JSON, ``{"package": FOLDER, "command": [...]}``, and answers each with an exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from typing import Any

LIMIT = 900
"""Seconds that a command may take."""
CRASHED = 70
"""The exit code of a command that ended in a traceback."""


def run(package: str, command: list[str]) -> int:
    """The exit code of tests, if the first word is a file, or of ``draftproof``; both run as with
    ``python -m``."""
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    module, options = "draftproof", list[str]()
    if command[0].startswith("tests"):
        module, options = "pytest", ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    sys.argv = [module, *options, *command]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> None:
    """Answer line after line."""
    import torch
    import transformers

    assert torch and transformers and "draftproof" not in sys.modules
    sys.dont_write_bytecode = True
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        process = os.fork()
        if not process:
            signal.alarm(LIMIT)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            try:
                os._exit(run(**job))
            except BaseException:
                os._exit(CRASHED)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
