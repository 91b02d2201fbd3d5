"""`fastrt ps` as a user runs it: serve, look, be killed, go on."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.membership import ClusterMember, ClusterOptions, ClusterScheduler, MemberOptions, Phase, Role
from fastrt.net.grpc.auth import read_token

COMMAND = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "ps"]

with ClusterScheduler(ClusterOptions(grpc_address="127.0.0.1:0", allow_anonymous=True)):
    pass  # grpc opens now what it keeps open for good


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=50)


class Served:
    """A scheduler's process, and the addresses that it named."""

    def __init__(self, *words: str) -> None:
        command = [*COMMAND, "scheduler", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.read = ""
        for line in self.process.stdout:
            self.read += line
            if line.startswith("cluster of"):
                self.addresses = re.findall(r"[\d.]+:\d+", line)
                return
        raise AssertionError(self.read)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*words: str) -> Served:
        started.append(Served(*words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def member(address: str, role: Role, name: str, token: str | None) -> ClusterMember:
    made = ClusterMember(role, MemberOptions(address, member_id=name, heartbeat_s=0.2, token=token))
    made.start()
    return made


@pytest.mark.parametrize("anonymous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_killed_scheduler_resumes_with_every_rank_and_finishes(serve: Any, tmp_path: Path, anonymous: bool) -> None:
    words = ("--num-workers", "2", "--num-servers", "1", "--state-dir", str(tmp_path / "state"))
    secret = () if anonymous else ("--token-file", str(tmp_path / "token"))
    words += secret or ("--allow-anonymous",)
    first = serve("--address", "127.0.0.1:0", *words)
    address = first.addresses[0]
    names = [(Role.WORKER, "w0"), (Role.WORKER, "w1"), (Role.SERVER, "s0")]
    token = None if anonymous else read_token(tmp_path / "token")
    members = [member(address, role, name, token) for role, name in names]
    try:
        ranks = [one.wait_ready(60) for one in members]
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(10)
        first = serve("--address", address, *words)
        assert [view.member_id for view in members[2].fetch()] == ["s0", "w0", "w1"]
        for one in members:
            one.publish(1)
            one.wait_for(lambda one=one: one.phase is Phase.READY, 60, "the cluster to be ready again")
        assert [one.rank for one in members] == ranks
        shown = run("status", "--address", address, *secret).stdout
        assert all(name in shown for name in ("3 members", "w0", "w1", "s0", "alive"))
        for one in members[1:]:
            with pytest.raises(TimeoutError):
                one.finish(timeout_s=0.1)
        first.process.send_signal(signal.SIGKILL)  # that they have finished outlives it too
        first.process.wait(10)
        first = serve("--address", address, *words)
        members[0].finish(60)
        for one in members:
            one.wait_ended(60)
    finally:
        for one in members:
            one.close()
    first.process.send_signal(signal.SIGTERM)
    out, _ = first.process.communicate(timeout=60)
    assert "the cluster has finished" in out


def test_http_is_served_with_a_token_that_is_made(serve: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    words = ("--num-workers", "1", "--num-servers", "0", "--address", "127.0.0.1:0")
    places = ("--http-address", "127.0.0.1:0", "--grpc-address", "127.0.0.1:0", "--token-file", str(token))
    service = serve(*words, *places)
    frames, _, http = service.addresses
    assert token.stat().st_mode & 0o077 == 0
    asked = run("request", "GET", "/state", "--http-address", http, "--token-file", str(token))
    assert "ClUSTER_STARTING" in asked.stdout, asked.stderr
    body = '{"worker_num": 0, "server_num": 1}'
    asked = run("request", "POST", "/scaleout", body, "--http-address", http, "--token-file", str(token))
    assert "not ready" in asked.stdout
    assert asked.returncode == 1
    shown = run("status", "--address", frames, "--http-address", http, "--token-file", str(token))
    assert "0 members, ClUSTER_STARTING" in shown.stdout, shown.stderr
    service.process.send_signal(signal.SIGTERM)
    out, _ = service.process.communicate(timeout=60)
    assert "stopping" in out
    assert service.process.returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--num-workers", "1"), "--num-servers"),
        (("--num-workers", "0", "--num-servers", "0", "--allow-anonymous"), "there must be from 1"),
        (("--num-workers", "1", "--num-servers", "1", "--http-address", "127.0.0.1:0"), "--token-file"),
        (("--num-workers", "1", "--num-servers", "1"), "--allow-anonymous"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: tuple[str, ...], says: str) -> None:
    result = run("scheduler", *words)
    assert result.returncode != 0
    assert says in result.stderr


def test_status_without_a_scheduler_says_so() -> None:
    result = run("status", "--address", "127.0.0.1:9")
    assert result.returncode == 1
    assert "Is the scheduler running?" in result.stderr


def test_command_starts_without_numpy() -> None:
    code = "import sys, fastrt.cli.ps; sys.exit('numpy' in sys.modules)"  # 0.1 s, which a scheduler has no use for
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
