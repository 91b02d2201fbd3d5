"""However a driver leaves, nothing but log files stays: no process, nothing in /dev/shm. And what it sees until then.

Each test runs a driver of its own; the fixtures of tests/conftest.py look for what it leaves.
"""

import os
import signal
import time

import psutil
import pytest

START = """
    import os, signal, subprocess, sys, threading, time
    import numpy as np
    import fastrt

    @fastrt.remote
    def busy():
        child = subprocess.Popen(["sleep", "1000"])
        threading.Event().wait(1000)

    @fastrt.remote
    def echo(x):
        return x

    rt = fastrt.init(2, "64MiB")
    view = fastrt.get(fastrt.put(np.ones(100_000)))
    refs = [busy.remote() for _ in range(5)] + [echo.remote(view)]
    deadline = time.monotonic() + 20
    import psutil
    while not any("sleep" in p.name() for p in psutil.Process().children(True)):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    print("up", flush=True)
"""

LEAVE = {
    "return": ("pass", 0),
    "shutdown": ("fastrt.shutdown(); fastrt.shutdown()", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('bye')", 1),
    "os._exit": ("os._exit(4)", 4),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "term": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    "hup": ("os.kill(os.getpid(), signal.SIGHUP)", -1),
    "abort": ("os.abort()", -6),
    "thread": ("threading.Thread(target=fastrt.get, args=[refs], daemon=True).start(); sys.exit(0)", 0),
    "exec": ("os.execv('/bin/true', ['true'])", 0),
    # No other thread of the driver runs in between: one would start the next daemon, which would clean up.
    "killed daemon first": (
        "sys.setswitchinterval(1000); os.kill(rt._processes.daemon.pid, 9); os.kill(os.getpid(), 9)",
        -9,
    ),
    "killed daemon, then exit": ("os.kill(rt._processes.daemon.pid, 9)", 0),
}
# Python ends by the same steps as after "return" or "exception", the kernel by the same as after "term".
LIKE_ANOTHER = ("shutdown", "sys.exit", "hup")


def in_folder(runtime_dir):
    return [one for one in runtime_dir.iterdir() if one.name != "logs"] if runtime_dir.exists() else []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LIKE_ANOTHER else []) for name in LEAVE]
)
def test_driver_that_leaves_leaves_nothing(program, runtime_dir, wait_until, name):
    code, status = LEAVE[name]
    driver = program(START + f"    {code}\n")
    driver.wait_for_line("up")
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.finish(status)
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), "all to end")
    if name == "killed daemon first":  # nobody was left to do it: the next session sweeps
        assert len(in_folder(runtime_dir)) == 1
        program("import fastrt; fastrt.init(1, '32MiB')").finish()
    wait_until(lambda: not in_folder(runtime_dir), "an empty runtime folder")


def test_driver_killed_while_it_starts_leaves_nothing(program, runtime_dir, wait_until):
    for after_s in (0.05, 0.1, 0.15, 0.2, 0.3):
        driver = program("import fastrt, threading; fastrt.init(2, '32MiB'); threading.Event().wait(100)")
        until = time.monotonic() + after_s
        wait_until(lambda until=until: time.monotonic() >= until, "a moment of the start")
        os.kill(driver.pid, signal.SIGKILL)
        driver.finish(-9)
    wait_until(lambda: not in_folder(runtime_dir), "an empty runtime folder")


def test_daemon_that_cannot_tell_its_starter_where_it_listens_leaves_nothing(program, runtime_dir, wait_until):
    """No other daemon takes the place of one that fails when its starter is dead, so it ends the session itself."""
    driver = program("import fastrt, threading; fastrt.init(2, '32MiB'); threading.Event().wait(100)")

    def daemons() -> list[psutil.Process]:
        children = {child.pid for child in psutil.Process(driver.pid).children(recursive=True)}
        named = psutil.process_iter(["name"])  # without those that end meanwhile
        return [one for one in named if one.pid in children and one.info["name"] == "fastrt-daemon"]

    wait_until(daemons, "the daemon to start")
    (daemon,) = daemons()
    daemon.suspend()  # it imports its modules
    os.kill(driver.pid, signal.SIGKILL)
    driver.process.wait()
    daemon.resume()
    wait_until(lambda: not (daemon.is_running() or in_folder(runtime_dir)), "the end of the session")


