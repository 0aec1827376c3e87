"""The module in Cython does what the Python code does, whatever it is given."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.prompt import blocks, body
from gateway.prompt.blocks import BlockSchedule
from gateway.prompt.body import InvalidBody, RequestBody, parse_body

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SMALL = BlockSchedule(block_bytes=8, growth=4, max_block_bytes=64)
ROOT = Path(__file__).parents[2]

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)

Outcome = RequestBody | tuple[str, str | None, str]


def _built() -> ModuleType:
    """The module: the installed one, or one that is built for the test, and again only when its source changes."""
    try:
        return import_module("gateway.prompt.native")
    except ImportError:
        pass
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    builder = ROOT / "deploy" / "native.py"
    source = (ROOT / "gateway" / "prompt" / "native.pyx").read_bytes() + builder.read_bytes()
    folder = ROOT / "build" / "native" / f"{sys.implementation.cache_tag}-{sha256(source).hexdigest()[:16]}"
    if not list(folder.glob("gateway/prompt/native.*.so")):
        subprocess.run([sys.executable, str(builder), str(folder)], check=True)
    (path,) = folder.glob("gateway/prompt/native.*.so")
    spec = importlib.util.spec_from_file_location("gateway.prompt.native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return _built()


def outcome(path: str, data: bytes, native: ModuleType | None) -> Outcome:
    """What `parse_body` makes of it, with the module or without."""
    before = body.read_chat, blocks.block_hashes
    body.read_chat = None if native is None else native.read_chat
    blocks.block_hashes = None if native is None else native.block_hashes
    try:
        return parse_body(path, data, SMALL)
    except InvalidBody as error:
        return error.message, error.param, error.code
    finally:
        body.read_chat, blocks.block_hashes = before


def assert_same(native: ModuleType, data: bytes) -> None:
    for path in (CHAT, MESSAGES):
        assert outcome(path, data, native) == outcome(path, data, None)


texts = st.text(max_size=40) | st.sampled_from(["", "a" * 100, 'é😀\u0000\n"\\', "\u2028"])
scalars = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)
parts = (
    texts
    | values
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "input_text", "image_url", "thinking", "tool_result"]) | values},
        optional={"text": texts | values, "cache_control": values, "image_url": values, "content": texts | values},
    )
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "strange"])},
    optional={
        "content": texts | values | st.lists(parts, max_size=3),
        "name": texts | scalars,
        "tool_call_id": texts | scalars,
        "reasoning": texts | scalars,
        "reasoning_content": texts | scalars,
        "tool_calls": values,
        "function_call": values,
        "refusal": scalars,
        "tools": values,
        "id": values,
    },
)
documents = st.fixed_dictionaries(
    {"messages": st.lists(messages, min_size=1, max_size=6)},
    optional={
        "model": texts | scalars,
        "stream": scalars,
        "stream_options": values,
        "max_tokens": scalars,
        "n": scalars,
        "tools": values,
        "system": values,
        "chat_template_kwargs": values,
        "kv_transfer_params": values,
        "cache_salt": scalars,
        "sampling_params": values,
    },
)


@untimed
@given(
    document=documents,
    escape=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), ("\n,\t", "\r: ")]),
)
def test_a_chat_is_read_the_same(
    native: ModuleType, document: dict[str, Any], escape: bool, separators: tuple[str, str]
) -> None:
    assert_same(native, json.dumps(document, ensure_ascii=escape, separators=separators).encode(errors="surrogatepass"))


@untimed
@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}), min_size=1
    ),
    model=texts,
)
def test_plain_text_needs_no_other_parser(native: ModuleType, messages: list[dict[str, str]], model: str) -> None:
    data = json.dumps({"messages": messages, "model": model, "max_tokens": 3}).encode()
    fields, nested, written = native.read_chat(data)
    assert fields == {"messages": None, "model": model, "max_tokens": 3}
    assert nested == []
    assert written[0] == b"".join(
        b"\xffm%b\xfft%b" % (message["role"].encode(), message["content"].encode()) for message in messages
    )
    assert written[1] == []


@untimed
@given(document=documents, rng=st.randoms(use_true_random=False), changes=st.integers(1, 3))
def test_a_broken_body_is_refused_the_same(
    native: ModuleType, document: dict[str, Any], rng: random.Random, changes: int
) -> None:
    data = bytearray(json.dumps(document, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass"))
    for _ in range(changes):
        position = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[position] = rng.randrange(256)
            case 1:
                del data[position]
            case 2:
                data.insert(position, rng.choice(b'{}[],:"\\0 \x00\xff\n'))
            case _:
                del data[max(position, 1) :]
    assert_same(native, bytes(data))


ONE = '"messages": [{"role": "user", "content": "hello, this is a prompt"}]'
DEEP = "[" * 1100 + "1" + "]" * 1100
ALMOST_TOO_DEEP = "[" * 1020 + "1" + "]" * 1020


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "[]",
        "null",
        "{}",
        '{"messages": []}',
        '{"messages": null}',
        '{"messages": [1]}',
        '{"messages": [{"content": "x"}]}',
        '{"messages": [{"role": 1, "content": "x"}]}',
        f"{{{ONE}}}",
        f"{{{ONE}}} ",
        f"\n{{{ONE}}}\n",
        f"{{{ONE}}} x",
        f"{{{ONE}}}{{}}",
        f"{{{ONE},}}",
        f"{{{ONE}, {ONE}}}",
        f'{{{ONE}, "messages": null}}',
        f'{{"messages": {{}}, {ONE}}}',
        f'{{{ONE}, "model": "a", "model": "b"}}',
        f'{{{ONE}, "tools": [{{"b": 1, "a": 2}}], "tools": null}}',
        f'{{{ONE}, "tools": null, "tools": [{{"b": 1, "a": 2}}]}}',
        f'{{{ONE}, "max_tokens": 18446744073709551616}}',
        f'{{{ONE}, "max_tokens": 18446744073709551615}}',
        f'{{{ONE}, "max_tokens": 1.0, "n": 1e400}}',
        f'{{{ONE}, "max_tokens": 01}}',
        f'{{{ONE}, "max_tokens": NaN}}',
        f'{{{ONE}, "x": "\\ud800"}}',
        f'{{{ONE}, "x": "\\ud800\\udc00"}}',
        f'{{{ONE}, "x": "a\nb"}}',
        f'{{{ONE}, "x": "a\x00b"}}',
        f'{{{ONE}, "x": "\\x"}}',
        '{"messages": [{"role": "user", "role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}',
        '{"messages": [{"role": "user", "content": "x", "content": "y"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "text": "b"}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "type": "text", "text": "b"}]}]}',
        '{"messages": [{"role": "user", "content": [{"text": "no type"}]}]}',
        '{"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]}',
        '{"messages": [{"role": "user", "content": []}, {"role": "assistant"}, {"role": "user", "content": null}]}',
        '{"messages":[{"role":"","content":["","","","","","","","","","","",""]}]}',
        '{"messages":[{"role":"","tool_calls":[-1,"",{"":0}]},{"role":"","name":"","content":""}]}',
        f'{{"messages": {DEEP}}}',
        f'{{{ONE}, "x": {DEEP}}}',
        f'{{{ONE}, "x": {ALMOST_TOO_DEEP}}}',
    ],
)
def test_an_odd_body_is_read_the_same(native: ModuleType, text: str) -> None:
    assert_same(native, text.encode())


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf{%b}" % ONE.encode(), b'{%b, "x": "\xff"}' % ONE.encode(), b"\x00"])
def test_bytes_that_are_no_text_are_refused_the_same(native: ModuleType, data: bytes) -> None:
    assert_same(native, data)


def test_an_answer_is_found_among_messages_of_all_kinds(native: ModuleType) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a result"},
        {"role": "assistant", "content": "an answer"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "another"},
        {"role": "user", "content": "and now?"},
    ]
    for end in range(1, len(conversation) + 1):
        assert_same(native, json.dumps({"model": "m", "messages": conversation[:end]}).encode())


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "-0",
        "-0.0",
        "1e2",
        "0.1",
        "9223372036854775808",
        "-9223372036854775808",
        "123456789012345678901234567890",
        "true",
        '{"b": [], "a": {}, "": null, "aa": false}',
        '{"a": 1, "b": 2, "a": 3}',
        '{"\\u00e9": 1, "e": 2, "\\ud83d\\ude00": 3, "\\uffff": 4, "\\u0000": 5}',
        '"\\u0000\\u0001\\u001f\\u007f\\u0080\\u2028\\/\\"\\\\\\b\\f\\n\\r\\t"',
        "{" + ", ".join(f'"{number}": 0' for number in range(64)) + "}",
        "{" + ", ".join(f'"{number}": 0' for number in range(65)) + "}",
        "[" * 60 + "]" * 60,
        "[" * 80 + "]" * 80,
        "[" * 300 + "]" * 300,
        '{"a": ' * 80 + "1" + "}" * 80,
    ],
)
def test_tools_and_calls_are_written_the_same(native: ModuleType, value: str) -> None:
    user, call = '{"role": "user", "content": "hello"}', f'{{"role": "assistant", "tool_calls": [{value}]}}'
    assert_same(native, f'{{"tools": [{value}], "messages": [{user}]}}'.encode())
    assert_same(native, f'{{"messages": [{user}, {call}, {user}]}}'.encode())
    assert_same(native, f'{{"messages": [{user}, {call.replace("tool_calls", "content")}, {user}]}}'.encode())
    old = call.replace('"tool_calls": [', '"function_call": {"x": ').replace("]}", "}}")
    assert_same(native, f'{{"messages": [{user}, {old}, {user}]}}'.encode())


def test_common_calls_of_tools_need_no_other_parser(native: ModuleType) -> None:
    function = {"name": "f", "arguments": '{"text": "\\"\\u00e9\\n"}'}
    call = {"type": "function", "id": "1", "function": function}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["text"]}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    _, nested, written = native.read_chat(json.dumps({"tools": [tool], "messages": [message]}).encode())
    assert nested == [("tools", json.dumps([tool], sort_keys=True, separators=(",", ":")).encode(), True)]
    calls = json.dumps([call], sort_keys=True, separators=(",", ":")).encode()
    assert written == (b"\xffmassistant\xffc" + calls, [], 0, 0, 0, 0)


@pytest.mark.parametrize("size", [*range(4000, 4200, 7), 65_536, 1 << 20, (1 << 20) + 1])
def test_the_length_does_not_matter(native: ModuleType, size: int) -> None:
    frame = '{"model": "m", "messages": [{"role": "user", "content": "%s"}]}'
    assert_same(native, (frame % ("x" * (size - len(frame) + 2))).encode())


@untimed
@example(data=b"", seed=2**64 - 1, block_bytes=1, growth=0, max_block_bytes=1)
@given(
    data=st.binary(max_size=5000),
    seed=st.integers(0, 2**64 - 1),
    block_bytes=st.integers(1, 300),
    growth=st.integers(0, 40),
    max_block_bytes=st.integers(1, 5000),
)
def test_blocks_have_the_same_hashes(
    native: ModuleType, data: bytes, seed: int, block_bytes: int, growth: int, max_block_bytes: int
) -> None:
    before, blocks.block_hashes = blocks.block_hashes, None
    try:
        expected = BlockSchedule(block_bytes, growth, max_block_bytes).hashes(data, seed)
    finally:
        blocks.block_hashes = before
    assert native.block_hashes(data, seed, block_bytes, growth, max_block_bytes) == expected
