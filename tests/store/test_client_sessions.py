"""Values and references around the end of a session: who is told what, and whose memory comes back."""

import contextlib
import os
import threading

import numpy as np
import pytest

import fastrt
from fastrt.errors import StaleReferenceError

MIB = 1 << 20


@fastrt.remote
def echo(x=None):
    return x


@fastrt.remote
def when(path, value=None):
    """Return `value` once a file exists."""
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.002)
    return value


def test_waiting_threads_end_with_an_error_when_another_shuts_down(runtime_dir, tmp_path):
    fastrt.init(1, "32MiB", runtime_dir=runtime_dir)
    ref = when.remote(str(tmp_path / "never"))
    ends = []

    def run(call):
        try:
            call()
        except fastrt.FastrtError as exc:
            ends.append(exc)

    calls = [
        lambda: fastrt.get(ref),
        lambda: fastrt.get([ref]),
        lambda: fastrt.wait([ref]),
        lambda: ref.future().result(),
    ]
    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    fastrt.wait([ref], timeout=0.05)
    fastrt.shutdown()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 4
    assert all(isinstance(end, (fastrt.NotInitializedError, StaleReferenceError)) for end in ends)


def test_views_stay_readable_after_shutdown_and_memory_of_the_rest_comes_back(runtime_dir):
    session = fastrt.init(1, "64MiB", runtime_dir=runtime_dir).session
    kept = fastrt.get(fastrt.put(np.arange(MIB)))
    inner = fastrt.get(fastrt.put({"a": np.full(5000, 3)}))["a"]
    forgotten = fastrt.put(np.ones(40 * MIB, np.uint8))
    assert fastrt.get(echo.remote(1)) == 1
    before = memory_of(session)
    fastrt.shutdown()
    assert memory_of(session) < before - 39 * MIB
    assert kept.sum() == sum(range(MIB))
    assert inner.tolist() == [3] * 5000
    with pytest.raises(StaleReferenceError):
        fastrt.get(forgotten)
    del kept, inner, forgotten


def test_reference_of_an_ended_session_is_refused_without_starting_another(runtime_dir):
    with fastrt.init(1, "32MiB", runtime_dir=runtime_dir):
        ref, array = fastrt.put(1), fastrt.put(np.ones(1000))
    for call in (
        lambda: fastrt.get(ref), lambda: fastrt.get([ref, array]), lambda: fastrt.wait([array]),
        lambda: fastrt.cancel(ref), lambda: ref.future().result(),
    ):  # fmt: skip
        with pytest.raises(StaleReferenceError, match="session that has ended"):
            call()
        assert not fastrt.is_initialized()
    with fastrt.init(1, "32MiB", runtime_dir=runtime_dir):
        mine = fastrt.put(2)
        assert mine != ref
        assert len({mine, ref}) == 2
        for call in (
            lambda: fastrt.get(ref), lambda: fastrt.get([mine, ref]), lambda: fastrt.wait([ref, mine]),
            lambda: fastrt.cancel(ref), lambda: echo.remote(ref), lambda: echo.remote([array]),
            lambda: fastrt.put([ref]), lambda: ref.future().result(), lambda: echo.remote(x=array),
        ):  # fmt: skip
            with pytest.raises(StaleReferenceError, match="session that has ended"):
                call()
        assert fastrt.get(mine) == 2


def memory_of(session):
    """Bytes of a session's segment that have pages, also after it has lost its name."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            if session in os.readlink(f"/proc/self/fd/{fd}"):
                return os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
    raise AssertionError(f"no descriptor of the segment of session {session} is open")
