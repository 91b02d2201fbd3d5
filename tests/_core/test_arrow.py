"""Arrow data from a library and to a library, by the C structs, as any library reads them."""

import ctypes
import struct
import threading
import weakref

import pytest

from fastrt._core.objects import arrow

ABSENT, EMPTY = -1, -2


class Array(ctypes.Structure):
    pass


class Schema(ctypes.Structure):
    pass


class Source(ctypes.Structure):
    pass


def fields_of(own, kind, more):
    return [
        *own, ("children", ctypes.POINTER(ctypes.POINTER(kind))), ("dictionary", ctypes.POINTER(kind)),
        ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(kind))), ("private", ctypes.c_void_p), *more,
    ]  # fmt: skip


Array._fields_ = fields_of(
    [*((name, ctypes.c_int64) for name in ("length", "nulls", "offset", "n_buffers", "n_children")),
     ("buffers", ctypes.POINTER(ctypes.c_void_p))], Array, [])  # fmt: skip
Schema._fields_ = fields_of(
    [("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", ctypes.c_void_p), ("flags", ctypes.c_int64),
     ("n_children", ctypes.c_int64)], Schema, [])  # fmt: skip
Source._fields_ = [
    ("get_schema", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Source), ctypes.POINTER(Schema))),
    ("get_next", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Source), ctypes.POINTER(Array))),
    ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(Source))),
    ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(Source))),
    ("private", ctypes.c_void_p),
]


class Memory(bytearray):
    """A buffer that can be watched."""


def source_of(capsule):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.cast(pointer(capsule, b"arrow_array_stream"), ctypes.POINTER(Source))


def next_of(source):
    made = Array()
    assert source.contents.get_next(source, made) == 0
    return made


def text(value):
    if value is None:
        return struct.pack("q", -1)
    return struct.pack("q", len(value)) + value + bytes(-len(value) % 8)


def schema(form, name=b"x", children=(), dictionary=None, metadata=None, flags=2):
    head = struct.pack("3q", flags, len(children), dictionary is not None)
    head += text(form + b"\0") + text(None if name is None else name + b"\0") + text(metadata)
    return head + b"".join(children) + (dictionary or b"")


def array(rows, buffers, children=(), dictionary=None, nulls=0, offset=0):
    head = struct.pack("6q", rows, nulls, offset, len(buffers), len(children), dictionary is not None)
    return head + struct.pack(f"{len(buffers)}q", *buffers) + b"".join(children) + (dictionary or b"")


def described(of, *chunks):
    return struct.pack("2q", len(of), len(chunks)) + of + b"".join(chunks)


def taken(head, buffers):
    """The description and the buffers that come back, after a way through the C structs."""
    again, parts = arrow.take(arrow.Stream(head, buffers))
    return again, [bytes(part) for part in parts]


