"""Every kind of value goes through the store and comes back the same, and large ones come back without a copy."""

import datetime
import decimal
import enum
import gc
import io
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import handles
from fastrt.errors import SerializationError
from fastrt.store.serialize import NDARRAY, PICKLE, PICKLE5, deserialize, serialize

pytestmark = pytest.mark.usefixtures("rt")

Point = namedtuple("Point", "x y")
KIB = b"0123456789abcdef" * 64


@dataclass
class Record:
    name: str
    inner: object


class Colour(enum.Enum):
    RED = 1


class Text(str):
    """A subclass keeps its class."""


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a

    def __eq__(self, other):
        return type(other) is Slotted and other.a == self.a

    __hash__ = None


def same(value):
    return fastrt.get(fastrt.put(value))


VALUES = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**100, 10**5000, 0.0, -0.0, 1e308,
    float("inf"), 1j, "", "a", "é漢🙂", "\0", "x" * 73, "\ud800 alone", "漢" * 100_000, b"", b"\0", KIB, KIB * 1000,
    bytearray(KIB * 10),
    (), (1,), ((1, (2, (3,))),), [], [1, "a", None, [2.5]], {}, {"a": {1: [b"x"]}}, {1, 2}, frozenset("ab"),
    list(range(20_000)), {i: str(i) for i in range(20_000)}, range(3), slice(1, None, 2), ..., NotImplemented,
    Point(1, "y"), Record("r", [Record("s", None)]), Colour.RED, Text("t"), Slotted([1]), int, Record, Colour,
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), decimal.Decimal("1.50"), OrderedDict(b=1, a=2),
    defaultdict(list, {"k": [1]}), len, sys.intern, io.StringIO, pickle.PickleError, complex("nan-infj").imag,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_put_value_comes_back_equal_and_of_its_type(value):
    got = same(value)
    assert type(got) is type(value)
    assert got == value


def test_put_nan_comes_back_as_nan():
    assert np.isnan(same(float("nan")))


def test_put_negative_zero_keeps_its_sign():
    assert str(same(-0.0)) == "-0.0"


def test_put_functions_and_lambdas_come_back_callable():
    offset = 5

    def closure(x, *, by=2):
        return x * by + offset

    assert same(closure)(3) == 11
    assert same(lambda x: x + offset)(1) == 6
    assert same([closure, {"f": closure}])[1]["f"](1, by=1) == 6
    assert same(Record("r", 1).__eq__)(Record("r", 1))


def test_put_class_of_this_module_comes_back_usable():
    class Local(Record):
        def shout(self):
            return self.name.upper()

    local = same(Local)("a", 1)
    assert local.shout() == "A"
    assert same(local).shout() == "A"


def test_put_class_without_a_module_is_accepted():
    made = type("Made", (), {"__module__": None, "x": 4})
    assert same(made()).x == 4


def test_put_cycles_come_back_as_cycles():
    cycle = [1]
    cycle.append(cycle)
    got = same(cycle)
    assert got[1] is got
    table = {}
    table["self"] = table
    got = same(table)
    assert got["self"] is got


def test_put_shared_part_is_shared_again():
    part = [1]
    first, second = same([part, part])
    assert first is second


def test_put_exception_comes_back_as_a_value():
    error = same(ValueError("text", 3))
    assert type(error) is ValueError
    assert error.args == ("text", 3)


@pytest.mark.parametrize("depth", [9, 100, 300])
def test_put_deep_list_comes_back(depth):
    value = []
    for _ in range(depth):
        value = [value]
    got = same(value)
    for _ in range(depth):
        (got,) = got
    assert got == []


# ---- NumPy ----

DTYPES = ["?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G", ">i4", "<i8", ">f8",
          "S5", "U7", "M8[ns]", "M8[D]", "m8[us]", "m8"]  # fmt: skip


