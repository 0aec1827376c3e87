"""CPU time and memory of a process with its threads and everything it has started."""

import sys
import time

import psutil

_LINUX: bool = sys.platform == "linux"
_CPUCLOCK_SCHED = 2


class ProcessGoneError(RuntimeError):
    """A process that is measured has ended."""


def _cpu_s(process: psutil.Process) -> float:
    """User and system time of all threads, those that have ended too."""
    if _LINUX:
        # The clock behind clock_getcpuclockid(3), as glibc builds its number: the scheduler's nanoseconds.
        # /proc/PID/stat has the same sum in ticks of 10 ms, which is too coarse for short windows.
        return time.clock_gettime((~process.pid << 3) | _CPUCLOCK_SCHED)
    times = process.cpu_times()
    return float(times.user + times.system)


class ProcessTree:
    """A process and its descendants, as they are at the beginning."""

    def __init__(self, pid: int) -> None:
        """Find them.

        Args:
            pid: process id of the root.

        Raises:
            ProcessGoneError: there is no such process.
        """
        try:
            root = psutil.Process(pid)
            self._processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess as error:
            raise ProcessGoneError(str(error)) from None

    def cpu_s(self) -> float:
        """CPU seconds that all of them have used so far.

        Raises:
            ProcessGoneError: one of them has ended.
        """
        try:
            return sum(_cpu_s(process) for process in self._processes)
        except (OSError, psutil.Error) as error:
            raise ProcessGoneError(f"a measured process has ended: {error}") from None

    def rss_bytes(self) -> int:
        """Resident memory now, summed; pages that processes share count in each.

        Raises:
            ProcessGoneError: one of them has ended.
        """
        try:
            return sum(int(process.memory_info().rss) for process in self._processes)
        except psutil.Error as error:
            raise ProcessGoneError(f"a measured process has ended: {error}") from None