@pytest.mark.parametrize(
    "call",
    [
        "fastrt.get(refs)",
        "fastrt.wait(refs[:3], num_returns=2)",
        "refs[0].future().result()",
        pytest.param("fastrt.get(refs[0])", marks=pytest.mark.long),
        pytest.param("fastrt.get(refs[0], timeout=500)", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_a_wait(program, call):
    driver = program(START + f"    print('waiting', flush=True)\n    {call}\n")
    driver.wait_for_line("waiting")
    os.kill(driver.pid, signal.SIGINT)
    started = time.monotonic()
    _, err = driver.finish(-2)
    assert "KeyboardInterrupt" in err
    assert time.monotonic() - started < 35


def test_ctrl_c_that_is_caught_leaves_the_session_usable(program):
    driver = program(
        START + "    try:\n        print('waiting', flush=True)\n        fastrt.get(refs[0])\n"
        "    except KeyboardInterrupt:\n        for ref in refs[:5]: fastrt.cancel(ref, force=True)\n"
        "    print(fastrt.get(echo.remote(5)))\n"
    )
    driver.wait_for_line("waiting")
    os.kill(driver.pid, signal.SIGINT)
    out, err = driver.finish(0)
    assert out.endswith("5\n")
    assert "Traceback" not in err


# ---- output ----


def test_output_of_workers_arrives_with_a_prefix_on_the_same_stream(program):
    out, err = program(
        """
        import os, sys
        import fastrt

        @fastrt.remote
        def speak():
            print("to out")
            print()
            print("é漢", "no newline", end="")
            print("to err", file=sys.stderr)
            os.write(1, b"raw \\xff bytes\\n")
            os.system("echo from a child")
            return os.getpid()

        pid = fastrt.get(speak.remote())
        print()  # what the worker has not ended yet may have come by now
        print("pid", pid)
        """
    ).finish()
    pid = next(line.split()[1] for line in out.splitlines() if line.startswith("pid "))
    lines = [line.removeprefix(f"(speak pid={pid}) ") for line in out.splitlines() if line.startswith("(speak pid=")]
    assert lines[:2] == ["to out", ""]
    assert "from a child" in lines
    assert any("é漢 no newline" in line for line in lines)
    assert any("raw \ufffd bytes" in line for line in lines)
    assert err == f"(speak pid={pid}) to err\n"


def test_output_names_the_actor_and_a_crash_shows_its_python_stack(program):
    _, err = program(
        """
        import ctypes, sys, fastrt

        @fastrt.remote
        class Speaker:
            def __init__(self):
                sys.stderr.write("made\\n")

            def fall(self):
                ctypes.string_at(0)

        with fastrt.init(1, "64MiB"):
            try:
                fastrt.get(Speaker.remote().fall.remote())
            except fastrt.ActorDiedError as error:
                assert "signal 11" in str(error)
        """
    ).finish()
    lines = [line.partition(") ")[2] for line in err.splitlines() if line.startswith("(Speaker pid=")]
    assert lines[0] == "made"
    assert any("Segmentation fault" in line for line in lines)
    assert any("in fall" in line for line in lines)


def test_megabytes_of_output_arrive_whole(program):
    out, _ = program(
        """
        import fastrt, sys

        @fastrt.remote
        def speak(k):
            for i in range(20_000):
                print(k, i, "x" * 40)
            sys.stdout.write("\\n" * 100_000)
            sys.stdout.write("y" * 1_000_000 + "\\n")

        fastrt.init(2, "32MiB")
        fastrt.get([speak.remote(k) for k in range(2)])
        """
    ).finish()
    for k in range(2):
        numbers = [int(line.split()[3]) for line in out.splitlines() if f") {k} " in line]
        assert numbers == list(range(20_000))
    assert out.count("y") == 2_000_000
    assert sum(line.endswith(") ") for line in out.splitlines()) >= 200_000


def test_output_is_silent_when_asked_and_harmless_when_the_driver_has_none(program):
    code = """
        import fastrt, os, sys
        {before}
        f = fastrt.remote(lambda: print("noise" * 1000))
        fastrt.get([f.remote() for _ in range(300)])
        os.write(2, b"fine")
    """
    out, err = program(code.format(before="fastrt.init(1, '32MiB', log_to_driver=False)")).finish()
    assert (out, err) == ("", "fine")
    for before in ("sys.stdout = None", "sys.stdout.close()", "os.close(1)", "sys.stdout = object()"):
        _, err = program(code.format(before=before)).finish(None)
        assert "fine" in err


# ---- several at once ----


def test_two_drivers_at_once_do_not_see_each_other(program):
    code = """
        import fastrt
        rt = fastrt.init(1, "32MiB")
        ref = fastrt.put(rt.session)
        print("up", flush=True)
        for _ in range(200):
            assert fastrt.get(fastrt.remote(lambda r: fastrt.get(r[0])).remote([ref])) == rt.session
    """
    drivers = [program(code) for _ in range(3)]
    for driver in drivers:
        driver.finish()


def test_script_without_main_guard_and_its_classes_work(program):
    out, _ = program(
        """
        import dataclasses, enum
        import fastrt

        class Colour(enum.Enum):
            RED = 1

        @dataclasses.dataclass
        class Point:
            x: int
            colour: Colour = Colour.RED

            def moved(self):
                return Point(self.x + STEP)

        STEP = 5

        class Own(Exception):
            def __init__(self, point):
                super().__init__(point)
                self.point = point

        @fastrt.remote
        def move(point):
            assert isinstance(point, Point), type(point)
            return point.moved()

        @fastrt.remote
        def fail():
            raise Own(Point(3))

        point = fastrt.get(move.remote(Point(1)))
        assert isinstance(point, Point) and point == Point(6), point
        assert fastrt.get(fastrt.put([Point(2)])) == [Point(2)]
        try:
            fastrt.get(fail.remote())
        except Own as error:
            assert error.point == Point(3)
        print("good")
        """
    ).finish()
    assert out == "good\n"
