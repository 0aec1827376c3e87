"""gateway.yaml: every option, its default and what it does. Nothing else lives here.

`${NAME}` in any string is replaced by the environment variable NAME, so that keys need not stand in the file.
"""

import os
import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class ConfigError(ValueError):
    """The configuration cannot be used; the message says where and why."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsServer(_Section):
    """TLS towards clients."""

    cert: Path
    """Certificate chain, PEM."""
    key: Path
    """Private key, PEM."""
    client_ca: Path | None = None
    """CA whose certificates clients must present (mTLS)."""


class TlsClient(_Section):
    """TLS towards https replicas."""

    ca: Path | None = None
    """CA bundle to trust instead of the system's."""
    cert: Path | None = None
    """Client certificate (mTLS), PEM."""
    key: Path | None = None
    """Private key of the client certificate, PEM."""


class Listen(_Section):
    """The API port."""

    host: str = "0.0.0.0"  # noqa: S104 - an API gateway serves the network; the admin port does not
    port: int = Field(8000, ge=0, le=65535)
    """0 picks a free port, printed at start."""
    backlog: int = Field(2048, ge=1)
    """Connections the kernel holds before they are accepted."""
    workers: int = Field(1, ge=1, le=256)
    """Worker processes behind the port, each with an event loop of its own. With more than one, `redis` holds what they
    share; without a URL a redis-server of this machine is started for them. What `limits.max_connections`,
    `queue.max_requests` and `retries.budget_min_per_s` allow is divided among them."""
    tls: TlsServer | None = None


class Admin(_Section):
    """The admin port: metrics, health, readiness, admin API."""

    host: str = "127.0.0.1"
    port: int = Field(8001, ge=0, le=65535)
    key: SecretStr | None = None
    """Bearer key of /admin/... ; without one those paths answer to loopback clients only."""


class Auth(_Section):
    """Keys on both sides."""

    client_keys: tuple[SecretStr, ...] = ()
    """Bearer keys clients may use; empty lets everybody in."""
    upstream: Literal["pass", "replace", "strip"] = "replace"
    """Authorization towards replicas. `pass`: the client's own. `replace`: the replica's `api_key` (nothing, if it has
    none). `strip`: never any."""


class ReplicaConfig(_Section):
    """One vLLM replica."""

    url: str
    """Base URL, `http://host:port[/path]`."""
    name: str | None = None
    """What operators and clients see; default replica-1, replica-2, ... Never an address."""
    models: tuple[str, ...] = ()
    """Models it serves; empty reads them, adapters included, from its /v1/models."""
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """`prefill`: computes prompts for others, see `disaggregation`, and gets whole requests only while nothing else is
    up. `decode` and `mixed`: get requests, whole or with a prompt computed elsewhere."""
    hardware: str | None = None
    """A preset such as h100-sxm; default: the top-level `hardware`."""
    model_shape: str | None = None
    """A preset such as llama-3.1-8b, or the path of a Hugging Face config.json; default: top-level `model`."""
    tensor_parallel: int = Field(1, ge=1)
    api_key: SecretStr | None = None
    """The replica's own key, for `auth.upstream: replace` and for probes."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """The engine's option of that name: tokens of one step. Default: `routing.token_budget`. Engines do not tell."""
    max_in_flight: int | None = Field(None, ge=1)
    """Requests it may have at once; what is more goes elsewhere, waits in the `queue`, or gets a 429. Workers and
    gateways that share a `redis` keep to it together, but for what they admit in the same few tens of milliseconds."""

    @field_validator("api_key")
    @classmethod
    def _fits_in_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not (key.get_secret_value().isascii() and key.get_secret_value().isprintable()):
            # A line end, as files with keys have, would begin a header of its own.
            raise ValueError("an api_key is printable ASCII without line ends")
        return key


class Fallback(_Section):
    """When predictions of the time to first token are no longer followed. The default policy then chooses by the prompt
    tokens to be computed, prefix matches included, times the answers that run, until predictions are good again; they
    go on being made and compared. Each model is judged by itself."""

    error: float | None = Field(2.0, gt=0)
    """Median error of the last 64 predictions from which on they are not followed. 2.0: off by a factor of three, up or
    down. They are again when three quarters are within 60 % of it. What is off by less than 0.1 s is not wrong. null:
    they always are."""
    samples: int = Field(32, ge=1, le=64)
    """Predictions that must have been compared before."""


