"""Registers this node at an early-Ray scheduler: its store, and exported functions, for callers in any language.

`node_service` starts `main(SETTINGS)` on each node that has the address of a scheduler. To the node it is a driver: a
call from the scheduler becomes a task of `fastrt.remote`, which runs here or is forwarded to another node. To the
scheduler it is one store, and as many workers as the node has, or more if calls are brief. When it dies, its calls run
again on other nodes, and another bridge replaces it; when the scheduler has forgotten it, it restarts and registers
again.

Calls and their reports go over a link (`SchedulerLink`) where the scheduler is fastrt's, and to the ports otherwise. A
call whose arguments are values is submitted on the thread that received it, and reported on the thread that waits for
all results: none of the bridge's threads waits for a single call. Only a call with references among its arguments
occupies one until these have arrived.

A worker gets its next call only after its report of the last one has been to the scheduler. With two workers, a batch
of the link has one call, and its cost is that of a call. So a node whose workers end many calls a second registers more
of them: their calls wait in the node's queue, and go in larger batches.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fastrt.config import Config
from fastrt.errors import FastrtError, TaskError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.net import supervise
from fastrt.net.address import join_address, reachable, split_address
from fastrt.net.grpc import streams
from fastrt.net.grpc.auth import refused_token
from fastrt.net.grpc.contract import Metadata
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.server import open_server
from fastrt.net.grpc.streams import Access
from fastrt.objstore.service import ObjStoreServer
from fastrt.runtime.session import Attached
from fastrt.scheduler.client import SchedulerClient, SchedulerError, SchedulerLink
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.store.waiter import when_ready
from fastrt.tasks.remote import RemoteFunction
from fastrt.transfer import obj
from fastrt.transfer.table import DuplicateError

_log = logging.getLogger(__name__)
_INVOKE = "/WorkerService/InvokeCall"
_REQUEST = message_set("ray").message("InvokeCallRequest")
_MESSAGE_BYTES_MAX = 8 << 20
_ARGUMENT_S = 300.0  # how long the transfer of an argument may take
_POLL_S = 1.0  # between two calls that check whether the scheduler answers
_WORKERS_MAX = 64
# A node registers this many workers once each of its own ends so many calls a second. 2 and 16 workers, 100 calls in
# flight: 1.1 and 0.2 batches a call, processor ms in scheduler and bridge 1.5 and 1.0 (bench/compare_seed.py).
BRIEF_WORKERS = 16
_BRIEF_CALLS_PER_S = 50.0


def exported(modules: list[str]) -> dict[str, RemoteFunction]:
    """The remote functions of these modules, by "module.name".

    Raises:
        FastrtError: a module cannot be imported, or has no remote functions.
    """
    found: dict[str, RemoteFunction] = {}
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as exc:
            raise FastrtError(f"--export {name}: {exc}") from exc
        functions = {f"{name}.{key}": one for key, one in vars(module).items() if isinstance(one, RemoteFunction)}
        if not functions:
            raise FastrtError(f"--export {name}: no function there is decorated by fastrt.remote")
        found |= functions
    return found


class _Slot:
    """One worker, to the scheduler: it has a port, and runs at most one call at a time."""

    def __init__(self, bridge: Bridge, host: str, access: Access, scheduler: str) -> None:
        self._bridge = bridge
        self._token = access.bearer
        self.number = -1
        self._server = open_server(self, [_INVOKE], None, _MESSAGE_BYTES_MAX, self._authorize)
        served = access.tls or access.identity.for_programs()
        port = self._server.bind(join_address(host, 0), served.server_credentials())
        self.address = reachable(join_address(host, port), scheduler)
        self._server.start()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Take a call, and begin to run it."""
        try:
            request = _REQUEST.FromString(body)
        except DecodeError:
            words = f"the request's {len(body)} bytes are no valid InvokeCallRequest"
            self._server.finish(call, grpc.StatusCode.INVALID_ARGUMENT.value[0], words)
            return
        self._server.finish(call)
        self._bridge.begin(self, request.call)

    def on_cancel(self, call: int) -> None:
        """Ignore a cancellation: calls are answered at once."""

    def on_idle(self) -> float | None:
        """Return None: no call waits for a time."""
        return None

    def on_stop(self) -> None:
        """Do nothing: no call is open."""

    def stop(self) -> None:
        """Stop taking calls."""
        self._server.stop()

    def _authorize(self, method: str, metadata: Metadata) -> str | None:
        return None if self._token is None else refused_token(metadata, self._token)


