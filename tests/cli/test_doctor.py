"""`fastrt doctor`, `fastrt config` and `fastrt --version`, run as a user runs them."""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import fastrt

COMMAND = [sys.executable, "-c", "from fastrt.cli.main import main; main(prog_name='fastrt')"]
PROGRAM = """
import sys, fastrt, numpy
runtime = fastrt.init(num_workers=1, object_store_memory="64MiB")
ref = fastrt.put(numpy.ones(100_000))
print(runtime.session, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(monkeypatch):
    """Runtime and spill folders of this test alone, and no other setting."""
    for name in list(os.environ):
        if name.startswith("FASTRT_") and not name.startswith("FASTRT_TEST"):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="frt-") as name:
        monkeypatch.setenv("FASTRT_RUNTIME_DIR", f"{name}/rt")
        monkeypatch.setenv("FASTRT_SPILL_DIR", f"{name}/spill")
        yield Path(name)


def run(*words, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=50, env=environment)


def doctor(**variables):
    """The findings by name, and the exit code."""
    result = run("doctor", "--json", **variables)
    assert not result.stderr
    found = json.loads(result.stdout)
    assert found["fine"] == (result.returncode == 0) == all(one["level"] != "wrong" for one in found["checks"])
    return {one["name"]: one for one in found["checks"]}, result.returncode


def settings(*words, **variables):
    result = run("config", "--json", *words, **variables)
    found = json.loads(result.stdout)
    return {row["variable"]: row for row in found["settings"]}, found["problem"], result.returncode


def test_doctor_finds_this_machine_fit(folder):
    found, code = doctor()
    assert code == 0, found
    names = {"python", "packages", "/dev/shm", "huge pages", "open files", "processes", "locked memory", "CPUs"}
    names |= {"memory limit", "ptrace scope", "clock", "settings", "runtime folder", "spill folder", "port 6465"}
    assert names <= found.keys()
    for one in found.values():
        assert one["found"]
        assert bool(one["advice"]) == (one["level"] != "fine"), one
    shown = run("doctor")
    assert shown.returncode == 0
    assert "fastrt can work here" in shown.stdout
    assert not list(folder.iterdir())


@pytest.mark.parametrize("words", [["doctor"], ["config"], ["--version"]])
def test_commands_import_neither_grpc_nor_numpy(folder, words):
    code = f"import sys; from fastrt.cli.main import main\ntry: main({words})\nexcept SystemExit: pass\n"
    code += "print([n for n in ('numpy', 'grpc', 'google.protobuf', 'asyncio', 'cryptography') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_leftover_of_a_killed_session_is_named_and_the_printed_command_removes_it(folder):
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        session = driver.stdout.readline().strip()
        found, _ = doctor()
        assert session not in found["dead sessions"]["found"]  # it runs
        assert session not in run("doctor", "--clean").stdout
        (status,) = json.loads(run("status", "--json").stdout)
        assert status["session"] == session
        pids = {row["pid"] for row in status["processes"] if psutil.pid_exists(row["pid"])}
        pids |= {driver.pid, *(child.pid for child in psutil.Process(driver.pid).children(recursive=True))}
        processes = [psutil.Process(pid) for pid in pids]
        for act in ("suspend", "kill"):  # so that none has time to clean up after another
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(process, act)()
    psutil.wait_procs(processes, 10)
    found, code = doctor()
    one = found["dead sessions"]
    assert (code, one["level"]) == (0, "note")
    assert str(folder / "rt" / session) in one["found"]
    command = re.search(r"fastrt .+", one["advice"])[0]
    cleaned = run(*shlex.split(command)[1:])
    assert cleaned.returncode == 0, cleaned.stderr
    assert str(folder / "rt" / session) in cleaned.stdout
    assert not list((folder / "rt").iterdir())
    assert not Path(f"/dev/shm/fastrt-{session}").exists()
    assert session not in doctor()[0]["dead sessions"]["found"]


def test_port_in_use_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found, code = doctor(FASTRT_PORT=str(port))
        assert (code, found[f"port {port}"]["level"]) == (1, "wrong")
        assert "FASTRT_PORT" in found[f"port {port}"]["advice"]
        found, code = doctor(FASTRT_ADDRESS=f"127.0.0.1:{port}")
        assert (code, found["FASTRT_ADDRESS"]["level"]) == (0, "fine")
    found, code = doctor(FASTRT_ADDRESS=f"127.0.0.1:{port}", FASTRT_SCHEDULER="nowhere", FASTRT_COORDINATOR_PORT="x")
    assert code == 1
    assert {found[name]["level"] for name in ("FASTRT_ADDRESS", "FASTRT_SCHEDULER", "port x")} == {"wrong"}


def test_wrong_settings_and_unknown_variables_are_named(folder):
    found, code = doctor(FASTRT_SPIN_US="fast", FASTRT_NUM_WORKER="2")
    assert (code, found["settings"]["level"]) == (1, "wrong")
    assert "correct or unset FASTRT_SPIN_US" in found["settings"]["advice"]
    assert found["variables"]["level"] == "note"
    assert "FASTRT_NUM_WORKER" in found["variables"]["found"]


def test_folder_that_others_may_enter_is_wrong(folder):
    (folder / "rt").mkdir()
    (folder / "rt").chmod(0o755)
    found, code = doctor()
    assert (code, found["runtime folder"]["level"]) == (1, "wrong")
    assert run("doctor", "--clean").returncode == 1


def test_config_shows_values_origins_and_no_secrets(folder):
    found, problem, code = settings(FASTRT_NUM_WORKERS="3", FASTRT_TOKEN="fastrt1-secret", FASTRT_TOKEN_FILE="/t")
    assert (problem, code) == ("", 0)
    assert (found["FASTRT_NUM_WORKERS"]["value"], found["FASTRT_NUM_WORKERS"]["source"]) == (3, "environment")
    assert (found["FASTRT_SPIN_US"]["value"], found["FASTRT_SPIN_US"]["source"]) == (100, "default")
    assert found["FASTRT_RUNTIME_DIR"]["value"] == str(folder / "rt")
    assert found["FASTRT_TOKEN"]["value"] == "(hidden)"
    assert found["FASTRT_TOKEN_FILE"]["value"] == "/t"
    assert (found["FASTRT_PORT"]["value"], found["FASTRT_HEAD"]["value"]) == (6465, False)
    shown = run("config", FASTRT_TOKEN="fastrt1-secret")
    assert shown.returncode == 0
    assert "secret" not in shown.stdout
    assert "FASTRT_OBJECT_STORE_MEMORY" in shown.stdout


def test_config_shows_only_changes_and_reports_errors(folder):
    found, _, code = settings("--changed", FASTRT_SPIN_US="fast", FASTRT_WORKERS="2")
    assert code == 1
    assert found["FASTRT_SPIN_US"]["error"].endswith("must be a whole number")
    assert found["FASTRT_WORKERS"]["for"] == "no part of fastrt"
    assert "FASTRT_TRACE" not in found
    _, problem, code = settings(FASTRT_NUM_WORKERS="8", FASTRT_CLIENTS_MAX="4")
    assert "raise clients_max" in problem
    assert code == 1


def test_version_names_the_build():
    lines = run("--version").stdout.splitlines()
    assert lines[0].startswith(f"fastrt, version {fastrt.__version__}")
    assert lines[1].startswith("Python 3.")
    assert lines[2].startswith("core: ")
