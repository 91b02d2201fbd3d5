"""`fastrt dashboard` as a process beside a session: pages, streams, files, buttons, and its end."""

import http.client
import json
import os
import re
import shutil
import signal
import sys
import threading
import time

import pytest

import fastrt
from fastrt._core.memory import trace
from fastrt.observe import metrics
from fastrt.runtime.dashboards import dashboards
from fastrt.store import client as store_client
from support.dashboard import Dashboard


@fastrt.remote
def double(x):
    return 2 * x


@fastrt.remote
def held(name):
    event = threading.Event()
    while not os.path.exists(name):
        event.wait(0.01)


@fastrt.remote
def hangs():
    signal.pause()


@fastrt.remote
def prints(words):
    print(words)  # noqa: T201
    print("an error", file=sys.stderr)  # noqa: T201
    return fastrt.runtime_context().task_id


@fastrt.remote(name="<img src=x onerror=alert(1)>")
def fails(row):
    raise ValueError(f"row {row} is empty")


@fastrt.remote
class Counter:
    def add(self):
        return 1


@pytest.fixture(scope="module")
def dash(rt, runtime_dir):
    with Dashboard(runtime_dir, "--allow-actions") as running:
        yield running


def rows_of(section):
    return [
        [cell["text"] if isinstance(cell, dict) and "text" in cell else cell for cell in row] for row in section["rows"]
    ]


def test_overview_counts_the_tasks_that_end(rt, dash, wait_until):
    before = dict(one[:2] for one in dash.view("overview")["now"]["facts"])["tasks ended"]
    fastrt.get([double.remote(k) for k in range(1000)])

    def counted():
        return dict(one[:2] for one in dash.view("overview")["now"]["facts"])["tasks ended"] - before

    wait_until(lambda: counted() >= 1000, "the count")
    assert counted() == 1000
    wait_until(lambda: dash.view("overview")["limit"]["text"].startswith("Nothing runs"), "an idle session")
    wait_until(lambda: dash.view("overview")["rate"]["lines"][0]["values"], "two samples")


def test_task_that_waits_leads_to_its_cause(rt, dash, tmp_path, wait_until):
    gate = tmp_path / "gate"
    first = held.remote(str(gate))
    second = double.options(name="later").remote(first)
    try:
        wait_until(lambda: len(dash.view("rows", state="running")["rows"]["rows"]) == 1, "the first to run")
        (waiting,) = rows_of(dash.view("rows", state="waiting")["rows"])
        about = dash.view("task", task=waiting[0])
        assert dict(one[:2] for one in about["task"]["facts"])["state"] == "waiting"
        ((cause, name, state, *_),) = rows_of(about["chain"])
        assert (name, state) == ("held", "running")
        pid = dash.view("task", task=cause)["worker"]["rows"][0][0]["args"]["pid"]
        process = dash.view("process", pid=pid)
        assert dict(one[:2] for one in process["process"]["facts"])["runs"] == "held"
        assert [row[1] for row in rows_of(process["tasks"])] <= ["held", "later"]
    finally:
        gate.touch()
        with pytest.raises(fastrt.TaskError):  # twice None
            fastrt.get(second)


def facts_of(section):
    return {label: value for label, value, _ in section["facts"]}


def test_failures_are_grouped_and_lead_to_the_traceback(rt, dash, wait_until):
    refs = [fails.remote(row) for row in (1, 2)]
    for ref in refs:
        with pytest.raises(ValueError, match="is empty"):
            fastrt.get(ref)
    name = "<img src=x onerror=alert(1)>"
    groups = dash.view("failures")["groups"]
    (row,) = [row for row in groups["rows"] if row[1] == name]
    assert (row[3:6], row[2].startswith("test_dashboard.py:")) == ([2, 0, 0], True)
    group = dash.view(row[0]["view"], **row[0]["args"])
    assert facts_of(group["group"])["failures"] == 2
    (link,) = [row[0] for row in group["newest"]["rows"] if row[0]["text"] == "ValueError: row 1 is empty"]
    one = dash.view(link["view"], **link["args"])
    assert one["error"]["text"] == "ValueError: row 1 is empty"
    assert "in fails\n    raise ValueError" in one["traceback"]["text"]
    about = facts_of(one["failure"])
    assert (about["function"], about["outcome"], about["attempt"]) == (name, "the task has failed", 1)
    task = dash.view("task", task=about["task"])
    assert [row[0]["args"] for row in task["failures"]["rows"]] == [link["args"]]
    wait_until(lambda: [row[1] for row in dash.view("overview")["failures"]["rows"]][:1] == [name], "the next overview")
    (ended,) = [row for row in rows_of(dash.view("tasks")["ended"]) if row[0] == name]
    assert ended[2:5] == [2, 0, 2]
    assert "gone" in dash.view("failure", number=10**6)
    assert "gone" in dash.view("failures", name="nothing")


