"""How many workers there should be, and what the zygote says of them."""

import socket

import pytest

from fastrt.node.worker_pool import Pool
from fastrt.store.messages import Forked, ProcessEnded, write_message


@pytest.fixture
def pool():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool = Pool(ours, size=2, spare=4, most=10)
    pool.zygote_end = theirs
    yield pool
    pool.pids.clear()  # invented ones: nobody may be killed for them
    pool.kill()
    theirs.close()


def have(pool, workers, blocked=0):
    pool.pids = set(range(1000, 1000 + workers))
    pool.blocked = set(range(1000, 1000 + blocked))


@pytest.mark.parametrize(
    ("workers", "blocked", "tasks_wait", "missing"),
    [
        (0, 0, False, 2), (1, 0, True, 1), (2, 0, True, 0),
        (2, 1, True, 1), (2, 2, False, 2), (3, 2, True, 1),
        (5, 4, True, 1), (6, 5, True, 0), (6, 6, False, 0),
        (6, 6, True, 1), (9, 9, True, 1), (9, 8, True, 0),
        (10, 10, True, 0), (4, 1, True, 0),
    ],
)  # fmt: skip
def test_missing_workers_follow_those_that_sleep(pool, workers, blocked, tasks_wait, missing):
    have(pool, workers, blocked)
    assert pool.missing(tasks_wait) == missing


def test_workers_that_are_starting_count_as_there(pool):
    pool.starting = 2
    assert pool.missing(True) == 0
    have(pool, 4)
    assert not pool.may_grow()


def test_surplus_is_what_nobody_needs_now(pool):
    have(pool, 6, 2)
    assert pool.surplus() == 2


def report(pool, message):
    pool.zygote_end.send(write_message(message))
    return pool.receive()


def test_reports_of_the_zygote_are_followed(pool):
    pool.starting = 1
    assert report(pool, Forked(5001, None)) == (Forked(5001, None), [])
    assert (pool.pids, pool.starting) == ({5001}, 0)
    pool.blocked.add(5001)
    assert report(pool, ProcessEnded(5001, 9)) == (ProcessEnded(5001, 9), [])
    assert (pool.pids, pool.blocked) == (set(), set())


def test_end_of_the_zygote_is_reported(pool):
    pool.zygote_end.close()
    assert pool.receive() is None
