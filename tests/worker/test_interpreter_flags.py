"""Options of the driver's interpreter: workers and actors have the same."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt

SOURCE = Path(fastrt.__file__).parents[1]
FLAGS = """
import sys

sys.path.extend(SITE)  # with -S the installed packages are not found
import fastrt


def flags():
    return tuple(sys.flags), sorted(sys._xoptions.items()), [one for one in sys.warnoptions if "Pending" in one]


@fastrt.remote
class Actor:
    def flags(self):
        return flags()


with fastrt.init(1, "64MiB"):
    print([flags(), *fastrt.get([fastrt.remote(flags).remote(), Actor.remote().flags.remote()])])
"""


@pytest.mark.parametrize(
    "given",
    [
        ["-s", "-O", "-X", "own=1", "-X", "other", "-W", "ignore::PendingDeprecationWarning"],
        ["-S", "-B", "-X", "utf8"],
    ],
)
def test_workers_have_the_options_of_the_drivers_interpreter(tmp_path, runtime_dir, given, monkeypatch):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    script = tmp_path / "driver.py"
    script.write_text(FLAGS.replace("SITE", repr([str(SOURCE), *sys.path])))
    ran = subprocess.run([sys.executable, *given, script], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    driver, worker, actor = ast.literal_eval(ran.stdout)
    assert driver == worker == actor
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print(tuple(sys.flags))"], capture_output=True, check=True
    )
    assert driver[0] != ast.literal_eval(plain.stdout.decode())
