"""Rows and log lines of other nodes: from busy, silent and lost nodes, by pages, and from hostile ones."""

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import fastrt
from fastrt.cluster.questions import SOCKET, Answer, Desk, Question, Questions
from fastrt.foreign_text import ForeignTextError
from fastrt.node.daemon import sweep_sessions
from fastrt.observe import elsewhere
from fastrt.observe.answers import STACK
from fastrt.observe.debugging import Said, Waiting
from fastrt.observe.memory import Summary
from fastrt.observe.stacks import Process, Stack
from fastrt.store import debugging, join
from fastrt.store.messages import AskNode, ListNodes, NodePage
from support.browser import open_page
from support.cluster import FASTRT, RunningNode
from support.dashboard import Dashboard
from support.terminal import Terminal

ROWS = 3000
LINES = 1500  # several pages
ATTACKER = 40001


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    """ "one" is the driver's node; "two", as on another machine, has one worker; "three" has none."""
    far = runtime_dir.parent / "far"
    head = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1", "--name", "one")
    join_ = ("--address", head.head, "--token-file", head.note.token_file)
    two = RunningNode(far, *join_, "--num-workers", "1", "--name", "two")
    three = RunningNode(runtime_dir, *join_, "--num-workers", "0", "--name", "three")
    yield {"one": head, "two": two, "three": three}
    for node in (three, two, head):
        out, err = node.stop()
        assert "Traceback" not in err, out + err
    for folder in (runtime_dir, far):
        sweep_sessions(folder, folder.parent / "spill")


@pytest.fixture(scope="module")
def driver(runtime_dir, nodes):
    with fastrt.init(address=nodes["one"].head, runtime_dir=runtime_dir, log_to_driver=False) as runtime:
        yield runtime


@pytest.fixture
def busy(driver, tmp_path, wait_until):
    """All workers of all nodes run this until the test ends."""
    go_on = tmp_path / "go on"

    @fastrt.remote
    def hold(path):
        while not os.path.exists(path):
            fastrt.wait([], num_returns=0)

    refs = [hold.options(scheduling=name).remote(str(go_on)) for name in ("one", "two")]
    wait_until(lambda: len(fastrt.list_tasks(name="*hold", state="running")) >= 2, "all workers to be busy")
    yield  # not the references: pytest keeps what a fixture yields until the module has ended, and the segment with it
    go_on.touch()
    fastrt.get(refs, timeout=30)


