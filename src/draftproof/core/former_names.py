"""Attributes and arguments under their former names: they still work, with a
warning, as docs/compatibility.md promises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _warn(former: str, name: str) -> None:
    warnings.warn(f"{former} is now called {name}", FutureWarning, stacklevel=3)


class FormerName:
    """An attribute that is now called `name`; reads and assignments go there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, former: str) -> None:
        self.former = former

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:            # dataclass looks at every attribute of a class
            return getattr(owner, self.name, self)
        _warn(self.former, self.name)
        return getattr(instance, self.name)

    def __set__(self, instance: object, value: object) -> None:
        _warn(self.former, self.name)
        setattr(instance, self.name, value)


def adopt_former_names(cls: type) -> None:
    """Let a subclass that assigns a `FormerName` of its bases assign the present name instead."""
    former = {key: value for base in cls.__mro__[1:] for key, value in vars(base).items()
              if isinstance(value, FormerName)}
    for key in former.keys() & vars(cls).keys():
        _warn(key, former[key].name)
        setattr(cls, former[key].name, vars(cls)[key])
        delattr(cls, key)


def former_keywords(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept these keywords under their former names: `former="present"`."""
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for former in names.keys() & kwargs.keys():
                _warn(former, names[former])
                kwargs[names[former]] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call

    return decorate
