"""Processes that are forked from one interpreter: they are as children that were started one by one."""

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from fastrt.config import Config
from fastrt.errors import FastrtError
from fastrt.net import supervise
from fastrt.net.supervise import reap
from fastrt.runtime import processes, siblings
from fastrt.runtime.siblings import Sibling, Stage

TELL = (
    "import json, os, threading; print(json.dumps([os.getsid(0), os.getpid(), sys.argv[1:], "
    "os.environ.get('FRUIT'), 'csv' in sys.modules, sorted(fd for fd in os.listdir('/proc/self/fd') "
    "if 'libffi' not in os.path.realpath('/proc/self/fd/' + fd)), "  # ctypes keeps it open where libffi is built so
    "threading.active_count(), main.__module__]), flush=True); sys.stdin.read()"
)


def sibling(name, *arguments, call=TELL, **more):
    return Sibling(name, "json.tool", call, arguments, pipes=True, **more)


@pytest.mark.parametrize("together", [True, False])
def test_each_is_a_child_with_its_own_session_arguments_descriptors_and_variables(monkeypatch, together):
    monkeypatch.setattr(siblings, "can_adopt_orphans", lambda: together)
    kept, other = os.pipe()
    stages = [
        Stage((), (sibling("one", "a", "b", fds=(kept,)), sibling("two"))),
        Stage(("csv",), (sibling("three"),), {"FRUIT": "plum"}),
    ]
    children = siblings.start(stages, 30.0)
    try:
        told = [json.loads(child.stdout.readline()) for child in children]
        for child, (session, pid, *_) in zip(children, told, strict=True):
            assert (session, pid, psutil.Process(pid).ppid()) == (child.pid, child.pid, os.getpid())
        assert [one[2:4] for one in told] == [[["a", "b"], None], [[], None], [[], "plum"]]
        assert [one[4] for one in told] == [False, False, together]  # who is alone imports nothing for others
        standard = {"0", "1", "2"}
        opened = [len(set(one[5]) - standard) for one in told]  # one of them was open for the listing itself
        assert opened == [2, 1, 1]
        assert str(kept) in told[0][5]
        assert all(one[6:] == [1, "json.tool"] for one in told)
        names = [psutil.Process(child.pid).name() for child in children]
        assert names == ["fastrt-one", "fastrt-two", "fastrt-three"]
        assert all("json.tool" in " ".join(psutil.Process(child.pid).cmdline()) for child in children)
        children[0].send_signal(signal.SIGKILL)
        assert children[0].wait() == -signal.SIGKILL
        children[1].stdin.close()
        assert children[1].wait(30) == 0
        assert children[2].poll() is None
    finally:
        for child in children:
            reap(child, 0)
        os.close(kept)
        os.close(other)


def test_exit_status_is_that_of_the_call():
    (child,) = siblings.start([Stage((), (sibling("one", call="sys.exit(7)"),))], 30.0)
    assert reap(child, 30.0)
    assert child.returncode == 7


def test_error_while_the_shared_modules_load_is_reported_and_nothing_stays(capfd):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FastrtError, match="its error output"):
        siblings.start([Stage((), (sibling("one"),)), Stage(("nothing_like_this",), ())], 30.0)
    assert "nothing_like_this" in capfd.readouterr().err
    assert len(os.listdir("/proc/self/fd")) == before


def test_processes_do_not_share_an_interpreter_with_options_for_one_of_them():
    stages = [Stage((), (sibling("one", flags=("-O",)), sibling("two")))]
    children = siblings.start(stages, 30.0)
    for child in children:
        reap(child, 0)
    assert not any(isinstance(child, siblings._Adopted) for child in children)


def test_interpreter_with_threads_from_its_start_forks_nothing(monkeypatch, tmp_path):
    """A fork has none of them, and may wait for a lock that one holds."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    (child,) = siblings.start([Stage((), (sibling("one"),))], 30.0)
    assert json.loads(child.stdout.readline())[6] == 2
    assert not isinstance(child, siblings._Adopted)
    reap(child, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_orphans_of_the_program_are_not_adopted_later():
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid)"
    (child,) = siblings.start([Stage((), (sibling("one"),))], 30.0)
    reap(child, 0)
    orphan = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    assert psutil.Process(orphan).ppid() != os.getpid()
    os.kill(orphan, signal.SIGKILL)


def test_several_threads_start_processes_at_once():
    children = []

    def start():
        children.extend(siblings.start([Stage((), (sibling("one", call="sys.exit(7)"),))], 30.0))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        reap(child, 30.0)
    assert [child.returncode for child in children] == [7, 7, 7]


def test_shared_modules_of_a_node_start_no_thread():
    """A fork of a process with threads, or one that uses gRPC already, may hang."""
    code = (
        "import importlib, os\nfrom fastrt.runtime.processes import _SHARED\n"
        "for name in (*_SHARED, 'fastrt.cluster.head'): importlib.import_module(name)\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"1\n"


def test_killed_interpreter_is_an_error_and_what_it_forked_ends(runtime_dir, wait_until, monkeypatch):
    """The restart of a session's processes tries again after such an error."""
    started = []

    def spawn(*words, **options):
        started.append(supervise.spawn(*words, **options))
        return started[-1]

    def kill(wanted):
        started[0].kill()
        started[0].wait()
        return False

    monkeypatch.setattr(siblings, "spawn", spawn)
    monkeypatch.setattr(siblings, "adopt_orphans", kill)
    with pytest.raises(FastrtError, match="did not start"):
        processes.Processes(Config.load(num_workers=1, object_store_memory="64MiB")).start_daemon()
    wait_until(lambda: not list(runtime_dir.rglob("node.sock")), "the daemon has ended")
