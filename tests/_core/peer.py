"""A process of its own for tests that need two: it executes what it is told, line by line.

See the class Peer in conftest.py. A line in is JSON with Python code; a line out is JSON with the value of the
code's last expression, or with what it raised.
"""

import ast
import gc
import importlib.util
import json
import os
import signal
import sys
import types

gc.disable()  # while it loads
# The core, which needs nothing of what lies above it, without the package around it: a third of the time to start.
_spec = importlib.util.find_spec("fastrt")
assert _spec is not None
sys.modules["fastrt"] = _package = types.ModuleType("fastrt")
_package.__path__ = list(_spec.submodule_search_locations or ())

from fastrt._core.memory import arena, clients, segment, trace  # noqa: E402
from fastrt._core.objects import functions, handles, mapped, spill  # noqa: E402
from fastrt._core.repair import fsck, recovery  # noqa: E402
from fastrt._core.tasks import admission, submission, tasks  # noqa: E402

SPACE = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        arena,
        clients,
        admission,
        fsck,
        functions,
        handles,
        json,
        os,
        recovery,
        segment,
        signal,
        submission,
        mapped,
        spill,
        sys,
        tasks,
        trace,
    )
}


def execute(code: str) -> object:
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<peer>", "exec"), SPACE)  # noqa: S102 - it is told by the test that started it
    return eval(compile(ast.Expression(last.value), "<peer>", "eval"), SPACE) if last else None  # noqa: S307


def main() -> None:
    gc.freeze()
    gc.enable()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        try:
            reply = {"value": execute(json.loads(line))}
        except BaseException as exc:
            reply = {"error": type(exc).__name__, "text": str(exc)}
        answers.write(json.dumps(reply, default=repr) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
