"""A worker and a client in JavaScript, with gRPC's own library for Node.js and the protos: nothing of fastrt in them.

They have object stores of their own, between which the client's object and the worker's result travel by StreamObj.
fastrt's own store takes a place of theirs as soon as it serves `ObjStore`.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions

HERE = Path(__file__).parent / "node"
ROOT = HERE.parents[2]
PROTOS = ROOT / "protos" / "ray"
TOKEN = "7a" * 32
DEALLOCATED = 2**64 - 1

pytestmark = [
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="Node.js with npm is not here"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def modules() -> Path:
    """The folder of the packages from the npm registry, kept between runs in .cache."""
    wanted = (HERE / "package.json").read_bytes()
    folder = ROOT / ".cache" / f"node-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(wanted)
        npm = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        if npm.returncode != 0:
            pytest.skip(f"npm cannot install @grpc/grpc-js here: {npm.stderr.strip()[-300:]}")
        (folder / "done").touch()
    return folder / "node_modules"


class Peer:
    """A process of peer.js; it ends when its input does."""

    def __init__(self, role: str, address: str, modules: Path) -> None:
        self.process = subprocess.Popen(
            ["node", str(HERE / "peer.js"), role, address, TOKEN, str(PROTOS)],
            env={**os.environ, "NODE_PATH": str(modules)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return dict(json.loads(line))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=60)
        assert self.process.returncode == 0


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    with Scheduler(SchedulerOptions(token=TOKEN, lost_after_s=3.0)) as made:
        yield made
        made.check_invariants()


def test_call_from_a_client_in_javascript_runs_on_a_worker_in_javascript(scheduler, modules, wait_until):
    worker = Peer("worker", scheduler.address, modules)
    client = None
    try:
        assert worker.line() == {"ready": "worker", "worker": "0", "store": "0"}
        client = Peer("client", scheduler.address, modules)
        said = client.line()
        assert said["answer"] == "HELLO FROM AFAR"
        assert said["refused"][0] == 9
        assert "'whisper'" in said["refused"][1]
        assert client.line() == {"ready": "client", "worker": "1", "store": "1"}
        pushed, result = int(said["pushed"]), int(said["result"])
        with SchedulerClient(scheduler.address, TOKEN) as own:
            wait_until(lambda: list(own.info().avail_worker) == [0, 1], "both workers to be idle", 20)
            info = own.info()
            assert list(info.reference_count) == [1, 1]
            assert list(info.target_objref) == [pushed, result]
            assert list(info.function_table["shout"].workerid) == [0]
            own.decrement([pushed, result])
            assert list(own.info().reference_count) == [DEALLOCATED] * 2
        for peer in (worker, client):
            assert {peer.line()["deallocated"], peer.line()["deallocated"]} == {str(pushed), str(result)}
    finally:
        worker.stop()
        if client is not None:
            client.stop()


def test_call_waits_for_a_worker_in_javascript_that_comes_later(scheduler, modules, wait_until):
    """The first worker is gone before its call ends; the next one runs it."""
    with SchedulerClient(scheduler.address, TOKEN) as own:
        gone = Peer("worker", scheduler.address, modules)
        assert gone.line()["ready"] == "worker"
        gone.stop()
        wait_until(lambda: list(own.info().avail_worker) == [], "the worker to be lost", 20)
        call = message_set("ray").message("Call")(name="shout", arg=[{"obj": {"string_data": {"data": b"late"}}}])
        (result,) = own.remote_call(call)
        worker = Peer("worker", scheduler.address, modules)
        try:
            assert worker.line()["ready"] == "worker"
            wait_until(lambda: list(own.info().target_objref) == [result], "the result", 20)
            wait_until(lambda: list(own.info().reference_count) == [1], "the message's count to be dropped", 20)
        finally:
            worker.stop()
