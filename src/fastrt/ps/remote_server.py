"""Servers on other nodes of a fastrt cluster: a keeper actor runs the server's process there and reports to the head.

The keeper holds one connection to the head. Over it the keeper receives the server's settings, and reports the address
of each process that it starts. The server's log is in the keeper's memory or in a folder. When the connection ends, for
any reason, the server ends. If the head did not end it, another keeper continues the server from its folder, which only
one process at a time can use. Without a folder the cluster is given up, because the state is lost with the node. A
restarted server accepts no push until the head allows it, because parts may be moving.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fastrt.errors import ConfigError, FastrtError, NotInitializedError
from fastrt.net.grpc.trust import trust_of
from fastrt.net.supervise import RestartLimit
from fastrt.ps.endpoint import Caller
from fastrt.ps.remote_errors import raise_refusal
from fastrt.ps.server_process import END_S, ServerProcess
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, dial
from fastrt.store import client as store_client
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import kill
from fastrt.tasks.placement_group import PlacementGroup, PlacementGroupSchedulingStrategy

_log = logging.getLogger(__name__)
_DIAL_S = 20.0
_LOSSES_MAX, _LOSSES_S = 3, 60.0
_LOOK_S = 0.05


class Keeper:
    """The keeper actor. It has no state: `keep` runs for as long as the server is needed."""

    def keep(self, address: str, token: str, index: int, insecure: bool = False) -> None:
        """Run a server until the head's connection ends.

        Args:
            address: the head's address.
            token: the cluster's.
            index: the server's index.
            insecure: whether the cluster was started without encryption.
        Raises:
            FastrtError: the head refuses, or the server does not start.
        """
        with contextlib.closing(dial(None, address, trust_of(token, insecure), _DIAL_S)) as wire:
            raise_refusal(wire.call({"version": VERSION, "client": 0}, timeout_s=_DIAL_S)[0])
            answer = _report(wire, {"index": index, "what": "keep"})
            settings = answer["settings"]
            settings["host"] = wire.local_host
            begun, turn = threading.Event(), threading.Lock()
            if answer["again"]:
                begun.set()

            def report(what: str, **more: Any) -> None:
                with turn, contextlib.suppress(BrokenWireError):
                    _report(wire, {"index": index, "what": what, **more})

            def serves(server: ServerProcess) -> None:
                begun.set()
                report("serves", address=server.address, unix=server.unix, pid=server.pid)

            server = ServerProcess(settings, serves, begun.is_set, lambda why: report("lost", why=why))
            try:
                server.wait_until_up(settings["start_timeout_s"])
                serves(server)
                wire.wait_closed()
            finally:
                server.end()
                server.wait()


def _report(wire: Wire, meta: Meta) -> Meta:
    answer: Meta = wire.call({"op": "keeper", **meta})[0]
    raise_refusal(answer)
    return answer


class DistantServer:
    """The head's handle of a server that an actor keeps on another node; has the interface of `ServerProcess`.

    Args:
        settings: those of `server_main.main`, and `home`, the head's address.
        restarted: called when a new process has replaced a dead one.
        frozen: not called: the head allows pushes to each new process.
        lost: called with the reason when the server is lost for good.
        scheduling: placement of the actor, as for `fastrt.remote`.

    Attributes:
        address: the server's address.
        unix: the name of its Unix socket, on its node.
        pid: id of its present process, on its node.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        restarted: Callable[[Any], None],
        frozen: Callable[[], bool],
        lost: Callable[[str], None],
        scheduling: Any,
    ) -> None:
        self.address = ""
        self.unix: str | None = None
        self.pid = 0
        self._settings = settings
        self._restarted, self._lost = restarted, lost
        self._caller: Caller | None = None
        self._ending, self._up, self._back = threading.Event(), threading.Event(), threading.Event()
        self._actors = ActorClass(Keeper, scheduling=scheduling)
        self._restarts = RestartLimit(_LOSSES_MAX, _LOSSES_S)
        self._successor: threading.Thread | None = None
        self._keep()

    def _keep(self) -> None:
        """Start a keeper actor."""
        self._actor = self._actors.remote()
        home = [self._settings[name] for name in ("home", "token", "index", "insecure")]
        self._kept = self._actor.keep.remote(*home)

    def hear(self, caller: Caller, meta: Meta) -> Meta:
        """Handle a message of the keeper and return the answer.

        Raises:
            FastrtError: another keeper has the server, or the server is to end.
        """
        what = meta.get("what")
        if what == "keep" and self._caller is None and not self._ending.is_set():
            self._caller = caller
            return {"settings": self._settings, "again": self._up.is_set()}
        if caller is not self._caller:
            raise FastrtError(f"server {self._settings['index']} has another keeper, or is to end")
        if what == "serves":
            self.address, self.unix, self.pid = str(meta["address"]), str(meta["unix"]), int(meta["pid"])
            self._settings |= {"accept_loss": False, "expected": True}  # `accept_loss` is for damage of the first start
            if self._up.is_set():
                self._restarted(self)
            self._up.set()
            self._back.set()
        elif what == "lost":
            self._fail(str(meta["why"]))
        else:
            raise ValueError(f"unknown keeper message {what!r}")
        return {}

    def gone(self, caller: Caller) -> None:
        """Handle the end of a connection: start another keeper if it was the keeper's, or give the server up."""
        if caller is not self._caller or self._ending.is_set():
            return
        why = f"server {self._settings['index']} is lost, with the actor that kept it or its node"
        may_restart = self._restarts.allows_another()
        if self._settings["folder"] is None or not self._up.is_set() or not may_restart:
            self._fail(why)
            return
        _log.warning("%s; another actor continues from its folder", why)
        self._caller = None
        self._back.clear()
        self._successor = threading.Thread(target=self._keep_again, args=(why,), name="fastrt-ps-keep", daemon=True)
        self._successor.start()

    def _keep_again(self, why: str) -> None:
        """Start another keeper; runs in a thread."""
        try:
            with contextlib.suppress(FastrtError):
                kill(self._actor)  # it may live on without its connection
            self._keep()
            self._wait_for(self._back, self._settings["start_timeout_s"])
        except (FastrtError, TimeoutError) as error:
            self._fail(f"{why}, and could not be restarted: {error}")

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the server accepts requests.

        Raises:
            FastrtError: it does not in this time, or the actor has failed; then its error.
        """
        self._wait_for(self._up, timeout_s)

    def _wait_for(self, event: threading.Event, timeout_s: float) -> None:
        for _ in range(max(1, int(timeout_s / _LOOK_S))):
            if event.wait(_LOOK_S) or self._ending.is_set():
                return
            if store_client.wait([self._kept], timeout=0)[0]:
                store_client.get(self._kept)
                break
        raise FastrtError(
            f"server {self._settings['index']} did not start in time: does any node have resources for its keeper "
            "actor, and can that node reach the head's address?"
        )

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt to reach the server, but not longer than until `end`."""
        self._ending.wait(seconds)

    def end(self) -> None:
        """Ask the server to end."""
        self._ending.set()
        if self._caller is not None:
            self._caller.wire.close()

    def wait(self) -> None:
        """Wait until the server has ended; see `end`."""
        if self._successor is not None:
            self._successor.join()
        with contextlib.suppress(FastrtError, TimeoutError):  # the session or the actor may have ended already
            if self._caller is not None:
                store_client.wait([self._kept], timeout=END_S)
            kill(self._actor)

    def _fail(self, why: str) -> None:
        if not self._ending.is_set():
            self._lost(why)


