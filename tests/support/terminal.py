"""A command that runs at a real terminal, as a person would use it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

_PATIENCE_S = 30.0


def _take_terminal() -> None:
    """In the child: let Ctrl-C reach it, also if the tests run in the background of a shell."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command of fastrt at a terminal of its own; to be closed.

    Args:
        words: of the command, without its name.
        env: its environment; None: that of the test.
    """

    def __init__(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._fd, inner = pty.openpty()
        code = "from fastrt.cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**(os.environ if env is None else env), "TERM": "dumb"},
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(inner)
        self._unread = ""

    def expect(self, text: str) -> str:
        """Read until the command prints a text; what came before, and it."""
        until = time.monotonic() + _PATIENCE_S
        while text not in self._unread:
            left = until - time.monotonic()
            ready = select.select([self._fd], [], [], max(0.0, left))[0]
            assert ready, f"no {text!r} in {self._unread!r}"
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # EIO: the command has ended
                data = b""
            assert data, f"the command has ended without {text!r}: {self._unread!r}"
            self._unread += data.decode("utf-8", "replace").replace("\r\n", "\n")
        found, _, self._unread = self._unread.partition(text)
        return found + text

    def send(self, line: str, end: str = "\n") -> None:
        """Type a line."""
        os.write(self._fd, (line + end).encode())

    def ask(self, line: str, prompt: str = "(Pdb) ") -> str:
        """Type a line and return what is printed until the next prompt, without the line's echo."""
        self.send(line)
        return self.expect(prompt).removesuffix(prompt).removeprefix(f"{line}\n")

    def leave(self) -> int:
        """Wait for the command's end; its exit code."""
        return self.process.wait(_PATIENCE_S)

    def close(self) -> None:
        """End the command."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
