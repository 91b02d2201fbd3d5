"""Run threads.pyx on the build with ThreadSanitizer; sanitizers.py starts this.

    python tests/crash/sanitizers.py thread [rounds]

With "planted" instead, it makes a mistake on purpose, to show that ThreadSanitizer is in force.
"""

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import fastrt._core
from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.repair import fsck

HERE = Path(__file__).resolve().parent
KINDS = (clients.KIND_DAEMON, clients.KIND_DRIVER, clients.KIND_WORKER, clients.KIND_WORKER)  # one thread each
ROUNDS = 60_000  # 10 s
FLAGS = ["-O2", "-g", "-std=gnu11", "-fno-strict-aliasing", "-fno-omit-frame-pointer", "-fsanitize=thread", "-pthread"]


def compile_threads(core: Path, folder: Path) -> None:
    """Make the extension `threads` in a folder, against the sources of the core that the build was made of."""
    from Cython.Compiler.Main import CompilationOptions, compile_single
    from Cython.Compiler.Options import get_directive_defaults

    made = folder / "threads.c"
    directives = {**get_directive_defaults(), "language_level": 3, "cdivision": True, "boundscheck": False}
    include_path = [str(core.parents[1])]
    options = CompilationOptions(output_file=str(made), include_path=include_path, compiler_directives=directives)
    if compile_single(str(HERE / "threads.pyx"), options, "threads").num_errors:
        raise SystemExit("threads.pyx cannot be compiled")
    end = sysconfig.get_config_var("EXT_SUFFIX")
    include = [f"-I{sysconfig.get_path('include')}", f"-I{core / 'include'}"]
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["gcc", *FLAGS, "-shared", "-fPIC", *include, str(made), "-o", str(folder / f"threads{end}")]
    subprocess.run(command, check=True, env=clean)


def in_threads(call: Callable[..., object], each: list[tuple[object, ...]]) -> None:
    """Call it in as many threads as there are arguments."""
    running = [threading.Thread(target=call, args=args) for args in each]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def campaign(work: ModuleType, rounds: int) -> list[str]:
    """All kinds of work in all threads; what was wrong."""
    segment = Segment.create(8 << 20, objects_max=1 << 14, tasks_max=1 << 12)
    try:
        board = work.Board()
        members = [Client(segment, *clients.admit(segment, os.getpid(), kind)) for kind in KINDS]
        in_threads(work.work, [(member, board, seed, rounds) for seed, member in enumerate(members)])
        for member in members:
            work.give_back(member)
        wrong = fsck.fsck(members[0], quiet=True)
        left = fsck.usage(members[0])
    finally:
        segment.unlink()
    counts = board.counted()
    sys.stdout.write(f"{len(KINDS)} threads: {counts}\n")
    wrong += [f"{name}: {counts[name]}" for name in ("torn", "failed") if counts[name]]
    wrong += [f"{name} was never done" for name in ("made", "read", "missed", "ran", "waited") if not counts[name]]
    return wrong + ([f"left behind: {left}"] if left["objects"] or left["tasks"] else [])


def main() -> int:
    target = Path(fastrt._core.__file__).absolute().parents[2]
    compile_threads(HERE.parents[1] / "src" / "fastrt" / "_core", target)
    sys.path.insert(0, str(target))
    import threads

    if sys.argv[1:] == ["planted"]:
        board = threads.Board()
        in_threads(threads.race, [(board, 1_000_000)] * 2)
        return 0
    wrong = campaign(threads, int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
    for line in wrong:
        sys.stdout.write(line + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
