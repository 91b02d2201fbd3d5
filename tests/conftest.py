"""Fixtures for every test; above all: whoever runs leaves nothing behind.

What a test, a module or the session leaves (a process, a segment in /dev/shm, a listening port, an open file
descriptor, a changed variable of the environment) fails it. A function's check is skipped where the test shares a
runtime with others (a fixture named `rt` or `runtime` of module scope, which may grow workers at any moment); the
module's check then sees the end.
"""

import contextlib
import gc
import os
import random
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

import fastrt
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from support.browser import chromium

SHARED_RUNTIMES = {"rt", "runtime"}
SHARED_NODES = {"nodes", "three_nodes"}
# Between the end of a test and the last of its processes being gone; on a quiet machine this takes less than a second.
PATIENCE_S = 20.0
SHM = Path("/dev/shm")
# Descriptors that Python or a library opens once and keeps for good.
PERMANENT_FDS = ("/dev/urandom", "/dev/random", "/dev/null")
WATCHED_VARIABLES = ("FASTRT_", "GRPC_", "PATH", "PYTHONPATH", "TMPDIR", "XDG_")

# Every process that descends from this one by exec carries the token, also after its parents are dead.
TOKEN = f"FASTRT_TEST_TOKEN={secrets.token_hex(8)}"
os.environ.update([TOKEN.split("=")])
# Sessions and nodes of the user's are in the folder that is the default: no test joins or stops them.
RUNTIMES = tempfile.TemporaryDirectory(prefix="frt-")
os.environ["FASTRT_RUNTIME_DIR"] = str(Path(RUNTIMES.name, "rt"))
# A warning is an error here, and a busy machine makes any program look slow; what tests advice switches it on.
os.environ.setdefault("FASTRT_ADVICE", "0")
# Hundreds of short sessions; the tests of this setting switch it on.
os.environ.setdefault("FASTRT_POPULATE_BYTES", "0")

# A GPU of this machine would be among the resources of each test; those about devices name the ones they want.
os.environ.setdefault("FASTRT_DETECT_DEVICES", "0")

# Each of four processes collects all tests: a fifth of its CPU for that went to looking for garbage among them.
gc.disable()

