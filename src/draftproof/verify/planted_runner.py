"""Runs commands in copies of the package, each in a forked process. A script, not a module: it must
not import the package itself, but imports once what takes long.

Reads lines of JSON, ``{"package": FOLDER, "command": [...]}``, and answers each with an exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

LIMIT = 900
"""Seconds that a command may take."""


def run(package: str, command: list[str]) -> int:
    """The exit code of tests, if the first word is a file, or of ``draftproof``."""
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    if command[0].startswith("tests"):
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
        return int(pytest.main([*options, *command]))
    from draftproof.cli.app import app

    return int(app(command, standalone_mode=False) or 0)


def main() -> None:
    """Answer one line after another."""
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
            except BaseException as error:
                os._exit(getattr(error, "exit_code", 70))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
