"""The end of a session runs cleanup code of actors and workers, in a limited time."""

import asyncio
import atexit
import io
import threading
import time

import fastrt

SOON_S = 30.0


def note(folder, what):
    with open(f"{folder}/{what}", "a") as file:
        file.write("x")


def hold(folder, what):
    try:
        note(folder, f"{what} began")
        threading.Event().wait(SOON_S)
    finally:
        note(folder, f"{what} finally")


@fastrt.remote
class Actor:
    def __init__(self, folder, name):
        self.folder, self.name = str(folder), name
        self.log = open(f"{folder}/{name} log", "w")  # noqa: SIM115
        self.log.write("unflushed")
        atexit.register(note, self.folder, f"{name} atexit")

    def hold(self):
        hold(self.folder, self.name)

    def ready(self):
        return True


@fastrt.remote
class AsyncActor(Actor.cls):
    async def wait(self):
        try:
            note(self.folder, f"{self.name} began")
            await asyncio.Event().wait()
        finally:
            note(self.folder, f"{self.name} finally")


@fastrt.remote
class Stubborn:
    def __init__(self, folder):
        self.folder = str(folder)

    def ready(self):
        return True

    def __ray_shutdown__(self):
        note(self.folder, "stuck")
        threading.Event().wait(SOON_S)


@fastrt.remote
def work(folder):
    atexit.register(note, str(folder), "worker atexit")
    hold(str(folder), "worker")


def test_session_that_ends_lets_all_clean_up(tmp_path, runtime_dir, wait_until):
    with fastrt.init(2, "64MiB", runtime_dir=runtime_dir):
        idle, busy = Actor.remote(tmp_path, "idle"), Actor.remote(tmp_path, "busy")
        threads = Actor.options(max_concurrency=2).remote(tmp_path, "threads")
        loop = AsyncActor.options(lifetime="detached", name="loop").remote(tmp_path, "loop")
        fastrt.get([actor.ready.remote() for actor in (idle, busy, threads, loop)], timeout=SOON_S)
        running = [busy.hold.remote(), threads.hold.remote(), loop.wait.remote(), work.remote(tmp_path)]
        began = [tmp_path / f"{name} began" for name in ("busy", "threads", "loop", "worker")]
        wait_until(lambda: all(path.exists() for path in began), "the calls to run")
    del running
    there = {path.name for path in tmp_path.iterdir()}
    for name in ("idle", "busy", "threads", "loop"):
        assert f"{name} atexit" in there
        assert (tmp_path / f"{name} log").read_text() == "unflushed"
    assert {"busy finally", "loop finally", "worker finally", "worker atexit"} <= there


def test_cleanup_code_that_takes_too_long_is_ended(tmp_path, runtime_dir, capfd):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir, cleanup_timeout_s=0.3):
        actor = Stubborn.remote(tmp_path)
        fastrt.get(actor.ready.remote(), timeout=SOON_S)
        started = time.monotonic()
    assert time.monotonic() - started < SOON_S / 2  # which the method waits
    assert (tmp_path / "stuck").exists()
    assert "__ray_shutdown__" in capfd.readouterr().err  # the stack


class SlowFile(io.RawIOBase):
    """A file that is slow to say whether it can be flushed: so is the flush of a process with very many objects."""

    def writable(self):
        threading.Event().wait(1.3)
        return False


@fastrt.remote
def open_slowly():
    global slow
    slow = SlowFile()


@fastrt.remote
def wait_at_the_end():
    atexit.register(threading.Event().wait, SOON_S)


def test_worker_whose_own_end_is_slow_prints_no_stacks(runtime_dir, capfd):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir):
        fastrt.get(open_slowly.remote(), timeout=SOON_S)
    assert capfd.readouterr().err == ""
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir):
        fastrt.get(wait_at_the_end.remote(), timeout=SOON_S)
        started = time.monotonic()
    assert time.monotonic() - started < SOON_S / 2
    assert "most recent call first" in capfd.readouterr().err


def test_session_goes_on_where_cleanup_code_takes_too_long(tmp_path, runtime_dir, wait_until):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir, cleanup_timeout_s=0.3):
        actor = Stubborn.remote(tmp_path)
        fastrt.get(actor.ready.remote(), timeout=SOON_S)
        del actor
        wait_until((tmp_path / "stuck").exists, "the cleanup code to run")
        wait_until(lambda: not fastrt.list_actors(), "the actor's end")


def test_order_to_end_that_comes_when_an_actor_has_ended_is_no_error(program):
    out, err = program(
        """
        import os, signal, sys, threading
        import fastrt

        @fastrt.remote
        class Actor:
            def __init__(self):
                sys.stdout = self

            def write(self, text):
                return len(text)

            def flush(self):  # the last time after the process has left the session
                os.kill(os.getpid(), signal.SIGTERM)

            def pid(self):
                return os.getpid()

        with fastrt.init(1, "64MiB"):
            actor = Actor.remote()
            pid = fastrt.get(actor.pid.remote())
            del actor
            while os.path.exists(f"/proc/{pid}"):
                threading.Event().wait(0.01)
        """
    ).finish()
    assert (out, err) == ("", "")
