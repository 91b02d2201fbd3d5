"""`fastrt list`, `fastrt memory` and `fastrt timeline`, as another process than the driver runs them."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner

import fastrt
from fastrt.cli.main import main

# Several commands after one start of Python; each in a process of its own, for these join a session once.
SEVERAL = """
import json, os, sys
from click.testing import CliRunner
from fastrt.cli import list, memory, timeline
from fastrt.cli.main import main
results = []
for words in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if os.fork() == 0:
        result = CliRunner().invoke(main, words)
        os.write(writer, json.dumps([result.exit_code, result.output]).encode())
        os._exit(0)
    os.close(writer)
    results.append(json.loads(open(reader).read()))
    os.wait()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder():
    with pytest.MonkeyPatch.context() as patch:
        path = tempfile.mkdtemp(prefix="frt-")  # sockets need short names
        patch.setenv("FASTRT_RUNTIME_DIR", path)
        yield path
        shutil.rmtree(path)


def run(*commands):
    result = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)], capture_output=True, text=True, timeout=50
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@fastrt.remote
def add(one, two):
    return one + two


def test_without_a_session_each_says_so(folder):
    result = CliRunner().invoke(main, ["list", "tasks"])
    assert (result.exit_code, "no session is running here" in result.output) == (1, True)
    result = CliRunner().invoke(main, ["timeline", "--session", "abc", os.devnull])
    assert (result.exit_code, "whose name begins with 'abc'" in result.output) == (1, True)


def test_list_and_memory_show_a_session_and_timeline_records_one_that_does_not(folder, tmp_path):
    out = tmp_path / "out.json"
    with fastrt.init(num_workers=1, object_store_memory=64 << 20):
        refs = [fastrt.put(bytes(1 << 20)), add.remote(1, 2)]
        fastrt.get(refs[1])
        with pytest.raises(TypeError):
            fastrt.get(add.remote(1, "two"))
        code = "from fastrt.cli.main import main; main()"
        words = [sys.executable, "-c", code, "timeline", "--seconds", "0.3", str(out)]
        recorder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        while recorder.poll() is None:  # the whole time, so that some of it falls into the recording
            assert fastrt.get(add.remote(1, 2)) == 3
        assert "slices" in recorder.communicate()[0]
        names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
        assert {"add", "submit"} <= names
        objects, workers, tasks, failed, colour, memory, every, timeline, native, spans, nothing, some = run(
            ["list", "objects", "--json", "--filter", "state=sealed", "--name", "value"],
            ["list", "workers"],
            ["list", "tasks", "--state", "running"],
            ["list", "tasks", "--state", "failed", "--filter", "type=TypeError"],
            ["list", "objects", "--filter", "colour=red"],
            ["memory", "--growth", "0"],
            ["memory", "--json"],
            ["timeline", str(out)],
            ["timeline", "--seconds", "0.1", str(tmp_path / "out.pftrace")],
            ["timeline", "--seconds", "0.1", "--otlp", str(tmp_path / "spans.jsonl")],
            ["timeline"],
            ["list", "workers", "--limit", "1"],
        )
        total = len(re.findall(r"^ +\d+ ", workers[1], re.M))
        assert f"showing 1 of {total}; --limit 0 shows all workers\n" in some[1]
        assert "showing" not in workers[1]
        assert "slices" in native[1]
        assert "spans" in spans[1] or "fastrt[otlp]" in spans[1]
        assert "give a file to write, or --otlp" in nothing[1]
        assert b"running tasks" in (tmp_path / "out.pftrace").read_bytes()
        assert [row["object_id"] for row in json.loads(objects[1])] == [refs[0].hex()]
        assert re.search(rf"{os.getpid()} +driver", workers[1])
        assert tasks == [0, "no tasks\n"]
        assert re.search(r"add +TypeError +unsupported operand", failed[1])
        assert (colour[0], "there is no column 'colour'" in colour[1]) == (1, True)
        assert "(not recorded)" in memory[1]
        assert re.search(rf"{os.getpid()} +driver.* 1\.0 MiB", memory[1])
        (found,) = json.loads(every[1]).values()
        assert found["totals"]["sealed_bytes"] >= 1 << 20
        assert (timeline[0], "--seconds" in timeline[1]) == (1, True)
        with pytest.raises(fastrt.FastrtError, match="does not record"):
            fastrt.timeline()


def test_a_dead_session_is_named_and_the_others_are_shown(folder, tmp_path):
    with fastrt.init(num_workers=1, object_store_memory=64 << 20):
        dead = os.path.join(folder, "0" * 32)
        os.mkdir(dead, 0o700)
        with socket.socket(socket.AF_UNIX) as listener:  # its file is left, as after SIGKILL
            listener.bind(os.path.join(dead, "node.sock"))
        lists, memory, timeline, named = run(
            ["list", "workers"],
            ["memory"],
            ["timeline", "--seconds", "0.1", str(tmp_path / "out.json")],
            ["memory", "--session", "0000"],
        )
    shutil.rmtree(dead)
    for code, output in (lists, memory, timeline):
        assert code == 0, output
        assert "session 00000000 is left out: its node daemon was killed" in output
    assert re.search(rf"{os.getpid()} +driver", lists[1])
    assert re.search(rf"{os.getpid()} +driver", memory[1])
    assert (named[0], "no session whose name begins with '0000' is running" in named[1]) == (1, True)


@pytest.mark.long  # three nodes' worth of processes
def test_list_asks_all_nodes_of_a_cluster_once(folder, monkeypatch):
    monkeypatch.setenv("FASTRT_OBJECT_STORE_MEMORY", "64MiB")

    def command(*words):
        result = subprocess.run(["fastrt", *words], capture_output=True, text=True, timeout=50)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    try:
        started = command("start", "--head", "--port", "0", "--num-workers", "1", "--detach")
        head = re.search(r"--address (\S+)", started)[1]
        command("start", "--address", head, "--num-workers", "2", "--name", "second", "--detach")
        rows = json.loads(command("list", "workers", "--json", "--filter", "kind=worker"))
        there = [row["node"] == "second" for row in rows]
        assert there.count(False) == 1
        assert there.count(True) >= 2  # one more may have been started for the question
        assert len({row["pid"] for row in rows}) == len(rows)
        here = json.loads(command("list", "workers", "--json", "--filter", "kind=worker", "--this-node"))
        (first,) = (row["pid"] for row in rows if row["node"] != "second")
        assert first in {row["pid"] for row in here}
        counted = re.search(
            r"showing 1 of (\d+); --limit 0 shows all workers", command("list", "workers", "--limit", "1")
        )
        assert int(counted[1]) >= len(rows)
    finally:
        command("stop")
