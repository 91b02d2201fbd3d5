"""JAX processes that are killed, never come, or come back; and a coordinator that is killed under them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastrt.coordination import Coordinator, CoordinatorOptions, Front
from support.jax_envs import python_of

VERSION = "0.10.2"
# Long enough for the living to be heard of on a busy machine, and short enough to wait for the dead.
SILENT_S = 8
SHORT = {"heartbeat_timeout": SILENT_S}
LATER = 100  # a heartbeat timeout that nobody waits for
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "jax_two_processes.py"


def members(spawn: Any, port: int, version: str = VERSION, heartbeat_timeout: int = LATER) -> list[Any]:
    """Two connected members, each in a process of its own."""
    options = {"heartbeat_timeout": heartbeat_timeout}
    both = [spawn(version, "member", port, number, options) for number in (0, 1)]
    for member in both:
        member.tell("connect")
    for member in both:
        assert member.hear() == {"value": None}
    return both


def fatal(errors: str) -> str:
    """The line by which JAX ends its process, without what differs from run to run."""
    lines = [line for line in errors.splitlines() if "absl::Status" in line]
    words = " ".join(lines).partition("absl::Status")[2]
    return re.sub(r"\[type[^ ]*\]|\d{5,}|\{.*?\}", "", words).strip()


def end_of(member: Any, outcome: Any) -> Any:
    """What a call came to: its error, or how JAX ended the process."""
    if outcome is not None:
        return re.sub(r"\n.*|\[type.*|\{.*?\}", "", outcome["error"])
    code, _, errors = member.ended()
    return code, fatal(errors)


@pytest.mark.timeout(240)
def test_killed_task_ends_the_other_as_with_the_original(services: Any, spawn: Any) -> None:
    jobs = [members(spawn, port, heartbeat_timeout=SILENT_S) for port in services(VERSION, 2, SHORT)]
    for _, killed in jobs:
        killed.process.kill()
    ends = []
    for left, _ in jobs:
        code, _, errors = left.ended()
        ends.append((code, fatal(errors)))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGABRT
    assert "stopped sending heartbeats" in ends[0][1]


@pytest.mark.timeout(240)
def test_barrier_with_a_killed_member_ends_as_with_the_original(services: Any, spawn: Any) -> None:
    jobs = [members(spawn, port, heartbeat_timeout=SILENT_S) for port in services(VERSION, 2, SHORT)]
    for left, killed in jobs:
        left.tell("wait_at_barrier", "b", 200_000)
        killed.process.kill()
    ends = []
    for left, _ in jobs:
        code, _, errors = left.ended()
        ends.append((code, "unhealthy" in errors))
    assert ends[0] == ends[1] == (-signal.SIGABRT, True)


@pytest.mark.timeout(240)
def test_restarted_task_is_refused_and_the_others_end_as_with_the_original(services: Any, spawn: Any) -> None:
    ports = services(VERSION, 2, {})
    jobs = [members(spawn, port) for port in ports]
    for _, killed in jobs:
        killed.process.kill()
    # A refused client tries again until its time is up.
    again = [spawn(VERSION, "member", port, 1, {"init_timeout": 10}) for port in ports]
    for one in again:
        one.tell("connect")
    ends = [(end_of(one, one.hear()), end_of(left, None)) for one, (left, _) in zip(again, jobs, strict=True)]
    assert ends[0] == ends[1]
    assert "different incarnation" in str(ends[0])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", ["init_timeout", "register_timeout"])
def test_task_that_never_comes_is_a_timeout_as_with_the_original(services: Any, spawn: Any, first: str) -> None:
    """Whether the client gives up first or the service; which is not left to a race between the two."""
    options = {"init_timeout": 200, "register_timeout": 200, first: 3}
    alone = [spawn(VERSION, "member", port, 0, options) for port in services(VERSION, 2, options)]
    for one in alone:
        one.tell("connect")
    ends = [end_of(one, one.hear()) for one in alone]
    assert ends[0] == ends[1]
    assert "DEADLINE_EXCEEDED" in str(ends[0])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("version", ["0.10.2", "0.6.2", "0.4.13"])
def test_killed_keeper_is_not_noticed_by_running_jax_processes(
    spawn: Any, tmp_path: Path, wait_until: Any, version: str
) -> None:
    options = CoordinatorOptions(num_tasks=2, state_dir=tmp_path, heartbeat_timeout_s=30)
    with Front(options) as front:
        port = int(front.address.rpartition(":")[2])
        one, two = members(spawn, port, version, heartbeat_timeout=30)
        assert one.ask("key_value_set", "before", "1") == {"value": None}
        two.tell("blocking_key_value_get", "after", 100_000)
        pid = front.keeper_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: front.keeper_pid not in (None, pid), "another keeper")
        assert one.ask("blocking_key_value_get", "before", 100_000) == {"value": "1"}
        assert one.ask("key_value_set", "after", "2") == {"value": None}
        assert two.hear() == {"value": "2"}
        for member in (one, two):
            member.tell("wait_at_barrier", "b", 100_000)
        assert [member.hear() for member in (one, two)] == [{"value": None}] * 2
        for member in (one, two):
            member.tell("shutdown")
        assert [member.hear() for member in (one, two)] == [{"value": None}] * 2


@pytest.mark.timeout(240)
def test_two_process_jax_program_finishes_with_the_right_sum() -> None:
    result = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "JAX_PYTHON": str(python_of(VERSION))},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the sum over both is 28") == 2


def test_incarnations_of_jax_tasks_are_those_the_coordinator_shows(spawn: Any) -> None:
    with Coordinator(CoordinatorOptions(num_tasks=2)) as service:
        one, _ = members(spawn, int(service.address.rpartition(":")[2]))
        one.tell("get_live_nodes", [0])
        assert one.hear() == {"value": [0]}
        records = [service._core.state.members[member] for member in service._core.state.members.ids()]
        assert all(record.incarnation for record in records)
