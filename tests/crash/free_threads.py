"""Tests of threads on a build for a Python without a GIL; run by that Python (3.14t).

    .cache/free-0/bin/python tests/crash/free_threads.py [pytest's words]

If the interpreter was built with ThreadSanitizer, so is the core, and each report is a failure. A module of the core
that turns the GIL on again is one, too: Python warns of it.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import variant

HERE = Path(__file__).resolve().parent
TESTS = ["tests/_core/test_threads.py", "tests/_core/test_threads_apart.py"]
SESSIONS = ["tests/tasks/test_threads.py"]  # too slow with ThreadSanitizer: processes are started


def main() -> int:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(f"{sys.executable} has a GIL; run this by a Python without one")
    is_sanitized = "--with-thread-sanitizer" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    quiet = "report_bugs=0"
    os.environ["TSAN_OPTIONS"] = quiet  # of the build
    target = variant.build(kind="free-sanitized" if is_sanitized else "free")
    tests = sys.argv[1:] or [*TESTS, *([] if is_sanitized else SESSIONS)]
    with tempfile.TemporaryDirectory(prefix="frt-reports-") as folder:
        reports = f"suppressions={HERE / 'free_threads.supp'}:log_path={folder}/report:exitcode=0"
        environ = {**variant.environment(target), "TSAN_OPTIONS": reports, "PYTHONWARNINGS": "error::RuntimeWarning"}
        # Each process would compile what it imports: seconds, with ThreadSanitizer.
        environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(sys.prefix, "pycache"))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        code = subprocess.run(command, env=environ, cwd=variant.ROOT).returncode
        found = sorted(Path(folder).iterdir())
        for path in found:
            sys.stdout.write(path.read_text(errors="replace"))
    sys.stdout.write(f"{sys.version.split()[0]} without a GIL: {len(found)} processes have reported races\n")
    return code or bool(found)


if __name__ == "__main__":
    sys.exit(main())
