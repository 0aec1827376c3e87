"""A gateway as a process: its signals, its limit of open files, and its configuration when that changes.

SIGTERM, SIGINT   stop: drain, then exit; a second one exits at once
SIGHUP            read the configuration again
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.app import Gateway
from gateway.config import Config
from gateway.process import raise_descriptor_limit, settle_garbage_collector
from gateway.reload import ConfigWatcher
from gateway.workers.redis_server import ServerFailed
from gateway.workers.supervisor import Supervisor

logger = logging.getLogger(__name__)


async def serve(config: Config, path: Path | None, read: Callable[[], Config]) -> int:
    """Run a gateway, of one process or several, until a signal stops it or its workers keep dying.

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
    gateway: Gateway | Supervisor = Supervisor(config) if config.listen.workers > 1 else Gateway(config)
    gave_up = gateway.gave_up if isinstance(gateway, Supervisor) else asyncio.Event()
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
        logger.error("cannot %s: %s", "start" if isinstance(error, ServerFailed) else "listen", error)
        await gateway.close()
        return 1
    settle_garbage_collector()
    watching = loop.create_task(watcher.run())
    await _first(loop.create_task(gave_up.wait()), stopping)
    watching.cancel()
    logger.info("stopping: draining %s", _under_way(gateway))
    draining = loop.create_task(gateway.stop())
    await _first(draining, at_once)
    if draining.done():
        draining.result()
    else:
        logger.warning("stopping at once: %s cut off", _under_way(gateway))
        draining.cancel()
        await asyncio.wait({draining})
        await gateway.close()
    return 1 if gave_up.is_set() else 0


def _under_way(gateway: Gateway | Supervisor) -> str:
    if isinstance(gateway, Supervisor):
        return f"{len(gateway.running)} workers"
    return f"{gateway.tally.in_progress} requests"


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait until a task has ended or an event has come."""
    waiting = asyncio.get_running_loop().create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
