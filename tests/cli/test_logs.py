"""`fastrt logs`: lines of running and ended sessions, filtered, followed, as JSON."""

import json
import os
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

import fastrt
from fastrt.cli.main import main
from fastrt.node.log_files import find_folders

FOLLOW = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "logs", "-f", "--raw"]


@fastrt.remote
def speak(k):
    sys.stdout.write(f"said {k}\n")
    sys.stderr.write(f"complained {k}\n")
    return fastrt.get_runtime_context().get_task_id(), os.getpid()


@fastrt.remote
class Speaker:
    def speak(self):
        sys.stdout.write("called\n")


def logs(*words):
    result = CliRunner().invoke(main, ["logs", *words])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def ended(runtime_dir):
    """A session that has ended, with the ids of its tasks and the pids that ran them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
        with fastrt.init(1, "64MiB", log_to_driver=False) as runtime:
            ran = fastrt.get([speak.remote(k) for k in range(3)])
            named = Speaker.options(name="bob").remote()
            fastrt.get(named.speak.remote())
            del named
        yield runtime.session, ran


def test_lines_of_an_ended_session_have_prefixes_and_their_streams(ended):
    out, err = logs()
    pid = ended[1][0][1]
    assert [line for line in out.splitlines() if "speak" in line] == [f"(speak pid={pid}) said {k}" for k in range(3)]
    assert err.splitlines() == [f"(speak pid={pid}) complained {k}" for k in range(3)]
    assert "(Speaker pid=" in out


def test_lines_are_found_by_task_actor_worker_session_and_node(ended):
    session, ran = ended
    assert logs("--task", ran[1][0], "--raw") == ("said 1\n", "complained 1\n")
    assert logs("--task", ran[1][0].upper() + "0" * 32, "--raw") == ("said 1\n", "complained 1\n")
    assert logs("--actor", "bob", "--raw") == logs("--actor", "Speaker", "--raw") == ("called\n", "")
    assert sum(map(len, map(str.splitlines, logs("--worker", str(ran[0][1]), "-n", "4", "--raw")))) == 4
    assert logs("--session", session[:6], "--raw", "--tail", "0") == ("", "")
    assert "called" in logs("--node", os.uname().nodename)[0]
    result = CliRunner().invoke(main, ["logs", "--task", "speak"])
    assert (result.exit_code, "'speak' is no id of a task" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["logs", "--session", "xyz"])
    assert (result.exit_code, "no session has printed anything here that fits" in result.output) == (1, True)


def test_json_has_every_field_and_sessions_are_listed(ended):
    session, ran = ended
    rows = [
        json.loads(line) for line in logs("--json", "--task", ran[2][0], "--worker", str(ran[2][1]))[0].splitlines()
    ]
    row = next(row for row in rows if row["text"] == "said 2")
    assert len(rows) == 2
    assert (row["stream"], row["name"], row["pid"], row["path"]) == ("stdout", "speak", ran[2][1], ran[2][0])
    listed = logs("--sessions")[0]
    assert session[:8] in listed
    assert "ended" in listed
    assert "20" in logs("--time", "--tail", "1")[0]


def test_follow_prints_lines_as_they_come_and_ends_with_the_session(runtime_dir, monkeypatch, wait_until):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    with fastrt.init(1, "64MiB", log_to_driver=False) as runtime:
        fastrt.get(speak.remote("first"))
        wait_until(lambda: any(one.session == runtime.session for one in find_folders(runtime_dir)), "a line")
        command = [*FOLLOW, "--session", runtime.session]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        killer = threading.Timer(30, reader.kill)
        killer.start()
        assert reader.stdout.readline() == "said first\n"
        fastrt.get(speak.remote("second"))
        assert reader.stdout.readline() == "said second\n"
    assert reader.communicate()[0] == ""
    assert reader.returncode == 0
    killer.cancel()


FLOOD = """
import fastrt, sys

@fastrt.remote
def flood(k):
    for i in range(4000):
        sys.stdout.write(f"{k} {i} " + "x" * 500 + "\\n")

@fastrt.remote
def warn(k):
    print("careful")

with fastrt.init(2, "64MiB", log_rate="64KiB"):
    fastrt.get([warn.remote(k) for k in range(38)])
    fastrt.get(flood.remote(0))
"""


def test_flood_is_cut_for_the_driver_with_a_count_and_whole_in_the_files(program, runtime_dir, monkeypatch):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    out, err = program(FLOOD).finish()
    shown = sum(" 0 " in line for line in out.splitlines())
    left_out = sum(int(line.split()[1]) for line in err.splitlines() if "were left out" in line)
    assert "more than 64 KiB a second; `fastrt logs` shows them" in err
    assert out.count("careful") in (1, 2)  # repetitions are folded, and may be left out with the flood
    assert shown < 4000 <= shown + left_out + 2
    assert sum(line.startswith("0 ") for line in logs("--raw")[0].splitlines()) == 4000
    assert logs("--raw")[0].splitlines().count("careful") == 38
