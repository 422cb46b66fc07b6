"""Section "mutants": plants bugs in a copy of the source, where this proof or a test must fail.

The list is tests/verify/planted_bugs.toml of a checkout: an installed package has no tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import draftproof
from draftproof.errors import BadInput
from draftproof.verify.report import BROKE, Section, Tick, silent

PACKAGE = Path(draftproof.__file__).parent
CHECKOUT = PACKAGE.parents[1]
LIST = CHECKOUT / "tests" / "verify" / "planted_bugs.toml"
SOURCE = {".py", ".c", ".h"}


class Mutant(NamedTuple):
    """A planted bug.

    Attributes:
        name: A description of the bug.
        file: The file of the package in which it is planted.
        old: The text to replace, which occurs once.
        new: The replacement.
        seen_by: Sections of the quick proof, or tests, that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    seen_by: Sequence[str]

    def planted(self) -> str:
        """The text of the file with the bug.

        Raises:
            BadInput: The text does not occur exactly once.
        """
        source = (PACKAGE / self.file).read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            times = source.count(self.old)
            raise BadInput(f"{self.name!r}: {self.file} has the text {times} times; it must be 1")
        return source.replace(self.old, self.new)


def mutants(words: Sequence[str] = ()) -> list[Mutant]:
    """All bugs, or those whose names contain one of these words.

    Raises:
        BadInput: There is no list, or no bug with such a name.
    """
    if not LIST.exists() or not hasattr(os, "fork"):
        raise BadInput("mutants are run in a checkout of draftproof, on Linux or macOS")
    listed = [Mutant(**bug) for bug in tomllib.loads(LIST.read_text(encoding="utf-8"))["bug"]]
    chosen = [bug for bug in listed if not words or any(word in bug.name for word in words)]
    if not chosen:
        raise BadInput(f"no mutant is named like {', '.join(words)}; see {LIST}")
    return chosen


CRASHED = 70
"""The exit code of a proof or a test that ended in an error of its own."""


def command_of(watch: str, report: Path) -> list[str]:
    """The command that runs tests, or a section, which writes a report."""
    if watch.startswith("tests/"):
        return [watch]
    return ["prove", "--quick", "--section", watch, "--json", str(report)]


def crashed(report: Path) -> bool:
    """Whether all failed sections of a report ended in an error, without a finding."""
    sections = json.loads(report.read_text(encoding="utf-8"))["sections"]
    return all(section["verdict"] == BROKE for section in sections if section["failures"])


class Runner:
    """A process that runs commands in a copy of the package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(PACKAGE, folder / "draftproof", copy_function=_copied, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__"))
        script = PACKAGE / "verify" / "planted_runner.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=CHECKOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    def run(self, watch: str) -> int:
        """The exit code of a section or test; `CRASHED` for an error, which is no finding."""
        assert self.process.stdin and self.process.stdout
        report = self.folder / "report.json"
        job = {"package": str(self.folder), "command": command_of(watch, report)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        if code == 1 and not watch.startswith("tests/") and crashed(report):
            return CRASHED
        return code

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant a bug in the copy while the block runs."""
        file = self.folder / "draftproof" / mutant.file
        sound = file.read_bytes()
        file.write_text(mutant.planted(), encoding="utf-8")
        try:
            yield
        finally:
            file.write_bytes(sound)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def _copied(source: str, target: str) -> str:
    """Copy sources; link weights and libraries."""
    if Path(source).suffix in SOURCE:
        return str(shutil.copy(source, target))
    Path(target).symlink_to(source)
    return target


def prove_mutants(tick: Tick = silent, *, words: Sequence[str] = ()) -> Section:
    """Plant each bug, or those with these words. Passes if everything in `seen_by` notices the bug,
    and notices nothing without it."""
    try:
        chosen = mutants(words)
    except BadInput as error:
        if words:
            raise
        return Section("mutants", f"not run: {error}")
    failures, watches = list[str](), dict.fromkeys(watch for bug in chosen for watch in bug.seen_by)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        steps = len(watches) + sum(len(bug.seen_by) for bug in chosen)
        done = 0
        for watch in watches:
            tick(done / steps, f"sound: {watch}")
            done += 1
            if code := runner.run(watch):
                failures.append(f"{watch} fails without any bug (exit code {code})")
        for bug in chosen:
            with runner.planted(bug):
                for watch in bug.seen_by:
                    tick(done / steps, bug.name)
                    done += 1
                    if (code := runner.run(watch)) != 1:
                        failures.append(f"{bug.name}: not seen by {watch} (exit code {code})")
        runner.close()
    verdict = (
        f"{len(chosen)} bugs planted, one at a time; {len(watches)} sections and tests must notice "
        f"them, and {'do' if not failures else 'do not all'}"
    )
    figures = {bug.name: list(bug.seen_by) for bug in chosen}
    return Section("mutants", verdict, figures, failures)
