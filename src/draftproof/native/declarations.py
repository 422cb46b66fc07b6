"""What the C sources declare, for ctypes: structures and functions, read from the sources.

The sources also say what each pointer points to: its type, and in a comment after its name how
many elements the function reads or writes, such as `const bf16 *logits /* [rows, vocab] */`, or
`/* [vocab] or null */`. Of `void` they say how many bytes, of a structure how many `rows` it has. A
size may call functions that `size_helper` or `derived` register. Every tensor is compared with that
before its address goes to C.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.native.build import HERE, SOURCES

Value = Tensor | ctypes.Structure | ctypes.Array[Any] | int | float | None
"""What Python may pass for an argument in C, or for a field of a structure."""
CType = (type[ctypes.c_int64] | type[ctypes.c_int32] | type[ctypes.c_float]
         | type[ctypes.c_void_p] | type[ctypes.Structure])  # fmt: skip
"""The type of an argument in C, or of a field of a structure."""
Size = Callable[[Sequence[Value]], int]
"""How many elements a pointer must have, from the values of all arguments or fields."""
Count = Callable[["Structure"], int]
"""Counts something of a structure."""
_NUMBERS: dict[str, CType] = {
    "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float,
}
_DTYPES = {
    "int64_t": torch.int64, "int32_t": torch.int32, "int8_t": torch.int8, "uint8_t": torch.uint8,
    "float": torch.float32, "bf16": torch.bfloat16, "uint16_t": torch.float16,
}
"""What an element of a tensor is in C; `void` is anything, and a structure is no tensor."""
_HELPERS: dict[str, Callable[..., int]] = {}
_DERIVED: set[str] = set()
_NOTE = re.compile(r"/\*\s*(?:\[([^]]*)\]\s*)?(or null)?\s*\*/")


class Declaration(NamedTuple):
    """An argument of a function, or a field of a structure.

    Attributes:
        name: The name in C.
        type: The ctypes type.
        pointee: The name of the type it points to; empty for a number.
        is_const: C only reads what it points to.
        nullable: It may be null.
        size: How many elements it must have; None where the source does not say.
    """

    name: str
    type: CType
    pointee: str
    is_const: bool
    nullable: bool
    size: Size | None


class Function(NamedTuple):
    """A function in C. threaded: whether a number of threads comes last, which Python adds."""

    returns: CType | None
    takes: list[Declaration]
    threaded: bool


class Checked(NamedTuple):
    """A declaration, and what is compared for each value: looked up once."""

    declaration: Declaration
    dtype: torch.dtype | None
    any_dtype: bool
    pointee: str
    is_pointer: bool
    nullable: bool
    size: Size | None

    @classmethod
    def of(cls, declaration: Declaration) -> Checked:
        pointee = declaration.pointee
        dtype, is_void = _DTYPES.get(pointee), pointee == "void"
        return cls(declaration, dtype, is_void, pointee, pointee != "", declaration.nullable,
                   declaration.size)

    def tensor(self, tensor: Tensor, values: Sequence[Value], where: str) -> Tensor:
        """The tensor whose memory goes to C: this one, or a contiguous copy of one C only reads.

        Args:
            tensor: The tensor to pass.
            values: All values of the call or of the structure.
            where: The function or structure, for the error.

        Raises:
            BadInput: It has another dtype, lies elsewhere, is too small, or would be written to
                in a copy.
        """
        if tensor.dtype is not self.dtype and not self.any_dtype:
            wanted = self.dtype or self.declaration.pointee or "a number"
            self._refuse(where, f"{wanted} was wanted, and a tensor of {tensor.dtype} was passed")
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            self._refuse(where, "a dense tensor on the CPU was wanted, and one of "
                                f"{tensor.layout} on {tensor.device} was passed")
        if not tensor.is_contiguous():
            if not self.declaration.is_const:
                self._refuse(where, "C writes to it, and the tensor passed is not contiguous")
            tensor = tensor.contiguous()
        room, what = ((tensor.nbytes, "bytes") if self.any_dtype else
                      (tensor.numel(), "elements"))  # fmt: skip
        if self.size is not None and room < self.size(values):
            self._refuse(where, f"{self.size(values)} {what} were wanted, and {room} were passed")
        return tensor

    def pointer(self, value: Value, values: Sequence[Value], where: str) -> None:
        """Compare what is passed for a pointer and is no tensor.

        Raises:
            BadInput: It is no structure of this kind and no array of so many, or it is null where
                it may not be.
        """
        pointee = self.pointee
        if isinstance(value, ctypes.Structure):
            fits = type(value).__name__ == pointee
            fits &= self.size is None or getattr(value, "rows", 1) >= self.size(values)
        elif isinstance(value, ctypes.Array):
            kind = value._type_
            fits = kind.__name__ == pointee or kind is _NUMBERS.get(pointee) or pointee == "void"
            fits |= hasattr(value, "held") and pointee.endswith("*")        # of `addresses`
            fits &= self.size is None or len(value) >= self.size(values)
        else:
            fits = value is None and self.nullable
        if not fits:
            self._refuse(where, f"{pointee} was wanted, and {value!r} was passed")

    def _refuse(self, where: str, why: str) -> None:
        raise BadInput(f"the argument {self.declaration.name} of the C kernel {where}: {why}; "
                       "correct the code that calls it")


def checked_values(
    checks: Sequence[Checked], values: Sequence[Value], where: str
) -> tuple[list[Value], list[object]]:
    """The values of a call or a structure, each compared to its declaration.

    This runs several times per token, so what fits costs no call.

    Args:
        checks: What is declared, in the order of the values.
        values: What is passed.
        where: The function or structure, for the error.

    Returns:
        The values, of which some may be copies, and what ctypes gets for them: addresses and
        numbers. The values must live as long as the addresses are used.

    Raises:
        BadInput: A tensor, structure or array is not what is declared, or there is a bare address.
    """
    held, passed = list(values), list[object]()
    for place, (check, value) in enumerate(zip(checks, values, strict=False)):
        kind = type(value)
        if kind is int and not check.is_pointer:
            passed.append(value)
        elif isinstance(value, Tensor):
            if not (
                (value.dtype is check.dtype or check.any_dtype)
                and value.is_cpu and value.layout is torch.strided and value.is_contiguous()
                and (check.size is None
                     or (value.nbytes if check.any_dtype else value.numel()) >= check.size(values))
            ):  # fmt: skip
                held[place] = value = check.tensor(value, values, where)
            passed.append(value.data_ptr())
        elif not check.is_pointer:
            passed.append(value)                                # ctypes refuses what is no number
        elif value is None:
            if not check.nullable:
                check.pointer(value, values, where)
            passed.append(None)
        else:
            if check.size is not None or kind.__name__ != check.pointee:
                check.pointer(value, values, where)
            passed.append(ctypes.addressof(cast(ctypes.Structure, value)))
    return held, passed


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Where tensors lie, for a pointer to pointers; they are kept alive."""
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    array: Any = (ctypes.c_void_p * len(tensors))(*pointers)
    array.held = tuple(tensors)
    return cast("ctypes.Array[ctypes.c_void_p]", array)


