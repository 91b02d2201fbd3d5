"""A full disk under durable state: reads go on, writes are refused in words, nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt.coordination import Coordinator, CoordinatorOptions, connect
from fastrt.coordination.engine import Core
from fastrt.coordination.front import Front
from fastrt.coordination.state import Settings as CoordinationSettings
from fastrt.coordination.status import Code
from fastrt.durable import DiskFullError, Journal, WriteLog
from fastrt.membership import ClusterOptions, ClusterScheduler, Role, Settings, wire
from fastrt.membership.events import Refused, ScaleOut
from fastrt.membership.framing import Parser
from fastrt.membership.wire import Command
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.ps.journal import FolderMedium
from fastrt.ps.journal import Journal as PushJournal
from fastrt.scheduler.service import Scheduler, SchedulerOptions
from support.disks import small_disk

_DISK_BYTES = 12 << 20


def _warm_up() -> None:
    """Let grpc open what it keeps open for good, before a test is watched for what it leaves."""
    with Coordinator(CoordinatorOptions()) as service, connect(service.address):
        pass


_warm_up()


class Disk:
    """A small disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take all room that is left."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Give it back."""
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path, _DISK_BYTES) as folder:
        yield Disk(folder)


class Client:
    """Calls of a coordinator."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        self._methods = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")

    def call(self, method: str, **fields: Any) -> Any:
        """A future."""
        request, response = self._methods[method]
        path = f"/tensorflow.CoordinationService/{method}"
        stub = self.channel.unary_unary(path, request.SerializeToString, response.FromString)
        return stub.future(request(**fields), timeout=30)

    def set(self, key: str, value: bytes, overwrite: bool = True) -> None:
        """Set a key."""
        self.call("InsertKeyValue", kv={"key": key, "value": value}, allow_overwrite=overwrite).result()

    def get(self, key: str) -> bytes:
        """Read a key."""
        found: bytes = self.call("TryGetKeyValue", key=key).result().kv.value
        return found


def _set_until_refused(client: Client, kept: dict[str, bytes]) -> str:
    for number in range(10_000):
        key, value = f"k/{len(kept)}", bytes([number % 251]) * 20_000
        made = client.call("InsertKeyValue", kv={"key": key, "value": value})
        if made.exception() is not None:
            assert made.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, made.exception()
            return str(made.details())
        kept[key] = value
    raise AssertionError("the disk does not become full")


@pytest.mark.parametrize("power", [False, pytest.param(True, marks=pytest.mark.long)])
def test_full_disk_refuses_keys_until_there_is_room(disk: Disk, wait_until: Any, power: bool) -> None:
    kept: dict[str, bytes] = {}
    options = CoordinatorOptions(num_tasks=1, state_dir=disk.state, power=power)
    with Front(options) as service:
        client = Client(service.address)
        client.set("small", b"1")
        blocked = client.call("GetKeyValue", key="later")
        pid = service.keeper_pid
        disk.fill()
        words = _set_until_refused(client, kept)
        assert str(disk.state) in words
        assert "full" in words
        assert client.get("small") == b"1", "reads go on"
        assert all(client.get(key) == value for key, value in kept.items())
        task = {"job_name": "jax_worker", "task_id": 0}
        client.call("RegisterTask", incarnation=5, source_task=task).result()
        client.call("Heartbeat", incarnation=5, source_task=task).result()
        passed = client.call("Barrier", barrier_id="b", barrier_timeout_in_ms=20_000, source_task=task, tasks=[task])
        passed.result()  # what needs little room has a reserve
        client.call("DeleteKeyValue", key="small").result()
        assert not blocked.done()
        disk.free()
        client.set("later", b"2")
        assert blocked.result().kv.value == b"2", "the blocked call was answered"
        client.set("again", b"3")
        assert service.keeper_pid == pid, "the keeper lived through it"
        client.channel.close()
    with Front(options) as service:
        client = Client(service.address)
        assert {key: client.get(key) for key in kept} == kept
        assert client.get("later") == b"2"
        assert client.get("again") == b"3"
        assert client.call("TryGetKeyValue", key="small").code() is grpc.StatusCode.NOT_FOUND
        client.channel.close()


def test_key_behind_a_batch_of_writes_that_fills_the_disk_is_refused_at_once(disk: Disk) -> None:
    """The writes are in the front's log, so they may wait for room; the caller of the key must not."""
    journal = Journal(disk.state)
    now = 0.0
    core = Core(CoordinationSettings(roles={"job": 1}), journal, front=7, owns_log=False, clock=lambda: now)
    disk.fill()
    piece, number = bytes(20_000), 0
    while journal.has_room(number * len(piece)):
        number += 1
    writes = range(1, 2 * number)  # more than the reserve, too
    for write in writes:
        core.write(write, f"w/{write}", piece)
    path = "/tensorflow.CoordinationService/InsertKeyValue"
    request, _ = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")["InsertKeyValue"]
    core.submit(1, path, request(kv={"key": "k", "value": piece}).SerializeToString())
    assert [(reply.call, reply.code) for reply in core.settle()] == [(1, Code.RESOURCE_EXHAUSTED)]
    disk.free()
    now = core.next_deadline() or 0.0
    core.submit(2, path, request(kv={"key": "k", "value": piece}).SerializeToString())
    core.settle()
    core.stop()
    again = Journal(disk.state)
    assert {key for kind, key, _ in again.records() if kind == "key"} == {f"w/{write}" for write in writes}
    again.close()


