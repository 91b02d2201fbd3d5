"""What the processes of a kill test do: values and tasks whose right results follow from a number, the seed.

Everything is written by that rule and compared with it wherever it is read, so a lost, torn or swapped value is seen
by whoever comes across it. The core's calls are used directly: no serializer, no daemon.
"""

import os
import re
import struct
import time
from collections.abc import Sequence
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles, mapped, spill
from fastrt._core.objects.handles import Ref
from fastrt._core.tasks import admission, failures, submission, tally, tasks

KIND = 16  # of values that the core does not read by itself: 8 bytes of seed, then the pattern
ERROR = b"given up"
SIZES = (8, 60, 72, 73, 300, 700, 1500, 3000, 5000, 8192, 8193, 20000, 150000)
RETRIES = 250  # no task of a campaign may use up its attempts
DENSE = 64  # clients whose bits lie beside the objects' states; those of every second process lie in a plane
PATIENCE_S = 20.0
FOLDER = [""]  # where the files of spilled values are: one for each process that makes scenes
INT, BYTES, BOX, MANY, SUM, RETRY, FAIL, NEST, PROMISE = range(9)
KINDS = 9
YIELD = 9  # see streaming
DEATHS = ("WorkerCrashedError", "ActorDiedError", "TaskTimeoutError")  # classes of failures that recovery keeps


class Wrong(AssertionError):
    """Something is not as the seeds say."""


class Failed(Exception):
    """A value is an error: somebody has cancelled the task that should have made it, or its driver died."""


