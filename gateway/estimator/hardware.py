"""Accelerators: what one card computes, reads and holds.

All rates are the vendor's dense figures (no structured sparsity), in units of one per second. Vendors print
tensor-core throughput with 2:4 sparsity next to or instead of the dense one; where only the sparse figure is
printed, the dense one is half of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator card.

    Args:
        name: how users call it.
        bf16_flops: peak dense BF16 tensor throughput, FLOP/s.
        bandwidth_bytes_per_s: peak memory bandwidth, bytes/s.
        memory_bytes: memory of the card, bytes.
        prefill_efficiency: share of peak FLOP/s that a prefill reaches, in (0, 1].
        decode_efficiency: share of peak bandwidth that a decode step reaches, in (0, 1].

    Raises:
        ValueError: a rate or size is not a positive finite number, or an efficiency is outside (0, 1].
    """

    name: str
    bf16_flops: float
    bandwidth_bytes_per_s: float
    memory_bytes: float
    prefill_efficiency: float = 0.6
    decode_efficiency: float = 0.8

    def __post_init__(self) -> None:
        for field in ("bf16_flops", "bandwidth_bytes_per_s", "memory_bytes"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} of hardware {self.name!r} must be positive, not {value!r}")
        for field in ("prefill_efficiency", "decode_efficiency"):
            value = getattr(self, field)
            if not 0 < value <= 1:
                raise ValueError(f"{field} of hardware {self.name!r} must be above 0 and at most 1, not {value!r}")


# Sources: NVIDIA's datasheets, rows "BFLOAT16 Tensor Core", "GPU memory bandwidth", "GPU memory".
_PRESETS = (
    # H100 Tensor Core GPU datasheet, SXM5: 1,979 TFLOPS with sparsity, 3.35 TB/s, 80 GB.
    Hardware("h100-sxm", 989e12, 3.35e12, 80e9),
    # H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity, 4.8 TB/s, 141 GB.
    Hardware("h200-sxm", 989e12, 4.8e12, 141e9),
    # HGX B200 (Blackwell datasheet), per GPU: 4.5 PFLOPS with sparsity, 8 TB/s, 180 GB.
    Hardware("b200", 2250e12, 8.0e12, 180e9),
    # A100 80GB datasheet, SXM4: 312 TFLOPS dense (624 with sparsity), 2,039 GB/s, 80 GB.
    Hardware("a100-80g", 312e12, 2.039e12, 80e9),
    # L40S datasheet: 362.05 TFLOPS dense (733 with sparsity), 864 GB/s, 48 GB.
    Hardware("l40s", 362.05e12, 864e9, 48e9),
    # L4 datasheet: 242 TFLOPS with sparsity, 300 GB/s, 24 GB.
    Hardware("l4", 121e12, 300e9, 24e9),
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType({preset.name: preset for preset in _PRESETS})
"""The presets by name."""

_OWN_VALUES = {
    "flops": "bf16_flops",
    "bandwidth": "bandwidth_bytes_per_s",
    "memory": "memory_bytes",
    "prefill_efficiency": "prefill_efficiency",
    "decode_efficiency": "decode_efficiency",
}


def hardware(name: str) -> Hardware:
    """The preset of that name, or a card given by its values.

    Args:
        name: a key of `HARDWARE` in any case, or `flops=989e12,bandwidth=3.35e12,memory=80e9` (FLOP/s,
            bytes/s, bytes), optionally with `prefill_efficiency=` and `decode_efficiency=`.

    Raises:
        ValueError: unknown name (the message lists the known ones) or values that cannot be a card's.
    """
    text = name.strip()
    preset = HARDWARE.get(text.lower())
    if preset is not None:
        return preset
    if "=" in text:
        return _own_hardware(text)
    raise ValueError(
        f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}; "
        "or own values: flops=FLOP/s,bandwidth=bytes/s,memory=bytes"
    )


def _own_hardware(text: str) -> Hardware:
    values: dict[str, float] = {}
    for pair in text.split(","):
        key, _, number = (part.strip() for part in pair.partition("="))
        if key not in _OWN_VALUES:
            raise ValueError(f"unknown hardware value {key!r}; known: {', '.join(_OWN_VALUES)}")
        try:
            values[_OWN_VALUES[key]] = float(number)
        except ValueError:
            raise ValueError(f"hardware value {key}={number!r} is not a number") from None
    missing = [key for key in ("flops", "bandwidth", "memory") if _OWN_VALUES[key] not in values]
    if missing:
        raise ValueError(f"hardware {text!r} lacks {', '.join(missing)}")
    return Hardware(name=text, **values)
