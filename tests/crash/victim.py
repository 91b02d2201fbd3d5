"""The process that dies: it joins, walks through everything a client can do, and leaves.

Its steps come in an order that the caller may turn, so that a death at one point is met with different things held.
"""

import os
from collections.abc import Callable
from typing import Any

import acting
import queueing
import streaming
import work
from work import BOX, BYTES, FAIL, INT, KIND, MANY, NEST, PROMISE, RETRY, SIZES, SUM, Wrong

from fastrt._core.memory import arena, clients, trace
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import functions, handles, mapped, pending, remote, spill
from fastrt._core.repair import recovery
from fastrt._core.tasks import actors, admission, orphan_tasks, tasks
from fastrt.errors import ObjectStoreFullError, StaleReferenceError


class Victim:
    """One process's walk.

    Args:
        name: the segment's.
        kind: of client.
        known: "first", the lowest slot to take; names of objects {"function", "shared", "box", "actor", "stream",
            "queue"} as (objref, index); "dead", slots with generations of dead clients that it recovers; "spills",
            whether it is the one that moves values to files; "make", whether it makes a segment of its own, too.
    """

    def __init__(self, name: str, kind: int, known: dict[str, Any]) -> None:
        self.known = known
        self.segment = Segment.attach(name)
        index, gen = clients.admit(self.segment, os.getpid(), kind, "victim", first=known["first"])
        self.client = Client(self.segment, index, gen)
        self.client.adopt_job(self.client.job)
        self.function = handles.acquire(self.client, *known["function"])
        self.kept: list[Any] = []

    def walk(self, turn: int = 0) -> None:
        """Do all steps, beginning with the `turn`th, and leave."""
        steps = self.steps()
        turn %= len(steps)
        for step in steps[turn:] + steps[:turn]:
            self.client.adopt_job(self.client.job)  # running a task has made its job ours
            step()
        self.kept.clear()
        self.client.close()

    def steps(self) -> list[Callable[[], None]]:
        return [self.read_shared, self.put_and_drop, self.grow, self.name_functions, self.submit_and_run,
                self.go_first, self.sweep_functions, self.rank, self.demand, self.work_for_others, self.cancel,
                self.wait, self.watch, self.act, self.stream, self.queue, self.map, self.spill, self.record, self.bury,
                self.make_segment, self.grow_payload]  # fmt: skip

    def read_shared(self) -> None:
        try:  # a name that has another tenant by now
            handles.acquire(self.client, self.known["box"][0] + 12345, self.known["box"][1])
        except StaleReferenceError:
            pass
        for seed, name in self.known["shared"]:
            ref = handles.acquire(self.client, *name)
            work.read(self.client, ref, seed)
            self.kept.append(work.load(self.client, ref)[2])
        box = handles.acquire(self.client, *self.known["box"])
        for ref in handles.contained(self.client, box):
            work.read(self.client, ref)
        self.kept.append(box)

    def watch(self) -> None:
        """What waits for many at once, and takes a task back that nobody has begun."""
        c, f = self.client, self.function
        refs = [work.submit(c, f, INT, 5900 + k)[0] for k in range(2)]
        watch = pending.Watch(c)
        for ref in refs:
            watch.add(ref, None)
        watch.wait(0.0005)  # sleeps, unless somebody else runs them
        task = pending.withdraw(c, refs[1])
        if task >= 0:
            work.fail(c, task)
        work.run_all(c, f)
        watch.poke()
        watch.wait(0.0)

    def record(self) -> None:
        """Read the kept failures, and write a few records of what happens, while the session records."""
        work.check_failures(self.client)
        trace.switch(self.client, True)
        trace.end(self.client, trace.begin(self.client, trace.GET, 1))
        trace.record(self.client, trace.PUT, 2)
        trace.switch(self.client, False)

    def put_and_drop(self) -> None:
        for k, size in enumerate(SIZES):
            ref = work.put(self.client, 1000 + k, size)
            work.read(self.client, ref, 1000 + k)
            self.kept.append(ref if k % 2 else None)
        self.kept.append(handles.put_scalar(self.client, 12.5))
        handles.put_scalar(self.client, b"x" * 500)
        # Records that are used again hold what must never be taken for the names of other objects.
        junk = [handles.put_scalar(self.client, b"\xff" * 72) for _ in range(60)]
        del junk
        chain = work.put(self.client, 2000, 8, [self.function] * 5)
        chain = work.put(self.client, 2000, 8, [chain] * 5)
        for k in range(4):
            chain = work.put(self.client, 2001 + k, 100 + 300 * k, [chain, self.function])
        handles.create(self.client, 400, work.KIND, 1)  # dropped unsealed
        for k, size in enumerate((300, 9000)):
            writer, ref = work.put_in_place(self.client, 2100 + k, size)
            self.kept.append((writer.seal_in_place(), writer) if k else ref)  # the writer goes first, or stays
            work.read(self.client, ref, 2100 + k)

    def grow(self) -> None:
        """Both tables and the payload beyond their first steps, the magazines beyond their ends, and back."""
        many = [handles.put_scalar(self.client, k) for k in range(160)]
        del many[10:]
        self.kept.append(many)
        pages = [work.put(self.client, 3000 + k, 8192) for k in range(40)]  # two to a page: the class asks for more
        del pages[3:]
        for nbytes in (250_000, 1_900_000):  # the second finds the store full, unless nobody else has anything
            try:
                work.read(self.client, work.put(self.client, 3100, nbytes), 3100)
            except ObjectStoreFullError:
                continue

    def grow_payload(self) -> None:
        """Nothing but that."""
        arena.grow(self.client)

    def name_functions(self) -> None:
        crowd = [bytes(8) + bytes([k]) * 8 for k in range(5)]  # of one place, that has room for four
        for k, digest in enumerate([bytes([1]) * 16, *crowd]):
            if functions.find_function(self.client, digest) is None:
                ref = handles.put_scalar(self.client, f"function {k}")
                functions.add_function(self.client, digest, ref, f"function {k}")

    def sweep_functions(self) -> None:
        """A function that goes when nothing but the table holds it, and the number of workers that are to come."""
        clients.want_workers(self.client, 1)
        digest = bytes([2]) * 16
        if functions.find_function(self.client, digest) is None:
            functions.add_function(self.client, digest, handles.put_scalar(self.client, "swept"), "swept", False)
        functions.sweep(self.client)

    def submit_and_run(self) -> None:
        c, f = self.client, self.function
        a = work.submit(c, f, INT, 5000)
        b = work.submit(c, f, BYTES, 5001, big=300)
        made = [a, b, work.submit(c, f, SUM, 5010, [a[0], b[0]]), work.submit(c, f, BOX, 5020)]
        made += [work.submit(c, f, op, 5030 + op) for op in (MANY, NEST, RETRY, PROMISE)]
        made += [work.submit(c, f, SUM, 5060, [made[2][0]], big=200), work.submit(c, f, FAIL, 5070)]
        made += [work.submit(c, f, INT, 5100 + k) for k in range(20)]  # more than the ring has cells
        work.run_all(c, f, 14)
        self.kept.append(made[::2])

    def go_first(self) -> None:
        """Tasks that go to the queue's front, because memory is short and they take a large value."""
        c, f = self.client, self.function
        try:
            held = [work.put(c, 5400 + k, 150000) for k in range(4)]
            made = work.submit(c, f, MANY, 5420)
            taken = [work.submit(c, f, SUM, 5430 + k, [made[2]]) for k in range(2)]
            work.run_all(c, f)
            self.kept.append((made, taken))
            del held
        except ObjectStoreFullError:
            self.kept.clear()  # others hold the rest

    def rank(self) -> None:
        """Tasks with priorities: run, waiting, cancelled, and as many stale ones as the heap has cells."""
        c, f = self.client, self.function
        made = [work.submit(c, f, INT, 5200 + k, priority=(k * 7 + 3) % 11 - 5 or 1) for k in range(9)]
        made.append(work.submit(c, f, SUM, 5210, [made[0][0]], priority=-3))
        made.append(work.submit(c, f, RETRY, 5211, priority=2))
        work.run_all(c, f, 5)
        for k in range(270):
            what, task, _ = tasks.cancel(c, work.submit(c, f, INT, 5300 + k, priority=-100)[0])
            if what == "ending":
                work.fail(c, task)
        work.run_all(c, f, 4)
        self.kept.append(made[::2])

    def demand(self) -> None:
        """Tasks that are held: admit, claim, give back, refuse and cancel some, and forget others."""
        c, f = self.client, self.function
        others = admission.take_held(c)  # of the survivor, who wants their results: a refused task fails if we die then
        first = work.submit_demanding(c, f, INT, 9000)
        made = [first, work.submit_demanding(c, f, SUM, 9001, [first]), work.submit_demanding(c, f, INT, 9002, big=200)]
        made += [work.submit_demanding(c, f, RETRY if k == 4 else INT, 9003 + k) for k in range(5)]
        what, task, _ = tasks.cancel(c, made[3])
        if what == "ending":
            work.fail(c, task)
        seen = admission.news(c)
        for k, held in enumerate([*others, *admission.take_held(c)]):
            if k % 4 == 1 and admission.claim(c, *held):
                tasks.give_back(c, held[0])
            elif k % 4 == 2 and held not in others and admission.refuse(c, *held):
                work.fail(c, held[0])
            elif k % 4 != 3:
                work.admit(c, held)
        admission.wait_news(c, seen, 0.0003)
        work.run_all(c, f, 3)
        work.admit_all(c)
        work.run_all(c, f, 3)
        self.kept.append(made[::2])

    def work_for_others(self) -> None:
        work.run_all(self.client, self.function, 8)

    def cancel(self) -> None:
        c, f = self.client, self.function
        first = work.submit(c, f, INT, 6000)[0]
        second = work.submit(c, f, SUM, 6001, [first])[0]
        for ref in (second, first):
            what, task, _ = tasks.cancel(c, ref)
            if what == "ending":
                work.fail(c, task)
        running = work.submit(c, f, INT, 6002)[0]
        task = tasks.claim_for(c, running)
        if task != tasks.NO_TASK and work.seed_of(c, task) != 6002:
            work.perform(c, f, task)  # somebody else has run ours meanwhile, and the record has another tenant
        elif task != tasks.NO_TASK:
            about = tasks.info(c, task)
            tasks.begin_path(c, about["path"] ^ 1 << 63)  # the next one is a child of the task
            work.submit(c, f, INT, 6003)
            orphan_tasks.orphan_children(c, task, about["id"])
            tasks.cancel_task(c, task, about["id"] + 1)  # another tenant's
            tasks.cancel_task(c, task, about["id"], False, True)
            tasks.cancel_task(c, task, about["id"], True)
            work.fail(c, task)
        for k in range(540):  # each leaves a stale cell: the ring is full of them and swept
            what, task, _ = tasks.cancel(c, work.submit(c, f, INT, 6100 + k)[0])
            if what == "ending":
                work.fail(c, task)

    def wait(self) -> None:
        c, f = self.client, self.function
        first = work.submit(c, f, INT, 7000)[0]
        second = work.submit(c, f, SUM, 7001, [first])[0]
        handles.wait_all(c, [second], 0.0003, 0.0001)
        handles.wait_some(c, [first, second], 1, 0.0003, 0.0001)
        work.run_all(c, f)
        handles.wait_all(c, [first, second], 0.0, 0.0)
        tasks.next_task(c, 0.0005, 0.0002)  # spins, then sleeps
        tasks.load(c, True)  # a push that finds no idle worker reports the load
        pushed = [work.submit(c, f, INT, 7010 + k)[0] for k in range(6)]
        tasks.stand_by(c, True)
        pushed.append(work.submit(c, f, INT, 7020)[0])
        tasks.stand_by(c, False)
        work.run_all(c, f)
        clients.park(c, c.index, True)  # a parked worker takes no task
        assert tasks.next_task(c, 0.0005, 0.0) == tasks.NO_TASK
        clients.park(c, c.index, False)
        handles.wait_all(c, pushed, 0.0, 0.0)
        for slot in self.known["sleepers"]:
            c.wake(slot)
        self.kept += [first, second, *pushed]

    def act(self) -> None:
        c = self.client
        shared = handles.acquire(c, *self.known["actor"])
        self.kept += acting.play(c, self.function, shared)[::2]
        acting.look_after(c, actors.index_of(c, shared))

    def stream(self) -> None:
        c = self.client
        for stream, end, seed in self.known["stream"]:
            shared = handles.acquire(c, *stream), handles.acquire(c, *end), seed
            self.kept += [shared, streaming.play(c, self.function, shared)]

    def queue(self) -> None:
        root, *segments = [handles.acquire(self.client, *name) for name in self.known["queue"]]
        self.kept.append(queueing.play(self.client, (root, segments)))

    def map(self) -> None:
        """Values in files from their beginning, also results: sealed, dropped unsealed, read and freed."""
        c, f = self.client, self.function
        refs = [work.put_file(c, 8200 + k, size, [f] * k) for k, size in enumerate((20000, 300, 9000))]
        refs.append(work.put_file(c, 8210, 20000, [f] * 6))  # more references than the entry has room for
        for k in (1, 2):
            kind, _, pin = work.read_file(c, refs[k])
            if (kind, bytes(pin)) != (KIND, work.pattern(8200 + k, len(pin))) or len(
                handles.contained(c, refs[k])
            ) != k:
                raise Wrong(f"the value of seed {8200 + k} in a file is torn")
            self.kept.append(pin)
        mapped.create(c, 20000, KIND, 6)  # dropped before it has a file
        work.begin_file(c, mapped.create(c, 20000, KIND), 20000)
        for k in range(3):
            task, ref = tasks.promise(c)
            writer = mapped.result(c, task, 0, 20000, KIND, 6 * (k == 1))
            if k < 2:
                work.open_file(c, writer, 8220 + k, 20000, [f] * (6 * k))
            else:  # an attempt that failed, before the one that fits
                work.begin_file(c, writer, 20000)
                writer = handles.result(c, task, 0, 300, KIND)
                writer.copy(0, work.pattern(8222, 300))
                writer.seal()
            tasks.finish(c, task)
            refs.append(ref)
        self.kept.append(refs[::2])

    def spill(self) -> None:
        """What only one process of a session does at a time: the daemon."""
        if not self.known["spills"]:
            return
        c = self.client
        mine = [work.put(c, 8000 + k, 20000 + k) for k in range(5)]
        work.spill_some(c, 40)
        indexes = [handles.describe(c, ref)["index"] for ref in mine]
        if spill.is_spilled(c, mine[0]):
            spill.wait_restored(c, mine[0], 0.0003)
        for k, ref in enumerate(mine[1:3]):
            work.read(c, ref, 8001 + k)
        data = spill.begin(c, indexes[2], mine[2].objref)
        if data is not None:
            spill.give_up(c, data)
        full: list[Any] = []
        for nbytes in (300_000, 20_000):
            try:
                while True:
                    full.append(work.put(c, 8100, nbytes))
            except ObjectStoreFullError:
                continue
        for index, ref in zip(indexes[3:], mine[3:], strict=True):
            try:
                if spill.begin_restore(c, index, ref.objref) is not None:
                    spill.cancel_restore(c, index)  # as if this process could open no more files
                if spill.begin_restore(c, index, ref.objref) is not None:
                    spill.finish_restore(c, index, False)  # as if its file were lost
            except ObjectStoreFullError:
                full.clear()
        full.clear()
        self.kept += mine[:3]
        self.keep_elsewhere()

    def keep_elsewhere(self) -> None:
        """Values that another node keeps: copies come, go, and stay without their source."""
        c, there = self.client, "5e" * 16
        for k, nbytes in enumerate((20000, 20000, 20000, 1 << 40)):
            task, _ = tasks.promise(c)
            ref = remote.seal_result(c, task, 0, nbytes, 16, there, 7)
            tasks.finish(c, task)
            try:
                if k == 1:  # they come in a file
                    for use in ("abort", "seal"):
                        fill = mapped.fetch(c, ref)
                        work.begin_file(c, fill, nbytes)
                        fill.copy(0, work.pattern(8300, nbytes))
                        getattr(fill, use)()
                    self.kept.append(ref)
                    continue
                for use in ("seal", "abort", "seal"):
                    fill = remote.fetch(c, ref)
                    getattr(fill, use)()
                    remote.drop_copy(c, ref.index, ref.objref)
                remote.fetch(c, ref).seal()
                pin = handles.read(c, ref)[2]
                remote.drop_copy(c, ref.index, ref.objref)
                del pin
                remote.drop_copy(c, ref.index, ref.objref)
                if not remote.detach(c, ref):
                    fill = remote.replace(c, ref, 20000, 16, bool(k))
                    fill.seal()
                remote.mark(c, ref, there, 8)
                remote.detach(c, ref)
            except ObjectStoreFullError:
                continue

    def bury(self) -> None:
        for slot, gen in self.known["dead"]:
            if is_there(self.segment, slot, gen):
                for task in recovery.recover(self.client, slot)["ending"]:
                    work.fail(self.client, task)

    def make_segment(self) -> None:
        if self.known["make"]:
            segment = Segment.create(1 << 20, clients_max=1, objects_max=64, tasks_max=64)
            segment.poison("a test")
            segment.unlink()


def is_there(segment: Segment, slot: int, gen: int) -> bool:
    """Whether a slot still has that tenant: others may have recovered it, and the next have come."""
    return any((row["client"], row["gen"]) == (slot, gen) for row in clients.table(segment))
