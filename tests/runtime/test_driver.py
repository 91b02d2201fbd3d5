"""init, shutdown and the one runtime of a process; threads, settings, folders and segments of other sessions."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import fastrt
from fastrt.errors import ConfigError, FastrtError, NodeDiedError, NotInitializedError

MIB = 1 << 20


@fastrt.remote
def echo(x=None):
    return x


@pytest.fixture
def start(runtime_dir):
    """init with this module's folder; shut down at the end, whatever happens."""

    def start(num_workers=1, object_store_memory="32MiB", **settings):
        folders = {"runtime_dir": runtime_dir, "spill_dir": runtime_dir.parent / "spill"}
        return fastrt.init(num_workers, object_store_memory, **{**folders, **settings})

    yield start
    fastrt.shutdown()


@pytest.fixture
def default(runtime_dir, monkeypatch):
    """What a session gets that nobody asked for."""
    for name, value in (
        ("RUNTIME_DIR", runtime_dir), ("SPILL_DIR", runtime_dir.parent / "spill"), ("OBJECT_STORE_MEMORY", "32MiB"),
        ("NUM_WORKERS", 1),
    ):  # fmt: skip
        monkeypatch.setenv(f"FASTRT_{name}", str(value))
    yield
    fastrt.shutdown()


def test_init_gives_what_was_asked_for_and_shutdown_ends_it(start, runtime_dir):
    assert not fastrt.is_initialized()
    rt = start(2, 64 * MIB)
    assert fastrt.is_initialized()
    assert (rt.num_workers, rt.object_store_memory) == (2, 64 * MIB)
    assert len(rt.session) == 32
    assert rt.session[:8] in repr(rt)
    assert os.listdir(runtime_dir) == [rt.session]
    assert Path(f"/dev/shm/fastrt-{rt.session}").stat().st_mode & 0o777 == 0o600
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    fastrt.shutdown()
    assert not fastrt.is_initialized()
    assert os.listdir(runtime_dir) == []
    fastrt.shutdown()


def test_init_twice_is_refused_unless_told_to_ignore_it(start):
    rt = start()
    with pytest.raises(FastrtError, match="initialised already"):
        start()
    assert start(ignore_reinit_error=True) is rt
    assert fastrt.get(echo.remote(1)) == 1


def test_runtime_is_a_context_manager_also_when_the_block_raises(start):
    def block():
        with start() as rt:
            assert isinstance(rt, fastrt.Runtime)
            assert fastrt.get(echo.remote(2)) == 2
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        block()
    assert not fastrt.is_initialized()


def test_many_sessions_one_after_the_other_leave_nothing(start):
    for k in range(5):
        with start():
            assert fastrt.get(echo.remote(k)) == k


@pytest.mark.parametrize("first", [lambda: fastrt.get(echo.remote(3)), lambda: fastrt.get(fastrt.put(3))])
def test_first_call_starts_the_default(default, first):
    assert not fastrt.is_initialized()
    assert first() == 3
    assert fastrt.is_initialized()


