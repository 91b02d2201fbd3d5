"""The interpreter from which several processes are forked: it imports what they share once, and ends.

`siblings` starts it. Its only argument is the descriptor of its plan, which has the descriptor `control` and `stages`,
each with names of `modules`, variables for `env`, and the `processes` that are forked once these modules are imported.
It reports their process ids at `control`, and ends when the starter answers: the processes become its children. Where
this interpreter has threads from its start, it forks none.

Nothing that it imports may start a thread, or begin to use gRPC.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from fastrt.net.supervise import take_settings
from fastrt.worker.title import set_title


def main() -> tuple[Callable[..., None], str]:
    """Fork the processes of the plan. It returns only in these.

    Returns:
        The `main` of the process's module, and the expression that it evaluates.
    """
    gc.disable()
    plan = take_settings(int(sys.argv[1]), "the plan of processes")
    control: int = plan["control"]
    pids: list[int] = []
    # A `sitecustomize` may have started threads, and a forked child has only the one that forks.
    is_alone = len(os.listdir("/proc/self/task")) == 1
    for stage in plan["stages"] if is_alone else []:
        os.environ.update(stage["env"])
        for name in stage["modules"]:
            importlib.import_module(name)
        for process in stage["processes"]:
            pid = os.fork()
            if pid == 0:
                return _become(process, plan)
            pids.append(pid)
    with contextlib.suppress(OSError):  # the starter has ended, and so will they
        os.write(control, json.dumps(pids).encode())
        os.read(control, 1)  # until the starter is ready to adopt them, or has ended
    os._exit(0)


def _become(process: dict[str, Any], plan: dict[str, Any]) -> tuple[Callable[..., None], str]:
    """In the child: be as a process that was started by itself."""
    os.setsid()
    everything = {fd for stage in plan["stages"] for one in stage["processes"] for fd in [*one["fds"], *one["pipes"]]}
    for number, fd in enumerate(process["pipes"]):  # standard input and output
        os.dup2(fd, number)
    for fd in {plan["control"], *everything} - set(process["fds"]):
        os.close(fd)
    with open("/proc/self/comm", "w") as name:
        name.write(f"fastrt-{process['name']}")
    set_title(f"fastrt::{process['name']} {process['module']}")
    sys.argv[1:] = process["arguments"]
    its_main: Callable[..., None] = importlib.import_module(process["module"]).main
    gc.freeze()
    gc.enable()
    return its_main, process["call"]
