"""A small arena in which everything is under way, damaged as an input says, and then used in every way.

An input is a mask of what is done (2 bytes), a byte that says whether the checksum is mended, and then patches of 12
bytes: {region, record, place in the record, form, value}. So nearly every input reaches code that looks at what it has
changed, and a fuzzer that learns which patches lead where can put them together.
Whatever is changed, each call must give a value or raise a FastrtError: never crash, hang or read elsewhere.
The locks are left alone: what lies in a robust mutex is the C library's, which follows pointers in it.
"""

import contextlib
import os
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastrt._core.memory import arena, clients, trace
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment, sweep
from fastrt._core.objects import functions, handles, spill
from fastrt._core.repair import fsck, holdings, recovery
from fastrt._core.tasks import actors, calls, submission, tasks
from fastrt._core.tasks.inbox import Inbox
from fastrt.errors import FastrtError
from fastrt.store.spill_files import SpillFiles

KIND = 20  # of values that only the store could read
REGIONS_AT = 56  # the first seventeen offsets; see frt_superblock
STATIC_BYTES, CRC_AT = 272, 280
(LOCKS, CLIENTS, CTL, ENTRIES, TASK_WORDS, TASKS, FREE_OBJECTS, FREE_TASKS, RING, FUNCTIONS, PAGES, LINKS, OWNERS, BITS,
 TRACE, PAYLOAD, ACTORS) = range(17)  # fmt: skip
# What is patched: the region's number (-1: the superblock), bytes of a record, how many records.
TARGETS = (
    (-1, 2560, 1), (CLIENTS, 256, 4), (CTL, 32, 64), (ENTRIES, 128, 64), (TASK_WORDS, 8, 16), (TASKS, 256, 16),
    (FREE_OBJECTS, 4, 64), (FREE_TASKS, 4, 64), (RING, 8, 16), (FUNCTIONS, 96, 8), (PAGES, 8, 64), (LINKS, 16, 64),
    (OWNERS, 256, 64), (BITS, 8, 64), (TRACE, 8, 16), (PAYLOAD, 256, 64), (ACTORS, 640, 4),
)  # fmt: skip
PATCH = struct.Struct("<BBBBQ")
WORK = 15  # kinds of work; the mask has a bit for each, and one for the other order


