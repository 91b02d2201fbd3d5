"""The uplink process: `node_service` starts `main(SETTINGS)`. It runs an `Uplink`, and lets it answer other nodes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from fastrt.cluster.questions import Answer, Question
from fastrt.cluster.uplink import Uplink
from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.net import supervise
from fastrt.net.grpc import streams
from fastrt.store import join
from fastrt.store.client import Store

_WHAT = "uplink"


def main(argument: str) -> None:
    """Run the uplink.

    Args:
        argument: JSON: socket (of the node's daemon), head and listen (addresses), name, workers, join_first
            (whether it announces its address only once the head has answered), lineage_bytes, keep_bytes, peer_idle_s
            (before an unused stream to another node is closed), standby (address of this node's standby head, or ""),
            patience_s (the store's), identity, tls, insecure.
    """
    settings = read_object(argument, "the settings of the uplink", own=True, bytes_max=SETTINGS_BYTES_MAX)
    try:
        access = streams.access_of(settings)
        client, link = join.join(settings["socket"], "tool", "uplink")
        daemon = join.Lasting(settings["socket"], link)

        async def run() -> None:
            asyncio.get_running_loop().set_exception_handler(_on_error)
            store = Store(client, 0.0, tell=daemon.send, patience_s=settings["patience_s"])
            store.serves, store.socket_path = True, settings["socket"]

            def answer(question: Question) -> Answer:
                from fastrt.observe import answers  # at the first question: its modules are a part of each start

                return answers.answer(store, question)

            await Uplink(store, settings, access, daemon, answer).run()

        supervise.fail_with_threads(_WHAT)
        asyncio.run(run())
        client.close()
    except FastrtError as exc:
        sys.stderr.write(f"fastrt: the uplink ends: {exc}\n")
        sys.exit(1)


def _on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End this process if a callback of fastrt failed: what it was to do is not done, and a new uplink does it.

    gRPC's own callbacks may fail without harm: two loops compete for one descriptor (grpc/grpc#25364).
    """
    error, handle = context.get("exception"), context.get("handle")
    if error is None or handle is None or isinstance(error, BlockingIOError):
        loop.default_exception_handler(context)
    else:
        supervise.fail(_WHAT, error)