def test_threads_that_start_the_default_at_once_get_one_session(default, runtime_dir):
    got = []
    threads = [threading.Thread(target=lambda i=i: got.append(fastrt.get(echo.remote(i)))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got) == list(range(8))
    assert len(os.listdir(runtime_dir)) == 1


SETTINGS = {
    "workers negative": {"num_workers": -1}, "workers many": {"num_workers": 9999},
    "workers text": {"num_workers": "two"}, "workers float": {"num_workers": 1.5},
    "workers bool": {"num_workers": True},
    "store none": {"object_store_memory": 0}, "store negative": {"object_store_memory": -5},
    "store small": {"object_store_memory": 1000}, "store absurd": {"object_store_memory": 1 << 80},
    "store text": {"object_store_memory": "much"}, "store float": {"object_store_memory": 1e9},
    "store list": {"object_store_memory": [1]}, "unknown": {"colour": 1}, "timeout": {"start_timeout_s": -1},
    "folder": {"runtime_dir": 5}, "long folder": {"runtime_dir": "/tmp/" + "x" * 100}, "tasks": {"tasks_max": 1},
    "clients": {"clients_max": 3, "num_workers": 5}, "flag": {"trace": "perhaps"},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_setting_is_refused_by_name_and_starts_nothing(start, name):
    with pytest.raises(ConfigError) as info:
        start(**SETTINGS[name])
    assert any(setting in str(info.value).lower() for setting in SETTINGS[name])
    assert not fastrt.is_initialized()


def test_two_names_for_the_number_of_workers_must_agree(start):
    with pytest.raises(FastrtError, match="two names"):
        start(2, num_cpus=3)
    assert start(None, num_cpus=1).num_workers == 1


def test_store_larger_than_dev_shm_is_full_before_it_crashes(program):
    """Where it is allowed, in a mount namespace of its own whose /dev/shm is small."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here: needs CAP_SYS_ADMIN")
    out, _ = program(
        """
        import os, subprocess, sys
        if len(sys.argv) == 1:
            mount = "mount -t tmpfs -o size=48m none /dev/shm && exec "
            os.execvp("unshare", ["unshare", "-m", "sh", "-c", mount + sys.executable + " " + sys.argv[0] + " inside"])
        import numpy as np
        import fastrt

        def full(call):
            try:
                call()
            except fastrt.ObjectStoreFullError as exc:
                return str(exc)
            return "no error"

        with fastrt.init(1, "256MiB", spill_fallback=False):
            echo = fastrt.remote(lambda x: x)
            print("large:", full(lambda: fastrt.put(np.ones(60 << 20, np.uint8))))
            assert fastrt.get(echo.remote(5)) == 5
            held = []
            def fill():
                while True:
                    held.append(fastrt.get(fastrt.put(np.ones(1 << 20, np.uint8))))
            print("many:", full(fill), len(held))
            assert 10 < len(held) < 48
            assert fastrt.get(echo.remote(6)) == 6
            held.clear()
            assert fastrt.get(echo.remote(np.ones(5 << 20, np.uint8))).sum() == 5 << 20
        with open("/dev/shm/other", "wb") as file:
            try:
                file.write(bytes(60 << 20))
            except OSError:
                pass
        try:
            fastrt.init(1, "32MiB")
        except fastrt.FastrtError as exc:
            print("start:", exc)
        try:
            fastrt.init(1)
        except fastrt.FastrtError as exc:
            print("default:", exc)
        print("left:", os.listdir("/dev/shm"))
        """
    ).finish()
    lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
    assert "60.0 MiB wanted" in lines["large"]
    assert "1.0 MiB wanted" in lines["many"]
    assert "/dev/shm" in lines["start"]
    assert "/dev/shm" in lines["default"]
    assert lines["left"] == "['other']"


# ---- the runtime folder ----


def test_runtime_folder_that_others_may_enter_or_that_is_a_link_is_refused(start):
    folder = Path(f"/tmp/frt{secrets.token_hex(4)}")
    try:
        folder.mkdir()
        for mode in (0o755, 0o770, 0o707):
            folder.chmod(mode)
            with pytest.raises(FastrtError, match=r"RUNTIME_DIR\): its mode .* lets other users in.* `chmod 700"):
                start(runtime_dir=folder)
        folder.chmod(0o700)
        link = folder / "link"
        (folder / "real").mkdir(0o700)
        link.symlink_to(folder / "real")
        (folder / "file").touch()
        for wrong in (link, folder / "file", "/proc/nowhere"):
            with pytest.raises(FastrtError, match="cannot start"):
                start(runtime_dir=wrong)
        assert not fastrt.is_initialized()
    finally:
        shutil.rmtree(folder)


def test_session_starts_where_xdg_runtime_dir_is_gone_and_tmpdir_is_long(program, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    nowhere = {"XDG_RUNTIME_DIR": str(tmp_path / "gone"), "TMPDIR": str(long)}
    out, err = program(
        """
        import fastrt
        with fastrt.init(1, "32MiB") as rt:
            print(rt.socket_path, fastrt.get(fastrt.remote(lambda: 5).remote()))
        """,
        FASTRT_RUNTIME_DIR="", FASTRT_SPILL_DIR="", **nowhere,
    ).finish()  # fmt: skip
    assert out.startswith(f"/tmp/fastrt-{os.getuid()}"), err
    assert out.endswith(" 5\n")


def test_segment_and_folder_of_a_crashed_session_are_swept_by_the_next(program, start, runtime_dir):
    driver = program(
        """
        import fastrt, threading
        rt = fastrt.init(1, "32MiB")
        print(rt.session, rt._processes.daemon.pid, rt._processes.zygote.pid, flush=True)
        threading.Event().wait(100)
        """
    )
    session, *pids = driver.wait_for_line(" ").split()
    for pid in (driver.pid, *map(int, pids)):
        os.kill(pid, signal.SIGSTOP)  # all at once: none may clean up after another
    for pid in (*map(int, pids), driver.pid):
        os.kill(pid, signal.SIGKILL)
    driver.finish(-9)
    assert Path(f"/dev/shm/fastrt-{session}").exists()
    rt = start()
    assert not Path(f"/dev/shm/fastrt-{session}").exists()
    assert os.listdir(runtime_dir) == [rt.session]


def test_session_that_lives_is_not_swept_by_the_next(program, start, runtime_dir, tmp_path):
    driver = program(
        f"""
        import fastrt, os
        rt = fastrt.init(1, "32MiB")
        print(rt.session, flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}):
            os.sched_yield()
        print(fastrt.get(fastrt.remote(lambda: 5).remote()))
        """
    )
    session = driver.wait_for_line("").strip()
    rt = start()
    assert set(os.listdir(runtime_dir)) == {rt.session, session}
    (tmp_path / "go").touch()
    assert driver.finish()[0].split()[-1] == "5"


# ---- the end of daemon and zygote ----


def test_session_without_a_daemon_is_an_error_everywhere_and_init_starts_another(
    start, runtime_dir, wait_until, monkeypatch, capfd
):
    from fastrt.runtime import session

    monkeypatch.setattr(session, "_DEATHS_MAX", 0)  # the first death is the last
    rt = start()
    ref, ready, view = echo.remote(1), fastrt.put(2), fastrt.get(fastrt.put(np.arange(50_000)))
    blocked = fastrt.remote(lambda: threading.Event().wait(100)).remote()
    fastrt.get(ref)
    ends = []

    def run(call):
        try:
            call()
        except FastrtError as exc:
            ends.append(exc)

    waits = [lambda: fastrt.get(blocked), lambda: fastrt.wait([blocked]), lambda: fastrt.get([ready, blocked])]
    threads = [threading.Thread(target=run, args=[call]) for call in [*waits, blocked.future().result]]
    for thread in threads:
        thread.start()
    os.kill(rt._processes.daemon.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert [type(end) for end in ends] == [NodeDiedError] * 4
    assert not fastrt.is_initialized()
    calls = [lambda: fastrt.put(1), lambda: echo.remote(1), lambda: fastrt.wait([ready]), lambda: fastrt.cancel(ref)]
    for call in calls:
        with pytest.raises(NodeDiedError, match=r"node daemon died; call fastrt\.init"):
            call()
    assert view.sum() == sum(range(50_000))
    wait_until(lambda: os.listdir(runtime_dir) == [], "the folder to go")
    start()
    assert fastrt.get(echo.remote(3)) == 3
    assert "gone for good" in capfd.readouterr().err


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, amount):
        self.count += amount
        return self.count


def test_processes_are_told_apart_by_their_names(start, wait_until):
    rt = start()
    counter = fastrt.remote(Counter).remote()
    assert fastrt.get(counter.add.remote(1)) == 1
    assert psutil.Process(rt._processes.daemon.pid).name() == "fastrt-daemon"
    zygote = psutil.Process(rt._processes.zygote.pid)
    assert zygote.name() == "fastrt-zygote"
    shown = {("fastrt-worker", "fastrt::worker"), ("fastrt-actor", "fastrt::Counter")}
    wait_until(
        lambda: {(child.name(), " ".join(child.cmdline()).strip()) for child in zygote.children()} == shown,
        "worker and actor to have their names",
    )
    assert "fastrt.worker.zygote" in " ".join(zygote.cmdline())


@pytest.mark.parametrize("order", ["zygote", "zygote daemon", pytest.param("daemon zygote", marks=pytest.mark.long)])
def test_killed_zygote_is_replaced_and_its_workers_and_nothing_is_lost(start, wait_until, tmp_path, capfd, order):
    rt = start()
    counter = fastrt.remote(max_restarts=1, max_task_retries=1)(Counter).remote()
    value = fastrt.put(np.arange(50_000))
    assert fastrt.get(counter.add.remote(1)) == 1
    seen, go = tmp_path / "seen", tmp_path / "go"

    def run(seen, go):
        child = subprocess.Popen(["sleep", "100"])
        with seen.open("a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
        while not go.exists():
            os.sched_yield()
        child.kill()
        child.wait()
        return 7

    ref = fastrt.remote(run).remote(seen, go)
    wait_until(lambda: seen.exists() and "\n" in seen.read_text(), "the task to run")
    for name in order.split():
        os.kill(getattr(rt._processes, name).pid, signal.SIGKILL)
    wait_until(lambda: seen.read_text().count("\n") == 2, "the task to run again")
    for pid in map(int, seen.read_text().splitlines()[0].split()):
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), "the first run's processes to go")
    go.touch()
    assert fastrt.get(ref, timeout=60) == 7
    assert fastrt.get(counter.add.remote(1), timeout=60) == 1  # another instance
    assert fastrt.get(value).sum() == sum(range(50_000))
    assert fastrt.get([echo.remote(k) for k in range(20)], timeout=60) == list(range(20))
    assert "gone for good" not in capfd.readouterr().err


def test_zygote_that_is_killed_too_often_is_a_clear_error(start, monkeypatch, capfd):
    from fastrt.runtime import session

    monkeypatch.setattr(session, "_DEATHS_MAX", 0)
    rt = start()
    blocked = fastrt.remote(lambda: threading.Event().wait(100)).remote()
    os.kill(rt._processes.zygote.pid, signal.SIGKILL)
    with pytest.raises(NodeDiedError):
        fastrt.get(blocked, timeout=60)
    fastrt.shutdown()
    assert "gone for good" in capfd.readouterr().err


# ---- everything at once ----


def work(seed, array, total):
    """One thread's share: every public call, with checked results."""
    rng = np.random.default_rng(seed)
    actions = [
        lambda k: fastrt.get(echo.remote(k)) == k,
        lambda k: fastrt.get(fastrt.put([k, array]))[1].sum() == total,
        lambda k: fastrt.get(fastrt.wait([echo.remote(k)] * 3, num_returns=3)[0]) == [k] * 3,
        lambda k: echo.remote(array).future().result().sum() == total,
        lambda k: cancelled_or_done(echo.remote(k)),
        lambda k: fastrt.get(fastrt.get(echo.remote([fastrt.put(k)]))[0]) == k,
        lambda k: fastrt.get(fastrt.remote(lambda x: x + seed).remote(k)) == k + seed,
        lambda k: fastrt.get([echo.remote(echo.remote(j)) for j in range(5)]) == list(range(5)),
    ]
    return [(seed, k, which) for k in range(60) for which in [rng.integers(8)] if not actions[which](k)]


def cancelled_or_done(ref):
    fastrt.cancel(ref)
    return fastrt.wait([ref]) == ([ref], [])


def test_threads_that_call_everything_at_once_get_the_right_answers(start):
    start(2, "128MiB")
    ends, array = [], np.arange(20_000)

    def guarded(seed):
        try:
            ends.append(work(seed, array, int(array.sum())))
        except BaseException as exc:
            ends.append([(seed, exc)])

    threads = [threading.Thread(target=guarded, args=[seed]) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert ends == [[]] * 8


def test_odd_entries_of_sys_path_do_not_hinder(start, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), "/also/nowhere", 5])
    start()
    assert fastrt.get(fastrt.remote(lambda: "/also/nowhere" in sys.path).remote())


