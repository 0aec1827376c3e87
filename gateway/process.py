"""What every serving process sets up for itself: its log, its limit of open files, its garbage collector."""

import gc
import logging
import resource
import sys

logger = logging.getLogger(__name__)

_DESCRIPTORS_PER_CONNECTION = 2
"""One towards the client, one towards the replica."""
_DESCRIPTORS_BESIDES = 200
_OBJECTS_PER_COLLECTION = 10_000
"""Container objects that may be added before the youngest generation is looked through. A request leaves no cycles, so
there is little to find; Python's own 700 would have every few requests pay for a search."""


def configure_logging(level: str, worker: int | None = None) -> None:
    """Log events to standard error.

    Args:
        level: of `logging`, in any case.
        worker: number of a worker process, to stand in every line; None for a process that is none.
    """
    who = f" worker {worker}" if worker is not None else ""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s{who} %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    # One line per probe is what aiohttp's own access log would add.
    logging.getLogger("aiohttp").setLevel(logging.WARNING)


def settle_garbage_collector() -> None:
    """Leave out of collections what is here after the start, and collect less often.

    What is here stays: it need not be looked through again and again, while requests wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, 20, 20)


def raise_descriptor_limit(max_connections: int) -> None:
    """Allow as many open files as the connections need, or as many as the system permits.

    The usual soft limit of 1,024 would be a hidden one of 500 streams. Programs that use select() need it low; this one
    does not.
    """
    wanted = max_connections * _DESCRIPTORS_PER_CONNECTION + _DESCRIPTORS_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return
    if limit < wanted:
        streams = (limit - _DESCRIPTORS_BESIDES) // _DESCRIPTORS_PER_CONNECTION
        logger.info("ulimit -n allows %d open files, enough for about %d streams at a time", limit, streams)
