"""Reads JSON, but only if all programs read it alike."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Never


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text; bytes are UTF-8.

    Raises:
        json.JSONDecodeError: It is not JSON, or programs read it differently: duplicate keys in an
            object, NaN, or excessive digits or nesting.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _error("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _error(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError:                                  # more digits than Python converts
        raise _error("a number in it has thousands of digits") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _error(f'"{twice:.60}" is in one object twice; give it once')
    return read


def _refuse_constant(name: str) -> Never:
    raise _error(f"{name} is not a number of JSON")


def _error(why: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(why, "", 0)
