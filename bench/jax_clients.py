"""Timed calls of jaxlib's own clients; runs inside an environment with jaxlib and knows nothing of fastrt.

    python jax_clients.py serve PORT TASKS      jaxlib's own service, until standard input closes
    python jax_clients.py time PORT CLIENTS     read commands from standard input, one a line, print JSON seconds

Commands: `set N`, `get N` (one client's calls one by one), `sets N` (all clients at once, N each), `barrier N` (N
barriers of all clients). Each prints the list of seconds per call; `sets` and `barrier` print one figure per round.
"""

import json
import sys
import threading
import time

from jaxlib import _jax as jaxlib

KEYS = iter(range(1 << 60))


def serve(port, tasks):
    service = jaxlib.get_distributed_runtime_service(f"127.0.0.1:{port}", tasks, heartbeat_timeout=1000)
    print("serving", flush=True)
    sys.stdin.read()
    del service


def together(work, clients):
    """Seconds until work(client) has ended for all clients."""
    ready = threading.Barrier(len(clients) + 1)

    def run(client):
        ready.wait()
        work(client)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def each(count, call):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def measure(clients, what, count):
    first = clients[0]
    if what == "set":
        return each(count, lambda: first.key_value_set(f"s/{next(KEYS)}", "v"))
    if what == "get":
        key = f"g/{next(KEYS)}"
        first.key_value_set(key, "v")
        return each(count, lambda: first.blocking_key_value_get(key, 10_000))
    if what == "sets":

        def many(client):
            for _ in range(count):
                client.key_value_set(f"m/{next(KEYS)}", "v")

        return [together(many, clients) / (count * len(clients))]
    names = [f"b/{next(KEYS)}" for _ in range(count)]
    return [together(lambda client, name=name: client.wait_at_barrier(name, 60_000), clients) for name in names]


def main():
    mode, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if mode == "serve":
        serve(port, count)
        return
    clients = [
        jaxlib.get_distributed_runtime_client(
            f"127.0.0.1:{port}", node, init_timeout=60, heartbeat_timeout=1000, shutdown_on_destruction=False
        )
        for node in range(count)
    ]
    together(lambda client: client.connect(), clients)
    print("connected", flush=True)
    for line in sys.stdin:
        what, times = line.split()
        print(json.dumps(measure(clients, what, int(times))), flush=True)


main()