def make_distant(scheduling: Any, placement_group: PlacementGroup | None) -> Callable[..., DistantServer]:
    """Return the function with which `Head` starts servers on other nodes.

    Args:
        scheduling: see `start`.
        placement_group: see `start`.
    Raises:
        ConfigError: both are given, or one is invalid.
        NotInitializedError: this process has not joined a fastrt session.
    """
    if placement_group is not None:
        if scheduling is not None or not isinstance(placement_group, PlacementGroup):
            raise ConfigError("give either scheduling= or placement_group=, and for the latter a PlacementGroup")
        count = placement_group.bundle_count
        choices: Sequence[Any] = [PlacementGroupSchedulingStrategy(placement_group, k) for k in range(count)]
    else:
        choices = scheduling if isinstance(scheduling, (list, tuple)) else [scheduling]
    if store_client.current() is None:
        raise NotInitializedError(
            "scheduling= and placement_group= place servers on nodes of a fastrt cluster: call "
            "fastrt.init(address=...) first"
        )
    try:
        for choice in choices:
            ActorClass(Keeper, scheduling=choice)
        if not choices or None in choices:
            raise ValueError("it must name at least one node, and no None")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot place servers with {scheduling!r}: {error}") from None

    def make(settings: dict[str, Any], restarted: Any, frozen: Any, lost: Any) -> DistantServer:
        return DistantServer(settings, restarted, frozen, lost, choices[settings["index"] % len(choices)])

    return make
