"""What a complete request asks for: its body read, the router's question put, its body made ready for a replica.

No replica is looked for here, and nothing is charged. What cannot be served comes back as the error to answer with.
"""

from typing import TYPE_CHECKING

from gateway.prompt.body import InvalidBody, RequestBody
from gateway.prompt.token_chain import TokenPrompt
from gateway.proxy import errors
from gateway.proxy.errors import GatewayError
from gateway.proxy.heads import RequestHead
from gateway.routing.query import Query
from gateway.routing.refusals import InvalidTarget, UnknownModel

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane

_NO_MODEL = GatewayError(
    400,
    "You must provide a `model`; GET /v1/models lists those that exist.",
    "missing_required_parameter",
    param="model",
)


def read_body(plane: "DataPlane", head: RequestHead, body: bytes) -> RequestBody | GatewayError:
    """Read a JSON body.

    Args:
        plane: how bodies are parsed, and which paths need a model.
        head: the request's.
        body: all of it, as the client has sent it.
    """
    try:
        parsed = plane.parse(head, body)
    except InvalidBody as invalid:
        return GatewayError(400, invalid.message, invalid.code, param=invalid.param)
    if parsed.model is None and plane.routes.needs_model(head.path):
        return _NO_MODEL
    return parsed


def query_for(
    plane: "DataPlane", head: RequestHead, body: RequestBody | None, received_s: float, tokens: TokenPrompt | None
) -> Query | GatewayError:
    """Return what the router is to be asked.

    Args:
        plane: whose router it is.
        head: the request's.
        body: its body; None if that is not JSON, or there is none.
        received_s: when it came: monotonic seconds.
        tokens: its prompt as the engine will see it, if known.
    """
    try:
        query = plane.router.query(body, head.headers, head.targets, received_s, tokens)
    except UnknownModel as unknown:
        return errors.unknown_model(unknown.model)
    except InvalidTarget as invalid:
        return errors.invalid_target(invalid.header)
    if head.content_encoding:
        # Nothing can be put into a compressed body.
        query.divisible = False
    return query


def body_for_replica(
    plane: "DataPlane", head: RequestHead, read: RequestBody | None, query: Query, body: bytes
) -> tuple[bytes, bool]:
    """Return the body as replicas get it, and whether usage is asked for in it that the client has not asked for.

    Args:
        plane: whether, and on which paths, usage is asked for.
        head: the request's.
        read: what `read_body` has made of the body; None if that is not JSON, or there is none.
        query: what the router is asked.
        body: as the client has sent it.
    """
    if query.rewritten_model is not None:
        body = query.rewritten_body(body)
    if plane.asks_usage and read is not None and read.stream and not read.include_usage:
        asking = plane.asking_usage(head, body)
        if asking is not None:
            return asking, True
    return body, False
