"""Stored responses that later requests may continue (`previous_response_id`)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from draftproof.errors import Unavailable

KEPT = 64 << 20
"""The most bytes of conversations and responses, as JSON; the least recently used are dropped
first."""

Keep = Callable[[dict[str, object], list[dict[str, object]]], None]
"""Keeps a response, given the assistant's messages in it."""


class Kept(NamedTuple):
    """A response with the conversation up to it."""

    response: dict[str, object]
    messages: list[dict[str, object]]
    size: int


class ResponseStore:
    """Responses by owner and id, in memory only."""

    def __init__(self, limit: int = KEPT) -> None:
        self.limit, self._size = limit, 0
        self._kept: OrderedDict[tuple[int, str], Kept] = OrderedDict()

    def messages(self, owner: int, name: str | None) -> list[dict[str, object]]:
        """The conversation up to a response, to be continued.

        Raises:
            Unavailable: It is not stored, or not for this owner.
        """
        return list(self._find(owner, name).messages) if name is not None else []

    def get(self, owner: int, name: str) -> dict[str, object]:
        """A response."""
        return self._find(owner, name).response

    def delete(self, owner: int, name: str) -> None:
        """Forget a response."""
        self._size -= self._find(owner, name).size
        del self._kept[owner, name]

    def keeper(self, owner: int, before: list[dict[str, object]]) -> Keep:
        """A function that stores a response, and the conversation `before` it."""
        def keep(response: dict[str, object], new: list[dict[str, object]]) -> None:
            messages = before + new
            size = len(json.dumps([response, messages]))
            self._kept[owner, str(response["id"])] = Kept(response, messages, size)
            self._size += size
            while self._size > self.limit:
                self._size -= self._kept.popitem(last=False)[1].size

        return keep

    def _find(self, owner: int, name: str) -> Kept:
        kept = self._kept.get((owner, name))
        if kept is None:
            raise Unavailable(
                f"there is no response {name[:99]!r} here: this server keeps the latest responses "
                "in memory, for the API key that asked; send the conversation as input", 404,
                "previous_response_not_found",
            )  # fmt: skip
        self._kept.move_to_end((owner, name))
        return kept
