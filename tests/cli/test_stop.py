"""`fastrt stop`: which nodes it ends. Here a node is a note, as `fastrt start` writes it, and a process that sleeps."""

import os
import secrets
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fastrt._core.memory.segment import start_time
from fastrt.cli.main import main
from fastrt.runtime.nodefile import NodeFile, nodes_here

STOP = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "stop"]


@pytest.fixture
def begin(runtime_dir):
    """Start a node: `begin(head, name, is_head)`."""
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    started, folders = [], []

    def begin(head, name, is_head=False):
        process = begin.processes[name] = subprocess.Popen(["sleep", "100"])
        started.append(process)
        folder = runtime_dir / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        folders.append(folder)
        address = f"127.0.0.1:{20_000 + len(started)}"
        note = NodeFile(
            head, name, is_head, address, str(folder / "node.sock"), 1, "", process.pid, start_time(process.pid)
        )
        note.write()
        return note

    begin.processes = {}
    yield begin
    for process in started:
        process.kill()
        process.wait()
    for folder in folders:
        (folder / "cluster.json").unlink()
        folder.rmdir()


def stop(runtime_dir, *words):
    """Run the command without a terminal: its exit code and output."""
    result = CliRunner().invoke(main, ["stop", *words], env={"FASTRT_RUNTIME_DIR": str(runtime_dir)})
    return result.exit_code, result.output


def alive(runtime_dir):
    return sorted(node.name for node in nodes_here(runtime_dir))


@pytest.fixture
def three(begin):
    return begin("127.0.0.1:1001", "one", True), begin("127.0.0.1:1001", "two"), begin("127.0.0.1:1002", "three", True)


def test_stop_ends_all_nodes_of_the_only_cluster(begin, runtime_dir):
    begin("127.0.0.1:1001", "one", True)
    begin("127.0.0.1:1001", "two")
    assert stop(runtime_dir) == (0, "2 nodes ended\n")
    assert alive(runtime_dir) == []
    assert stop(runtime_dir) == (0, "no node runs here\n")


def test_stop_without_a_terminal_lists_the_nodes_of_several_clusters_and_ends_none(three, runtime_dir):
    code, output = stop(runtime_dir)
    assert code == 1
    for note in three:
        assert f"cluster {note.head}: node {note.name}, session {note.session[:8]}" in output
    assert "--all" in output
    assert alive(runtime_dir) == ["one", "three", "two"]


def test_stop_all_ends_the_nodes_of_all_clusters(three, runtime_dir):
    assert stop(runtime_dir, "--all", "one")[0] == 2
    assert stop(runtime_dir, "--all") == (0, "3 nodes ended\n")
    assert alive(runtime_dir) == []


def test_stop_with_the_address_of_a_head_ends_the_nodes_of_that_cluster(three, runtime_dir):
    assert stop(runtime_dir, "127.0.0.1:1001") == (0, "2 nodes ended\n")
    assert alive(runtime_dir) == ["three"]


@pytest.mark.parametrize("which", ["name", "address", "session"])
def test_stop_with_a_name_ends_that_node(three, runtime_dir, which):
    name = getattr(three[1], which)
    assert stop(runtime_dir, name[:8] if which == "session" else name) == (0, "1 node ended\n")
    assert alive(runtime_dir) == ["one", "three"]


def test_stop_with_a_name_that_no_node_has_lists_what_runs(three, runtime_dir):
    code, output = stop(runtime_dir, "four")
    assert code == 1
    assert "no node or cluster 'four' runs here; these run:" in output
    assert "node two" in output
    assert alive(runtime_dir) == ["one", "three", "two"]


def test_stop_with_a_name_in_two_clusters_ends_neither(three, begin, runtime_dir):
    begin("127.0.0.1:1002", "two")
    code, output = stop(runtime_dir, "two")
    assert (code, "Nodes named 'two' of several clusters" in output) == (1, True)
    assert alive(runtime_dir) == ["one", "three", "two", "two"]


@pytest.mark.parametrize(("answer", "left"), [("n", ["one", "three", "two"]), ("y", [])])
def test_stop_on_a_terminal_asks_where_there_are_several_clusters(three, runtime_dir, answer, left):
    ours, theirs = os.openpty()
    try:
        env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)}
        process = subprocess.Popen(
            STOP, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        os.write(ours, f"{answer}\n".encode())
        out, err = process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "End all of them?" in err, out
    assert process.returncode == (1 if answer == "n" else 0)
    assert alive(runtime_dir) == left


def test_node_is_asked_to_leave_unless_its_head_ends_too_or_it_shall_end_now(begin, runtime_dir):
    for name, is_head in (("one", True), ("two", False), ("three", False), ("four", False)):
        begin("127.0.0.1:1001", name, is_head)
    assert stop(runtime_dir, "two")[0] == stop(runtime_dir, "three", "--now")[0] == stop(runtime_dir)[0] == 0
    ended = {name: -process.wait() for name, process in begin.processes.items()}
    assert ended == {"two": signal.SIGTERM, "three": signal.SIGINT, "four": signal.SIGINT, "one": signal.SIGTERM}
