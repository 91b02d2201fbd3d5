"""The shuffle of `compare_locality.py` by plain processes: how long its bytes alone take on this machine.

Run: python bench/plain_shuffle.py [--rounds 3] [--gigabytes 4]

Three groups of two processes stand for the nodes. Each piece is made by NumPy and copied into shared memory, once; a
process sums the pieces of its own group where they are, and gets the others through TCP into a buffer that it uses
again. Nothing is scheduled, counted, bounded, encrypted or survived, so no runtime that copies pieces can take less.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import click
import numpy as np

NODES, WORKERS, PARTS = 3, 2, 64
PIECE = struct.Struct("<II")  # of which task of the first step, and for which of the second


def serve(listening: socket.socket, folder: Path, nbytes: int) -> None:
    """Send the pieces of this process's tasks, in a thread for each connection."""
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=send, args=(connection, folder, nbytes), daemon=True).start()


def send(connection: socket.socket, folder: Path, nbytes: int) -> None:
    """Send the pieces that one process asks for."""
    while asked := connection.recv(PIECE.size, socket.MSG_WAITALL):
        k, j = PIECE.unpack(asked)
        with (folder / str(k)).open("rb") as file:
            left, offset = nbytes, j * nbytes
            while left:
                sent = os.sendfile(connection.fileno(), file.fileno(), offset, left)
                left, offset = left - sent, offset + sent


def work(me: int, folder: Path, count: int, ports: list[int], listening: socket.socket, barrier: Barrier) -> None:
    """Run the tasks of one process: the first step, and the second one once all have ended the first."""
    nbytes = 8 * count
    threading.Thread(target=serve, args=(listening, folder, nbytes), daemon=True).start()
    barrier.wait()
    mine = range(me, PARTS, NODES * WORKERS)
    for k in mine:
        pieces = [np.full(count, j * PARTS + k) for j in range(PARTS)]
        with (folder / str(k)).open("wb+") as file:
            file.truncate(PARTS * nbytes)
            with mmap.mmap(file.fileno(), 0) as memory:
                for j, piece in enumerate(pieces):
                    memory[j * nbytes : (j + 1) * nbytes] = memoryview(piece).cast("B")
    barrier.wait()
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    buffer = np.empty(count, np.int64)
    for j in mine:
        found = 0
        for k in range(PARTS):
            maker = k % (NODES * WORKERS)
            if maker // WORKERS == me // WORKERS:
                piece = np.memmap(folder / str(k), np.int64, "r", j * nbytes, (count,))
            else:
                connections[maker].sendall(PIECE.pack(k, j))
                view = memoryview(buffer).cast("B")
                while view:
                    view = view[connections[maker].recv_into(view) :]
                piece = buffer
            found += int(piece.sum())
        assert found == sum(range(j * PARTS, (j + 1) * PARTS)) * count
    barrier.wait()


def shuffle(gigabytes: float) -> float:
    """Run it once; returns the seconds."""
    count = int(gigabytes * 1e9 / 8 / PARTS / PARTS)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(NODES * WORKERS + 1)
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(NODES * WORKERS)]
    ports = [one.getsockname()[1] for one in listening]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        processes = [
            context.Process(target=work, args=(me, Path(folder), count, ports, one, barrier))
            for me, one in enumerate(listening)
        ]
        for process in processes:
            process.start()
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        barrier.wait()
        seconds = time.perf_counter() - start
        for process in processes:
            process.join()
            assert process.exitcode == 0
    for one in listening:
        one.close()
    return seconds


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--gigabytes", default=4.0, show_default=True)
def main(rounds: int, gigabytes: float) -> None:
    """Measure, and print the median."""
    found = [shuffle(gigabytes) for _ in range(rounds)]
    print(f"plain shuffle of {gigabytes:g} GB: {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