@contextmanager
def stopped(process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def command(runtime_dir, *words):
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)}
    found = subprocess.run([*FASTRT, *words], capture_output=True, text=True, timeout=60, env=env, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout, found.stderr


def test_busy_nodes_and_one_without_workers_answer(busy, nodes, runtime_dir):
    tasks = fastrt.list_tasks(name="*hold", state="running")
    assert {row["node"] for row in tasks} >= {"two"}
    assert {row["node"] for row in fastrt.list_workers(kind="daemon")} == {"one", "two", "three"}
    assert [row["node"] for row in fastrt.list_workers(kind="worker", node="two")] == ["two"]
    three = nodes["three"].note.session
    assert {row["name"] for row in fastrt.list_workers(kind="tool", node=three[:8])} == {"uplink"}
    rows = json.loads(command(runtime_dir, "list", "tasks", "--json", "--node", "two")[0])
    assert [row["state"] for row in rows] == ["running"]
    daemons = json.loads(command(runtime_dir, "list", "workers", "--json", "--filter", "kind=daemon")[0])
    assert {row["node"]: row["session"] for row in daemons} == {n: nodes[n].note.session[:8] for n in nodes}
    with pytest.raises(ValueError, match="there is no node 'ten'; there are: one, "):
        fastrt.list_tasks(node="ten")


def test_node_that_does_not_answer_is_named_and_the_others_are_shown(driver, nodes, capfd):
    assert len(fastrt.list_workers(kind="daemon")) == 3  # opens the streams to the nodes
    with stopped(nodes["two"].child("fastrt.runtime.uplink")):
        rows = fastrt.list_workers(kind="daemon", timeout=4.0)
    assert {row["node"] for row in rows} == {"one", "three"}
    assert "rows of node two are missing: it did not answer within 4" in capfd.readouterr().err


def test_rows_come_by_pages_limits_first_and_counted(driver, nodes, runtime_dir):
    @fastrt.remote(scheduling="two")
    class Holder:
        def __init__(self):
            self.refs = [fastrt.put(k) for k in range(ROWS)]

        def count(self):
            return len(self.refs)

    holder = Holder.remote()
    assert fastrt.get(holder.count.remote(), timeout=30) == ROWS
    rows = fastrt.list_objects(limit=0, node="two", what="value")
    assert len({row["object_id"] for row in rows}) == len(rows) >= ROWS
    assert len(fastrt.list_objects(limit=7, node="two")) == 7
    # A filter that sees each row.
    assert len(fastrt.list_objects(limit=0, node="two", counted=0, what="val*")) >= ROWS
    shown, _ = command(runtime_dir, "list", "objects", "--node", "two", "--limit", "5")
    count = int(shown.rsplit("showing 5 of ", 1)[1].split(";")[0].replace(",", ""))
    assert count >= ROWS
    fastrt.kill(holder)


def test_log_of_another_node_is_read_tailed_and_merged_also_without_its_driver(driver, nodes, runtime_dir, wait_until):
    @fastrt.remote
    def say(count):
        for k in range(count):
            print(f"line {k} " + "x" * 200, flush=True)  # noqa: T201

    fastrt.get([say.options(scheduling="two").remote(LINES), say.options(scheduling="one").remote(3)], timeout=60)
    socket_path, node = nodes["one"].note.socket_path, nodes["two"].note.session

    def texts():
        return [line.text.split()[1] for page in elsewhere.log_pages(socket_path, node, {}) for line in page.lines]

    wait_until(lambda: len(texts()) >= LINES, "the daemon to have written all lines")
    assert texts() == [str(k) for k in range(LINES)]
    out, _ = command(runtime_dir, "logs", "--node", "two", "-n", "2")
    assert [line.split(") ")[1].split()[1] for line in out.splitlines()] == [str(LINES - 2), str(LINES - 1)]
    assert all(", node=two) line" in line for line in out.splitlines())
    assert len({line.text for line in elsewhere.tail_log(socket_path, node, LINES - 1, {}).lines}) == LINES - 1

    def merged():
        return [json.loads(line) for line in command(runtime_dir, "logs", "--all-nodes", "--json")[0].splitlines()]

    wait_until(lambda: len(merged()) >= LINES + 3, "the lines of the other node")
    rows = merged()
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert {(row["node"], row["text"][:6]) for row in rows} >= {("one", "line 0"), ("two", "line 0")}
    assert elsewhere.read_log(socket_path, node, {"worker": 1}).lines == []
    assert len(elsewhere.read_log(socket_path, node, {}, limit=3).lines) == 3


def test_memory_and_stacks_of_a_busy_node_are_read_there(busy, nodes, runtime_dir):
    session = nodes["two"].note.session
    out, err = command(runtime_dir, "memory", "--node", "two")
    assert (f"session {session[:8]} (node two): " in out, err) == (True, "")
    assert re.search(r"\d+ +worker ", out)
    found = json.loads(command(runtime_dir, "memory", "--json", "--growth", "0")[0])
    assert {one["node"] for one in found.values()} == {"one", "two", "three"}
    assert found[session]["totals"]["bytes_max"] > 0
    assert {group["what"] for group in found[session]["groups"]} >= {"function"}
    here = json.loads(command(runtime_dir, "memory", "--json", "--this-node")[0])
    assert session not in here
    if shutil.which("py-spy"):
        (row,) = json.loads(command(runtime_dir, "stack", "--json", "--node", "two")[0])
        assert row["node"] == "two"
        assert any(name.endswith("hold") for name in row["tasks"].values())
        out, _ = command(runtime_dir, "stack", str(row["pid"]))
        assert f"worker {row['pid']} on node two: " in out
        assert re.search(rf"hold  {re.escape(__file__)}:\d+", out)


def test_debugger_of_a_task_on_another_node_is_listed_and_used_from_here(driver, nodes, runtime_dir, wait_until):
    @fastrt.remote(max_retries=0, scheduling="two")
    def stops(x):
        y = x + 1
        breakpoint()
        while y == 0:
            pass
        return y

    ref = stops.remote(1)
    path, node = nodes["one"].note.socket_path, nodes["two"].note.session
    path_there = nodes["two"].note.socket_path
    far = str(Path(path_there).parent.parent)
    wait_until(lambda: elsewhere.read_stops(path, node), "the task to stop", 30)
    (stop,) = elsewhere.read_stops(path, node)
    out, _ = command(runtime_dir, "debug", "--list")
    assert re.match(rf"fastrt debug {stop.pid} --node two: task .*stops \(\w+\) waits in a debugger at {__file__}", out)
    with contextlib.ExitStack() as stack:

        def start():
            terminal = Terminal("debug", env={**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)})
            stack.callback(terminal.close)
            terminal.expect(f"(pid {stop.pid} on node two) waits in a debugger")
            return terminal

        terminal = start()
        terminal.expect("-> while y == 0:\n(Pdb) ")
        assert terminal.ask("p y") == "2\n"
        assert terminal.ask("y = 0") == ""
        terminal.send("\x04", end="")
        terminal.expect(f"the task waits on: fastrt debug {stop.pid} --node two\n")
        again = start()
        again.expect("(Pdb) p y\n2\n(Pdb) y = 0\n(Pdb) ")  # as it was left
        assert "Breakpoint 1 at" in again.ask(f"b {int(stop.place.rpartition(':')[2]) + 2}")
        assert (
            "is attached already" in elsewhere.converse(path, node, stop.pid, "c").end
        )  # another terminal is not let in
        on_its_node = Terminal("debug", str(stop.pid), "--this-node", env={**os.environ, "FASTRT_RUNTIME_DIR": far})
        stack.callback(on_its_node.close)
        on_its_node.expect(f"process {again.process.pid} on {platform.node()} is attached already\n")
        again.send("c")
        again.expect("c\n")
        wait_until(lambda: not debugging.waiting(debugging.folder_of(path_there)), "the loop to run")
        again.send("\x03", end="")
        again.expect("The code is interrupted.\n")
        again.expect("(Pdb) ")
        again.ask("y = 20")
        assert "1" in again.ask("cl 1")
        again.send("c")
        again.expect("the task goes on without the debugger\n")
        assert again.leave() == 0
    assert fastrt.get(ref, timeout=30) == 20
    assert "no task of process" in elsewhere.converse(path, node, stop.pid).end
    assert "no task of process 1 waits" in elsewhere.converse(path, node, 1, "c").end


