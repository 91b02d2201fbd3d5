"""What workers print, line by line, with a prefix, to the drivers."""

from __future__ import annotations

import os
from collections.abc import Callable

_LINE_BYTES_MAX = 65536
_READ_BYTES = 65536
_LINES_MAX = 1000


class LogPipe:
    """The read end of one worker's stdout or stderr.

    Args:
        fd: the descriptor.
        is_error: whether it is stderr.
        emit: called with (text, is_error) for each piece of whole lines.
    """

    def __init__(self, fd: int, is_error: bool, emit: Callable[[str, bool], None]) -> None:
        self.fd = fd
        self.is_error = is_error
        self.pid = 0
        self._emit = emit
        self._rest = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.fd

    def read(self) -> bool:
        """Pass on what is there; False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            self._pass_on_rest()
            return False
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if newline:
            self._pass_on(whole)
        elif len(self._rest) > _LINE_BYTES_MAX:
            self._pass_on_rest()
        return True

    def drain(self) -> None:
        """Pass on everything up to the end of the stream, or until nothing more is there."""
        while True:
            before = self._rest
            if not self.read() or self._rest == before:
                break
        self._pass_on_rest()
        os.close(self.fd)

    def _pass_on_rest(self) -> None:
        if self._rest:
            self._pass_on(self._rest)
        self._rest = b""

    def _pass_on(self, data: bytes) -> None:
        lines = data.decode("utf-8", "replace").split("\n")
        prefix = f"(pid={self.pid}) "
        for k in range(0, len(lines), _LINES_MAX):  # a prefix for each of 64 Ki empty lines makes a message too long
            self._emit("".join(f"{prefix}{line}\n" for line in lines[k : k + _LINES_MAX]), self.is_error)
