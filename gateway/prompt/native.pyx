# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
# distutils: language=c++
"""The parts of reading a chat request that cost most, in C++: parsing its JSON, writing its canonical form, hashing.

Each function does what Python code does as well, with the same outcome; where this module is not built, that code does
it all.

- `block_hashes`: `gateway.prompt.blocks.BlockSchedule.hashes`.
- `read_chat`: `orjson.loads` and `gateway.prompt.messages.write_messages`. It refuses nothing: a body that it does not
  understand is left to those, and so is a message of more than text and calls of tools.

JSON is parsed by simdjson's DOM parser, which validates all of a document and has strings as UTF-8, so that the text of
a long conversation never becomes Python objects. Hashes are xxHash's.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.ref cimport Py_XDECREF, PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from cython.operator cimport dereference, preincrement
from libc.stdio cimport sprintf
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
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
    enum {
        ROLE, CONTENT, NAME, CALL_ID, REASONING, REASONING_CONTENT, TOOL_CALLS, FUNCTION_CALL, FIELDS, IGNORED, UNKNOWN
    };
    enum { MOST_SORTED = 64, DEEPEST_SORTED = 64 };
    """
    int ROLE, CONTENT, NAME, CALL_ID, REASONING, REASONING_CONTENT, TOOL_CALLS, FUNCTION_CALL, FIELDS, IGNORED, UNKNOWN
    int MOST_SORTED, DEEPEST_SORTED


cdef uint64_t HASH_MASK = (1 << 60) - 1
cdef size_t PAGE_BYTES = 4096

# Memory is kept, and grows with the longest body. Only the event loop's thread reads requests: one of each is enough.
cdef Parser parser
cdef char *scratch = NULL
cdef size_t scratch_bytes = 0


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
        body: as received, of moderate length: about 15 times as much memory is kept.

    Returns:
        The body's other fields, as far as they are neither arrays nor objects, with None for those that are; of these,
        name, JSON, and whether it is written as `gateway.prompt.messages.sorted_json` writes it; and the messages
        (`gateway.prompt.messages.Written`). None for what is better left to a general parser: bodies that are not JSON,
        in which a name occurs twice, without messages, or with messages in a form that will be refused.
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
                nested.append((name, *_json(value, size)))
        preincrement(step)
    if not found:
        return None
    written = _write(messages.get_array(), size)
    return None if written is None else (fields, nested, written)


cdef tuple _json(Element value, size_t size):
    """JSON of an array or object in a body of some length, which it cannot exceed; and whether its keys are sorted."""
    global scratch, scratch_bytes
    cdef char *end
    cdef string text
    if scratch_bytes <= size:  # a number may be followed by a null character
        scratch_bytes = 0
        free(scratch)
        scratch = <char *> malloc(size + 1)
        if scratch == NULL:
            raise MemoryError
        scratch_bytes = size + 1
    end = _write_sorted(scratch, value, 0)
    if end != NULL:
        return scratch[:end - scratch], True
    text = minify(value)
    return text.data()[:text.size()], False