@pytest.mark.parametrize("limit", [None, pytest.param(6.0, marks=pytest.mark.long)])
def test_timeouts_of_the_owner_stand_still_while_a_task_is_debugged_on_another_node(
    limit, driver, nodes, wait_until, tmp_path
):
    """A task of this node waits for one on node two, which waits for another one there, which stops."""
    gate = tmp_path / "it has stopped"

    @fastrt.remote(max_retries=0, num_cpus=0)
    def stops(x):
        breakpoint()
        return x

    @fastrt.remote(max_retries=0, num_cpus=0)
    def asks(gate, below, *args):
        ref = below.remote(*args)
        while not os.path.exists(gate):
            fastrt.wait([], num_returns=0)
        return fastrt.get(ref, timeout=0.3) + 1

    stops_there, asks_there = stops.options(scheduling="two"), asks.options(scheduling="two", timeout=limit)
    ref = asks.options(scheduling="one", timeout=limit).remote(str(gate), asks_there, str(gate), stops_there, 1)
    begun = time.monotonic()
    path, two = nodes["one"].note.socket_path, nodes["two"].note.session
    folder = debugging.folder_of(path)
    wait_until(lambda: elsewhere.read_stops(path, two), "the task to stop", 30)
    (stop,) = elsewhere.read_stops(path, two)
    wait_until(lambda: debugging.waiting(folder, with_elsewhere=True), "this node to learn of it")
    gate.touch()
    got = []
    reader = threading.Thread(target=lambda: got.append(fastrt.get(ref, timeout=0.3)))
    reader.start()
    late = time.monotonic() + 0.8 if limit is None else begun + limit + 0.5
    wait_until(lambda: time.monotonic() > late, "all limits to pass", 30)
    assert (reader.is_alive(), got) == (True, [])
    assert debugging.waiting(folder) == []  # `fastrt debug` lists it for the other node only
    assert elsewhere.converse(path, two, stop.pid, "c").end
    reader.join()
    assert got == [3]
    wait_until(lambda: not debugging.waiting(folder, with_elsewhere=True), "the time to go on")


