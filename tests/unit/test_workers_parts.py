"""The parts of several workers behind one port: settings, facts, channel, handover, the end of patience."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from click.testing import CliRunner, Result
from support.waiting import eventually

from gateway.cli import main
from gateway.config import Config
from gateway.proxy.handed import REPORT, HandedConnections
from gateway.proxy.listener import Arrivals, bind
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.registry import Change, Fleet
from gateway.replicas.spec import ReplicaSpec
from gateway.workers import handover as handover_module
from gateway.workers import redis_server
from gateway.workers import supervisor as supervisor_module
from gateway.workers.channel import Channel, frame
from gateway.workers.facts import Fact, ReportingFleet, apply, snapshot
from gateway.workers.handover import Handover
from gateway.workers.process import NoAnswer, WorkerProcess
from gateway.workers.settings import ReplicaNames, document, worker_config
from gateway.workers.supervisor import Supervisor
from gateway.workers.view import merge_replicas


def config(*replicas: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"replicas": replicas or [{"url": "http://a"}], **sections})


SMALL = config(
    {"url": "http://127.0.0.1:9"},
    listen={"host": "127.0.0.1", "port": 0, "workers": 2},
    admin={"port": 0},
    redis="redis://127.0.0.1:9",
    health={"startup_wait_s": 0},
)

# -- settings


def names(config: Config) -> list[str | None]:
    return [replica.name for replica in config.replicas]


def test_a_replica_keeps_its_name_and_a_name_is_not_given_twice() -> None:
    given = ReplicaNames()
    a, b, c = {"url": "http://a"}, {"url": "http://b/v1"}, {"url": "http://c"}
    assert names(given.fill(config(a, b))) == ["replica-1", "replica-2"]
    assert names(given.fill(config({"url": "http://b:80/"}, c))) == ["replica-2", "replica-3"]
    assert names(given.fill(config(c, {"url": "http://d", "name": "replica-4"}, b))) == [
        "replica-3",
        "replica-4",
        "replica-2",
    ]
    d = {"url": "http://d", "name": "replica-4"}
    assert names(given.fill(config(c, d, a))) == ["replica-3", "replica-4", "replica-5"]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_limits_are_divided_and_nobody_is_left_without(workers: int) -> None:
    whole = config(
        {"url": "http://a", "max_in_flight": 20},
        limits={"max_connections": 100},
        queue={"max_requests": 10},
        retries={"budget_min_per_s": 10},
        routing={"seed": 5},
    )
    parts = [worker_config(whole, number, workers) for number in range(1, workers + 1)]
    assert [part.replicas for part in parts] == [whole.replicas] * workers
    assert 100 <= sum(part.limits.max_connections for part in parts) < 100 + workers
    assert 10 <= sum(part.queue.max_requests for part in parts) < 10 + workers
    assert sum(part.retries.budget_min_per_s for part in parts) == pytest.approx(10)
    assert len({part.routing.seed for part in parts}) == workers
    assert worker_config(config({"url": "http://a"}), 2, workers).routing.seed is None


def test_a_document_carries_secrets_and_what_was_left_out_stays_out() -> None:
    whole = config(
        {"url": "http://a", "api_key": "sk-replica"},
        auth={"client_keys": ["sk-client"]},
        tls={"ca": "/etc/ca.pem"},
        slo={"ttft_ms": 100, "models": {"m": {"tpot_ms": None}}},
    )
    again = Config.model_validate(document(whole))
    assert again == whole
    assert again.slo.models["m"].model_fields_set == {"tpot_ms"}
    secret = again.replicas[0].api_key
    assert secret is not None
    assert secret.get_secret_value() == "sk-replica"


# -- facts


def test_a_fleet_that_is_told_comes_to_the_same_state() -> None:
    facts: list[Fact] = []
    told, changes = Fleet(), []
    told.on_change(lambda change, replica: changes.append(change))
    source = ReportingFleet({}, facts.append)
    for fleet in (source, told):
        fleet.add(ReplicaSpec("http://a", "one"))
        fleet.add(ReplicaSpec("http://b", "two"))
    one = source.replicas["one"]
    source.set_served(one, iter([{"id": "m", "max_model_len": 4096}]))
    source.set_up(one, True)
    source.set_up(one, True)
    source.set_scraped(one, ScrapedState(running=3, process_start_s=1.0, kv_capacity_tokens=100))
    source.set_scraped(one, ScrapedState(running=1, process_start_s=2.0, kv_capacity_tokens=100))
    source.set_version(one, "0.32.0")
    source.set_version(one, "0.32.0")
    source.set_version(source.replicas["two"], "0.31.0")
    source.restarted(source.replicas["two"])
    assert [fact[0] for fact in facts] == ["models", "up", "metrics", "metrics", "version", "version", "restarted"]

    changes.clear()
    apply(told, over_the_wire(facts))
    there = told.replicas["one"]
    assert (there.up, there.kv, there.listing.objects) == (True, one.kv, one.listing.objects)
    assert there.max_model_len("m") == 4096
    assert (there.version, told.replicas["two"].version) == ("0.32.0", None)
    assert changes.count(Change.RESTARTED) == 2, "one told, one seen in the metrics"
    assert (there.epoch, told.replicas["two"].epoch) == (one.epoch, source.replicas["two"].epoch)

    late = Fleet()
    late.add(ReplicaSpec("http://a", "one"))
    apply(late, over_the_wire(snapshot(source)))
    assert late.route_slots("m") == (0,)
    assert late.replicas["one"].kv == one.kv
    assert late.replicas["one"].version == "0.32.0"


def over_the_wire(facts: list[Fact]) -> list[Fact]:
    sent: list[Fact] = orjson.loads(frame({"facts": facts})[4:])["facts"]
    return sent


# -- channel


async def test_messages_arrive_whole_and_in_order_and_the_end_is_seen() -> None:
    one, other = socket.socketpair()
    here, there = await Channel.over(one), await Channel.over(other)
    large = {"do": "facts", "facts": ["x" * 1000] * 2000}
    here.send(large)
    here.send({"do": "stop"})
    assert await there.receive() == large
    assert await there.receive() == {"do": "stop"}
    await here.flush(1.0)
    assert await there.receive() is None
    there.send({"is": "ignored"})
    there.close()


async def test_a_message_cut_in_the_middle_is_an_end() -> None:
    one, other = socket.socketpair()
    there = await Channel.over(other)
    one.send(frame({"do": "stop"})[:-1])
    one.close()
    assert await there.receive() is None
    there.close()


# -- handover


class Kept(asyncio.Protocol):
    """A connection that a worker has; it says whose it is."""

    def __init__(self, worker: "FakeWorker") -> None:
        self.worker = worker

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.worker.open.append(self)
        transport.write(self.worker.name)

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.open.remove(self)


class FakeWorker:
    """A worker's end, in this process."""

    def __init__(self, handover: Handover, name: bytes, *, takes: bool = True) -> None:
        self.name = name
        self.open: list[Kept] = []
        ours, self.end = socket.socketpair()
        self.lane = handover.add(ours)
        self.taking: HandedConnections | None = None
        if takes:
            self.take()

    def take(self) -> None:
        arrivals = Arrivals(lambda: Kept(self), None, 1.0)
        self.taking = HandedConnections(self.end, arrivals, lambda: len(self.open))

    def die(self) -> None:
        if self.taking is not None:
            self.taking.close()
        self.end.close()
        for kept in list(self.open):
            kept.transport.abort()