class Routing(_Section):
    """How a replica is chosen."""

    policy: str = "predicted_ttft"
    policy_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the policy's constructor; see policies/<name>.py."""
    seed: int | None = None
    """Seed of random numbers, those of ties first of all. Default: another one in every process, because gateways that
    see the same and draw the same would all send the next request to the same replica."""
    session_header: str | None = None
    """Header that carries a session key; otherwise the body's `user` is used."""
    token_budget: int = Field(8192, ge=1)
    """The max_num_batched_tokens of engines for which `replicas` does not say: tokens of one step."""
    response_headers: bool = True
    """Send the x-warmgate-* headers to clients."""
    fallback: Fallback = Fallback()
    slow_start_s: float = Field(10.0, ge=0)
    """How long a replica that comes up takes to grow from one request at a time to what the others have; 0: at once."""


class ModelSlo(_Section):
    """Latency targets of one model's requests; what is left out is as for all models, null is no target."""

    ttft_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Milliseconds to the first token, of requests without an `x-slo-ttft-ms` header."""
    tpot_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Milliseconds per output token after the first, of requests without an `x-slo-tpot-ms` header."""
    on_miss: Literal["serve", "refuse"] = "serve"
    """What happens to a request when no replica is predicted to keep its targets. `serve`: the policy chooses among
    all, as without targets. `refuse`: 429 at once, with the predicted time until one would in Retry-After."""


class Slo(ModelSlo):
    """Latency targets (SLO). Requests ask for them in the headers `x-slo-ttft-ms` and `x-slo-tpot-ms`, and the policy
    then chooses among the replicas predicted to keep them. Without a header and a default here there is no target."""

    models: dict[str, ModelSlo] = Field(default_factory=dict)
    """By name of a model as the replicas list it, or of an adapter; of an adapter without an entry, its model's."""
    max_retry_after_s: int = Field(60, ge=1, le=3600)
    """Longest time in the Retry-After of a refusal, also where waiting would not help."""


class ModelDisaggregation(_Section):
    """How one model's prompts move from prefill to decode replicas; what is left out is as for all models."""

    connector: Literal["nixl", "nixl_push", "shared_storage", "none"] = "nixl"
    """vLLM's KV connector on these replicas. `nixl`: NixlConnector (pull): prefill first, then decode with what prefill
    returned. `nixl_push`: NixlPushConnector: both at once, under one X-Request-Id, once the gateway has learned where
    the prefill replica is from its first answer. `shared_storage`: ExampleConnector: prefill first, and decode finds
    the KV by its prompt. `none`: prefill replicas are not used."""
    policy: Literal["predicted", "threshold", "always", "never"] = "predicted"
    """Which requests are prefilled elsewhere. `predicted`: those whose predicted cost is lower that way. `threshold`:
    those with at least `threshold_tokens` uncached prompt tokens. `always` and `never` are for comparisons."""
    threshold_tokens: int = Field(4096, ge=1)
    """For `policy: threshold`: prompt tokens that the decode replica does not hold."""
    link: Literal["nvlink", "pcie5", "400g", "100g", "25g", "10g"] = "100g"
    """What the replicas are joined by, one way: NVLink, PCIe 5.0 x16, or a network of so many Gbit/s. Corrected by the
    hand-offs observed."""
    link_bytes_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Bytes per second of the link, in place of `link`."""
    link_latency_ms: float = Field(2.0, ge=0, allow_inf_nan=False)
    """Constant part of a hand-off: notification, handshake, the way of the second request."""
    kv_lease_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """vLLM's `kv_lease_duration`: how long a prefill replica keeps the KV of a prompt for a decode replica that has not
    asked for it. A second request that would begin later is not sent: the prompt is prefilled again. A prefill replica
    with a shorter one could hand out the KV of other prompts."""
    answer_whole: bool = True
    """Let prefill replicas serve whole requests, like replicas of role `mixed`, while handing over is not worth it: no
    prompt for 30 seconds, or so few and so little that it saves less than a millisecond of the mean request. Short
    prompts, or a slow link. With `policy: predicted`; their engines need a KV role that answers (`kv_both`, vLLM's
    usual one)."""


class Disaggregation(ModelDisaggregation):
    """Prefill on replicas of role `prefill`, decode on others. Without such replicas nothing here has any effect. In
    a fleet with replicas of role `prefill` or `decode`, requests with `kv_transfer_params` of their own are refused
    (400): a decode engine does not survive parameters that no prefill replica has given out."""

    models: dict[str, ModelDisaggregation] = Field(default_factory=dict)
    """By name of the base model as the replicas list it."""


class Prefixes(_Section):
    """The prefix map."""

    block_bytes: int = Field(256, ge=16)
    """Length of the first prompt blocks, in bytes of canonical prompt."""
    growth: int = Field(32, ge=0)
    """Blocks double with depth, but stay at most 1/growth of it; 0 keeps them all alike."""
    max_block_bytes: int = Field(4096, ge=16)
    """No block is longer."""
    feedback: bool = True
    """Correct the map by the cached tokens that engines report (`usage.prompt_tokens_details.cached_tokens`). vLLM
    reports them when started with --enable-prompt-tokens-details; for replicas that do not, this has no effect."""
    ask_usage: bool = False
    """Ask replicas for the usage of streams whose clients do not, by adding `stream_options.include_usage` to the
    request, and take the extra event out of the answer again. Off, because requests then no longer reach the replica
    byte for byte (all but that one field do), and because vLLM puts `system_fingerprint` into the extra event. Worth it
    where most requests are streams: without their usage neither `feedback` nor token counts learn from them."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.max_block_bytes < self.block_bytes:
            raise ValueError("max_block_bytes must not be smaller than block_bytes")
        return self


