"""A worker's view of a dense table: push gradients, pull values.

On the servers' machine a pull makes no copy: the array is the servers' memory, mapped read-only. It shows one version
for as long as the array exists. The parts of several servers are mapped side by side.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from fastrt._core.tables.versions import SLOTS, PinnedView, Span, Versions
from fastrt._core.transfer import stream
from fastrt.ps.client import Directory, Opened, Plan, Replies, Request, Session
from fastrt.ps.dense import layout, padded
from fastrt.ps.errors import TableTimeoutError
from fastrt.ps.handles import Background, Handle, is_finite, refuse_not_finite
from fastrt.ps.spec import Spec

Array = np.ndarray[Any, Any]
Floats = npt.NDArray[np.float32]
_PINNED_MAX = 2  # most versions of one server that one process may hold; further pulls are copies
_HELD_MAX = SLOTS - 4  # the same for all processes together: the server must always find a slot for the next version
_SPANS_MAX = 8


class Paced:
    """Base class of dense tables and embeddings: waits until a worker may see the table, and numbers its pushes.

    Args:
        session: the worker's connection.
        spec: definition of the table.
        background: runs asynchronous operations.
    """

    def __init__(self, session: Session, spec: Spec, background: Background) -> None:
        self.spec = spec
        self._session = session
        self._background = background
        self._clock = -1  # number of this worker's pushes, also of earlier processes with its rank
        self._unfinished: tuple[int, int] | None = None  # number and checksum of a push that failed, maybe at some only

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    def _open(self, timeout: float) -> dict[int, Opened]:
        opened = self._session.opened(self.spec.name, timeout)
        if self._clock < 0:
            self._clock = min(one.clock for one in opened.values())
        return opened

    def _limit(self, timeout: float | None) -> float:
        return self._session.timeout_s if timeout is None else timeout

    def _rate(self, lr: float | None) -> float | None:
        if lr is None:
            return None
        if not isinstance(lr, (int, float, np.floating)) or not math.isfinite(lr) or lr < 0:
            raise ValueError(f"the learning rate is {lr!r}; it must be a finite number from 0")
        return float(lr)

    def _may_see(self, opened: dict[int, Opened], timeout: float) -> dict[int, Opened]:
        """Wait until the mode allows this worker to see the table."""
        after, slowest = 0, 0
        if self.spec.mode == "sync":
            after = self._clock
        elif self.spec.mode == "ssp":
            slowest = max(0, self._clock - self.spec.staleness)
        late = {i for i, one in opened.items() if one.floor < after or one.slowest < slowest}
        if not late:
            return opened
        rank = self._session.rank

        def plan(directory: Directory) -> dict[int, Request]:
            meta = {"op": "wait", "table": self.name, "epoch": directory.epoch, "rank": rank, "timeout": timeout}
            meta |= {"after": after, "slowest": slowest}
            return {index: Request(meta) for index in sorted(set(directory.tables[self.name][1]))}

        self._session.note(self.name, self._session.exchange(plan, timeout))
        return self._open(timeout)

    def _give(self, arrays: Sequence[Array], plan_of: Callable[[int, bool], Plan], timeout: float) -> None:
        """Push under a number by which servers recognise a repeated push.

        After a failed push some servers may have it and others not. If the program repeats it, it gets the same number.
        In synchronous mode any next push gets that number, since each push is this worker's part of a step. In the
        other modes a different push is preceded by the failed one without a gradient, for the servers that do not have
        it, so that no server mistakes the different push for it.

        Args:
            arrays: the pushed data.
            plan_of: makes the plan for a number; its second argument asks for one without the gradient.
            timeout: in seconds.
        """
        failed = self._unfinished
        if failed is not None and self.spec.mode != "sync" and failed[1] != _checksum(arrays):
            self._pushed(self._session.exchange(plan_of(failed[0], True), timeout))
        number = self._session.next_number() if self._unfinished is None else self._unfinished[0]
        try:
            replies = self._session.exchange(plan_of(number, False), timeout)
        except BaseException:
            self._unfinished = number, _checksum(arrays)
            raise
        self._pushed(replies)

    def _pushed(self, replies: Replies) -> None:
        self._unfinished = None
        self._clock += 1
        self._session.note(self.name, replies)


class Table(Paced):
    """A dense table; made by `Cluster.table`.

    Attributes:
        spec: its definition.
    """

    def __init__(self, session: Session, spec: Spec, background: Background) -> None:
        super().__init__(session, spec, background)
        self._spans: OrderedDict[tuple[Any, ...], Span] = OrderedDict()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    @overload
    def push(
        self, grad: Floats, *, lr: float | None = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def push(
        self, grad: Floats, *, lr: float | None = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[None]: ...
    @overload
    def push(
        self, grad: Floats, *, lr: float | None = ..., timeout: float | None = ..., async_op: bool
    ) -> Handle[None] | None: ...
    def push(
        self, grad: Floats, *, lr: float | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Handle[None] | None:
        """Send a gradient to the servers; returns when it is in their logs.

        In synchronous mode the optimizer makes a step when all workers have pushed. A push also waits while this
        worker's previous push waits for other workers.

        Args:
            grad: float32 of the table's shape.
            lr: learning rate of this push; default: the optimizer's. In synchronous mode the rate of the lowest rank
                that gives one is used.
            timeout: seconds; default: the cluster's.
            async_op: return a handle at once; do not change the gradient before it is done.
        Returns:
            With `async_op` a `Handle`.
        Raises:
            TypeError: the gradient is not a float32 array.
            ValueError: it has another shape.
            NotFiniteError: it has NaN or infinity, and the table's policy is "raise".
            TableTimeoutError: other workers or a server did not come in time. Some servers may have this push: if it is
                repeated, only the others apply it. In synchronous mode the same holds for any next push.
        """
        given, rate = self._checked(grad, "gradient"), self._rate(lr)
        done: Handle[None] | None = self._background.run(async_op, self._push, given, rate, self._limit(timeout))
        return done

    @overload
    def pull(
        self, *, out: Floats | None = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Floats: ...
    @overload
    def pull(
        self, *, out: Floats | None = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Floats]: ...
    @overload
    def pull(
        self, *, out: Floats | None = ..., timeout: float | None = ..., async_op: bool
    ) -> Floats | Handle[Floats]: ...
    def pull(
        self, *, out: Floats | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Floats | Handle[Floats]:
        """Return the table's values.

        In synchronous mode this waits for the step of this worker's last push; in ssp, until no worker is too far
        behind. If several servers have parts, each server's parts are of one version; in synchronous mode all parts are
        of the same one.

        Args:
            out: array to copy into: float32, the table's shape, C-contiguous.
            timeout: seconds; default: the cluster's.
            async_op: return a handle at once.
        Returns:
            `out`, or a read-only array: on the servers' machine their memory without a copy (while up to two versions
            are held), else a copy.
        Raises:
            TypeError: `out` is not a float32 array.
            ValueError: `out` has another shape, or is not contiguous.
            TableTimeoutError: other workers or a server did not come in time.
        """
        if out is not None:
            self._checked(out, "array for the result")
            if not out.flags.c_contiguous or not out.flags.writeable:
                raise ValueError("the array for the result must be C-contiguous and writable")
        done: Floats | Handle[Floats] = self._background.run(async_op, self._pull, out, self._limit(timeout))
        return done

    @overload
    def push_pull(
        self, grad: Floats, *, out: Floats | None = ..., lr: float | None = ..., timeout: float | None = ...,
        async_op: Literal[False] = ...
    ) -> Floats: ...  # fmt: skip
    @overload
    def push_pull(
        self, grad: Floats, *, out: Floats | None = ..., lr: float | None = ..., timeout: float | None = ...,
        async_op: Literal[True]
    ) -> Handle[Floats]: ...  # fmt: skip
    @overload
    def push_pull(
        self, grad: Floats, *, out: Floats | None = ..., lr: float | None = ..., timeout: float | None = ...,
        async_op: bool
    ) -> Floats | Handle[Floats]: ...  # fmt: skip
    def push_pull(
        self, grad: Floats, *, out: Floats | None = None, lr: float | None = None, timeout: float | None = None,
        async_op: bool = False,
    ) -> Floats | Handle[Floats]:  # fmt: skip
        """Push, then pull. Arguments, results and errors are those of `push` and `pull`."""
        given, rate, limit = self._checked(grad, "gradient"), self._rate(lr), self._limit(timeout)
        if out is not None:
            self._checked(out, "array for the result")

        def both() -> Array:
            self._push(given, rate, limit)
            return self._pull(out, limit)

        done: Floats | Handle[Floats] = self._background.run(async_op, both)
        return done

    def _checked(self, array: Any, what: str) -> Array:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"table {self.name!r}: the {what} must be a NumPy array, not {type(array).__name__}")
        if array.dtype != np.float32:
            raise TypeError(f"table {self.name!r}: the {what} must be float32, not {array.dtype}")
        if array.shape != self.spec.shape:
            raise ValueError(f"table {self.name!r}: the {what} has shape {array.shape}, the table {self.spec.shape}")
        return array

    def _push(self, grad: Array, lr: float | None, timeout: float) -> None:
        session, flat = self._session, np.ascontiguousarray(grad).reshape(-1)
        dropped = False
        if self.spec.nan == "raise":
            refuse_not_finite(self.name, flat)
        elif self.spec.nan == "drop":
            dropped = not is_finite(flat)
        with session.lock:
            self._open(timeout)
            rank = session.rank

            def plan(directory: Directory, number: int, empty: bool) -> dict[int, Request]:
                owners = directory.tables[self.name][1]
                meta = {"op": "push", "table": self.name, "epoch": directory.epoch, "rank": rank, "seq": number}
                meta |= {"lr": lr, "timeout": timeout, "dropped": empty}
                return {
                    index: Request(meta, [] if empty else _pieces(flat, self.spec.cuts, _parts(owners, index)))
                    for index in sorted(set(owners))
                }

            self._give([flat], lambda number, empty: lambda where: plan(where, number, empty or dropped), timeout)

    def _pull(self, out: Array | None, timeout: float) -> Array:
        with self._session.lock:
            view: Array | None = None
            until = time.monotonic() + timeout
            while view is None:
                opened = self._may_see(self._open(timeout), timeout)
                if not all(isinstance(one.memory, Versions) for one in opened.values()):
                    view = self._fetched(timeout)
                    break
                view = self._mapped(opened)
                if view is None:
                    if time.monotonic() > until:
                        raise TableTimeoutError(f"table {self.name!r}: its parts were moving for {timeout:g} s")
                    self._session.refresh(self._session.directory.epoch, 1.0)
        if out is None:
            return view
        np.copyto(out, view)
        return out

    def _mapped(self, opened: dict[int, Opened]) -> Array | None:
        """Map the current version of each server, side by side; None if parts have moved."""
        held = False
        pins: dict[int, int] = {}
        owned: list[tuple[Versions, int, int]] = []
        for index, one in opened.items():
            assert isinstance(one.memory, Versions)
            held = held or one.memory.pinned(one.reader) >= _PINNED_MAX or one.memory.held() >= _HELD_MAX
            pins[index] = one.memory.pin(one.reader)[0]
            if pins[index] < 0:
                for memory, reader, slot in owned:
                    memory.unpin(reader, slot)
                return None
            owned.append((one.memory, one.reader, pins[index]))
        key = tuple((opened[index].serial, slot) for index, slot in pins.items())
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = self._span(opened, pins)
            if len(self._spans) > _SPANS_MAX:
                self._spans.popitem(last=False)
        self._spans.move_to_end(key)
        view = memoryview(PinnedView(span, owned))
        array: Array = np.frombuffer(view, np.float32)[: self.spec.elements].reshape(self.spec.shape)
        if held:
            array = array.copy()
            array.flags.writeable = False
        return array

    def _span(self, opened: dict[int, Opened], pins: dict[int, int]) -> Span:
        owners = self._session.directory.tables[self.name][1]
        places = {i: {part: at for part, _, _, at in layout(self.spec.cuts, one.parts)} for i, one in opened.items()}
        pieces: list[tuple[int, int, int]] = []
        for part, index in enumerate(owners):
            memory = opened[index].memory
            assert isinstance(memory, Versions)
            offset = memory.offset(pins[index]) + 4 * places[index][part]
            nbytes = 4 * padded(self.spec.cuts, [part])
            if pieces and pieces[-1][0] == memory.fd and pieces[-1][1] + pieces[-1][2] == offset:
                pieces[-1] = (memory.fd, pieces[-1][1], pieces[-1][2] + nbytes)
            else:
                pieces.append((memory.fd, offset, nbytes))
        return Span(pieces)

    def _fetched(self, timeout: float) -> Array:
        """Fetch the values from servers of other machines."""

        def plan(directory: Directory) -> dict[int, Request]:
            meta = {"op": "pull", "table": self.name, "epoch": directory.epoch}
            return {index: Request(meta) for index in sorted(set(directory.tables[self.name][1]))}

        replies = self._session.exchange(plan, timeout)
        owners = self._session.directory.tables[self.name][1]
        flat = np.empty(self.spec.elements, np.float32)
        for index, (_, data, _) in replies.items():
            values = np.frombuffer(data, np.float32)
            for _, begin, count, at in layout(self.spec.cuts, _parts(owners, index)):
                flat[begin : begin + count] = values[at : at + count]
        flat.flags.writeable = False
        return flat.reshape(self.spec.shape)


def _checksum(arrays: Sequence[Array]) -> int:
    check = 0
    for array in arrays:
        check = stream.crc32c(array.reshape(-1), check) if array.nbytes else check
    return check


def _parts(owners: list[int], index: int) -> list[int]:
    return [part for part, owner in enumerate(owners) if owner == index]


def _pieces(flat: Array, cuts: tuple[int, ...], parts: list[int]) -> list[Array]:
    """Collect a server's parts of a gradient, each padded with zeros to a full page; adjacent parts are one piece."""
    pieces, begin = [], -1
    for k, part in enumerate(parts):
        begin = cuts[part] if begin < 0 else begin
        if k + 1 < len(parts) and parts[k + 1] == part + 1:
            continue
        end = cuts[part + 1]
        pieces.append(flat[begin:end])
        filling = padded(cuts, [part]) - (end - cuts[part])
        if filling:
            pieces.append(np.zeros(filling, np.float32))
        begin = -1
    return pieces