class Scene:
    """The whole arena and its file; `run` damages and uses it."""

    def __init__(self) -> None:
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix="frt-fuzz-"))
        self.segment = Segment.create(1 << 20, clients_max=64, objects_max=512, tasks_max=512, trace=True)
        self.slots = [clients.admit(self.segment, os.getpid(), kind, "fuzz") for kind in (1, 3, 2, 3)]
        self.objects: list[tuple[int, int]] = []  # objref, index
        members = [Client(self.segment, *slot) for slot in self.slots]
        self._live(*members)
        self.path = Path("/dev/shm" + self.segment.name)
        self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.size = self.segment.total_bytes
        self.regions = struct.unpack("<17Q", os.pread(self.file, 136, REGIONS_AT))
        self.image = list(self._data())

    def close(self) -> None:
        """Remove everything."""
        os.close(self.file)
        self.segment.unlink()
        shutil.rmtree(self.folder)

    def _live(self, daemon: Client, worker: Client, driver: Client, other: Client) -> None:
        """Values and tasks in all their states, by four clients; the worker and the driver will be found dead."""
        spill.configure(daemon, str(self.folder))
        kept: list[handles.Ref] = []

        def put(client: Client, nbytes: int, *refs: handles.Ref) -> handles.Ref:
            writer = handles.create(client, nbytes, KIND, len(refs))
            memoryview(writer)[:] = bytes(nbytes)
            kept.append(writer.seal(refs))
            return kept[-1]

        for client in (daemon, worker, driver):
            kept += [handles.put_scalar(client, value) for value in (7, 2.5, "text", b"bytes", True, None)]
            inner = put(client, 300)
            put(client, 5000, inner, put(client, 8, inner))
            put(client, 70_000)
        function = put(driver, 40)
        functions.add_function(driver, b"0123456789abcdef", function, "function")
        place = (function.objref, handles.describe(driver, function)["index"])
        known = [handles.acquire(client, *place) for client in (daemon, worker, other)]
        ready = submission.submit(driver, submission.TaskOptions(function, 1, 1), (1, "two", put(driver, 600)))
        kept += [ready, submission.submit(driver, submission.TaskOptions(function), (ready, 3))]
        kept += submission.submit(
            driver,
            submission.TaskOptions(function, 3, 2, tasks.RETRY_ERRORS),
            submission.PackedArgs(17, bytes(900), [ready, put(driver, 10)], 1),
        )
        worker.adopt_job(driver.job)
        running = tasks.next_task(worker, 0.0, 0.0)
        handles.result(worker, running, 0, 2000, KIND, 0)
        kept += [submission.submit(driver, submission.TaskOptions(function), (n,)) for n in range(5)]
        kept += [submission.submit(worker, submission.TaskOptions(known[1]), (1,)), *known]
        kept += self._actors(driver, other, function.objref, [put(driver, 60) for _ in range(3)], ready)
        tasks.next_task(other, 0.0, 0.0)
        *_, index, objref = spill.candidates(daemon)[0]
        data = spill.begin(daemon, index, objref)
        assert data is not None
        spill.commit(daemon, data)
        *_, index, objref = spill.candidates(daemon)[0]
        unfinished = spill.begin(worker, index, objref)
        trace.record(daemon, trace.PUT, 1)
        self.objects = sorted({(ref.objref, handles.describe(ref.owner, ref)["index"]) for ref in kept})
        for client in (daemon, worker, driver, other):
            client.abandon()  # as if killed: nothing is given back
        del unfinished

    def _actors(
        self, driver: Client, other: Client, function: int, own: list[handles.Ref], late: handles.Ref
    ) -> list[handles.Ref]:
        """One actor at work, one that wants a process, one that is dead; with calls under way, ready and waiting."""
        made = [actors.create(driver, ref, function, f"actor {n}", 1, n == 1) for n, ref in enumerate(own)]
        working, _, dead = (index for index in made if index is not None)
        results = [submission.submit(driver, submission.CallOptions(ref, n, 1, 1), (n, late) if n == 2 else (n,))
                   for ref in own for n in range(4)]  # fmt: skip
        assert actors.enter(other, working)
        actors.alive(other, working)
        Inbox(other, working, True).next(0.0, 0.0)
        actors.end(driver, dead, "killed")
        return results

    def _data(self) -> Iterator[tuple[int, bytes]]:
        """The parts of the file that have memory, and are not all zeros."""
        at = 0
        while at < self.size:
            try:
                at = os.lseek(self.file, at, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                return
            end = os.lseek(self.file, at, os.SEEK_HOLE)
            while at < end:
                data = os.pread(self.file, min(end - at, 1 << 14), at)
                if any(data):
                    yield at, data
                at += len(data)

    def restore(self) -> None:
        """Make the file what it was."""
        os.truncate(self.file, 0)
        os.truncate(self.file, self.size)
        for at, data in self.image:
            os.pwrite(self.file, data, at)

    def patch(self, data: bytes) -> None:
        """Write the patches of an input into the file."""
        for region, record, place, form, value in PATCH.iter_unpack(data[: len(data) // 12 * 12]):
            number, nbytes, count = TARGETS[region % len(TARGETS)]
            width = 1 << (form & 3)
            at = (0 if number < 0 else self.regions[number]) + record % count * nbytes
            at += ((place | (form >> 5) << 8) * width) % nbytes
            meant = self._meant(form >> 2 & 7, value)
            os.pwrite(self.file, (meant & ((1 << 8 * width) - 1)).to_bytes(width, "little"), at)

    def _meant(self, form: int, value: int) -> int:
        """The number to write: as it is, small, near a limit, an offset, or a state word."""
        if form == 1:
            return value % 160
        if form == 2:
            return (1 << 64) - 1 - value % 4
        if form == 3:
            return self.regions[PAYLOAD] + value % 4096 * 256
        if form == 4:
            return self.regions[value % 16] + (value >> 8) % 65536
        if form == 5:
            return (value & 15) << 56 | (value >> 8 & 3) << 40 | (value >> 16 & 7)
        if form == 6:
            return self.size - value % 512
        return value

    def run(self, data: bytes) -> None:
        """Try one input; anything but values and FastrtErrors escapes."""
        if len(data) < 3:
            return
        if data[2] & 128:
            self.read_file(data[3:])
            return
        self.restore()
        self.patch(data[3:])
        if data[2] & 1:
            static = os.pread(self.file, STATIC_BYTES, 0)
            os.pwrite(self.file, struct.pack("<I", zlib.crc32(static)), CRC_AT)
        mask = int.from_bytes(data[:2], "little")
        with contextlib.suppress(FastrtError):
            segment = Segment.attach(self.segment.name)
            attempt(clients.table, segment)
            user = User(Client(segment, *self.slots[0]), self)
            order = [k for k in range(WORK) if mask >> k & 1] or list(range(WORK))
            if mask >> WORK & 1:
                order.reverse()
            for k in order:
                user.do(k)
            user.client.close()

    def read_file(self, data: bytes) -> None:
        """A damaged file of a spilled value."""
        files = SpillFiles(self.folder / "spilled", self.folder)
        files.make_key()
        files.write(5, memoryview(bytes(64)))
        whole = files.path(5).read_bytes()
        image = bytearray(whole)
        for at, value in zip(data[1::2], data[2::2], strict=False):
            image[at % len(image)] ^= value
        image = image[: len(image) - (data[0] if data else 0)]
        files.path(5).write_bytes(image)
        room = bytearray(64)
        try:
            files.read(5, memoryview(room))
        except ValueError:
            assert image != whole, "a whole file was refused"
        else:
            assert image == whole, "a damaged file was taken for a whole one"


def main() -> None:
    """Try the inputs on standard input, in hex, one a line; a fault ends this process one way or the other."""
    scene = Scene()
    for line in sys.stdin:
        sys.stdout.write(line)  # the last one seen is the one
        sys.stdout.flush()
        scene.run(bytes.fromhex(line))
    scene.close()


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """The value of a call; None when it raises what it may raise."""
    try:
        return call(*args)
    except FastrtError:
        return None
    except RuntimeError as exc:
        if "results that are not sealed" not in str(exc):  # `tasks.finish`, whose caller has made a mistake
            raise
        return None


class User:
    """One client that does all that can be done."""

    def __init__(self, client: Client, scene: Scene) -> None:
        self.client = client
        self.scene = scene
        self.refs: list[handles.Ref] = []
        self.work = [
            self.look, self.read, self.allocate, self.spill, self.pop, self.cancel, self.claim, self.submit,
            lambda: self.bury(1), lambda: self.bury(2), self.find, lambda: self.bury(3), self.call, self.serve,
            self.end_actors,
        ]  # fmt: skip
        assert len(self.work) == WORK

    def do(self, k: int) -> None:
        """Do one kind of work; what it holds is let go of at the end."""
        self.work[k]()
        if k & 1:
            self.refs.clear()

    def look(self) -> None:
        client = self.client
        for quiet in (False, True):
            attempt(fsck.fsck, client, quiet)
        for call in (fsck.usage, fsck.holders, holdings.holdings, arena.room, tasks.queued, spill.totals,
                     spill.directory, spill.last_round, spill.rounds):  # fmt: skip
            attempt(call, client)
        for t in range(12):
            for look in (tasks.info, tasks.cancelled, tasks.cancel_terms, tasks.function_of):
                with contextlib.suppress(IndexError):
                    attempt(look, client, t)
        for slot in range(4):
            attempt(trace.drain, client, slot)

    def acquire(self) -> Iterator[handles.Ref]:
        for objref, index in self.scene.objects:
            ref = attempt(handles.acquire, self.client, objref, index)
            if ref is not None:
                self.refs.append(ref)
                yield ref

    def read(self) -> None:
        for ref in self.acquire():
            attempt(handles.describe, self.client, ref)
            if attempt(handles.is_ready, self.client, ref):
                found = attempt(handles.read, self.client, ref)
                if found is not None and isinstance(found[2], handles.Pin):
                    view = memoryview(found[2])
                    zlib.crc32(view[:4096])
                    zlib.crc32(view[-4096:])
                attempt(handles.read_scalar, self.client, ref, None)
                self.refs += attempt(handles.contained, self.client, ref) or []
        attempt(handles.wait_some, self.client, self.refs, max(1, len(self.refs)), 0.0, 0.0)

    def allocate(self) -> None:
        for nbytes in (0, 8, 200, 300, 3000, 8000, 30_000, 100_000, 100, 200, 400):
            writer = attempt(handles.create, self.client, nbytes, KIND, 0)
            if writer is not None:
                memoryview(writer)[:] = bytes(nbytes)
                self.refs.append(attempt(writer.seal))
        self.refs = [ref for ref in self.refs if ref is not None]
        for value in range(70):
            ref = attempt(handles.put_scalar, self.client, value)
            if ref is not None:
                self.refs.append(ref)
        attempt(arena.grow, self.client)

    def spill(self) -> None:
        client = self.client
        for *_, index, objref in (attempt(spill.candidates, client) or [])[:4]:
            data = attempt(spill.begin, client, index, objref)
            if data is not None:
                zlib.crc32(memoryview(data)[-64:])
                attempt(spill.commit, client, data)
        for objref, index in self.scene.objects:
            room = attempt(spill.begin_restore, client, index, objref)
            if room is not None:
                memoryview(room)[:64] = bytes(min(64, len(memoryview(room))))
                del room
                if index % 3 == 0:
                    attempt(spill.cancel_restore, client, index)
                attempt(spill.finish_restore, client, index, index % 2 == 0)
        attempt(spill.end_round, client, 1)

    def pop(self) -> None:
        for _ in range(20):
            t = attempt(tasks.next_task, self.client, 0.0, 0.0)
            if t is None or t == tasks.NO_TASK:
                return
            self.carry_out(t)

    def carry_out(self, t: int) -> None:
        attempt(tasks.arguments, self.client, t)
        attempt(tasks.set_blocked, self.client, t, True)
        attempt(tasks.set_blocked, self.client, t, False)
        if t % 3 == 0 and attempt(tasks.finish_scalar, self.client, t, t):
            return
        if t % 3 == 1 and attempt(tasks.retry, self.client, t):
            return
        for k in range(3):
            try:
                writer = attempt(handles.result, self.client, t, k, 700, KIND, 0, True)
            except IndexError:
                break
            if writer is not None:
                attempt(writer.seal)
        attempt(tasks.finish, self.client, t)

    def cancel(self) -> None:
        for ref in self.acquire():
            found = attempt(tasks.cancel, self.client, ref)
            if found is not None and found[0] == "ending":
                self.carry_out(found[1])

    def claim(self) -> None:
        for ref in self.acquire():
            t = attempt(tasks.claim_for, self.client, ref)
            if t is not None and t != tasks.NO_TASK:
                self.carry_out(t)

    def submit(self) -> None:
        function = attempt(functions.find_function, self.client, b"0123456789abcdef")
        if function is not None:
            TaskOptions, PackedArgs = submission.TaskOptions, submission.PackedArgs
            made = [attempt(submission.submit, self.client, TaskOptions(function), (n,)) for n in range(3)]
            ranked = [TaskOptions(function, priority=priority) for priority in (1, -1, 2)]
            made += [attempt(submission.submit, self.client, options, (3,)) for options in ranked]
            made = [ref for ref in made if ref is not None]
            packed = PackedArgs(17, bytes(400), made, len(made))
            made += attempt(submission.submit, self.client, TaskOptions(function, 2), packed) or []
            self.refs += made

    def find(self) -> None:
        attempt(functions.find_function, self.client, b"0123456789abcdef")
        attempt(functions.function_name, self.client, 5)
        for objref, _ in self.scene.objects[-3:]:
            attempt(functions.function_name, self.client, objref)

    def call(self) -> None:
        client = self.client
        named = [attempt(actors.find, client, name) for name in attempt(actors.names, client) or []]
        for ref in [*self.acquire(), *filter(None, named)]:
            attempt(calls.is_call, client, ref)
            index = attempt(actors.index_of, client, ref)
            if index is not None:
                attempt(actors.info, client, index)
                attempt(actors.is_over, client, index)
                for returns, args in ((1, (1, "two")), (2, submission.PackedArgs(17, bytes(400), [ref], 1))):
                    try:
                        made = attempt(submission.submit, client, submission.CallOptions(ref, 0, returns), args)
                    except submission.CallOfDead as exc:
                        self.carry_out(exc.args[0])
                        made = exc.args[1]
                    self.refs += made if isinstance(made, list) else [made] * (made is not None)

    def serve(self) -> None:
        client = self.client
        for a, _ in attempt(actors.attention, client) or []:
            if attempt(actors.enter, client, a):
                attempt(actors.alive, client, a)
                inbox = Inbox(client, a, True)
                for _ in range(8):
                    t = attempt(inbox.next, 0.0, 0.0)
                    if t is None or t == tasks.NO_TASK:
                        break
                    self.carry_out(t)
                free = Inbox(client, a, False)
                for cell in attempt(free.take, 0.0, 0.0) or []:
                    t = attempt(free.claim, cell)
                    if t is not None and t != tasks.NO_TASK:
                        self.carry_out(t)
        attempt(actors.of_client, client, self.scene.slots[3][0])

    def end_actors(self) -> None:
        client = self.client
        for a, state in attempt(actors.attention, client) or []:
            if state == actors.DOWN and attempt(actors.start_again, client, a):
                continue
            attempt(actors.end_for_good, client, a, actors.KILLED, "ended")
            for t in attempt(actors.end, client, a, "over") or []:
                self.carry_out(t)

    def bury(self, member: int) -> None:
        found = attempt(recovery.recover, self.client, self.scene.slots[member][0])
        for t in (found or {"ending": []})["ending"]:
            self.carry_out(t)


if __name__ == "__main__":
    main()