INT64, PAIR = struct.pack("8q", *range(8)), (b"\x5a", struct.pack("8q", *range(8)))
METADATA = struct.pack("3i", 1, 3, 5)[:8] + b"key" + struct.pack("i", 5) + b"value"
SHORT, LONG = struct.pack("i12s", 3, b"abc"), struct.pack("i4sii", 20, b"long", 0, 0)
KEPT = {
    "integers": (described(schema(b"l"), array(8, [ABSENT, 0])), [INT64]),
    "nulls": (described(schema(b"l"), array(8, [0, 1], nulls=4)), list(PAIR)),
    "no name": (described(schema(b"l", None), array(8, [ABSENT, 0])), [INT64]),
    "metadata": (described(schema(b"g", metadata=METADATA), array(8, [ABSENT, 0])), [INT64]),
    "no rows": (described(schema(b"l"), array(0, [ABSENT, EMPTY])), []),
    "no chunks": (described(schema(b"l")), []),
    "only nulls": (described(schema(b"n"), array(8, [], nulls=8)), []),
    "bits": (described(schema(b"b"), array(12, [ABSENT, 0])), [b"\xff\x0f"]),
    "a slice of bits": (described(schema(b"b"), array(9, [ABSENT, 0], offset=3)), [b"\xff\x0f"]),
    "texts": (described(schema(b"u"), array(2, [ABSENT, 0, 1])), [struct.pack("3i", 0, 3, 6), b"abcdef"]),
    "long texts": (described(schema(b"U"), array(2, [ABSENT, 0, 1])), [struct.pack("3q", 0, 3, 6), b"abcdef"]),
    "views": (described(schema(b"vu"), array(2, [ABSENT, 0, EMPTY])), [SHORT * 2]),
    "long views": (described(schema(b"vz"), array(2, [ABSENT, 0, 1, 2])), [LONG * 2, bytes(20), struct.pack("q", 20)]),
    "decimals": (described(schema(b"d:38,2"), array(2, [ABSENT, 0])), [bytes(32)]),
    "short decimals": (described(schema(b"d:9,2,32"), array(2, [ABSENT, 0])), [bytes(8)]),
    "wide": (described(schema(b"w:3"), array(2, [ABSENT, 0])), [b"abcdef"]),
    "integers of Polars": (described(schema(b"_pli128"), array(2, [ABSENT, 0])), [bytes(32)]),
    "dates": (described(schema(b"tdD"), array(2, [ABSENT, 0])), [bytes(8)]),
    "times": (described(schema(b"tsu:UTC"), array(2, [ABSENT, 0])), [bytes(16)]),
    "lists": (described(schema(b"+l", children=[schema(b"s")]), array(2, [ABSENT, 0], [array(3, [ABSENT, 1])])),
              [struct.pack("3i", 0, 1, 3), b"aabbcc"]),
    "rows of three": (described(schema(b"+w:3", children=[schema(b"c")]), array(2, [ABSENT], [array(6, [ABSENT, 0])])),
                      [b"abcdef"]),
    "categories": (described(schema(b"C", dictionary=schema(b"u")),
                             array(3, [ABSENT, 0], dictionary=array(1, [ABSENT, 1, 2]))),
                   [b"\0\0\0", struct.pack("2i", 0, 3), b"abc"]),
    "two chunks of structs": (
        described(schema(b"+s", b"", [schema(b"l", b"a"), schema(b"c", b"b")]),
                  array(8, [ABSENT], [array(8, [ABSENT, 0]), array(8, [ABSENT, 1])]),
                  array(1, [ABSENT], [array(1, [ABSENT, 2]), array(1, [ABSENT, 3])])),
        [INT64, b"abcdefgh", INT64[:8], b"i"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_data_come_back_as_they_were(name):
    head, buffers = KEPT[name]
    assert taken(head, buffers) == (head, buffers)
    stream = arrow.Stream(head, buffers)
    assert [arrow.take(stream)[0] for _ in range(3)] == [head] * 3


@pytest.mark.parametrize(("form", "buffers", "after"), [
    (b"l", [ABSENT, 0], [bytes(8 * 23)]), (b"b", [ABSENT, 0], [bytes(3)]), (b"l", [1, 0], [bytes(3), bytes(8 * 23)]),
    (b"vu", [ABSENT, 0, EMPTY], [bytes(16 * 23)]),
])  # fmt: skip
def test_what_lies_before_and_after_a_slice_is_left_out(form, buffers, after):
    given = described(schema(form), array(20, buffers, offset=1000_003))
    head, parts = taken(given, [bytes(16 * 1_100_000), bytes(200_000)])
    count = iter(range(9))
    indices = [next(count) if index >= 0 else index for index in buffers]
    assert (head, parts) == (described(schema(form), array(20, indices, offset=3)), after)


WASTEFUL = {
    "texts": (schema(b"u"), array(2, [ABSENT, 0, 1]), [struct.pack("3i", 90_000, 90_003, 90_006), bytes(99_999)]),
    "views": (schema(b"vu"), array(2, [ABSENT, 0, 1, 2]), [SHORT + LONG, bytes(9000), struct.pack("q", 9000)]),
    "lists": (schema(b"+L", children=[schema(b"c")]), array(1, [ABSENT, 0], [array(9000, [ABSENT, 1])]),
              [struct.pack("2q", 5, 9), bytes(9000)]),
    "structs": (schema(b"+s", children=[schema(b"c")]), array(8, [ABSENT], [array(9000, [ABSENT, 0])]), [bytes(9000)]),
}  # fmt: skip


@pytest.mark.parametrize("name", WASTEFUL)
def test_small_slice_of_large_data_is_refused(name):
    of, chunk, buffers = WASTEFUL[name]
    with pytest.raises(TypeError, match="small slice"):
        taken(described(of, chunk), buffers)


@pytest.mark.parametrize("form", [b"+us:0", b"+r", b"+vl", b"w:0", b"t", b"ta", b"", b"x", b"lx", b"d:38,2,-1"])
def test_type_of_another_layout_is_refused(form):
    with pytest.raises(TypeError, match="format"):
        taken(described(schema(form), array(0, [ABSENT, EMPTY])), [])
    deep = schema(b"l")
    for _ in range(65):
        deep = schema(b"+l", children=[deep])
    with pytest.raises((TypeError, OSError)):
        taken(described(deep), [])


@pytest.mark.parametrize("chunk", [array(8, [0]), array(8, [0, 0, 0]), array(8, [ABSENT, ABSENT]),
                                   array(8, [ABSENT, 0], [array(8, [ABSENT, 0])])])  # fmt: skip
def test_data_without_the_buffers_of_their_type_are_refused(chunk):
    with pytest.raises(ValueError, match="buffer"):
        taken(described(schema(b"l"), chunk), [INT64])


@pytest.mark.parametrize("name", ["two chunks of structs", "categories", "metadata"])
def test_damaged_description_is_refused_and_keeps_nothing(name):
    head, buffers = KEPT[name]
    memory = Memory(64)
    watched = weakref.ref(memory)
    for end in range(0, len(head), 4):
        with pytest.raises((ValueError, OSError)):
            taken(head[:end], [memory] * len(buffers))
    for at in range(0, len(head), 8):  # counts, indices and lengths beyond all that is there
        damaged = head[:at] + struct.pack("q", 1 << 40) + head[at + 8 :]
        source = arrow.Stream(damaged, [memory] * len(buffers)) if at else None
        if source is not None:
            read_all(source)
    assert watched() is memory
    del memory, source
    assert watched() is None


def read_all(stream):
    capsule = stream.__arrow_c_stream__()
    source = source_of(capsule)
    form = Schema()
    if source.contents.get_schema(source, form) == 0:
        form.release(form)
    else:
        assert b"damaged" in source.contents.get_last_error(source)
    made = Array()
    while source.contents.get_next(source, made) == 0 and made.release:
        made.release(made)


def test_stream_of_no_description_is_refused():
    for head in (b"", bytes(16), struct.pack("2q", 8, 1), struct.pack("2q", -8, 1) + bytes(64), bytes(100)):
        with pytest.raises(ValueError, match="damaged"):
            arrow.Stream(head, [])
    head, buffers = KEPT["integers"]
    for wrong in ((None, []), (head, None), (head, [None]), (bytearray(head), buffers), (head, [1, 2])):
        with pytest.raises(TypeError):
            arrow.Stream(*wrong)
    with pytest.raises(AttributeError):
        arrow.take(1)
    with pytest.raises(TypeError):
        memoryview(arrow.Part())


def test_stream_that_was_read_before_is_refused():
    capsule = arrow.Stream(*KEPT["integers"]).__arrow_c_stream__()

    class Once:
        def __arrow_c_stream__(self):
            return capsule

    assert arrow.take(Once())[0] == KEPT["integers"][0]
    assert arrow.take(Once())[0] == described(schema(b"l"))  # a stream is read once
    source = source_of(capsule)
    source.contents.release(source)
    with pytest.raises(ValueError, match="read before"):
        arrow.take(Once())


def watched_source():
    head, _ = KEPT["two chunks of structs"]
    memory = Memory(64)
    capsule = arrow.Stream(head, [memory] * 4).__arrow_c_stream__()
    return weakref.ref(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)), capsule


def test_array_keeps_the_memory_when_the_stream_has_ended_and_a_thread_may_release_it():
    watched, address, capsule = watched_source()
    made = next_of(source_of(capsule))
    del capsule
    assert made.children[0].contents.buffers[1] == address
    assert watched() is not None
    thread = threading.Thread(target=made.release, args=(made,))  # ctypes calls it without the GIL
    thread.start()
    thread.join()
    assert not made.release
    assert watched() is None


def test_child_that_was_moved_out_keeps_the_memory():
    watched, address, capsule = watched_source()
    made = next_of(source_of(capsule))
    child = Array.from_buffer_copy(made.children[1].contents)
    ctypes.memset(ctypes.addressof(made.children[1].contents) + Array.release.offset, 0, 8)
    made.release(made)
    del capsule
    assert child.buffers[1] == address
    assert watched() is not None
    child.release(child)
    assert watched() is None


def test_parts_keep_what_they_were_taken_of():
    memory = Memory(64)
    watched = weakref.ref(memory)
    _, parts = arrow.take(arrow.Stream(KEPT["integers"][0], [memory]))
    view = memoryview(parts[0])
    del memory, parts
    assert watched() is not None
    assert view.readonly
    view.release()
    del view
    assert watched() is None