@pytest.fixture
async def handover() -> AsyncIterator[Handover]:
    made = Handover()
    yield made
    await made.close(0.0)
    for lane in list(made._lanes):
        made.remove(lane)


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for client in opened:
        client.close()


async def listening(handover: Handover) -> int:
    return handover.listen(await bind("127.0.0.1", 0), 512)


def connect(port: int, clients: list[socket.socket], count: int = 1) -> None:
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port))
        client.setblocking(False)
        clients.append(client)


async def owner(client: socket.socket) -> bytes:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(client, 1)


@pytest.mark.parametrize("count", [7, 64, 512])
async def test_connections_are_spread_evenly(count: int, handover: Handover, clients: list[socket.socket]) -> None:
    workers = [FakeWorker(handover, name) for name in (b"1", b"2", b"3")]
    port = await listening(handover)
    connect(port, clients, count)
    owners = [await owner(client) for client in clients]
    spread = [owners.count(worker.name) for worker in workers]
    assert max(spread) - min(spread) <= 1
    await eventually(lambda: sum(len(worker.open) for worker in workers) == count)
    # One that has lost its connections gets the next ones.
    for kept in list(workers[1].open):
        kept.transport.abort()
    await eventually(lambda: workers[1].lane.connections == 0)
    connect(port, clients, 2)
    assert [await owner(client) for client in clients[-2:]] == [b"2", b"2"]
    for worker in workers:
        worker.die()


