"""Changes the number of servers, in the membership and in the tables, on a call of the program or an HTTP request.

The membership's rounds only change members. To let `POST /scaleout` and `/scalein` change the tables too, the head gets
these requests before the membership does. Servers that are to leave first give their parts to others; new servers get
parts once they have joined. A request is answered when its work has begun, as by the membership, and one is carried out
at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastrt.errors import ConfigError, FastrtError
from fastrt.membership import events as ev
from fastrt.membership.events import MemberView, Phase, Role
from fastrt.ps.errors import ServerLostError, TableTimeoutError

if TYPE_CHECKING:
    from fastrt.ps.head import Head

_log = logging.getLogger(__name__)
SERVERS_MAX = 256
_REQUEST_S = 60.0  # time for the membership to carry out an HTTP request
_LOOK_S = 0.02
_NAME = "server-"


def member_id(index: int) -> str:
    """A server's id in the membership."""
    return f"{_NAME}{index}"


class Scaling:
    """Scales a cluster for its head.

    Args:
        head: the head that this belongs to.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._work: threading.Thread | None = None  # carries out the last HTTP request
        self._kind = Phase.SCALE_OUT
        self._beginning = threading.Lock()

    def close(self) -> None:
        """Wait for the request that is being carried out; the head has failed by now, so it ends soon."""
        with self._beginning:
            if self._work is not None:
                self._work.join()

    def scale(self, servers: int, timeout_s: float) -> None:
        """Change the number of servers.

        Raises:
            ConfigError: the number is out of range.
            FastrtError: the cluster is not ready, or a server does not answer; no part has moved then.
        """
        if not 1 <= servers <= SERVERS_MAX:
            raise ConfigError(f"cannot scale to {servers} servers: there can be 1 to {SERVERS_MAX}")
        with self._head.lock:
            there = sorted(self._head.servers)
            if servers != len(there):
                self._wait_ready(len(there), timeout_s)
            if servers > len(there):
                self._grow(servers - len(there), timeout_s)
            elif servers < len(there):
                first = {one.member_id for one in self._members() if one.rank == 0}
                may_leave = [index for index in reversed(there) if member_id(index) not in first]
                self._shrink(may_leave[: len(there) - servers], timeout_s)

    def manage(self, make: Callable[[int], ev.Event]) -> Any:
        """Handle a request of the HTTP endpoints, in place of `ClusterScheduler.ask`: scaling includes the tables.

        Args:
            make: makes the event from the call's number.
        Raises:
            Refused: the request is rejected.
        """
        event = make(0)
        if isinstance(event, ev.ScaleOut):
            return self._begin(Phase.SCALE_OUT, self._growth(event))
        if isinstance(event, ev.ScaleIn):
            return self._begin(Phase.SCALE_IN, self._shrinkage(event))
        if isinstance(event, ev.Instruct):
            return self._instructed(event)
        answer = self._head.scheduler.ask(make)
        if isinstance(event, ev.View) and self._is_busy() and answer.phase is Phase.READY:
            return answer._replace(phase=self._kind)  # the tables have not moved yet
        return answer

    def _instructed(self, event: ev.Instruct) -> dict[int, str]:
        """Statistics of the servers by rank. Other instructions are for federated learning, which these servers lack.

        Raises:
            Refused: it is an instruction for federated learning.
        """
        if event.instruction is not ev.Instruction.QUERY_INSTANCE:
            raise ev.Refused("These servers hold parameter tables; they have no federated-learning instances.")
        with self._head.lock:  # no server may end meanwhile
            indexes = {member_id(index): index for index in self._head.servers}
            there = [one for one in self._members() if one.alive and one.member_id in indexes]
            return {one.rank: json.dumps(self._head.ask(indexes[one.member_id], {"op": "stats"})) for one in there}

    def _growth(self, event: ev.ScaleOut) -> Callable[[], None]:
        if event.workers:
            raise ev.Refused("The number of workers is fixed when the cluster is started, and cannot be scaled.")
        if not 1 <= event.servers <= SERVERS_MAX - len(self._head.servers):
            raise ev.Refused(f"cannot scale out by {event.servers} servers; there can be 1 to {SERVERS_MAX}.")
        return lambda: self._grow(event.servers, _REQUEST_S)

    def _shrinkage(self, event: ev.ScaleIn) -> Callable[[], None]:
        known = {one.member_id: one for one in self._members()}
        indexes = {member_id(index): index for index in self._head.servers}
        if not event.member_ids:
            raise ev.Refused("The node ids are empty; name the servers that are to leave.")
        for name in event.member_ids:
            if name not in indexes or name not in known:
                raise ev.Refused(f"The node id:{name} is illegal. No server has it.")
            if known[name].rank == 0:
                raise ev.Refused(f"The node id:{name} is illegal. SERVER 0 leads, and cannot leave.")
        leaving = sorted({indexes[name] for name in event.member_ids})
        return lambda: self._shrink(leaving, _REQUEST_S)

    def _begin(self, kind: Phase, work: Callable[[], None]) -> None:
        with self._beginning:
            phase = self._head.scheduler.overview().phase
            if phase is not Phase.READY or self._is_busy():
                now = self._kind.name if phase is Phase.READY else phase.name
                raise ev.Refused(f"The cluster is not ready. It is {now}; wait until it is READY.")
            self._kind = kind
            self._work = threading.Thread(target=self._run, args=(work,), name="fastrt-ps-scaling", daemon=True)
            self._work.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with self._head.lock:
                self._wait_ready(len(self._head.servers), _REQUEST_S)
                work()
        except FastrtError as error:
            _log.warning("the cluster could not be scaled: %s", str(error))

    def _is_busy(self) -> bool:
        return self._work is not None and self._work.is_alive()

    def _grow(self, count: int, timeout_s: float) -> None:
        head = self._head
        added = [k for k in range(SERVERS_MAX) if k not in head.servers][:count]
        self._ask(lambda call: ev.ScaleOut(call, 0, count), timeout_s)
        try:
            head.add(added)
            self._wait_ready(len(head.servers), timeout_s)
        except BaseException:
            self._take_back(added)
            head.drop([index for index in added if index in head.servers])
            raise
        head.move_to(sorted(head.servers))

    def _shrink(self, leaving: Sequence[int], timeout_s: float) -> None:
        head = self._head
        head.move_to([index for index in sorted(head.servers) if index not in leaving])
        self._ask(lambda call: ev.ScaleIn(call, [member_id(index) for index in leaving]), timeout_s)
        try:
            self._wait_ready(len(head.servers) - len(leaving), timeout_s)
        except BaseException:
            self._take_back(())
            raise
        head.drop(leaving)

    def _ask(self, make: Callable[[int], ev.Event], timeout_s: float) -> None:
        """Ask the membership to scale; if a server has just been lost, wait first until it is back."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._head.scheduler.ask(make)
                return
            except ev.NotReady:
                self._wait_ready(len(self._head.servers), until - time.monotonic())

    def _take_back(self, added: Sequence[int]) -> None:
        """Undo a round of the membership, so that it can scale again without waiting for the round's timeout."""
        scheduler = self._head.scheduler
        try:
            scheduler.ask(ev.TakeBack)
        except ev.Refused:  # the round has ended meanwhile: another round removes the servers that it added
            came = [one.member_id for one in self._members() if one.member_id in map(member_id, added)]
            if came:
                with contextlib.suppress(ev.Refused):  # a member is lost, so the cluster waits for members anyway
                    scheduler.ask(lambda call: ev.ScaleIn(call, came))

    def _members(self) -> list[MemberView]:
        return [one for one in self._head.scheduler.overview().members if one.role is Role.SERVER]

    def _wait_ready(self, servers: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            overview = self._head.scheduler.overview()
            there = [view for view in overview.members if view.role is Role.SERVER and view.alive]
            if overview.phase is Phase.READY and len(there) == servers:
                return
            if self._head.failed is not None:
                raise ServerLostError(self._head.failed)
            if time.monotonic() > until:
                workers = [view for view in overview.members if view.role is Role.WORKER and view.alive]
                raise TableTimeoutError(
                    f"the cluster is {overview.phase.name} and not READY: it has {len(there)} of {servers} servers, "
                    f"and {len(workers)} of {self._head.options.num_workers} workers have joined"
                )
            pause.wait(_LOOK_S)
