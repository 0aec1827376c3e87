"""A worker process: `python -m gateway.workers.worker NUMBER CONTROL CONNECTIONS BOARD PLACE`.

The three in the middle are descriptors; PLACE is its row on the board (`gateway.sharing.board`), -1 if there is none.

What the supervisor says, and what comes back

    do: start    config, facts            is: serving
    do: facts    facts                    -
    do: reload   config                   answer, or refused
    do: metrics  -                        is: page, in parts from number 0 to one that `ends` it; then answer
    do: replicas, state                   answer
    do: explain  request                  answer: why it went where it did, see gateway.admin.explain
    do: rehearse path, headers, body      answer: where it would go now; the body in base64
    do: active   replica                  answer: whether its answers have flowed lately
    do: leave    -                        -          no connection is kept alive any more
    do: stop     -                        is: page, when all requests have ended or been cut
    do: stop_now -                        the same at once

SIGTERM asks the supervisor (is: leaving) to let this worker go; another takes its place. SIGINT and SIGHUP go to whole
process groups, so they are left to the supervisor.
"""

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
from base64 import b64decode
from typing import Any

import uvloop

from gateway.admin.merge import Page, gathered
from gateway.app import Gateway
from gateway.config import Config
from gateway.process import configure_logging, raise_descriptor_limit, settle_garbage_collector
from gateway.proxy.request_log import RequestLog
from gateway.sharing.board import Board
from gateway.workers import facts
from gateway.workers.channel import Channel

logger = logging.getLogger("gateway.workers.worker")

# What the supervisor says once need not be said by every worker.
_SAID_ELSEWHERE = {
    "gateway.replicas.registry": logging.WARNING,
    "gateway.reload": logging.WARNING,
    "gateway.app": logging.ERROR,
}
_GIVEN_UP = 3
"""Exit code of a worker that could not start."""
_FLUSH_S = 1.0
_CLOSE_S = 3.0


