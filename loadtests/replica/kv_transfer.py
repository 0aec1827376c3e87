"""KV that moves between simulated replicas, as vLLM 0.32's NixlConnector (pull) has it move.

Facts kept, each observed on vLLM 0.32 with two CPU replicas:
- A request with `do_remote_decode` that is not streamed answers with `kv_transfer_params`, and its blocks stay held
  until they are read once, or until the lease ends.
- A request with `do_remote_prefill` and those parameters computes nothing of its prompt but the last token.
- Parameters whose blocks are gone are not noticed: the answer is 200, with wrong tokens.
- A prefill replica that cannot be reached, or another one than the parameters name, is a 500; in a stream, an error
  event in a 200. With `kv_load_failure_policy` recompute, the prompt is computed.
- Without `remote_request_id` the request hangs.

The side channel is HTTP here: the decode replica asks `POST /sim/kv_transfer` of the prefill replica, which answers
when the blocks would have been read.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from gateway.estimator.model import model
from gateway.estimator.transfer import LINKS
from loadtests.engine import EngineRequest
from loadtests.replica.errors import ApiError

if TYPE_CHECKING:
    from loadtests.replica.replica import Replica

HANDSHAKE_S = 5.0
"""After this time without an answer a peer counts as unreachable."""


class LoadFailed(ApiError):
    """The KV could not be loaded."""

    def __init__(self, why: str) -> None:
        super().__init__(500, f"KV load failed: {why}", "InternalServerError")


@dataclass(slots=True)
class _Held:
    request: EngineRequest
    cached_tokens: int
    lease: asyncio.TimerHandle


class KvTransfer:
    """One replica's side of transfers: what it holds for others, and what it fetches from them.

    Attributes:
        engine_id: of this process.
        expired, sent, received: requests.
    """

    def __init__(self, replica: Replica, host: str, port: int) -> None:
        """Be reachable under the replica's own address."""
        self.engine_id = str(uuid.uuid4())
        self.expired = self.sent = self.received = 0
        self._replica = replica
        self._host = host
        self._port = port
        self._held: dict[str, _Held] = {}
        self._session: aiohttp.ClientSession | None = None
        config = replica.config
        self._bytes_per_token = float(model(config.model).kv_bytes_per_token)
        self._bytes_per_s = LINKS[config.kv_link]

    @property
    def holding(self) -> int:
        """Requests whose blocks are held."""
        return len(self._held)

    def hold(self, name: str, request: EngineRequest) -> dict[str, Any]:
        """Keep a finished prompt's blocks for another replica.

        Args:
            name: the request's id, as it is told.
            request: the engine's, finished.

        Returns:
            The `kv_transfer_params` of the answer.
        """
        config = self._replica.config
        loop = asyncio.get_running_loop()
        lease = loop.call_later(config.kv_lease_s / config.speedup, self._lease_ended, name)
        self._held[name] = _Held(request, request.cached_tokens, lease)
        blocks = -(-request.prompt_tokens // config.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": self._host,
            "remote_port": self._port,
            "tp_size": config.tensor_parallel,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.cached_tokens,
        }

    async def read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Another replica reads blocks: take the time that takes, then free them.

        Args:
            asked: `engine_id`, `request_id`, and `tokens` that the other lacks.

        Raises:
            ApiError: another process answers here than the parameters name.
        """
        if asked.get("engine_id") != self.engine_id:
            raise ApiError(409, "engine id mismatch", param="engine_id")
        held = self._held.pop(str(asked.get("request_id")), None)
        if held is None:
            return {"right": False}
        held.lease.cancel()
        config = self._replica.config
        wire_s = float(asked.get("tokens") or 0) * self._bytes_per_token / self._bytes_per_s
        try:
            await asyncio.sleep((config.kv_link_latency_ms / 1000.0 + wire_s) / config.speedup)
        finally:
            self._release(held.request)
        self.sent += 1
        return {"right": True}

    async def fetch(self, params: Mapping[str, Any], prompt_tokens: int) -> bool:
        """Fetch the KV of a prompt from where the parameters point to.

        Returns:
            Whether it is the prompt's; what had been freed may be any.

        Raises:
            LoadFailed: nobody there who has it.
        """
        if not params.get("remote_request_id"):
            # vLLM waits for a notification that nobody will send.
            await asyncio.Event().wait()
        url = f"http://{params.get('remote_host')}:{params.get('remote_port')}/sim/kv_transfer"
        asked = {
            "engine_id": params.get("remote_engine_id"),
            "request_id": params["remote_request_id"],
            "tokens": prompt_tokens,
        }
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None, sock_connect=HANDSHAKE_S))
        try:
            async with self._session.post(url, data=orjson.dumps(asked)) as response:
                if response.status != 200:
                    raise LoadFailed(f"status {response.status}")
                right: bool = orjson.loads(await response.read())["right"]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise LoadFailed(type(error).__name__) from error
        self.received += 1
        return right

    async def close(self) -> None:
        """Free everything."""
        for held in self._held.values():
            held.lease.cancel()
        self._held.clear()
        if self._session is not None:
            await self._session.close()

    def _lease_ended(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self.expired += 1
            self._release(held.request)

    def _release(self, request: EngineRequest) -> None:
        self._replica.engine.release(request)


def asked_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`kv_transfer_params` of a body, if they ask for anything."""
    params = body.get("kv_transfer_params")
    if not isinstance(params, Mapping):
        return None
    return params if params.get("do_remote_decode") or params.get("do_remote_prefill") else None