def assert_same_array(got, array):
    assert type(got) is type(array)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 5), (2, 3, 4), (1,) * 32, (4000,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_put_array_of_dtype_and_shape_comes_back_equal(dtype, shape):
    count = int(np.prod(shape))
    raw = np.random.default_rng(count).integers(0, 60, count * np.dtype(dtype).itemsize, dtype=np.uint8)
    array = raw.view(np.uint8).tobytes()
    array = np.frombuffer(array, dtype).reshape(shape) if count else np.empty(shape, dtype)
    assert_same_array(same(array), array)


STRANGE = {
    "fortran": np.asfortranarray(np.arange(12000.0).reshape(100, 120)),
    "strided": np.arange(20000)[::3],
    "negative strides": np.arange(24000).reshape(100, 240)[::-1, ::-2],
    "transposed": np.arange(6000).reshape(20, 30, 10).transpose(2, 0, 1),
    "broadcast": np.broadcast_to(np.float32(7), (300, 50)),
    "column": np.ones((500, 300))[:, 7],
    "structured": np.array([(1, 2.5, b"ab"), (3, 4.5, b"cd")], dtype=[("i", "i4"), ("f", "f8"), ("s", "S3")]),
    "structured large": np.zeros(3000, dtype=[("i", "i4"), ("sub", "f4", (2, 2))]),
    "void": np.zeros(5, "V9"),
    "object": np.array([1, "a", None, [2]], dtype=object),
    "object strided": np.array([[1, "a"], [None, {}]], dtype=object)[:, ::-1],
    "text of python": np.array(["a", "b" * 100], dtype=np.dtypes.StringDType()),
    "unaligned": np.frombuffer(b"\0" + bytes(8000), np.uint8)[1:].view("f8"),
    "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "records": np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "scalar": np.float32(2.5),
    "date": np.datetime64("2026-01-02"),
    "generator": np.random.default_rng(3),
    "dtype": np.dtype([("a", ">i2")]),
}


@pytest.mark.parametrize("name", STRANGE)
def test_put_strange_array_comes_back_equal(name):
    array = STRANGE[name]
    got = same(array)
    assert type(got) is type(array)
    if isinstance(array, np.ndarray):
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert repr(got.tolist()) == repr(array.tolist())
    elif name == "generator":
        assert got.random() == np.random.default_rng(3).random()
    else:
        assert got == array


def test_put_fortran_array_keeps_its_order():
    assert same(STRANGE["fortran"]).flags.f_contiguous


def test_put_memory_map_comes_back_equal(tmp_path):
    mapped = np.memmap(tmp_path / "map", dtype="i4", mode="w+", shape=(2000,))
    mapped[:] = np.arange(2000)
    assert same(mapped).tolist() == list(range(2000))


@pytest.mark.parametrize("module", ["pandas", "pyarrow", "torch"])
def test_put_value_of_library_comes_back_without_a_copy(module):
    library = pytest.importorskip(module)
    if module == "torch":
        tensor = library.arange(100_000)
        assert library.equal(same(tensor), tensor)
    elif module == "pandas":
        frame = library.DataFrame({"a": np.arange(10_000), "b": ["x"] * 10_000})
        assert same(frame).equals(frame)
    else:
        table = library.table({"a": list(range(10_000))})
        assert same(table).equals(table)


def test_serialize_chooses_the_form_by_kind():
    assert serialize(np.arange(3)).kind == NDARRAY
    assert serialize({"a": [1]}).kind == PICKLE
    assert serialize([np.arange(1000)]).kind == PICKLE5
    parts = serialize([np.arange(1000), np.arange(5)])
    first, second = deserialize(PICKLE5, parts.to_bytes(), [])
    assert first.tolist() == list(range(1000))
    assert second.tolist() == list(range(5))
    assert [offset % 64 for offset, _ in parts.parts[2:]] == [0]


def test_read_only_buffers_of_a_pickle_are_views_of_the_store(rt):
    array = np.arange(100_000)
    array.flags.writeable = False
    ref = fastrt.put({"a": array, "b": [array[:50_000]]})
    got = fastrt.get(ref)
    for part in (got["a"], got["b"][0]):
        assert not part.flags.writeable
        assert not part.flags.owndata
    assert handles.describe(ref.owner, ref)["pins"] == [ref.owner.index]


@pytest.mark.parametrize("size", [200, 20_000, 2_000_000])
def test_writable_arrays_inside_a_value_are_private(rt, size):
    ref = fastrt.put({"a": np.arange(size), "b": [np.zeros(size)]})
    got = fastrt.get(ref)
    got["a"] += 1
    got["b"][0][:] = 7
    assert fastrt.get(ref)["a"].tolist() == list(range(size))
    assert not fastrt.get(ref)["b"][0].any()
    assert got["a"][-1] == size
    assert (got["b"][0] == 7).all()


def test_private_pages_keep_their_value_when_the_reference_is_gone(rt):
    got = fastrt.get(fastrt.put([np.arange(2_000_000)]))[0]
    others = [fastrt.put(np.zeros(2_000_000)) for _ in range(10)]
    assert got.sum() == sum(range(2_000_000))
    del others


def test_get_with_copy_gives_a_private_array(rt):
    for size in (10, 20_000, 2_000_000):
        ref = fastrt.put(np.zeros(size))
        own, listed = fastrt.get(ref, copy=True), fastrt.get([ref], copy=True)[0]
        own += 1
        listed += 2
        assert not fastrt.get(ref).any()
        assert own.sum() == size
        assert listed.sum() == 2 * size


def test_get_without_copy_gives_views_only(rt):
    got = fastrt.get(fastrt.put([np.zeros(20_000), {"a": np.zeros(2_000_000)}]), copy=False)
    assert not got[0].flags.writeable
    assert not got[1]["a"].flags.writeable


def test_picklebuffer_of_a_bytearray_comes_back_private():
    data = bytearray(KIB * 8)
    got = same([pickle.PickleBuffer(data)])[0]
    assert not memoryview(got).readonly
    assert bytes(got) == bytes(data)


def test_picklebuffer_of_bytes_comes_back_as_a_read_only_view():
    data = bytes(KIB * 8)
    got = same([pickle.PickleBuffer(data)])[0]
    assert memoryview(got).readonly
    assert bytes(got) == data


# As torch and compiled code do: a write that does not ask whether it may.
WRITER = """
import ctypes, faulthandler, sys, fastrt, numpy
if "stack" in sys.argv:
    faulthandler.enable()
fastrt.init(num_workers=1, object_store_memory=64 << 20)
ref = fastrt.put(numpy.zeros(1000))
array = fastrt.get(ref)
print(hex(ref.objref), flush=True)
ctypes.memset(array.ctypes.data + 4000, 1, 8)
"""


@pytest.mark.parametrize("words", [[], ["stack"]])
def test_write_to_a_read_only_value_names_the_object_and_the_way_out(words):
    run = subprocess.run([sys.executable, "-c", WRITER, *words], capture_output=True, text=True, timeout=50)
    assert run.returncode == -signal.SIGSEGV
    objref = int(run.stdout, 16)
    assert f"wrote to object 0x{objref:016x}, which is read-only" in run.stderr
    assert "get(ref, copy=True)" in run.stderr
    assert ("Current thread" in run.stderr) == bool(words)


# ---- what cannot be pickled ----


class RaisesInReduce:
    def __reduce__(self):
        raise ZeroDivisionError("in reduce")


class RaisesInRepr:
    def __repr__(self):
        raise ValueError("no repr")

    def __hash__(self):
        return 1


LOCK = threading.Lock()
UNPICKLABLE = {
    "lock": (LOCK, "'lock' object"),
    "in a list": ([1, [2, LOCK]], "at value[1][1]"),
    "in a dict": ({"a": {"b": LOCK}}, "at value['a']['b']"),
    "in an attribute": (Record("r", LOCK), "at value.inner"),
    "generator": ((x for x in []), "'generator' object"),
    "frame": (sys._getframe(), "'frame' object"),
    "reduce that raises": ([RaisesInReduce()], "at value[0]: in reduce"),
    "key without repr": ({RaisesInRepr(): LOCK}, "'dict' object"),
}


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_put_what_cannot_be_pickled_names_the_part(name):
    value, text = UNPICKLABLE[name]
    with pytest.raises(SerializationError) as info:
        fastrt.put(value)
    assert text in str(info.value)
    assert isinstance(info.value, TypeError)


def test_put_closure_over_what_cannot_be_pickled_names_the_variable():
    handle = threading.Lock()

    def uses():
        return handle, later

    with pytest.raises(SerializationError, match=r"<closure handle>"):
        fastrt.put(uses)
    later = 1


def test_put_recursion_without_end_is_an_error():
    class Endless:
        def __reduce__(self):
            return Endless, (), {"next": Endless()}

    with pytest.raises(SerializationError, match="recursion"):
        fastrt.put(Endless())


def test_get_value_whose_class_is_missing_here_says_so(monkeypatch):
    import types

    module = types.ModuleType("short_lived")
    exec("class Gone: pass", module.__dict__)  # noqa: S102  a module that only this process has
    monkeypatch.setitem(sys.modules, "short_lived", module)
    ref = fastrt.put([module.Gone()])
    monkeypatch.delitem(sys.modules, "short_lived")
    with pytest.raises(SerializationError, match=r"short_lived.*importable"):
        fastrt.get(ref)


def test_serializing_and_failing_leave_nothing_to_the_cycle_collector(rt):
    class Thing:
        pass

    @fastrt.remote
    def fail():
        raise ValueError

    def look(thing):
        try:
            fastrt.get(ref)
        except ValueError:
            return

    ref = fail.remote()
    fastrt.wait([ref])
    thing = Thing()
    gone = weakref.ref(thing)
    gc.collect()
    gc.disable()
    try:
        fastrt.put([thing, np.ones(1000)])
        look(thing)  # the error knows this call's frame, and so the thing
        del thing
        assert gone() is None
    finally:
        gc.enable()


class CollectorState:
    """Comes back as whether the garbage collector was enabled while it was rebuilt."""

    def __reduce__(self):
        return gc.isenabled, ()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_off_while_many_objects_are_rebuilt_and_then_as_before(enabled):
    ref = fastrt.put([CollectorState(), [[k] for k in range(10_000)]])
    try:
        gc.enable() if enabled else gc.disable()
        assert fastrt.get(ref)[0] is False
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_collector_is_on_again_after_a_value_that_cannot_be_rebuilt():
    with pytest.raises(pickle.UnpicklingError):
        deserialize(PICKLE, b"\xff" * 10_000, [])
    assert gc.isenabled()
