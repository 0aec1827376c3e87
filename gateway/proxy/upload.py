"""A request body that is not JSON, streamed through to the replica while the client still sends it.

Rules:
- Nothing of it is kept once it is on its way, so a request whose upload has `started` cannot be sent again.
- The gateway holds what one read brought, no more: the client is read no further until a connection to the replica is
  there, and while that connection cannot take more.
"""

from gateway.proxy.answer import ClientSide
from gateway.proxy.heads import RequestHead
from gateway.proxy.upstream import ReplicaConnection


class Upload:
    """The body of one request.

    Attributes:
        length: bytes of it, as the head for the replica states them; None: it goes in chunks.
        started: bytes of it have been sent.
        blocked: the client is not read, because of the replica.
    """

    __slots__ = ("_client", "_pending", "blocked", "length", "started")

    def __init__(self, client: ClientSide, head: RequestHead, pending: list[bytes]) -> None:
        """Begin.

        Args:
            client: who sends it.
            head: the request's.
            pending: what of it came before the request's turn.
        """
        self._client = client
        self._pending = pending
        self.length = head.content_length
        if self.length is None and not head.chunked:
            self.length = 0
        self.started = False
        self.blocked = False

    def pass_on(self, data: bytes, connection: ReplicaConnection | None) -> None:
        """Send a piece, or hold it while there is no connection."""
        if connection is None:
            self._pending.append(data)
            self.hold()
            return
        self.started = True
        connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self.length is None else data)

    def pass_on_pending(self, connection: ReplicaConnection) -> None:
        """Send what has waited for the connection."""
        pending, self._pending = self._pending, []
        for data in pending:
            self.pass_on(data, connection)

    def end(self, connection: ReplicaConnection | None) -> None:
        """The client has sent all of it."""
        if connection is not None and self.length is None:
            connection.write(b"0\r\n\r\n")

    def hold(self) -> None:
        """Read the client no further."""
        if not self.blocked:
            self.blocked = True
            self._client.pause()

    def let_go_on(self) -> None:
        """Read the client again."""
        if self.blocked:
            self.blocked = False
            self._client.resume()
