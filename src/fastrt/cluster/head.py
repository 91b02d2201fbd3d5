"""The head's process: the one place that all nodes of a cluster connect to. `service` starts `main(SETTINGS)`."""

from __future__ import annotations

import asyncio
import signal
import sys

from fastrt.cluster.membership import JOIN, REPORT_BYTES_MAX, Membership
from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.streams import Access

_END_S = 2.0  # for streams to end in order


def main(argument: str) -> None:
    """Run the head.

    Args:
        argument: JSON: listen (address), token_file, tls (certificate, key and client_ca, or null), insecure.
    """
    settings = read_object(argument, "the settings of the head", own=True, bytes_max=SETTINGS_BYTES_MAX)
    try:
        asyncio.run(_serve(settings["listen"], streams.access_of(settings)))
    except FastrtError as exc:
        sys.stderr.write(f"fastrt: the head cannot start: {exc}\n")
        sys.exit(1)


async def _serve(listen: str, access: Access) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    membership = Membership()
    handlers = {JOIN: membership.join}
    server, address = await streams.serve(listen, access, message_set("node"), handlers, stop, REPORT_BYTES_MAX)
    streams.announce(address)
    streams.end_with_starter(stop)
    await stop.wait()
    await server.stop(_END_S)
