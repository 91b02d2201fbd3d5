# cython: language_level=3, freethreading_compatible=True
"""Arrow data as a description and buffers, and back, through the Arrow C data and stream interfaces.

`take` reads the stream of any library without a copy. `Stream` gives the same data to any library, over other buffers.

The description is a row of int64, with texts padded to 8 bytes:
  bytes of the schema, number of chunks, the schema, the chunks
  a schema: flags, number of children, 1 with a dictionary, format, name, metadata (each as its length or -1, and its
      bytes), the children, the dictionary
  a chunk: rows, nulls, offset, number of buffers, number of children, 1 with a dictionary, the buffers (each an index
      into the list of buffers, ABSENT or EMPTY), the children, the dictionary

Source: https://arrow.apache.org/docs/format/CDataInterface.html, CStreamInterface.html and
CDataInterface/PyCapsuleInterface.html.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport atoll, calloc, free
from libc.string cimport memcpy, memset, strchr, strlen

cdef extern from "Python.h":
    int Py_IsInitialized() nogil

cdef struct arrow_schema:
    const char *format
    const char *name
    const char *metadata
    int64_t flags
    int64_t n_children
    arrow_schema **children
    arrow_schema *dictionary
    void (*release)(arrow_schema *) noexcept nogil
    void *private_data

cdef struct arrow_array:
    int64_t length
    int64_t null_count
    int64_t offset
    int64_t n_buffers
    int64_t n_children
    const void **buffers
    arrow_array **children
    arrow_array *dictionary
    void (*release)(arrow_array *) noexcept nogil
    void *private_data

cdef struct arrow_stream:
    int (*get_schema)(arrow_stream *, arrow_schema *) noexcept nogil
    int (*get_next)(arrow_stream *, arrow_array *) noexcept nogil
    const char *(*get_last_error)(arrow_stream *) noexcept nogil
    void (*release)(arrow_stream *) noexcept nogil
    void *private_data

cdef enum:
    ABSENT = -1  # as a bitmap without nulls
    EMPTY = -2  # not absent, but without bytes
    DEPTH_MAX = 64
    # A slice keeps all of the texts or list items that it was cut from. It is refused if it uses less than this part.
    SLICE = 2
    SLICE_BYTES_MIN = 4096
    HEAD_BYTES = 16  # before the schema

cdef const char *_STREAM = "arrow_array_stream"
cdef int64_t[8] _nothing  # what EMPTY buffers point to

# How the buffers of a type are laid out.
cdef enum layout_kind:
    NO_BUFFERS  # only nulls
    FIXED  # validity, elements of a fixed number of bits
    BYTES  # validity, offsets, bytes
    VIEWS  # validity, views of 16 bytes, any number of buffers that they point into, the sizes of these
    LIST  # validity, offsets into the child
    NESTED  # validity; the children have as many rows, or a fixed multiple

cdef struct layout:
    layout_kind kind
    int64_t bits  # of an element, or of an offset


_FIXED = {form: bits for bits, forms in {
    1: b"b", 8: b"c C", 16: b"s S e", 32: b"i I f tdD tts ttm tiM", 64: b"l L g tdm ttu ttn tiD tDs tDm tDu tDn",
    128: b"tin _pli128 _plu128",  # the last two are of Polars
}.items() for form in forms.split()}
_OTHERS = {b"n": (NO_BUFFERS, 0), b"u": (BYTES, 32), b"z": (BYTES, 32), b"U": (BYTES, 64), b"Z": (BYTES, 64),
           b"vu": (VIEWS, 128), b"vz": (VIEWS, 128), b"+l": (LIST, 32), b"+m": (LIST, 32), b"+L": (LIST, 64)}


cdef int find_layout(const char *form, layout *found) except -1:
    """Find the layout of a format string.

    Raises:
        TypeError: the type is not one of those above (a union, run ends, a view of a list, one yet to come).
    """
    cdef bytes text = form
    cdef const char *comma
    found.kind, found.bits = FIXED, _FIXED.get(text, 0)
    if text in _OTHERS:
        found.kind, found.bits = _OTHERS[text]
    elif text == b"+s" or text.startswith(b"+w:"):
        found.kind = NESTED
    elif text.startswith(b"ts") and len(text) > 3:
        found.bits = 64
    elif text.startswith(b"w:"):
        found.bits = 8 * atoll(form + 2)
    elif text.startswith(b"d:"):
        comma = strchr(form, c',')
        comma = strchr(comma + 1, c',') if comma != NULL else NULL
        found.bits = atoll(comma + 1) if comma != NULL else 128
    if found.kind in (FIXED, BYTES, VIEWS, LIST) and found.bits <= 0:
        raise TypeError(f"Arrow data of the format {text.decode('utf-8', 'replace')!r} are not supported")
    return 0


# ---- from a library ----


cdef class Chunk:
    """One array of a stream; its library's memory lives as long as this object."""

    cdef arrow_array array

    def __dealloc__(self):
        if self.array.release != NULL:
            self.array.release(&self.array)