class Health(_Section):
    """Active health probes."""

    interval_s: float = Field(2.0, gt=0)
    timeout_s: float = Field(2.0, gt=0)
    rise: int = Field(1, ge=1)
    """Good probes in a row that bring a replica up."""
    fall: int = Field(3, ge=1)
    """Bad probes in a row that take it down."""
    path: str = "/health"
    startup_wait_s: float = Field(5.0, ge=0)
    """How long the start waits for the first probes."""


class Breaker(_Section):
    """Passive health: replicas that fail real requests."""

    consecutive_failures: int = Field(5, ge=1)
    base_ejection_s: float = Field(10.0, gt=0)
    max_ejection_s: float = Field(120.0, gt=0)
    max_ejected_share: float = Field(0.5, gt=0, le=1)


class Scrape(_Section):
    """Reading the replicas' /metrics."""

    interval_s: float = Field(1.0, ge=0)
    """0 turns it off."""
    timeout_s: float = Field(2.0, gt=0)


class Timeouts(_Section):
    """Limits in time. 0 means none where that is said."""

    head_s: float = Field(10.0, gt=0)
    """For a request head to arrive, from its first byte (or from the connection)."""
    body_s: float = Field(30.0, gt=0)
    """Between two reads of a request body."""
    idle_s: float = Field(75.0, gt=0)
    """For a client's keep-alive connection without a request."""
    connect_s: float = Field(3.0, gt=0)
    """For a connection to a replica, TLS included."""
    first_byte_s: float = Field(600.0, gt=0)
    """From sending a request to the first byte of the response: queue and, without streaming, all of generation."""
    silence_s: float = Field(300.0, gt=0)
    """Between two bytes of a response."""
    client_stall_s: float = Field(300.0, gt=0)
    """For a client that does not read to read again."""
    deadline_s: float = Field(0.0, ge=0)
    """For the whole request; 0: none."""
    replica_keepalive_s: float = Field(4.0, gt=0)
    """How long an idle connection to a replica is kept; below the replica's own limit (uvicorn, thus vLLM: 5 s)."""
    drain_grace_s: float = Field(0.0, ge=0)
    """After SIGTERM, how long new connections are still accepted while /ready answers 503."""
    drain_s: float = Field(60.0, ge=0)
    """After that, how long running requests may go on before they are cut with an error event."""


