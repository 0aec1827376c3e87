"""What the workers of one gateway tell each other, in memory that all of them see: a ring of bytes for each.

Who routes a request says what the replica holds now, and the others read it before their next decision. Through Redis
they hear it 10 to 35 ms later, when a client that has its answer may have asked its next question.

Layout
    heads    a place each, 8 bytes: how many bytes were ever written to its ring
    rings    a place each, `RING_BYTES`: messages one after the other, around the end:
        length   of the message, 4 bytes
        digest   of the message and of where it begins, 8 bytes
        message  at most `MOST_BYTES`

Who writes what: each worker to its own ring, first the message and then the head. A worker that is killed while it
writes leaves a message without a head, over which its successor writes. There are no locks, and no reader is waited
for: one that was slow finds its place written over, and knows, because the head is too far or the digest wrong. It goes
on from the head then, and says that it has missed something.
"""

import struct
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

RING_BYTES = 512 << 10
"""A worker that sends 500 requests a second with new prompts of 8 k tokens writes four fifths of it in a second."""
MOST_BYTES = 16 << 10
_HEAD = struct.Struct("=IQ")
PLACE_BYTES = 8 + RING_BYTES


class Rings:
    """One process' view of the rings.

    Attributes:
        places: how many there are.
    """

    def __init__(self, memory: memoryview, own: int = -1) -> None:
        """Look at the memory. What was told before is not read.

        Args:
            memory: `PLACE_BYTES` for every place.
            own: this worker's place; -1 if it has none.
        """
        self.places = len(memory) // PLACE_BYTES
        self._own = own
        self._heads = memory[: 8 * self.places]
        self._written = self._heads.cast("Q")
        self._memory = memory[8 * self.places :]
        # Where this process has read to; of its own ring, where it has written to.
        self._read_bytes = bytearray(self._heads)
        self._read = memoryview(self._read_bytes).cast("Q")

    def tell(self, message: bytes) -> None:
        """Tell all others.

        Args:
            message: at most `MOST_BYTES`.

        Raises:
            ValueError: it is longer.
        """
        if len(message) > MOST_BYTES:
            raise ValueError("a message of more than MOST_BYTES")
        place = self._own
        begin = self._written[place]
        self._put(place, begin, _HEAD.pack(len(message), xxh3_64_intdigest(message, begin)) + message)
        self._written[place] = self._read[place] = begin + _HEAD.size + len(message)

    @property
    def has_news(self) -> bool:
        """Whether others have told anything that was not read yet; cheap."""
        return self._heads != self._read_bytes

    def news(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield what was told and not read yet, by place; None where something was missed before that."""
        for place in range(self.places):
            while (begin := self._read[place]) != (written := self._written[place]):
                message = self._get(place, begin, written)
                self._read[place] = written if message is None else begin + _HEAD.size + len(message)
                yield place, message

    def _get(self, place: int, begin: int, written: int) -> bytes | None:
        # The next message may be on its way over the oldest.
        if not _HEAD.size <= written - begin <= RING_BYTES - _HEAD.size - MOST_BYTES:
            return None
        length, digest = _HEAD.unpack(self._bytes(place, begin, _HEAD.size))
        if length > min(written - begin - _HEAD.size, MOST_BYTES):
            return None
        message = self._bytes(place, begin + _HEAD.size, length)
        return message if xxh3_64_intdigest(message, begin) == digest else None

    def _bytes(self, place: int, begin: int, length: int) -> bytes:
        first = begin % RING_BYTES
        base, most = place * RING_BYTES, RING_BYTES - first
        if length <= most:
            return self._memory[base + first : base + first + length].tobytes()
        return (
            self._memory[base + first : base + RING_BYTES].tobytes()
            + self._memory[base : base + length - most].tobytes()
        )

    def _put(self, place: int, begin: int, data: bytes) -> None:
        first = begin % RING_BYTES
        base, most = place * RING_BYTES, RING_BYTES - first
        if len(data) <= most:
            self._memory[base + first : base + first + len(data)] = data
        else:
            self._memory[base + first : base + RING_BYTES] = data[:most]
            self._memory[base : base + len(data) - most] = data[most:]
