"""The process of a parameter server: started by the head with its settings, it ends with the head.

It writes one line of JSON, where it listens, when it does. What it was before it reads from its journal, so the process
that takes a killed one's place goes on with all that was acknowledged.
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
    """Serve by the settings in a line of standard input, until that, or the head's process, ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the head's to handle
    settings = read_object(sys.stdin.readline(), "the settings", bytes_max=SETTINGS_BYTES_MAX, own=True)
    watched = os.pidfd_open(settings["head"])  # beside standard input, which a forked child of the head keeps open
    trust = Trust(settings["token"], settings["insecure"], bytes.fromhex(settings["key"]))
    try:
        server = Server(settings["index"], secrets.token_hex(8), _journal(settings), trust, settings["frozen"])
    except FastrtError as error:
        _log.critical("server %s cannot start: %s", settings["index"], error)
        os.write(1, json.dumps({"failed": str(error)}).encode() + b"\n")
        sys.exit(1)
    endpoint = _listen(server, trust, settings)
    os.write(1, json.dumps({"address": endpoint.address, "unix": endpoint.unix}).encode() + b"\n")
    leave = _join(settings)  # imports for longer than all before took: clients of a killed server wait for that only
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
    """At the place where the process before it was, if there was one and nobody else is there."""
    places = [settings["address"], with_port(settings["address"], 0)]
    for address in places[:-1]:
        with contextlib.suppress(OSError):
            return Endpoint(server, trust, address, settings["unix"])
    return Endpoint(server, trust, places[-1])


def _join(settings: dict[str, Any]) -> Callable[[], None]:
    """Become a member of the cluster; returns how to leave it.

    A scheduler that does not answer is the head's to notice: tables are served all the same.
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
