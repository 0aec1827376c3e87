"""The traffic with Redis: one task that connects, writes and reads in rounds, behind the requests.

A round is one connection's life: connect, look at the births, read the logs from where this worker is, and write what
waits. Any fault ends it; the next begins after a random pause that doubles up to `_MAX_PAUSE_S`. No request waits for
any of this: requests read the index and the ledger, and what they change waits in memory (bounded) to be written.

What may go wrong, and what is done
- Refused, hung, slow, cut off, wrong password, failover: the round ends. Routing goes on with the local copy; the loads
  of other workers expire.
- Full (OOM): reading goes on, writing is tried again after a pause.
- Things dropped meanwhile: when writing works again, all that was used since the last good write is told again.
- Flushed: see `layout`.
"""

import asyncio
import contextlib
import gc
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from redis.asyncio import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    NoPermissionError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.prefixes.shared import SharedIndex
from gateway.prompt.blocks import BlockSchedule
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Change, Fleet, Replica
from gateway.sharing.board import Board
from gateway.sharing.connection import BLOCK_MS, FAULTS, Client, RedisTarget, close, cluster_of, connect
from gateway.sharing.layout import EXPIRE_S, LOAD_ENTRIES, Keys, replica_identity
from gateway.sharing.loads import HEARTBEAT_S, LoadShare
from gateway.sharing.messages import BadEntry
from gateway.sharing.pace import Pace
from gateway.sharing.prefixes import Batch, PrefixShare

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_SLICE_S = 0.002
"""Longest time of reading at a stretch; then requests have their turn."""
_READ_ENTRIES = 32
_GATHER_S = 0.01
"""Time of a read that brings all there is, on average, so that it brings more than one entry where there are many."""
_SAVED_READS = 16.0
"""Reads without a pause after a time of few: what a burst does to the load is known before its last request comes."""
_TICK_BYTES = 256 << 10
"""What one tick writes at most."""
_RETELL_BLOCKS = 4096
"""What a tick adds to that when everything is told again."""
_RETELL_WITHIN_S = 2.0
_LAG_SAMPLES = 256
_KEYS_EXPIRE_EVERY_S = 60.0
_EXPIRE_EVERY_S = 0.05
"""How often what was heard of others is looked at for what is too old, whatever Redis does."""


class Full(RedisError):
    """Redis has no memory left."""