class Limits(_Section):
    """Limits in size and number."""

    max_body_bytes: int = Field(64 << 20, ge=1024)
    max_head_bytes: int = Field(64 << 10, ge=1024)
    """Request line and headers together."""
    max_headers: int = Field(128, ge=8)
    max_connections: int = Field(20_000, ge=1)
    """Client connections at once."""
    max_held_bytes: int = Field(1 << 20, ge=0)
    """A JSON answer up to this size is held until it is complete, so that a replica dying in it can be replaced."""
    write_buffer_bytes: int = Field(256 << 10, ge=4096)
    """Response bytes held for a client that does not read, before its replica is no longer read from."""
    max_idle_connections: int = Field(512, ge=0)
    """Idle connections kept per replica."""
    retry_after_s: int = Field(2, ge=1)
    """What a 503 of the gateway tells clients to wait."""


class Retries(_Section):
    """Second attempts, always on another replica and never after a byte of an answer has reached the client."""

    max_attempts: int = Field(3, ge=1)
    """Attempts per request, the first included."""
    budget_share: float = Field(0.2, ge=0)
    """Retries allowed per request, over time."""
    budget_min_per_s: float = Field(10.0, ge=0)
    """Retries per second that are always allowed."""
    within_s: float = Field(60.0, gt=0)
    """No further attempt starts later than this after the request came in."""


class Queue(_Section):
    """Where requests wait when no replica has room: each is at its `max_in_flight`, or none is up. First come, first
    served, a line per model; who leaves gives up the place."""

    max_requests: int = Field(0, ge=0)
    """Requests that may wait at a time. 0: none, they get a 429 (all at their limit) or 503 (none up) at once."""
    max_wait_s: float = Field(10.0, gt=0)
    """How long each may wait; then it gets the 429 or 503."""


class Logging(_Section):
    """What goes to standard output (requests) and standard error (events)."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = True
    """One JSON line per request on standard output."""
    decisions: int = Field(1024, ge=0, le=1_000_000)
    """Requests that each worker keeps in memory after their end, with all that was weighed for them, for `warmgate
    explain`: some 4 KB each with 8 replicas. 0 keeps none."""
    decisions_per_s: float = Field(50.0, gt=0)
    """Of requests that went as they should, each worker keeps so many a second at most. Those that failed, were tried
    again, or came much later than predicted are kept in any case."""


class Paths(_Section):
    """Which paths go to replicas besides vLLM's API."""

    extra: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()


class RedisSection(_Section):
    """The Redis (6.2 or later) or Valkey through which workers and gateways share the prefix map and their load.
    Requests never wait for it: without it each worker routes by what it knows itself. A plain URL instead of this
    section sets `url`."""

    url: SecretStr
    """`redis://[user:password@]host:port[/db]`, or `rediss://` for TLS; of a Cluster, any node.
    `redis+sentinel://host:port,host:port/service` asks Sentinels for the primary, `redis+cluster://host:port,host:port`
    names several nodes to start from; both as `rediss+...` for TLS."""
    username: str | None = None
    password: SecretStr | None = None
    """Instead of those in the URL."""
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    """Of the Sentinels, which have their own."""
    tls: TlsClient = TlsClient()
    """Towards rediss."""
    namespace: str = Field("warmgate", pattern=r"[A-Za-z0-9._-]{1,64}")
    """Begins every key. Gateways of one fleet must have the same; others in the same Redis another."""
    shards: int = Field(8, ge=1, le=256)
    """Parts of the prefix map, each on one node of a Cluster. Must be the same for all."""
    max_bytes: int = Field(256 << 20, ge=1 << 20, lt=1 << 40)
    """What the prefix map may take in Redis, all shards together. It takes 10 to 60 bytes per block alive."""
    timeout_s: float = Field(1.0, gt=0)
    """For a connection, and for an answer; after that Redis counts as down."""


class KvEventsOfReplica(_Section):
    """Where a replica publishes KV events that does not say so itself (vLLM tells at `/kv_event_sources`)."""

    endpoint: str | None = None
    """`tcp://HOST:PORT`, of data-parallel rank 0; the ports of others follow. `*` for the replica's host."""
    replay_endpoint: str | None = None
    """Where missed events are asked for, likewise; without one, a map that has missed something starts anew."""
    topic: str = ""
    """Topic of its messages."""
    ranks: int = Field(1, ge=1, le=1024)
    """Data-parallel ranks."""


