"""On what a benchmark ran."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe() -> dict[str, Any]:
    """Processor, memory, kernel and Python of this machine."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def load_average() -> float:
    """Runnable threads, mean of the last minute."""
    return os.getloadavg()[0]
