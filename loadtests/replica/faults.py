"""Faults that a test switches on and off while a replica runs.

`POST /sim/faults` merges a JSON object into what is set; null takes a fault back, and a body of null all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

DIE_MODES = ("reset", "close", "eof")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Those of a request apply to POST requests outside /sim; None is off."""

    status: int | None = None
    """Answer with this status instead of an answer."""
    retry_after_s: float | None = None
    """`Retry-After` of that answer."""
    delay_headers_s: float | None = None
    """Wait so long before anything else happens."""
    silence: bool | None = None
    """Accept the request and never answer."""
    silence_after_chunks: int | None = None
    """Send so many events of a stream, then nothing."""
    die_after_chunks: int | None = None
    """Send so many events of a stream (or half of another answer), then end the connection."""
    die_mode: str | None = None
    """How: `reset` (the default), `close` (in the middle of the body) or `eof` (a proper end of the body)."""
    error_event_after_chunks: int | None = None
    """Send so many events of a stream, then an error event and the end of the stream."""
    cut_at: tuple[int, ...] | None = None
    """Offsets in the bytes of a stream; the pieces between them are sent one by one."""
    cut_pause_s: float | None = None
    """Time between the pieces, default 1 ms."""
    count: int | None = None
    """Requests the faults above apply to before they clear themselves; None for all."""

    refuse: bool | None = None
    """Do not listen if there is a control port, else reset every connection with a request outside /sim."""
    hang_health: bool | None = None
    """Never answer /health."""
    health_status: int | None = None
    """Status of /health."""

    def without_request_faults(self) -> Faults:
        """Only what does not belong to single requests."""
        return Faults(refuse=self.refuse, hang_health=self.hang_health, health_status=self.health_status)

    def as_json(self) -> dict[str, Any]:
        """What is switched on."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


NO_FAULTS = Faults()


class FaultSwitch:
    """The faults of one replica at present.

    Args:
        on_refuse: told when `refuse` changes.
    """

    def __init__(self, on_refuse: Callable[[bool], None] | None = None) -> None:
        self.current = NO_FAULTS
        self.on_refuse = on_refuse

    def merge(self, change: Mapping[str, Any] | None) -> Faults:
        """Switch faults on and off.

        Args:
            change: values by name, None takes a fault back; None instead of a mapping clears all.

        Raises:
            ValueError: an unknown fault or a value that makes no sense.
        """
        if change is None:
            faults = NO_FAULTS
        else:
            faults = replace(self.current, **{name: _checked(name, value) for name, value in change.items()})
        refused = bool(self.current.refuse)
        self.current = faults
        if bool(faults.refuse) != refused and self.on_refuse is not None:
            self.on_refuse(not refused)
        return faults

    def take(self) -> Faults:
        """The faults that apply to one more request."""
        faults = self.current
        if faults is NO_FAULTS:
            return faults
        if faults.count is not None:
            left = faults.count - 1
            self.current = replace(faults, count=left) if left > 0 else faults.without_request_faults()
        return faults


_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "status": ("a status of 200 to 599", lambda value: _is_int(value) and 200 <= value <= 599),
    "health_status": ("a status of 200 to 599", lambda value: _is_int(value) and 200 <= value <= 599),
    "retry_after_s": ("a number of seconds", lambda value: _is_number(value) and value >= 0),
    "delay_headers_s": ("a number of seconds", lambda value: _is_number(value) and value >= 0),
    "cut_pause_s": ("a number of seconds", lambda value: _is_number(value) and value >= 0),
    "silence_after_chunks": ("a count", lambda value: _is_int(value) and value >= 0),
    "die_after_chunks": ("a count", lambda value: _is_int(value) and value >= 0),
    "error_event_after_chunks": ("a count", lambda value: _is_int(value) and value >= 0),
    "count": ("a count of at least 1", lambda value: _is_int(value) and value >= 1),
    "die_mode": (f"one of {', '.join(DIE_MODES)}", lambda value: value in DIE_MODES),
    "cut_at": (
        "rising offsets",
        lambda value: (
            isinstance(value, list | tuple)
            and all(_is_int(offset) and offset > 0 for offset in value)
            and list(value) == sorted(set(value))
        ),
    ),
    **{name: ("true or false", lambda value: isinstance(value, bool)) for name in ("silence", "refuse", "hang_health")},
}


def _checked(name: str, value: Any) -> Any:
    if name not in _CHECKS:
        raise ValueError(f"unknown fault {name!r}; there are {', '.join(sorted(_CHECKS))}")
    if value is None:
        return None
    expected, check = _CHECKS[name]
    if not check(value):
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return tuple(value) if name == "cut_at" else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
