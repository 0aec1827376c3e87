"""Errors in the shapes of vLLM 0.32's API server."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson
from aiohttp import web


class ApiError(Exception):
    """A request that is refused with OpenAI's error body.

    Args:
        status: HTTP status.
        message: for people.
        kind: `type` of the body.
        param: the parameter that is wrong.
    """

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return error_body(self.status, str(self), self.kind, self.param)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid(param: str, message: str, value: object) -> NoReturn:
    """Refuse a parameter's value."""
    raise ApiError(400, f"{message} (parameter={param}, value={value})", param=param)


def validation_error(kind: str, loc: str, message: str, given: str, **context: Any) -> ApiError:
    """The API server's own complaint about a body that does not fit its model."""
    details: dict[str, Any] = {"type": kind, "loc": loc, "msg": message, "input": given}
    if context:
        details["ctx"] = context
    return ApiError(400, f"1 validation error:\n  {details!r}", "Bad Request", loc)


def missing(body: dict[str, Any], field: str) -> ApiError:
    """A required field is not there."""
    return validation_error("missing", f"body.{field}", "Field required", f"<dict of {len(body)} items>")


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        ApiError: it is not JSON, not an object, or not declared as JSON.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, "Bad Request")
    raw = await request.read()
    try:
        body = orjson.loads(raw)
    except ValueError:
        raise _json_error(raw) from None
    if not isinstance(body, dict):
        given = "None" if body is None else f"<{type(body).__name__} of {_size(body)} items>"
        message = "Input should be a valid dictionary or object to extract fields from"
        raise validation_error("model_attributes_type", "body", message, given)
    return body


def _size(body: object) -> int:
    return len(body) if isinstance(body, list | str) else 1


def _json_error(raw: bytes) -> ApiError:
    position, reason = 0, "Invalid JSON"
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except UnicodeDecodeError as error:
        position, reason = error.start, "Invalid UTF-8"
    return validation_error("json_invalid", f"body.{position}", "JSON decode error", "<dict of 0 items>", error=reason)
