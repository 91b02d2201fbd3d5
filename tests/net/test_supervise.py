"""Child processes: how they are started, noticed when they end, limited, and ended."""

import os
import signal
import subprocess
import sys

import pytest

from fastrt.net.supervise import RestartLimit, reap, spawn, wait_any

PIPE = subprocess.PIPE
MODULE = "json.tool"  # one with a main; these children evaluate something else


@pytest.fixture
def start():
    children = []

    def child(call, *arguments, **options):
        children.append(spawn(MODULE, call, *arguments, name="child", stdin=PIPE, stdout=PIPE, **options))
        return children[-1]

    yield child
    for one in children:
        reap(one, 0)


def test_child_runs_its_call_with_this_package_and_its_name(start):
    child = start(
        "import fastrt, gc, os; print(fastrt.__file__, sys.argv[1], gc.isenabled(), gc.get_freeze_count() > 0, "
        "os.getsid(0) == os.getpid(), open('/proc/self/comm').read(), end='')",
        "word",
    )
    where, word, *facts = child.stdout.read().decode().split()
    assert os.path.dirname(where) == os.path.dirname(sys.modules["fastrt"].__file__)
    assert (word, facts) == ("word", ["True", "True", "True", "fastrt-child"])
    assert reap(child)


def test_child_ends_as_python_does_but_leaves_its_objects_to_the_kernel(start):
    child = start(
        "import atexit, os, threading; atexit.register(print, 'function', end=' '); "
        "kept = type('Kept', (), {'__del__': eval('lambda self: write(1, b\"freed\")', {'write': os.write})})(); "
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread', end=' '))).start()"
    )
    assert child.stdout.read() == b"thread function "
    assert reap(child)
    assert child.returncode == 0


def test_child_that_loses_a_thread_by_an_error_says_so_and_ends_as_if_killed(start):
    child = start(
        "import fastrt.net.supervise as supervise, threading; supervise.fail_with_threads('service'); "
        "thread = threading.Thread(target=eval, args=['1 / 0']); thread.start(); thread.join(); print('goes on'); "
        "sys.stdin.read()",
        stderr=PIPE,
    )
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out) == (-signal.SIGKILL, b"")
    assert b"fastrt: the service failed, and another takes its place: ZeroDivisionError(" in err
    assert b"Traceback" in err


def test_child_stays_in_the_session_of_the_terminal_if_asked(start):
    child = start("import os; print(os.getsid(0))", new_session=False)
    assert int(child.stdout.read()) == os.getsid(0)


def test_child_that_ends_is_returned_and_the_others_are_not(start):
    first, second = start("sys.stdin.read()"), start("sys.stdin.read()")
    second.stdin.close()
    assert wait_any([first, second]) == [second]
    assert reap(second)
    assert second.returncode == 0
    first.send_signal(signal.SIGTERM)
    assert wait_any([first]) == [first]


def test_descriptor_wakes_who_waits_for_children(start):
    woken, wake = os.pipe()
    os.write(wake, b"!")
    assert wait_any([start("sys.stdin.read()")], woken) == []
    os.close(woken)
    os.close(wake)


def test_child_that_does_not_end_in_time_is_killed(start):
    child = start("print(flush=True), sys.stdin.read()")
    child.stdout.readline()
    assert not reap(child, 0)
    assert child.returncode == -signal.SIGKILL
    assert child.stdin.closed
    assert child.stdout.closed


def test_restarts_are_limited_within_a_window_of_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr("fastrt.net.supervise.time.monotonic", lambda: now)
    limit = RestartLimit(2, 10.0)
    assert limit.allows_another()
    assert limit.allows_another()
    assert not limit.allows_another()
    now = 10.0
    assert limit.allows_another()  # the first three are out of the window
    assert limit.allows_another()
    assert not limit.allows_another()
    assert not RestartLimit(0, 1.0).allows_another()
