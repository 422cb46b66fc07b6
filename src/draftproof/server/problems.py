"""Errors in the formats of OpenAI and Anthropic."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from draftproof.errors import BadInput, DraftproofError

CODES = {401: "invalid_api_key", 408: "request_timeout", 413: "request_too_large",
         429: "rate_limit_exceeded", 504: "timeout"}
"""The code of an error that has none of its own, by HTTP status."""
MESSAGES = "/v1/messages"
"""Paths whose errors have Anthropic's format."""
ANTHROPIC = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
             404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
             503: "overloaded_error", 504: "timeout_error"}
"""Anthropic's types of errors, by HTTP status; any other is an `api_error`."""
HANDLED = (DraftproofError, RequestValidationError, HTTPException)
"""The exceptions that `refusal` answers."""


def problem(
    message: str, status: int, code: str | None = None, headers: Mapping[str, str] | None = None,
    *, path: str = "",
) -> JSONResponse:  # fmt: skip
    """An error response.

    Args:
        message: One sentence.
        status: The HTTP status.
        code: The error's code for programs; None takes that of the status.
        headers: Further headers.
        path: The path of the request.
    """
    retry = {"Retry-After": "1"} if status in (429, 503) else {}
    body = error_body(message, status, code, path)
    return JSONResponse(body, status, {**retry, **(headers or {})})


def error_body(
    message: str, status: int, code: str | None = None, path: str = ""
) -> dict[str, object]:
    """An error as JSON; the arguments are those of `problem`."""
    text = message.encode(errors="replace").decode()
    if path.startswith(MESSAGES):
        return {"type": "error", "error": {"type": ANTHROPIC.get(status, "api_error"),
                                           "message": text}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": None,
                      "code": code or CODES.get(status)}}


async def refusal(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that raised one of `HANDLED`."""
    path = request.url.path
    if isinstance(error, RequestValidationError):
        return problem(_misread(error), 400, path=path)
    if isinstance(error, HTTPException):
        return problem(f"{request.method} {path}: {error.detail}", error.status_code, path=path)
    return problem(str(error), status_of(error), getattr(error, "code", None), path=path)


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    return 400 if isinstance(error, BadInput) else getattr(error, "status", 500)


def _misread(error: RequestValidationError) -> str:
    """The field that is wrong, its value, and the allowed values."""
    kinds = ("extra_forbidden", "missing")          # of a union: the most helpful
    first, *others = sorted(error.errors(), key=lambda each: (
        (each["type"] == kinds[1]) - (each["type"] == kinds[0])))
    path = [str(part) for part in first["loc"][1:]]
    where = ".".join(part for part in path if not re.match(r"[A-Z]|str$|.*\[", part))
    if first["type"] == "json_invalid" or not where:
        why = first.get("ctx", {}).get("error", "an object, with Content-Type: application/json")
        return f"the body must be JSON: {why}"
    if first["type"] == "extra_forbidden":
        return f"Unrecognized request argument: {where}"
    if first["type"] == "missing":
        return f'"{where}" is missing'
    same = [each for each in (first, *others) if each["loc"][1] == first["loc"][1]]
    wanted = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in same)
    return f'"{where}" was {first["input"]!r:.99}; it must be {", or ".join(wanted)}'