def test_use_of_what_was_shut_down_says_so(start):
    from fastrt.store import client

    start()
    ref, store = fastrt.put(1), client.require()
    fastrt.shutdown()
    for call in (lambda: store.put(1), lambda: store.get(ref), lambda: store.wait([ref], 1, None)):
        with pytest.raises(NotInitializedError, match=r"shut down; call fastrt\.init"):
            call()


def test_shutdown_while_the_daemon_is_replaced_does_not_run_into_its_patience(start):
    rt = start()
    assert fastrt.get(echo.remote(1)) == 1
    old = rt._processes.daemon.pid
    os.kill(old, signal.SIGKILL)
    while rt._processes.daemon.pid == old:
        os.sched_yield()
    started = time.monotonic()
    fastrt.shutdown()
    assert time.monotonic() - started < 8


def test_worker_helps_itself_when_there_is_room_for_no_other():
    @fastrt.remote
    def deeper(levels):
        return 0 if levels == 0 else 1 + fastrt.get(deeper.remote(levels - 1))

    with fastrt.init(num_workers=1, clients_max=3, object_store_memory=64 << 20):
        assert fastrt.get(deeper.remote(5), timeout=30) == 5


def test_daemon_loads_nothing_that_only_others_need():
    """Every session waits for its daemon; what takes milliseconds to load is imported where it is used."""
    heavy = {"asyncio", "grpc", "hashlib", "numpy", "random", "secrets", "subprocess", "tempfile"}
    if sys.version_info < (3, 11):
        heavy.remove("subprocess")  # cloudpickle imports platform, which imports it there
    code = "import sys, fastrt.node.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy & set(done.stdout.split()) == set()
