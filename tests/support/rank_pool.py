"""Forks the ranks of a test: a process that has everything imported, no threads, and forks for each request.

It reads (count, function, arguments, seconds), pickled, from its standard input and answers with one outcome for each
rank: ("returned", value), ("raised", exception) or ("died", status). A rank that takes longer is killed.
"""

import os
import pickle
import selectors
import signal
import struct
import sys
import time
import traceback

import cloudpickle
import ml_dtypes  # noqa: F401
import numpy as np  # noqa: F401

import fastrt.collective
from fastrt.net.grpc.identity import Identity


def read(stream):
    head = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("Q", head)[0])) if len(head) == 8 else None


def write(stream, value):
    body = cloudpickle.dumps(value)
    stream.write(struct.pack("Q", len(body)) + body)
    stream.flush()


def be_rank(rank, count, function, args, out):
    try:
        outcome = "returned", function(rank, count, *args)
    except BaseException as error:
        error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
        outcome = "raised", error
    with os.fdopen(out, "wb") as stream:
        stream.write(cloudpickle.dumps(outcome))
    os._exit(0)


def run(count, function, args, patience_s):
    ends, children = {}, []
    for rank in range(count):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            be_rank(rank, count, function, args, theirs)
        os.close(theirs)
        ends[ours] = rank
        children.append(child)
    bodies = [b""] * count
    until = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(1.0):
                piece = os.read(key.fd, 1 << 20)
                bodies[ends[key.fd]] += piece
                if not piece:
                    selector.unregister(key.fd)
    outcomes = []
    for end, rank in ends.items():
        os.close(end)
        os.kill(children[rank], signal.SIGKILL)
        status = os.waitpid(children[rank], 0)[1]
        outcomes.append(pickle.loads(bodies[rank]) if bodies[rank] else ("died", status))
    return outcomes


def main():
    Identity.from_token(fastrt.collective.new_token())  # imports what the ranks would import
    while request := read(sys.stdin.buffer):
        write(sys.stdout.buffer, run(*pickle.loads(request)))


if __name__ == "__main__":
    main()
