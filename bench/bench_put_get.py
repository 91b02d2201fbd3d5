"""put and get through the public API, by type and size; each value is released again within its own time."""

import numpy as np
import pytest

import fastrt

SIZES = {"1 KiB": 1 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
SMALL = {
    "int": 123456789,
    "str": "a few words of text",
    "tuple": (1, "two", 3.0),
    "dict": {"name": "x", "values": [1, 2, 3]},
}


@pytest.mark.benchmark(group="put, small")
@pytest.mark.parametrize("value", SMALL.values(), ids=SMALL.keys())
def test_put_small(measure, rt: fastrt.Runtime, value: object) -> None:
    measure(fastrt.put, value)


@pytest.mark.benchmark(group="get, small")
@pytest.mark.parametrize("value", SMALL.values(), ids=SMALL.keys())
def test_get_small(measure, rt: fastrt.Runtime, value: object) -> None:
    assert measure(fastrt.get, fastrt.put(value)) == value


@pytest.mark.benchmark(group="put, arrays")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_put_array(measure, rt: fastrt.Runtime, nbytes: int) -> None:
    """Steady state: each value reuses the memory of the value before."""
    array = np.arange(nbytes, dtype=np.uint8)
    measure(fastrt.put, array, nbytes=nbytes)


@pytest.mark.benchmark(group="put, bytes")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_put_bytes(measure, rt: fastrt.Runtime, nbytes: int) -> None:
    measure(fastrt.put, np.arange(nbytes, dtype=np.uint8).tobytes(), nbytes=nbytes)


@pytest.mark.benchmark(group="get, arrays")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_get_array(measure, rt: fastrt.Runtime, nbytes: int) -> None:
    """A view, of the same cost for any size; made and released each time."""
    ref = fastrt.put(np.arange(nbytes, dtype=np.uint8))
    assert measure(fastrt.get, ref).nbytes == nbytes


@pytest.mark.benchmark(group="get, lists")
def test_get_1000(measure, rt: fastrt.Runtime) -> None:
    refs = [fastrt.put(k) for k in range(1000)]
    assert measure(fastrt.get, refs, per=1000) == list(range(1000))
