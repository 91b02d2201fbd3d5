"""Entry point of a parameter server's process. The head starts it with its settings, and it ends with the head.

Once it listens, it writes one line of JSON with its addresses. It reads its earlier state from the journal, so a
process that replaces a killed one continues with everything that was acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.net.address import with_port
from fastrt.net.grpc.trust import Trust
from fastrt.ps.endpoint import Endpoint
from fastrt.ps.journal import FolderMedium, Journal, Medium, MemoryMedium
from fastrt.ps.server import Server

_log = logging.getLogger(__name__)


def main() -> None:
    """Serve with the settings in a line of standard input, until standard input or the head's process ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C at a terminal
    settings = read_object(sys.stdin.readline(), "the settings", bytes_max=SETTINGS_BYTES_MAX, own=True)
    watched = os.pidfd_open(settings["head"])  # a forked child of the head may keep standard input open
    trust = Trust(settings["token"], settings["insecure"], bytes.fromhex(settings["key"]))
    try:
        server = Server(settings["index"], secrets.token_hex(8), _journal(settings), trust, settings["frozen"])
    except FastrtError as error:
        _log.critical("server %s cannot start: %s", settings["index"], error)
        os.write(1, json.dumps({"failed": str(error)}).encode() + b"\n")
        sys.exit(1)
    endpoint = _listen(server, trust, settings)
    os.write(1, json.dumps({"address": endpoint.address, "unix": endpoint.unix}).encode() + b"\n")
    leave = _join(settings)  # its imports take longer than all before; clients of a restarted server need not wait
    select.select([sys.stdin, watched], [], [])
    leave()
    endpoint.close()
    server.journal.close()


def _journal(settings: dict[str, Any]) -> Journal:
    medium: Medium | None = None
    if settings["folder"] is not None:
        medium = FolderMedium(Path(settings["folder"]))
    elif settings["fds"]:
        medium = MemoryMedium(settings["fds"])
    return Journal(medium, settings["durability"] == "power", settings["accept_loss"], settings["expected"])


def _listen(server: Server, trust: Trust, settings: dict[str, Any]) -> Endpoint:
    """Listen at the addresses of the previous process, or at a free port if another process took them."""
    places = [settings["address"], with_port(settings["address"], 0)]
    for address in places[:-1]:
        with contextlib.suppress(OSError):
            return Endpoint(server, trust, address, settings["unix"])
    return Endpoint(server, trust, places[-1])


def _join(settings: dict[str, Any]) -> Callable[[], None]:
    """Become a member of the cluster, and return the function that leaves it.

    If the scheduler does not answer, the server serves its tables all the same; the head notices.
    """
    from fastrt.membership.client import ClusterMember
    from fastrt.membership.events import Role
    from fastrt.membership.options import MemberOptions

    options = MemberOptions(
        settings["scheduler"], f"server-{settings['index']}", settings["host"], token=settings["token"]
    )
    member = ClusterMember(Role.SERVER, options)
    try:
        member.start()
    except FastrtError as error:
        _log.warning("server %s is not in the cluster: %s", member.member_id, error)
    return member.close