def pattern(seed: int, nbytes: int) -> bytes:
    word = struct.pack("<Q", (seed * 0x9E3779B97F4A7C15 + 1) & (2**64 - 1))
    return (struct.pack("<Q", seed) + word * (nbytes // 8))[:nbytes]


def answer(seed: int) -> int:
    return seed * 3 + 1


def put(client: Client, seed: int, nbytes: int, refs: Sequence[Ref] = ()) -> Ref:
    writer = handles.create(client, nbytes, KIND, len(refs))
    writer.copy(0, pattern(seed, nbytes))
    return writer.seal(refs)


def put_in_place(client: Client, seed: int, nbytes: int) -> tuple[handles.Writer, Ref]:
    """Make a value whose bytes the writer keeps in place."""
    writer = handles.create(client, nbytes, KIND, 0)
    writer.copy(0, pattern(seed, nbytes))
    return writer, writer.seal_in_place()


def folder_of(client: Client) -> str:
    """Make the folder of the files of an arena: several arenas are alive at once, and name their objects alike."""
    folder = f"{FOLDER[0]}/{client.segment.session}"
    os.makedirs(folder, exist_ok=True)
    spill.configure(client, folder)
    return folder


def begin_file(client: Client, writer: mapped.FileWriter | mapped.FileFill, nbytes: int) -> None:
    with open(f"{folder_of(client)}/{writer.name():016x}", "xb+") as file:
        file.truncate(nbytes)
        writer.map(file.fileno(), 0, 0, memoryview)


def open_file(client: Client, writer: mapped.FileWriter, seed: int, nbytes: int, refs: Sequence[Ref]) -> Any:
    """Write a value to a file, as a process does that finds no room; the reference, or None for a result."""
    begin_file(client, writer, nbytes)
    writer.copy(0, pattern(seed, nbytes))
    return writer.seal(refs)


def put_file(client: Client, seed: int, nbytes: int, refs: Sequence[Ref] = ()) -> Ref:
    ref: Ref = open_file(client, mapped.create(client, nbytes, KIND, len(refs)), seed, nbytes, refs)
    return ref


def read_file(client: Client, ref: Ref) -> Any:
    """Map the file of a value that is not in memory; None if it is by now."""
    about = mapped.look(client, ref)
    if about is None:
        return None
    kind, error, nbytes, _ = about
    try:
        with open(f"{folder_of(client)}/{ref.objref:016x}", "rb") as file:
            if os.fstat(file.fileno()).st_size != nbytes:
                return None  # it is being spilled again
            pin = mapped.map_file(file.fileno(), file.name, 0, nbytes, 0)
    except FileNotFoundError:
        return None  # it was restored
    return mapped.decode(client, ref, kind, error, pin, True)


def load(client: Client, ref: Ref) -> tuple[int, bool, Any]:
    """Read a value; one that has been spilled is brought back first, as the daemon would do."""
    until = time.monotonic() + PATIENCE_S
    while (found := handles.read(client, ref)) is None:
        if handles.describe(client, ref)["contains"] and (found := read_file(client, ref)) is not None:
            return found
        restore(client, ref)  # only ever by the one process that is the spiller now
        if time.monotonic() > until:
            raise Wrong(f"{ref.objref:#x} was spilled and does not come back")
    return found


def spill_some(client: Client, most: int) -> None:
    """Move values that nobody has mapped to files."""
    folder = folder_of(client)
    for *_, index, objref in spill.candidates(client)[:most]:
        data = spill.begin(client, index, objref)
        if data is not None:
            with open(f"{folder}/{objref:016x}", "wb") as file:
                file.write(data)
            spill.commit(client, data)
    spill.end_round(client, 1)
    spill.fail_first(client, spill.outlook(client)[3])  # as a process that waits for room in vain


def restore(client: Client, ref: Ref) -> None:
    index = handles.describe(client, ref)["index"]
    room = spill.begin_restore(client, index, ref.objref)
    if room is None:
        spill.wait_restored(client, ref, 0.005)  # somebody else is at it
        return
    with open(f"{folder_of(client)}/{ref.objref:016x}", "rb") as file:
        file.readinto(room)
    del room
    spill.finish_restore(client, index, True)


def read(client: Client, ref: Ref, seed: int | None = None) -> int:
    """Compare a value with its pattern; its seed."""
    kind, error, value = load(client, ref)
    if kind != KIND or error:
        raise Wrong(f"{ref.objref:#x} is of kind {kind}, error {error}")
    found = bytes(memoryview(value))
    there = struct.unpack_from("<Q", found)[0]
    if found != pattern(there, len(found)) or seed not in (None, there):
        raise Wrong(f"{ref.objref:#x} of {len(found)} bytes is torn: seed {there}, expected {seed}")
    return there


def packed(op: int, seed: int, refs: Sequence[Ref], big: int) -> tuple[Any, ...] | submission.PackedArgs:
    """A task's arguments; with `big` they are so many serialized bytes."""
    if not big:
        return (op, seed, *refs)
    return submission.PackedArgs(KIND, struct.pack("<QQ", op, seed) + bytes(big), list(refs), len(refs))


def submit(
    client: Client, function: Ref, op: int, seed: int, refs: Sequence[Ref] = (), big: int = 0, priority: int = 0
) -> list[Ref]:
    """Submit one task of the given kind; with `big` its arguments are so many serialized bytes."""
    count = 3 if op == MANY else 1
    options = submission.TaskOptions(function, count, RETRIES, priority=priority)
    made = submission.submit(client, options, packed(op, seed, refs, big))
    return made if count > 1 else [made]


def submit_demanding(client: Client, function: Ref, op: int, seed: int, refs: Sequence[Ref] = (), big: int = 0) -> Ref:
    """As `submit`, a task with one result that somebody has to admit."""
    options = submission.TaskOptions(function, 1, RETRIES, demand=function)
    ref: Ref = submission.submit(client, options, packed(op, seed, refs, big))
    return ref


def admit_all(client: Client) -> int:
    """What a daemon does that takes a dead one's place, and has room for everybody; how many were admitted."""
    admission.take_over(client)
    return sum([admit(client, held) for held in admission.take_held(client)])


def admit(client: Client, held: tuple[int, int]) -> bool:
    """Admit a task, with the one device that this client gives away unless another task has it.

    Raises:
        Wrong: two tasks have one device, or one has not got it.
    """
    device = 1 << client.index % 32
    given = [bits for one in admission.admitted(client) if (bits := admission.devices_of(client, *one) & device)]
    if len(given) > 1:
        raise Wrong(f"{len(given)} tasks have one device")
    done = admission.admit(client, *held, 0 if given else device)
    if done and not given and not admission.devices_of(client, *held):
        ((state, _),) = admission.states(client, [held])
        if state > admission.WAITING:
            raise Wrong("an admitted task does not have its device")
    return done


def fail(client: Client, task: int) -> None:
    """End a task that is this client's to end: an error for every result that is not sealed."""
    for k in range(tasks.info(client, task)["returns"]):
        writer = handles.result(client, task, k, len(ERROR), KIND, 0, True)
        if writer is not None:
            writer.copy(0, ERROR)
            writer.seal()
    tasks.finish(client, task)


def perform(client: Client, function: Ref, task: int) -> None:
    """Run a claimed task to its end."""
    id = tasks.info(client, task)["id"]
    devices = admission.devices_of(client, task, id)
    if devices:
        admission.hold_devices(client, devices, 10_000, id)
    try:
        _perform(client, function, task)
    except Failed:
        fail(client, task)
    if devices:
        admission.hold_devices(client, 0, 0, 0)


def seed_of(client: Client, task: int) -> int:
    kind, args, _ = tasks.arguments(client, task)
    return struct.unpack_from("<QQ", args)[1] if kind == KIND else args[1]


def _perform(client: Client, function: Ref, task: int) -> None:
    kind, args, refs = tasks.arguments(client, task)
    op, seed = struct.unpack_from("<QQ", args) if kind == KIND else args[:2]
    if op == RETRY and tasks.info(client, task)["attempts"] == 1:
        if seed & 1:
            submission.park(client, task)  # as one that waits for its next attempt
        if tasks.retry(client, task):
            return
    if op == FAIL:
        failures.keep(client, task, texts_of(seed), os.getpid())
        fail(client, task)
    elif op == YIELD:
        import streaming  # there is no other way round

        streaming.produce(client, task, seed)
    elif op == BYTES:
        _result(client, task, 0, seed, SIZES[seed % len(SIZES)])
        tasks.finish(client, task)
    elif op == BOX:
        _result(client, task, 0, seed, 100, [put(client, seed + k, size) for k, size in enumerate((40, 400, 20000))])
        tasks.finish(client, task)
    elif op == MANY:
        for k, size in enumerate((60, 600, 20000)):
            _result(client, task, k, seed + k, size)
        tasks.finish(client, task)
    else:
        value = answer(seed)
        if op == SUM:
            value += sum(value_of(client, ref) for ref in refs)
        elif op == NEST:
            value += _nested(client, function, task, seed)
        elif op == PROMISE:
            value += _promised(client, seed)
        if not tasks.finish_scalar(client, task, value):
            raise Wrong(f"task {task} has its result already, but its word says it runs here")


def _result(client: Client, task: int, k: int, seed: int, nbytes: int, refs: Sequence[Ref] = ()) -> None:
    if refs and seed % 40 < 20:  # in a file, as if it had found no room
        file = mapped.result(client, task, k, nbytes, KIND, len(refs))
        if file is not None:
            open_file(client, file, seed, nbytes, refs)
        return
    writer = handles.result(client, task, k, nbytes, KIND, len(refs))
    if writer is not None:  # a former attempt may have come so far
        writer.copy(0, pattern(seed, nbytes))
        writer.seal(refs)


def _nested(client: Client, function: Ref, task: int, seed: int) -> int:
    (inner,) = submit(client, function, INT, seed + 1)
    tasks.set_blocked(client, task, True)
    until = time.monotonic() + PATIENCE_S
    while not handles.wait_all(client, [inner], 0.0, 0.0):
        other = tasks.claim_for(client, inner)
        if other != tasks.NO_TASK:
            perform(client, function, other)
            tasks.resume(client, task)
        elif not handles.wait_all(client, [inner], 0.02, 0.0) and time.monotonic() > until:
            raise Wrong(f"the inner task of seed {seed} was lost: {tasks.info(client, task)}")
    tasks.set_blocked(client, task, False)
    return value_of(client, inner)


def _promised(client: Client, seed: int) -> int:
    """Name an object before it has a value, as a stand-in for one of another node is; its seed."""
    inner, ref = tasks.promise(client, b"5e 7")
    if not tasks.hand_over(client, inner, client.index):  # as the daemon does for the next uplink
        raise Wrong(f"task {inner} cannot be passed to this client, which runs")
    box = put(client, seed, 100, [ref])
    _result(client, inner, 0, seed, 300)
    tasks.finish(client, inner)
    del ref
    return value_of(client, handles.contained(client, box)[0])


def value_of(client: Client, ref: Ref) -> int:
    """A scalar's value, or the seed of a checked pattern."""
    kind, error, value = load(client, ref)
    if error:
        raise Failed(f"{ref.objref:#x} is an error: {value!r}")
    return value if kind < KIND else read(client, ref)


def texts_of(seed: int) -> tuple[str, str, str, str, str]:
    """The name, class, message, traceback and node of the kept failure of a seed."""
    return f"task {seed}", "Failed", str(seed), f"line {seed}\n" * (seed % 200), f"node {seed}"


def check_failures(client: Client) -> None:
    """Compare every kept failure with its seed, or with what recovery writes about a death.

    Raises:
        Wrong: one is torn, or there are two about one attempt.
    """
    seen = set()
    for row in failures.read(client):
        attempt = row["id"], row["attempt"]
        if attempt in seen:
            raise Wrong(f"two failures are kept of one attempt: {row}")
        seen.add(attempt)
        texts = tuple(row[name] for name in ("name", "type", "message", "traceback", "node"))
        if row["type"] == "Failed":
            whole = row["message"].isdigit() and texts == texts_of(int(row["message"]))
        else:
            whole = row["type"] in DEATHS and re.fullmatch(r"process \d+ ended", row["message"]) is not None
        if not whole:
            raise Wrong(f"a kept failure is torn: {row}")


def check_counts(client: Client, function: Ref, expected: int) -> None:
    """Compare the number of a function's tasks that have ended.

    Raises:
        Wrong: a task was not counted, or twice.
    """
    found = [counts for objref, *_, counts in tally.outcomes(client) if objref == function.objref]
    ended = sum(sum(counts) - counts[tally.RETRIED] for counts in found)
    if ended != expected:
        raise Wrong(f"lost count: {ended} tasks of {expected} are counted: {found}")


class Expected:
    """A submitted task's results, and what they must be."""

    def __init__(self, refs: list[Ref], op: int, seed: int, addends: int = 0) -> None:
        self.refs = refs
        self.op = op
        self.seed = seed
        self.addends = addends
        self.may_fail = False  # somebody else may have cancelled it
        self.must_fail = False  # it ran for too long

    def check(self, client: Client) -> None:
        for k, ref in enumerate(self.refs):
            if not handles.is_ready(client, ref):
                raise Wrong(f"result {k} of the task with seed {self.seed} (op {self.op}) was lost")
            kind, error, value = load(client, ref)
            if error:
                if (self.op != FAIL and not self.may_fail) or bytes(memoryview(value)) != ERROR:
                    raise Wrong(f"the task with seed {self.seed} (op {self.op}) failed: {value!r}")
                continue
            if self.must_fail:
                raise Wrong(f"the task with seed {self.seed} ran again, though it was late: {value!r}")
            if self.op in (BYTES, BOX, MANY):
                read(client, ref, self.seed + k)
                for j, inner in enumerate(handles.contained(client, ref)):
                    read(client, inner, self.seed + j)
                if self.op == BOX and len(handles.contained(client, ref)) != 3:
                    raise Wrong(f"the box of seed {self.seed} is not whole")
            elif kind >= KIND or value != self._scalar():
                raise Wrong(f"the task with seed {self.seed} (op {self.op}) gave {value!r}, not {self._scalar()}")

    def _scalar(self) -> int:
        extra = {SUM: self.addends, NEST: answer(self.seed + 1), PROMISE: self.seed}.get(self.op, 0)
        return answer(self.seed) + extra


def run_all(client: Client, function: Ref, most: int = 1 << 30) -> int:
    """Run ready tasks until none is left, or `most`; how many."""
    done = 0
    while done < most:
        task = tasks.next_task(client, 0.0, 0.0)
        if task == tasks.NO_TASK:
            break
        perform(client, function, task)
        done += 1
    return done
