"""Where a replica's KV events come from: what it says itself, or what the operator says of all. Pure.

vLLM's `GET /kv_event_sources` answers with the configuration of each data-parallel rank's publisher: 0.32 as an object
by rank, later ones as a list. An endpoint with a wildcard host is one the engine has bound, and the host is the
replica's. One with a host is either one the engine has bound as well (told `tcp://*:0` it binds its node's address and
says so), or one it connects to: then this gateway must have bound the port.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

_WILDCARD = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):(\d+)$")
_PORT = re.compile(r"^(tcp://.*:)(\d+)$")


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher of a replica.

    Attributes:
        rank: data-parallel rank.
        topic: what its messages begin with.
        endpoint: where to connect to; None if the engine connects to the gateway.
        replay_endpoint: where missing messages are asked for; None for nowhere.
    """

    rank: int
    topic: str
    endpoint: str | None
    replay_endpoint: str | None


def read_sources(answer: bytes, host: str, bound_port: int | None) -> list[Source]:
    """Read what a replica says of its publishers.

    Args:
        answer: body of `GET /kv_event_sources`.
        host: the replica's host, IPv6 without brackets.
        bound_port: port on which this gateway waits for engines; None if it does not.

    Returns:
        Its publishers by rank; none if it publishes nothing.

    Raises:
        ValueError: the answer is of no known form.
    """
    document = orjson.loads(answer)
    entries: list[tuple[int, Mapping[str, object]]] = []
    if isinstance(document, dict):
        for rank, config in document.items():
            if not isinstance(config, dict) or not str(rank).isdecimal():
                raise ValueError("not a publisher's configuration by rank")
            entries.append((int(rank), config))
    elif isinstance(document, list):
        for config in document:
            if not isinstance(config, dict):
                raise ValueError("not a list of publishers")
            rank = config.get("data_parallel_rank") or 0
            if not isinstance(rank, int):
                raise ValueError("not a rank")
            entries.append((rank, config))
    else:
        raise ValueError("neither an object nor a list")
    sources = []
    for rank, config in sorted(entries, key=lambda entry: entry[0]):
        endpoint, replay, topic = config.get("endpoint"), config.get("replay_endpoint"), config.get("topic")
        if config.get("publisher", "zmq") != "zmq" or not isinstance(endpoint, str):
            continue
        sources.append(
            Source(
                rank,
                topic if isinstance(topic, str) else "",
                None if _comes_to(endpoint, bound_port) else reachable(endpoint, host),
                reachable(replay, host) if isinstance(replay, str) and replay else None,
            )
        )
    return sources


def configured_sources(
    endpoint: str | None, replay_endpoint: str | None, topic: str, ranks: int, host: str
) -> list[Source]:
    """Return the publishers of a replica that does not list them.

    Args:
        endpoint: of rank 0, the port of others follows; `*` for the replica's host; None if engines connect to the
            gateway.
        replay_endpoint: likewise.
        topic: their topic.
        ranks: data-parallel ranks.
        host: the replica's host, IPv6 without brackets.
    """
    return [
        Source(
            rank,
            topic,
            reachable(_of_rank(endpoint, rank), host) if endpoint else None,
            reachable(_of_rank(replay_endpoint, rank), host) if replay_endpoint else None,
        )
        for rank in range(ranks)
    ]


def reachable(endpoint: str, host: str) -> str:
    """Return an endpoint as seen from here: a wildcard becomes the replica's host."""
    match = _WILDCARD.match(endpoint)
    if match is None:
        return endpoint
    return f"tcp://[{host}]:{match[2]}" if ":" in host else f"tcp://{host}:{match[2]}"


def _comes_to(endpoint: str, bound_port: int | None) -> bool:
    if bound_port is None or _WILDCARD.match(endpoint):
        return False
    match = _PORT.match(endpoint)
    return match is not None and int(match[2]) == bound_port


def _of_rank(endpoint: str, rank: int) -> str:
    """Data-parallel ranks publish on ports that follow each other."""
    match = _PORT.match(endpoint)
    return endpoint if match is None or not rank else f"{match[1]}{int(match[2]) + rank}"
