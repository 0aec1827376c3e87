"""Request bodies with a Content-Encoding: decoded for routing, forwarded as they came."""

import zlib

import zstandard

from gateway.prompt.body import InvalidBody

# RFC 9659 section 3: as a content coding, zstd needs no larger window; a small body must not ask for more memory.
_ZSTD_WINDOW_BYTES = 8 << 20


def decoded(body: bytes, encoding: bytes, limit_bytes: int) -> bytes:
    """Return the body without its content encoding.

    Args:
        body: as received.
        encoding: value of Content-Encoding, b"" for none.
        limit_bytes: no more than this is inflated.

    Raises:
        InvalidBody: unknown encoding, damaged data, or too much of it.
    """
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        return body
    try:
        if name in (b"gzip", b"x-gzip"):
            return _inflate(body, 31, limit_bytes)
        if name == b"deflate":
            return _inflate(body, 15, limit_bytes)
        if name == b"zstd":
            return _zstd(body, limit_bytes)
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidBody(
            f"The request body is not valid {name.decode('latin-1')} data.", None, "invalid_encoding"
        ) from error
    raise InvalidBody(
        "Content-Encoding must be gzip, deflate, zstd or identity.",
        "content-encoding",
        "unsupported_encoding",
    )


def _too_large(limit_bytes: int) -> InvalidBody:
    return InvalidBody(f"The decoded request body is larger than {limit_bytes} bytes.", None, "body_too_large")


def _inflate(body: bytes, window_bits: int, limit_bytes: int) -> bytes:
    inflater = zlib.decompressobj(window_bits)
    data = inflater.decompress(body, limit_bytes + 1)
    if len(data) > limit_bytes:
        raise _too_large(limit_bytes)
    if not inflater.eof or inflater.unused_data:
        raise zlib.error("incomplete or trailing data")
    return data


def _zstd(body: bytes, limit_bytes: int) -> bytes:
    # Frames may not state their size, and a stated size is a claim; so it is read in pieces up to the limit.
    inflater = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    reader = inflater.stream_reader(body, read_across_frames=True)
    data = reader.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise _too_large(limit_bytes)
    return data
