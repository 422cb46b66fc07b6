"""Docstrings of the public API are there; they name exactly the parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

import draftproof as dp


def documented(docstring: str) -> list[str] | None:
    """The names below `Args:`, in Google style; None without such a section."""
    section = re.search(r"^Args:\n((?: {4}.*(?:\n|$)|\n)*)", docstring, re.M)
    return None if section is None else re.findall(r"^ {4}\**(\w+):", section[1], re.M)


def public() -> Iterator[tuple[str, Any, bool]]:
    """Functions and methods that users call or override; whether a base class declares them."""
    for name in dp.__all__:
        value = getattr(dp, name)
        if inspect.isclass(value):
            for member, raw in vars(value).items():
                function = getattr(raw, "__func__", raw)
                if not member.startswith("_") and inspect.isfunction(function):
                    inherited = any(hasattr(base, member) for base in value.__mro__[1:])
                    yield f"{name}.{member}", function, inherited
        elif inspect.isfunction(value):
            yield name, value, False


FUNCTIONS = {name: (function, inherited) for name, function, inherited in public()}


@pytest.mark.parametrize("name", dp.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(dp, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_names_exactly_the_parameters(name: str) -> None:
    """A method that another class declares may leave it to that one."""
    function, inherited = FUNCTIONS[name]
    parameters = [each for each in inspect.signature(function).parameters
                  if each not in ("self", "cls")]  # fmt: skip
    described = documented(inspect.cleandoc(function.__doc__ or ""))
    if inherited and described is None:
        return
    assert function.__doc__ and described == (parameters or None)


@pytest.mark.parametrize("name", [
    name for name in dp.__all__
    if inspect.isclass(kind := getattr(dp, name)) and not is_dataclass(kind)
    and inspect.isfunction(vars(kind).get("__init__")) and not issubclass(kind, dp.Budget)
])  # fmt: skip
def test_a_constructor_is_described_in_its_class(name: str) -> None:
    """By the class, or by `__init__` itself."""
    kind = getattr(dp, name)
    parameters = list(inspect.signature(kind.__init__).parameters)[1:]
    texts = [inspect.cleandoc(text or "") for text in (kind.__doc__, kind.__init__.__doc__)]
    assert (parameters or None) in [documented(text) for text in texts]


def test_names_are_read_from_the_section() -> None:
    text = "Sums.\n\nArgs:\n    a: One.\n    **b: Two,\n        in lines.\n\nReturns:\n    c: d"
    assert documented(text) == ["a", "b"]
    assert documented("Nothing.") is None
