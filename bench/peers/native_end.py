"""One end of the native stream, as a process in a network namespace of its own: `source` or `taker`.

Usage: native_end.py source HOST BYTES TOKEN, native_end.py taker BYTES TOKEN. The source prints the addresses of a
clear and a sealed listener. The taker reads lines `address clear|sealed one|many` and prints seconds, and its processor
seconds. Each end prints its processor seconds so far for a line `cpu`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

import numpy as np

from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt.net.grpc.identity import Identity
from fastrt.store.client import Store
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import Table

MANY, EACH = 10_000, 64 << 10


def open_table(nbytes: int) -> tuple[Segment, Table]:
    """Make a store that has room for one large object and the many small ones."""
    segment = Segment.create(nbytes + MANY * EACH + (512 << 20), objects_max=1 << 15, tasks_max=1 << 10)
    client = Client(segment, *admit(segment, os.getpid(), KIND_DRIVER, "bench"))
    client.adopt_job(client.job)
    return segment, Table(Store(client, 0.0))


def cpu() -> float:
    """Processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(host: str, nbytes: int, token: str) -> None:
    """Offer object 0, which is large, and objects 1 to MANY."""
    segment, table = open_table(nbytes)
    table.add(0, table.store.put(np.ones(nbytes // 8)))
    for k in range(MANY):
        table.add(1 + k, table.store.put(np.ones(EACH // 8)))
    identity = Identity.from_token(token)
    clear, sealed = Source(table, identity, host, insecure=True), Source(table, identity, host)
    print(json.dumps({"clear": clear.address, "sealed": sealed.address}), flush=True)
    for _ in sys.stdin:
        print(cpu(), flush=True)
    segment.unlink()


def take(nbytes: int, token: str) -> None:
    """Pull the objects that each line names, and drop them."""
    segment, table = open_table(nbytes)
    identity = Identity.from_token(token)
    pullers = {"clear": Puller(table, identity, insecure=True, checksum=False), "sealed": Puller(table, identity)}
    for line in sys.stdin:
        address, how, what = line.split()
        names = [0] if what == "one" else list(range(1, MANY + 1))
        start, before = time.perf_counter(), cpu()
        pullers[how].bring(names, address).result()
        print(json.dumps([time.perf_counter() - start, cpu() - before]), flush=True)
        for name in names:
            table.drop(name)
    segment.unlink()


if __name__ == "__main__":
    if sys.argv[1] == "source":
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        take(int(sys.argv[2]), sys.argv[3])
