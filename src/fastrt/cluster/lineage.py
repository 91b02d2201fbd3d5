"""Rebuilds objects of a lost node: runs the forwarded task that created them there again.

With a node those objects are lost whose bytes only that node has: large results of forwarded tasks, and what references
in results name: objects that a task put there, and results of tasks that it submitted. A task is therefore remembered
as long as the value of one of its results, or of a reference in one, is missing here, and runs again when its node is
lost. An object's number does not survive a run, but its place does: for example the third reference in the first
result, and the second reference in that value. The object at the same place after the second run replaces it, so such a
task must return the same references in the same order each time.

All runs of a task count against its `max_retries`. Its arguments are kept meanwhile; lost ones are rebuilt in the same
way, and the task waits for them. The records are bounded by the bytes that they keep: the oldest is forgotten first,
and its objects are then lost with their node.

A record outlives this process. It is stored as an object that contains the references to the function and the
arguments, and the daemon holds that object. It lists the local objects that it can make again, so the next uplink finds
the origin of each remote value. It is stored before a value that depends on it can be seen. Objects that are named
later are in lists, objects that contain the first one. A new list takes in those before it that are not longer, so a
record has few lists however many values name objects one after the other.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastrt._core.objects import handles, remote
from fastrt._core.objects.functions import function_name
from fastrt._core.tasks import admission, submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.remote_values import RemoteValues, Replacement, Source
from fastrt.errors import FastrtError, ObjectLostError, ObjectStoreFullError
from fastrt.store.client import NO_ROOM, Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import PICKLE, serialize
from fastrt.store.waiter import LoopWaiter
from fastrt.tasks.options import RETRIES_FOREVER, retries_left

if TYPE_CHECKING:
    from fastrt.cluster.references import StandIn

_RECORD_BYTES = 512  # the approximate size of a record without arguments
_REACH_MAX = 1000  # objects that are looked at to find one in the arguments of a record


Place = tuple[int, tuple[int, ...]]  # of an object that a task can make again: the result, and the path from there


@dataclass(frozen=True)
class _Form:
    """A task as it is stored; `refs` are its function, demand, policy and arguments, which the object contains.

    Attributes:
        name, left: as in `Record`.
        task, id: the task's record and number.
        job, returns, flags, priority: of the task's record.
        has_demand, has_policy: whether these are among the references.
        kind, data, dependencies: its arguments.
        places: the local objects that it can make again: for each, the result and the path.
    """

    name: str
    left: int
    task: int
    id: int
    job: int
    returns: int
    flags: int
    priority: int
    has_demand: bool
    has_policy: bool
    kind: int
    data: bytes
    dependencies: int
    places: dict[int, Place]


class _List(NamedTuple):
    """Places of a record that are stored apart from its form, and the object with them, which the daemon holds."""

    places: Mapping[int, Place]
    ref: ObjectRef


@dataclass
class _Stored:
    """The parts of a record: the numbers and bytes of its arguments, its form and its references.

    Attributes:
        ref: the stored form, which the daemon holds; None: the store was full.
        lists: the places that are not in the stored form, the longest list first.
    """

    arguments: dict[int, int]
    nbytes: int
    form: _Form
    refs: list[ObjectRef]
    ref: ObjectRef | None = None
    lists: list[_List] = field(default_factory=list)

    @property
    def parts(self) -> list[ObjectRef]:
        """Return the objects that the daemon holds."""
        return [one.ref for one in self.lists] + ([] if self.ref is None else [self.ref])


@dataclass(eq=False)
class Record:
    """A forwarded task with everything that is needed to run it again.

    Attributes:
        name: its function's name, for messages.
        left: how many more runs are allowed.
        run: submits it again; None once the record is forgotten or the task was submitted again.
        results: the results of the run that was started because its node was lost.
    """

    name: str
    left: int
    run: Callable[[], list[ObjectRef]] | None
    results: list[ObjectRef] = field(default_factory=list)


class Origin(NamedTuple):
    """Where an object of another node was named: a task's result, and the path of reference places from there."""

    record: Record
    result: int
    path: tuple[int, ...] = ()

    def at(self, place: int) -> Origin:
        """Return the origin of the reference at a place in this origin's value."""
        return self._replace(path=(*self.path, place))


