"""The core's tests on a build with sanitizers: AddressSanitizer with UndefinedBehaviorSanitizer, or ThreadSanitizer.

    python tests/crash/sanitizers.py address        what `make asan` runs
    python tests/crash/sanitizers.py thread         threads of one process, see thread_test.py

The interpreter itself is not instrumented: the runtime libraries are preloaded into it. Leaks are not looked for, as
CPython keeps much until its end. A report ends the process that made it; those of processes whose end or error
output nobody looks at are found in files.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import variant

HERE = Path(__file__).resolve().parent
# What runs in sessions of several processes takes too long, or tests the Python around the core.
TESTS = ["tests/_core", "tests/store/test_join.py", "tests/store/test_client.py"]
RUNTIMES = {
    "address": ("libasan.so", "libubsan.so"),
    "fuzzer": ("libasan.so", "libubsan.so"),
    "thread": ("libtsan.so",),
}
ABSENT = 3  # exit code: nothing could be tested here


def runtime(name: str) -> str:
    """The path of one of gcc's runtime libraries; empty when it is not installed."""
    try:
        done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    path = done.stdout.strip()
    return os.path.realpath(path) if os.path.isabs(path) and os.path.exists(path) else ""


def environment(kind: str, reports: Path) -> dict[str, str]:
    """For processes that are to use the build; reports go to files that begin with `reports`.

    Raises:
        SystemExit: gcc's runtime libraries are not here.
    """
    libraries = [runtime(name) for name in RUNTIMES[kind]]
    if not all(libraries):
        sys.stderr.write(
            f"nothing was tested: gcc's {' and '.join(RUNTIMES[kind])} are not here. They come with gcc on Debian "
            f"and Ubuntu, and as packages libasan, libubsan and libtsan elsewhere.\n"
        )
        raise SystemExit(ABSENT)
    common = f"abort_on_error=1:log_path={reports}"
    return {
        **variant.environment(variant.build(kind=kind)),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": f"detect_leaks=0:handle_abort=0:{common}",
        "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": f"halt_on_error=0:second_deadlock_stack=1:suppressions={HERE / 'thread.supp'}:{common}",
        "FASTRT_SANITIZE": kind,
        # pymalloc hands out parts of blocks: what overruns one of them is seen only when each is a block of its own.
        "PYTHONMALLOC": "malloc",
    }


def run(kind: str, command: list[str]) -> int:
    """Run a command on a build; its exit code, or 1 when there are reports, which are shown."""
    with tempfile.TemporaryDirectory(prefix="frt-reports-") as folder:
        code = subprocess.run(command, env=environment(kind, Path(folder, "report")), cwd=variant.ROOT).returncode
        reports = sorted(Path(folder).iterdir())
        for path in reports:
            sys.stdout.write(path.read_text(errors="replace"))
        sys.stdout.write(f"sanitizers ({kind}): {len(reports)} processes have reported\n")
    return code or bool(reports)


def is_reported(kind: str, command: list[str], what: str) -> bool:
    """Whether a mistake on purpose is reported: a runtime that is not in force reports nothing either."""
    with tempfile.TemporaryDirectory(prefix="frt-reports-") as folder:
        environ = environment(kind, Path(folder, "report"))
        subprocess.run(command, env=environ, capture_output=True)
        return any(what in path.read_text() for path in Path(folder).iterdir())


def main() -> int:
    kind = sys.argv[1]
    if kind == "thread":
        command = [sys.executable, str(HERE / "thread_test.py")]
        planted, what = [*command, "planted"], "data race"
        command += sys.argv[2:]
    else:
        planted = [sys.executable, "-c", "import ctypes; ctypes.memset(ctypes.create_string_buffer(64), 0, 65)"]
        what = "heap-buffer-overflow"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[2:] or TESTS)]
    if not is_reported(kind, planted, what):
        sys.exit(f"the sanitizer ({kind}) does not work here: a planted {what} was not reported")
    return run(kind, command)


if __name__ == "__main__":
    sys.exit(main())
