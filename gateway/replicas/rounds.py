"""One loop per replica: does something with each replica again and again, as long as it is in the fleet."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from gateway.replicas.registry import Change, Fleet
from gateway.replicas.replica import Replica

logger = logging.getLogger(__name__)

JITTER = 0.1
"""Share of the interval by which it varies, so that replicas are not all asked at the same moment."""


class Rounds:
    """Runs a coroutine function for each replica of a fleet, at an interval, in parallel and bounded."""

    def __init__(
        self,
        fleet: Fleet,
        work: Callable[[Replica], Awaitable[None]],
        interval_s: float,
        concurrency: int,
        rng: random.Random | None = None,
    ) -> None:
        """Prepare the loops; nothing runs before `start`.

        Args:
            fleet: replicas added later get a loop, that of a removed replica ends.
            work: what to do with a replica.
            interval_s: from the end of one turn of a replica to the start of its next.
            concurrency: how many replicas may have their turn at the same time.
            rng: draws the jitter.
        """
        self._fleet = fleet
        self._work = work
        self._interval_s = interval_s
        self._slots = asyncio.Semaphore(concurrency)
        self._rng = rng or random.Random()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._started = False
        fleet.on_change(self._on_change)

    async def start(self, first_turns_within_s: float = 0.0) -> None:
        """Start the loops.

        Args:
            first_turns_within_s: wait so long at most for every replica to have had its first turn.
        """
        self._started = True
        first_turns = [self._launch(replica) for replica in self._fleet.replicas.values()]
        if first_turns and first_turns_within_s > 0:
            await asyncio.wait(first_turns, timeout=first_turns_within_s)

    async def stop(self) -> None:
        """End the loops and wait until they have ended."""
        self._started = False
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _launch(self, replica: Replica) -> asyncio.Future[None]:
        first_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks[replica] = asyncio.create_task(self._run(replica, first_turn))
        return first_turn

    async def _run(self, replica: Replica, first_turn: asyncio.Future[None]) -> None:
        try:
            while True:
                async with self._slots:
                    try:
                        await self._work(replica)
                    except Exception:
                        # A fault in one turn must not leave a replica unwatched.
                        logger.exception("a turn of %s failed", replica.name)
                if not first_turn.done():
                    first_turn.set_result(None)
                await asyncio.sleep(self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))
        finally:
            first_turn.cancel()

    def _on_change(self, change: Change, replica: Replica) -> None:
        if not self._started:
            return
        if change is Change.ADDED:
            self._launch(replica)
        elif change is Change.REMOVED:
            task = self._tasks.pop(replica, None)
            if task is not None:
                task.cancel()
