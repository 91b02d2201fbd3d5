"""`FASTRT_DEBUGGER=debugpy`: an editor debugs tasks, calls and errors; the worker refuses any other client."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import fastrt
from fastrt.errors import ConfigError, TaskCancelledError, TaskError
from fastrt.net.address import own_address
from fastrt.node.daemon import sweep_sessions
from fastrt.store import client as store_client
from fastrt.store import debugging
from support.attacks.attacker import OTHER_UID, Attacker
from support.cluster import RunningNode
from support.dap import Editor

needs_debugpy = pytest.mark.skipif(importlib.util.find_spec("debugpy") is None, reason="debugpy is not installed")


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


@fastrt.remote(max_retries=0)
def divides(x):
    wrong = x - x
    return x / wrong


LINE = doubles.__wrapped__.__code__.co_firstlineno


@pytest.fixture(scope="module")
def session():
    with fastrt.init(2, "64MiB", debugger="debugpy", post_mortem=True):
        yield


@pytest.fixture
def stops(session, wait_until):
    """Wait until so many tasks wait for a client; the stops."""

    def wait(count=1):
        found = []

        def there():
            found[:] = debugging.waiting(debugging.folder_of(store_client.require().socket_path))
            return len(found) == count

        wait_until(there, f"{count} tasks in the debugger")
        return found

    yield wait
    wait(0)


@pytest.fixture
def attach(stops):
    """Attach an editor to the only task that waits."""
    with contextlib.ExitStack() as stack:

        def begin():
            (stop,) = stops()
            editor = Editor(stop.address)
            stack.callback(editor.close)
            return editor

        yield begin


@needs_debugpy
def test_editor_looks_steps_and_changes_values(stops, attach):
    ref = doubles.remote(1)
    (stop,) = stops()
    assert (stop.kind, stop.name, stop.function, stop.file) == ("task", "doubles", "doubles", __file__)
    editor = attach()
    _, frames = editor.stopped()
    assert frames[0] == ("doubles", LINE + 4)
    assert editor.evaluate("y") == "2"
    editor.evaluate("y = 20")
    editor.go_on("next")
    assert editor.stopped()[1][0] == ("doubles", LINE + 5)
    assert editor.evaluate("z") == "40"
    editor.go_on()
    editor.wait_for_end()
    assert fastrt.get(ref) == 40


@needs_debugpy
def test_timeouts_stand_still_and_the_next_task_waits_for_an_editor_again(stops, attach, wait_until):
    ref = doubles.options(timeout=3).remote(1)
    stops()
    late = time.monotonic() + 3.3
    got = []
    reader = threading.Thread(target=lambda: got.append(fastrt.get(ref, timeout=3)))
    reader.start()
    wait_until(lambda: time.monotonic() > late, "both limits to pass")
    for k in range(2):
        editor = attach()
        editor.stopped()
        editor.go_on()
        editor.wait_for_end()
        reader.join()
        assert got == [4]
        if k == 0:
            stops(0)
            ref = doubles.remote(2)
    assert fastrt.get(ref) == 6


@needs_debugpy
@pytest.mark.parametrize("says_so", [True, False])
def test_editor_leaves_and_the_task_goes_on(stops, attach, says_so):
    ref = doubles.remote(1)
    editor = attach()
    editor.stopped()
    if says_so:
        editor.ask("disconnect", terminateDebuggee=False)
    editor.close()
    assert fastrt.get(ref, timeout=60) == 4


@needs_debugpy
def test_call_of_an_actor(stops, attach):
    counter = Counter.remote()
    ref = counter.add.remote(2)
    editor = attach()
    editor.stopped()
    assert editor.evaluate("self.total") == "2"
    editor.evaluate("self.total = 5")
    editor.go_on()
    assert fastrt.get(ref) == 5


@needs_debugpy
def test_error_waits_at_its_frame(stops, attach):
    ref = divides.remote(3)
    (stop,) = stops()
    assert stop.error == "ZeroDivisionError: division by zero"
    editor = attach()
    reason, frames = editor.stopped()
    assert (reason, frames[0][0]) == ("exception", "divides")
    assert editor.evaluate("(x, wrong)") == "(3, 0)"
    editor.go_on()
    with pytest.raises(TaskError, match="division by zero"):
        fastrt.get(ref)


@needs_debugpy
@pytest.mark.parametrize("attached", [False, True])
def test_cancelled_task_leaves_the_debugger(stops, attach, attached):
    ref = doubles.remote(1)
    stops()
    if attached:
        attach().stopped()
    fastrt.cancel(ref)
    with pytest.raises(TaskCancelledError):
        fastrt.get(ref, timeout=60)


@needs_debugpy
def test_command_line_says_the_address(stops, attach):
    ref = doubles.remote(1)
    (stop,) = stops()
    done = subprocess.run(
        [Path(sys.executable).with_name("fastrt"), "debug"], capture_output=True, text=True, check=True,
        env={**os.environ, "FASTRT_RUNTIME_DIR": str(Path(store_client.require().socket_path).parents[1])},
    )  # fmt: skip
    # The command lists the tasks of all sessions of this user, also those of a test that runs at the same time.
    assert f"attach a client of debugpy to {stop.address}: task doubles (" in done.stdout
    editor = attach()
    editor.stopped()
    editor.go_on()
    assert fastrt.get(ref) == 4


@needs_debugpy
def test_page_in_a_browser_and_another_user_do_not_come_in(stops, attach):
    ref = doubles.remote(1)
    (stop,) = stops()
    host, _, port = stop.address.rpartition(":")
    assert host == "127.0.0.1"
    code = b'{"seq": 1, "type": "request", "command": "evaluate", "arguments": {"expression": "1"}}'
    with socket.create_connection((host, int(port))) as browser:
        browser.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(code), code))
        with contextlib.suppress(ConnectionResetError):  # what it has sent was not read
            assert browser.recv(100) == b""
    if os.geteuid() == 0:
        tried = Attacker(
            """
