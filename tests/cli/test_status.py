"""`fastrt status`, as another process than the driver runs it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

import fastrt
from fastrt.cli import status as status_module

COMMAND = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "status"]


@pytest.fixture
def folder(monkeypatch):
    path = tempfile.mkdtemp(prefix="frt-")  # sockets need short names
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", path)
    yield path
    shutil.rmtree(path)


def status(*arguments):
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_status_without_a_session_says_so(folder):
    assert status().startswith("no session is running here")
    assert json.loads(status("--json")) == []


def test_status_shows_processes_objects_and_memory(folder, wait_until, capsys):
    add = fastrt.remote(int.__add__)
    with fastrt.init(num_workers=2, object_store_memory=64 << 20) as runtime:
        assert fastrt.get([add.remote(k, 1) for k in range(10)]) == list(range(1, 11))
        ref = fastrt.put(bytes(1 << 20))
        (session,) = json.loads(status("--json"))
        assert session["session"] == runtime.session
        kinds = [process["kind"] for process in session["processes"]]
        assert sorted(kinds) == ["daemon", "driver", "worker", "worker"]
        driver = next(process for process in session["processes"] if process["kind"] == "driver")
        assert driver["pid"] == os.getpid()
        assert driver["bytes_held"] >= 1 << 20
        assert session["objects"] >= 1
        assert session["bytes_max"] == 64 << 20
        assert sum(process["tasks_done"] for process in session["processes"]) == 10
        wait_until(lambda: json.loads(status("--json"))[0]["queued"] == 0, "an empty queue")
        text = status()
        assert f"session {runtime.session[:8]}" in text
        assert "worker" in text
        assert status("--check") == ""
        status_module._show([{**session, "processes": session["processes"] * 30}])  # of a large session
        shown = capsys.readouterr().out
        assert "showing 100 of 120 processes; --json has all" in shown
        assert shown.count("worker-") == 50
        del ref
    assert subprocess.run([*COMMAND, "--check"], timeout=50).returncode == 1


def test_status_of_a_crashed_session_says_that_nobody_answers(folder):
    session = os.path.join(folder, "0" * 32)
    os.mkdir(session)
    open(os.path.join(session, "node.sock"), "w").close()
    (found,) = json.loads(status("--json"))
    assert "no node daemon answers" in found["error"]
    assert "no node daemon answers" in status()
