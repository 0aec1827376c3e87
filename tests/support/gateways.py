"""A whole gateway in the test's own event loop, on free ports."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from support.stub_replica import StubReplica

from gateway.app import Gateway, validate
from gateway.config import Config
from gateway.proxy.request_log import RequestLog


class RunningGateway:
    """A started gateway and what tests ask of it."""

    def __init__(self, gateway: Gateway, log: io.BytesIO, request_log: RequestLog) -> None:
        self.gateway = gateway
        self._log = log
        self._request_log = request_log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin_port}"

    @property
    def port(self) -> int:
        return self.gateway.port

    def log_lines(self) -> list[dict[str, Any]]:
        """The request log so far."""
        self._request_log._write()
        return [json.loads(line) for line in self._log.getvalue().splitlines()]

    def assert_idle(self) -> None:
        """Every counter of work under way is exactly zero."""
        ledger = self.gateway.router.ledger
        assert self.gateway.tally.in_progress == 0
        assert not self.gateway.plane._exchanges
        for column in (
            ledger.in_flight,
            ledger.decodes,
            ledger.prefill_tokens,
            ledger.prefill_work_s,
            ledger.kv_tokens,
        ):
            assert all(value == 0 for value in column), column

    async def until_idle(self, within_s: float = 5.0) -> None:
        """Wait until no request is under way."""
        async with asyncio.timeout(within_s):
            while self.gateway.tally.in_progress:
                self.gateway.plane._ended.clear()
                await self.gateway.plane._ended.wait()


@asynccontextmanager
async def running_gateway(
    replicas: Sequence[StubReplica | str], options: dict[str, Any] | None = None
) -> AsyncIterator[RunningGateway]:
    """Start a gateway in front of replicas; `options` is laid over defaults that suit tests."""
    urls = [replica if isinstance(replica, str) else replica.url for replica in replicas]
    document: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "replicas": [{"url": url} for url in urls],
        "scrape": {"interval_s": 0},
        "timeouts": {"drain_s": 0},
    }
    for section, values in (options or {}).items():
        if isinstance(values, dict) and isinstance(document.get(section), dict):
            document[section] = {**document[section], **values}
        else:
            document[section] = values
    config = Config.model_validate(document)
    validate(config)
    log = io.BytesIO()
    request_log = RequestLog(log)
    gateway = Gateway(config, request_log)
    await gateway.start()
    try:
        yield RunningGateway(gateway, log, request_log)
    finally:
        await gateway.stop()


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
        yield client


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