class Sharing:
    """One worker's part in what all share.

    Attributes:
        prefixes, loads: what is shared.
        up: whether the last exchange with Redis was good.
        loaded_s: seconds from the start until the whole map had been read; None before.
        errors: rounds that ended with a fault, and refused writes.
        lags_s: seconds from the writing of an entry to its coming back through the log, of the last entries.
        longest_slice_s: longest time the event loop was kept by reading.
    """

    def __init__(
        self,
        target: RedisTarget,
        fleet: Fleet,
        index: SharedIndex,
        ledger: LoadLedger,
        schedule: BlockSchedule,
        namespace: str = "warmgate",
        shards: int = 8,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        board: Board | None = None,
    ) -> None:
        """Wire the parts; nothing is sent before `start`.

        Args:
            target: where Redis is.
            fleet: the replicas.
            index: the prefix map.
            ledger: the load.
            schedule: where prompts are cut into blocks.
            namespace: keeps apart what must not be shared in one Redis.
            shards: number of prefix logs.
            max_bytes: what all of these may keep.
            clock: monotonic seconds.
            board: where the workers of this gateway see each other's load and hear of prefixes; None if there is one.
        """
        self._target = target
        self._fleet = fleet
        self._index = index
        self._clock = clock
        self._random = random.SystemRandom()
        self._writer = self._random.getrandbits(63) | 1
        self._keys = Keys(namespace, schedule, shards)
        rings = None if board is None else board.rings
        self.prefixes = PrefixShare(index, fleet, shards, max_bytes, self._writer, rings)
        self.loads = LoadShare(ledger, fleet, self._writer, board)
        if board is not None:
            ledger.on_look = self._before_decision
        self.up = False
        self.loaded_s: float | None = None
        self.errors = 0
        self.lags_s: deque[float] = deque(maxlen=_LAG_SAMPLES)
        self.longest_slice_s = 0.0
        self._told_reasons: set[str] = set()
        self._has_worked = self._stopping = False
        # Cancelling is not enough: the library may take a cancellation for its own timeout.
        self._ending = asyncio.Event()
        self._news = asyncio.Event()
        self.loads.on_news = self.prefixes.on_news = self._news.set
        self._started_s = clock()
        self._positions: dict[str, str] = dict.fromkeys(self._keys.logs, "0-0")
        self._births: list[bytes | None] = [None] * shards
        # When this worker's entries that have not come back were sent. They come back in order.
        self._sent_s: dict[int, deque[float]] = {shard: deque(maxlen=_LAG_SAMPLES) for shard in range(shards)}
        # Insertions up to here have been written, or need not be.
        self._confirmed_clock = 0
        self._retelling: dict[int, tuple[float, int | None]] = {}
        self._reread: set[tuple[int, int]] = set()
        self._task: asyncio.Task[None] | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._client: Client | None = None
        fleet.on_change(self._changed)

    def start(self) -> None:
        """Begin, behind everything else."""
        self._started_s = self._clock()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="sharing")

    async def stop(self) -> None:
        """Write what waits and say farewell, if that takes no longer than the timeout; then close."""
        if self._task is None:
            return
        self._stopping = True
        self._ending.set()
        self._news.set()
        # The round last: whoever waits for it must not begin another.
        for task in (self._task, self._attempt):
            while task is not None and not task.done():
                # More than once: a task group that fails at the same moment swallows it (before Python 3.13).
                task.cancel()
                await asyncio.wait({task}, timeout=0.1)
        self._task = self._attempt = None
        client = self._client
        if client is not None:
            if self.up:
                with contextlib.suppress(*FAULTS):
                    async with asyncio.timeout(self._target.timeout_s):
                        await self._write(client, self.loads.farewell())
            await close(client)
            self._client = None
        self.up = False

    def is_news(self, replica: Replica) -> bool:
        """A restart has been noticed here; return whether the map still has to forget the replica."""
        return self.prefixes.restarted(replica, self._clock(), time.time_ns() // 1_000_000)

    async def _hear_near(self) -> None:
        """Take in all that workers of this gateway have told of prefixes; requests have their turn in between."""
        while self.prefixes.look(self._clock()):  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _before_decision(self, now_s: float) -> None:
        self.prefixes.look(now_s)
        self.loads.look_now_and_then(now_s)

    # -- rounds

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            begun_s = self._clock()
            # A task for each: up to Python 3.12, one that has had a task group may stay marked as being cancelled, and
            # a timeout in it then ends it as a cancellation would.
            self._attempt = loop.create_task(self._round(), name="sharing round")
            await self._expiring_until(self._attempt)
            self._judge(self._attempt)
            self.up = False
            if self._client is not None:
                client, self._client = self._client, None
                await self._expiring_until(loop.create_task(close(client)))
            if self._clock() - begun_s > 2 * _MAX_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await self._expiring_until(loop.create_task(asyncio.sleep(pause_s * (0.5 + self._random.random()))))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _expiring_until(self, task: asyncio.Task[None]) -> None:
        """Wait for the end of a task; what was heard of others becomes too old also while Redis hangs."""
        try:
            while not task.done():
                self.loads.expire(self._clock())
                await self._hear_near()
                await asyncio.wait({task}, timeout=_EXPIRE_EVERY_S)
        finally:
            task.cancel()

    def _judge(self, attempt: asyncio.Task[None]) -> None:
        """Tell how a round has ended."""
        error = TimeoutError() if attempt.cancelled() else attempt.exception()
        if error is None:
            return
        first = _first(error)
        if isinstance(first, FAULTS):
            self._failed(first)
        else:
            self.errors += 1
            logger.error("sharing through Redis has failed and begins anew", exc_info=first)

    async def _round(self) -> None:
        async with asyncio.timeout(2 * self._target.timeout_s):
            self._client = connect(self._target)
            client = self._client = await cluster_of(self._client, self._target)
            await self._look(client)
            ends = await self._ends(client)
        self.loads.retell()
        for sent_s in self._sent_s.values():
            sent_s.clear()
        if not self._stopping:
            self._ending.clear()
        parts = [self._write_on(client)]
        if isinstance(client, RedisCluster):
            parts += [self._follow(client, [key], ends) for key in self._positions]
        else:
            parts.append(self._follow(client, list(self._positions), ends))
        if self.loaded_s is None:
            # A map being loaded is nothing but new objects that stay: looking through them is in vain, and long.
            gc.disable()
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._until_ending(part))
        finally:
            gc.enable()

    async def _until_ending(self, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        finally:
            self._ending.set()
            self._news.set()

    async def _look(self, client: Client) -> None:
        """See whether the logs are those known from before."""
        pipeline = cast(Any, client.pipeline(transaction=False))
        for key in self._keys.births:
            pipeline.get(key)
        births = await pipeline.execute()
        for shard, birth in enumerate(births):
            if birth is None:
                await self._begin_log(client, shard)
            elif self._births[shard] is None:
                self._births[shard] = birth
            elif birth != self._births[shard]:
                self._lost(shard, birth)

    async def _begin_log(self, client: Client, shard: int) -> None:
        key = self._keys.births[shard]
        await cast(Any, client).set(key, b"%016x" % self._random.getrandbits(64), nx=True, ex=EXPIRE_S)
        birth = await cast(Any, client).get(key)
        if self._births[shard] is not None:
            self._lost(shard, birth)
        self._births[shard] = birth

    def _lost(self, shard: int, birth: bytes) -> None:
        """A log has come to nothing: everybody tells again what they know."""
        logger.info("the prefix map in Redis has lost part %d; telling it again", shard)
        self._births[shard] = birth
        self.prefixes.lost(shard)
        self._retelling[shard] = (self._clock() + self._random.uniform(0.0, _RETELL_WITHIN_S), None)

    async def _ends(self, client: Client) -> dict[str, str]:
        """Return the ids of the logs' last entries, and move places that are beyond them."""
        ends: dict[str, str] = {}
        for key in (*self._keys.logs, self._keys.load):
            last = await cast(Any, client).xrevrange(key, count=1)
            ends[key] = last[0][0].decode() if last else "0-0"
            place = self._positions.get(key)
            if place is None or _order(place) > _order(ends[key]):
                self._positions[key] = ends[key]
        return ends

    # -- reading

    async def _follow(self, client: Client, keys: list[str], ends: dict[str, str]) -> None:
        positions = self._positions
        pace = Pace(_SAVED_READS)
        loading = set(keys)
        while not self._ending.is_set():
            for key in [key for key in loading if _order(positions[key]) >= _order(ends[key])]:
                loading.discard(key)
                await self._loaded(key)
            if self._reread:
                await self._read_again(client, keys)
            streams = {key: positions[key] for key in keys}
            reply = await self._read(client, streams, None if loading else BLOCK_MS)
            if not reply:
                if loading:
                    ends.update({key: positions[key] for key in loading})
                continue
            most = 0
            for key, entries in reply:
                most = max(most, len(entries))
                await self._take_in(key, entries)
            if most < _READ_ENTRIES:
                await asyncio.sleep(pace.pause_s(self._clock(), _GATHER_S))

    async def _read(
        self, client: Client, streams: dict[str, str], block_ms: int | None
    ) -> list[tuple[str, list[tuple[bytes, dict[bytes, bytes]]]]]:
        if isinstance(client, RedisCluster):
            # Told which node, the client need not ask the server for the keys of each command.
            (key,) = streams
            node = client.get_node_from_key(key)
            words: list[Any] = ["XREAD", "COUNT", _READ_ENTRIES]
            if block_ms is not None:
                words += ["BLOCK", block_ms]
            reply = await client.execute_command(*words, "STREAMS", key, streams[key], target_nodes=node)
        else:
            reply = await cast(Any, client).xread(streams, count=_READ_ENTRIES, block=block_ms)
        if isinstance(reply, dict):
            reply = list(reply.items())
        return [(key.decode(), entries) for key, entries in reply or ()]

    async def _take_in(self, key: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        shard = self._keys.logs.index(key) if key != self._keys.load else None
        begun_s = self._clock()
        for name, fields in entries:
            entry_id, entry = name.decode(), fields.get(b"e", b"")
            if shard is not None:
                await self._hear_near()
                writer = self.prefixes.read(shard, entry_id, entry)
                if writer == self._writer and self._sent_s[shard]:
                    self.lags_s.append(self._clock() - self._sent_s[shard].popleft())
            else:
                try:
                    self.loads.read(entry, begun_s)
                except BadEntry:
                    self.prefixes.counts.bad_entries += 1
            self._positions[key] = entry_id
            now_s = self._clock()
            if now_s - begun_s > _SLICE_S:
                self.longest_slice_s = max(self.longest_slice_s, now_s - begun_s)
                await asyncio.sleep(0)
                begun_s = self._clock()

    async def _loaded(self, key: str) -> None:
        if key == self._keys.load or self.prefixes.is_loaded(self._keys.logs.index(key)):
            return
        begun_s = self._clock()
        for _ in self.prefixes.loaded(self._keys.logs.index(key)):
            if self._clock() - begun_s > _SLICE_S:
                await asyncio.sleep(0)
                begun_s = self._clock()
        if self.loaded_s is None and all(self.prefixes.is_loaded(shard) for shard in range(len(self._keys.logs))):
            self.loaded_s = self._clock() - self._started_s
            gc.freeze()
            gc.enable()
            logger.info("the shared prefix map is loaded, after %.1f s", self.loaded_s)

    async def _read_again(self, client: Client, keys: list[str]) -> None:
        """Read what the logs say of replicas that have joined since they were read."""
        for item in [item for item in self._reread if self._keys.logs[item[0]] in keys]:
            self._reread.discard(item)
            shard, identity = item
            key, place = self._keys.logs[shard], "0-0"
            while True:
                entries = await cast(Any, client).xrange(key, f"({place}", self._positions[key], count=_READ_ENTRIES)
                for name, fields in entries:
                    place = name.decode()
                    self.prefixes.read(shard, place, fields.get(b"e", b""), only=identity)
                    await asyncio.sleep(0)
                if len(entries) < _READ_ENTRIES:
                    break

    # -- writing

    async def _write_on(self, client: Client) -> None:
        heartbeat_s = expire_s = float("-inf")
        pause_s = _FIRST_PAUSE_S
        if self.prefixes.lossy:
            self._tell_what_was_dropped()
        while not self._ending.is_set():
            now_s = self._clock()
            budgets = self.prefixes.budgets_bytes()
            try:
                if now_s - heartbeat_s >= HEARTBEAT_S:
                    heartbeat_s = now_s
                    self.prefixes.refresh(now_s)
                    async with asyncio.timeout(self._target.timeout_s):
                        await self._look(client)
                self._retell(now_s)
                expires = now_s - expire_s >= _KEYS_EXPIRE_EVERY_S
                written = await self._write(client, self.loads.entry(now_s, budgets), expires=expires)
                if expires:
                    expire_s = now_s
            except Full as error:
                self._failed(error)
                self.loads.retell()
                await asyncio.sleep(pause_s * (0.5 + self._random.random()))
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                continue
            if written and not self.up:
                pause_s = _FIRST_PAUSE_S
                self._works()
            await self._until_next(now_s)

    async def _until_next(self, now_s: float) -> None:
        """Wait until there is something to write, and it is time."""
        pause_s, patience_s = self.loads.pace(now_s)
        await asyncio.sleep(pause_s)
        if not self.prefixes.waiting_bytes and not self._retelling:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
        self._news.clear()

    async def _write(self, client: Client, load: bytes | None, *, expires: bool = False) -> bool:
        """Write what waits, up to a tick's share, and a load entry. Nothing is lost if it fails.

        Raises:
            Full: Redis has no memory left.
        """
        clock_then, now_s = self._index.clock, self._clock()
        batches: list[Batch] = []
        length = 0
        for shard in range(len(self._keys.logs)):
            while length < _TICK_BYTES and (batch := self.prefixes.take(shard)) is not None:
                batches.append(batch)
                length += len(batch.payload)
        if not batches and load is None:
            return False
        everything = not self.prefixes.waiting_bytes
        pipeline = cast(Any, client.pipeline(transaction=False))
        for batch in batches:
            trim_id = self.prefixes.trim_id(batch.shard, self.loads.budget_bytes(batch.shard))
            pipeline.xadd(self._keys.logs[batch.shard], {b"e": batch.payload}, minid=trim_id)
            self._sent_s[batch.shard].append(now_s)
        if load is not None:
            pipeline.xadd(self._keys.load, {b"e": load}, maxlen=LOAD_ENTRIES)
        if expires:
            for key in (*self._keys.logs, *self._keys.births, self._keys.load):
                pipeline.expire(key, EXPIRE_S)
        try:
            async with asyncio.timeout(self._target.timeout_s):
                replies = await pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise Full(str(reply)) if _is_full(reply) else reply
        except BaseException:
            for batch in reversed(batches):
                self.prefixes.put_back(batch)
            raise
        for batch in batches:
            self.prefixes.counts.written += len(batch.records)
        if everything and not self.prefixes.lossy:
            self._confirmed_clock = clock_then
        return True

    def _tell_what_was_dropped(self) -> None:
        self.prefixes.lossy = False
        for shard in range(len(self._keys.logs)):
            start_s = self._clock() + self._random.uniform(0.0, _RETELL_WITHIN_S)
            self._retelling.setdefault(shard, (start_s, self._confirmed_clock))

    def _retell(self, now_s: float) -> None:
        """Let what is to be told again wait in the journal, a tick's share at a time."""
        if self.prefixes.lossy and self.up and not self._retelling:
            self._tell_what_was_dropped()
        for shard, (start_s, since) in list(self._retelling.items()):
            if now_s < start_s or self.prefixes.waiting_bytes > _TICK_BYTES:
                continue
            told = self.prefixes.retell_some(shard, since, _RETELL_BLOCKS)
            if not told:
                del self._retelling[shard]
            return

    # -- what operators hear

    def _works(self) -> None:
        self.up = True
        if self._told_reasons:
            self._told_reasons.clear()
            logger.info("Redis is back: the prefix map and the load are shared again")
        elif not self._has_worked:
            logger.info("the prefix map and the load are shared through Redis")
        self._has_worked = True

    def _failed(self, error: BaseException) -> None:
        self.errors += 1
        self.up = False
        reason = _reason(error)
        if reason not in self._told_reasons:
            self._told_reasons.add(reason)
            logger.warning("Redis is not usable (%s): routing on this worker's own map and load", reason)

    # -- the fleet

    def _changed(self, change: Change, replica: Replica) -> None:
        self._news.set()
        if change is Change.ADDED:
            self._reread.add((self.prefixes.shard_of(replica), replica_identity(replica.base_url)))


def _order(entry_id: str) -> tuple[int, int]:
    """Entry ids, in the order of the log."""
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number or 0)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_full(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and "OOM" in str(error))


def _reason(error: BaseException) -> str:
    """Say what is wrong without the address, which may carry a password."""
    if isinstance(error, Full):
        return "it is full"
    if isinstance(error, NoPermissionError):
        return f"a right is missing: {str(error)[:120]}"
    if isinstance(error, AuthenticationError | AuthorizationError):
        return "wrong user or password"
    if isinstance(error, TimeoutError) or "imeout" in type(error).__name__:
        return "it does not answer"
    if isinstance(error, RedisClusterException | ClusterError):
        return "its cluster is down"
    if isinstance(error, OSError | RedisConnectionError):
        return "it cannot be reached"
    return f"{type(error).__name__}: {str(error)[:120]}"
