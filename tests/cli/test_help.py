"""Help texts: every command has examples that parse, and every option says what it does and what
happens without it."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from draftproof.cli.app import PANELS, app
from draftproof.cli.examples import EXAMPLES

GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands
OPTIONS = [
    (name, option) for name, command in COMMANDS.items() for option in command.params
    if option.param_type_name == "option"
]


def test_every_command_has_examples_that_parse() -> None:
    listed = [command.__name__ for commands in PANELS.values() for command in commands]
    assert list(COMMANDS) == listed and set(EXAMPLES) == set(listed)
    for name, lines in EXAMPLES.items():
        for line in lines:
            program, command, *args = shlex.split(line)
            assert (program, command) == ("draftproof", name)
            COMMANDS[name].make_context(name, args)             # raises for what is not known
            assert line in COMMANDS[name].epilog


@pytest.mark.parametrize("name, option", OPTIONS, ids=lambda value: getattr(value, "name", value))
def test_option_help_is_one_sentence(name: str, option: Any) -> None:
    """And a number's default is stated."""
    assert re.match(r"(?:[A-Z]|cpu,|bfloat16,|match ).*[.]$", option.help, re.S)
    is_number = len(option.metavar or "") == 1
    assert option.default is not None or not is_number or re.search("Default: .+[.]", option.help)


def test_flags_show_no_type_and_arguments_no_braces() -> None:
    for command in COMMANDS.values():
        for parameter in command.params:
            if getattr(parameter, "is_flag", False):
                assert parameter.metavar == "" and not any(
                    "no-no" in text for text in parameter.secondary_opts)
            elif parameter.param_type_name == "argument":
                assert parameter.metavar