def test_every_page_has_sections_also_when_nothing_is_there(rt, dash):
    for view in (
        "overview",
        "tasks",
        "rows",
        "failures",
        "actors",
        "workers",
        "memory",
        "timeline",
        "logs",
        "nodes",
        "services",
    ):
        found = dash.view(view)
        assert found["head"]["state"] == "live"
        assert len(found) > 1, view
        assert "failed" not in found, found["failed"]
    assert "call f.remote" in dash.view("tasks")["functions"]["empty"]
    for view, args in (
        ("task", {"task": "0" * 16}),
        ("actor", {"actor": 99}),
        ("process", {"pid": 1}),
    ):
        assert "gone" in dash.view(view, **args)
    status, _, body = dash.request("/view?view=nothing", authorization=f"Bearer {dash.token}")
    assert (status, body) == (404, b"there is no such page\n")


def test_actors_are_listed_and_killed(rt, dash, wait_until):
    counter = Counter.options(name="one").remote()
    assert fastrt.get(counter.add.remote()) == 1
    wait_until(lambda: rows_of(dash.view("actors")["actors"]), "the actor's row")
    (row,) = rows_of(dash.view("actors")["actors"])
    assert row[1:4] == ["Counter", "one", "alive"]
    (button,) = dash.view("actor", actor=row[0])["kill"]["buttons"]
    assert dash.post("/" + button[1], **{**button[2], "id": "0" * 16}) == (
        200,
        {"said": "the actor is gone", "done": True},
    )
    assert dash.post("/" + button[1], **button[2]) == (200, {"said": "killed", "done": True})
    with pytest.raises(fastrt.ActorDiedError, match="from the dashboard"):
        fastrt.get(counter.add.remote())
    del counter


def test_queued_task_is_cancelled(rt, dash, tmp_path, wait_until):
    gate = tmp_path / "gate"
    running = [held.remote(str(gate)) for _ in range(2)]
    wait_until(lambda: len(dash.view("rows", state="running")["rows"]["rows"]) == 2, "both workers to be busy")
    queued = double.remote(1)
    ((number, *_),) = rows_of(dash.view("rows", name="double")["rows"])
    assert dash.post("/act/cancel", task=number) == (200, {"said": "cancelled", "done": True})
    with pytest.raises(fastrt.TaskCancelledError, match="was cancelled before it started"):
        fastrt.get(queued)
    assert dash.post("/act/cancel", task=number) == (200, {"said": "the task has ended", "done": True})
    assert dash.post("/act/cancel", task=5)[0] == 400
    gate.touch()
    fastrt.get(running)


def test_tasks_that_wait_for_resources_are_listed_by_their_demand(rt, dash, tmp_path, wait_until):
    gate = tmp_path / "gate"
    running = held.options(num_cpus=2).remote(str(gate))
    wait_until(lambda: len(dash.view("rows", state="running")["rows"]["rows"]) == 1, "the first to run")
    refs = [double.options(num_cpus=2).remote(k) for k in range(3)]
    wait_until(lambda: dash.view("nodes")["demand"]["rows"] == [["tasks", "CPU 2", 3, "waiting", "", ""]], "the demand")
    gate.touch()
    fastrt.get([running, *refs])
    wait_until(lambda: dash.view("nodes").get("demand", {}).get("rows") == [], "no demand")


def test_memory_shows_kinds_and_holders(rt, dash):
    ref = fastrt.put(bytes(5 << 20))
    found = dash.view("memory")
    kinds = {(row[0], row[1]): row[3:5] for row in found["kinds"]["rows"]}
    assert kinds["value", "bytes"] == [1, 5 << 20]
    holders = {row[1]: row[3] for row in found["holders"]["rows"]}
    assert holders["driver"] >= 5 << 20
    assert "record_call_sites=True" in found["lines"]["empty"]
    del ref


