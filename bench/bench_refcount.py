"""References: taken and dropped, and those that values contain."""

import pytest

from fastrt._core import handles
from fastrt._core.clients import Client

KIND = 16


@pytest.mark.benchmark(group="reference counts")
def test_acquire_release_held(measure, core: Client) -> None:
    """A further reference of a process that holds the object already: only its private count changes."""
    ref = handles.put_scalar(core, 1)
    measure(handles.acquire, core, ref.objref, ref.index)


@pytest.mark.benchmark(group="reference counts")
def test_first_hold_and_delete(measure, core: Client) -> None:
    """An object's first reference and its last: the holder bit is set, cleared, and the object deleted."""
    measure(handles.put_scalar, core, 1)


@pytest.mark.benchmark(group="reference counts")
@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_contain_release(measure, core: Client, count: int) -> None:
    """A value that contains `count` references: each is counted at the seal and uncounted at the end."""
    refs = [handles.put_scalar(core, k) for k in range(count)]

    def contain() -> None:
        handles.create(core, 8, KIND, count).seal(refs)

    measure(contain, per=count)


@pytest.mark.benchmark(group="reference counts")
@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_read_contained(measure, core: Client, count: int) -> None:
    """References to all that a value contains, taken and dropped."""
    refs = [handles.put_scalar(core, k) for k in range(count)]
    outer = handles.create(core, 8, KIND, count).seal(refs)
    measure(handles.contained, core, outer, per=count)
