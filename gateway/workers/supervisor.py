"""Keeps the workers of one gateway alive, and speaks for them: the port, the admin port, the replicas, the signals.

A worker that dies is replaced: at once if it had run for a while, after growing pauses if not. When one number dies
`_GIVE_UP_AFTER` times in a row within `_SETTLED_S` of its start, something is wrong that no restart will cure: the
gateway drains and exits with code 1, and says so.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from gateway.admin.server import AdminServer
from gateway.app import health_settings, replica_spec, replica_tls, scrape_settings
from gateway.config import Config
from gateway.proxy.listener import bind
from gateway.reload import change_replicas, check_names, replica_changes, sections_that_wait
from gateway.replicas.health import HealthChecker
from gateway.replicas.probe import ProbeClient
from gateway.replicas.scrape import Scraper
from gateway.sharing.board import Board, open_memory
from gateway.workers.channel import frame
from gateway.workers.facts import Fact, ReportingFleet, snapshot
from gateway.workers.handover import Handover
from gateway.workers.process import NoAnswer, State, WorkerProcess
from gateway.workers.redis_server import RedisServer, find_server
from gateway.workers.settings import ReplicaNames, document, worker_config
from gateway.workers.view import ANSWER_S, WorkersView

logger = logging.getLogger(__name__)

_SETTLED_S = 10.0
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
_GIVE_UP_AFTER = 6
_START_S = 60.0
"""A worker that does not serve by then is killed."""
_STUCK_S = 30.0
"""A worker whose event loop has not answered for so long is killed."""
_FACTS_S = 0.02
"""Facts of so long go in one message."""
_RELOAD_S = 30.0
_ACTIVE_S = 0.5
_HANDED_S = 2.0
_OVERTIME_S = 5.0
"""How much longer than their own limit workers may take to drain."""
_AT_ONCE_S = 2.0


class Supervisor:
    """The process that was started.

    Attributes:
        restarts: by a worker's number, how often it had to be started again.
        gave_up: set when a worker keeps dying.
    """

    def __init__(self, config: Config) -> None:
        """Prepare; must be called with a running event loop.

        Args:
            config: a configuration that `gateway.app.validate` accepts.
        """
        self._count = config.listen.workers
        self._names = ReplicaNames()
        self._config = config = self._names.fill(config)
        self._redis: RedisServer | None = None
        self._facts: list[Fact] = []
        self._fleet = ReportingFleet(config.aliases, self._fact)
        for replica in config.replicas:
            self._fleet.add(replica_spec(replica, config))
        self._probes = ProbeClient(tls=replica_tls(config))
        self._scraper = Scraper(self._fleet, self._probes, scrape_settings(config))
        self._health = HealthChecker(
            self._fleet, self._probes, health_settings(config), self._replica_active, self._scraper.scrape
        )
        self._handover = Handover()
        # One that leaves and the one that comes instead are alive together. If more are leaving, one does without.
        self._memory = open_memory(2 * self._count)
        self._board = Board(self._memory)
        self._places = set(range(self._board.places))
        self._sockets: list[socket.socket] = []
        self._running: list[WorkerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._watched: set[asyncio.Task[str]] = set()
        self._changed = asyncio.Condition()
        self._notices: set[asyncio.Task[None]] = set()
        self._late_since_s: dict[WorkerProcess, float] = {}
        self._stopping = asyncio.Event()
        self.gave_up = asyncio.Event()
        self.restarts: dict[int, int] = {}
        self._view = WorkersView(self, self._count)
        self._watch: asyncio.Task[None] | None = None
        key = config.admin.key
        self._admin = AdminServer(
            self._view,
            key=key.get_secret_value() if key is not None else None,
            config=config.model_dump(mode="json"),
        )

    # -- what the view asks

    @property
    def running(self) -> Sequence[WorkerProcess]:
        """All workers that have not gone."""
        return self._running

    def replica_names(self) -> set[str]:
        """Names of the replicas in the fleet."""
        return set(self._fleet.replicas)

    def readiness(self) -> str:
        """Return `ready`, or why not: at the start when all workers serve, later as long as one does."""
        if self._stopping.is_set():
            return "draining"
        if not self._handover.listening:
            return "starting"
        if not any(worker.serving for worker in self._running):
            return "no worker is running"
        return "ready" if self._fleet.any_routable else "no replica can take requests"

    # -- life

    async def start(self) -> None:
        """Start everything, and open the API port when all workers serve.

        Raises:
            OSError: an address cannot be bound, or the redis-server does not start.
        """
        config, listen = self._config, self._config.listen
        self._sockets = await bind(listen.host, listen.port)
        admin_port = await self._admin.start(config.admin.host, config.admin.port)
        if config.redis is None:
            self._redis = RedisServer(find_server())
            await self._redis.start()
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(number)) for number in range(1, self._count + 1)]
        await self._health.start(config.health.startup_wait_s)
        await self._scraper.start()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.gave_up.is_set() or sum(worker.serving for worker in self._running) >= self._count
            )
        if self.gave_up.is_set():
            return
        # The first request must find what has been found out in the last moments: who answers has been told.
        self._send_facts()
        await asyncio.gather(*(worker.ask("state", ANSWER_S) for worker in self._running), return_exceptions=True)
        port = self._handover.listen(self._sockets, listen.backlog)
        self._watch = loop.create_task(self._view.watch(self._late))
        logger.info(
            "serving on %s:%d, admin on %s:%d, policy %s, %d workers, %d of %d replicas up",
            listen.host,
            port,
            config.admin.host,
            admin_port,
            config.routing.policy,
            self._count,
            sum(replica.up for replica in self._fleet.replicas.values()),
            len(self._fleet.replicas),
        )

    async def stop(self) -> None:
        """Drain all workers, then close everything."""
        self._stopping.set()
        timeouts = self._config.timeouts
        self._tell_all("leave")
        if self._handover.listening:
            await asyncio.sleep(timeouts.drain_grace_s)
        await self._handover.close(_HANDED_S)
        self._tell_all("stop")
        try:
            async with asyncio.timeout(timeouts.drain_s + _OVERTIME_S):
                await self._all_gone()
        except TimeoutError:
            logger.error("workers that have not drained in time are killed")
        await self.close()

    async def close(self) -> None:
        """Close everything at once."""
        self._stopping.set()
        await self._handover.close(0.0)
        self._tell_all("stop_now")
        try:
            async with asyncio.timeout(_AT_ONCE_S):
                await self._all_gone()
        except TimeoutError:
            for worker in self._running:
                worker.kill()
            await self._all_gone()
        for task in (self._watch, *self._keepers):
            if task is not None:
                task.cancel()
        await self._health.stop()
        await self._scraper.stop()
        await self._probes.close()
        await self._admin.stop()
        for bound in self._sockets:
            bound.close()
        if self._redis is not None:
            await self._redis.stop()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    async def reload(self, config: Config) -> None:
        """Put another configuration in force in all workers.

        Args:
            config: a configuration that `gateway.app.validate` accepts.

        Raises:
            ValueError: a new replica has the name of one that stays. Nothing has changed then.
            OSError: a key or certificate file cannot be read. Nothing has changed then.
        """
        old = self._config
        if old.redis is None or config.redis is None:
            # Ours, or about to become one at the next start.
            config = config.model_copy(update={"redis": old.redis})
        named = self._names.fill(config)
        changes = replica_changes(
            [replica_spec(replica, old) for replica in old.replicas],
            [replica_spec(replica, named) for replica in named.replicas],
        )
        check_names(self._fleet, changes)
        self._config = config = named
        # First the workers learn of new replicas, then what is known of them.
        self._send_facts()
        # One that starts at the moment has been told the old configuration already.
        workers = [worker for worker in self._running if worker.state is not State.LEAVING]
        asked = [
            asyncio.ensure_future(worker.ask("reload", _RELOAD_S, config=self._document(worker.number)))
            for worker in workers
        ]
        await asyncio.sleep(0)
        change_replicas(self._fleet, changes)
        if config.aliases != old.aliases:
            self._fleet.use_aliases(config.aliases)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, NoAnswer):
                logger.error("the new configuration is not in force everywhere: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer
        self._view.replicas_changed()
        self._admin.use_config(config.model_dump(mode="json"))
        logging.getLogger().setLevel(config.logging.level.upper())
        for name in sections_that_wait(old, config):
            logger.warning("%s has changed and takes effect at the next start", name)
        logger.info("configuration is in force: %d replicas, policy %s", len(config.replicas), config.routing.policy)

    # -- workers

    def _document(self, number: int) -> dict[str, Any]:
        order = document(worker_config(self._config, number, self._count))
        if self._redis is not None:
            order["redis"] = self._redis.url
        return order

    async def _keep(self, number: int) -> None:
        """Keep a worker of a number running."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping.is_set():
            started_s = loop.time()
            try:
                ended = await self._run(number)
            except OSError as error:
                ended = f"cannot be started: {error}"
            except Exception:
                logger.exception("worker %d cannot be looked after", number)
                ended = "has been lost sight of"
            if self._stopping.is_set():
                return
            if ended is None:
                deaths = 0
                continue
            self.restarts[number] = self.restarts.get(number, 0) + 1
            deaths = deaths + 1 if loop.time() - started_s < _SETTLED_S else 1
            logger.error("worker %d %s", number, ended)
            if deaths >= _GIVE_UP_AFTER:
                logger.critical("worker %d has died %d times in a row: the gateway gives up", number, deaths)
                self.gave_up.set()
                await self._notify()
                return
            await asyncio.sleep(_PAUSES_S[min(deaths - 1, len(_PAUSES_S) - 1)])

    async def _run(self, number: int) -> str | None:
        """Run a worker; return how it has died, None if it is leaving because it was asked to."""
        place = min(self._places, default=-1)
        self._places.discard(place)
        try:
            worker = await WorkerProcess.start(number, self._memory, place, self._on_state)
        except BaseException:
            self._free_place(place)
            raise
        # What waits to be told is in the snapshot. Between it and the list of those who are told, nothing may come.
        self._send_facts()
        worker.begin(self._document(number), snapshot(self._fleet))
        self._running.append(worker)
        if self._stopping.is_set():
            worker.send("stop")
        loop = asyncio.get_running_loop()
        gone = loop.create_task(self._until_gone(worker))
        self._watched.add(gone)
        gone.add_done_callback(self._watched.discard)
        async with self._changed:
            try:
                async with asyncio.timeout(_START_S):
                    await self._changed.wait_for(lambda: worker.state is not State.STARTING)
            except TimeoutError:
                logger.error("worker %d does not serve after %g s and is killed", number, _START_S)
                worker.kill()
            await self._changed.wait_for(lambda: worker.state in (State.LEAVING, State.GONE))
        if worker.state is State.LEAVING:
            return None
        return await gone

    async def _until_gone(self, worker: WorkerProcess) -> str:
        code = await worker.until_gone()
        self._running.remove(worker)
        self._free_place(worker.place)
        worker.close_lane(self._handover)
        self._late_since_s.pop(worker, None)
        self._view.gone(worker)
        # Last, when all is in order again: who waits for this looks at the rest.
        await self._notify()
        if code < 0:
            return f"(pid {worker.pid}) was killed by {signal.Signals(-code).name}"
        return f"(pid {worker.pid}) has exited with code {code}"

    def _free_place(self, place: int) -> None:
        """What its worker had outstanding is so no more; the others see it at once."""
        if place >= 0:
            self._board.clear(place)
            self._places.add(place)

    def _on_state(self, worker: WorkerProcess) -> None:
        loop = asyncio.get_running_loop()
        if worker.serving:
            worker.open_lane(self._handover)
        notices = [loop.create_task(self._notify())]
        if worker.state is State.LEAVING and not self._stopping.is_set():
            logger.info("worker %d (pid %d) is leaving; another takes its place", worker.number, worker.pid)
            notices.append(loop.create_task(self._let_go(worker)))
        for notice in notices:
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    async def _let_go(self, worker: WorkerProcess) -> None:
        worker.send("leave")
        if worker.lane is not None:
            await self._handover.empty(worker.lane)
        worker.send("stop")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _all_gone(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)

    def _tell_all(self, order: str) -> None:
        for worker in self._running:
            worker.send(order)

    async def _late(self, worker: WorkerProcess) -> None:
        """A worker has not answered: kill it if it goes on like that."""
        now_s = asyncio.get_running_loop().time()
        since_s = self._late_since_s.setdefault(worker, now_s)
        try:
            await worker.ask("state", 0.5)
        except NoAnswer:
            if now_s - since_s > _STUCK_S:
                logger.error("worker %d (pid %d) is stuck and is killed", worker.number, worker.pid)
                worker.kill()
        else:
            self._late_since_s.pop(worker, None)

    # -- replicas

    def _fact(self, fact: Fact) -> None:
        if not self._facts:
            asyncio.get_running_loop().call_later(_FACTS_S, self._send_facts)
        self._facts.append(fact)

    def _send_facts(self) -> None:
        if not self._facts:
            return
        data = frame({"do": "facts", "facts": self._facts})
        self._facts = []
        for worker in self._running:
            worker.send_frame(data)

    async def _replica_active(self, slot: int) -> bool:
        """Whether answers of a replica flow through some worker; asked when its health is in doubt."""
        replica = self._fleet.by_slot[slot]
        if replica is None:
            return False
        workers = [worker for worker in self._running if worker.serving]
        answers = await asyncio.gather(
            *(worker.ask("active", _ACTIVE_S, replica=replica.name) for worker in workers), return_exceptions=True
        )
        return any(answer is True for answer in answers)
