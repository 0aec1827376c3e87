# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
# distutils: language=c++
"""The parts of reading a chat request that cost most, in C++: parsing its JSON, writing its canonical form, hashing.

Each function does what Python code does as well, with the same outcome; where this module is not built, that code does
it all.

- `block_hashes`: `gateway.prompt.blocks.BlockSchedule.hashes`.
- `read_chat`: `orjson.loads` and `gateway.prompt.messages.write_messages`. It refuses nothing: a body that it does not
  understand is left to those, and so is a message of more than text.

JSON is parsed by simdjson's DOM parser, which validates all of a document and has strings as UTF-8, so that the text of
a long conversation never becomes Python objects. Hashes are xxHash's.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.ref cimport Py_XDECREF, PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from cython.operator cimport dereference, preincrement
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string


cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize" (const char *, Py_ssize_t) except NULL
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1


cdef extern from "xxhash.h" nogil:
    uint64_t XXH3_64bits_withSeed(const void *, size_t, uint64_t)


cdef extern from "simdjson.h" namespace "simdjson" nogil:
    size_t SIMDJSON_PADDING
    string minify[T](T) except +


cdef extern from "simdjson.h" namespace "simdjson::dom::element_type" nogil:
    cdef enum element_type "simdjson::dom::element_type":
        OBJECT
        ARRAY
        STRING
        INT64
        UINT64
        DOUBLE
        BOOL
        NULL_VALUE


cdef extern from "simdjson.h" namespace "simdjson::dom" nogil:
    cdef cppclass Array "simdjson::dom::array":
        cppclass iterator:
            iterator()
            iterator operator++()
            bint operator!=(iterator)
            Element operator*()
        Array()
        Array.iterator begin()
        Array.iterator end()

    cdef cppclass Object "simdjson::dom::object":
        cppclass iterator:
            iterator()
            iterator operator++()
            bint operator!=(iterator)
            uint32_t key_length()
            const char *key_c_str()
            Element value()
        Object()
        Object.iterator begin()
        Object.iterator end()

    cdef cppclass Element "simdjson::dom::element":
        Element()
        element_type type()
        const char *get_c_str() except +
        size_t get_string_length() except +
        Array get_array() except +
        Object get_object() except +
        int64_t get_int64() except +
        uint64_t get_uint64() except +
        double get_double() except +
        cpp_bool get_bool() except +

    cdef cppclass Parser "simdjson::dom::parser":
        Parser()
        Element parse(const char *, size_t, cpp_bool) except +


cdef extern from *:
    """
    enum { ROLE, CONTENT, NAME, CALL_ID, REASONING, REASONING_CONTENT, FIELDS, IGNORED, NOT_TEXT };
    """
    int ROLE, CONTENT, NAME, CALL_ID, REASONING, REASONING_CONTENT, FIELDS, IGNORED, NOT_TEXT


cdef uint64_t HASH_MASK = (1 << 60) - 1
cdef size_t PAGE_BYTES = 4096

# Its memory is kept, and grows with the longest body. Nothing here gives up the interpreter lock, so one is enough.
cdef Parser parser


def block_hashes(bytes data, uint64_t seed, Py_ssize_t block_bytes, Py_ssize_t growth, Py_ssize_t max_block_bytes):
    """Hash the full blocks of a canonical prompt, chained.

    Args:
        data: the prompt.
        seed: of the first block's hash.
        block_bytes, growth, max_block_bytes: as for `BlockSchedule`.

    Returns:
        One integer below 2**60 per block.
    """
    cdef const char *start = PyBytes_AS_STRING(data)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data), offset = 0, size
    cdef list hashes = []
    while True:
        size = block_bytes
        while growth and size * 2 <= max_block_bytes and size * 2 * growth <= offset:
            size *= 2
        if offset + size > length:
            return hashes
        seed = XXH3_64bits_withSeed(start + offset, size, seed) & HASH_MASK
        hashes.append(seed)
        offset += size


def read_chat(bytes body):
    """Parse a body with `messages`, and write these in canonical form.

    Args:
        body: JSON, not empty.

    Returns:
        The body's other fields, as far as they are neither arrays nor objects; names and JSON of those that are, their
        values in the first None; and the messages (`gateway.prompt.messages.Written`). None for what is better left to a
        general parser: bodies that are not JSON, in which a name occurs twice, without messages, or with messages in a
        form that will be refused.
    """
    cdef const char *start = PyBytes_AS_STRING(body)
    cdef size_t size = PyBytes_GET_SIZE(body)
    # The parser reads a little beyond the end. Where that is in the same page it may, else it needs a copy.
    cdef bint copy = (<uintptr_t> (start + size) & (PAGE_BYTES - 1)) + SIMDJSON_PADDING > PAGE_BYTES
    cdef Element value, messages
    cdef Object.iterator step, end
    cdef element_type kind
    cdef dict fields = {}
    cdef list nested = []
    cdef bint found = False
    # A byte order mark is no JSON, but this parser would pass over it.
    if size == 0 or start[0] == <char> 0xEF:
        return None
    try:
        value = parser.parse(start, size, copy)
    except Exception:
        return None
    if value.type() != OBJECT:
        return None
    step, end = value.get_object().begin(), value.get_object().end()
    while step != end:
        value = step.value()
        kind = value.type()
        name = PyUnicode_DecodeUTF8(step.key_c_str(), step.key_length(), NULL)
        if name in fields:
            return None
        if kind == STRING:
            fields[name] = PyUnicode_DecodeUTF8(value.get_c_str(), value.get_string_length(), NULL)
        elif kind == BOOL:
            fields[name] = True if value.get_bool() else False
        elif kind == INT64:
            fields[name] = value.get_int64()
        elif kind == UINT64:
            fields[name] = value.get_uint64()
        elif kind == DOUBLE:
            fields[name] = value.get_double()
        else:
            fields[name] = None
            if kind == ARRAY and name == "messages":
                found = True
                messages = value
            elif kind != NULL_VALUE:
                nested.append((name, _json(value)))
        preincrement(step)
    if not found:
        return None
    written = _write(messages.get_array(), size)
    return None if written is None else (fields, nested, written)


cdef bytes _json(Element value):
    cdef string text = minify(value)
    return text.data()[:text.size()]


cdef tuple _write(Array messages, size_t size):
    """Write messages, given the length of the body, which is more than they can need: all marks are shorter than the JSON
    they stand for."""
    cdef PyObject *data = new_bytes(NULL, size)
    cdef char *begin = PyBytes_AS_STRING(<object> data)
    cdef char *at = begin
    cdef char *after
    cdef Array.iterator step = messages.begin(), end = messages.end()
    cdef Element message
    cdef int author
    cdef list rest = []
    cdef Py_ssize_t first = -1, first_rest = 0, answer = 0, answer_rest = 0, answer_end = 0, answer_end_rest = 0
    try:
        if not (step != end):
            return None
        while step != end:
            message = dereference(step)
            if message.type() != OBJECT:
                return None
            after = _write_message(at, message.get_object(), &author)
            if author < 0:
                return None
            if author:
                if first < 0:
                    first, first_rest = at - begin, len(rest)
            elif first >= 0:
                answer, answer_rest, answer_end, answer_end_rest = first, first_rest, at - begin, len(rest)
                first = -1
            if after == NULL:
                rest.append((at - begin, _json(message)))
            else:
                at = after
            preincrement(step)
        _PyBytes_Resize(&data, at - begin)
        return <object> data, rest, answer, answer_rest, answer_end, answer_end_rest
    finally:
        Py_XDECREF(data)


cdef char *_write_message(char *at, Object message, int *author) except? NULL:
    """Write a message.

    `author`: 1 the model, 0 somebody else, -1 the message will be refused, or says something twice.

    Returns:
        Where it ends; NULL if there is more to it than text.
    """
    cdef Element fields[6]
    cdef bint there[6]
    cdef Object.iterator step = message.begin(), end = message.end()
    cdef element_type kind
    cdef int field
    cdef bint text = True
    for field in range(FIELDS):
        there[field] = False
    author[0] = -1
    while step != end:
        field = _field(step.key_c_str(), step.key_length())
        kind = step.value().type()
        if field < FIELDS:
            if there[field]:
                return NULL
            there[field] = True
            fields[field] = step.value()
            if kind != STRING and kind != NULL_VALUE and (field != CONTENT or kind != ARRAY):
                text = False
        elif field == NOT_TEXT and kind != NULL_VALUE:
            text = False
        preincrement(step)
    if not there[ROLE] or fields[ROLE].type() != STRING:
        return NULL
    author[0] = _is(fields[ROLE].get_c_str(), fields[ROLE].get_string_length(), "assistant", 9)
    for field in range(FIELDS):
        if there[field] and fields[field].type() == NULL_VALUE:
            there[field] = False
    if not text:
        return NULL
    at = _put(at, c'm', fields[ROLE])
    if there[NAME]:
        at = _put(at, c'n', fields[NAME])
    if there[CALL_ID]:
        at = _put(at, c'k', fields[CALL_ID])
    if there[REASONING] and fields[REASONING].get_string_length():
        at = _put(at, c'r', fields[REASONING])
    elif there[REASONING_CONTENT] and fields[REASONING_CONTENT].get_string_length():
        at = _put(at, c'r', fields[REASONING_CONTENT])
    if not there[CONTENT]:
        return at
    if fields[CONTENT].type() == STRING:
        return _put(at, c't', fields[CONTENT])
    return _write_parts(at, fields[CONTENT].get_array())


cdef char *_write_parts(char *at, Array parts) except? NULL:
    """Write the parts of a message's content; NULL if there is one of more than text."""
    cdef Array.iterator step = parts.begin(), end = parts.end()
    cdef Object.iterator field, last
    cdef Element part, text, kind
    cdef bint has_text, has_kind
    while step != end:
        part = text = dereference(step)
        if part.type() == OBJECT:
            has_text = has_kind = False
            field, last = part.get_object().begin(), part.get_object().end()
            while field != last:
                if _is(field.key_c_str(), field.key_length(), "text", 4):
                    if has_text:
                        return NULL
                    has_text = True
                    text = field.value()
                elif _is(field.key_c_str(), field.key_length(), "type", 4):
                    if has_kind:
                        return NULL
                    has_kind = True
                    kind = field.value()
                preincrement(field)
            if not has_text or not has_kind or kind.type() != STRING:
                return NULL
            if not _is(kind.get_c_str(), kind.get_string_length(), "text", 4):
                return NULL
        if text.type() != STRING:
            return NULL
        at = _put(at, c't', text)
        preincrement(step)
    return at


cdef int _field(const char *name, size_t length) noexcept nogil:
    if _is(name, length, "role", 4):
        return ROLE
    if _is(name, length, "content", 7):
        return CONTENT
    if _is(name, length, "name", 4):
        return NAME
    if _is(name, length, "tool_call_id", 12):
        return CALL_ID
    if _is(name, length, "reasoning", 9):
        return REASONING
    if _is(name, length, "reasoning_content", 17):
        return REASONING_CONTENT
    if (
        _is(name, length, "tool_calls", 10)
        or _is(name, length, "function_call", 13)
        or _is(name, length, "refusal", 7)
        or _is(name, length, "tools", 5)
    ):
        return NOT_TEXT
    return IGNORED


cdef inline bint _is(const char *text, size_t length, const char *name, size_t name_length) noexcept nogil:
    return length == name_length and memcmp(text, name, length) == 0


cdef inline char *_put(char *at, char mark, Element value) except? NULL:
    """Write a string behind its mark (`gateway.prompt.messages`)."""
    cdef size_t length = value.get_string_length()
    at[0] = <char> 0xFF
    at[1] = mark
    memcpy(at + 2, value.get_c_str(), length)
    return at + 2 + length