class Bridge:
    """The bridge between a node and a scheduler, a context manager; `address` is where its object store serves.

    Args:
        store: this process's attachment to the node, as a driver.
        settings: as for `main`.

    Raises:
        FastrtError: a module to export has no functions, or it cannot serve.
        OSError: it cannot listen.
    """

    def __init__(self, store: Store, settings: dict[str, Any]) -> None:
        self._store = store
        self._functions = exported(settings["export"])
        access = streams.access_of(settings)
        credentials = access.tls.channel_credentials() if access.tls else None
        identity = None if access.tls else access.identity.for_programs()
        self._stack = stack = ExitStack()
        self._ended = threading.Event()
        self._store_number = -1
        self._reports = 0  # of calls; an estimate, because several threads count
        self._settings, self._access = settings, access
        self._slots_lock = threading.Lock()  # guards the end against slots that are being added
        try:
            client = SchedulerClient(settings["scheduler"], access.bearer, credentials, identity=identity)
            self._scheduler = stack.enter_context(client)
            self._link = SchedulerLink(
                settings["scheduler"], self._on_orders, access.bearer, credentials, identity, settings["local_socket"]
            )
            stack.callback(self._link.close)
            self._server = ObjStoreServer(
                store,
                token=access.bearer,
                identity=identity,
                address=settings["listen"],
                tls=access.tls,
                insecure=access.insecure,
                on_ready=lambda objref: self._scheduler.ready(objref, self._store_number),
            )
            stack.callback(self._server.stop)
            self._server.start()
            self.address = reachable(self._server.address, settings["scheduler"])
            self._slots: list[_Slot] = []
            self._by_address: dict[str, _Slot] = {}
            self._own_workers = min(max(1, settings["workers"]), _WORKERS_MAX)
            self._open_slots(self._own_workers)
            self._pool = ThreadPoolExecutor(max(self._own_workers, BRIEF_WORKERS), "fastrt-bridge")
        except BaseException:
            stack.close()
            raise
        self._thread = threading.Thread(target=self._stay_registered, name="fastrt-register", daemon=True)
        self._thread.start()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        with self._slots_lock:
            self._stack.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- registration ----

    def _stay_registered(self) -> None:
        """Register, then check after each outage of the scheduler whether it still knows this bridge."""
        known = away = False
        while not self._ended.is_set():
            before, since = self._reports, time.monotonic()
            try:
                is_new = self._link.attach([self.address, *self._by_address])
                if not known:
                    self._register()
                    known = True
                elif away or is_new:  # or it was away for so short a time that no call has failed
                    if not self._is_known():
                        _log.warning("the scheduler has forgotten this node; the bridge restarts to register again")
                        os.kill(os.getpid(), signal.SIGTERM)
                        return
                else:
                    self._scheduler.call("IncrementRefCount")  # of no reference: only to check that it answers
                away = False
            except SchedulerError as exc:
                if not away:
                    _log.warning("the scheduler does not answer: %s", exc)
                away = True
            self._ended.wait(_POLL_S)
            if known and not away:
                self._add_workers((self._reports - before) / (time.monotonic() - since))

    def _add_workers(self, calls_per_s: float) -> None:
        """Register more workers if calls are brief. They stay: a call that one of them has cannot be taken back."""
        with self._slots_lock:
            count = BRIEF_WORKERS - len(self._slots)
            if self._ended.is_set() or count <= 0 or calls_per_s < _BRIEF_CALLS_PER_S * self._own_workers:
                return
            try:
                added = self._open_slots(count)
            except OSError as exc:  # no port or descriptor is left
                _log.warning("more workers cannot be served: %s", exc)
                return
        try:
            self._link.attach([self.address, *self._by_address])
            for slot in added:
                self._register_slot(slot)
        except SchedulerError as exc:
            _log.warning("more workers could not be registered: %s", exc)

    def _open_slots(self, count: int) -> list[_Slot]:
        """Open the ports of some more workers."""
        scheduler = self._settings["scheduler"]
        host = split_address(self._settings["listen"], 0)[0]
        opened = []
        for _ in range(count):
            slot = _Slot(self, host, self._access, scheduler)
            self._stack.callback(slot.stop)
            opened.append(slot)
        self._slots += opened
        self._by_address |= {slot.address: slot for slot in opened}
        return opened

    def _register(self) -> None:
        self._store_number = self._scheduler.register_store(self.address)
        for slot in self._slots:
            self._register_slot(slot)

    def _register_slot(self, slot: _Slot) -> None:
        slot.number = self._scheduler.register_worker(slot.address, self.address)
        for name, function in self._functions.items():
            self._scheduler.register_function(slot.number, name, function._settings.returns)

    def _is_known(self) -> bool:
        info = self._scheduler.info()
        there = set(info.avail_worker)
        for entry in info.function_table.values():
            there.update(entry.workerid)
        return any(slot.number in there for slot in self._slots)

    # ---- calls ----

    def _on_orders(self, stream: int, orders: Sequence[Any]) -> None:
        """Carry out calls of the scheduler to ports of this bridge, in order."""
        for order in orders:
            answer = partial(self._link.answer, stream, order.number)
            slot = self._by_address.get(order.address)
            try:
                if slot is None:
                    self._server.handle(order.path, order.body, answer)
                else:
                    call = _REQUEST.FromString(order.body).call
                    answer()  # it goes with the call's results, if these are there soon
                    self.begin(slot, call)
            except Exception:  # the next ones are not this one's
                _log.exception("%s of the scheduler failed here", order.path)

    def begin(self, slot: _Slot, call: Any) -> None:
        """Submit a call as a task; on a thread of the pool if it has to wait for its arguments."""
        run = _Run(slot, call)
        if any(not value.HasField("obj") for value in call.arg):
            self._pool.submit(self._submit, run, True)
            return
        try:
            self._submit(run, False)
        except _MustWaitError:
            self._pool.submit(self._submit, run, True)

    def _submit(self, run: _Run, may_wait: bool) -> None:
        """Submit a call as a task; an exception becomes its result. It is reported when all results are there."""
        run.used = list(run.call.result)
        try:
            results = self._results(run, may_wait)
        except _MustWaitError:
            raise
        except SchedulerError as exc:
            self._lost(run.call, exc)
            return
        except Exception as exc:  # of the function or of its arguments
            failed = serialize(TaskError.wrap(exc, task_name=run.call.name))
            results = [self._store.put_serialized(failed, error=True) for _ in run.call.result]
        run.results = results
        run.left = len(results)
        for ref in results:
            when_ready(self._store, ref, partial(self._ready, run))
        if not results:
            self._report(run)

    def _ready(self, run: _Run, ref: ObjectRef, error: BaseException | None) -> None:
        """Count one more result that is there; on the thread that waits for them, which must not block."""
        run.left -= 1
        if not run.left and error is None:
            self._report(run)

    def _report(self, run: _Run) -> None:
        """Report a call's results, then that its worker is free."""
        call, link = run.call, self._link
        self._reports += 1
        for objref, ref in zip(call.result, run.results, strict=True):
            try:
                self._server.table.add(objref, ref)
            except DuplicateError:
                _log.info("call %s ran here before", call.name)
            link.call("ObjReady", objref=objref, objstoreid=self._store_number)
        link.call("DecrementRefCount", objref=run.used)
        link.call("WorkerReady", partial(self._reported, call), workerid=run.slot.number)
        link.send()

    def _reported(self, call: Any, error: SchedulerError | None) -> None:
        if error is not None:
            self._lost(call, error)

    def _lost(self, call: Any, error: SchedulerError) -> None:
        """Restart: the scheduler runs the call again elsewhere, or has forgotten this bridge."""
        if not self._ended.is_set():
            _log.warning("a call of %s cannot be reported, so this bridge restarts: %s", call.name, error)
            os.kill(os.getpid(), signal.SIGTERM)

    def _results(self, run: _Run, may_wait: bool) -> list[ObjectRef]:
        call, used = run.call, run.used
        function = self._functions.get(call.name)
        if function is None:
            raise FastrtError(f"this node exports no function {call.name!r}; it has {sorted(self._functions)}")

        def find(objref: int) -> ObjectRef:
            if not may_wait:
                raise _MustWaitError
            used.append(objref)
            self._scheduler.request(run.slot.number, objref)
            return self._server.table.expect(objref).result(_ARGUMENT_S)

        args: list[Any] = []
        for value in call.arg:
            if value.HasField("obj"):
                args.append(obj.from_obj(value.obj, True, find))  # the caller is part of the cluster
            else:
                used.append(value.ref)
                args.append(self._server.table.expect(value.ref).result(_ARGUMENT_S))
        found: Any = function.remote(*args)  # a list where it has several results
        results = found if isinstance(found, list) else [] if found is None else [found]
        if len(results) != len(call.result):
            raise FastrtError(f"{call.name!r} has {len(results)} results here; the caller expects {len(call.result)}")
        return results


