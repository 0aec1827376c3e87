"""The prompts of the overhead benchmark: conversations that grow, never twice the same, the same for everybody."""

import itertools

import orjson
import pytest

from loadtests.overhead.prompts import ACTIVE_CONVERSATIONS, TURNS, Requests

SIZES_KB = (1, 8, 32, 128)


def bodies(requests: Requests, count: int, first: int = 0) -> list[bytes]:
    return [b"".join(requests.request(first + number)).partition(b"\r\n\r\n")[2] for number in range(count)]


@pytest.mark.parametrize("size_kb", SIZES_KB)
def test_a_conversation_extends_itself_and_differs_from_all_others(size_kb: int) -> None:
    requests = Requests(size_kb * 1024, "gateway")
    conversations: dict[str, list[list[dict[str, str]]]] = {}
    for body in bodies(requests, ACTIVE_CONVERSATIONS * TURNS * 3):
        messages = orjson.loads(body)["messages"]
        assert [message["role"] for message in messages] == [
            "system",
            *itertools.islice(itertools.cycle(["user", "assistant"]), len(messages) - 1),
        ]
        assert messages[-1]["role"] == "user"
        conversations.setdefault(messages[1]["content"], []).append(messages)
    assert len({turns[0][0]["content"] for turns in conversations.values()}) == 1  # one system prompt
    grown = 0
    for turns in conversations.values():
        assert len(turns) <= TURNS
        for earlier, later in itertools.pairwise(turns):
            assert later[: len(earlier)] == earlier
            assert len(later) == len(earlier) + 2
            grown += 1
    assert len(conversations) >= 3 * ACTIVE_CONVERSATIONS
    assert grown >= 2 * ACTIVE_CONVERSATIONS * (TURNS - 1)


@pytest.mark.parametrize("size_kb", SIZES_KB)
def test_sizes_are_centred_on_what_was_asked_for_and_heads_tell_them(size_kb: int) -> None:
    requests = Requests(size_kb * 1024, "gateway")
    lengths = []
    for number in range(ACTIVE_CONVERSATIONS * TURNS):
        head, _, body = b"".join(requests.request(number)).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        lengths.append(len(body))
    assert sum(lengths) / len(lengths) == pytest.approx(size_kb * 1024, rel=0.15)


def test_the_sequence_is_the_same_for_all_and_can_be_entered_anywhere() -> None:
    one, other = Requests(1024, "a"), Requests(1024, "a")
    other.skip_to(500)
    assert [next(one) for _ in range(510)][500:] == [next(other) for _ in range(10)]


def test_sizes_share_the_system_prompt_at_most() -> None:
    second = {size: orjson.loads(bodies(Requests(size * 1024, "g"), 1)[0])["messages"][1] for size in (32, 128)}
    assert second[32]["content"][:40] != second[128]["content"][:40]


def test_texts_are_not_plain_ascii_words_only() -> None:
    texts = [body.decode() for body in bodies(Requests(8192, "g"), ACTIVE_CONVERSATIONS)]
    assert 0.1 < sum(not text.isascii() for text in texts) / len(texts) < 0.5
    assert all("\\n" in text and '\\"' in text for text in texts)


def test_streams_are_asked_for_with_usage() -> None:
    body = orjson.loads(bodies(Requests(1024, "g", stream=True), 1)[0])
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert "stream" not in orjson.loads(bodies(Requests(1024, "g"), 1)[0])