class KvEvents(KvEventsOfReplica):
    """KV events: engines tell which blocks they have cached (vLLM's `--kv-events-config`), and prompts are matched with
    that by their tokens. Needs warmgate[kv-events] and, for prompts of text, `tokenizer`. Endpoint, topic and ranks
    here are of all replicas that do not tell theirs."""

    enabled: bool = False
    bind: str | None = None
    """`tcp://*:PORT`: where engines connect to that were given this gateway's address as their endpoint. They are told
    apart by their topics. For one worker only."""
    replicas: dict[str, KvEventsOfReplica] = Field(default_factory=dict)
    """By name of a replica: where it publishes, whatever it says."""
    max_blocks: int = Field(1 << 20, ge=1)
    """Blocks remembered of one engine; about 170 bytes each. A map that grows beyond starts anew."""
    replay_timeout_s: float = Field(2.0, gt=0)
    """A replay without a message for so long has failed."""


class TokenizerFiles(_Section):
    """Files of one model."""

    path: Path
    """The model's directory, or its tokenizer.json."""
    chat_template: Path | None = None
    """A Jinja file to use instead of the model's own; must be vLLM's `--chat-template`."""


class TokenizerSection(_Section):
    """Tokenizers, for matching prompts with KV events. Prompts whose tokens cannot be had, or not in time, are matched
    by byte blocks."""

    models: dict[str, TokenizerFiles] = Field(default_factory=dict)
    """By name of the base model as the replicas list it."""
    threads: int = Field(2, ge=1, le=64)
    """Threads that tokenise."""
    wait_ms: float = Field(5.0, ge=0)
    """How long a request waits for its tokens."""
    max_waiting: int = Field(64, ge=1)
    """Prompts that may be under way at a time; more are not tokenised."""
    cache_bytes: int = Field(64 << 20, ge=0)
    """Memory per model for tokens of text seen before."""


class Config(_Section):
    """All of gateway.yaml."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    auth: Auth = Auth()
    replicas: tuple[ReplicaConfig, ...] = ()
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names for models: alias -> the name the replicas list."""
    hardware: str | None = None
    """Hardware of replicas that do not say; without it the predictor learns from traffic."""
    model: str | None = None
    """Model shape of replicas that do not say."""
    tls: TlsClient = TlsClient()
    """Towards https replicas."""
    routing: Routing = Routing()
    slo: Slo = Slo()
    disaggregation: Disaggregation = Disaggregation()
    prefixes: Prefixes = Prefixes()
    health: Health = Health()
    breaker: Breaker = Breaker()
    scrape: Scrape = Scrape()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    retries: Retries = Retries()
    queue: Queue = Queue()
    paths: Paths = Paths()
    logging: Logging = Logging()
    kv_events: KvEvents = KvEvents()
    tokenizer: TokenizerSection = TokenizerSection()
    redis: RedisSection | None = None
    """None: one worker, which keeps its prefix map to itself."""

    @field_validator("redis", mode="before")
    @classmethod
    def _redis_url(cls, redis: Any) -> Any:
        return {"url": redis} if isinstance(redis, str) else redis

    @field_validator("replicas")
    @classmethod
    def _distinct(cls, replicas: tuple[ReplicaConfig, ...]) -> tuple[ReplicaConfig, ...]:
        urls = [replica.url.rstrip("/") for replica in replicas]
        for url in urls:
            if urls.count(url) > 1:
                raise ValueError(f"replica {url} stands there twice")
        return replicas


def load(path: Path | None, overrides: dict[str, Any]) -> Config:
    """Read gateway.yaml and lay the command line over it.

    Args:
        path: the file; None for defaults only.
        overrides: nested dictionaries as in the file; their values win.

    Raises:
        ConfigError: unreadable, malformed or invalid; one line per fault.
    """
    document: Any = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{path}: must be a mapping of sections")
    merged = _merge(_expand(document), overrides)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in fault['loc']) or 'config'}: {fault['msg']}" for fault in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from error


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(_variable, value)
    return value


def _variable(match: re.Match[str]) -> str:
    name = match[1]
    if name not in os.environ:
        raise ConfigError(f"environment variable {name} is not set")
    return os.environ[name]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
