"""Titles of processes: the command line that the kernel shows."""

import subprocess
import sys

import pytest

SHOW = r"""
import os, sys
from pathlib import Path
from fastrt.worker.title import set_title

def shown():
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode()

name = Path("/proc/self/comm").read_text()
for title in ("fastrt::A", "fastrt::Longer", "é\0b", "x" * 100000, "fastrt::B"):
    set_title(title)
    print(ascii(shown()[:20]), len(shown()) < 5000)
assert Path("/proc/self/comm").read_text() == name
assert sys.argv[1:] == ["an argument"] and "PATH" in os.environ
"""
LIBRARY = """
from pathlib import Path
titles = []
def setproctitle(title):
    titles.append(title)
    Path("/proc/self/comm").write_text(title)
"""


@pytest.fixture
def shown():
    def show(code):
        ran = subprocess.run(
            [sys.executable, "-c", code, "an argument"], capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()

    return show


def test_title_replaces_the_command_line_and_nothing_else(shown):
    lines = shown("import sys; sys.modules['setproctitle'] = None\n" + SHOW)
    texts = ["fastrt::A", "fastrt::Longer", "\xe9 b", "x" * 20, "fastrt::B"]
    assert lines == [f"{text!a} True" for text in texts]


def test_installed_library_sets_the_title(shown, tmp_path):
    (tmp_path / "setproctitle.py").write_text(LIBRARY)
    ask = "import setproctitle; print(setproctitle.titles)"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom fastrt.worker.title import set_title\n"
    check = "from pathlib import Path; print(Path('/proc/self/comm').read_text().startswith('fastrt'))"
    assert shown(f"{code}set_title('fastrt::A')\n{ask}\n{check}") == ["['fastrt::A']", "False"]


def test_process_keeps_its_title_where_its_place_is_unknown(shown):
    # As under qemu, whose /proc/self/stat ends before these fields.
    code = "from fastrt.worker import title; title._ARG_START, title._ARG_END = 945, 946; title.set_title('other')\n"
    (line,) = shown(f"{code}from pathlib import Path; print(b'an argument' in Path('/proc/self/cmdline').read_bytes())")
    assert line == "True"