async def test_what_a_dying_worker_has_not_taken_goes_to_another(
    handover: Handover, clients: list[socket.socket]
) -> None:
    busy, other = FakeWorker(handover, b"b", takes=False), FakeWorker(handover, b"o")
    connect(await listening(handover), clients, 10)
    await eventually(lambda: len(other.open) + len(busy.lane.untaken) == 10 and not busy.lane.unsent)
    assert len(busy.lane.untaken) == 5
    busy.die()
    handover.remove(busy.lane)
    assert [await owner(client) for client in clients] == [b"o"] * 10
    other.die()


async def test_a_worker_that_takes_nothing_gets_nothing_more(
    handover: Handover, clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = FakeWorker(handover, b"s", takes=False), FakeWorker(handover, b"o")
    port = await listening(handover)
    connect(port, clients, 2)
    await eventually(lambda: len(stuck.lane.untaken) == 1 and other.lane.connections == 1)
    monkeypatch.setattr(handover_module, "_SLOW_S", -1.0)
    for _ in range(10):
        # One after the other: with this limit a worker is slow until it has taken what it got.
        connect(port, clients)
        assert await owner(clients[-1]) == b"o"
    assert len(stuck.lane.untaken) == 1
    stuck.die()
    handover.remove(stuck.lane)
    assert {await owner(client) for client in clients[:2]} == {b"o"}
    other.die()


async def test_a_worker_that_is_stuck_for_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        number, pid, killed = 1, 0, 0

        async def ask(self, what: str, within_s: float) -> None:
            raise NoAnswer("late")

        def kill(self) -> None:
            self.killed += 1

    supervisor, stuck = Supervisor(SMALL), Stuck()
    await supervisor._late(cast(WorkerProcess, stuck))
    assert stuck.killed == 0
    monkeypatch.setattr(supervisor_module, "_STUCK_S", -1.0)
    await supervisor._late(cast(WorkerProcess, stuck))
    assert stuck.killed == 1
    await supervisor.close()


async def test_connections_wait_for_a_worker(handover: Handover, clients: list[socket.socket]) -> None:
    port = await listening(handover)
    connect(port, clients, 3)
    await eventually(lambda: len(handover._waiting) == 3)
    late = FakeWorker(handover, b"l")
    assert [await owner(client) for client in clients] == [b"l"] * 3
    late.die()


async def test_a_worker_that_leaves_takes_what_is_on_the_way_and_no_more(
    handover: Handover, clients: list[socket.socket]
) -> None:
    leaving, staying = FakeWorker(handover, b"l", takes=False), FakeWorker(handover, b"s")
    port = await listening(handover)
    connect(port, clients, 2)
    await eventually(lambda: len(leaving.lane.untaken) == 1 and staying.open)
    emptied = asyncio.ensure_future(handover.empty(leaving.lane))
    await asyncio.sleep(0)
    assert not emptied.done()
    leaving.take()
    await emptied
    connect(port, clients, 4)
    assert [await owner(client) for client in clients[2:]] == [b"s"] * 4
    leaving.die()
    staying.die()


async def test_what_waits_in_the_kernel_is_served_when_the_port_closes(
    handover: Handover, clients: list[socket.socket]
) -> None:
    worker = FakeWorker(handover, b"w")
    port = await listening(handover)
    connect(port, clients, 20)
    await handover.close(5.0)
    assert [await owner(client) for client in clients] == [b"w"] * 20
    with pytest.raises(ConnectionRefusedError):
        connect(port, clients)
    worker.die()


async def test_reports_in_pieces_add_up(handover: Handover, clients: list[socket.socket]) -> None:
    worker = FakeWorker(handover, b"w", takes=False)
    connect(await listening(handover), clients, 3)
    await eventually(lambda: len(worker.lane.untaken) == 3)
    report = REPORT.pack(1, 1) + REPORT.pack(2, 2)
    worker.end.send(report[:11])
    await eventually(lambda: len(worker.lane.untaken) == 2)
    worker.end.send(report[11:])
    await eventually(lambda: len(worker.lane.untaken) == 1)
    assert worker.lane.connections == 3
    worker.end.close()


# -- supervisor


async def test_it_gives_up_when_workers_keep_dying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[int] = []

    async def start(number: int, on_state: Any) -> WorkerProcess:
        starts.append(number)
        raise OSError("no room")

    monkeypatch.setattr(WorkerProcess, "start", start)
    monkeypatch.setattr(supervisor_module, "_PAUSES_S", (0.0,))
    supervisor = Supervisor(SMALL)
    await supervisor.start()
    assert supervisor.gave_up.is_set()
    assert "gives up" in caplog.text
    assert not supervisor._handover.listening
    await supervisor.stop()
    assert len(starts) <= 12


# -- the command line


def checked(tmp_path: Path, document: dict[str, Any]) -> Result:
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps({"replicas": [{"url": "http://127.0.0.1:9"}], **document}))
    return CliRunner().invoke(main, ["check", "-c", str(path)])


