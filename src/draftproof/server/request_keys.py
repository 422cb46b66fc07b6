"""The keys of a request's parts: messages, parts of their content, tool calls, items and blocks.

A key that nobody reads is refused by name: a misspelt one would change nothing, silently. What the
types of the official clients have is known, and so is what other servers' answers have, since they
are sent back with the next request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from draftproof.errors import BadInput


class Keys(NamedTuple):
    """What an object may hold.

    Attributes:
        known: Keys that are read, or that change nothing.
        empty: Keys that ask for something which is not honoured; they may be null or empty.
    """

    known: frozenset[str]
    empty: frozenset[str] = frozenset()


def _keys(known: str, empty: str = "") -> Keys:
    return Keys(frozenset(known.split()), frozenset(empty.split()))


REASONING = "reasoning_content reasoning thinking"
MESSAGE = _keys(
    f"role content name tool_calls tool_call_id {REASONING} "
    "id annotations cache_control parsed provider_specific_fields",
    "refusal audio function_call reasoning_details thinking_blocks prefix partial")
"""A message of a chat."""
TEXT_PART = _keys("type text cache_control prompt_cache_breakpoint annotations citations logprobs "
                  "id index parsed")
"""A part of a message's content that is text, of OpenAI's APIs."""
REFUSAL_PART = _keys("type refusal id")
"""A part that says why there is no answer."""
CALL = _keys("id type function index provider_specific_fields", "caller")
"""A tool call of a message."""
CALLED = _keys("name arguments parsed_arguments")
"""The function of a tool call."""
FUNCTION_TOOL = _keys("type name description parameters strict output_schema cache_control",
                      "defer_loading allowed_callers async")
"""A tool of the Responses API."""
ITEMS = {
    "message": _keys("type role content id status phase created_by"),
    "reasoning": _keys("type summary content id status encrypted_content"),
    "function_call": _keys("type call_id name arguments id status parsed_arguments created_by",
                           "caller namespace async"),
    "function_call_output": _keys("type call_id output id status name created_by",
                                  "caller namespace"),
}
"""Input items of the Responses API, by type."""
BLOCKS = {
    "text": _keys("type text cache_control citations"),
    "thinking": _keys("type thinking signature cache_control"),
    "redacted_thinking": _keys("type data cache_control"),
    "tool_use": _keys("type id name input cache_control caller", "toolset_name"),
    "tool_result": _keys("type tool_use_id content is_error cache_control", "toolset_name"),
}
"""Blocks of Anthropic's messages, by type."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of a chat."""


def check_keys(
    part: Mapping[str, object], keys: Keys, where: str, reads: Callable[[str], bool] | None = None
) -> None:
    """Refuse a key that nothing here reads.

    Args:
        part: The object.
        keys: What it may hold.
        where: What it is, for the error: "messages.0".
        reads: Whether the chat template reads a key that is not known.

    Raises:
        BadInput: There is one.
    """
    for name, value in part.items():
        if name in keys.known or (reads is not None and reads(name)):
            continue
        if name not in keys.empty:
            raise BadInput(f"{where} has the key {name!r:.60}, which nothing here reads; it may "
                           f"have {', '.join(sorted(keys.known))}")
        if value not in (None, False, "", [], {}):
            raise BadInput(f"{where} has {name!r}, which is not honoured here; leave it out")


def check_messages(messages: list[dict[str, object]], template: str) -> None:
    """Refuse roles, and keys of messages, their parts and their calls, that nothing reads.

    Args:
        messages: Those of a chat, as OpenAI's clients send them.
        template: The chat template: it may read further keys, and know further roles.

    Raises:
        BadInput: There is one.
    """
    def reads(name: str) -> bool:
        return re.search(rf"""[.'"]{re.escape(name)}\b""", template) is not None

    for number, message in enumerate(messages):
        where, role = f"messages.{number}", message.get("role")
        if role not in ROLES and not (isinstance(role, str) and _quotes(template, role)):
            raise BadInput(f"the role of {where} was {role!r:.60}; it must be one of "
                           f"{', '.join(ROLES)}")
        check_keys(message, MESSAGE, where, reads)
        content, calls = message.get("content"), message.get("tool_calls")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type", "text") == "text":
                check_keys(part, TEXT_PART, f"{where}.content.{place}", reads)
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                _check_call(call, f"{where}.tool_calls.{place}", reads)


def with_known_roles(messages: list[dict[str, object]], template: str) -> list[dict[str, object]]:
    """Messages in which developers are the system, as for all models that know no developers."""
    if _quotes(template, "developer"):
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages]


def _quotes(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _check_call(call: Mapping[str, object], where: str, reads: Callable[[str], bool]) -> None:
    if (kind := call.get("type", "function")) != "function":
        raise BadInput(f"{where} is of type {kind!r:.60}; only calls of functions are read here")
    check_keys(call, CALL, where, reads)
    if isinstance(function := call.get("function"), dict):
        check_keys(function, CALLED, f"{where}.function", reads)
