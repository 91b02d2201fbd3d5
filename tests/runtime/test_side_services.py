"""A head that serves a scheduler for other languages and a coordinator for JAX, each over the death of its process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from fastrt.cli.coordinator import coordinator
from fastrt.cli.start import start
from fastrt.coordination import KeyMissingError, connect
from fastrt.net.grpc.auth import read_token
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.scheduler import SchedulerClient, SchedulerError

START = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "start"]
JOB = ["--num-tasks", "1", "--recoverable", "--clear-after-shutdown", "--heartbeat-timeout", "60"]
SERVICES = ["--scheduler-port", "0", "--coordinator-port", "0", *JOB]


@pytest.fixture
def head(runtime_dir, tmp_path):
    """A head with both services and their state: (process, address of each service, their identity)."""
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}
    env["FASTRT_JOB"] = "training"
    words = [*START, "--head", "--port", "0", "--num-workers", "1", *SERVICES, "--state-dir", str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env) as process:
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("use it:"):
                break
        said = dict(re.findall(r"^(scheduler|coordinator): +(\S+)", text, re.M))
        assert set(said) == {"scheduler", "coordinator"}, text
        token = read_token(Path(re.search(r"--token-file (\S+)", text)[1]))
        yield process, said, Identity.from_token(token).for_programs()
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 0


def kill(process, kind):
    """Kill one of the services."""
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            if child.name() == f"fastrt-{kind}"[:15]:
                child.kill()
                return
    raise AssertionError(f"there is no {kind}")


def test_both_services_answer_and_survive_their_death(head, wait_until):
    process, addresses, identity = head
    agent = connect(addresses["coordinator"], job="training")
    agent.set("key", "value")
    with SchedulerClient(addresses["scheduler"], identity=identity) as client:
        client.register_store("127.0.0.1:1")
        ref = client.push(client.register_worker("127.0.0.1:2", "127.0.0.1:1"))
        client.increment([ref])
        counts = list(client.info().reference_count)
    assert counts[ref] == 2
    kill(process, "scheduler")
    kill(process, "coordinator")

    def is_back():
        try:
            with SchedulerClient(addresses["scheduler"], identity=identity) as client:
                return list(client.info().reference_count) == counts
        except SchedulerError:
            return False

    wait_until(is_back, "the scheduler's references", 20)
    assert agent.get("key", 20) == b"value"
    shown = CliRunner().invoke(coordinator, ["status", "--address", addresses["coordinator"]]).output
    agent.close()
    assert "training/0" in shown
    assert "recoverable" in shown
    with connect(addresses["coordinator"], job="training") as again, pytest.raises(KeyMissingError):
        again.try_get("key")  # cleared, as the command line says


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--clear-after-shutdown"], "--clear-after-shutdown is for the coordinator: give --coordinator-port"),
        (["--job", "jax_worker"], "--job is for the coordinator"),
        (["--coordinator-port", "0", "--num-tasks", "1", "--durability", "power"], "give --state-dir"),
        (["--num-tasks", "1"], "go together"),
    ],
)
def test_options_of_a_coordinator_that_make_no_sense_are_refused(words, told):
    assert told in CliRunner().invoke(start, ["--head", *words]).output


def test_scheduler_refuses_other_clusters_and_bearers(head):
    other = Identity.from_token(new_token()).for_programs()
    for shown in ({"identity": other}, {"token": "0" * 64}, {}):
        with SchedulerClient(head[1]["scheduler"], timeout_s=5, **shown) as stranger:
            with pytest.raises(SchedulerError) as refused:
                stranger.info()
            assert refused.value.code == "UNAVAILABLE"
            assert "another cluster's token" in str(refused.value) or "identity" not in shown
