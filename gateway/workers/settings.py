"""The configuration of one worker out of the whole gateway's. Pure."""

from pathlib import Path
from typing import Any

import orjson
from pydantic import SecretStr

from gateway.config import Config
from gateway.reload import base_url
from gateway.replicas.spec import ReplicaSpec


class ReplicaNames:
    """Gives every replica a name that all workers use, whenever they were started.

    A fleet names replicas in the order in which it came to know them. A worker started later than the others has not
    seen those that have left meanwhile, and would count differently.
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._next = 1

    def fill(self, config: Config) -> Config:
        """Return a configuration in which all replicas have names; one that is known by its URL keeps its own."""
        given: dict[str, str] = {}
        taken = {replica.name for replica in config.replicas if replica.name is not None}
        taken |= set(self._given.values())
        replicas = []
        for replica in config.replicas:
            if replica.name is None:
                url = base_url(ReplicaSpec(replica.url))
                name = given[url] = self._given.get(url) or self._new(taken)
                replica = replica.model_copy(update={"name": name})
            replicas.append(replica)
        self._given = given
        return config.model_copy(update={"replicas": tuple(replicas)})

    def _new(self, taken: set[str]) -> str:
        while True:
            name = f"replica-{self._next}"
            self._next += 1
            if name not in taken:
                return name


def worker_config(config: Config, number: int, workers: int) -> Config:
    """Return what one worker is to do: limits that each worker keeps by itself are divided.

    `max_in_flight` is not, because a worker compares it with what all have sent.

    Args:
        config: of the whole gateway.
        number: of the worker, from 1.
        workers: how many there are.
    """
    limits, queue, retries, routing = config.limits, config.queue, config.retries, config.routing
    return config.model_copy(
        update={
            "limits": limits.model_copy(update={"max_connections": -(-limits.max_connections // workers)}),
            "queue": queue.model_copy(update={"max_requests": -(-queue.max_requests // workers)}),
            "retries": retries.model_copy(update={"budget_min_per_s": retries.budget_min_per_s / workers}),
            # Workers that draw the same numbers would all choose the same replica at the same time.
            "routing": routing.model_copy(update={"seed": None if routing.seed is None else routing.seed + number - 1}),
        }
    )


def document(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON's own types, secrets in the clear: for a worker's channel, and nothing else."""
    # Options that were not given stay so: it makes a difference to those that fall back on others.
    plain: dict[str, Any] = orjson.loads(orjson.dumps(config.model_dump(exclude_unset=True), default=_plain))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(type(value).__name__)
