"""`breakpoint()` in tasks and calls, and `fastrt debug` at a real terminal."""

import contextlib
import os
import signal
import threading
import time

import pytest

import fastrt
from fastrt.errors import TaskCancelledError, TaskError, WorkerCrashedError
from fastrt.store import client as store_client
from fastrt.store import debugging
from support.terminal import Terminal


@fastrt.remote(max_retries=0)
def doubles(x):
    y = x + 1
    breakpoint()
    z = y * 2
    return z  # noqa: RET504  (a test stops here)


@fastrt.remote
class Counter:
    def __init__(self):
        self.total = 0

    def add(self, n):
        self.total += n
        breakpoint()
        return self.total

    def read(self):
        return self.total


@fastrt.remote
class Async:
    async def add(self, n):
        breakpoint()
        return n + 1


@pytest.fixture
def debug(rt, runtime_dir):
    """Start `fastrt debug` at a terminal."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            terminal = Terminal("debug", *map(str, words), env={**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)})
            stack.callback(terminal.close)
            return terminal

        yield start


@pytest.fixture
def stops(rt, wait_until):
    """Wait until so many tasks stand in the debugger; the stops."""

    def wait(count=1):
        found = []

        def there():
            found[:] = debugging.waiting(debugging.folder_of(store_client.require().socket_path))
            return len(found) == count

        wait_until(there, f"{count} tasks in the debugger")
        return found

    return wait


def test_whole_pdb_looks_steps_and_changes_values(debug, stops):
    ref = doubles.remote(1)
    (stop,) = stops()
    assert (stop.kind, stop.name, stop.function, stop.file) == ("task", "doubles", "doubles", __file__)
    terminal = debug()
    terminal.expect(f"task doubles (pid {stop.pid}) waits in a debugger at {__file__}:{stop.line}.")
    terminal.expect("-> z = y * 2\n(Pdb) ")
    assert terminal.ask("p y") == "2\n"
    assert terminal.ask("y = 20") == ""
    assert "-> return z" in terminal.ask("n")
    assert "[y, z]" not in terminal.ask("pp [y, z]")
    assert terminal.ask("w").count("> ") == 2  # one frame and its line: those of fastrt are left out
    assert "cannot be restarted" in terminal.ask("run")
    terminal.send("interact")
    terminal.expect(">>> ")
    assert terminal.ask("print(y + 1)", ">>> ") == "21\n"
    assert terminal.ask("exit()").strip() in ("", "*exit from pdb interact command*")  # from Python 3.13 on
    terminal.send("c")
    terminal.expect("the task goes on without the debugger\n")
    assert terminal.leave() == 0
    assert fastrt.get(ref) == 40
    assert stops(0) == []


def test_timeouts_of_task_and_get_stand_still(debug, stops, wait_until):
    ref = doubles.options(timeout=3).remote(1)
    (stop,) = stops()
    late = time.monotonic() + 3.3
    got = []
    # What is left of this limit after the debugger is the time in which the task ends, on a busy machine too.
    reader = threading.Thread(target=lambda: got.append(fastrt.get(ref, timeout=2.5)))
    reader.start()
    wait_until(lambda: time.monotonic() > late, "both limits to pass")
    terminal = debug(stop.pid)
    terminal.expect("(Pdb) ")
    terminal.send("c")
    reader.join()
    assert got == [4]


def test_timeout_of_wait_stands_still(debug, stops, wait_until):
    ref = doubles.remote(1)
    (stop,) = stops()
    late = time.monotonic() + 2.5
    items = fastrt.remote(num_returns="streaming")(lambda: iter([fastrt.get(ref)])).remote()
    got = []

    def waits(*refs):
        got.append([len(some) for some in fastrt.wait(list(refs), num_returns=len(refs), timeout=2.0)])

    readers = [threading.Thread(target=waits, args=some) for some in ((ref,), (ref, items))]
    for reader in readers:
        reader.start()
    assert [len(some) for some in fastrt.wait([ref], timeout=0)] == [0, 1]
    wait_until(lambda: time.monotonic() > late, "the limits to pass")
    assert got == []
    terminal = debug(stop.pid)
    terminal.expect("(Pdb) ")
    terminal.send("c")
    for reader in readers:
        reader.join()
    assert sorted(got) == [[1, 0], [2, 0]]


def test_timeout_goes_on_after_the_debugger(debug, stops):
    @fastrt.remote(max_retries=0, timeout=3)
    def hangs():
        breakpoint()
        while True:
            pass

    ref = hangs.remote()
    stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.send("c")
    with pytest.raises(fastrt.TaskTimeoutError):
        fastrt.get(ref)


def test_client_leaves_and_comes_back(debug, stops):
    ref = doubles.remote(1)
    (stop,) = stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.ask("p 'seen', y")
    terminal.send("\x04", end="")
    terminal.expect(f"the task waits on: fastrt debug {stop.pid}\n")
    assert terminal.leave() == 0
    again = debug()
    again.expect("(Pdb) p 'seen', y\n('seen', 2)\n(Pdb) ")  # as it was left
    other = debug()
    other.expect(f"process {again.process.pid} is attached already\n")
    again.send("c")
    assert fastrt.get(ref) == 4


def test_quit_ends_the_task(debug, stops):
    ref = doubles.remote(1)
    stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.send("q")
    with pytest.raises(TaskError, match="BdbQuit"):
        fastrt.get(ref)


def test_step_out_of_the_task_lets_it_go_on_and_forgets_breakpoints(debug, stops):
    ref = doubles.remote(1)
    (stop,) = stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    assert "Breakpoint 1 at" in terminal.ask(f"b {stop.line + 1}")
    assert "-> return z" in terminal.ask("c")
    assert "--Return--" in terminal.ask("n")
    terminal.send("n")
    terminal.expect("the task goes on")
    assert fastrt.get(ref) == 4
    assert fastrt.get([fastrt.remote(len).remote("ab") for _ in range(20)]) == [2] * 20


def test_ctrl_c_interrupts_running_code_and_a_command(debug, stops):
    @fastrt.remote(max_retries=0)
    def spins():
        go = True
        breakpoint()
        while go:
            pass
        return "done"

    ref = spins.remote()
    (stop,) = stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.send("print('ru' 'ns'); sum(0 for _ in iter(int, 1))")
    terminal.expect("runs\n")
    terminal.send("\x03", end="")
    terminal.expect("KeyboardInterrupt\n(Pdb) ")
    terminal.ask(f"b {stop.line + 2}")
    for _ in range(20):  # it meets the loop, or the debugger that looks at each of its lines
        terminal.send("c")
        stops(0)
        terminal.send("\x03", end="")
        terminal.expect("The code is interrupted.\n")
        assert "spins()\n" in terminal.expect("(Pdb) ")
    terminal.ask("go = False")
    assert '-> return "done"' in terminal.ask("c")
    terminal.send("c")
    assert fastrt.get(ref) == "done"


def test_tabulator_completes_names_and_commands(debug, stops):
    ref = doubles.remote(1)
    stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.send("p __import__('sys').byteor\t", end="")
    terminal.expect("byteor")
    terminal.send("")
    terminal.expect("(Pdb) ")
    terminal.send("contin\t", end="")
    terminal.expect("continue")
    terminal.send("")
    assert fastrt.get(ref) == 4


def test_cancelled_task_leaves_the_debugger(debug, stops):
    ref = doubles.remote(1)
    stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    fastrt.cancel(ref)
    with pytest.raises(TaskCancelledError):
        fastrt.get(ref)
    terminal.expect("the task goes on without the debugger\n")
    assert terminal.leave() == 0


def test_killed_worker_is_reported_and_no_longer_listed(debug, stops):
    ref = doubles.remote(1)
    (stop,) = stops()
    terminal = debug()
    terminal.expect("(Pdb) ")
    os.kill(stop.pid, signal.SIGKILL)
    terminal.expect(f"process {stop.pid} has ended\n")
    with pytest.raises(WorkerCrashedError):
        fastrt.get(ref)
    other = debug()
    other.expect("no task waits in a debugger\n")
    assert other.leave() == 1


def test_several_are_listed_and_one_is_chosen(debug, stops):
    refs = [doubles.remote(1), doubles.remote(2)]
    found = stops(2)
    listing = debug()
    for stop in found:
        listing.expect(f"fastrt debug {stop.pid}: task doubles (")
    assert listing.leave() == 0
    for stop in found:
        terminal = debug(stop.pid)
        terminal.expect("(Pdb) ")
        terminal.send("c")
        terminal.leave()
    assert fastrt.get(refs) == [4, 6]


def test_actor_keeps_its_state(debug, stops):
    counter = Counter.remote()
    ref = counter.add.remote(2)
    (stop,) = stops()
    assert (stop.kind, stop.name) == ("actor", "Counter")
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.ask("self.total = 7")
    terminal.send("c")
    assert fastrt.get([ref, counter.read.remote()]) == [7, 7]


def test_coroutine_holds_its_loop_and_goes_on(debug, stops):
    actor = Async.remote()
    refs = [actor.add.remote(k) for k in range(2)]
    for _ in refs:
        stops(1)
        terminal = debug()
        terminal.expect("-> return n + 1")
        terminal.send("c")
        terminal.expect("the task goes on")
    assert fastrt.get(refs) == [1, 2]


def test_threads_of_an_actor_stop_one_after_the_other_and_others_go_on(debug, stops, wait_until):
    counter = Counter.options(max_concurrency=3).remote()
    refs = [counter.add.remote(1), counter.add.remote(1)]
    stops(1)
    wait_until(lambda: fastrt.get(counter.read.remote()) == 2, "both calls")
    terminal = debug()
    for _ in refs:
        terminal.expect("-> return self.total")
        terminal.expect("(Pdb) ")
        terminal.send("c")
    assert fastrt.get(refs) == [2, 2]


def test_error_waits_at_its_frame_before_it_goes_on(program, runtime_dir, wait_until):
    started = program(
        """
        import fastrt

        @fastrt.remote(max_retries=1, retry_exceptions=True)
        def divides(x):
            wrong = x - x
            return x / wrong

        fastrt.init(1, "64MiB", post_mortem=True)
        try:
            fastrt.get(divides.remote(3), timeout=60)
        except ZeroDivisionError as exc:
            print("got", isinstance(exc, fastrt.TaskError))
        """
    )
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)}
    wait_until(lambda: any(map(debugging.waiting, runtime_dir.glob("*/debug"))), "the task in the debugger", 30)
    terminal = Terminal("debug", env=env)
    try:
        terminal.expect("task divides (pid ")
        terminal.expect(") raised, and waits in a debugger at ")
        terminal.expect("ZeroDivisionError: division by zero\n")
        terminal.expect("-> return x / wrong\n(Pdb) ")
        assert terminal.ask("p x, wrong") == "(3, 0)\n"
        terminal.send("c")
        terminal.expect("the task goes on")
    finally:
        terminal.close()
    out, err = started.finish()
    assert out == "got True\n"
    assert "raised, and waits in a debugger at " in err


def test_other_hook_of_the_program_is_used(rt):
    @fastrt.remote
    def stops_by_another_hook():
        os.environ["PYTHONBREAKPOINT"] = "builtins.len"
        try:
            return breakpoint("four")
        finally:
            del os.environ["PYTHONBREAKPOINT"]

    assert fastrt.get(stops_by_another_hook.remote()) == 4


def test_without_a_worker_breakpoint_is_pythons_own(program):
    started = program(
        """
        import sys
        import fastrt

        @fastrt.remote
        def f():
            return sys.breakpointhook is sys.__breakpointhook__

        fastrt.init(local_mode=True)
        print(fastrt.get(f.remote()))
        """
    )
    assert started.finish()[0] == "True\n"


@pytest.mark.parametrize(
    ("spans", "since", "until", "seconds"),
    [
        ([], 0, 10, 0),
        ([(2, 4)], 0, 10, 2),
        ([(2, 4), (3, 6)], 0, 10, 4),  # at the same time: counted once
        ([(2, 4), (1, 9)], 0, 10, 8),
        ([(0, 4), (8, 20)], 2, 10, 4),
        ([(0, 1), (11, 12)], 2, 10, 0),
    ],
)
def test_time_in_debuggers_is_counted_once(spans, since, until, seconds):
    assert debugging.overlap_s(spans, since, until) == seconds


def test_rays_name_for_it_stops_in_the_users_code(debug, stops):
    @fastrt.remote(max_retries=0)
    def stops_as_in_ray():
        from fastrt.ray.util import pdb

        pdb.set_trace()
        return "seen"

    ref = stops_as_in_ray.remote()
    assert stops()[0].function == "stops_as_in_ray"
    terminal = debug()
    terminal.expect("(Pdb) ")
    terminal.send("c")
    assert fastrt.get(ref) == "seen"