def less_one(left: int) -> int:
    """Return how many runs are allowed after one more; with none left, `_run_again` refuses."""
    return left if left == RETRIES_FOREVER else max(left - 1, 0)


class Lineage:
    """The records of the tasks that one node has forwarded.

    Args:
        store: this process's attachment.
        waiter: waits for references on behalf of the process's event loop.
        bytes_max: how many bytes all records may keep.
        values: the remote values of this node.

    Attributes:
        wanted: numbers of the objects that rebuilds wait for, and how often each is waited for.
        making: the tasks of the stand-ins whose values are made again.
        on_store: called with a part of a record that is stored, and that another process must hold from now on.
        on_drop: called with the number of such a part that need not be held any more.
    """

    def __init__(self, store: Store, waiter: LoopWaiter, bytes_max: int, values: RemoteValues) -> None:
        self._store = store
        self._values = values
        values.rebuild, values.on_shared = self.rebuild, self.names
        values.promise, values.wait_for = self.stand_in, self.wait_for
        self._client = store.client
        self._waiter = waiter
        self._bytes_max = bytes_max
        # Oldest first, with what each keeps. A record lives as long as an object has it as its origin.
        self._records: dict[weakref.ref[Record], _Stored] = {}
        self._arguments: Counter[int] = Counter()  # of all records: how many of them keep each
        self._nbytes = 0
        self.wanted: Counter[int] = Counter()
        self.making: set[int] = set()
        self._waiting: list[tuple[Made, Origin, str]] = []  # rebuilds from tasks that have not ended
        self.on_store: Callable[[ObjectRef], None] = lambda ref: None
        self.on_drop: Callable[[int], None] = lambda objref: None

    def remember(self, task: int) -> Record:
        """Record a task that this process has claimed and forwarded, so that it can run again."""
        client = self._client
        info = core.info(client, task)
        kind, data, args = core.arguments(client, task, True)
        demand = admission.demand_of(client, task, info["id"])
        policy = submission.policy_of(client, task)
        unsealed = ((remote.result_objref(client, task, k), k) for k in range(info["returns"]))
        form = _Form(
            function_name(client, info["function"][0]),
            retries_left(info),
            task,
            info["id"],
            info["job"],
            info["returns"],
            info["flags"] & core.RETRY_ERRORS,
            info["priority"],
            demand is not None,
            policy is not None,
            kind,
            data,
            info["deps"],
            {objref: (k, ()) for objref, k in unsealed if objref},
        )
        extras = [ref for ref in (demand, policy) if ref is not None]
        stored = self._stored(form, [handles.acquire(client, *info["function"]), *extras, *args])
        self._store_form(stored)
        return self._record(stored)

    def adopt(self, objects: Iterable[ObjectRef]) -> None:
        """Take over the records that an earlier uplink process of this node has stored: forms, and lists after them."""
        records, origins = dict[int, Record](), dict[int, Origin]()
        for ref in objects:
            try:
                content = pickle.loads(self._store.read(ref)[2])  # safe: a process of this node wrote it
                contains = handles.contained(self._client, ref)
            except FastrtError:  # it cannot be read any more
                self.on_drop(ref.objref)
                continue
            if isinstance(content, dict):
                stored = self._stored(_Form(**content), contains)
                stored.ref = ref
                record = records[ref.objref] = self._record(stored)
                places = stored.form.places
            else:
                found, places = records.get(contains[0].objref), dict(content)
                kept = None if found is None else self._records.get(weakref.ref(found))
                if found is None or kept is None:  # the record is dropped: by the earlier process, or for its bytes
                    self.on_drop(ref.objref)
                    continue
                record = found
                kept.form.places.update(places)
                kept.lists.append(_List(places, ref))
            origins |= {objref: Origin(record, *place) for objref, place in places.items()}
        for record in records.values():
            kept = self._records.get(weakref.ref(record))
            if kept is not None and not submission.has_ended(self._client, kept.form.task, kept.form.id):
                self.count_run(record)  # the earlier process had forwarded it: it begins again
        self._values.assign(origins)

    def count_run(self, record: Record) -> None:
        """Count that a remembered task begins again, because the stream to the node that ran it has ended."""
        stored = self._records.get(weakref.ref(record))
        record.left = less_one(record.left)
        if stored is not None and stored.form.left != record.left:
            stored.form = replace(stored.form, left=record.left)
            self._store_form(stored)

    def names(self, objref: int, origin: Origin | None) -> None:
        """Note that this object of this node can be made again like the object with this origin."""
        if origin is not None:
            self.names_all(origin.record, {objref: (origin.result, origin.path)})

    def names_new(self, origin: Origin, missing: Iterable[tuple[int, StandIn]]) -> None:
        """Note stand-ins whose names a value contains, as far as they have no origin, by their places in the value.

        Args:
            origin: of the value.
            missing: places and stand-ins.
        """
        needs, places = self.needs(origin.record), {}
        for place, standin in missing:
            if standin.origin is None and standin.ref.objref not in needs:
                standin.origin = origin.at(place)
                places[standin.ref.objref] = standin.origin.result, standin.origin.path
        self.names_all(origin.record, places)

    def names_all(self, record: Record, places: Mapping[int, Place]) -> None:
        """Note objects that a task can make again, by their numbers."""
        stored = self._records.get(weakref.ref(record))
        if stored is None:
            return
        new = {objref: place for objref, place in places.items() if stored.form.places.get(objref) != place}
        stored.form.places.update(new)
        if new and stored.ref is None:
            self._store_form(stored)
        elif new:
            self._store_list(stored, new)

    def needs(self, record: Record) -> Container[int]:
        """Return the numbers of the objects that a task's arguments contain, at any depth.

        Such a task cannot make these again. As the origin of one, its record would keep the arguments, these would keep
        the object, and the object would keep the record.
        """
        stored = self._records.get(weakref.ref(record))
        found = {} if stored is None else {ref.objref: ref for ref in stored.refs}
        todo = list(found.values())
        while todo and len(found) < _REACH_MAX:
            ref = todo.pop()
            if handles.is_ready(self._client, ref):
                more = [one for one in handles.contained(self._client, ref) if one.objref not in found]
                found.update((one.objref, one) for one in more)
                todo += more
        return found

    def _stored(self, form: _Form, refs: list[ObjectRef]) -> _Stored:
        args = refs[1 + form.has_demand + form.has_policy :]
        nbytes = {ref.objref: handles.describe(self._client, ref)["bytes"] for ref in args}
        return _Stored(nbytes, _RECORD_BYTES + len(form.data), form, refs)

    def _store_form(self, stored: _Stored) -> None:
        """Store a record's form, in place of the one that is stored and of the lists."""
        before = stored.parts
        stored.ref, stored.lists = self._store_object(vars(stored.form), stored.refs), []
        for ref in before:
            self.on_drop(ref.objref)

    def _store_list(self, stored: _Stored, places: dict[int, Place]) -> None:
        """Store places that are not in the stored form, in place of the lists that are not longer."""
        assert stored.ref is not None
        left = len(stored.lists)
        while left and len(stored.lists[left - 1].places) <= len(places):
            left -= 1
            places |= stored.lists[left].places
        ref = self._store_object(list(places.items()), [stored.ref])
        if ref is not None:
            before, stored.lists[left:] = stored.lists[left:], [_List(places, ref)]
            for one in before:
                self.on_drop(one.ref.objref)

    def _store_object(self, content: Any, refs: list[ObjectRef]) -> ObjectRef | None:
        """Store a part of a record as an object that contains these; None: the store is full, and it is not kept."""
        data = pickle.dumps(content, 5)
        with contextlib.suppress(ObjectStoreFullError):
            writer = self._store.create(len(data), PICKLE, len(refs), False, False)
            writer.copy(0, data)
            ref: ObjectRef = writer.seal(refs)
            self.on_store(ref)
            return ref
        return None

    def _record(self, stored: _Stored) -> Record:
        """Make the record of a stored task; forget the oldest ones if all keep too much."""
        form = stored.form
        record = Record(form.name, form.left, partial(self._submit, stored))
        self._records[weakref.ref(record, self._drop)] = stored
        self._nbytes += stored.nbytes
        for objref, nbytes in stored.arguments.items():
            self._nbytes += 0 if self._arguments[objref] else nbytes
            self._arguments[objref] += 1
        while self._nbytes > self._bytes_max:
            oldest = next(iter(self._records))
            self._drop(oldest)
            forgotten = oldest()
            if forgotten is not None:
                forgotten.run = None
        return record

    def _submit(self, stored: _Stored) -> list[ObjectRef]:
        """Submit a stored task again, with a run less; return its results."""
        form, refs = stored.form, stored.refs
        first = 1 + form.has_demand + form.has_policy
        again = less_one(form.left)
        options = submission.TaskOptions(
            refs[0],
            form.returns,
            again,
            form.flags,
            demand=refs[1] if form.has_demand else None,
            policy=refs[first - 1] if form.has_policy else None,
            priority=form.priority,
        )
        args = submission.PackedArgs(form.kind, form.data, refs[first:], form.dependencies)
        if again != form.left:
            stored.form = replace(form, left=again)  # if this process dies, the next one has a run less
            self._store_form(stored)
        self._client.adopt_job(form.job)
        try:
            submitted = submission.submit(self._client, options, args)
        finally:
            self._client.adopt_job(self._client.job)
        return [submitted] if form.returns == 1 else list(submitted)

    @property
    def nbytes(self) -> int:
        """Return how many bytes all records keep."""
        return self._nbytes

    def _drop(self, record: weakref.ref[Record]) -> None:
        stored = self._records.pop(record, None)
        if stored is None:
            return
        self._nbytes -= stored.nbytes
        for objref, nbytes in stored.arguments.items():
            self._arguments[objref] -= 1
            if not self._arguments[objref]:
                del self._arguments[objref]
                self._nbytes -= nbytes
        for ref in stored.parts:
            self.on_drop(ref.objref)

    def origins(self) -> dict[int, Origin]:
        """Return how objects of this node can be made again, by their numbers."""
        every = [(record(), stored.form.places) for record, stored in self._records.items()]
        return {
            objref: Origin(one, *place) for one, places in every if one is not None for objref, place in places.items()
        }

    def stand_in(self, task: int) -> StandInResult:
        """Return what seals a stand-in whose value has not arrived: the result of `task`."""
        self.making.add(task)
        return StandInResult(self._store, self._values, task, 0, self._stood_in)

    def _stood_in(self, task: int) -> None:
        core.finish(self._client, task)
        self.making.discard(task)

    def wait_for(self, made: Made, source: ObjectRef) -> None:
        """Use the value of another object of this node once it has one."""
        self._watch(made, (), "", source)

    def result(self, task: int, place: int, then: Callable[[int], None]) -> StandInResult:
        """Return what seals one result of a forwarded task, and then calls `then` with the task."""
        return StandInResult(self._store, self._values, task, place, then)

    def rebuild(self, made: Made, origin: Origin | None, lost: str) -> None:
        """Rebuild an object of a lost node.

        Args:
            made: takes the object's value, or an error.
            origin: where the object was named; None: no task's result named it.
            lost: how its node was lost, for the error.
        """
        if origin is None:
            why = "no task returned it, but an actor's method or a generator, or it was an argument: it is gone"
            made.fail(ObjectLostError(f"an object of another node is lost: {lost}; {why}"))
            return
        if self._is_open(origin.record):
            self._waiting.append((made, origin, lost))
            return
        try:
            source = self._run_again(origin.record, lost)[origin.result]
        except FastrtError as exc:
            made.fail(exc)
            return
        self._watch(made, origin.path, f"{origin.record.name!r}: {lost}", source)

    def _is_open(self, record: Record) -> bool:
        """Return whether a task may run again but has not ended: it would run twice at the same time."""
        stored = self._records.get(weakref.ref(record))
        if stored is None or record.results or record.left < 1:
            return False
        return not submission.has_ended(self._client, stored.form.task, stored.form.id)

    def go_on(self) -> None:
        """Rebuild the lost results of tasks that have ended meanwhile."""
        waiting, self._waiting = self._waiting, []
        for made, origin, lost in waiting:
            self.rebuild(made, origin, lost)

    def _run_again(self, record: Record, lost: str) -> list[ObjectRef]:
        """Return the results of the task's next run; start that run unless it was started already."""
        about = f"an object that task {record.name!r} had made on another node is lost: {lost}"
        if not record.results:
            if record.left < 1:
                raise ObjectLostError(f"{about}; the task may not run again (max_retries)")
            if record.run is None:
                raise ObjectLostError(f"{about}; its arguments were dropped because lineage_bytes was exceeded")
            record.results = record.run()
            record.run = None
        return record.results

    def _watch(self, made: Made, path: tuple[int, ...], about: str, source: ObjectRef) -> None:
        self.wanted[source.objref] += 1
        self._waiter.add(source, partial(self._follow, made, path, about))

    def _follow(self, made: Made, path: tuple[int, ...], about: str, source: ObjectRef) -> None:
        """Follow the path through a value that is ready: to the reference at the next place, or use the last one."""
        self.wanted[source.objref] -= 1
        if not self.wanted[source.objref]:
            del self.wanted[source.objref]
        try:
            if path and not handles.describe(self._client, source)["error"]:
                contains = handles.contained(self._client, source)
                if path[0] >= len(contains):
                    raise ObjectLostError(f"an object of task {about}; when it ran again it made no such object")
                self._watch(made, path[1:], about, contains[path[0]])
            elif not self._values.follow(made, source):
                made.copy_of(source)
        except FastrtError as exc:
            made.fail(exc)


