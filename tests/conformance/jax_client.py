"""What runs inside a JAX environment: jaxlib's own service, and its clients in every role of the tests.

It knows nothing of fastrt, and runs on any jaxlib from 0.4.13 on. Outcomes go to standard output as JSON lines.

    python jax_client.py service PORT TASKS OPTIONS   jaxlib's own service, until its standard input closes
    python jax_client.py calls PORT OPTIONS           every call of the client API; one line each
    python jax_client.py member PORT ID TASKS OPTIONS commands from standard input, one a line; an outcome each
"""

import json
import sys
import threading

try:
    from jaxlib import _jax as jaxlib
except ImportError:
    from jaxlib import xla_extension as jaxlib

PAUSE = threading.Event()
ENOUGH_MS = 40_000  # for what is answered as soon as the machine gets to it
SKIP = json.loads(sys.argv[-1]).get("skip")
OLD = not hasattr(jaxlib.DistributedRuntimeClient, "key_value_try_get")


def client_of(port, node, options, **more):
    """A client; the timing arguments changed their names twice."""
    keywords = {"init_timeout": options.get("init_timeout", 60), "shutdown_timeout": 60, **more}
    doc = jaxlib.get_distributed_runtime_client.__doc__
    if "max_missing_heartbeats" in doc:
        keywords.update(heartbeat_interval=1, max_missing_heartbeats=options.get("heartbeat_timeout", 100))
    else:
        keywords.update(heartbeat_timeout=options.get("heartbeat_timeout", 100))
    if "use_coordination_service" in doc:
        keywords["use_coordination_service"] = options.get("coordination", True)
    return jaxlib.get_distributed_runtime_client(f"127.0.0.1:{port}", node, **keywords)


def serve(port, tasks, options):
    keywords = {"shutdown_timeout": options.get("shutdown_timeout", 60)}
    doc = jaxlib.get_distributed_runtime_service.__doc__
    if "max_missing_heartbeats" in doc:
        keywords.update(heartbeat_interval=1, max_missing_heartbeats=options.get("heartbeat_timeout", 100))
    else:
        keywords.update(heartbeat_timeout=options.get("heartbeat_timeout", 100))
    if "cluster_register_timeout" in doc:
        keywords.update(cluster_register_timeout=options.get("register_timeout", 60))
    if "use_coordination_service" in doc:
        keywords["use_coordination_service"] = options.get("coordination", True)
    service = jaxlib.get_distributed_runtime_service(f"127.0.0.1:{port}", tasks, **keywords)
    say("serving")
    sys.stdin.read()
    del service