cdef tuple _write(Array messages, size_t size):
    """Write messages, given the length of the body.

    They cannot need more: no mark is longer than the JSON it stands for (the shortest is the two quotes of a text among a
    message's parts), and no text longer than its JSON.
    """
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
                rest.append((at - begin, _json(message, size)[0]))
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
        Where it ends; NULL if there is more to it than text and calls of tools.
    """
    cdef Element fields[8]
    cdef bint there[8]
    cdef Object.iterator step = message.begin(), end = message.end()
    cdef element_type kind
    cdef int field
    cdef bint known = True
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
            if kind == NULL_VALUE:
                pass
            elif field == CONTENT:
                known = known and (kind == STRING or kind == ARRAY)
            elif field == TOOL_CALLS:
                known = known and kind == ARRAY
            elif field == FUNCTION_CALL:
                known = known and kind == OBJECT
            else:
                known = known and kind == STRING
        elif field == UNKNOWN and kind != NULL_VALUE:
            known = False
        preincrement(step)
    if not there[ROLE] or fields[ROLE].type() != STRING:
        return NULL
    author[0] = _is(fields[ROLE].get_c_str(), fields[ROLE].get_string_length(), "assistant", 9)
    for field in range(FIELDS):
        if there[field] and fields[field].type() == NULL_VALUE:
            there[field] = False
    if not known:
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
    if there[CONTENT] and fields[CONTENT].type() == STRING:
        at = _put(at, c't', fields[CONTENT])
    elif there[CONTENT]:
        at = _write_parts(at, fields[CONTENT].get_array())
        if at == NULL:
            return NULL
    if there[TOOL_CALLS] and fields[TOOL_CALLS].get_array().begin() != fields[TOOL_CALLS].get_array().end():
        return _write_sorted(_mark(at, c'c'), fields[TOOL_CALLS], 0)
    if there[FUNCTION_CALL] and fields[FUNCTION_CALL].get_object().begin() != fields[FUNCTION_CALL].get_object().end():
        return _write_sorted(_mark(at, c'c'), fields[FUNCTION_CALL], 0)
    return at


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
    if _is(name, length, "tool_calls", 10):
        return TOOL_CALLS
    if _is(name, length, "function_call", 13):
        return FUNCTION_CALL
    if _is(name, length, "refusal", 7) or _is(name, length, "tools", 5):
        return UNKNOWN
    return IGNORED


cdef inline bint _is(const char *text, size_t length, const char *name, size_t name_length) noexcept nogil:
    return length == name_length and memcmp(text, name, length) == 0


cdef inline char *_mark(char *at, char mark) noexcept nogil:
    at[0] = <char> 0xFF
    at[1] = mark
    return at + 2


cdef inline char *_put(char *at, char mark, Element value) except? NULL:
    """Write a string behind its mark (`gateway.prompt.messages`)."""
    cdef size_t length = value.get_string_length()
    memcpy(_mark(at, mark), value.get_c_str(), length)
    return at + 2 + length


cdef char *_write_sorted(char *at, Element value, int depth) except? NULL:
    """Write JSON without white space, keys sorted, as orjson does; it is never longer than any other.

    NULL for what is not worth the trouble: fractions, which can be written in many ways; many keys, or one twice.
    """
    cdef element_type kind = value.type()
    cdef Array.iterator item, last_item
    cdef Object.iterator field, last
    cdef const char *names[64]
    cdef size_t lengths[64]
    cdef Element values[64]
    cdef int count = 0, position, order
    if kind == STRING:
        return _write_string(at, value.get_c_str(), value.get_string_length())
    if kind == INT64:
        return at + sprintf(at, "%lld", <long long> value.get_int64())
    if kind == UINT64:
        return at + sprintf(at, "%llu", <unsigned long long> value.get_uint64())
    if kind == BOOL:
        return _copy(at, "true", 4) if value.get_bool() else _copy(at, "false", 5)
    if kind == NULL_VALUE:
        return _copy(at, "null", 4)
    if kind == DOUBLE or depth == DEEPEST_SORTED:
        return NULL
    if kind == ARRAY:
        item, last_item = value.get_array().begin(), value.get_array().end()
        at = _copy(at, "[", 1)
        while item != last_item:
            if count:
                at = _copy(at, ",", 1)
            count = 1
            at = _write_sorted(at, dereference(item), depth + 1)
            if at == NULL:
                return NULL
            preincrement(item)
        return _copy(at, "]", 1)
    field, last = value.get_object().begin(), value.get_object().end()
    while field != last:
        if count == MOST_SORTED:
            return NULL
        position = count
        while position:
            order = _compare(field.key_c_str(), field.key_length(), names[position - 1], lengths[position - 1])
            if order == 0:
                return NULL
            if order > 0:
                break
            names[position], lengths[position] = names[position - 1], lengths[position - 1]
            values[position] = values[position - 1]
            position -= 1
        names[position], lengths[position] = field.key_c_str(), field.key_length()
        values[position] = field.value()
        count += 1
        preincrement(field)
    at = _copy(at, "{", 1)
    for position in range(count):
        if position:
            at = _copy(at, ",", 1)
        at = _copy(_write_string(at, names[position], lengths[position]), ":", 1)
        at = _write_sorted(at, values[position], depth + 1)
        if at == NULL:
            return NULL
    return _copy(at, "}", 1)


cdef inline int _compare(const char *one, size_t one_length, const char *other, size_t other_length) noexcept nogil:
    cdef int order = memcmp(one, other, one_length if one_length < other_length else other_length)
    if order == 0:
        return (one_length > other_length) - (one_length < other_length)
    return order


cdef inline char *_copy(char *at, const char *text, size_t length) noexcept nogil:
    memcpy(at, text, length)
    return at + length


cdef char *_write_string(char *at, const char *text, size_t length) noexcept nogil:
    """Write a JSON string; escapes are the shortest there are."""
    cdef size_t position
    cdef unsigned char character
    cdef char escape
    at[0] = c'"'
    at += 1
    for position in range(length):
        character = text[position]
        if character >= 0x20 and character != c'"' and character != c'\\':
            at[0] = character
            at += 1
            continue
        if character == c'\n':
            escape = c'n'
        elif character == c'\r':
            escape = c'r'
        elif character == c'\t':
            escape = c't'
        elif character == 0x08:
            escape = c'b'
        elif character == 0x0C:
            escape = c'f'
        elif character >= 0x20:
            escape = character
        else:
            at += sprintf(at, "\\u%04x", <int> character)
            continue
        at[0] = c'\\'
        at[1] = escape
        at += 2
    at[0] = c'"'
    return at + 1
