"""How the end of a worker is put into words."""

import pytest

from fastrt.node.janitor import explain


@pytest.mark.parametrize(
    ("status", "text"),
    [(None, "ended"), (0, "exited with code 0"), (7 << 8, "exited with code 7"),
     (9, "killed by signal 9 (SIGKILL, Killed)"), (11 | 128, "killed by signal 11 (SIGSEGV, Segmentation fault)"),
     (40, "killed by signal 40 (")],
)  # fmt: skip
def test_every_wait_status_is_explained(status, text):
    assert text in explain(status)
