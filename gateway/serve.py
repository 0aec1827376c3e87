"""A gateway as a process: its signals, its limit of open files, and its configuration when that changes.

SIGTERM, SIGINT   stop: drain, then exit; a second one exits at once
SIGHUP            read the configuration again
"""

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from gateway.app import Gateway
from gateway.config import Config
from gateway.reload import ConfigWatcher

logger = logging.getLogger(__name__)

_DESCRIPTORS_PER_CONNECTION = 2
"""One towards the client, one towards the replica."""
_DESCRIPTORS_BESIDES = 200
_OBJECTS_PER_COLLECTION = 10_000
"""Container objects that may be added before the youngest generation is looked through. A request leaves no cycles, so
there is little to find; Python's own 700 would have every few requests pay for a search."""


async def serve(config: Config, path: Path | None, read: Callable[[], Config]) -> int:
    """Run a gateway until a signal stops it.

    Args:
        config: the configuration to start with.
        path: its file, watched for changes; None if there is none.
        read: reads and validates the configuration again.

    Returns:
        The exit code.
    """
    loop = asyncio.get_running_loop()
    raise_descriptor_limit(config.limits.max_connections)
    stopping, at_once = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            at_once.set()
        stopping.set()

    # Before anything else: a start may take seconds, and a signal in it must not kill the process half way.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    gateway = Gateway(config)
    watcher = ConfigWatcher(path, read, gateway.reload)
    loop.add_signal_handler(signal.SIGHUP, watcher.request)
    starting = loop.create_task(gateway.start())
    await _first(starting, stopping)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        await gateway.close()
        return 0
    try:
        starting.result()
    except OSError as error:
        logger.error("cannot listen: %s", error)
        await gateway.close()
        return 1
    # What is here after the start stays: it need not be looked through again and again, while requests wait.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, 20, 20)
    watching = loop.create_task(watcher.run())
    await stopping.wait()
    watching.cancel()
    logger.info("stopping: draining %d requests", gateway.tally.in_progress)
    draining = loop.create_task(gateway.stop())
    await _first(draining, at_once)
    if draining.done():
        draining.result()
    else:
        logger.warning("stopping at once: %d requests are cut off", gateway.tally.in_progress)
        draining.cancel()
        await asyncio.wait({draining})
        await gateway.close()
    return 0


async def _first(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Wait until a task has ended or an event has come."""
    waiting = asyncio.get_running_loop().create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


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
