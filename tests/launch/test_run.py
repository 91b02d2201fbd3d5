"""`fastrt run` on this machine: alone, and as a job whose ranks are given by options."""

import signal
import subprocess

import pytest

from fastrt.launch import manifest
from support.cluster import FASTRT

OPTIONS = manifest.ManifestOptions("job", 2, "image", ["app.py"], "token")
POD = manifest.objects(OPTIONS)[2]["spec"]["template"]["spec"]
PRE_STOP = POD["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
COUNT = """
import os, sys
import fastrt

@fastrt.remote
def where(k):
    return fastrt.runtime_context().get_node_id()

with fastrt.init():
    print(len(fastrt.nodes()), sys.argv[1:])
    ids = [node["NodeID"] for node in fastrt.nodes()]
    found = fastrt.get([where.options(scheduling=node).remote(0) for node in ids])
    print(found == ids)
print("bye", file=sys.stderr)
sys.exit(7)
"""


def test_program_alone_has_its_own_output_and_exit_code_and_a_session(command, program):
    code, out, err = command.run("--num-workers", "1", program(COUNT), "--rank", "x")
    assert code == 7, err
    assert out == "1 ['--rank', 'x']\nTrue\n"
    assert err == "bye\n"


READS = """
import sys, fastrt
with fastrt.init():
    text = sys.stdin.read()
    print(sys.argv[1:])
    sys.stdout.write(text * 2)
sys.exit(255)
"""


def test_program_at_a_path_with_spaces_reads_its_input_and_writes_megabytes(command, tmp_path):
    path = tmp_path / "a folder" / "my app.py"
    path.parent.mkdir()
    path.write_text(READS)
    text = "0123456789abcde\n" * 100_000
    words = [*FASTRT, "run", "--num-workers", "1", str(path), "an argument", ""]
    ended = subprocess.run(words, env=command.env, input=text, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 255, ended.stderr
    assert ended.stdout == f"{['an argument', '']}\n{text * 2}"


def test_options_of_a_node_in_the_program_are_ignored_with_a_warning(command, program):
    text = "import fastrt\nfastrt.init(num_workers=3, labels={'a': 'b'})\nprint(fastrt.cluster_resources()['CPU'])\n"
    code, out, err = command.run("--num-workers", "1", program(text))
    assert (code, out) == (0, "1.0\n"), err
    assert "num_workers, labels of fastrt.init have no effect here" in err


def test_module_runs_and_a_program_that_is_missing_is_reported(command):
    assert command.run("--num-workers", "1", "-m", "this")[0] == 0
    assert command.run()[0] == 2
    code, _, err = command.run("--num-workers", "1", "/nowhere/app.py")
    assert code == 2
    assert "/nowhere/app.py" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_the_programs_and_so_is_the_end_by_it(command, program, number):
    text = "import fastrt, threading\nfastrt.init()\nprint('up', flush=True)\nthreading.Event().wait(60)\n"
    process = command.start("--num-workers", "1", program(text))
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -number, err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_program_that_does_not_end_after_sigterm_is_killed_after_the_grace(command, program):
    text = "import signal, threading\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\n"
    text += "threading.Event().wait(60)\n"
    process = command.start("--num-workers", "1", "--grace", "0.2", program(text))
    assert process.stdout.readline() == "up\n"
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert "did not end within 0.2 s after SIGTERM (--grace) and is killed" in err


def test_program_ends_when_the_command_is_killed(command, program, wait_until):
    text = "import fastrt, os, threading\nfastrt.init()\nprint(os.getpid(), flush=True)\nthreading.Event().wait(60)\n"
    process = command.start("--num-workers", "1", program(text))
    pid = int(process.stdout.readline())
    process.kill()
    wait_until(lambda: _is_gone(pid), "the program to end")


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_two_ranks_are_one_cluster_and_both_end_with_the_program(command, program):
    path = program(COUNT)
    words = ("--size", "2", "--head", "127.0.0.1", "--job", "two", "--num-workers", "1")
    first = command.start("--rank", "0", *words, path, "a")
    other = command.start("--rank", "1", *words, path, "a")
    out, err = first.communicate(timeout=50)
    assert (first.returncode, out) == (7, "2 ['a']\nTrue\n"), err
    assert "fastrt: node 2 of 2: " in err
    assert "Traceback" not in err
    out, err = other.communicate(timeout=60)
    assert (other.returncode, out, err) == (0, "", "")


HEAD = """
import subprocess, sys, fastrt

HEAD = "node:__internal_head__"

@fastrt.remote(num_cpus=0, resources={HEAD: 1})
def where():
    return fastrt.get_runtime_context().get_node_id()

@fastrt.remote(num_cpus=0, resources={HEAD: 2})
def twice():
    return "ran"  # never: two nodes of the cluster, but one head

with fastrt.init():
    nodes = fastrt.nodes(implied=True)
    print(len(nodes), fastrt.cluster_resources(implied=True)[HEAD])
    heads = [node for node in nodes if HEAD in node["Resources"]]
    print([node["IsHere"] for node in heads], [node["Resources"][HEAD] for node in heads])
    print(fastrt.get(where.remote()) == heads[0]["NodeID"])
    try:
        print(fastrt.get(twice.remote(), timeout=1))
    except Exception as error:
        print(type(error).__name__)
    print(subprocess.run([*sys.argv[1:]]).returncode)
"""
INNER = """
import sys, fastrt
with fastrt.init():
    print(len(fastrt.nodes()), fastrt.cluster_resources()["CPU"], flush=True)
sys.exit(3)
"""


def test_resource_of_the_head_is_once_in_the_cluster_and_a_run_inside_has_its_own_session(command, program, tmp_path):
    path, inner = program(HEAD), tmp_path / "inner.py"
    inner.write_text(INNER)
    words = ("--size", "2", "--head", "127.0.0.1", "--job", "head", "--num-workers", "1")
    first = command.start("--rank", "0", *words, path, *FASTRT, "run", "--num-workers", "1", str(inner))
    other = command.start("--rank", "1", *words, path)
    out, err = first.communicate(timeout=50)
    assert out.splitlines() == ["2 1.0", "[True] [1.0]", "True", "GetTimeoutError", "1 1.0", "3"], err
    assert other.communicate(timeout=20) == ("", "")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_node_that_comes_60_s_late_joins(command, program):
    path = program(COUNT)
    words = ("--size", "2", "--head", "127.0.0.1", "--job", "late", "--num-workers", "1")
    first = command.start("--rank", "0", *words, path)
    reports = []
    while len(reports) < 2:  # after the patience of 30 s, and again
        line = first.stderr.readline()
        assert line, reports
        reports += [line] if "1 of 2 nodes are there" in line else []
    other = command.start("--rank", "1", *words, path)
    out, err = first.communicate(timeout=60)
    assert (first.returncode, out) == (7, "2 []\nTrue\n"), err
    assert [int(line.split()[2]) for line in reports] == [30, 60]
    assert "node 2 of 2: " in err
    assert other.communicate(timeout=20) == ("", "")


def test_program_starts_with_fewer_nodes_and_the_missing_one_is_named(command, program):
    text = (
        "import fastrt, threading\nwith fastrt.init():\n    print(len(fastrt.nodes()))\n    threading.Event().wait(1)\n"
    )
    words = ("--rank", "0", "--size", "2", "--head", "127.0.0.1", "--job", "one", "--num-workers", "1")
    code, out, err = command.run(*words, "--min-nodes", "1", "--patience", "0.1", program(text))
    assert (code, out) == (0, "1\n"), err
    assert "1 of 2 nodes are there:\n  rank 1: has not connected to port" in err


def test_job_whose_nodes_do_not_come_ends_in_time_and_names_them(command, program):
    words = ("--rank", "0", "--size", "2", "--head", "127.0.0.1", "--job", "none", "--num-workers", "1")
    code, out, err = command.run(*words, "--timeout", "0.1", program("print('never')"))
    assert (code, out) == (1, ""), err
    assert "1 of 2 nodes came in 0.1 s (--timeout):\n  rank 1: has not connected" in err


THERE = """
import fastrt, os, signal, sys, threading

@fastrt.remote(max_retries=0, resources={"there": 1})
def work(path):
    open(path, "w").close()
    threading.Event().wait(1)
    return bytes(1 << 20)

asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *about: asked.set())
"""
LEAVES = """
with fastrt.init():
    ref = work.remote(sys.argv[1])
    while len(fastrt.nodes()) == 2:
        threading.Event().wait(0.01)
    print(len(fastrt.get(ref)), len(fastrt.nodes()))
"""


def test_other_ranks_end_at_once_with_the_reason_why_rank_0_cannot_start(command, program, runtime_dir):
    words = ("--size", "2", "--head", "127.0.0.1", "--job", "fails", "--num-workers", "1")
    other = command.start("--rank", "1", *words, program(""), FASTRT_RUNTIME_DIR=f"{runtime_dir}1")
    unsafe = runtime_dir.with_name("unsafe")
    unsafe.mkdir()
    unsafe.chmod(0o777)
    first = command.start("--rank", "0", *words, program(""), FASTRT_RUNTIME_DIR=str(unsafe))
    for process in (first, other):
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, ""), err
        assert "its mode 777 lets other users in" in err


STAYS = """
with fastrt.init():
    open(sys.argv[1], "w").close()
    asked.wait()
    threading.Event().wait(1)
    print(len(fastrt.get(work.remote(sys.argv[1]))))
"""


def two_ranks(command, program, text, path):
    words = ("--size", "2", "--head", "127.0.0.1", "--job", "leaves", "--num-workers", "1")
    folders = [command.env["FASTRT_RUNTIME_DIR"] + name for name in ("rank0", "rank1")]  # as on two machines
    first = command.start("--rank", "0", *words, program(THERE + text), str(path), FASTRT_RUNTIME_DIR=folders[0])
    there = ("--resources", '{"there": 1}', program(THERE + text))
    return first, command.start("--rank", "1", *words, *there, FASTRT_RUNTIME_DIR=folders[1])


def test_rank_that_gets_sigterm_leaves_once_its_task_has_ended_and_its_value_is_moved(
    command, program, tmp_path, wait_until
):
    path = tmp_path / "begun"
    first, other = two_ranks(command, program, LEAVES, path)
    wait_until(path.exists, "the task to begin", 30)
    other.terminate()
    _, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    assert "got SIGTERM: it leaves in 30 s at most (--grace)" in err
    out, err = first.communicate(timeout=30)
    assert (first.returncode, out) == (0, f"{1 << 20} 1\n"), err


@pytest.mark.parametrize("way", ["SIGTERM", "preStop"])
def test_nodes_of_a_job_that_is_asked_to_end_stay_for_its_program(command, program, tmp_path, wait_until, way):
    """By SIGTERM, or by the command that Kubernetes runs in a pod before it sends SIGTERM."""
    path = tmp_path / "up"
    first, other = two_ranks(command, program, STAYS, path)
    wait_until(path.exists, "the program to begin", 30)
    if way == "SIGTERM":
        other.terminate()
        first.terminate()
    else:
        for name in ("rank1", "rank0"):
            asks = [*FASTRT, *PRE_STOP[1:]]
            command.also(asks, FASTRT_RUNTIME_DIR=command.env["FASTRT_RUNTIME_DIR"] + name)
    out, err = first.communicate(timeout=30)
    assert (first.returncode, out) == (0, f"{1 << 20}\n"), err
    _, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