class StandInResult:
    """The value of a stand-in that waits for it: a result of a task of this process.

    Args:
        store: this process's attachment.
        values: the remote values of this node.
        task: the task.
        place: which result.
        then: called with the task once the result is sealed.

    Attributes:
        is_dropped: the task is run again, or has ended without this result: nothing is sealed any more.
    """

    def __init__(
        self,
        store: Store,
        values: RemoteValues,
        task: int,
        place: int,
        then: Callable[[int], None],
    ) -> None:
        self._store = store
        self._client = store.client
        self._values = values
        self._task = task
        self._place = place
        self._then = then
        self.is_dropped = False

    def fail(self, error: FastrtError) -> None:
        """Use an error; it never fails because the store is full."""
        self._end(partial(self._seal_error, error))

    def copy_of(self, ref: ObjectRef) -> None:
        """Use the bytes of another object of this node, or the error if they cannot be read or find no room."""
        self._end(partial(self._seal_copy, ref))

    def point_at(self, source: Source) -> None:
        """Use the source of a remote value."""
        self._end(partial(self._seal_pointer, source))

    def _end(self, seal: Callable[[], None]) -> None:
        """Seal the result, unless it is dropped."""
        if not self.is_dropped:
            seal()
            self._then(self._task)

    def _seal_error(self, error: FastrtError) -> None:
        for parts in (serialize(error), NO_ROOM):
            with contextlib.suppress(ObjectStoreFullError):
                self._store.put_result(self._task, self._place, parts, True, False)
                break

    def _seal_copy(self, ref: ObjectRef) -> None:
        try:
            kind, error, data = self._store.read(ref, raw=True)
            contains = handles.contained(self._client, ref)
            view = memoryview(data).cast("B")
            writer = self._store.result(self._task, self._place, view.nbytes, kind, len(contains), error)
        except FastrtError as exc:
            self._seal_error(exc)
            return
        if writer is not None:
            writer.copy(0, view)
            writer.seal(contains)

    def _seal_pointer(self, source: Source) -> None:
        about = handles.describe(self._client, source.ref)
        where = (about["bytes"], about["kind"], source.exchange.node, source.objref)
        ref = remote.seal_result(self._client, self._task, self._place, *where)
        if ref is not None:
            self._values.add(source.shared_by(ref))


class OwnResults:
    """The results of a forwarded task that are other objects of this node; each waits until that object has its value.

    Attributes:
        made: the results.
        left: how many of them are not sealed.
        then: called with the task once all are sealed.
    """

    def __init__(self) -> None:
        self.made: list[StandInResult] = []
        self.left = 0
        self.then: Callable[[int], None] = lambda task: None

    def sealed(self, task: int) -> None:
        """Count a result that is sealed."""
        self.left -= 1
        if not self.left:
            self.then(task)

    def drop(self) -> None:
        """Seal none of them any more."""
        for made in self.made:
            made.is_dropped = True


Made = Replacement | StandInResult
