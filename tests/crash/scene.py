"""One arena with a survivor in it: set up, let others die in it, recover them, and account for everything.

The survivor plays the daemon (it recovers) and a driver (it submitted tasks whose results it wants).
"""

import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import acting
import queueing
import streaming
import work
from victim import Victim, is_there
from work import Expected, Wrong

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import functions, handles
from fastrt._core.repair import recovery
from fastrt._core.repair.fsck import fsck, usage
from fastrt._core.tasks import admission, cancel, failures, tasks

STORE_BYTES = 2 << 20  # little: a walk finds it full at times, which it expects
SHARED_BYTES = 16 << 20  # room for several walks, of which some may be dead and hold what they held
SLAB_PAGES_KEPT = 6  # each size class keeps one empty page
PAGE = 1 << 14
FIRST_SEED = 100


class Child:
    """A forked process, watched by its pidfd."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                run()
                code = 0
            except BaseException as exc:  # the last frame of a process: it must be seen
                import traceback

                traceback.print_exception(exc)
            finally:
                os._exit(code)
        self._pidfd = os.pidfd_open(self.pid)

    def ended(self, timeout_s: float) -> bool:
        if self.code is None and select.select([self._pidfd], [], [], timeout_s)[0]:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.code is not None

    def end(self, what: str) -> bool:
        """Wait for the process; whether it was killed. Raises when it hangs or fails."""
        if not self.ended(work.PATIENCE_S):
            with open(f"/proc/{self.pid}/stat") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
            self.kill()
            raise Wrong(f"{what} hung, in state {state}")
        if self.code not in (0, -signal.SIGKILL):
            raise Wrong(f"{what} ended with {self.code}")
        return self.code != 0

    def kill(self) -> None:
        if self.code is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self.ended(work.PATIENCE_S)


class Scene:
    """An arena with a survivor, things that it holds, tasks that it has submitted, and a client that is dead."""

    def __init__(self, store_bytes: int = STORE_BYTES) -> None:
        self.segment = Segment.create(
            store_bytes, clients_max=128, clients_dense=work.DENSE, objects_max=4096, tasks_max=1024
        )
        self.client = self.attach(clients.KIND_DRIVER)
        self.client.adopt_job(self.client.job)
        self.function = handles.put_scalar(self.client, b"the function")
        self.counted = handles.put_scalar(self.client, b"the function of this process's own tasks")
        self.submitted = 0  # tasks of that function
        self.shared = [(s, work.put(self.client, s, n)) for s, n in ((1, 16), (2, 300), (3, 20000))]
        self.box = work.put(self.client, 4, 50, [ref for _, ref in self.shared])
        self.actor, index = acting.make(self.client, self.function)
        assert index is not None
        self.actor_index = index
        self.queue = queueing.Shared(self.client)
        self.victims = 0
        self.streams: list[streaming.Stream] = []
        self.expected: list[Expected] = []
        self.dead: list[tuple[int, int]] = []
        self.stall_s = 0.0  # the longest recovery

    def attach(self, kind: int) -> Client:
        index, gen = clients.admit(self.segment, os.getpid(), kind, "survivor")
        return Client(self.segment, index, gen)

    def known(self, make: bool = False, spills: bool = False) -> dict[str, Any]:
        """What a victim is told; see Victim."""
        self.victims += 1

        def name(ref: Any) -> tuple[int, int]:
            return ref.objref, handles.describe(self.client, ref)["index"]

        return {"function": name(self.function), "shared": [(s, name(ref)) for s, ref in self.shared],
                "box": name(self.box), "actor": name(self.actor), "dead": list(self.dead),
                "stream": [(name(stream), name(end), seed) for stream, end, seed in self.streams[:1]],
                "queue": [name(ref) for ref in (self.queue.root, *self.queue.segments)],
                "sleepers": [self.client.index], "make": make,
                "spills": spills, "first": work.DENSE * (self.victims % 2)}  # fmt: skip

    def submit(self, op: int, seed: int, refs: Any = (), addends: int = 0, big: int = 0) -> Expected:
        self.client.adopt_job(self.client.job)  # running a task has made its job ours
        made = work.submit(self.client, self.counted, op, seed, refs, big)
        self.submitted += 1
        self.expected.append(Expected(made, op, seed, addends))
        return self.expected[-1]

    def submit_all(self) -> None:
        """One task of each kind, and some that wait for others."""
        for op in (work.INT, work.BYTES, work.BOX, work.MANY, work.RETRY, work.FAIL, work.NEST, work.PROMISE):
            self.submit(op, FIRST_SEED + 20 * op)
        for big in (0, 200):
            self.client.adopt_job(self.client.job)
            ref = work.submit_demanding(self.client, self.counted, work.INT, 300 + big, big=big)
            self.submitted += 1
            self.expected.append(Expected([ref], work.INT, 300 + big, 0))
        first, second = self.expected[0], self.expected[1]
        both = [first.refs[0], second.refs[0]]
        third = self.submit(work.SUM, 400, both, work.answer(first.seed) + second.seed)
        total = work.answer(third.seed) + third.addends
        self.submit(work.SUM, 420, [third.refs[0], third.refs[0]], 2 * total, big=200)

    def stream_all(self) -> None:
        """Generators: one that others read, too, and some that only this process reads."""
        for k in range(3):
            self.client.adopt_job(self.client.job)
            self.streams.append(streaming.submit(self.client, self.function, 500 + 20 * k, big=k // 2 * 200))

    def call_all(self) -> None:
        """Calls of the actor: of each kind that one can run, and one that waits for another's result."""
        for k, op in enumerate((work.INT, work.BYTES, work.BOX, work.MANY, work.NEST)):
            made = acting.call(self.client, self.actor, op, 600 + 20 * k)
            self.expected.append(Expected(made, op, 600 + 20 * k))
        first = self.expected[0]
        made = acting.call(self.client, self.actor, work.SUM, 700, [first.refs[0]])
        self.expected.append(Expected(made, work.SUM, 700, work.answer(first.seed)))

    def leave_one_dead(self) -> None:
        """A client that holds one of everything, and is gone."""
        client = self.attach(clients.KIND_WORKER)
        client.adopt_job(self.client.job)
        known = self.known()
        kept: list[Any] = [handles.acquire(client, *name) for _, name in known["shared"]]
        kept += [work.load(client, kept[2])[2], work.put(client, 31, 400, kept[:1]), work.put(client, 32, 20000)]
        function = handles.acquire(client, *known["function"])
        waited = work.submit(client, function, work.INT, 33)[0]
        kept += [function, waited, work.submit(client, function, work.SUM, 34, [waited])]
        handles.wait_all(client, [waited], 0.0001, 0.0)
        if acting.become(client, self.actor_index):
            kept.append(acting.call(client, handles.acquire(client, *known["actor"]), work.INT, 35))
        task = tasks.next_task(client, 0.0, 0.0)
        if task != tasks.NO_TASK:
            kept.append(handles.result(client, task, 0, 500, work.KIND, 0))
        client.abandon()
        self.dead.append((client.index, client.gen))

    def leave_one_cancelled(self) -> None:
        """A client that was cancelled by force in the middle of its task, and is gone."""
        client = self.attach(clients.KIND_WORKER)
        client.adopt_job(self.client.job)
        index = handles.describe(self.client, self.function)["index"]
        function = handles.acquire(client, self.function.objref, index)
        task = tasks.claim_for(client, work.submit(client, function, work.INT, 36)[0])
        tasks.cancel_task(client, task, tasks.info(client, task)["id"], True)
        client.abandon()
        self.dead.append((client.index, client.gen))

    def end_one_late(self, again: bool) -> None:
        """A worker that has ended itself for the sake of a task that ran for too long, and may run again or not."""
        self.client.adopt_job(self.client.job)
        (ref,) = work.submit(self.client, self.counted, work.INT, 800)
        self.submitted += 1
        name = ref.objref, handles.describe(self.client, ref)["index"]

        def run() -> None:
            self.client.abandon()
            segment = Segment.attach(self.segment.name)
            client = Client(segment, *clients.admit(segment, os.getpid(), clients.KIND_WORKER, "late"))
            task = tasks.claim_for(client, handles.acquire(client, *name))
            cancel.end_for(client, task, tasks.info(client, task)["id"] + 1, False)  # not what it runs
            cancel.end_for(client, task, tasks.info(client, task)["id"], again)

        child = Child(run)
        if not child.end("the late worker"):
            raise Wrong("a worker whose task was late lives")
        self.dead += self.slots_of(child.pid)
        self.expected.append(Expected([ref], work.INT, 800, 0))
        self.expected[-1].must_fail = self.expected[-1].may_fail = not again

    def victim(self, kind: int, turn: int, arm: Callable[[], None], make: bool = False, spills: bool = False) -> Child:
        """Fork a process that arms its own death and walks."""
        known = self.known(make, spills)

        def run() -> None:
            self.client.abandon()
            arm()
            Victim(self.segment.name, kind, known).walk(turn)

        return Child(run)

    def slots_of(self, pid: int) -> list[tuple[int, int]]:
        return [(row["client"], row["gen"]) for row in clients.table(self.segment) if row["pid"] == pid]

    def recover(self, slot: int, gen: int) -> None:
        if not is_there(self.segment, slot, gen):
            return
        begun = time.monotonic()
        ending = recovery.recover(self.client, slot)["ending"]
        self.stall_s = max(self.stall_s, time.monotonic() - begun)
        for task in ending:
            work.fail(self.client, task)

    def bury(self, child: Child) -> None:
        for tenant in self.slots_of(child.pid):
            self.recover(*tenant)

    def settle(self) -> None:
        """Recover whoever is dead, finish all work, and compare every result."""
        for tenant in self.dead:
            self.recover(*tenant)
        begun = time.monotonic()
        self._work_off()
        acting.look_after(self.client, self.actor_index)
        acting.become(self.client, self.actor_index)
        acting.serve(self.client, self.actor_index, self.function)
        self._work_off()
        acting.serve(self.client, self.actor_index, self.function)
        for expected in self.expected:
            expected.check(self.client)
        for k, stream in enumerate(self.streams):
            streaming.check(self.client, stream, alone=k > 0)
        self.streams.clear()
        self.queue.check(self.client, self.victims)
        for seed, ref in self.shared:
            work.read(self.client, ref, seed)
        for ref in handles.contained(self.client, self.box):
            work.read(self.client, ref)
        work.check_failures(self.client)
        work.check_counts(self.client, self.counted, self.submitted)
        self.stall_s = max(self.stall_s, time.monotonic() - begun)

    def _work_off(self) -> None:
        while work.run_all(self.client, self.function) + work.admit_all(self.client):
            continue  # what has run may be what others waited for, and these be held now

    def account(self) -> None:
        """Check that all locks work, drop everything, and see that nothing is left but the functions."""
        self._use_everything()
        self.expected.clear()
        self.shared.clear()
        self.streams.clear()
        del self.box, self.function, self.counted, self.actor, self.queue
        tool = self.attach(clients.KIND_TOOL)
        index = self.client.index
        self.client.close()
        self._check(tool, reserved=0)
        recovery.recover(tool, index)
        acting.look_after(tool)
        self._check(tool, reserved=0)
        if usage(tool)["actors"]:
            raise Wrong(f"actors are left behind: {usage(tool)}")
        tool.close()

    def _use_everything(self) -> None:
        """Every lock is taken once more: none may be orphaned or held now."""
        client = self.client
        refs = [work.put(client, 70 + k, size) for k, size in enumerate(work.SIZES)]
        ref = handles.put_scalar(client, "a function")
        functions.add_function(client, b"last".ljust(16), ref, "last")
        made = [self.submit(work.SUM, 90, [refs[5]], 75), self.submit(work.FAIL, 91)]
        work.run_all(client, self.function)
        for expected in made:
            expected.check(client)
        work.check_counts(client, self.counted, self.submitted)
        if failures.read(client)[-1]["message"] != "91":
            raise Wrong("the last failure is lost")

    def _check(self, client: Client, reserved: int) -> None:
        found = fsck(client, quiet=True)
        if held := admission.device_holders(client):
            found.append(f"devices are held: {held}")
        use = usage(client)
        if use["objects"] != use["functions"] or use["tasks"] or use["reserved"] != reserved:
            found.append(f"left behind: {use}")
        if use["bytes_used"] > SLAB_PAGES_KEPT * PAGE:
            found.append(f"leaked: {use['bytes_used']} bytes are in use, and nothing is there")
        if found:
            raise Wrong("; ".join(found[:6]))

    def close(self) -> None:
        self.client.abandon()
        self.segment.unlink()
        shutil.rmtree(f"{work.FOLDER[0]}/{self.segment.session}", ignore_errors=True)
