"""Workers wait for each other: also one in a lost one's place, and one that comes again after its time was up."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastrt.ps import ServerLostError, TableTimeoutError
from fastrt.ps.wire import VERSION, dial


class Waiting:
    """A worker in a barrier, in a thread."""

    def __init__(self, session: Any, timeout_s: float = 20.0) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(session, timeout_s))
        self._thread.start()

    def _run(self, session: Any, timeout_s: float) -> None:
        try:
            session.barrier(timeout_s)
        except BaseException as error:
            self.error = error

    def end(self, timeout_s: float = 10.0) -> bool:
        """Wait for its end; whether it came, and was a good one."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.error is None


def there(place: Any) -> set[int]:
    return set(place.head._barrier._there)


def test_newcomer_with_a_lost_workers_rank_goes_on_with_the_round_that_is_open(
    site, together, wait_until: Callable[..., None]
) -> None:
    place = site(1, 2)
    stays, lost = place.worker(0), place.worker(1)
    for _ in range(3):
        together(lambda: stays.barrier(20), lambda: lost.barrier(20))
    hello = {"version": VERSION, "client": lost._client}
    with contextlib.closing(dial(None, place.head.address, lost._trust, 5.0)) as wire:
        wire.call(hello, timeout_s=60)
        wire.send({"op": "barrier", "rank": 1, "round": 4, "timeout": 60})
        wait_until(lambda: there(place) == {1}, "the worker in the barrier")
    wait_until(lambda: not there(place), "its end: its successor has not been there")
    one = Waiting(stays)
    wait_until(lambda: there(place) == {0}, "the worker in the barrier")
    assert not one.end(0.3)
    newcomer = place.worker(1)
    newcomer.barrier(20)
    assert one.end()
    second = Waiting(newcomer)
    wait_until(lambda: there(place) == {1}, "the newcomer in the next barrier")
    assert not second.end(0.3)
    stays.barrier(20)
    assert second.end()


def test_worker_whose_time_was_up_comes_again_to_the_same_round(site) -> None:
    place = site(1, 2)
    first, second = place.worker(0), place.worker(1)
    with pytest.raises(TableTimeoutError, match=r"worker \[1\] did not come to the barrier within 0.05 s"):
        first.barrier(0.05)
    other = Waiting(second)
    assert not other.end(0.3)  # the first one is not there
    first.barrier(20)
    assert other.end()


def test_end_of_the_cluster_ends_a_barrier(site, wait_until: Callable[..., None]) -> None:
    place = site(1, 2)
    waits = Waiting(place.worker(0), 60)
    wait_until(lambda: there(place) == {0}, "the worker in the barrier")
    place.head.close()
    assert not waits.end()
    assert isinstance(waits.error, ServerLostError)
