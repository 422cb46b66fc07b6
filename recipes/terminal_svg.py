"""A picture of a terminal: runs a command and writes what is on the screen at its end as SVG.

pip install pyte
python recipes/terminal_svg.py docs/demo.svg -- draftproof demo
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 80, 60
PLAIN = {"default": None, "brown": "yellow"}  # pyte's names → rich's


def main() -> None:
    """Run the command and save the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("svg", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = [word for word in options.command if word != "--"]
    if not command:
        parser.error("give a command after --")
    screen = run(command)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    lines = [line(screen, row) for row in range(LINES)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for shown in lines:
        console.print(shown)
    console.save_svg(str(options.svg), title="draftproof")


def run(command: list[str]) -> pyte.Screen:
    """The screen after `command` has run."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | size
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal reads as an input error
        while data := os.read(ours, 4096):
            stream.feed(data)
    if process.wait():
        sys.exit(process.returncode)
    return screen


def line(screen: pyte.Screen, row: int) -> Text:
    """One line of the screen with its colours."""
    text = Text()
    for column in range(COLUMNS):
        cell = screen.buffer[row][column]
        colour = PLAIN.get(cell.fg, cell.fg)
        text.append(cell.data, Style(color=colour, bold=cell.bold, italic=cell.italics))
    text.rstrip()
    return text


if __name__ == "__main__":
    main()
