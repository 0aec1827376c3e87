"""Encoded request bodies: what is read of them, and what is refused."""

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.body import InvalidBody
from gateway.proxy.encodings import decoded

LIMIT = 100_000
BODY = b'{"model":"m"}' * 100


def deflated(body: bytes) -> bytes:
    return zlib.compress(body)


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


ENCODERS: dict[bytes, Callable[[bytes], bytes]] = {b"gzip": gzip.compress, b"deflate": deflated, b"zstd": zstd}


@pytest.mark.parametrize("name", [b"", b"identity", b" Identity "])
def test_no_encoding(name: bytes) -> None:
    assert decoded(BODY, name, 1) is BODY


@pytest.mark.parametrize("name", ENCODERS)
@given(st.binary(max_size=2000))
def test_what_was_encoded_is_decoded(name: bytes, body: bytes) -> None:
    assert decoded(ENCODERS[name](body), name.upper() + b" ", 2000) == body


def test_x_gzip_is_gzip() -> None:
    # RFC 9110 section 8.4.1.3: "A recipient SHOULD consider "x-gzip" to be equivalent to "gzip"."
    assert decoded(gzip.compress(BODY), b"x-gzip", LIMIT) == BODY


def test_zstd_of_unknown_size_in_two_frames() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    first = stream.compress(BODY) + stream.flush()
    assert decoded(first + zstd(BODY), b"zstd", LIMIT) == BODY * 2


@pytest.mark.parametrize("name", ENCODERS)
def test_a_small_body_cannot_become_a_huge_one(name: bytes) -> None:
    bomb = ENCODERS[name](bytes(50_000_000))
    with pytest.raises(InvalidBody) as caught:
        decoded(bomb, name, LIMIT)
    assert caught.value.code == "body_too_large"
    assert decoded(ENCODERS[name](bytes(LIMIT)), name, LIMIT) == bytes(LIMIT)


def test_a_small_zstd_body_cannot_ask_for_a_huge_window() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(BODY) + stream.flush()
    with pytest.raises(InvalidBody) as caught:
        decoded(frame, b"zstd", LIMIT)
    assert caught.value.code == "invalid_encoding"


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"{}", lambda data: data + b"tail"])
def test_damaged_bodies(name: bytes, damage: Callable[[bytes], bytes]) -> None:
    body = damage(ENCODERS[name](BODY))
    if name == b"zstd" and not body:
        assert decoded(body, name, LIMIT) == b""  # no frame at all; refused as JSON later
        return
    with pytest.raises(InvalidBody) as caught:
        decoded(body, name, LIMIT)
    assert caught.value.code == "invalid_encoding"


@pytest.mark.parametrize("name", [b"gzip", b"deflate"])
def test_truncated_bodies(name: bytes) -> None:
    with pytest.raises(InvalidBody):
        decoded(ENCODERS[name](BODY)[:-3], name, LIMIT)


@pytest.mark.parametrize("name", [b"br", b"gzip, gzip", b"gzip\xff"])
def test_unknown_encodings(name: bytes) -> None:
    with pytest.raises(InvalidBody) as caught:
        decoded(BODY, name, LIMIT)
    assert caught.value.code == "unsupported_encoding"