def say(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def has(client, name):
    """Whether this version has a call, and it is to be made."""
    return hasattr(client, name) and not (SKIP and SKIP in name)


def outcome(call, *arguments):
    """What a call came to, as JSON can say it."""
    try:
        value = call(*arguments)
    except Exception as error:
        return {"error": str(error)}
    if call.__name__ == "get_live_nodes":
        value = sorted(value)  # in any order, and with incarnations that differ from run to run
    if isinstance(value, (list, tuple)):
        value = [list(item) if isinstance(item, tuple) else item for item in value]
    return {"value": json.loads(json.dumps(value, default=lambda raw: raw.decode("latin-1")))}


def together(*calls):
    """The outcomes of calls made at the same time, in order. They must not depend on which call arrives first."""
    outcomes = [None] * len(calls)

    def run(index):
        outcomes[index] = outcome(*calls[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
        PAUSE.wait(0.05)  # so that the first one really waits, most of the time
    for thread in threads:
        thread.join()
    return outcomes


def common_calls(a, b):
    yield "set", outcome(a.key_value_set, "dir/k1", "v1")
    yield "get what the other set", outcome(b.blocking_key_value_get, "dir/k1", ENOUGH_MS)
    if has(a, "blocking_key_value_get_bytes"):
        yield "get bytes", outcome(b.blocking_key_value_get_bytes, "dir/k1", ENOUGH_MS)
    late = (b.blocking_key_value_get, "late", ENOUGH_MS)
    yield "get blocks until set", together(late, (a.key_value_set, "late", "now"))
    yield "get of a missing key", outcome(a.blocking_key_value_get, "missing", 300)
    yield "an empty value", outcome(a.key_value_set, "dir/empty", "")
    yield "its get", outcome(a.blocking_key_value_get, "dir/empty", ENOUGH_MS)
    yield "a value of 1 MiB", outcome(a.key_value_set, "big", "x" * (1 << 20))
    yield "its length", len(outcome(b.blocking_key_value_get, "big", ENOUGH_MS).get("value", ""))
    yield "barrier", together((a.wait_at_barrier, "b1", ENOUGH_MS), (b.wait_at_barrier, "b1", ENOUGH_MS))
    yield "barrier timeout", outcome(a.wait_at_barrier, "b2", 700)
    yield "a late one", outcome(b.wait_at_barrier, "b2", 700)


def coordination_calls(a, b):
    yield "set twice", outcome(a.key_value_set, "dir/k1", "v2")
    yield "directory", outcome(b.key_value_dir_get, "dir")
    if has(a, "key_value_dir_get_bytes"):
        yield "directory bytes", outcome(b.key_value_dir_get_bytes, "/dir/")
    yield "directory of nothing", outcome(b.key_value_dir_get, "nothing")
    yield "delete", outcome(b.key_value_delete, "dir")
    yield "directory after it", outcome(b.key_value_dir_get, "dir")
    yield "delete of a missing key", outcome(b.key_value_delete, "dir")
    yield "untidy key", outcome(a.key_value_set, "/un//tidy/", "u")
    yield "its get", outcome(b.blocking_key_value_get, "un/tidy", ENOUGH_MS)


def newer_calls(a, b):
    """What came between 0.4.13 and 0.10; a version without a call skips it."""
    if has(a, "key_value_try_get"):
        yield "try_get", outcome(b.key_value_try_get, "un/tidy")
        yield "try_get of a missing key", outcome(b.key_value_try_get, "none/such")
        yield "overwrite", outcome(a.key_value_set, "un/tidy", "w", True)
        yield "its get", outcome(b.key_value_try_get, "un/tidy")
    if has(a, "key_value_set_bytes"):
        yield "set bytes", outcome(a.key_value_set_bytes, "raw", b"\x00\xff")
        yield "set bytes twice", outcome(a.key_value_set_bytes, "raw", b"\x00\xff")
        yield "overwrite bytes", outcome(a.key_value_set_bytes, "raw", b"\x01", True)
        yield "its get", outcome(a.blocking_key_value_get_bytes, "raw", ENOUGH_MS)
    if has(a, "key_value_increment"):
        yield "increment", outcome(a.key_value_increment, "count", 3)
        yield "increment again", outcome(b.key_value_increment, "count", -5)
        yield "increment of text", outcome(b.key_value_increment, "un/tidy", 1)
    if "process_ids" in (a.wait_at_barrier.__doc__ or ""):
        yield "barrier of one", outcome(a.wait_at_barrier, "b3", ENOUGH_MS, [0])
        yield "barrier of others", outcome(a.wait_at_barrier, "b4", ENOUGH_MS, [1])
        yield "barrier of a stranger", outcome(a.wait_at_barrier, "b5", ENOUGH_MS, [0, 9])
        yield "barrier that times out", outcome(a.wait_at_barrier, "b6", 300, [0, 1])
        yield "conflicting members", outcome(b.wait_at_barrier, "b6", ENOUGH_MS, [1])
    if not OLD:
        yield "an id again", together((a.wait_at_barrier, "b1", ENOUGH_MS), (b.wait_at_barrier, "b1", ENOUGH_MS))
    if has(a, "get_live_nodes"):
        yield "live nodes", together((a.get_live_nodes, [0, 1]), (b.get_live_nodes, [0, 1]))
        yield "live nodes without oneself", outcome(a.get_live_nodes, [1])


def calls(port, options):
    """Two clients in one process, every call of their API, all outcomes in one order."""
    a, b = (client_of(port, node, options, shutdown_on_destruction=False) for node in (0, 1))
    say(["connect", together((a.connect,), (b.connect,))])
    for name, result in common_calls(a, b):
        say([name, result])
    if options.get("coordination", True):
        for name, result in coordination_calls(a, b):
            say([name, result])
        for name, result in newer_calls(a, b):
            say([name, result])
    say(["shutdown", together((a.shutdown,), (b.shutdown,))])
    say(["set after shutdown", outcome(a.key_value_set, "after", "x")])


def member(port, node, options):
    """One member, told what to do line by line: [method, arguments...]."""
    client = client_of(port, node, options, shutdown_on_destruction=False)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        say(outcome(getattr(client, method), *arguments))


def main():
    mode, port, *rest = sys.argv[1:]
    options = json.loads(rest[-1])
    if mode == "service":
        serve(port, int(rest[0]), options)
    elif mode == "calls":
        calls(port, options)
    else:
        member(port, int(rest[0]), options)


main()
