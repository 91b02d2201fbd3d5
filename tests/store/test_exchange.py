"""Values of other libraries go to the store by one copy, and come back over the store's own pages.

Each test looks up the addresses of a value in the process's mappings. A view is in the read-only mapping of the
segment, at the same address for each `get`. Private memory is in a private mapping of the same file, or a copy if it is
small.
"""

import array
import mmap
import threading
import tracemalloc

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import arrow
from fastrt.errors import SerializationError
from fastrt.store.serialize import serialize

pytestmark = pytest.mark.usefixtures("rt")

SIZE = 300_000  # float64: more than the 1 MiB from which on private memory is mapped and not copied


def mapping(address):
    """(permissions, inode) of the mapping that an address is in; ("", 0) for the heap and other memory of no file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, _, _, inode, *_ = line.split()
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                return (permissions, int(inode)) if int(inode) else ("", 0)
    raise AssertionError(f"{address:#x} is not mapped")


def where(value):
    """The address of an array's or a buffer's bytes."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0]
    return np.frombuffer(value, np.uint8).__array_interface__["data"][0]


@pytest.fixture
def segment(rt):
    """The inode of the session's segment."""
    permissions, inode = mapping(where(fastrt.get(fastrt.put(np.zeros(SIZE)))))
    assert permissions == "r--s"
    return inode


def put_twice_read(value):
    """One value from two calls of `get`."""
    ref = fastrt.put(value)
    return fastrt.get(ref), fastrt.get(ref)


def assert_views(first, second, segment, find=where):
    assert mapping(find(first)) == ("r--s", segment)
    assert find(first) == find(second)


def assert_private(first, second, segment, find=where):
    assert mapping(find(first)) == ("rw-p", segment)
    assert find(first) != find(second)


