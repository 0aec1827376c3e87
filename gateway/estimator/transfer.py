"""Moving KV between replicas: how long a link takes.

Wire time only: no protocol overhead, no contention, no copy on either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LINKS: Mapping[str, float] = MappingProxyType(
    {
        # NVLink 4 (H100): 900 GB/s both ways together, 450 GB/s one way.
        "nvlink": 450e9,
        # PCIe 5.0 x16, one way: 32 GT/s x 16 lanes, before its encoding.
        "pcie5": 64e9,
        "400g": 400e9 / 8,
        "100g": 100e9 / 8,
        "25g": 25e9 / 8,
        "10g": 10e9 / 8,
    }
)
"""Bytes per second, one way, by link: NVLink, PCIe and Ethernet or InfiniBand by its Gbit/s."""


def transfer_s(size_bytes: float, link: str | float, latency_s: float = 0.0) -> float:
    """Seconds to move so many bytes over a link.

    Args:
        size_bytes: what moves.
        link: a key of `LINKS`, or a rate in bytes/s.
        latency_s: constant part of a transfer.

    Raises:
        ValueError: unknown link (the message lists the known ones), a rate that is not positive, or a
            negative size or latency.
    """
    if isinstance(link, str):
        if link not in LINKS:
            raise ValueError(f"unknown link {link!r}; known: {', '.join(LINKS)}")
        link = LINKS[link]
    if not link > 0:
        raise ValueError(f"a link's rate must be positive, not {link!r} bytes/s")
    if size_bytes < 0 or latency_s < 0:
        raise ValueError(f"neither size nor latency can be negative: {size_bytes!r} bytes, {latency_s!r} s")
    return latency_s + size_bytes / link
