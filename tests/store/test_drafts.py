"""`fastrt.empty`: an array that is filled in the store, and sealed by `put` where it lies."""

import gc
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt.errors import ObjectStoreFullError
from fastrt.store import client as store_client

pytestmark = pytest.mark.usefixtures("rt")


def bytes_used():
    gc.collect()
    return fsck.usage(store_client.require().client)["bytes_used"]


def offset_of(rt_array, base_array):
    return rt_array.__array_interface__["data"][0] - base_array.__array_interface__["data"][0]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", "i4", "?", "c16", "S7", "U3", "M8[ns]", [("a", "i4"), ("b", "f8", 2)], "V5"])
@pytest.mark.parametrize("shape", [(), 0, 3, (2, 3), (500, 400), (4, 1, 3), (1, 7), (0, 5), (1,) * 20])
def test_empty_array_is_an_array_that_put_seals(shape, dtype, order):
    array = fastrt.empty(shape, dtype, order)
    like = np.zeros(shape, dtype, order=order)
    assert type(array) is np.ndarray
    assert (array.dtype, array.shape) == (like.dtype, like.shape)
    assert array.flags.c_contiguous == like.flags.c_contiguous
    array[...] = like
    got = fastrt.get(fastrt.put(array))
    assert (got.dtype, got.shape, got.tobytes()) == (like.dtype, like.shape, like.tobytes())
    assert got.flags.f_contiguous == like.flags.f_contiguous


def test_put_of_an_empty_array_copies_nothing_and_makes_it_read_only(rt):
    before = bytes_used()
    array = fastrt.empty(1_000_000)
    used = bytes_used()
    assert used - before >= array.nbytes
    array[:] = 7
    ref = fastrt.put(array)
    assert bytes_used() == used
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    got, other = fastrt.get(ref), fastrt.put(np.zeros(1_000_000))
    # The array is in the mapping for writing, the view in the one for reading: other arrays are as far apart.
    second = fastrt.empty(10_000)
    assert offset_of(array, got) == offset_of(second, fastrt.get(fastrt.put(second)))
    assert (got == 7).all()
    del other


def test_sealed_array_keeps_its_value_when_the_reference_is_gone(rt):
    array = fastrt.empty(1_000_000)
    array[:] = 3
    ref = fastrt.put(array)
    assert handles.describe(ref.owner, ref)["pins"] == [ref.owner.index]
    part = array[10:20]
    del ref
    others = [fastrt.put(np.zeros(1_000_000)) for _ in range(20)]
    assert (array == 3).all()
    del array
    gc.collect()
    assert (part == 3).all()
    del others


def test_memory_of_an_empty_array_that_is_not_put_comes_back(rt):
    before = bytes_used()
    array = fastrt.empty(1_000_000)
    view = array[5:]
    del array
    assert bytes_used() > before
    del view
    assert bytes_used() == before


def test_memory_of_a_sealed_array_comes_back(rt):
    before = bytes_used()
    array = fastrt.empty(1_000_000)
    ref = fastrt.put(array)
    del array
    assert bytes_used() > before
    del ref
    assert bytes_used() == before


def test_memory_of_an_empty_array_comes_back_when_its_worker_is_killed(rt):
    @fastrt.remote
    def die():
        array, sealed = fastrt.empty(1_000_000), fastrt.empty(1_000_000)
        array[:] = 1
        ref = fastrt.put(sealed)
        if ref is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    before = bytes_used()
    with pytest.raises(fastrt.WorkerCrashedError):
        fastrt.get(die.options(max_retries=0).remote())
    fastrt.get([fastrt.remote(abs).remote(-1) for _ in range(4)])
    for _ in range(500):
        if bytes_used() < before + 1_000_000:
            break
        fastrt.wait([fastrt.remote(abs).remote(1)])
    assert bytes_used() < before + 1_000_000
    assert not fsck.fsck(store_client.require().client, True)


def test_part_reshaped_view_and_changed_array_are_copied(rt):
    array = fastrt.empty((100, 100))
    array[...] = 1
    for part in (array[:50], array.reshape(-1), array.T, array.view("i8"), [array]):
        fastrt.put(part)
        assert array.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2.5 deprecates it
        array.shape = (50, 200)
    got = fastrt.get(fastrt.put(array))
    assert got.shape == (50, 200)
    again = fastrt.get(fastrt.put(array))
    assert again.shape == (50, 200)


def test_array_whose_type_was_set_is_put_with_that_type(rt):
    array = fastrt.empty(1000, "f8")
    array[:] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2.5 deprecates it
        array.dtype = "i8"
    got = fastrt.get(fastrt.put(array))
    assert got.dtype == np.dtype("i8")
    assert (got == array).all()


def test_argument_and_result_of_a_task_are_copied(rt):
    @fastrt.remote
    def double(x):
        result = fastrt.empty(x.shape)
        np.multiply(x, 2, out=result)
        return result

    @fastrt.remote
    def make():
        result = fastrt.empty(100_000)
        result[:] = 5
        return fastrt.put(result)

    array = fastrt.empty(100_000)
    array[:] = 4
    assert (fastrt.get(double.remote(array)) == 8).all()
    assert (fastrt.get(fastrt.get(make.remote())) == 5).all()


def test_array_in_a_forked_child_is_copied(rt):
    array = fastrt.empty(100_000)
    array[:] = 6
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if (fastrt.get(fastrt.put(array)) == 6).all() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert array.flags.writeable
    assert (fastrt.get(fastrt.put(array)) == 6).all()


AFTER = """
import fastrt, numpy as np
if __name__ == "__main__":
    with fastrt.init(num_workers=1, object_store_memory=64 << 20):
        array, sealed = fastrt.empty(100_000), fastrt.empty(100_000)
        sealed[:] = 9
        ref = fastrt.put(sealed)
    assert (sealed == 9).all()
    with fastrt.init(num_workers=1, object_store_memory=64 << 20):
        assert fastrt.get(fastrt.put(array)).shape == (100_000,)
        assert (fastrt.get(fastrt.put(sealed)) == 9).all()
    print("whole")
"""


def test_array_outlives_its_session(tmp_path):
    (tmp_path / "after.py").write_text(AFTER)
    run = subprocess.run([sys.executable, tmp_path / "after.py"], capture_output=True, text=True, timeout=60)
    assert run.stdout == "whole\n", run.stderr


def test_what_cannot_be_an_array_in_the_store_is_refused(rt):
    with pytest.raises(TypeError, match="without objects"):
        fastrt.empty(3, object)
    with pytest.raises(TypeError, match="fixed size"):
        fastrt.empty(3, "S0")
    with pytest.raises(ValueError, match="negative"):
        fastrt.empty((3, -1))
    with pytest.raises(ValueError, match="order"):
        fastrt.empty(3, order="K")
    with pytest.raises(TypeError):
        fastrt.empty(2.5)
    with pytest.raises(ObjectStoreFullError):
        fastrt.empty(1 << 40)
