"""What an operator says about one replica, and the address read from it.

A replica's URL stays inside the gateway: clients and metrics see its name only.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}


class Role(StrEnum):
    """What a replica does in a fleet that may separate prefill from decode."""

    MIXED = "mixed"
    """Prefills and decodes: an ordinary replica."""
    PREFILL = "prefill"
    """Computes KV for others, and gets a client's request as a whole only while nothing else is up."""
    DECODE = "decode"
    """Takes requests, and pulls KV from a prefill replica when that pays."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The configuration of one replica."""

    url: str
    """Base URL, `http://host:port[/path]`. A trailing `/v1` is dropped: request paths carry their own."""
    name: str | None = None
    """The name operators see; None for `replica-1`, `replica-2`, ... in order of addition."""
    models: tuple[str, ...] = ()
    """Models it serves; empty to read them from its `/v1/models`."""
    role: Role = Role.MIXED
    hardware: str | None = None
    """A name of `gateway.estimator.hardware`; None to learn the constants from traffic."""
    model_shape: str | None = None
    """A name or the path of a config.json for `gateway.estimator.model`; None to learn from traffic."""
    tensor_parallel: int = 1
    api_key: str | None = field(default=None, repr=False)
    """The replica's own key, sent as a bearer token."""
    max_in_flight: int | None = None
    """Requests it may have at once; None for no limit."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step of its engine; None for the gateway's default."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens, as the data plane needs it."""

    scheme: str
    host: str
    port: int
    base_path: str
    host_header: bytes

    @property
    def origin(self) -> str:
        """Scheme, host and port as a URL without a path."""
        return f"{self.scheme}://{self.host_header.decode('ascii')}"

    @property
    def tls(self) -> bool:
        """Whether the replica speaks TLS."""
        return self.scheme == "https"


def parse_address(url: str) -> Address:
    """Read a replica's base URL.

    Args:
        url: `http[s]://host[:port][/path]`; IPv6 hosts in brackets.

    Raises:
        ValueError: when the URL has another scheme, no host, a bad port, credentials, a query or a fragment.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"replica URL must start with http:// or https://, got {url!r}")
    if parts.username is not None or parts.password is not None:
        # Not echoed: what stands before the @ may be a secret.
        raise ValueError("replica URL must not carry credentials; use the replica's api_key")
    if parts.query or parts.fragment:
        raise ValueError(f"replica URL must not have a query or a fragment, got {url!r}")
    if not parts.hostname:
        raise ValueError(f"replica URL has no host: {url!r}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"replica URL has a bad port: {url!r}") from error
    if port == 0:
        raise ValueError(f"replica URL has a bad port: {url!r}")
    try:
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise ValueError(f"replica URL has a bad host: {url!r}") from error
    default_port = DEFAULT_PORTS[parts.scheme]
    shown_host = f"[{host}]" if ":" in host else host
    shown = shown_host if port in (None, default_port) else f"{shown_host}:{port}"
    base_path = parts.path.rstrip("/").removesuffix("/v1")
    if any(character <= " " or character > "~" for character in shown + base_path):
        raise ValueError(f"replica URL must be printable ASCII, got {url!r}")
    return Address(parts.scheme, host, port or default_port, base_path, shown.encode("ascii"))
