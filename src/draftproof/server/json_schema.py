"""JSON schemas: the types that they allow, and their rules for a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator

from draftproof.errors import BadInput

FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and most chat templates write it, so that no model can write blanks for ever."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const",
           "enum")  # fmt: skip
"""Keywords of a JSON schema with numbers that restrict the text."""
NOTES = ("default", "examples", "title", "description")
"""Keywords that restrict nothing."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has names as keys, not keywords."""
TYPE_NAMES: dict[type, set[str]] = {
    str: {"string"}, int: {"integer", "number"}, float: {"number"}, bool: {"boolean"},
    type(None): {"null"}, list: {"array"}, dict: {"object"},
}  # fmt: skip
"""The names in schemas of the types that JSON is read into."""


def types_of(schema: object) -> set[str]:
    """The types that a schema allows, alternatives included; empty if it names none."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {name for name in (named if isinstance(named, list) else [named])
             if isinstance(name, str)}  # fmt: skip
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        types = types.union(*map(types_of, choices if isinstance(choices, list) else ()))
    return types


def json_rule(schema: dict[str, object]) -> str:
    """A JSON schema as the right side of a rule in Lark."""
    try:
        _reject_inexact(schema)
        return "%json " + json.dumps({**schema, "x-guidance": FORM})
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the JSON schema cannot be read: {error}") from None


def _reject_inexact(schema: object) -> None:
    """Raise BadInput for an integer of a schema that llguidance would round to another number."""
    if isinstance(schema, list):
        for part in schema:
            _reject_inexact(part)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in NAMED_SCHEMAS and isinstance(value, dict):
                for part in value.values():
                    _reject_inexact(part)
            elif name in NUMBERS and (wide := next(_wide_integers(value), None)) is not None:
                raise BadInput(
                    f"the JSON schema has {name} {wide}, beyond 2^53, which a grammar cannot "
                    "follow exactly; use a smaller number, or a string with a pattern"
                )
            elif name not in NOTES:
                _reject_inexact(value)


def _wide_integers(value: object) -> Iterator[int]:
    """Integers within a value that a double may not represent exactly."""
    if isinstance(value, int) and abs(value) > 1 << 53:
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _wide_integers(part)