sock = connect(given["address"])
shout(sock, b"Content-Length: 2\\r\\n\\r\\n{}")
report["heard"] = listen(sock, 5.0).decode()
""",
            uid=OTHER_UID,
            address=stop.address,
        )
        assert tried.finish() == {"heard": ""}
    assert not stops()[0].until
    editor = attach()
    editor.stopped()
    editor.go_on()
    assert fastrt.get(ref) == 4


@needs_debugpy
def test_tasks_take_turns_at_a_named_port(program, wait_until):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = program(
        f"""
        import fastrt

        @fastrt.remote
        def stops(x):
            breakpoint()
            return x

        fastrt.init(2, "64MiB", debugger="debugpy:{port}")
        print(sorted(fastrt.get([stops.remote(k) for k in range(2)])))
        """
    )
    editors = []

    def attaches():
        with contextlib.suppress(ConnectionRefusedError):
            editors.append(Editor(f"127.0.0.1:{port}"))
        return editors

    for _ in range(2):
        wait_until(attaches, "a task at the port")
        editor = editors.pop()
        editor.stopped()
        editor.go_on()
        editor.wait_for_end()
        editor.close()
    out, err = started.finish()
    assert out == "[0, 1]\n"
    assert f": attach a client of debugpy to 127.0.0.1:{port}\n" in err


@needs_debugpy
def test_stop_on_another_node_is_listed_with_the_way_to_its_port(program, runtime_dir, monkeypatch, wait_until):
    monkeypatch.setenv("FASTRT_DEBUGGER", "debugpy")
    far = runtime_dir.parent / "far"  # as on another machine
    with contextlib.ExitStack() as stack:
        stack.callback(sweep_sessions, far, far.parent / "spill")
        head = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1", "--name", "one")
        stack.callback(head.stop)
        join = ("--address", head.head, "--token-file", head.note.token_file)
        two = RunningNode(far, *join, "--num-workers", "1", "--name", "two")
        stack.callback(two.stop)
        started = program(
            f"""
            import fastrt

            @fastrt.remote(scheduling="two")
            def stops(x):
                breakpoint()
                return x

            fastrt.init(address={head.head!r})
            print(fastrt.get(stops.remote(1)))
            """
        )
        folder = debugging.folder_of(two.note.socket_path)
        wait_until(lambda: debugging.waiting(folder), "the task to stop")
        (stop,) = debugging.waiting(folder)
        env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)}
        words = [Path(sys.executable).with_name("fastrt"), "debug"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
        port = stop.address.rpartition(":")[2]
        assert done.stdout.startswith(
            f"attach a client of debugpy to {stop.address} on node two, from another machine after: "
            f"ssh -N -L {port}:{stop.address} {own_address()}: task stops ("
        ), done.stdout
        with contextlib.closing(Editor(stop.address)) as editor:
            editor.stopped()
            editor.go_on()
            editor.wait_for_end()
        assert started.finish()[0] == "1\n"


@pytest.mark.skipif(importlib.util.find_spec("debugpy") is not None, reason="debugpy is installed")
def test_missing_package_is_named():
    with pytest.raises(ConfigError, match=r"debugger='debugpy': needs debugpy: pip install 'fastrt\[debugpy\]'"):
        fastrt.init(1, debugger="debugpy")
