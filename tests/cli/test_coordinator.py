"""`fastrt coordinator` as a user runs it."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastrt.cli.coordinator import coordinator
from fastrt.coordination import Coordinator, CoordinatorOptions, connect
from support.certificates import certificates

COMMAND = [str(Path(sys.executable).with_name("fastrt")), "coordinator"]

with Coordinator(CoordinatorOptions(num_tasks=1)) as _service, connect(_service.address):
    pass  # grpc opens now what it keeps open for good


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=30)


class Live:
    """A coordinator in a process of its own."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--address", "127.0.0.1:0", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"on (127\.0\.0\.1:\d+);", self.line)
        assert found, self.line
        self.address = found[1]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    started: list[Live] = []

    def start(*words: str) -> Live:
        started.append(Live(*words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.terminate()


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.long), True])
def test_serves_shows_itself_and_ends_at_sigterm(live: Any, tmp_path: Path, durable: bool) -> None:
    service = live("--num-tasks", "1", *(["--state-dir", str(tmp_path)] if durable else ["--ephemeral"]))
    with connect(service.address) as agent:
        agent.set("dir/[red]key", "a value\x00")
        agent.barrier("meeting")
        status = run("status", "--address", service.address)
        assert "jax_worker/0" in status.stdout
        assert "connected" in status.stdout
        assert ("durable" if durable else "ephemeral") in status.stdout
        keys = run("kv", "dir", "--address", service.address)
        assert "dir/[red]key" in keys.stdout
        assert "a value." in keys.stdout
        assert "meeting" in run("barriers", "--address", service.address).stdout
        watched = run("watch", "--address", service.address, "--count", "2", "--interval", "0.01")
        assert "jax_worker/0" in watched.stdout
    assert service.terminate() == 0


def test_restarted_on_its_directory_it_has_its_keys(live: Any, tmp_path: Path) -> None:
    first = live("--num-tasks", "1", "--state-dir", str(tmp_path))
    with connect(first.address) as agent:
        agent.set("k", "kept")
    assert first.terminate() == 0
    second = live("--num-tasks", "1", "--state-dir", str(tmp_path))
    assert "kept" in run("kv", "--address", second.address).stdout


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ([], "--num-tasks is needed"),
        (["--num-tasks", "0"], "--num-tasks"),
        (["--num-tasks", "1", "--address", "0.0.0.0:0"], "--allow-anonymous"),
        (["--num-tasks", "1", "--ephemeral", "--state-dir", "x"], "Give either --ephemeral"),
        (["--num-tasks", "1", "--tls-cert", __file__], "go together"),
        (["--num-tasks", "1", "--address", "127.0.0.1:0", "--state-dir", "/dev/null/x"], "Cannot use the state dir"),
        (["status", "--address", "127.0.0.1:1"], "Is it running"),
    ],
)
def test_mistakes_are_told_in_words(words: list[str], about: str) -> None:
    result = run(*words)
    assert result.returncode != 0
    assert about in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["--num-tasks", "1", "--durability", "power"], "give --state-dir"),
        (["--address", "127.0.0.1:1", "status"], "127.0.0.1:1: "),
        (["status", "--tls-key", __file__], "go together"),
        (["kv", "--limit", "-1"], "--limit"),
        (["watch", "--interval", "nan"], "--interval"),
    ],
)
def test_mistakes_in_words_alone_are_told_without_a_server(words: list[str], about: str) -> None:
    result = CliRunner().invoke(coordinator, words)
    assert result.exit_code in (1, 2)
    assert about in result.output


def test_one_that_wants_certificates_is_looked_into_with_one(live: Any, tmp_path: Path) -> None:
    files = certificates(tmp_path)
    tls = ["--tls-ca", str(files.client_ca), "--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    service = live("--num-tasks", "1", *tls)
    assert "jax_worker/0" in run("status", "--address", service.address, *tls).stdout
    assert "0 keys" in run("--address", service.address, *tls, "kv").stdout
    stranger = run("status", "--address", service.address)
    assert stranger.returncode == 1
    assert "want TLS (--tls-ca)" in stranger.stderr
    assert service.terminate() == 0


def test_address_beyond_loopback_is_served_when_said_aloud(live: Any) -> None:
    service = live("--num-tasks", "1", "--allow-anonymous")
    assert service.terminate() == 0
