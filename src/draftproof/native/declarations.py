"""What the C sources declare, for ctypes: structures and functions, read from the sources."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any, NamedTuple

from draftproof.native.build import HERE, SOURCES

_NUMBERS: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Function(NamedTuple):
    """Types of what it returns and takes; threaded: whether a number of threads comes last."""

    returns: Any
    takes: list[Any]
    threaded: bool


@cache
def _text() -> str:
    """All sources, without comments."""
    texts = (path.read_text(encoding="utf-8") for path in (*sorted(HERE.glob("*.h")), *SOURCES))
    return re.sub(r"/\*.*?\*/", "", "\n".join(texts), flags=re.S)


def _type(declared: str) -> Any:
    """Of a field or an argument as C declares it."""
    if "*" in declared:
        return ctypes.c_void_p
    name = declared.removeprefix("const ").split()[0]
    return _NUMBERS.get(name) or structure(name)


@cache
def structure(name: str) -> type[ctypes.Structure]:
    """The structure of this name; its fields have the names that they have in C."""
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", _text())
    assert body is not None, name
    fields = []
    for line in body[1].split(";")[:-1]:
        kind, names = line.strip().removeprefix("const ").split(maxsplit=1)
        fields += [(one.strip(" *\n"), _type(f"{kind} {one}")) for one in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@cache
def functions() -> dict[str, Function]:
    """All functions by their names in C, less the `draftproof_` in front."""
    found = {}
    defined = r"^(void|int64_t) draftproof_(\w+)\(([^)]*)\)\s*\{"
    for returns, name, takes in re.findall(defined, _text(), re.M):
        given = [one.strip() for one in takes.split(",")]
        threaded = given[-1] == "int64_t threads"
        found[name] = Function(_NUMBERS.get(returns), list(map(_type, given)), threaded)
    return found
