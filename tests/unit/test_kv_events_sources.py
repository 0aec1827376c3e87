"""Where replicas publish KV events: what they say, and what operators say."""

import orjson
import pytest

from gateway.prefixes.events.sources import Source, configured_sources, reachable, read_sources

# As vLLM 0.32 answers.
RECORDED = (
    b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:18101","replay_endpoint":'
    b'"tcp://*:28101","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv@127.0.0.1:8101@tiny"}}'
)


def test_the_recorded_answer() -> None:
    assert read_sources(RECORDED, "10.0.0.7", None) == [
        Source(0, "kv@127.0.0.1:8101@tiny", "tcp://10.0.0.7:18101", "tcp://10.0.0.7:28101")
    ]


def test_ranks_come_in_order_and_have_their_own_ports() -> None:
    answer = orjson.dumps(
        {str(rank): {"endpoint": f"tcp://*:{5557 + rank}", "replay_endpoint": None, "topic": "t"} for rank in (10, 9)}
    )
    assert read_sources(answer, "h", None) == [
        Source(9, "t", "tcp://h:5566", None),
        Source(10, "t", "tcp://h:5567", None),
    ]


def test_a_list_as_later_versions_answer() -> None:
    answer = b'[{"data_parallel_rank":1,"endpoint":"tcp://10.0.0.1:5557","replay_endpoint":null,"topic":""}]'
    assert read_sources(answer, "h", None) == [Source(1, "", "tcp://10.0.0.1:5557", None)]


def test_an_engine_that_connects_comes_to_the_bound_port() -> None:
    answer = orjson.dumps({"0": {"endpoint": "tcp://gateway:5570", "replay_endpoint": "tcp://*:1", "topic": "t"}})
    assert read_sources(answer, "h", 5570) == [Source(0, "t", None, "tcp://h:1")]
    assert read_sources(answer, "h", 5571) == [Source(0, "t", "tcp://gateway:5570", "tcp://h:1")]
    bound = orjson.dumps({"0": {"endpoint": "tcp://*:5570", "topic": "t"}})
    assert read_sources(bound, "h", 5570)[0].endpoint == "tcp://h:5570"


def test_who_publishes_nothing() -> None:
    assert read_sources(b"{}", "h", None) == []
    assert read_sources(b"[]", "h", None) == []
    assert read_sources(b'{"0":{"publisher":"null","endpoint":"tcp://*:1"}}', "h", None) == []


@pytest.mark.parametrize(
    "answer", [b"", b"null", b"3", b'{"a":{}}', b'{"0":3}', b"[3]", b'[{"data_parallel_rank":"x"}]']
)
def test_answers_of_another_form(answer: bytes) -> None:
    with pytest.raises(ValueError):
        read_sources(answer, "h", None)


@pytest.mark.parametrize(
    ("endpoint", "host", "seen"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "replica.local", "tcp://replica.local:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.1", "tcp://10.1.1.1:5557"),
        ("ipc:///run/kv", "10.0.0.1", "ipc:///run/kv"),
    ],
)
def test_a_wildcard_is_the_replicas_host(endpoint: str, host: str, seen: str) -> None:
    assert reachable(endpoint, host) == seen


def test_what_operators_say() -> None:
    assert configured_sources("tcp://*:5557", "tcp://*:6557", "t", 2, "h") == [
        Source(0, "t", "tcp://h:5557", "tcp://h:6557"),
        Source(1, "t", "tcp://h:5558", "tcp://h:6558"),
    ]
    assert configured_sources(None, None, "t", 1, "h") == [Source(0, "t", None, None)]