@pytest.mark.long
def test_keeper_killed_on_a_full_disk_comes_back_with_all_keys(disk: Disk, wait_until: Any) -> None:
    kept: dict[str, bytes] = {}
    with Front(CoordinatorOptions(num_tasks=1, state_dir=disk.state)) as service:
        client = Client(service.address)
        disk.fill()
        _set_until_refused(client, kept)
        pid = service.keeper_pid
        assert pid is not None
        os.kill(pid, 9)
        wait_until(lambda: service.keeper_pid != pid, "another keeper")
        assert {key: client.get(key) for key in kept} == kept
        disk.free()
        client.set("again", b"3")
        client.channel.close()


def test_scheduler_on_a_full_disk_refuses_and_recovers(disk: Disk) -> None:
    request, response = message_set("ray").methods("Scheduler")["RegisterObjStore"]
    with Scheduler(SchedulerOptions(state_dir=disk.state)) as service:
        channel = open_channel(service.address)
        stub = channel.unary_unary("/Scheduler/RegisterObjStore", request.SerializeToString, response.FromString)
        disk.fill()
        refused = None
        for some in range(160):
            # Well below the door's limit of streams on a connection: the core refuses some calls of a client near it.
            names = [f"{some}-{number}-{'x' * 240}" for number in range(125)]
            errors = [call.exception() for call in [stub.future(request(objstore_address=name)) for name in names]]
            refused = refused or next((error for error in errors if error is not None), None)
            if refused is not None:
                break
        assert refused is not None
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "disk under the scheduler" in refused.details()
        disk.free()
        stub(request(objstore_address="127.0.0.1:9"), timeout=30)
        channel.close()


class Foreign:
    """A worker by hand, in the clear."""

    def __init__(self, address: str, member_id: str, listens_at: int) -> None:
        host, _, port = address.rpartition(":")
        self._id = member_id
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._parser = Parser()
        registration = wire.RegisterMessage(ip=host, port=listens_at, node_id=member_id, role=int(Role.WORKER))
        self.refusal = str(
            wire.RegisterResp.FromString(self.ask(Command.REGISTER, registration.SerializeToString())).reason
        )

    def ask(self, command: int, data: bytes) -> bytes:
        self._socket.sendall(wire.request_frame(command, 1, data, Role.WORKER, None).pack())
        frames: list[Any] = []
        while not frames:
            piece = self._socket.recv(1 << 16)
            assert piece, "the scheduler has closed the connection"
            frames = list(self._parser.feed(piece))
        return bytes(frames[0].data)

    def beat(self) -> Any:
        data = wire.HeartbeatMessage(node_id=self._id).SerializeToString()
        return wire.HeartbeatResp.FromString(self.ask(Command.HEARTBEAT, data))

    def close(self) -> None:
        self._socket.close()


def test_members_on_a_full_disk_go_on_and_come_back_while_newcomers_are_refused(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setattr("fastrt.durable.log._ALLOCATED_BYTES", 64 << 10)
    options = ClusterOptions(settings=Settings(1000, 0), state_dir=disk.state, allow_anonymous=True)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def join(address: str, name: str) -> Foreign:
            made = Foreign(address, name, own.getsockname()[1])
            stack.callback(made.close)
            return made

        with ClusterScheduler(options) as scheduler:
            first = join(scheduler.address, "first")
            disk.fill()
            taken = ["first"]
            for number in range(999):
                taken.append(f"{number:x>256}")
                refusal = join(scheduler.address, taken[-1]).refusal
                if refusal:
                    taken.pop()
                    break
            assert re.search(rf"{disk.state} is full\. Free some space", refusal)
            assert len(first.beat().servers_meta) == len(taken), "requests that need no room are answered"
            with pytest.raises(Refused, match="is full"):
                scheduler.ask(lambda call: ScaleOut(call, 1, 0))
            first.close()  # a member that is lost and comes back has a reserve
            wait_until(lambda: not scheduler.overview().members[0].alive, "the loss")
            first = join(scheduler.address, "first")
            assert not first.refusal
            first.ask(Command.FINISH, b"first")
            disk.free()
            assert not join(scheduler.address, "after").refusal
        with ClusterScheduler(options) as scheduler:
            members = scheduler.overview().members
            assert {view.member_id for view in members} == {*taken, "after"}
            assert [view.member_id for view in members if view.finished] == ["first"]


def test_batch_that_finds_no_room_is_not_there_and_the_next_one_is(disk: Disk) -> None:
    """All kinds of logs."""
    journal, pushes = Journal(disk.state), PushJournal(FolderMedium(disk.folder / "server-1"))
    writes = WriteLog(disk.state)
    list(pushes.recover())
    pushes.append({"n": 0}, [b"first"])
    disk.fill()
    big = bytes(3 << 20)
    with pytest.raises(DiskFullError, match="full"):
        journal.write({("key", "big"): big})
    with pytest.raises(DiskFullError, match="full"):
        writes.append(1, "big", big)
    with pytest.raises(DiskFullError, match="full"):
        pushes.append({"n": 1}, [big])
    journal.write({("key", "small"): b"1"})  # from the space that is allocated ahead
    for _ in range(10):
        journal.write({("key", "over"): bytes(100_000)})
    disk.free()
    journal.write({("key", "big"): big})
    writes.append(1, "big", big)
    pushes.append({"n": 2}, [b"last"])
    for log in (writes, journal, pushes):
        log.close()
    again, pushes = Journal(disk.state), PushJournal(FolderMedium(disk.folder / "server-1"))
    assert {key: len(value) for _, key, value in again.records()} == {"small": 1, "over": 100_000, "big": 3 << 20}
    assert [(meta["n"], bytes(data)) for meta, data in pushes.recover()] == [(0, b"first"), (2, b"last")]
    again.close()
    pushes.close()
