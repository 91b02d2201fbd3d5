"""The head's process: the one place that all nodes of a cluster connect to. `service` starts `main(SETTINGS)`.

A node is a member as long as its stream lasts. The head keeps no other state. So a head that is killed and restarted
has the full view as soon as the nodes have reconnected; meanwhile the nodes continue to work for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from fastrt.cluster.membership import JOIN, REPORT_BYTES_MAX, refused_report
from fastrt.cluster.views import Views
from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.net import supervise
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.streams import Access
from fastrt.versions import are_versions, disagreement, numpy_warning

_END_S = 2.0  # for streams to end in order
_LAST_VIEW_S = 1.0  # for a refused node to read the last view before the status


class Membership:
    """The head's service: passes reports to `Views`, and writes the views that are due to the nodes' streams.

    Args:
        own: the node that this head stands by on; empty: it is the first head of the cluster. A standby head is in
            charge only while its own node is a member, which joins it only while the first head cannot be reached. So
            the nodes of a cluster do not choose different heads, as long as they can reach the same ones.
        first: with `own`, the address of the first head, which nodes that were given this one's address learn.
    """

    def __init__(self, own: str = "", first: str = "") -> None:
        self._own = own
        self._own_stream = 0
        self._has_warned = False
        self._serving: dict[int, asyncio.Task[Any] | None] = {}
        self._views = Views(os.urandom(16).hex(), first)
        self._streams = 0
        self._contexts: dict[int, Any] = {}
        self._writing: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def join(self, reports: AsyncIterator[Any], context: Any) -> None:
        """Serve `Head.Join`: one stream per node. A node that sends an invalid report loses only its own stream."""
        self._streams += 1
        number = self._streams
        self._contexts[number] = context
        self._serving[number] = asyncio.current_task()
        is_first = True
        try:
            async for report in reports:
                if is_first and (why := self._other_versions(report)):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the head refuses {report.name}: {why}")
                is_first = False
                report.ClearField("versions")
                if not self._is_in_charge(number, report.node):
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this standby head is not in charge")
                refused = self._views.report(number, report)
                if refused is not None:
                    self._leave(number)
                    await self._last_view_sent(number)
                    code = grpc.StatusCode.ALREADY_EXISTS if refused.is_taken else grpc.StatusCode.INVALID_ARGUMENT
                    await context.abort(code, f"the head refuses a report: {refused.why}")
                self._plan()
        finally:
            self._leave(number)
            if number in self._writing:
                self._writing[number].cancel()

    def _other_versions(self, report: Any) -> str:
        """Return a table if a node's versions differ from this process's; warn once if only its NumPy does."""
        theirs = dict(report.versions)
        if refused_report(report) is not None:
            return ""  # for another reason
        if not are_versions(theirs):
            return "it reports invalid versions"
        why = disagreement(theirs, report.name, here="the head")
        if not why and not self._has_warned and (warning := numpy_warning(theirs, f"node {report.name}")):
            self._has_warned = True
            sys.stderr.write(f"fastrt: {warning}\n")
        return why

    def _leave(self, number: int) -> None:
        self._serving.pop(number, None)
        if self._contexts.pop(number, None) is not None:
            self._views.leave(number)
            self._plan()
        if number == self._own_stream:
            self._own_stream = 0
            for serving in self._serving.values():
                if serving is not None:
                    serving.cancel()

    def _is_in_charge(self, number: int, node: str) -> bool:
        """Return whether this head may take a report of a node: it always may unless it is a standby."""
        if self._own and node == self._own:
            self._own_stream = number
        return not self._own or bool(self._own_stream)

    async def _last_view_sent(self, number: int) -> None:
        """Wait until the view that is being written was sent: gRPC would never send a status that overtakes it."""
        if number in self._writing:
            await asyncio.wait([self._writing[number]], timeout=_LAST_VIEW_S)

    def _plan(self) -> None:
        """Call `_send` when the next view is due."""
        at = self._views.next_at()
        if at is None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._send)

    def _send(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for number, data in self._views.due(loop.time()):
            self._writing[number] = loop.create_task(self._write(number, data))
        self._plan()

    async def _write(self, number: int, data: bytes) -> None:
        try:
            with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the stream has just ended
                await self._contexts[number].write(data)
        finally:
            del self._writing[number]
            self._views.written(number)
            self._plan()


def main(argument: str) -> None:
    """Run the head.

    Args:
        argument: JSON: listen (address), identity, tls (certificate, key and client_ca, or null), insecure; own: the
            node, if this is its standby head, else empty; first: with `own`, the first head's address, else empty.
    """
    settings = read_object(argument, "the settings of the head", own=True, bytes_max=SETTINGS_BYTES_MAX)
    try:
        asyncio.run(_serve(settings["listen"], settings["own"], settings["first"], streams.access_of(settings)))
    except FastrtError as exc:
        sys.stderr.write(f"fastrt: the head cannot start: {exc}\n")
        sys.exit(1)


async def _serve(listen: str, own: str, first: str, access: Access) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    membership = Membership(own, first)
    handlers = {JOIN: membership.join}
    server, address = await streams.serve(listen, access, message_set("node"), handlers, stop, REPORT_BYTES_MAX)
    supervise.announce(address)
    streams.end_with_starter(stop)
    await stop.wait()
    await streams.stop_server(server, _END_S)