def peak_bytes(call):
    """The most memory that Python and NumPy have had during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- NumPy ----

GRID = np.arange(SIZE, dtype=float)
RECORD = np.dtype([("at", "M8[ns]"), ("value", "f4"), ("name", "S4")])
LAYOUTS = {
    "rows": GRID.reshape(500, 600),
    "columns": np.asfortranarray(GRID.reshape(500, 600)),
    "every second": np.arange(2 * SIZE, dtype=float)[::2],
    "backwards": GRID[::-1],
    "part of the columns": np.asfortranarray(np.arange(2.0 * SIZE).reshape(1000, 600))[::2],
    "axes in another order": GRID.reshape(50, 60, 100).transpose(2, 0, 1),
    "axes in another order, with gaps": np.arange(2.0 * SIZE).reshape(50, 60, 200)[:, :, ::2].transpose(1, 2, 0),
    "repeated": np.broadcast_to(GRID[:600], (500, 600)),
    "dates": GRID.astype("M8[s]"),
    "every second date": np.arange(2 * SIZE).astype("M8[s]")[::2],
    "records": np.zeros(SIZE, RECORD),
    "every second record": np.zeros(2 * SIZE, RECORD)[::2],
    "raw": np.zeros(SIZE, "V8"),
    "text": np.full(SIZE, "abc"),
}


def order_of_axes(array):
    return np.argsort([-abs(stride) for stride in array.strides], kind="stable").tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_array_is_a_view_with_its_order_of_axes_after_one_copy(name, segment):
    array = LAYOUTS[name]
    first, second = put_twice_read(array)
    assert (type(first), first.dtype, first.shape) == (np.ndarray, array.dtype, array.shape)
    assert first.tobytes() == array.tobytes()
    assert_views(first, second, segment)
    assert not first.flags.writeable
    assert order_of_axes(first) == order_of_axes(array)
    assert peak_bytes(lambda: fastrt.put(array)) < array.nbytes / 10


@pytest.mark.parametrize("name", LAYOUTS)
def test_array_inside_a_value_is_private_with_its_order_of_axes_after_one_copy(name, segment):
    array = LAYOUTS[name].view() if LAYOUTS[name].flags.writeable else LAYOUTS[name].copy(order="K")
    first, second = put_twice_read({"a": array})
    assert (first["a"].dtype, first["a"].shape) == (array.dtype, array.shape)
    assert first["a"].tobytes() == array.tobytes()
    assert_private(first["a"], second["a"], segment)
    assert order_of_axes(first["a"]) == order_of_axes(array)
    assert peak_bytes(lambda: fastrt.put([array])) < array.nbytes / 10


def test_alignment_of_a_record_type_is_kept():
    kind = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    assert fastrt.get(fastrt.put(np.zeros(3, kind))).dtype.isalignedstruct
    packed = np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 16})
    assert not fastrt.get(fastrt.put(np.zeros(3, packed))).dtype.isalignedstruct


def test_types_of_other_packages_are_views(segment):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(SIZE).astype(ml_dtypes.bfloat16).reshape(500, 600).T
    first, second = put_twice_read(array)
    assert first.dtype == array.dtype
    assert (first == array).all()
    assert_views(first, second, segment)
    inner, again = put_twice_read([np.repeat(array, 4)])
    assert inner[0].dtype == array.dtype
    assert_private(inner[0], again[0], segment)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("kind", ["matrix", "memmap", "recarray"])
def test_array_of_a_derived_class_keeps_it_and_is_private(kind, segment, tmp_path):
    if kind == "memmap":
        value = np.memmap(tmp_path / "map", "f8", "w+", shape=(SIZE,))
    elif kind == "matrix":
        value = np.asmatrix(GRID.reshape(500, 600))
    else:
        value = np.rec.array(np.zeros(SIZE, [("a", "i8"), ("b", "f8")]))
    first, second = put_twice_read(value)
    assert type(first) is type(value)
    assert first.dtype == value.dtype
    assert first.tolist() == value.tolist()
    assert_private(first, second, segment)
    assert peak_bytes(lambda: fastrt.put(value)) < value.nbytes / 10


@pytest.mark.parametrize("mask", [GRID % 3 == 0, np.ma.nomask], ids=["mask", "no mask"])
def test_masked_array_and_its_mask_are_private(mask, segment):
    value = np.ma.masked_array(GRID, mask, fill_value=-7, hard_mask=True)
    first, second = put_twice_read(value)
    assert type(first) is np.ma.MaskedArray
    assert first.tolist() == value.tolist()
    assert (first.fill_value, first.hardmask, first.mask.shape) == (-7, True, value.mask.shape)
    assert_private(first.data, second.data, segment)
    if mask is not np.ma.nomask:
        assert_private(first.mask, second.mask, segment)
    first[:] = 1
    assert fastrt.get(fastrt.put(value)).tolist() == value.tolist()


# ---- memory of Python ----


@pytest.mark.parametrize("form", ["B", "d", "2d", "strided"])
def test_memoryview_is_a_view_of_its_form(form, segment):
    value = {"B": memoryview(bytes(1 << 21)), "d": memoryview(GRID), "2d": memoryview(GRID.reshape(500, 600)),
             "strided": memoryview(GRID)[::2]}[form]  # fmt: skip
    first, second = put_twice_read(value)
    assert type(first) is memoryview
    assert (first.readonly, first.format, first.shape) == (True, value.format, value.shape)
    assert first.tobytes() == value.tobytes()
    assert_views(first, second, segment)


def test_memoryview_inside_a_value_is_private_if_it_was_writable(segment):
    data = bytearray(1 << 21)
    first, second = put_twice_read([memoryview(data), memoryview(bytes(data))])
    assert_private(first[0], second[0], segment)
    assert not first[0].readonly
    assert first[1].readonly
    small = fastrt.get(fastrt.put([memoryview(b"abc"), memoryview(b""), memoryview(np.zeros((2, 0)))]))
    assert [bytes(view) for view in small] == [b"abc", b"", b""]


def test_mmap_is_a_view(segment, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 8192)
    with open(tmp_path / "file", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        first, second = put_twice_read(mapped)
        inner, again = put_twice_read({"m": mapped})
        assert peak_bytes(lambda: fastrt.put(mapped)) < len(mapped) / 10
        mapped.close()  # nothing keeps an export
    assert bytes(first) == bytes(range(256)) * 8192
    assert_views(first, second, segment)
    assert_private(inner["m"], again["m"], segment)


@pytest.mark.parametrize("value", [bytes(1 << 22), bytearray(1 << 22)], ids=["bytes", "bytearray"])
def test_bytes_are_copied_once_by_put(value):
    for one in (value, [value], {"a": (1, value)}):
        assert fastrt.get(fastrt.put(one)) == one
        assert peak_bytes(lambda one=one: fastrt.put(one)) < len(value) / 10


def test_long_text_of_a_temporary_value_is_kept():
    class Maker:
        def __reduce__(self):
            return str, ("é" * 200_000 + str(id(self)),)

    made = fastrt.get(fastrt.put([Maker() for _ in range(20)]))
    assert all(text.startswith("é" * 200_000) and len(text) > 200_000 for text in made)


def test_large_pickle_of_many_frames_comes_back():
    value = [{"key": f"{i}" * 9, "other": (i, [b"x" * i])} for i in range(3000)]
    value += [b"y" * 100_000, array.array("d", GRID)]
    assert fastrt.get(fastrt.put({"v": value}))["v"] == value
    assert fastrt.get(fastrt.put(value)) == value


# ---- Arrow ----


def arrow_places(value, least=1024):
    """The addresses of all large buffers of Arrow data."""
    columns = getattr(value, "columns", [value])
    chunks = [chunk for column in columns for chunk in getattr(column, "chunks", [column])]
    return [one.address for chunk in chunks for one in chunk.buffers() if one is not None and one.size >= least]


def arrow_values(pa):
    numbers = pa.array(GRID, mask=GRID % 5 == 0)
    texts = pa.array([f"text {i % 1000}" for i in range(SIZE)])
    table = pa.table({"n": numbers, "t": texts})
    return {
        "array": numbers,
        "booleans": pa.array(np.arange(10 * SIZE) % 3 == 0),
        "texts": texts,
        "dictionary": texts.dictionary_encode(),
        "lists": pa.array([[i, i + 1] for i in range(SIZE)]),
        "struct": pa.StructArray.from_arrays([numbers, texts], ["n", "t"]),
        "texts as views": texts.cast(pa.string_view()),
        "record batch": table.to_batches()[0],
        "chunked array": pa.chunked_array([numbers, numbers.slice(0, SIZE - 7)]),
        "table": table,
    }


@pytest.mark.parametrize("name", ["array", "booleans", "texts", "dictionary", "lists", "struct", "texts as views",
                                  "record batch", "chunked array", "table"])  # fmt: skip
def test_arrow_data_are_views_also_inside_a_value(name, segment):
    pa = pytest.importorskip("pyarrow")
    value = arrow_values(pa)[name]
    ref = fastrt.put(value)
    first, second = fastrt.get(ref), fastrt.get(ref)
    assert type(first) is type(value)
    assert first.equals(value)
    first.validate(full=True)
    places = arrow_places(first)
    assert len(places) == len(arrow_places(value)) > 0
    assert places == arrow_places(second)
    assert {mapping(place) for place in places} == {("r--s", segment)}
    inner = fastrt.get(fastrt.put({"v": [value]}))["v"][0]
    assert {mapping(place) for place in arrow_places(inner)} == {("r--s", segment)}


def test_slice_of_arrow_data_stores_only_itself():
    pa = pytest.importorskip("pyarrow")
    for value in arrow_values(pa).values():
        part = value.slice(1000, 100)
        assert serialize(part).nbytes < 100_000
        assert fastrt.get(fastrt.put(part)).equals(part)


def test_arrow_table_keeps_its_schema_its_chunks_and_its_own_types(segment):
    pa = pytest.importorskip("pyarrow")
    form = pa.schema([pa.field("n", pa.int64(), nullable=False, metadata={"unit": "m"}), pa.field("d", pa.string())],
                     metadata={"made": "here"})  # fmt: skip
    table = pa.table([pa.array([1, 2]), pa.array(["a", None])], schema=form)
    got = fastrt.get(fastrt.put(table))
    assert got.schema.equals(form, check_metadata=True)
    assert got.equals(table)
    ragged = pa.table({"a": pa.chunked_array([[1, 2], [3]]), "b": pa.chunked_array([[1], [2, 3]])})
    got = fastrt.get(fastrt.put(ragged))
    assert [got[name].num_chunks for name in "ab"] == [2, 2]
    assert got.equals(ragged)
    for empty in (pa.table({}), table.slice(0, 0), form.empty_table()):
        assert fastrt.get(fastrt.put(empty)).equals(empty)
    pairs = pa.array([[1, 2]] * SIZE, pa.list_(pa.int8(), 2))
    own = pa.table({"t": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int8(), [2]), pairs)})
    got = fastrt.get(fastrt.put(own))
    assert got.schema == own.schema
    assert got.equals(own)


def test_arrow_buffer_and_tensor_share_the_store(segment):
    pa = pytest.importorskip("pyarrow")
    first, second = put_twice_read(pa.py_buffer(GRID))
    assert_views(first, second, segment, lambda one: one.address)
    tensor = fastrt.get(fastrt.put(pa.Tensor.from_numpy(GRID.reshape(500, 600), ["a", "b"])))
    assert tensor.dim_names == ("a", "b") or list(tensor.dim_names) == ["a", "b"]
    assert mapping(where(tensor.to_numpy())) == ("rw-p", segment)


class Sealed:
    """A value of a library without a pickle."""

    def __init__(self, inner):
        self.inner = inner

    def __reduce_ex__(self, protocol):
        raise TypeError("no pickle")


class Streams(Sealed):
    def __arrow_c_stream__(self, requested_schema=None):
        return self.inner.__arrow_c_stream__(requested_schema)


class Arrays(Sealed):
    def __arrow_c_array__(self, requested_schema=None):
        return self.inner.__arrow_c_array__(requested_schema)


class Tensors(Sealed):
    def __dlpack__(self, **options):
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()


def test_exporter_of_the_arrow_c_data_interface_comes_as_arrow_data(segment):
    pa = pytest.importorskip("pyarrow")
    values = arrow_values(pa)
    for exporter, value in [(Streams(values["table"]), values["table"]), (Arrays(values["texts"]), values["texts"]),
                            (Streams(values["chunked array"]), values["chunked array"]),
                            (values["table"].to_reader(), values["table"])]:  # fmt: skip
        got = fastrt.get(fastrt.put(exporter))
        assert type(got) is type(value)
        assert got.equals(value)
        assert {mapping(place) for place in arrow_places(got)} == {("r--s", segment)}
    got = fastrt.get(fastrt.put({"x": [Arrays(values["array"])]}))["x"][0]
    assert got.equals(values["array"])


def test_exporter_of_dlpack_comes_as_an_array(segment):
    got = fastrt.get(fastrt.put({"x": Tensors(GRID)}))["x"]
    assert (got == GRID).all()
    assert mapping(where(got))[1] == segment


def test_value_without_any_way_is_refused_with_its_own_error():
    with pytest.raises(SerializationError, match=r"at value\[1\]: no pickle"):
        fastrt.put([GRID, Sealed(1)])


# ---- pandas, Polars, SciPy ----


def test_columns_of_pandas_are_private_and_those_of_arrow_views(segment):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"f": GRID, "i": np.arange(SIZE), "d": pd.date_range("2026", periods=SIZE, freq="s")})
    frame["a"] = pd.array(np.arange(SIZE), dtype="int64[pyarrow]")
    frame["t"] = pd.array([f"text {i % 100}" for i in range(SIZE)], dtype="string[pyarrow]")
    first, second = put_twice_read(frame)
    assert first.equals(frame)
    for name in "fid":
        kept, other = (np.asarray(one[name].array._ndarray) for one in (first, second))
        assert_private(kept, other, segment)
    for name in "at":
        places = arrow_places(first[name].array.__arrow_array__())
        assert places == arrow_places(second[name].array.__arrow_array__())
        assert {mapping(place) for place in places} == {("r--s", segment)}
    first.loc[3, ["f", "a"]] = -1
    first.loc[3, "t"] = "changed"
    assert second.equals(frame)
    assert peak_bytes(lambda: fastrt.put(frame)) < GRID.nbytes / 2
    rows = fastrt.get(fastrt.put(frame[["f", "i"]].iloc[::2]))
    assert rows.equals(frame[["f", "i"]].iloc[::2])


def polars_places(frame):
    """The addresses of all large buffers of a frame."""
    parts = [memoryview(part) for part in arrow.take(frame)[1]]
    return [where(part) for part in parts if part.nbytes >= 100_000]  # bits move when they are cut


def polars_frame(pl):
    return pl.DataFrame({
        "f": GRID, "n": [None if i % 7 == 0 else i for i in range(SIZE)], "b": GRID > 5,
        "t": [f"a text that is not short {i % 100}" for i in range(SIZE)],
        "d": pl.Series(np.arange(SIZE)).cast(pl.Datetime("us", "UTC")), "l": [[i] for i in range(SIZE)],
        "s": [{"x": i} for i in range(SIZE)], "m": pl.Series(np.arange(SIZE)).cast(pl.Decimal(20, 2)),
        "a": pl.Series(np.zeros((SIZE, 2), "i2")), "z": pl.Series([b"bytes of binary data"] * SIZE),
    })  # fmt: skip


def test_polars_frames_and_series_are_views(segment):
    pl = pytest.importorskip("polars")
    frame = polars_frame(pl)
    for value in [frame, frame.slice(5, SIZE - 10), pl.concat([frame, frame], rechunk=False), frame["t"], frame["l"]]:
        first, second = put_twice_read(value)
        assert type(first) is type(value)
        assert first.equals(value)
        one, two = (x if isinstance(x, pl.DataFrame) else x.to_frame() for x in (first, second))
        assert one.schema == (value if isinstance(value, pl.DataFrame) else value.to_frame()).schema
        assert polars_places(one) == polars_places(two)
        assert {mapping(place) for place in polars_places(one)} == {("r--s", segment)}
    first, second = put_twice_read(frame)
    first[3, "f"] = -1.0
    assert first[3, "f"] == -1
    assert second.equals(frame)
    assert peak_bytes(lambda: fastrt.put(frame)) < GRID.nbytes / 10


def test_polars_types_that_arrow_does_not_have_are_views_too(segment):
    pl = pytest.importorskip("polars")
    value = pl.Series("o", [1, None] * 40_000, dtype=pl.Int128)
    first, second = put_twice_read(value.to_frame())
    assert first.equals(value.to_frame())
    assert polars_places(first) == polars_places(second)
    assert {mapping(place) for place in polars_places(first)} == {("r--s", segment)}


def test_small_empty_and_cut_polars_frames_come_back_equal():
    pl = pytest.importorskip("polars")
    others = pl.DataFrame({
        "none": [None] * SIZE, "c": pl.Series([f"{i % 9}" for i in range(SIZE)], dtype=pl.Categorical),
        "e": pl.Series(["b", "a", None] * (SIZE // 3), dtype=pl.Enum(["b", "a"])),
    })  # fmt: skip
    whole = polars_frame(pl).hstack(others)
    for frame in [whole, whole.head(1), whole.head(0), whole.slice(1003, 50), pl.DataFrame(), pl.DataFrame(height=3),
                  pl.concat([whole.slice(at, 10) for at in (0, 9, 5005)], rechunk=False),
                  pl.DataFrame({"x": pl.Series([1], dtype=pl.UInt64), "é": [[[{"a": []}]]]})]:  # fmt: skip
        got = fastrt.get(fastrt.put({"v": frame}))["v"]
        assert (got.schema, got.shape) == (frame.schema, frame.shape)
        assert got.equals(frame)
        assert serialize(frame).nbytes < 200_000 or frame is whole
    series = whole["t"].head(3)
    got = fastrt.get(fastrt.put(series))
    assert (got.name, got.to_list()) == ("t", series.to_list())


def test_polars_needs_no_pyarrow(program):
    pytest.importorskip("polars")
    out, _ = program("""
        import sys

        sys.modules["pyarrow"] = None
        import fastrt
        import polars as pl


        @fastrt.remote
        def doubled(frame):
            return frame * 2


        if __name__ == "__main__":
            with fastrt.init(num_workers=1):
                frame = pl.DataFrame({"x": range(100_000)})
                assert fastrt.get(doubled.remote(frame)).equals(frame * 2)
                print("done")
    """).finish()
    assert out == "done\n"


def test_polars_frame_keeps_its_memory_until_the_last_part_of_it_is_gone():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"x": GRID, "y": GRID + 1})
    ref = fastrt.put(frame)
    got = fastrt.get(ref)
    del ref
    part = got.slice(10, 1000)["y"]
    del got
    others = [fastrt.put(np.full(SIZE, -1.0)) for _ in range(3)]  # would be placed in memory that was freed
    assert part.to_list() == (GRID[10:1010] + 1).tolist()
    again = fastrt.get(fastrt.put(part.to_frame()))
    assert again["y"].sum() == part.sum()
    thread = threading.Thread(target=lambda frames: frames.clear(), args=([part.to_frame(), again],))
    thread.start()
    thread.join()
    del part, again, others  # the fixture finds memory that is still held


@pytest.mark.parametrize("form", ["csr_matrix", "csc_array", "coo_array", "bsr_matrix", "dia_matrix"])
def test_arrays_of_a_sparse_matrix_are_private(form, segment):
    sparse = pytest.importorskip("scipy.sparse")
    made = sparse.random_array((3000, 3000), density=0.05, rng=np.random.default_rng(1), dtype=float)
    value = getattr(sparse, form)(made if form != "dia_matrix" else sparse.eye(SIZE))
    first, second = put_twice_read(value)
    assert type(first) is type(value)
    assert abs(first - value).sum() == 0
    assert_private(first.data, second.data, segment)
    for name in ("indices", "indptr", "row", "col"):
        if getattr(value, name, np.zeros(0)).nbytes >= 1024:
            assert mapping(where(getattr(first, name))) == ("rw-p", segment)


# ---- tensors ----


def test_tensors_of_torch_are_private_and_views_on_request(segment):
    torch = pytest.importorskip("torch")
    values = [
        torch.arange(SIZE), torch.ones(SIZE * 8, dtype=torch.bfloat16), torch.arange(2 * SIZE)[::2],
        torch.ones(SIZE * 8).to(torch.float8_e4m3fn), torch.ones(SIZE * 2, requires_grad=True),
        torch.rand(8, 3, 200, 200).contiguous(memory_format=torch.channels_last)[:, :, :150],
        torch.full((SIZE,), 1 + 2j).conj(),
    ]  # fmt: skip
    for value in values:
        ref = fastrt.put(value)
        first, second, view = fastrt.get(ref), fastrt.get(ref), fastrt.get(ref, copy=False)
        assert (first.dtype, first.shape, first.requires_grad) == (value.dtype, value.shape, value.requires_grad)
        assert torch.equal(first.to(torch.complex128), value.to(torch.complex128))
        assert order_of_axes_of(first) == order_of_axes_of(value)
        assert_private(first, second, segment, lambda one: one.data_ptr())
        assert mapping(view.data_ptr()) == ("r--s", segment)
        assert peak_bytes(lambda value=value: fastrt.put(value)) < value.numel() * value.element_size() / 10
    model = torch.nn.Linear(1000, 1000)
    got = fastrt.get(fastrt.put(model))
    assert mapping(got.weight.data_ptr()) == ("rw-p", segment)
    assert torch.equal(got.weight, model.weight)


def order_of_axes_of(tensor):
    return np.argsort([-stride for stride in tensor.stride()], kind="stable").tolist()


def test_array_of_the_store_goes_to_torch_by_dlpack(segment):
    torch = pytest.importorskip("torch")
    private = fastrt.get(fastrt.put(GRID), copy=True)
    tensor = torch.from_dlpack(private)
    assert mapping(tensor.data_ptr()) == ("rw-p", segment)
    got = np.from_dlpack(fastrt.get(fastrt.put(torch.arange(SIZE))))
    assert mapping(where(got)) == ("rw-p", segment)


def test_jax_arrays_are_views_that_no_call_changes(segment):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    long = jnp.arange(4 * SIZE)
    for value in [long, long.astype(jnp.bfloat16), jnp.ones((500, 600, 2))[::2], jnp.arange(9)]:
        first, second = put_twice_read(value)
        inner = fastrt.get(fastrt.put([value]))[0]
        assert type(first) is type(value)
        assert first.dtype == value.dtype
        assert bool((first == value).all())
        if value.nbytes > 1024:
            assert_views(first, second, segment, lambda one: one.unsafe_buffer_pointer())
            assert mapping(inner.unsafe_buffer_pointer()) == ("r--s", segment)
        changed = jax.jit(lambda x: x + 1, donate_argnums=0)(first)
        assert bool((changed == value + 1).all())
        assert bool((second == value).all())
    tensor = np.from_dlpack(fastrt.get(fastrt.put(jnp.arange(SIZE))))
    assert mapping(where(tensor)) == ("r--s", segment)


def test_array_of_the_store_goes_to_jax_by_dlpack(segment):
    jax = pytest.importorskip("jax")
    private = fastrt.get(fastrt.put(GRID.astype(np.float32)), copy=True)
    array = jax.dlpack.from_dlpack(private)
    assert array.unsafe_buffer_pointer() == where(private)
    assert mapping(where(private)) == ("rw-p", segment)
