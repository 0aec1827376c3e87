"""Takes the usage event out of a stream whose client did not ask for it.

The engine sends it because the gateway asked (`gateway.prompt.rewrite.with_usage`): one event with empty `choices` and
a `usage` object, before `data: [DONE]`. Every other byte passes, in the read it came in, with one exception: of an
event that is cut by the end of a read, the part up to where `choices` shows what it is waits for the next read. No
client can do anything with such a part.

Generated text stands inside JSON strings, where quotes are escaped: the bytes `"usage"` with bare quotes are always a
key. A read of whole events without them is passed on after two searches in C.
"""

import re

import orjson

from gateway.proxy.answer import Answer

_MAX_HELD_BYTES = 16 << 10
"""A usage event has a few hundred bytes; what is longer and still has not shown its choices is something else."""

# Server-sent events end with a blank line (WHATWG HTML, 9.2.5). A lone CR as line end is allowed there and sent by
# nobody; such a stream passes as one long event.
_BLANK_LINE = re.compile(rb"\r?\n(?:\r?\n)+")
_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*([^\s])')
_DATA = b"data:"


class UsageFilter:
    """Stands between an event stream and its answer.

    At any time it is between two events, or inside one that passes, or holds the beginning of one.
    """

    __slots__ = ("_answer", "_held", "_inside")

    def __init__(self, answer: Answer) -> None:
        """Begin before the first event.

        Args:
            answer: where everything else goes.
        """
        self._answer = answer
        self._held = b""
        self._inside: bytes | None = None
        """The last bytes of an event that passes; its blank line may be cut too. None between two events."""

    def relay(self, data: bytes, chunk: bytes = b"") -> None:
        """Pass on the next bytes of the stream, unless they are the usage event's."""
        if self._inside is None and not self._held and b'"usage"' not in data and data[-2:] == b"\n\n":
            self._answer.relay(data, chunk)
            return
        passed = self._sift(data)
        if passed:
            self._answer.relay(passed)

    def flush(self) -> None:
        """The stream has ended, well or not: what is held will never become a usage event."""
        if self._held:
            held, self._held = self._held, b""
            self._answer.relay(held)

    def _sift(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        inside = self._inside
        if inside is not None:
            seam = len(inside)
            joined = inside + data
            end = _BLANK_LINE.search(joined)
            if end is None:
                self._inside = joined[-3:]
                return data
            passed.append(joined[seam : end.end()])
            self._inside = None
            data = joined[end.end() :]
        data, self._held = self._held + data, b""
        start = 0
        for end in _BLANK_LINE.finditer(data):
            event = data[start : end.end()]
            start = end.end()
            if not _is_usage(event):
                passed.append(event)
        rest = data[start:]
        if len(rest) <= _MAX_HELD_BYTES and _may_be_usage(rest):
            self._held = rest
        else:
            passed.append(rest)
            # More line ends after a blank line belong to no event.
            self._inside = rest[-3:] if rest.strip(b"\r\n") else None
        return b"".join(passed)


def _is_usage(event: bytes) -> bool:
    """Say whether a whole event is the one with the usage and nothing else."""
    if b'"usage"' not in event or not event.startswith(_DATA):
        return False
    try:
        content = orjson.loads(event[len(_DATA) :])
    except orjson.JSONDecodeError:
        return False
    return isinstance(content, dict) and content.get("choices") == [] and isinstance(content.get("usage"), dict)


def _may_be_usage(part: bytes) -> bool:
    """Say whether the beginning of an event leaves open that it is the one with the usage."""
    if len(part) <= len(_DATA):
        return _DATA.startswith(part)
    if not part.startswith(_DATA):
        return False
    payload = part[len(_DATA) :].lstrip(b" ")
    if payload and not payload.startswith(b"{"):
        return False
    choices = _CHOICES.search(payload)
    return choices is None or choices[1] == b"]"