def test_log_of_a_task_is_followed_and_read_from_its_beginning(rt, dash, wait_until):
    words = "\x1b[31m<b>one</b>\x1b[0m"
    task = fastrt.get(prints.remote(words))

    def texts(**args):
        return [(line[1], line[5]) for line in dash.view("logs", **args).get("log", {"lines": []})["lines"]]

    wait_until(lambda: {*texts(task=task)} == {(False, "<b>one</b>"), (True, "an error")}, "the lines of the task")
    found = dash.view("logs", task=task)["log"]
    assert (found["follows"], [line[2] for line in found["lines"]]) == (True, ["prints", "prints"])
    pid = found["lines"][0][3]
    fastrt.get(prints.remote("two"))
    wait_until(lambda: (False, "two") in texts(), "the line that came later")
    assert (False, "two") not in texts(task=task)
    wait_until(lambda: (False, "<b>one</b>") in texts(after="start"), "the beginning")
    wait_until(lambda: (False, "<b>one</b>") in texts(worker=pid), "the lines of the process")
    assert texts(actor="none") == []
    assert "is no number" in dash.view("logs", worker="x")["failed"]["text"]
    wait_until(lambda: "no place in log files" in str(dash.view("logs", after="x").get("silent")), "the refusal")


@pytest.mark.skipif(not shutil.which("py-spy"), reason="py-spy is not installed: the extra [debug] has it")
def test_stack_of_a_worker_that_hangs_is_shown(rt, dash, wait_until):
    ref = hangs.options(max_retries=0).remote()
    try:
        wait_until(lambda: len(dash.view("rows", name="hangs", state="running")["rows"]["rows"]) == 1, "it to run")
        ((number, *_),) = rows_of(dash.view("rows", name="hangs")["rows"])
        _, path, body, _ = dash.view("task", task=number)["ask-stack"]["buttons"][0]
        assert dash.post("/" + path, **body) == (200, {"said": "its stack is being read", "done": True})

        def shown(view, **args):
            return dash.view(view, **args).get("stack", {}).get("text", "")

        wait_until(lambda: "  hangs  " in shown("process", pid=body["pid"]), "the stack", 30)
        wait_until(
            lambda: shown("task", task=number).startswith("thread MainThread sleeps, latest"), "it on both pages"
        )
        assert dash.post("/" + path, pid=os.getppid())[0] == 400
    finally:
        fastrt.cancel(ref, force=True)
    with pytest.raises(fastrt.FastrtError):
        fastrt.get(ref)


