"""Errors the gateway itself makes, in OpenAI's shape: {"error": {message, type, param, code}}.

A message helps the reader act and never carries a replica's address or a key.
"""

from dataclasses import dataclass

import orjson

from gateway.proxy.failures import Rule

REASONS: dict[int, bytes] = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}

_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    505: "invalid_request_error",
}


@dataclass(frozen=True, slots=True)
class GatewayError:
    """An answer the gateway makes instead of a replica's.

    Attributes:
        status: HTTP status.
        message: what went wrong and what to do about it.
        code: stable machine-readable code.
        param: the request field at fault, if one is.
        retry_after_s: whole seconds for a Retry-After header, if the client should come back.
        close: the client's bytes can no longer be trusted or are not wanted, so the connection ends with the answer.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None
    close: bool = False

    def body(self) -> bytes:
        """Return the JSON body."""
        return orjson.dumps({"error": self._fields()})

    def event(self) -> bytes:
        """Return the error as one server-sent event."""
        return b"data: " + self.body() + b"\n\n"

    def _fields(self) -> dict[str, str | None]:
        kind = _TYPES.get(self.status, "api_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


def from_rule(rule: Rule, retry_after_s: int) -> GatewayError:
    """Return the error of a row of the failure table; 429 and 503 ask the client back after `retry_after_s`."""
    return GatewayError(
        rule.status, rule.message, rule.code, retry_after_s=retry_after_s if rule.status in (429, 503) else None
    )


def unknown_model(model: str) -> GatewayError:
    """No replica has ever listed this model."""
    shown = model if len(model) <= 100 else model[:100] + "..."
    return GatewayError(
        404,
        f"The model `{shown}` does not exist. GET /v1/models lists those that do.",
        "model_not_found",
        param="model",
    )


def invalid_target(header: str) -> GatewayError:
    """A header asks for a latency target that is none."""
    return GatewayError(
        400,
        f"The header `{header}` must be a positive number of milliseconds such as 500 or 12.5, once.",
        "invalid_header",
        param=header,
    )


def no_replica(retry_after_s: int) -> GatewayError:
    """The model is known but nothing can serve it now."""
    return GatewayError(
        503,
        "No replica can serve this model at the moment; try again later.",
        "no_replica_available",
        retry_after_s=retry_after_s,
    )


INVALID_KEY = GatewayError(
    401, "Missing or wrong API key: send `Authorization: Bearer <key>`.", "invalid_api_key", close=False
)
BODY_TOO_LARGE = "body_too_large"


def body_too_large(limit_bytes: int) -> GatewayError:
    """The body is over the configured limit."""
    return GatewayError(413, f"The request body is larger than {limit_bytes} bytes.", BODY_TOO_LARGE, close=True)


HEAD_TOO_LARGE = GatewayError(431, "The request line and headers are too large.", "headers_too_large", close=True)
HEAD_TIMEOUT = GatewayError(408, "The request head did not arrive in time.", "request_timeout", close=True)
BODY_TIMEOUT = GatewayError(408, "The request body did not arrive in time.", "request_timeout", close=True)
BAD_HTTP = GatewayError(400, "The request is not valid HTTP/1.1.", "invalid_http", close=True)
UNSUPPORTED_VERSION = GatewayError(505, "Use HTTP/1.1 or HTTP/1.0.", "unsupported_http_version", close=True)
UNKNOWN_METHOD = GatewayError(501, "The request method is not implemented.", "unknown_method", close=True)
UNKNOWN_CODING = GatewayError(
    501, "Transfer-Encoding must be `chunked` and nothing else.", "unknown_transfer_coding", close=True
)
BAD_TARGET = GatewayError(400, "The request target is not valid.", "invalid_target", close=True)
BAD_HOST = GatewayError(400, "Exactly one valid Host header is needed.", "invalid_host", close=True)
TRANSFER_PARAMS = GatewayError(
    400,
    "`kv_transfer_params` are set by the gateway; leave them out.",
    "unsupported_parameter",
    param="kv_transfer_params",
)
NOT_FOUND = GatewayError(404, "There is no such path. The API lives under /v1/.", "not_found")
INTERNAL = GatewayError(500, "The gateway failed to handle the request; its log has the details.", "internal_error")