SEGMENTS: set[Path] = set()  # that were there before the run
# Processes that are not ours: to read of a hundred, before and after each test, whose they are costs more than most
# tests do. A number that has changed hands is seen to at the end of each module, where all are read again.
OTHERS: set[int] = set()
FAILED = pytest.StashKey[bool]()  # of a test, once a part of it has failed
ENDED: Counter[object] = Counter()  # how often a fixture that tests share was ended because of a failure
REPORTED: set[str] = set()  # so that the module and the session do not fail again for what a test has left


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Wait until `condition()` is true; fail naming `what` after `timeout_s`.

    It looks every 5 ms at first and less often the longer it waits: many conditions read files or ask other processes,
    which need the CPU themselves.
    """
    pause = threading.Event()
    began = time.monotonic()
    while not condition():
        passed = time.monotonic() - began
        assert passed < timeout_s, f"waited {timeout_s} s in vain for: {what}"
        pause.wait(min(0.005 + passed / 40, 0.05))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long`, unless FASTRT_LONG says to run just that."""
    wanted = "FASTRT_LONG" in os.environ
    left_out = [item for item in items if ("long" in item.keywords) != wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if ("long" in item.keywords) == wanted]
    if hasattr(config, "workerinput"):  # of several processes, none is to begin with the longest file at the end
        patience: dict[Path, float] = {}
        for item in items:
            given = item.get_closest_marker("timeout")
            patience[item.path] = max(patience.get(item.path, 0.0), given.args[0] if given is not None else 0.0)
        items.sort(key=lambda item: -patience[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Make a skip a failure where FASTRT_NO_SKIPS says that everything must be there."""
    report = yield
    if report.skipped and "FASTRT_NO_SKIPS" in os.environ:
        report.outcome = "failed"
    if report.failed:
        item.stash[FAILED] = True
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    SEGMENTS.update(SHM.glob("fastrt-*"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a segment is left at its end, whichever worker's test left it."""
    if hasattr(session.config, "workerinput"):
        return
    left: list[Path] = []

    def swept() -> bool:
        left[:] = [path for path in SHM.glob("fastrt-*") if path not in SEGMENTS and not is_foreign(path)]
        return not left

    with contextlib.suppress(AssertionError):
        wait_for(swept, "the segments to go", PATIENCE_S)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(f"\nthe run left behind: {', '.join(map(str, left))}")


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """The way to wait for a state in a test; see `wait_for`."""
    return wait_for


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on, from below those that outgoing connections are given."""
    for _ in range(100):
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are all taken")


@pytest.fixture
def browser() -> Iterator[Any]:
    """A real Chromium; the test is skipped where there is none."""
    with chromium() as started:
        yield started


def is_ours(pid: int, parents: dict[int, int] | None = None) -> bool | None:
    """Whether this process started that one, directly or not; None if that cannot be said, as while it calls exec."""
    environ = b""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        environ = b"another user's"
    except OSError:
        pass  # it has ended; perhaps nobody has waited for it yet
    if TOKEN.encode() in environ.split(b"\0"):
        return True
    above = ancestors(pid, {} if parents is None else parents)
    if os.getpid() in above:
        return True
    return False if environ or 2 in above else None  # 2 is above the kernel's threads


def ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    """The processes above one; `parents` keeps what was read, for the next."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        while pid > 1:
            if pid not in parents:
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            pid = parents[pid]
            found.add(pid)
    return found


def processes() -> set[int]:
    """The processes that this one started, directly or not."""
    there = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    OTHERS.intersection_update(there)
    parents: dict[int, int] = {}
    whose = {pid: is_ours(pid, parents) for pid in there - OTHERS}
    OTHERS.update(pid for pid, ours in whose.items() if ours is False)
    return {pid for pid, ours in whose.items() if ours}


def described(thing: str) -> str:
    """Of a process, the command as well."""
    if not thing.startswith("process "):
        return thing
    try:
        process = psutil.Process(int(thing.split()[1]))
        return f"{thing}: {' '.join(process.cmdline()) or process.name()}"
    except psutil.NoSuchProcess:
        return f"{thing}, which has ended: perhaps nobody has waited for it"


def is_foreign(segment: Path) -> bool:
    """Whether a segment belongs to somebody else on this machine: other user, or mapped by a process not of ours."""
    try:
        if segment.stat().st_uid != os.getuid():
            return True
    except FileNotFoundError:
        return True
    mapped = False
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if str(segment) in Path(f"/proc/{pid}/maps").read_text():
                if not is_ours(pid) and pid != os.getpid():
                    return True
                mapped = True
    # What nobody has any more may be of a node that another worker's test has killed: the end of the run looks for it.
    return not mapped and "PYTEST_XDIST_WORKER" in os.environ


def descriptors() -> dict[int, str]:
    """The targets of this process's open descriptors."""
    found: dict[int, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith(PERMANENT_FDS) and "/libffi.so" not in target:  # mapped for callbacks
                found[int(fd)] = target
    return found


def listening_port(fd: int) -> int | None:
    """The port that a socket of this process listens on."""
    copy = -1
    try:
        copy = os.dup(fd)
        with socket.socket(fileno=copy) as one:
            copy = -1
            inet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
            return one.getsockname()[1] if inet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else None
    except OSError:  # a thread has closed it meanwhile, or another file has its number
        return None
    finally:
        if copy != -1:
            os.close(copy)


class Footprint:
    """What exists now that a test could leave."""

    def __init__(self) -> None:
        fds = descriptors()
        self.fds = [f"fd {fd}: {target}" for fd, target in fds.items()]
        self.processes = processes()
        self.things = {f"segment {path}" for path in SHM.glob("fastrt-*")}
        # A setting left here reaches every later test of this process and the programs that it starts.
        self.things |= {f"variable {k}={v}" for k, v in os.environ.items() if k.startswith(WATCHED_VARIABLES)}
        ports = (listening_port(fd) for fd, target in fds.items() if target.startswith("socket:"))
        self.things |= {f"listening port {port}" for port in ports if port}

    def left_since(self, before: "Footprint") -> list[str]:
        left = [t for t in self.things - before.things if not t.startswith("segment ") or not is_foreign(Path(t[8:]))]
        # A node that ran before may keep a new worker for some seconds. The fixture that started the node ends it.
        parents: dict[int, int] = {}
        started = (pid for pid in self.processes - before.processes if not ancestors(pid, parents) & before.processes)
        left += [f"process {pid}" for pid in started]
        if len(self.fds) > len(before.fds):
            left += sorted(set(self.fds) - set(before.fds))
        return sorted(set(left) - REPORTED)


def kill(pids: Iterable[int]) -> None:
    """End processes whose test is reported already: the tests after it need the machine."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


@contextlib.contextmanager
def leaves_nothing(what: str) -> Iterator[None]:
    """Fail unless everything that came into being inside is gone soon after."""
    before = Footprint()
    yield
    began = time.monotonic()
    passed = 0.0
    pause = threading.Event()
    while (left := Footprint().left_since(before)) and passed < PATIENCE_S:
        if passed == 0.0 or passed > 0.5:
            gc.collect()  # a descriptor may hang on a cycle; most wait for the end of a process, which takes 0.1 s
        pause.wait(0.005 + passed / 4)
        passed = time.monotonic() - began
    if left:
        REPORTED.update(left)
        lines = "\n  ".join(map(described, left))
        kill(int(thing.split()[1]) for thing in left if thing.startswith("process "))
        pytest.fail(f"{what} left behind after {PATIENCE_S} s:\n  {lines}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_gil_where_python_has_none() -> Iterator[None]:
    """No module that a test has imported turns the GIL on: all declare themselves ready."""
    yield
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled()


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing() -> Iterator[None]:
    try:
        with leaves_nothing("the session"):
            yield
            OTHERS.clear()
    finally:
        kill(processes())


@pytest.fixture(scope="module", autouse=True)
def module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    # Many tests end with a collection, and it need not look at what is older than the module each time. This one need
    # not look again at what has outlived an earlier module: 300,000 objects, which take 0.2 s.
    gc.collect()
    gc.freeze()
    with leaves_nothing(f"the module {request.node.name}"):
        yield
        OTHERS.clear()


@pytest.fixture(autouse=True)
def test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if SHARED_RUNTIMES & set(request.fixturenames):
        yield
        return
    with leaves_nothing(f"the test {request.node.name}"):
        yield
        if FAILED in request.node.stash and fastrt.is_initialized():  # it would refuse the next test's `init`
            fastrt.shutdown()


@pytest.fixture
def drop_arguments(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let go of the test's arguments while there is still somebody to look: pytest keeps them for longer."""
    yield
    request.node.funcargs.clear()


# ---- sessions of fastrt ----


@pytest.fixture(scope="module", autouse=True)
def functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers cannot import test modules; what these define is sent as that of a user's script would be."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def runtime_dir() -> Iterator[Path]:
    """A folder for sessions; empty again at the end, or the test fails."""
    with tempfile.TemporaryDirectory(prefix="frt-") as folder:
        path = Path(folder, "rt")  # short: sockets have short names
        yield path
        if path.exists():
            wait_for(lambda: {one.name for one in path.iterdir()} <= {"logs"}, "an empty runtime folder")


@pytest.fixture(scope="module")
def rt(runtime_dir: Path) -> Iterator[fastrt.Runtime]:
    """A session of two workers that the tests of a module share; `test_leaves_the_arena_clean` looks after it."""
    folders = {"runtime_dir": runtime_dir, "spill_dir": runtime_dir.parent / "spill"}
    with fastrt.init(2, "256MiB", store_patience_s=0.2, **folders) as runtime:
        # A worker that starts later would be taken for one that the next test has left.
        wait_for(lambda: sum(row["kind"] == "worker" for row in fastrt.list_workers()) == 2, "the workers to start")
        yield runtime


def arena_problems() -> list[str]:
    """What keeps the current session's arena from being as new: nothing but the functions may be left in it."""
    gc.collect()
    client = store_client.require().client
    usage = fsck.usage(client)
    found = fsck.fsck(client, True)
    if usage["objects"] != usage["functions"] or usage["tasks"] or usage["actors"]:
        found.append(f"objects, tasks or actors are left: {usage}")
    return found


def wait_until_clean() -> None:
    problems: list[str] = []

    def clean() -> bool:
        problems[:] = arena_problems()
        return not problems

    try:
        wait_for(clean, "a clean arena", PATIENCE_S)
    except AssertionError:
        pytest.fail("\n".join(problems))


@pytest.fixture(autouse=True)
def test_leaves_the_arena_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look at the shared session after each test; after one that failed or left something, end it.

    The next test of the module then gets a session of its own: one task that hangs would fail them all.
    """
    yield
    shared = SHARED_RUNTIMES & set(request.fixturenames)
    try:
        if FAILED not in request.node.stash and "rt" in shared and fastrt.is_initialized():
            wait_until_clean()
    except BaseException:
        request.node.stash[FAILED] = True
        raise
    finally:
        if FAILED in request.node.stash:
            for name in shared | SHARED_NODES & set(request.fixturenames):
                end_shared(request, name)


def end_shared(request: pytest.FixtureRequest, name: str) -> None:
    """End a fixture of a wider scope, and first those that use it; the next test that names it starts it again.

    One that could not start is left, and so is one that was ended often already: where everything fails, starting it
    again for each test would take hours.
    """
    for definition in request.session._fixturemanager.getfixturedefs(name, request.node) or ():
        started = definition.scope != "function" and definition.cached_result and definition.cached_result[2] is None
        if started and ENDED[definition] < 3:
            ENDED[definition] += 1
            definition.finish(request)


class Program:
    """A driver of its own: a script that runs in another process."""

    def __init__(self, script: Path, code: str, runtime_dir: Path, **env: str) -> None:
        script.write_text(textwrap.dedent(code))
        source = Path(fastrt.__file__).parents[1]
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=script.parent,
            env={
                **os.environ,
                "PYTHONPATH": str(source),
                "FASTRT_RUNTIME_DIR": str(runtime_dir),
                "FASTRT_SPILL_DIR": str(runtime_dir.parent / "spill"),
                **env,
            },
        )
        self.read = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for_line(self, text: str) -> str:
        """Read its output up to a line that contains `text`; return that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.read += line
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r} in:\n{self.read}\n{self.process.communicate()[1]}")

    def finish(self, code: int | None = 0) -> tuple[str, str]:
        """Wait for its end; its whole output and error output. Fails on another exit code than `code`."""
        out, err = self.process.communicate(timeout=100)
        out = self.read + out
        assert code is None or self.process.returncode == code, f"{self.process.returncode}\n{out}\n{err}"
        return out, err


@pytest.fixture
def program(tmp_path: Path, runtime_dir: Path) -> Iterator[Callable[..., Program]]:
    """Start a script as a driver of its own: `program(code, **environment)`."""
    started: list[Program] = []

    def start(code: str, **env: str) -> Program:
        started.append(Program(tmp_path / f"driver{len(started)}.py", code, runtime_dir, **env))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