class Worker:
    """One worker, from its first order to its end."""

    def __init__(self, number: int, channel: Channel, gateway: Gateway) -> None:
        """Follow orders about a gateway.

        Args:
            number: of the worker.
            channel: to the supervisor.
            gateway: the worker's, serving.
        """
        self._number = number
        self._channel = channel
        self._gateway = gateway
        self._stopping: asyncio.Task[None] | None = None
        self._at_once = asyncio.Event()

    def leave(self) -> None:
        """Ask to be let go."""
        logger.info("leaving")
        self._channel.send({"is": "leaving"})

    async def follow(self) -> None:
        """Follow orders until the end."""
        loop = asyncio.get_running_loop()
        orders = loop.create_task(self._orders())
        await asyncio.wait({orders, loop.create_task(self._at_once.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if self._at_once.is_set():
            logger.warning("stopping at once: %d requests are cut off", self._gateway.tally.in_progress)
            orders.cancel()
            await asyncio.wait({orders})
            if self._stopping is not None:
                self._stopping.cancel()
                await asyncio.wait({self._stopping}, timeout=_FLUSH_S)
            await self._close()
        elif orders.exception() is not None:
            logger.error("the worker has failed", exc_info=orders.exception())
        await self._send_page()
        await self._channel.flush(_FLUSH_S)

    async def _orders(self) -> None:
        listening = asyncio.get_running_loop().create_task(self._listen())
        await listening
        if self._stopping is None and not self._at_once.is_set():
            logger.error("the supervisor has gone: ending what runs")
            self._stop()
        if self._stopping is not None:
            await self._stopping

    async def _listen(self) -> None:
        """Follow orders one after the other, until the gateway has stopped or the supervisor has gone."""
        while True:
            receiving = asyncio.ensure_future(self._channel.receive())
            waiting: set[asyncio.Future[Any]] = {receiving}
            if self._stopping is not None:
                waiting.add(self._stopping)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
                return
            order = receiving.result()
            if order is None:
                return
            await self._follow(order)

    async def _follow(self, order: dict[str, Any]) -> None:
        what, gateway = order["do"], self._gateway
        if what == "facts":
            facts.apply(gateway.fleet, order["facts"])
        elif what == "leave":
            gateway.plane.draining = True
        elif what == "stop":
            self._stop()
        elif what == "stop_now":
            self._at_once.set()
        else:
            try:
                answer = await self._answer(what, order)
            except (ValueError, OSError) as error:
                self._channel.send({"id": order["id"], "refused": str(error)})
            else:
                self._channel.send({"id": order["id"], "answer": answer})

    async def _answer(self, what: str, order: dict[str, Any]) -> Any:
        gateway = self._gateway
        if what == "reload":
            await gateway.reload(Config.model_validate(order["config"]))
            return True
        if what == "metrics":
            await self._send_page()
            return True
        if what == "replicas":
            return gateway.view.replicas_now()
        if what == "state":
            return gateway.view.worker_now()
        if what == "explain":
            return gateway.view.explainer.explain(order["request"])
        if what == "rehearse":
            return await gateway.view.rehearse(order["path"], order["headers"], b64decode(order["body"]))
        if what == "active":
            replica = gateway.fleet.replicas.get(order["replica"])
            return replica is not None and gateway.plane.replica_active(replica.slot)
        raise ValueError(f"unknown order {what}")

    async def _send_page(self) -> None:
        parts = itertools.count()

        def send(page: Page, *, ends: bool = False) -> None:
            self._channel.send({"is": "page", "part": next(parts), "page": page, "ends": ends})

        await gathered(self._gateway.view.families(), send)
        send([], ends=True)

    def _stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._end_requests())

    async def _end_requests(self) -> None:
        gateway = self._gateway
        logger.info("stopping: draining %d requests", gateway.tally.in_progress)
        # The grace time is the supervisor's: it accepts connections as long as it lasts.
        await gateway.plane.drain(0.0, gateway.config.timeouts.drain_s)
        await self._close()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._gateway.close()
        except TimeoutError:
            # No request runs any more: what does not close now ends with the process.
            logger.error("the worker has not closed in %g s and ends as it is", _CLOSE_S)


async def work(number: int, control: socket.socket, connections: socket.socket, board: Board | None) -> int:
    """Run a worker to its end; return the exit code.

    Args:
        number: of the worker.
        control: end of the channel to the supervisor.
        connections: where connections come in.
        board: where workers see each other's load; None if it has no place there.
    """
    loop = asyncio.get_running_loop()
    for ignored in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(ignored, lambda: None)
    channel = await Channel.over(control)
    order = await channel.receive()
    if order is None:
        return 0
    try:
        config = Config.model_validate(order["config"])
        configure_logging(config.logging.level, number)
        for name, level in _SAID_ELSEWHERE.items():
            logging.getLogger(name).setLevel(level)
        raise_descriptor_limit(config.limits.max_connections)
        log = RequestLog(fields={"worker": number}) if config.logging.requests else None
        gateway = Gateway(config, log, number, board)
    except (ValueError, OSError) as error:
        logger.error("worker %d cannot start: %s", number, error)
        return _GIVEN_UP
    facts.apply(gateway.fleet, order["facts"])
    worker = Worker(number, channel, gateway)
    loop.add_signal_handler(signal.SIGTERM, worker.leave)
    gateway.start_behind(connections)
    settle_garbage_collector()
    channel.send({"is": "serving"})
    await worker.follow()
    return 0


def main() -> None:
    """Start as the supervisor has asked."""
    number, control, connections, memory, place = map(int, sys.argv[1:6])
    configure_logging("info", number)
    # A signal in the first moments must not kill the process half way.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.closing(socket.socket(fileno=control)) as end:
        board = Board(memory, place) if place >= 0 else None
        sys.exit(uvloop.run(work(number, end, socket.socket(fileno=connections), board)))


if __name__ == "__main__":
    main()
