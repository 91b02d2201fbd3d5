"""Stacks and flame graphs of workers, actors and drivers, read by another process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

import fastrt
from fastrt.cli.main import main
from fastrt.observe import stacks
from fastrt.store import client as store_client


@fastrt.remote(max_retries=0)
def hangs_in_c():
    signal.pause()


@fastrt.remote(max_retries=0)
def hangs_in_a_loop():
    while True:
        pass


@fastrt.remote
class Hanging:
    def hang(self):
        signal.pause()


@pytest.fixture(scope="module")
def hanging(runtime_dir):
    """A session whose workers and actor hang; their processes by the name of their task or call."""
    if not shutil.which("py-spy"):
        pytest.skip("py-spy is not installed: the extra [debug] has it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
        with fastrt.init(2, "64MiB", log_to_driver=False, runtime_dir=runtime_dir):
            actor = Hanging.remote()
            refs = [hangs_in_c.remote(), hangs_in_a_loop.remote(), actor.hang.remote()]
            until = time.monotonic() + 30
            names = {}
            while len(names) < 3:
                assert time.monotonic() < until, names
                found = stacks.processes(store_client.require())
                names = {name: process for process in found for name in process.tasks.values()}
            yield names
            fastrt.kill(actor)
            for ref in refs[:2]:
                fastrt.cancel(ref, force=True)


def run(*words):
    """Run a command in another process, which is no parent of the workers."""
    code = "from fastrt.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=50)
    return result.returncode, result.stdout, result.stderr


def test_stack_of_a_worker_that_hangs_in_c_ends_in_the_task(hanging):
    process = hanging["hangs_in_c"]
    code, out, err = run("stack", str(process.pid))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"worker {process.pid}: hangs_in_c (")
    assert lines[1] == "  thread MainThread sleeps, latest call last"
    assert lines[2].startswith(f"    hangs_in_c  {__file__}:")  # the first: the frames of fastrt are left out
    assert [line for line in lines if "zygote.py" in line] == []
    assert "_become_worker" in run("stack", "--full", str(process.pid))[1]


def test_stack_of_a_loop_and_of_an_actor_are_read_as_they_are(hanging):
    (loop,) = stacks.read(hanging["hangs_in_a_loop"])
    assert [frame.function for frame in loop.user_frames] == ["hangs_in_a_loop"]
    (hang,) = [one for one in stacks.read(hanging["Hanging.hang"]) if one.user_frames[0].is_user_code]
    assert [frame.function.rpartition(".")[2] for frame in hang.user_frames] == ["hang"]
    assert hang.user_frames[0].line > 0


def test_native_frames_show_the_call_into_c(hanging):
    (main_thread,) = stacks.read(hanging["hangs_in_c"], native=True)
    first, *others = main_thread.user_frames
    assert first.function == "hangs_in_c"
    assert {frame.line for frame in others} == {0}
    assert "libc" in others[-1].file  # pause()


def test_without_a_pid_all_that_run_something_are_shown_and_with_all_the_driver_too(hanging):
    code, out, _ = run("stack", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {name for row in rows for name in row["tasks"].values()} == set(hanging)
    code, out, err = run("stack", "--all")
    if (stacks._ptrace_scope() or 0) == 0:
        assert f"driver {os.getpid()}" in out, err


def test_other_process_than_the_sessions_is_refused(hanging):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for command in ("stack", "flame"):
            code, out, err = run(command, str(other.pid))
            assert (code, out) == (1, "")
            assert f"process {other.pid} is no worker, actor or driver" in err
    finally:
        other.communicate(b"\n")


def test_flame_graph_has_the_function_also_of_a_sleeping_worker_with_idle(hanging, tmp_path):
    file = tmp_path / "loop.svg"
    code, _, err = run("flame", str(hanging["hangs_in_a_loop"].pid), "-d", "1", "-o", str(file))
    assert code == 0, err
    assert "hangs_in_a_loop" in file.read_text()
    stacks.record(hanging["hangs_in_c"], 1, tmp_path / "idle.json", idle=True)
    assert "hangs_in_c" in (tmp_path / "idle.json").read_text()


def test_without_py_spy_the_command_says_what_to_install(hanging, monkeypatch, tmp_path):
    monkeypatch.setattr(stacks.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(stacks.StackError, match=r"pip install 'fastrt\[debug\]'"):
        stacks.read(hanging["hangs_in_c"])


def test_ended_process_is_reported():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    if not shutil.which("py-spy"):
        pytest.skip("py-spy is not installed: the extra [debug] has it")
    with pytest.raises(stacks.StackError, match="has ended"):
        stacks.read(stacks.Process(ended.pid, "worker", {}))


def test_each_limit_of_the_kernel_has_its_advice():
    assert "prctl" in stacks.why_refused("driver", 1)
    assert "SYS_PTRACE" in stacks.why_refused("worker", 1)
    assert "sudo" in stacks.why_refused("worker", 2)
    assert "not even root" in stacks.why_refused("worker", 3)
    assert "SYS_PTRACE" in stacks.why_refused("worker", None)


def test_usage_needs_one_of_both():
    result = CliRunner().invoke(main, ["stack", "12", "--all"])
    assert result.exit_code == 2