def test_only_a_process_of_the_session_has_its_stack_read_for_another_node(driver, nodes):
    path, node = nodes["one"].note.socket_path, nodes["two"].note.session
    for pid in (1, os.getpid()):
        with pytest.raises(elsewhere.NodeSilentError, match=f"process {pid} is no worker, actor or driver"):
            elsewhere.read_stack(path, node, pid)
    for filters in ("{}", '{"pid": "1", "native": false}', '{"pid": 1, "native": false, "more": 1}'):
        with pytest.raises(elsewhere.NodeSilentError, match="the question has the fields pid, native"):
            elsewhere.ask(path, node, Question(STACK, filters, "", 0))


def test_dashboard_shows_the_log_of_another_node(driver, nodes, runtime_dir, wait_until):
    @fastrt.remote
    def say():
        print("from afar", flush=True)  # noqa: T201

    fastrt.get(say.options(scheduling="two").remote(), timeout=60)
    session = nodes["one"].note.session
    with Dashboard(runtime_dir, "--session", session) as dash:

        def text(**args):
            return str(dash.view("logs", **args).get("log"))

        wait_until(lambda: "from afar" in text(node="two"), "its line", 20)
        wait_until(lambda: "lines" in text(node="two", after="start"), "its beginning", 20)
        wait_until(lambda: "no node nine" in str(dash.view("logs", node="nine").get("nothing")), "the refusal")
        names = {row[0]["text"] for row in dash.view("nodes")["nodes"]["rows"]}
        assert {"one", "two"} <= names
        three = nodes["three"].note.session
        links = {one["text"]: one["args"]["node"] for one in dash.view("workers")["nodes"]["links"]}
        assert links["node two"] == nodes["two"].note.session
        wait_until(lambda: "processes" in dash.view("workers", node=three), "the processes of a node", 20)
        rows = dash.view("workers", node=three)["processes"]["rows"]
        (pid,) = {row[0]["args"]["pid"] for row in rows if row[1] == "driver"}  # `fastrt start`
        assert (
            dict(one[:2] for one in dash.view("process", node=three, pid=pid)["process"]["facts"])["kind"] == "driver"
        )
        wait_until(lambda: "lines" in dash.view("memory", node=three), "the memory of a node", 20)
        assert dict(one[:2] for one in dash.view("memory", node=three)["store"]["facts"])["size"] > 0
        assert dash.post("/do/stack", session=session, pid=int(pid), node=three)[0] == 200
        wait_until(lambda: "stack" in dash.view("process", node=three, pid=pid), "the stack, or why it is refused", 20)
        assert dash.post("/do/stack", session=session, pid=1, node="f" * 32)[0] == 400
        assert "no such node" in dash.view("memory", node="f" * 32)["failed"]["text"]


@pytest.mark.long
def test_reader_opens_pages_of_another_node(driver, nodes, runtime_dir, tmp_path, browser):
    go_on = tmp_path / "go on"

    @fastrt.remote
    def hold(path):
        print("from afar", flush=True)  # noqa: T201
        while not os.path.exists(path):
            fastrt.wait([], num_returns=0)

    ref = hold.options(scheduling="two").remote(str(go_on))
    with Dashboard(runtime_dir, "--session", nodes["one"].note.session) as dash:
        page, wrong = open_page(browser, f"http://127.0.0.1:{dash.port}/")
        page.set_default_timeout(30_000)
        page.goto(f"{dash.url}#workers")
        page.get_by_role("link", name="node two").click()
        page.locator("tbody tr", has_text="hold").locator("a").first.click()
        page.locator("dl.facts", has_text="worker").wait_for()
        if shutil.which("py-spy"):
            page.get_by_role("button", name="Show its stack").click()
            assert "test_other_nodes.py" in page.locator("pre", has_text="hold").inner_text()
        page.evaluate("() => { location.hash = 'logs?node=two'; }")
        page.get_by_text("from afar").first.wait_for()
        page.evaluate("() => { location.hash = 'memory'; }")
        page.get_by_role("link", name="node two").click()
        page.locator("dl.facts", has_text="size").wait_for()
        assert wrong == []
    go_on.touch()
    fastrt.get(ref, timeout=30)