def test_metrics_are_those_of_the_command(rt, dash, wait_until):
    status, headers, body = dash.request("/metrics", authorization=f"Bearer {dash.token}")
    assert (status, headers["content-type"]) == (200, metrics.CONTENT_TYPE)
    names = {line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE")}
    text = metrics.exposition(store_client.require()).decode()
    assert names == {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert dash.request("/metrics")[0] == 401


def test_timeline_is_recorded_while_it_is_looked_at(rt, dash, wait_until):
    client = store_client.require().client
    assert not trace.enabled(client)
    assert "Record" in dash.view("timeline")["record"]["buttons"][0]
    assert dash.post("/do/record") == (200, {"said": "recording", "done": True})
    assert trace.enabled(client)

    def seen():
        fastrt.get([double.remote(k) for k in range(100)])
        lanes = dash.view("timeline", seconds=3)["lanes"]["lanes"]
        return any("double" in title for lane in lanes for *_, title in lane["slices"])

    wait_until(seen, "slices of double")
    status, _, body = dash.request("/file/timeline.json", authorization=f"Bearer {dash.token}")
    assert status == 200
    assert "double" in {event["name"] for event in json.loads(body)["traceEvents"]}
    assert dash.post("/do/stop") == (200, {"said": "stopped", "done": True})
    assert not trace.enabled(client)


def test_recording_ends_with_a_killed_dashboard(rt, runtime_dir, wait_until):
    client = store_client.require().client
    with Dashboard(runtime_dir) as other:
        wait_until(lambda: "record" in other.view("timeline"), "its session")
        assert other.post("/do/record") == (200, {"said": "recording", "done": True})
        assert trace.enabled(client)
        other.process.kill()
    wait_until(lambda: not trace.enabled(client), "the end of the recording")
    # Who looks for dashboards next removes the file of one that was killed.
    assert other.process.pid not in [one.pid for one in dashboards(runtime_dir)]
    assert not (runtime_dir / f"dashboard-{other.process.pid}.json").exists()


def test_stream_sends_changes_only(rt, dash):
    connection = http.client.HTTPConnection("127.0.0.1", dash.port, timeout=60)
    connection.request("GET", "/stream?view=nodes", headers={"authorization": f"Bearer {dash.token}"})
    answer = connection.getresponse()
    assert answer.getheader("content-type").startswith("text/event-stream")
    first = json.loads(answer.readline().removeprefix(b"data: "))
    assert [section["id"] for section in first["set"]] == first["order"]
    assert answer.readline() == b"\n"
    assert answer.readline() == b": nothing new\n"
    answer.close()
    connection.close()


def test_page_is_small_and_loads_nothing_from_elsewhere(rt, dash):
    sizes = {}
    for name in (
        "/",
        "/static/app.js",
        "/static/build.js",
        "/static/chart.js",
        "/static/style.css",
        "/static/icon.svg",
    ):
        status, headers, body = dash.request(name, authorization=f"Bearer {dash.token}")
        assert status == 200
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert b"https://" not in body
        assert b"innerHTML" not in body
        sizes[name] = len(body)
    assert sum(sizes.values()) < 60_000
    assert dash.request("/static/..%2fapp.py", authorization=f"Bearer {dash.token}")[0] == 404


def test_dashboard_outlives_programs_and_shows_the_next_one(program, runtime_dir, wait_until):
    with Dashboard(runtime_dir, "--session", "") as dash:
        shown = {name for name, _, _ in dash.view("overview")["head"]["sessions"]}
        one = program(
            """
            import signal, fastrt
            fastrt.init(1, "64MiB")
            fastrt.get(fastrt.remote(abs).remote(-1))
            fastrt.wait([fastrt.remote(max).remote(5), fastrt.remote(print).remote("before the end")], num_returns=2)
            print("ready", flush=True)
            signal.pause()
            """
        )
        one.wait_for_line("ready")
        wait_until(lambda: {name for name, _, _ in dash.view("overview")["head"]["sessions"]} - shown, "the session")
        (name,) = {name for name, _, _ in dash.view("overview")["head"]["sessions"]} - shown
        wait_until(lambda: dash.view("overview", session=name)["head"]["state"] == "live", "figures")
        wait_until(lambda: "log" in dash.view("logs", session=name), "its line")
        one.process.kill()
        wait_until(lambda: dash.view("overview", session=name)["head"]["state"] == "ended", "its end")
        ended = dash.view("overview", session=name)
        assert ended["head"]["seen"] <= time.time()
        assert "now" in ended
        assert "The session has ended" in dash.view("memory", session=name)["ended"]["text"]
        (row,) = dash.view("failures", session=name)["newest"]["rows"]
        assert row[0]["text"].startswith("TypeError: 'int' object is not iterable")
        assert "traceback" in dash.view("failure", session=name, **row[0]["args"])
        wait_until(lambda: "before the end" in str(dash.view("logs", session=name).get("log")), "its log")
        stream = http.client.HTTPConnection("127.0.0.1", dash.port, timeout=60)
        stream.request("GET", "/stream?view=overview", headers={"authorization": f"Bearer {dash.token}"})
        answer = stream.getresponse()
        answer.readline()
    answer.read()  # an open page is no reason to print an error at the end: its stream is whole
    stream.close()


def test_unusable_address_is_refused_in_words(tmp_path, runtime_dir):
    from click.testing import CliRunner

    from fastrt.cli.main import main

    env = {"FASTRT_RUNTIME_DIR": str(runtime_dir)}
    result = CliRunner().invoke(main, ["dashboard", "--host", "0.0.0.0"], env=env)
    assert result.exit_code == 1
    assert "Serving on 0.0.0.0:8365 in the clear" in result.output
    assert set(re.findall(r"--[a-z-]+", result.output)) == {"--tls-cert", "--tls-key"}  # it has no --insecure
    result = CliRunner().invoke(main, ["dashboard", "--tls-cert", __file__], env=env)
    assert "--tls-cert and --tls-key go together" in result.output
    result = CliRunner().invoke(main, ["dashboard", "--tls-cert", __file__, "--tls-key", __file__], env=env)
    assert result.exit_code == 1