class Structure(ctypes.Structure):
    """A structure of the sources.

    Its pointers take tensors, arrays and structures, which are kept alive, and no bare address.
    Numbers at the end may be left out and are 0; without any value everything is.
    """

    checks: ClassVar[tuple[Checked, ...]]
    indices: ClassVar[dict[str, int]]
    zeros: ClassVar[tuple[Value, ...]]
    derived: ClassVar[dict[str, Count]]

    def __init__(self, *values: Value) -> None:
        derived = self.derived if values else {}
        values += self.zeros[len(values) :] if values else ()
        self.held, fields = checked_values(self.checks, values, type(self).__name__)
        super().__init__(*fields)
        for name, count in derived.items():
            setattr(self, name, count(self))

    def pointed(self, name: str) -> Any:
        """The tensor, array or structure that was passed for a pointer; None for null."""
        return self.held[self.indices[name]]


def size_helper(function: Callable[..., int]) -> Callable[..., int]:
    """Decorate a function that the notes on sizes in the C sources may call by its name."""
    _HELPERS[function.__name__] = function
    return function


def derived(kind: type[Structure]) -> Callable[[Count], Count]:
    """Decorate a function that counts something of a structure, once, when it is made.

    It becomes an attribute of its name, and the notes on sizes in C may call it by its name.
    """
    def register(count: Count) -> Count:
        kind.derived[count.__name__] = count
        _DERIVED.add(count.__name__)
        return count

    return register