@cython.no_gc
cdef class Part:
    """One buffer of a chunk, exported read-only. Made by `take`."""

    cdef Chunk chunk
    cdef const void *data
    cdef int64_t nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.chunk is None:
            raise TypeError("a Part cannot be made directly; call take()")
        PyBuffer_FillInfo(view, self, <void *>self.data, self.nbytes, 1, flags)


@cython.final
cdef class Taker:
    cdef bytearray head
    cdef list parts
    cdef Chunk chunk

    cdef int number(self, int64_t value) except -1:
        self.head += (<char *>&value)[:sizeof(value)]
        return 0

    cdef int text(self, const char *start, int64_t nbytes) except -1:
        self.number(nbytes if start != NULL else -1)
        if start != NULL:
            self.head += start[:nbytes] + bytes(-nbytes & 7)
        return 0

    cdef int schema(self, arrow_schema *given, int depth) except -1:
        cdef int64_t k
        if depth > DEPTH_MAX:
            raise TypeError(f"Arrow data of more than {DEPTH_MAX} levels are not supported")
        for k in (given.flags, given.n_children, given.dictionary != NULL):
            self.number(k)
        self.text(given.format, strlen(given.format) + 1)
        self.text(given.name, strlen(given.name) + 1 if given.name != NULL else 0)
        self.text(given.metadata, metadata_bytes(given.metadata))
        for k in range(given.n_children):
            self.schema(given.children[k], depth + 1)
        if given.dictionary != NULL:
            self.schema(given.dictionary, depth + 1)
        return 0

    cdef int buffer(self, const void *data, int64_t nbytes) except -1:
        cdef Part part
        if nbytes <= 0:
            self.number(EMPTY)
            return 0
        if data == NULL:
            raise ValueError("a buffer of the Arrow data is absent")
        part = Part.__new__(Part)
        part.chunk, part.data, part.nbytes = self.chunk, data, nbytes
        self.number(len(self.parts))
        self.parts.append(part)
        return 0

    cdef int array(self, arrow_schema *schema, arrow_array *given) except -1:
        cdef layout found
        cdef int64_t k, _k, rows, skipped, fixed, used, offset = given.offset
        find_layout(schema.format, &found)
        # Elements before the slice are left out, by whole bytes of the bitmaps. Children are cut by themselves.
        skipped = offset & ~<int64_t>7 if found.kind in (FIXED, BYTES, VIEWS, LIST) else 0
        offset -= skipped
        rows = offset + given.length
        fixed = 3 if found.kind == BYTES else 2 if found.kind in (FIXED, VIEWS, LIST) else 1
        if found.kind == NO_BUFFERS:
            fixed = given.n_buffers  # some libraries give a bitmap that is absent
        if given.n_buffers < fixed + (found.kind == VIEWS) or found.kind != VIEWS and given.n_buffers != fixed or \
                given.n_children != schema.n_children or (given.dictionary == NULL) != (schema.dictionary == NULL):
            raise ValueError("the Arrow data do not have the buffers of their type")
        for k in (given.length, given.null_count, offset, given.n_buffers, given.n_children,
                  schema.dictionary != NULL):
            self.number(k)
        if found.kind == NO_BUFFERS:
            for _k in range(given.n_buffers):
                self.number(ABSENT)
        elif given.buffers[0] == NULL:
            self.number(ABSENT)
        else:
            self.buffer(<const char *>given.buffers[0] + skipped // 8, (rows + 7) // 8)
        if found.kind == FIXED:
            self.buffer(<const char *>given.buffers[1] + skipped * found.bits // 8, (rows * found.bits + 7) // 8)
        elif found.kind == VIEWS:
            self.views(given, skipped, rows)
        elif found.kind in (BYTES, LIST):
            self.offsets(given, found, skipped, rows)
        for k in range(given.n_children):
            if found.kind == NESTED:
                used = given.length * (atoll(schema.format + 3) if schema.format[1] == c'w' else 1)
                refuse_waste(8 * used, 8 * given.children[k].length)
            self.array(schema.children[k], given.children[k])
        if schema.dictionary != NULL:
            self.array(schema.dictionary, given.dictionary)
        return 0

    cdef int views(self, arrow_array *given, int64_t skipped, int64_t rows) except -1:
        cdef int64_t k, used = 0, total = 0, count = given.n_buffers - 3
        cdef const int32_t *views = <const int32_t *>given.buffers[1] + 4 * skipped
        cdef const int64_t *sizes = <const int64_t *>given.buffers[given.n_buffers - 1]
        for k in range(count):
            total += sizes[k]
        if total > SLICE_BYTES_MIN:
            for k in range(rows):
                if views[4 * k] > 12:  # a shorter text is in the view itself
                    used += views[4 * k]
            refuse_waste(used, total)
        self.buffer(views, 16 * rows)
        for k in range(count):
            self.buffer(given.buffers[2 + k], sizes[k])
        self.buffer(sizes, 8 * count)
        return 0

    cdef int offsets(self, arrow_array *given, layout found, int64_t skipped, int64_t rows) except -1:
        cdef const char *offsets = <const char *>given.buffers[1]
        cdef int64_t width = found.bits // 8, first = 0, last = 0
        if offsets == NULL and rows:
            raise ValueError("a buffer of the Arrow data is absent")
        if offsets != NULL:
            offsets += skipped * width
            first = (<const int32_t *>offsets)[0] if width == 4 else (<const int64_t *>offsets)[0]
            last = (<const int32_t *>offsets)[rows] if width == 4 else (<const int64_t *>offsets)[rows]
        self.buffer(offsets, width * (rows + 1) if offsets != NULL else 0)
        if found.kind == BYTES:
            refuse_waste(last - first, last)
            self.buffer(given.buffers[2], last)
        else:
            refuse_waste(8 * (last - first), 8 * given.children[0].length)
        return 0


cdef int64_t metadata_bytes(const char *metadata) noexcept:
    """Return the length of the key-value pairs of a schema: a count, and each text after its length, all unaligned."""
    cdef int64_t nbytes = sizeof(int32_t)
    cdef int32_t _k, pairs = 0, length = 0
    if metadata == NULL:
        return 0
    memcpy(&pairs, metadata, sizeof(pairs))
    for _k in range(2 * pairs):
        memcpy(&length, metadata + nbytes, sizeof(length))
        nbytes += sizeof(length) + length
    return nbytes


cdef int refuse_waste(int64_t used, int64_t total) except -1:
    if total > SLICE_BYTES_MIN and used < total // SLICE:
        raise TypeError("a small slice of large Arrow data is not stored as it is")
    return 0


cdef int check_call(arrow_stream *stream, int code) except -1:
    cdef const char *why
    if code:
        why = stream.get_last_error(stream)
        raise OSError(code, why.decode("utf-8", "replace") if why != NULL else "an Arrow stream failed")
    return 0


def take(exporter):
    """Read all of an Arrow stream, without a copy.

    Args:
        exporter: an object with `__arrow_c_stream__`.
    Returns:
        (description, buffers): what `Stream` takes. The buffers keep the exporter's memory.
    Raises:
        TypeError: it has data of a type that is not supported, or is a small slice of larger data.
        ValueError: its data do not have the buffers of their type.
        OSError: the stream failed.
    """
    cdef arrow_stream *stream
    cdef arrow_schema schema
    cdef Taker taker = Taker.__new__(Taker)
    cdef int code
    cdef int64_t schema_bytes, chunks = 0
    capsule = exporter.__arrow_c_stream__()
    stream = <arrow_stream *>PyCapsule_GetPointer(capsule, _STREAM)
    if stream.release == NULL:
        raise ValueError("the Arrow stream was read before")
    with nogil:
        code = stream.get_schema(stream, &schema)
    check_call(stream, code)
    taker.head, taker.parts = bytearray(), []
    try:
        taker.schema(&schema, 0)
        schema_bytes = len(taker.head)
        while True:
            taker.chunk = Chunk.__new__(Chunk)
            with nogil:
                code = stream.get_next(stream, &taker.chunk.array)
            check_call(stream, code)
            if taker.chunk.array.release == NULL:
                break
            chunks += 1
            taker.array(&schema, &taker.chunk.array)
    finally:
        schema.release(&schema)
    return (<char *>&schema_bytes)[:8] + (<char *>&chunks)[:8] + bytes(taker.head), taker.parts


# ---- to a library ----

# What a library holds of a Stream: each schema and array has one, with room for all that its own struct points to.
cdef struct held:
    PyObject *stream
    void *words[1]

cdef struct cursor:
    const char *at
    const char *end
    int depth

cdef struct source:
    PyObject *stream
    cursor chunks
    int64_t left


cdef held *hold(Stream stream, int64_t words) noexcept:
    cdef held *made = <held *>calloc(1, sizeof(held) + words * sizeof(void *))
    if made != NULL:
        Py_INCREF(stream)
        made.stream = <PyObject *>stream
    return made


cdef void let_go(PyObject *stream) noexcept nogil:
    # A library may drop its data in a thread of its own, also after Python has ended.
    if Py_IsInitialized():
        with gil:
            Py_DECREF(<object>stream)


cdef void release_schema(arrow_schema *schema) noexcept nogil:
    cdef held *mine = <held *>schema.private_data
    cdef int64_t k
    for k in range(schema.n_children):
        if schema.children[k].release != NULL:
            schema.children[k].release(schema.children[k])
    if schema.dictionary != NULL and schema.dictionary.release != NULL:
        schema.dictionary.release(schema.dictionary)
    schema.release = NULL
    let_go(mine.stream)
    free(mine)


cdef void release_array(arrow_array *array) noexcept nogil:
    cdef held *mine = <held *>array.private_data
    cdef int64_t k
    for k in range(array.n_children):  # a library may have moved a child out, which has no release here then
        if array.children[k].release != NULL:
            array.children[k].release(array.children[k])
    if array.dictionary != NULL and array.dictionary.release != NULL:
        array.dictionary.release(array.dictionary)
    array.release = NULL
    let_go(mine.stream)
    free(mine)


cdef bint read_numbers(cursor *start, int64_t *numbers, int64_t count) noexcept:
    if start.end - start.at < count * <int64_t>sizeof(int64_t):
        return False
    memcpy(numbers, start.at, count * sizeof(int64_t))
    start.at += count * sizeof(int64_t)
    return True


cdef bint read_text(cursor *start, const char **text, bint ends_with_nul) noexcept:
    cdef int64_t nbytes
    text[0] = NULL
    if not read_numbers(start, &nbytes, 1) or nbytes > start.end - start.at:
        return False
    if nbytes < 0:
        return True
    if ends_with_nul and (nbytes == 0 or start.at[nbytes - 1] != 0):
        return False
    text[0] = start.at
    start.at += min(nbytes + (-nbytes & 7), start.end - start.at)
    return True


cdef int read_schema(Stream stream, cursor *start, arrow_schema *made) noexcept:
    """Make a schema from its description: 0, or an errno. The caller releases a part that was made."""
    cdef int64_t k, children
    cdef int64_t numbers[3]
    cdef held *mine
    cdef arrow_schema *inner
    cdef int code
    memset(made, 0, sizeof(arrow_schema))
    if not read_numbers(start, numbers, 3):
        return EINVAL
    children = numbers[1]
    if not 0 <= children <= (start.end - start.at) // 8 or start.depth > DEPTH_MAX:
        return EINVAL
    mine = hold(stream, children + (children + 1) * sizeof(arrow_schema) // sizeof(void *))
    if mine == NULL:
        return ENOMEM
    made.release, made.private_data, made.flags = release_schema, mine, numbers[0]
    made.children = <arrow_schema **>mine.words
    inner = <arrow_schema *>(mine.words + children)
    for k in range(children):
        made.children[k] = inner + k
    made.n_children = children
    if numbers[2]:
        made.dictionary = inner + children
    if not (read_text(start, &made.format, True) and made.format != NULL and read_text(start, &made.name, True) and
            read_text(start, &made.metadata, False)):
        return EINVAL
    start.depth += 1
    for k in range(children + (numbers[2] != 0)):
        code = read_schema(stream, start, inner + k)
        if code:
            return code
    start.depth -= 1
    return 0


cdef int read_array(Stream stream, cursor *start, arrow_array *made) noexcept:
    """Make an array from its description, as `read_schema` does."""
    cdef int64_t k, buffers, children, index = 0
    cdef int64_t numbers[6]
    cdef held *mine
    cdef arrow_array *inner
    cdef int code
    memset(made, 0, sizeof(arrow_array))
    if not read_numbers(start, numbers, 6):
        return EINVAL
    buffers, children = numbers[3], numbers[4]
    if not 0 <= buffers <= (start.end - start.at) // 8 or not 0 <= children <= (start.end - start.at) // 8 or \
            start.depth > DEPTH_MAX:
        return EINVAL
    mine = hold(stream, buffers + children + (children + 1) * sizeof(arrow_array) // sizeof(void *))
    if mine == NULL:
        return ENOMEM
    made.release, made.private_data = release_array, mine
    made.length, made.null_count, made.offset = numbers[0], numbers[1], numbers[2]
    made.buffers = <const void **>mine.words
    made.children = <arrow_array **>(mine.words + buffers)
    inner = <arrow_array *>(mine.words + buffers + children)
    for k in range(children):
        made.children[k] = inner + k
    made.n_buffers, made.n_children = buffers, children
    if numbers[5]:
        made.dictionary = inner + children
    for k in range(buffers):
        if not read_numbers(start, &index, 1):
            return EINVAL
        if index == EMPTY:
            made.buffers[k] = _nothing
        elif 0 <= index < stream.count:
            made.buffers[k] = stream.buffers[index].buf
        elif index != ABSENT:
            return EINVAL
    start.depth += 1
    for k in range(children + (numbers[5] != 0)):
        code = read_array(stream, start, inner + k)
        if code:
            return code
    start.depth -= 1
    return 0


cdef int get_schema(arrow_stream *stream, arrow_schema *made) noexcept with gil:
    cdef Stream mine = <Stream>(<source *>stream.private_data).stream
    cdef cursor start
    cdef int code
    start.at = PyBytes_AS_STRING(mine.head) + HEAD_BYTES
    start.end, start.depth = start.at + mine.schema_bytes, 0
    code = read_schema(mine, &start, made)
    if code and made.release != NULL:
        made.release(made)
    return code


cdef int get_next(arrow_stream *stream, arrow_array *made) noexcept with gil:
    cdef source *mine = <source *>stream.private_data
    cdef int code
    if mine.left <= 0:
        memset(made, 0, sizeof(arrow_array))
        return 0
    code = read_array(<Stream>mine.stream, &mine.chunks, made)
    mine.left = 0 if code else mine.left - 1
    if code and made.release != NULL:
        made.release(made)
    return code


cdef const char *get_last_error(arrow_stream *stream) noexcept nogil:
    return "the description of stored Arrow data is damaged, or there is no memory"


cdef void release_stream(arrow_stream *stream) noexcept nogil:
    cdef source *mine = <source *>stream.private_data
    stream.release = NULL
    let_go(mine.stream)
    free(mine)


cdef void end_capsule(object capsule) noexcept:
    cdef arrow_stream *stream = <arrow_stream *>PyCapsule_GetPointer(capsule, _STREAM)
    if stream.release != NULL:
        stream.release(stream)
    free(stream)


@cython.no_gc
@cython.final
cdef class Stream:
    """Stored Arrow data, which any library can read by the Arrow PyCapsule interface, as often as it likes.

    Args:
        head: the description that `take` made. The lengths in it are not compared with the buffers.
        buffers: readable buffers, in the order of those of `take`. What a library makes of the data keeps them.
    Raises:
        ValueError: the description is damaged.
    """

    cdef bytes head
    cdef int64_t schema_bytes
    cdef Py_buffer *buffers
    cdef Py_ssize_t count

    def __cinit__(self, bytes head not None, list buffers not None):
        cdef Py_ssize_t k
        if len(head) >= HEAD_BYTES:
            self.schema_bytes = (<const int64_t *>PyBytes_AS_STRING(head))[0]
        if not 0 < self.schema_bytes <= <int64_t>len(head) - HEAD_BYTES or self.schema_bytes % 8:
            raise ValueError("the description of stored Arrow data is damaged")
        self.head = head
        self.buffers = <Py_buffer *>calloc(len(buffers) + 1, sizeof(Py_buffer))
        if self.buffers == NULL:
            raise MemoryError
        for k in range(len(buffers)):
            PyObject_GetBuffer(buffers[k], &self.buffers[k], PyBUF_SIMPLE)
            self.count += 1

    def __dealloc__(self):
        cdef Py_ssize_t k
        for k in range(self.count):
            PyBuffer_Release(&self.buffers[k])
        free(self.buffers)

    def __arrow_c_stream__(self, requested_schema=None):
        """Return a capsule with a new stream of the data.

        Args:
            requested_schema: ignored: the data come with the schema that they were stored with.
        """
        cdef arrow_stream *stream = <arrow_stream *>calloc(1, sizeof(arrow_stream))
        cdef source *mine = <source *>calloc(1, sizeof(source))
        if stream == NULL or mine == NULL:
            free(stream)
            free(mine)
            raise MemoryError
        mine.chunks.at = PyBytes_AS_STRING(self.head) + HEAD_BYTES + self.schema_bytes
        mine.chunks.end = PyBytes_AS_STRING(self.head) + len(self.head)
        mine.left = (<const int64_t *>PyBytes_AS_STRING(self.head))[1]
        mine.stream = <PyObject *>self
        Py_INCREF(self)
        stream.get_schema, stream.get_next = get_schema, get_next
        stream.get_last_error, stream.release, stream.private_data = get_last_error, release_stream, mine
        try:
            return PyCapsule_New(stream, _STREAM, end_capsule)
        except BaseException:
            release_stream(stream)
            free(stream)
            raise
