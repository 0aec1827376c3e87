"""One replica as the gateway knows it. State only: the Fleet changes it, everyone else reads."""

from collections.abc import Mapping

from gateway.replicas.listing import Listing
from gateway.replicas.metrics_page import NOTHING_SCRAPED, ScrapedState
from gateway.replicas.spec import ReplicaSpec, Role, parse_address


class Replica:
    """A replica of the fleet.

    Attributes:
        slot: the small integer that indexes every column; reused after the replica has left.
        name: what operators and clients see; never an address.
        epoch: changes when the replica restarts (what it had cached is gone); never the same for two
            replicas.
        up: whether active health probes find it healthy. False until the first probe.
        ejected: whether the breaker keeps requests away from it.
        trial_open: whether the breaker would let one trial request through an ejected replica.
        draining: whether it gets no new requests because it is about to leave.
        listing: the models it serves.
        kv: what its metrics last said.
        version: of its engine; None if it has not told since it started, or does not tell.
    """

    __slots__ = (
        "_address",
        "draining",
        "ejected",
        "epoch",
        "kv",
        "listing",
        "name",
        "slot",
        "spec",
        "trial_open",
        "up",
        "version",
    )

    def __init__(self, slot: int, name: str, spec: ReplicaSpec, epoch: int, listing: Listing) -> None:
        self._address = parse_address(spec.url)
        self.slot = slot
        self.name = name
        self.spec = spec
        self.epoch = epoch
        self.listing = listing
        self.kv: ScrapedState = NOTHING_SCRAPED
        self.version: str | None = None
        self.up = False
        self.ejected = False
        self.trial_open = False
        self.draining = False

    def __repr__(self) -> str:
        return f"<Replica {self.name} slot={self.slot}>"

    @property
    def routable(self) -> bool:
        """Whether it may be given a request now."""
        return self.up and not self.draining and (self.trial_open or not self.ejected)

    @property
    def role(self) -> Role:
        """Mixed, prefill or decode."""
        return self.spec.role

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return self._address.scheme

    @property
    def host(self) -> str:
        """Host name or address, IPv6 without brackets."""
        return self._address.host

    @property
    def port(self) -> int:
        """TCP port."""
        return self._address.port

    @property
    def tls(self) -> bool:
        """Whether it speaks TLS."""
        return self._address.tls

    @property
    def base_path(self) -> str:
        """Put before every request path; empty, or starts with a slash and does not end with one."""
        return self._address.base_path

    @property
    def host_header(self) -> bytes:
        """The value of its `Host` header."""
        return self._address.host_header

    @property
    def base_url(self) -> str:
        """Origin and base path, for probes. Not for clients' eyes."""
        return self._address.origin + self._address.base_path

    @property
    def served(self) -> frozenset[str]:
        """Base models and adapters it serves."""
        return self.listing.served

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapter name -> base model."""
        return self.listing.adapters

    @property
    def base_models(self) -> frozenset[str]:
        """What it serves, without the adapters."""
        return self.served.difference(self.adapters)

    def max_model_len(self, model: str) -> int | None:
        """Context length in tokens of a model it serves, None when it does not tell."""
        return self.listing.max_model_lens.get(model)
