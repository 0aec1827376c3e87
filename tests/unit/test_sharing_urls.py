"""Redis URLs: what is taken, what is refused, and that refusals keep secrets."""

import pytest
from redis.asyncio import Redis, RedisCluster

from gateway.app import redis_target
from gateway.config import Config
from gateway.sharing.connection import RedisTarget, check_url, connect


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:p@h:6380/2",
        "rediss://u:p@h:6380",
        "unix:///run/redis.sock",
        "redis+sentinel://a:26379,b:26379/main",
        "redis+sentinel://u:p%40ss@a,b/main/3",
        "rediss+sentinel://a/main",
        "redis+cluster://a:7000,b:7001,[::1]:7002",
        "rediss+cluster://a",
    ],
)
def test_urls_that_are_taken(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hush@h",
        "redis:",
        "redis+sentinel://user:hush@a:26379",
        "redis+sentinel://user:hush@a:26379/",
        "redis+cluster://user:hush@a:port",
        "redis+cluster://user:hush@a:99999",
        "",
    ],
)
def test_urls_that_are_refused_without_telling_secrets(url: str) -> None:
    with pytest.raises(ValueError) as error:
        check_url(url)
    assert "hush" not in str(error.value)
    assert "redis" in str(error.value)


def test_a_cluster_url_names_all_its_nodes() -> None:
    client = connect(RedisTarget("redis+cluster://u:p%40ss@a:7000,[::1]"))
    assert isinstance(client, RedisCluster)
    assert sorted((node.host, node.port) for node in client.nodes_manager.startup_nodes.values()) == [
        ("::1", 6379),
        ("a", 7000),
    ]
    assert client.connection_kwargs["password"] == "p@ss"


def test_credentials_beside_the_url_go_to_the_servers_and_not_to_the_sentinels() -> None:
    client = connect(
        RedisTarget("redis+sentinel://a:1,b/main/3", username="u", password="p", sentinel_password="s", timeout_s=2.0)
    )
    assert isinstance(client, Redis)
    pool = client.connection_pool
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("u", "p")
    assert pool.connection_kwargs["db"] == 3
    sentinels = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"], each["username"], each["password"]) for each in sentinels] == [
        ("a", 1, None, "s"),
        ("b", 26379, None, "s"),
    ]


def test_a_plain_url_stands_for_the_section() -> None:
    config = Config.model_validate({"redis": "redis://:hush@h:1"})
    assert config.redis is not None
    assert "hush" not in repr(config)
    assert redis_target(config.redis) == RedisTarget("redis://:hush@h:1")
