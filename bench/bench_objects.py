"""The object table through the core: create, seal, get, release."""

import pytest

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles

KIND = 16
SIZES = {"64 B": 64, "1 KiB": 1 << 10, "64 KiB": 64 << 10}


@pytest.mark.benchmark(group="objects")
def test_put_release_int(measure, core: Client) -> None:
    measure(handles.put_scalar, core, 123456789)


@pytest.mark.benchmark(group="objects")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_create_seal_release(measure, core: Client, nbytes: int) -> None:
    def create_seal() -> None:
        handles.create(core, nbytes, KIND).seal()

    measure(create_seal)


@pytest.mark.benchmark(group="objects")
def test_get_int(measure, core: Client) -> None:
    ref = handles.put_scalar(core, 123456789)
    missing = object()
    assert measure(handles.read_scalar, core, ref, missing) == 123456789


@pytest.mark.benchmark(group="objects")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_get_bytes(measure, core: Client, nbytes: int) -> None:
    """Up to 1 KiB a copy, above a pinned view; both are released again."""
    ref = handles.create(core, nbytes, KIND).seal()
    _, _, data = measure(handles.read, core, ref)
    assert len(data) == nbytes


@pytest.mark.benchmark(group="objects")
def test_is_ready(measure, core: Client) -> None:
    ref = handles.put_scalar(core, 1)
    assert measure(handles.is_ready, core, ref)
