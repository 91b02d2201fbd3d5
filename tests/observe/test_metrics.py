"""Figures for Prometheus: what is in them, who may read them, and that Prometheus and its tools take them."""

import importlib.util
import json
import os
import re
import select
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner

import fastrt
from fastrt.cli.main import main
from fastrt.net.address import InsecureBindError
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.store import client as store_client
from support.cluster import two_nodes

if importlib.util.find_spec("prometheus_client") is None:
    pytest.skip("prometheus-client is not installed: pip install 'fastrt[metrics]'", allow_module_level=True)

from prometheus_client.parser import text_string_to_metric_families

from fastrt.observe import metrics
from fastrt.observe.metrics import MetricsServer, exposition

TOKEN = "a token of the test"
DASHBOARD = json.loads((resources.files("fastrt.observe") / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
CLI = [sys.executable, "-c", "from fastrt.cli.main import main; main()"]


@fastrt.remote
def held(path):
    """A task that lasts until the test writes to the fifo."""
    with open(path, "rb", buffering=0) as pipe:
        pipe.read(1)


@fastrt.remote
class Counter:
    def add(self):
        return 1


@pytest.fixture(scope="module")
def rt(runtime_dir):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir.parent / "own") as runtime:
        yield runtime


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    yield str(path), lambda: os.write(fd, b"x")
    os.close(fd)


def figures(text):
    """The samples by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def now():
    return figures(exposition(store_client.require()).decode())


def scrape(address, token=None, path="/metrics", context=None):
    scheme = "http" if context is None else "https"
    request = urllib.request.Request(f"{scheme}://{address}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_figures_follow_the_session(rt, fifo, wait_until):
    path, release = fifo
    actor = Counter.remote()
    fastrt.get(actor.add.remote())
    refs = [held.remote(path) for _ in range(5)]
    running = ("fastrt_tasks", ("function", "held"), ("state", "running"))
    wait_until(lambda: now().get(running) == 1, "the first task to run")
    found = now()
    assert found["fastrt_tasks", ("function", "held"), ("state", "ready")] == 4
    assert found["fastrt_ready_queue_tasks",] == 4
    assert found["fastrt_workers", ("state", "running")] == 1
    assert found["fastrt_actors", ("state", "alive")] == 1
    assert found["fastrt_objects", ("state", "pending")] == 5
    assert found["fastrt_store_limit_bytes",] == 64 << 20
    assert found["fastrt_nodes",] == found["fastrt_daemon_up",] == 1
    assert found["fastrt_resources", ("kind", "total"), ("resource", "CPU")] == 1
    for kind in ("driver", "daemon", "worker", "actor"):
        assert found["fastrt_processes", ("kind", kind)] == 1
    memory = {key: value for key, value in found.items() if key[0] == "fastrt_process_resident_memory_bytes"}
    assert len(memory) == 4
    assert min(memory.values()) > 1 << 20
    for _ in refs:
        release()
    fastrt.get(refs)
    wait_until(lambda: running not in now(), "the tasks to end")


def test_series_are_bounded_however_many_functions_there_are(rt, fifo, monkeypatch):
    monkeypatch.setattr(metrics, "FUNCTIONS_MAX", 5)
    path, release = fifo
    refs = [held.remote(path)]
    for number in range(12):
        refs.append(held.options(name=f'f"{number}\n').remote(path))
        named = fastrt.remote(lambda: None)
        refs += [named.options(name=f"g{number}").remote()]
    found = {key: value for key, value in now().items() if key[0] == "fastrt_tasks"}
    assert len({dict(key[1:])["function"] for key in found}) <= 6
    assert sum(found.values()) == len(refs)
    for _ in range(13):
        release()
    fastrt.get(refs)


def test_promtool_has_nothing_to_say(rt):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(store_client.require()), capture_output=True, timeout=30
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_scrape_without_the_token_gets_nothing(rt):
    with MetricsServer(store_client.require(), "127.0.0.1:0", TOKEN) as server:
        for token in (None, "", "another", TOKEN + "x"):
            status, text = scrape(server.address, token)
            assert (status, "fastrt_" in text) == (401, False)
        status, text = scrape(server.address, TOKEN)
        assert (status, figures(text)["fastrt_daemon_up",]) == (200, 1)
        assert scrape(server.address, TOKEN, "/elsewhere")[0] == 404
        request = urllib.request.Request(
            f"http://{server.address}/metrics", b"x=1", {"Authorization": f"Bearer {TOKEN}"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 405
        refused.value.close()


def test_server_beyond_loopback_needs_tls(rt):
    with pytest.raises(InsecureBindError):
        MetricsServer(store_client.require(), "0.0.0.0:0", TOKEN)
    with pytest.raises(ValueError, match="demands certificates"):
        MetricsServer(store_client.require(), "127.0.0.1:0", None, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def test_certificate_of_the_cluster_opens_the_door_and_no_other_does(rt):
    programs = Identity.from_token(new_token()).for_programs()
    with MetricsServer(store_client.require(), "0.0.0.0:0", None, programs.server_context()) as server:
        address = f"127.0.0.1:{server.address.rpartition(':')[2]}"

        def knock(identity):
            context = identity.client_context()
            context.check_hostname = False
            return scrape(address, context=context)

        assert knock(programs)[0] == 200
        with pytest.raises((OSError, ssl.SSLError)):
            knock(Identity.from_token(new_token()).for_programs())
        with pytest.raises((OSError, ssl.SSLError)):
            scrape(address, context=ssl._create_unverified_context())


def test_command_prints_the_dashboard_or_says_that_nothing_runs(runtime_dir, monkeypatch):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    printed = CliRunner().invoke(main, ["metrics", "--grafana"])
    assert json.loads(printed.output) == DASHBOARD
    assert "no session is running here" in CliRunner().invoke(main, ["metrics"]).output


def test_command_serves_beside_a_program_until_the_program_ends(program, runtime_dir, tmp_path):
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    running = program(
        """
        import fastrt, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        fastrt.init(num_workers=1, object_store_memory=64 << 20)
        print("up", flush=True)
        signal.sigwait({signal.SIGUSR1})
        """
    )
    running.wait_for_line("up")
    server = subprocess.Popen(
        [*CLI, "metrics", "--port", "0", "--token-file", str(secret)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)},
    )  # fmt: skip
    address = re.match(r"http://([\d.:]+)/metrics of session ", server.stdout.readline())[1]
    assert scrape(address)[0] == 401
    status, text = scrape(address, TOKEN)
    assert (status, figures(text)["fastrt_processes", ("kind", "driver")]) == (200, 1)
    running.process.send_signal(signal.SIGUSR1)
    assert server.wait(30) == 0
    server.stdout.close()


@pytest.mark.long  # real Prometheus scrapes for some seconds
def test_prometheus_scrapes_two_nodes_and_evaluates_every_expression_of_the_dashboard(tmp_path, runtime_dir):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    port = ("--metrics-port", "0")
    with two_nodes(runtime_dir, 1, *port, of_head=port) as nodes:
        addresses = [re.search(r"^metrics: +(\S+)$", node.output, re.M)[1] for node in nodes]
        secret = nodes[0].note.token_file
        bearer = CliRunner().invoke(main, ["token", "--token-file", secret, "--metrics"]).output.strip()
        assert bearer not in Path(secret).read_text()
        assert {scrape(address)[0] for address in addresses} == {401}
        with prometheus(tmp_path, addresses, bearer) as ask:
            for expression in EXPRESSIONS:
                query = expression.replace("$instance", ".*").replace("$__rate_interval", "3s")
                found = ask(query)
                instances = {row["metric"].get("instance") for row in found} - {None}
                assert found, query
                assert not instances or instances == set(addresses), query


@contextmanager
def prometheus(folder, addresses, bearer):
    """A Prometheus that scrapes once a second; yields a function that evaluates an expression once it has scraped."""
    (folder / "token").write_text(bearer)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [
            {
                "job_name": "fastrt",
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": addresses}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # YAML includes JSON
    words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [*words, "--web.listen-address=127.0.0.1:0"], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        log = ""
        for line in process.stderr:
            log += line
            if "Server is ready to receive web requests" in line:
                break
        else:
            raise AssertionError(f"Prometheus did not start:\n{log}")
        found = re.search(r'msg="Listening on" address=(\S+)', log)

        def ask(expression):
            query = urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(f"http://{found[1]}/api/v1/query?{query}", timeout=60) as answer:
                about = json.load(answer)
            assert about["status"] == "success", about
            return about["data"]["result"]

        def scraped():
            rates = ask("count_over_time(fastrt_info[1m]) >= 6")
            return len(rates) == len(addresses)

        while not scraped():
            select.select([], [], [], 0.1)
        yield ask
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()
