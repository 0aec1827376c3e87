"""Health, models and metrics over real sockets, against a small replica that does as it is told."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from support.waiting import eventually

from gateway.replicas.health import HealthChecker, HealthSettings
from gateway.replicas.probe import ProbeClient, ProbeError, ProbeFailure
from gateway.replicas.registry import Change, Fleet, Replica, ReplicaSpec
from gateway.replicas.rounds import Rounds
from gateway.replicas.scrape import Scraper, ScrapeSettings
from gateway.replicas.spec import Role

FAST = HealthSettings(interval_s=0.01, timeout_s=5.0, models_interval_s=0.02)
PATIENCE_S = 20.0


class Stub:
    """A replica on a port of its own. Several base paths lead to it, so that it can play several replicas."""

    def __init__(self) -> None:
        self.health_status = 200
        self.health_gate = asyncio.Event()
        self.health_gate.set()
        self.models: Any = {"object": "list", "data": [{"id": "m", "parent": None, "max_model_len": 4096}]}
        self.models_status = 200
        self.version: Any = {"version": "0.32.0"}
        self.version_status = 200
        self.metrics = "process_start_time_seconds 100.0\n"
        self.requests: list[tuple[str, str | None]] = []
        self.health_now = 0
        self.health_most = 0
        self.health_aborted = asyncio.Event()
        self.arrived = asyncio.Condition()
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/{base:.*}health", self._health)
        app.router.add_get("/{base:.*}v1/models", self._models)
        app.router.add_get("/{base:.*}version", self._version)
        app.router.add_get("/{base:.*}metrics", self._metrics)
        app.router.add_get("/moved", self._moved)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def url(self, base: str = "") -> str:
        return f"http://127.0.0.1:{self.port}{base}"

    async def seen(self, path: str, count: int) -> None:
        """Wait for so many more requests of a path."""
        before = self._count(path)
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: self._count(path) >= before + count)

    def _count(self, path: str) -> int:
        return sum(seen == path for seen, _ in self.requests)

    async def _note(self, request: web.Request) -> None:
        async with self.arrived:
            self.requests.append((request.path, request.headers.get("Authorization")))
            self.arrived.notify_all()

    async def _health(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.health_now += 1
        self.health_most = max(self.health_most, self.health_now)
        try:
            await self.health_gate.wait()
        except asyncio.CancelledError:
            self.health_aborted.set()
            raise
        finally:
            self.health_now -= 1
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response(self.models, status=self.models_status)

    async def _version(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response(self.version, status=self.version_status)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.Response(text=self.metrics)

    async def _moved(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/health")


class Scene:
    """A fleet, its checker, and the changes it tells."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.fleet = Fleet()
        self.client = ProbeClient()
        stack.push_async_callback(self.client.close)
        self.changes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.fleet.on_change(lambda kind, replica: self.changes.put_nowait((kind, replica.name)))

    async def stub(self) -> Stub:
        stub = Stub()
        await stub.listen()
        self.stack.push_async_callback(stub.close)
        return stub

    def add(self, stub: Stub, base: str = "", **spec: Any) -> Replica:
        return self.fleet.add(ReplicaSpec(stub.url(base), **spec))

    def checker(self, settings: HealthSettings = FAST, **options: Any) -> HealthChecker:
        checker = HealthChecker(self.fleet, self.client, settings, **options)
        self.stack.push_async_callback(checker.stop)
        return checker

    def scraper(self, settings: ScrapeSettings | None = None, **options: Any) -> Scraper:
        scraper = Scraper(self.fleet, self.client, settings or ScrapeSettings(interval_s=0.01), **options)
        self.stack.push_async_callback(scraper.stop)
        return scraper

    async def told(self, kind: Change, name: str = "replica-1") -> list[tuple[str, str]]:
        """Wait for a change, and return those before it."""
        before = []
        async with asyncio.timeout(PATIENCE_S):
            while (change := await self.changes.get()) != (kind, name):
                before.append(change)
        return before


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(stack)