@cache
def _text() -> tuple[str, list[tuple[str, bool]]]:
    """All sources without comments; after a name, @i@ stands for the i-th note on its size."""
    notes = list[tuple[str, bool]]()

    def noted(match: re.Match[str]) -> str:
        notes.append((match[1] or "", match[2] is not None))
        return f"@{len(notes) - 1}@"

    texts = (path.read_text(encoding="utf-8")
             for path in (*sorted(HERE.glob("*.h")), *SOURCES))
    text = re.sub(rf"(?<=\w)\s*{_NOTE.pattern}", noted, "\n".join(texts))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S), notes


def _declared(declarations: Sequence[str]) -> list[Declaration]:
    """Of arguments or fields, such as "const bf16 *logits@3@"."""
    parts = [re.fullmatch(r"(.*?)(\w+)(?:@(\d+)@)?", text.strip(), re.S) for text in declarations]
    names = [part[2] for part in parts if part is not None]
    made = []
    for part in parts:
        assert part is not None, declarations
        kind, name = part[1], part[2]
        shape, nullable = _text()[1][int(part[3])] if part[3] else ("", False)
        words = kind.replace("*", " * ").split()
        base = next(word for word in words if word not in ("const", "*"))
        pointee = base + " *" * (words.count("*") - 1) if "*" in words else ""
        made.append(Declaration(
            name, ctypes.c_void_p if pointee else _NUMBERS.get(base) or structure(base), pointee,
            words[0] == "const" and words.count("*") == 1, nullable, _size(shape, names)
        ))  # fmt: skip
    return made


def _size(shape: str, names: Sequence[str]) -> Size | None:
    """The product of what stands in "rows, 2 * layer->size", of the values of `names`."""
    if not shape:
        return None
    parts = re.split(r",(?![^()]*\))", shape)                  # not those of a helper's arguments
    product = " * ".join(f"({part.strip()})" for part in parts)
    code = re.sub(r"(?<!\.)\b[A-Za-z_]\w*\b(?!\()",
                  lambda word: f"values[{names.index(word[0])}]", product.replace("->", "."))
    code = re.sub(r"\b(\w+)\((values\[\d+\])\)",
                  lambda call: f"{call[2]}.{call[1]}" if call[1] in _DERIVED else call[0], code)
    size: Size = eval(f"lambda values: {code}", _HELPERS)
    return size


@cache
def structure(name: str) -> type[Structure]:
    """The structure of this name; its fields have the names that they have in C."""
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", _text()[0])
    assert body is not None, name
    lines = [line.strip() for line in body[1].split(";")[:-1]]
    declared = []
    for line in lines:
        match = re.match(r"(?:const )?\w+\s", line)
        assert match is not None, line
        declared += [match[0] + field for field in line[match.end() :].split(",")]
    fields = _declared(declared)
    return type(name, (Structure,), {
        "_fields_": [(field.name, field.type) for field in fields],
        "checks": tuple(map(Checked.of, fields)),
        "zeros": tuple(None if field.pointee else 0 for field in fields), "derived": {},
        "indices": {field.name: index for index, field in enumerate(fields)},
    })


def array_of(name: str, values: Sequence[ctypes.Structure]) -> ctypes.Array[ctypes.Structure]:
    """An array of copies of structures of this name; what they point to is kept alive."""
    kind: type[ctypes.Structure] = structure(name)
    array: Any = (kind * len(values))(*values)
    array.held = tuple(values)
    return cast("ctypes.Array[ctypes.Structure]", array)


@cache
def functions() -> dict[str, Function]:
    """The functions for Python by their names in C, less the `draftproof_` in front: those that
    say the size of every array of numbers. Others are called from C alone."""
    by_name = {}
    defined = r"^(void|int64_t) draftproof_(\w+)\(([^)]*)\)\s*\{"
    for returns, name, takes in re.findall(defined, _text()[0], re.M):
        declared = _declared(takes.split(","))
        threaded = declared[-1].name == "threads"
        takes = declared[: len(declared) - threaded]
        if all(item.size is not None for item in takes if item.pointee in _DTYPES):
            by_name[name] = Function(_NUMBERS.get(returns), takes, threaded)
    return by_name