@pytest.mark.parametrize("rows", ["{}", "[1]", "[[1, 2]]", '["' + "x" * 300_000, "[" * 40])
def test_answer_that_is_no_rows_is_named(driver, nodes, rows, monkeypatch):
    monkeypatch.setattr(elsewhere, "ask", lambda *given: Answer(rows))
    (found,) = elsewhere.read("", {"0": "zero"}, "tasks", {}, 0, 1.0)
    assert found.error
    assert not found.rows
    for read in (elsewhere.read_log, elsewhere.read_memory, elsewhere.read_processes, elsewhere.read_stack):
        with pytest.raises(ForeignTextError):
            read("", "0", *([{}] if read is elsewhere.read_log else [1] if read is elsewhere.read_stack else []))


@pytest.mark.parametrize(
    ("read", "row"),
    [
        (Summary.from_rows, [{"totals": {"a": "b"}, "spill_dir": "", "more": 0}]),
        (Summary.from_rows, [{"totals": {}, "spill_dir": "", "more": 0}, {"line": {"site": "x"}}]),
        (Waiting.from_row, {"pid": 1, "kind": "task"}),
        (Said.from_row, {"screen": "", "prompt": None, "end": ""}),
        (Process.from_row, {"pid": 1, "kind": "worker", "tasks": {"a": 1}}),
        (
            Stack.from_row,
            {"thread": "", "thread_id": 1, "is_active": True, "has_gil": False, "frames": [["f", "file", "1"]]},
        ),
    ],
)
def test_malformed_memory_or_stack_of_another_node_is_refused(read, row):
    with pytest.raises(ForeignTextError):
        read(row)


def test_questions_end_with_the_stream_and_a_peer_of_an_older_version_is_named():
    async def play():
        sent = []
        questions = Questions(lambda field, message, nbytes: sent.append(message))

        class Stream:
            """All that the desk uses of a stream."""

        stream = Stream()
        stream.questions = questions
        desk = Desk(lambda node: (node != "gone", stream), lambda question: Answer())
        ask = AskNode("there", "tasks", "{}", "", 0, 200)
        assert "version" in (await desk._pass(ask)).error
        questions.peer_answers = True
        assert (await desk._pass(ask)).error == "it did not answer within 0.2 s"
        assert questions.is_empty
        questions.on_page(sent[0])  # too late
        waiting = asyncio.create_task(desk._pass(ask))
        while questions.is_empty:
            await asyncio.wait([waiting], timeout=0.01)
        questions.close("the network was cut")
        assert (await waiting).error == "the network was cut"
        desk.close()

    asyncio.run(play())


def test_socket_serves_this_user_only_and_refuses_other_messages(driver, nodes):
    path = Path(nodes["one"].note.socket_path).with_name(SOCKET)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    with pytest.raises(fastrt.AttachError, match="list_nodes"):
        join.inquire(str(path), ListNodes(), NodePage)
    page = join.inquire(str(path), AskNode("0" * 32, "tasks", "{}", "", 0, 100), NodePage)
    assert page.error == "it is no member of the cluster"


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")
def test_another_user_who_reaches_the_socket_gets_nothing():
    async def attack():
        with tempfile.TemporaryDirectory(prefix="frt-") as folder:
            desk = Desk(lambda node: (False, None), lambda question: Answer())
            await desk.open(str(Path(folder, "node.sock")))
            for path, mode in ((folder, 0o755), (Path(folder, SOCKET), 0o666)):
                os.chmod(path, mode)  # as if the folder protected nothing
            child = os.fork()
            if child == 0:
                try:
                    os.setresuid(ATTACKER, ATTACKER, ATTACKER)
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(str(Path(folder, SOCKET)))
                        os._exit(0 if b"this node belongs to uid 0, not to 40001" in sock.recv(1000) else 1)
                finally:
                    os._exit(2)
            _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
            desk.close()
            return status

    assert asyncio.run(attack()) == 0


def test_lost_node_is_no_reason_to_wait(driver, nodes, runtime_dir, wait_until):
    nodes["two"].kill()
    rows = fastrt.list_workers(kind="daemon", timeout=5.0)
    assert {row["node"] for row in rows} == {"one", "three"}
    wait_until(lambda: len(fastrt.nodes()) == 2, "the node to be gone", 30)
    assert {row["node"] for row in fastrt.list_workers(kind="daemon")} == {"one", "three"}
