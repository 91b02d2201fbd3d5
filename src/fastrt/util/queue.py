"""`fastrt.util.Queue`: a first-in, first-out queue that any process of the node can put into and get from.

Small values go straight through shared memory, see `_core/objects/fifo.pyx`. Large ones, and those that contain
references, go into the store. The keeper, an actor, holds them there while they wait in the queue, as well as the
memory of the queue itself when it has grown. Small values do not involve the keeper. When its last handle is gone, the
queue and its values are released.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastrt._core.memory.clients import ForkedHandle
from fastrt._core.objects import fifo, handles
from fastrt._core.objects.fifo import Fifo
from fastrt._core.objects.scalar import CORE_KINDS_END
from fastrt.errors import ActorDiedError, FastrtError, ObjectLostError, StaleReferenceError
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import deserialize, serialize
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import ActorHandle, check_session, kill, plan_of

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

Empty, Full = queue.Empty, queue.Full

INLINE_BYTES_MAX = 64 << 10  # larger values are put into the store, and read there in place
_SEGMENT_BYTES = 256 << 10  # of the first memory of a queue; each further one has twice as much
_SEGMENT_BYTES_MAX = 64 << 20
_KIND_MEMORY = 33  # of the objects that hold a queue's memory, which are never read as values
_KIND_REF = 34  # of values in the store; the queue holds their names
_NAME = struct.Struct("<QI")
_LOOK_S = 0.25
_MAXSIZE_MAX = 1 << 62


class _Keeper:
    """Holds objects for a queue."""

    def __init__(self) -> None:
        self._kept: dict[int, ObjectRef] = {}
        self._dropped: set[int] = set()  # dropped before they were kept: calls of two processes have no order

    def keep(self, refs: list[ObjectRef]) -> None:
        for ref in refs:
            if ref.objref in self._dropped:
                self._dropped.discard(ref.objref)
            else:
                self._kept[ref.objref] = ref

    def drop(self, objref: int) -> None:
        if self._kept.pop(objref, None) is None:
            self._dropped.add(objref)


class Queue:
    """A queue between processes. It can be passed to tasks and actors, and lives as long as any process holds it.

    Values that a process has put stay in the queue when it dies; values that it has got are lost with it. Inside a
    task, another worker may run during a wait.

    Args:
        maxsize: greatest number of values; 0: as many as the store has room for.
        actor_options: settings of the actor that holds large values: `name`, `lifetime`, as for a remote class.
    Raises:
        TypeError, ValueError: an argument is wrong.
        ObjectStoreFullError: the store has no room for the queue's memory.
    Source:
        The semantics of `ray.util.queue.Queue`.
    """

    def __init__(self, maxsize: int = 0, actor_options: dict[str, Any] | None = None) -> None:
        if isinstance(maxsize, bool) or not isinstance(maxsize, int):
            raise TypeError(f"maxsize is {maxsize!r}; it must be a whole number")
        if maxsize > _MAXSIZE_MAX:
            raise ValueError(f"maxsize is {maxsize}; it must be at most 2^62")
        store = store_client.require()
        self.maxsize = max(maxsize, 0)
        self._keeper: ActorHandle = ActorClass(_Keeper, **(actor_options or {})).remote()
        self._bound: tuple[Store, Fifo] | None = None
        segment = self._new_segment(store, _SEGMENT_BYTES)
        room = store.create(fifo.ROOT_BYTES, _KIND_MEMORY, 0)
        fifo.write_root(room, self.maxsize, segment)
        self._root: ObjectRef = room.seal()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._root, self._keeper, self.maxsize)

    def __len__(self) -> int:
        return self.size()

    def __repr__(self) -> str:
        return f"Queue({self._root.hex()}, maxsize={self.maxsize})"

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put a value at the end.

        Args:
            item: anything that can be pickled.
            block: whether to wait while the queue is full.
            timeout: seconds to wait at most; None waits without a limit.
        Raises:
            Full: the queue is full, or stayed full until the timeout.
            ValueError: the timeout is negative.
            ActorDiedError: the queue was shut down.
            SerializationError: the value cannot be pickled.
        """
        if timeout is not None:
            _deadline(timeout)
        bound = self._bound or self._bind()
        try:
            code = bound[1].put(item)
        except ForkedHandle:
            code = fifo.MOVED
        if code != fifo.OK:
            self._put_otherwise(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the value at the front.

        Args:
            block: whether to wait while the queue is empty.
            timeout: seconds to wait at most; None waits without a limit.
        Raises:
            Empty: the queue is empty, or stayed empty until the timeout.
            ValueError: the timeout is negative.
            ActorDiedError: the queue was shut down.
            ObjectLostError: the value was large, and the actor that held it has died.
        """
        if timeout is not None:
            _deadline(timeout)
        bound = self._bound or self._bind()
        try:
            found = bound[1].get()
        except ForkedHandle:
            found = None
        if type(found) is tuple:
            return found[1] if found[0] < 16 else self._value(bound, *found)
        deadline = _deadline(timeout)
        while True:
            bound, found = self._take()
            if found is not None:
                return self._value(bound, *found)
            left = deadline - time.monotonic()
            if not block or left <= 0:
                raise Empty
            with bound[0].blocked():
                bound[1].wait_item(min(left, _LOOK_S))

    def put_nowait(self, item: Any) -> None:
        """Put a value without waiting: `put(item, block=False)`."""
        self.put(item, False)

    def get_nowait(self) -> Any:
        """Take a value without waiting: `get(block=False)`."""
        return self.get(False)

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put a value, like `put`, without blocking the event loop."""
        await self._in_loop(lambda: self.put(item, False), Full, "wait_room", block, timeout)

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take a value, like `get`, without blocking the event loop."""
        return await self._in_loop(lambda: self.get(False), Empty, "wait_item", block, timeout)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Put several values.

        Raises:
            Full: there is not enough room for all; none was put. If others put at the same time, some may have been.
            TypeError: `items` cannot be iterated over.
        """
        listed = list(items)
        room = (self._bound or self._bind())[1].room()
        if 0 <= room < len(listed):
            raise Full(f"{len(listed)} values have no room in a queue that has room for {room}")
        for item in listed:
            self.put(item, False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take several values.

        Args:
            num_items: how many; if others get at the same time, it may return fewer.
        Raises:
            Empty: the queue holds fewer; none was taken.
            TypeError, ValueError: num_items is wrong.
        """
        if isinstance(num_items, bool) or not isinstance(num_items, int):
            raise TypeError(f"num_items is {num_items!r}; it must be a whole number")
        if num_items < 0:
            raise ValueError(f"num_items is {num_items}; it must be from 0 on")
        if self.size() < num_items:
            raise Empty(f"{num_items} values wanted, {self.size()} are there")
        items: list[Any] = []
        try:
            while len(items) < num_items:
                items.append(self.get(False))
        except Empty:
            if not items:
                raise
        return items

    def qsize(self) -> int:
        """The number of values in the queue."""
        return self.size()

    def size(self) -> int:
        """The number of values in the queue."""
        return (self._bound or self._bind())[1].size()[0]

    def empty(self) -> bool:
        """Whether the queue holds no value."""
        return self.size() == 0

    def full(self) -> bool:
        """Whether the queue holds `maxsize` values."""
        return 0 < self.maxsize <= self.size()

    def shutdown(self, force: bool = False, grace_period_s: float = 5.0) -> None:
        """End the queue: later calls of all its users raise ActorDiedError.

        Args:
            force: end it at once; otherwise wait until it is empty, but at most `grace_period_s` seconds.
            grace_period_s: the longest wait.
        """
        bound = self._bound or self._bind()
        until = time.monotonic() + (0.0 if force else grace_period_s)
        while self.size() and time.monotonic() < until:
            bound[1].wait_get(min(until - time.monotonic(), _LOOK_S))
        bound[1].close()
        kill(self._keeper)

    def forget(self) -> None:
        """Drop the reference to a session that has ended, so that its segment can be unmapped."""
        self._bound = None

    # ---- putting ----

    def _put_otherwise(self, item: Any, block: bool, timeout: float | None) -> None:
        """Put a value that is not a scalar, or for which there was no room yet."""
        deadline = _deadline(timeout)
        parts = serialize(item)
        by_name: ObjectRef | None = None
        if parts.refs or parts.nbytes > INLINE_BYTES_MAX:
            store = store_client.require()
            by_name = store.put_serialized(parts)
            self._keep(store, by_name)
            kind, data = _KIND_REF, _NAME.pack(by_name.objref, by_name.index)
        else:
            kind, data = parts.kind, parts.to_bytes()
        try:
            self._put_bytes(kind, data, block, deadline)
        except BaseException:
            if by_name is not None:
                self._keeper.drop.remote(by_name.objref)
            raise

    def _put_bytes(self, kind: int, data: bytes, block: bool, deadline: float) -> None:
        while True:
            bound = self._current()
            code = bound[1].put_bytes(kind, data)
            if code == fifo.OK:
                return
            if code == fifo.CLOSED:
                raise self._over()
            if code == fifo.MOVED:
                self._attach(bound, tail=True)
            elif code == fifo.GROW:
                self._grow(bound, len(data))
            else:
                left = deadline - time.monotonic()
                if not block or left <= 0:
                    raise Full
                with bound[0].blocked():
                    bound[1].wait_room(min(left, _LOOK_S))

    def _grow(self, bound: tuple[Store, Fifo], nbytes: int) -> None:
        size = min(2 * bound[1].capacity(), _SEGMENT_BYTES_MAX)
        segment = self._new_segment(bound[0], max(size, 4 * nbytes))
        if not bound[1].grow(segment):
            self._keeper.drop.remote(segment.objref)

    def _new_segment(self, store: Store, nbytes: int) -> ObjectRef:
        room = store.create(fifo.SEGMENT_BYTES + (nbytes + 63 & ~63), _KIND_MEMORY, 0)
        fifo.write_segment(room)
        segment: ObjectRef = room.seal()
        self._keep(store, segment)
        return segment

    def _keep(self, store: Store, ref: ObjectRef) -> None:
        done = self._keeper.keep.remote([ref])
        if handles.is_ready(store.client, done):
            store.get(done)  # most likely the actor is dead, and this raises the reason

    # ---- getting ----

    def _take(self) -> tuple[tuple[Store, Fifo], tuple[int, Any] | None]:
        """Take the kind and the bytes of the value at the front; None if there is none."""
        while True:
            bound = self._current()
            found = bound[1].get()
            for objref in bound[1].drained():
                self._keeper.drop.remote(objref)
            if found == fifo.CLOSED:
                raise self._over()
            if found != fifo.MOVED:
                return bound, found
            self._attach(bound, tail=False)

    def _value(self, bound: tuple[Store, Fifo], kind: int, data: Any) -> Any:
        if kind < CORE_KINDS_END:
            return data
        if kind != _KIND_REF:
            return deserialize(kind, data, ())
        objref, index = _NAME.unpack(data)
        try:
            ref: ObjectRef = handles.acquire(bound[0].client, objref, index)
        except StaleReferenceError:
            raise ObjectLostError(f"a value of {self!r} is lost: the actor that held it has died") from None
        self._keeper.drop.remote(objref)
        return bound[0].get(ref)

    # ---- this process's use of it ----

    def _current(self) -> tuple[Store, Fifo]:
        bound = self._bound
        if bound is None or bound[0].client.forked:
            bound = self._bind()
        return bound

    def _bind(self) -> tuple[Store, Fifo]:
        store_client.refuse_stale(self._root)
        store = store_client.require()
        check_session(store, self._keeper._actor_ref)
        if plan_of(self._keeper).session != store.client.segment.session:
            raise FastrtError(f"{self!r} lives in the memory of another node; use it there, or an actor between nodes")
        bound = self._bound = (store, Fifo(store.client, store.read(self._root, raw=True)[2]))
        store.users.add(self)
        self._sleeps: dict[Any, asyncio.Event] = {}
        self._threads: ThreadPoolExecutor | None = None  # a forked child needs others
        return bound

    def _attach(self, bound: tuple[Store, Fifo], tail: bool) -> None:
        """Attach to the segment that is now filled (tail) or drained."""
        store, own = bound
        while True:
            objref, index = own.place(tail)
            try:
                ref: ObjectRef = handles.acquire(store.client, objref, index)
            except StaleReferenceError:
                if own.place(tail) != (objref, index):
                    continue  # it was drained meanwhile
                raise self._over() from None
            own.use(tail, objref, index, store.read(ref, raw=True)[2])
            return

    def _over(self) -> FastrtError:
        return ActorDiedError(f"{self!r} was shut down, or the actor that holds its memory has died; create another")

    async def _in_loop(
        self, attempt: Callable[[], Any], unready: type[Exception], sleep: str, block: bool, timeout: float | None
    ) -> Any:
        import asyncio  # here: most queues are used without it

        deadline = _deadline(timeout)
        while True:
            try:
                return attempt()
            except unready:
                left = deadline - time.monotonic()
                if not block or left <= 0:
                    raise
            # The thread only waits: if the coroutine is cancelled meanwhile, it has taken no value.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._slept(sleep).wait(), left)

    def _slept(self, sleep: str) -> asyncio.Event:
        """Return an event that is set when a thread has called a method of `Fifo` that sleeps.

        All coroutines of a loop that wait for the same share the thread. It is not one of the loop's own executor: that
        has few, and the program needs them for its other work.
        """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        bound, loop = self._current(), asyncio.get_running_loop()
        slept = self._sleeps.get((sleep, loop))
        if slept is None:
            slept = self._sleeps[sleep, loop] = asyncio.Event()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(thread_name_prefix="fastrt-queue")

            def run() -> None:
                try:
                    getattr(bound[1], sleep)(_LOOK_S)
                finally:
                    self._sleeps.pop((sleep, loop), None)
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(slept.set)

            self._threads.submit(run)
        return slept


def _rebuild(root: ObjectRef, keeper: ActorHandle, maxsize: int) -> Queue:
    made = Queue.__new__(Queue)
    made._root, made._keeper, made.maxsize, made._bound = root, keeper, maxsize, None
    return made


def _deadline(timeout: float | None) -> float:
    if timeout is None:
        return float("inf")
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds from 0 on, or None")
    return time.monotonic() + timeout
