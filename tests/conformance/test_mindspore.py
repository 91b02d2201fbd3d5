"""fastrt's members with the real scheduler of MindSpore 2.7, where FASTRT_MINDSPORE names a Python that has it.

python3.11 -m venv ENV && ENV/bin/pip install mindspore==2.7.0
FASTRT_MINDSPORE=ENV/bin/python python -m pytest tests/conformance/test_mindspore.py
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.membership import ClusterMember, MemberOptions, Phase, RegistrationRefusedError, Role

PYTHON = os.environ.get("FASTRT_MINDSPORE", "")
SCHEDULER = Path(__file__).with_name("mindspore_scheduler.py")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="FASTRT_MINDSPORE names no Python with mindspore 2.7 (a wheel of 750 MB)"),
    pytest.mark.timeout(150),
]


@pytest.fixture
def scheduler() -> Iterator[Callable[[int, int], str]]:
    """Start real schedulers; each gives its address."""
    started: list[subprocess.Popen[str]] = []

    def start(workers: int, servers: int) -> str:
        words = [PYTHON, str(SCHEDULER), str(workers), str(servers)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("address "))
        return line.split()[1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def join() -> Iterator[Callable[..., ClusterMember]]:
    with contextlib.ExitStack() as stack:

        def start(address: str, role: Role, **options: Any) -> ClusterMember:
            member = ClusterMember(role, MemberOptions(address, heartbeat_s=0.5, **options))
            return stack.enter_context(member)

        yield start


def test_member_registers_fetches_publishes_sends_and_finishes_with_the_real_scheduler(
    scheduler: Any, join: Any, wait_until: Callable[..., None]
) -> None:
    heard: dict[str, list[int]] = {"w": [], "s": []}
    address = scheduler(1, 1)
    worker = join(address, Role.WORKER, member_id="w000-aaaa", on_message=heard["w"].append)
    server = join(
        address,
        Role.SERVER,
        member_id="s000-bbbb",
        on_message=heard["s"].append,
        on_data=lambda command, role, rank, data: data[::-1],
    )
    assert (worker.wait_ready(30), server.wait_ready(30)) == (0, 0)
    assert worker.counts == (1, 1)
    assert worker.phase is Phase.READY
    listed = [(view.role, view.rank, view.member_id, view.alive) for view in worker.fetch()]
    assert listed == [(Role.SERVER, 0, "s000-bbbb", True), (Role.WORKER, 0, "w000-aaaa", True)]
    worker.publish(1001)
    wait_until(lambda: heard == {"w": [1001], "s": [1001]}, "the event at both", 20)
    assert worker.send(0, b"abc") == b"cba"
    with pytest.raises(RegistrationRefusedError):
        join(address, Role.WORKER, member_id="one-too-many")
    ending = threading.Thread(target=server.finish, args=(60.0,))
    ending.start()
    worker.finish(60.0)
    ending.join(60.0)
    assert not ending.is_alive()