def test_several_workers_are_a_valid_configuration_with_redis_or_a_server_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "_WHEELS", {})
    without = checked(tmp_path, {"listen": {"workers": 4}})
    assert without.exit_code == 2
    assert "give its URL" in without.output
    assert checked(tmp_path, {"listen": {"workers": 4}, "redis": "redis://127.0.0.1:9"}).exit_code == 0
    assert checked(tmp_path, {"listen": {"workers": 1}}).exit_code == 0

    server = tmp_path / "valkey-server"
    server.write_text("")
    server.chmod(0o700)
    assert checked(tmp_path, {"listen": {"workers": 4}}).exit_code == 0
    assert redis_server.find_server() == server


# -- view


def test_replicas_of_several_workers_are_one_list() -> None:
    def seen(in_flight: int, breaker: str, median: float | None, count: int) -> dict[str, Any]:
        prediction = {"bias": median, "median_ape": median, "p90_ape": median, "count": count}
        return {
            "policy": "p",
            "replicas": [
                {
                    "name": "r",
                    "up": True,
                    "routable": breaker == "closed",
                    "breaker": breaker,
                    "in_flight": in_flight,
                    "decodes": 1,
                    "prefill_tokens": 10,
                    "kv_tokens": 100,
                    "prefix_map_blocks": 7 + in_flight,
                    "ttft_prediction": prediction,
                }
            ],
        }

    merged = merge_replicas([seen(1, "closed", 0.1, 30), seen(2, "open", None, 0), seen(4, "closed", 0.4, 10)])
    (replica,) = merged["replicas"]
    assert (replica["in_flight"], replica["decodes"], replica["kv_tokens"]) == (7, 3, 300)
    assert (replica["prefix_map_blocks"], replica["breaker"], replica["routable"]) == (11, "closed, open", True)
    assert replica["ttft_prediction"]["count"] == 40
    assert replica["ttft_prediction"]["median_ape"] == pytest.approx(0.175)
    assert merge_replicas([]) == {"policy": None, "replicas": []}