class _MustWaitError(Exception):
    """An argument contains a reference, whose object has to arrive first."""


class _Run:
    """A call that was accepted.

    Attributes:
        slot: the worker that the scheduler has given it to.
        call: its message.
        used: references that the message has counted, dropped after the call.
        results: of its task, in order.
        left: how many of them are not there yet.
    """

    __slots__ = ("call", "left", "results", "slot", "used")

    def __init__(self, slot: _Slot, call: Any) -> None:
        self.slot, self.call = slot, call
        self.used: list[int] = []
        self.results: list[ObjectRef] = []
        self.left = 0


def main(argument: str) -> None:
    """Serve until standard input ends, or SIGTERM arrives.

    Args:
        argument: JSON: socket (of the node's daemon), scheduler and listen (addresses), local_socket (of a scheduler
            of this node, or null), workers, export (modules), identity, tls, insecure.
    """
    settings = read_object(argument, "the settings of the bridge", own=True, bytes_max=SETTINGS_BYTES_MAX)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: sys.exit(0))
    try:
        config = Config.load(num_workers=1, object_store_memory=64 << 20)
        runtime = Attached(config, settings["socket"], settings["workers"])
        store_client.set_store(runtime._store)
        assert runtime._store is not None
        supervise.fail_with_threads("bridge")
        with Bridge(runtime._store, settings) as bridge:
            supervise.announce(bridge.address)
            supervise.wait_for_starter()
    except (FastrtError, OSError) as exc:
        sys.stderr.write(f"fastrt: the node cannot serve at the scheduler: {exc}\n")
        sys.exit(1)