class TestHealth:
    async def test_start_knows_who_is_up_what_they_serve_and_what_they_hold(self, scene: Scene) -> None:
        stub, gone = await scene.stub(), await scene.stub()
        stub.metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1\nvllm:num_requests_running 2\n'
        await gone.close()
        replica = scene.add(stub, "/base", api_key="sk-1")
        missing = scene.add(gone)
        scraper = scene.scraper()
        await scene.checker(refresh=scraper.scrape).start()
        assert (replica.up, missing.up) == (True, False)
        assert list(scene.fleet.route_slots("m")) == [0]
        assert replica.max_model_len("m") == 4096
        assert replica.kv.kv_capacity_tokens == 160
        assert set(stub.requests) == {
            ("/base/health", "Bearer sk-1"),
            ("/base/v1/models", "Bearer sk-1"),
            ("/base/metrics", "Bearer sk-1"),
        }

    async def test_a_replica_is_routable_only_when_its_models_and_metrics_are_known(self, scene: Scene) -> None:
        stub = await scene.stub()
        stub.metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1\n'
        scene.add(stub)
        await scene.checker(refresh=scene.scraper().scrape).start()
        assert await scene.told(Change.UP) == [
            ("added", "replica-1"),
            ("models", "replica-1"),
            ("capacity", "replica-1"),
        ]

    async def test_start_does_not_wait_for_one_that_hangs(self, scene: Scene) -> None:
        hanging, well = await scene.stub(), await scene.stub()
        hanging.health_gate.clear()
        replicas = scene.add(hanging), scene.add(well)
        await scene.checker().start(within_s=0.3)
        await scene.told(Change.UP, "replica-2")
        assert [replica.up for replica in replicas] == [False, True]
        hanging.health_gate.set()
        await scene.told(Change.UP, "replica-1")

    async def test_errors_take_a_replica_down_and_an_answer_brings_it_back(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        stub = await scene.stub()
        replica = scene.add(stub)
        await scene.checker().start()
        epoch = replica.epoch
        stub.health_status = 503
        await scene.told(Change.DOWN)
        assert list(scene.fleet.route_slots("m")) == []
        assert scene.fleet.knows("m")
        await stub.seen("/health", 5)
        stub.health_status = 200
        assert await scene.told(Change.UP) == []
        assert list(scene.fleet.route_slots("m")) == [0]
        assert replica.epoch == epoch
        assert [record.getMessage() for record in caplog.records if record.name.startswith("gateway")] == [
            "replica-1 serves m",
            "replica-1 is up",
            "replica-1 is down: status 503",
            "replica-1 is up",
        ]

    async def test_a_port_that_closes_and_opens_again_is_a_restart(self, scene: Scene) -> None:
        stub = await scene.stub()
        stub.metrics = ""
        replica = scene.add(stub)
        await scene.checker(refresh=scene.scraper().scrape).start()
        epoch = replica.epoch
        await stub.close()
        await scene.told(Change.DOWN)
        await stub.listen()
        assert ("restarted", "replica-1") in await scene.told(Change.UP)
        assert replica.epoch != epoch

    async def test_the_process_start_time_tells_a_cut_network_from_a_restart(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        await scene.checker(refresh=scene.scraper().scrape).start()
        for start, restarted in (("100.0", False), ("200.0", True)):
            epoch = replica.epoch
            await stub.close()
            await scene.told(Change.DOWN)
            stub.metrics = f"process_start_time_seconds {start}\n"
            await stub.listen()
            await scene.told(Change.UP)
            assert (replica.epoch != epoch) == restarted

    async def test_a_busy_replica_with_slow_health_stays_up_while_bytes_flow(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        active = True
        settings = HealthSettings(interval_s=0.01, timeout_s=0.1, models_interval_s=60)
        await scene.checker(settings, is_active=lambda slot: active and slot == 0).start()
        await scene.told(Change.UP)
        stub.health_gate.clear()
        await stub.seen("/health", 5)
        assert replica.up
        active = False
        await scene.told(Change.DOWN)

    async def test_probes_of_a_removed_replica_stop_at_once(self, scene: Scene) -> None:
        stub = await scene.stub()
        scene.add(stub)
        await scene.checker(HealthSettings(interval_s=0.01, timeout_s=3600)).start()
        stub.health_gate.clear()
        await stub.seen("/health", 1)
        scene.fleet.remove("replica-1")
        async with asyncio.timeout(PATIENCE_S):
            await stub.health_aborted.wait()

    async def test_a_removed_replica_is_forgotten_by_all_who_ask_it(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        forgotten: list[Replica] = []
        monkeypatch.setattr(scene.client, "forget", forgotten.append)
        scene.checker()
        scene.scraper()
        scene.fleet.remove("replica-1")
        assert forgotten == [replica, replica]

    async def test_a_replica_added_later_is_found(self, scene: Scene) -> None:
        await scene.checker().start()
        stub = await scene.stub()
        scene.add(stub)
        await scene.told(Change.UP)
        assert list(scene.fleet.route_slots("m")) == [0]

    async def test_adapters_loaded_later_are_found(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        await scene.checker().start()
        stub.models["data"].append({"id": "lora", "parent": "m"})
        await scene.told(Change.UP)
        await scene.told(Change.MODELS)
        assert replica.adapters == {"lora": "m"}
        assert list(scene.fleet.route_slots("lora")) == [0]

    @pytest.mark.parametrize("answer", [{"object": "error"}, {"data": "m"}, [], None])
    async def test_a_replica_that_lists_nothing_is_up_and_asked_again(self, scene: Scene, answer: object) -> None:
        stub = await scene.stub()
        good, stub.models = stub.models, answer
        replica = scene.add(stub)
        await scene.checker(HealthSettings(interval_s=0.01)).start()
        assert replica.up
        assert list(scene.fleet.route_slots("m")) == []
        stub.models = good
        await scene.told(Change.MODELS)
        assert list(scene.fleet.route_slots("m")) == [0]

    async def test_what_was_listed_stays_when_the_list_cannot_be_read(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        await scene.checker().start()
        stub.models_status = 500
        await stub.seen("/v1/models", 4)
        assert replica.served == {"m"}
        assert caplog.text.count("does not list its models") == 1

    async def test_versions_are_asked_for_where_they_must_agree(self, scene: Scene) -> None:
        alone, prefill = await scene.stub(), await scene.stub()
        mixed = scene.add(alone)
        await scene.checker(HealthSettings(interval_s=0.01, models_interval_s=3600)).start()
        await alone.seen("/health", 2)
        assert mixed.version is None
        assert not [path for path, _ in alone.requests if path == "/version"]
        other = scene.add(prefill, role=Role.PREFILL)
        await scene.told(Change.UP, "replica-2")
        assert other.version == "0.32.0", "known before it is up"
        await eventually(lambda: mixed.version)

    async def test_a_new_process_is_asked_for_its_version(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub, role=Role.DECODE)
        settings = HealthSettings(interval_s=0.01, models_interval_s=3600)
        await scene.checker(settings, refresh=scene.scraper().scrape).start()
        await stub.close()
        await scene.told(Change.DOWN)
        stub.metrics, stub.version = "process_start_time_seconds 200.0\n", {"version": "0.33.0"}
        await stub.listen()
        await scene.told(Change.UP)
        assert replica.version == "0.33.0"
        # One that is back before anybody has missed it shows in its metrics only.
        stub.version = {"version": "0.34.0"}
        scene.fleet.restarted(replica)
        await eventually(lambda: replica.version == "0.34.0")

    @pytest.mark.parametrize("answer", [{"detail": "Not Found"}, {"version": 32}, {"version": ""}, [], None])
    async def test_what_tells_no_version_is_up_without_one(self, scene: Scene, answer: object) -> None:
        stub = await scene.stub()
        stub.version, stub.version_status = answer, 200 if answer != {"detail": "Not Found"} else 404
        replica = scene.add(stub, role=Role.DECODE)
        await scene.checker().start()
        await stub.seen("/version", 2)
        assert (replica.up, replica.version) == (True, None)

    async def test_a_version_stays_when_it_cannot_be_read(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub, role=Role.DECODE)
        await scene.checker().start()
        stub.version_status = 500
        await stub.seen("/version", 2)
        assert replica.version == "0.32.0"

    async def test_probes_run_in_parallel_and_bounded(self, scene: Scene) -> None:
        stub = await scene.stub()
        stub.health_gate.clear()
        for index in range(7):
            scene.add(stub, f"/{index}")
        settings = HealthSettings(interval_s=0.01, concurrency=3)
        starting = asyncio.create_task(scene.checker(settings).start(PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S), stub.arrived:
            await stub.arrived.wait_for(lambda: len(stub.requests) == 3)
        stub.health_gate.set()
        await starting
        assert stub.health_most == 3
        assert len(scene.fleet.route_slots("m")) == 7


class TestScrape:
    async def test_metrics_arrive_and_a_new_process_is_noticed(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        scene.fleet.set_up(replica, True)
        await scene.scraper().start()
        await stub.seen("/metrics", 2)
        epoch = replica.epoch
        stub.metrics = "process_start_time_seconds 200.0\nvllm:num_requests_waiting 4\n"
        await scene.told(Change.RESTARTED)
        assert replica.epoch != epoch
        assert replica.kv.waiting == 4

    async def test_replicas_that_are_down_are_not_asked(self, scene: Scene) -> None:
        stub, asked = await scene.stub(), await scene.stub()
        scene.add(stub)
        scene.fleet.set_up(scene.add(asked), True)
        await scene.scraper().start()
        await asked.seen("/metrics", 3)
        assert stub.requests == []

    async def test_old_measurements_are_dropped_and_constants_kept(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        stub = await scene.stub()
        page = 'vllm:num_requests_running 2\nvllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1\n'
        stub.metrics = page
        replica = scene.add(stub)
        now_s = 0.0
        scraper = scene.scraper(ScrapeSettings(interval_s=1.0), clock=lambda: now_s)
        await scraper.scrape(replica)
        for unreadable in ("vllm:num_requests_running x\n", "vllm:num_requests_running{\n"):
            now_s = 3.0
            stub.metrics = unreadable
            await scraper.scrape(replica)
            assert replica.kv.running == 2
        now_s = 3.1
        await scraper.scrape(replica)
        assert replica.kv == replica.kv.aged()
        assert replica.kv.kv_capacity_tokens == 160
        stub.metrics = page
        await scraper.scrape(replica)
        assert replica.kv.running == 2
        assert caplog.text.count("has no readable metrics") == 1
        assert caplog.text.count("has metrics again") == 1

    async def test_interval_zero_reads_constants_only_when_asked(self, scene: Scene) -> None:
        stub = await scene.stub()
        stub.metrics = "vllm:num_requests_running 2\nprocess_start_time_seconds 5\n"
        replica = scene.add(stub)
        scene.fleet.set_up(replica, True)
        scraper = scene.scraper(ScrapeSettings(interval_s=0.0))
        await scraper.start()
        assert stub.requests == []
        await scraper.scrape(replica)
        assert replica.kv.process_start_s == 5
        assert replica.kv.running is None


class TestProbe:
    async def failure(self, scene: Scene, replica: Replica, path: str, **limits: Any) -> ProbeFailure:
        arguments = {"timeout_s": 5.0, "limit_bytes": 1000, **limits}
        with pytest.raises(ProbeError) as caught:
            await scene.client.get(replica, path, **arguments)
        return caught.value.failure

    async def test_failures_are_told_apart(self, scene: Scene) -> None:
        stub = await scene.stub()
        replica = scene.add(stub)
        stub.metrics = "x" * 1001
        assert await self.failure(scene, replica, "/metrics") is ProbeFailure.ERROR
        assert await self.failure(scene, replica, "/nothing") is ProbeFailure.ERROR
        assert await self.failure(scene, replica, "/moved") is ProbeFailure.ERROR
        stub.health_gate.clear()
        assert await self.failure(scene, replica, "/health", timeout_s=0.05) is ProbeFailure.TIMEOUT
        await stub.close()
        assert await self.failure(scene, replica, "/health") is ProbeFailure.REFUSED

    async def test_hosts_without_address_and_answers_that_are_not_http(self, scene: Scene) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 smtp.example ready\r\n")
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            mail = scene.fleet.add(ReplicaSpec(f"http://127.0.0.1:{port}"))
            assert await self.failure(scene, mail, "/health") is ProbeFailure.ERROR
        nowhere = scene.fleet.add(ReplicaSpec("http://nowhere.invalid:1"))
        assert await self.failure(scene, nowhere, "/health") is ProbeFailure.ERROR


class TestRounds:
    async def test_a_fault_in_one_turn_does_not_end_the_watch(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        stub = await scene.stub()
        scene.add(stub)
        third = asyncio.Event()
        turns = 0

        async def work(replica: Replica) -> None:
            nonlocal turns
            turns += 1
            if turns < 3:
                raise RuntimeError("bug")
            third.set()

        rounds = Rounds(scene.fleet, work, interval_s=0.01, concurrency=1)
        await rounds.start()
        async with asyncio.timeout(PATIENCE_S):
            await third.wait()
        await rounds.stop()
        assert caplog.text.count("RuntimeError: bug") == 2

    async def test_stop_ends_every_loop_and_later_additions_start_none(self, scene: Scene) -> None:
        stub = await scene.stub()
        scene.add(stub)
        before = asyncio.all_tasks()

        async def work(replica: Replica) -> None:
            await asyncio.Event().wait()

        rounds = Rounds(scene.fleet, work, interval_s=0.01, concurrency=1)
        await rounds.start()
        assert asyncio.all_tasks() != before
        await rounds.stop()
        scene.add(stub, "/later")
        assert asyncio.all_tasks() == before
