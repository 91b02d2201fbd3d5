"""The head's handle of a server process on this machine: starts it, watches it, and restarts it when it dies."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import read_object
from fastrt.net import supervise
from fastrt.net.supervise import RestartLimit
from fastrt.ps.journal import MemoryMedium

_log = logging.getLogger(__name__)
_MODULE = "fastrt.ps.server_main"
_DEATHS_MAX, _DEATHS_S = 10, 30.0
END_S = 10.0
_AGAIN = "keeps ending; its error output says why"


class ServerProcess:
    """One server, across restarts of its process.

    Args:
        settings: those of `server_main.main`, except those that change with each process.
        restarted: called when a new process has replaced a dead one.
        frozen: returns whether a new process should accept no pushes at first.
        lost: called with the reason when the server is given up.

    Attributes:
        address: the server's address.
        unix: the name of its Unix socket.
        pid: id of its present process.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        restarted: Callable[[ServerProcess], None],
        frozen: Callable[[], bool],
        lost: Callable[[str], None],
    ) -> None:
        self.address = ""
        self.unix: str | None = None
        self._settings = settings
        self._restarted, self._frozen, self._lost = restarted, frozen, lost
        keeps = settings["durability"] != "none" and settings["folder"] is None
        self._fds = MemoryMedium.make() if keeps else []
        self._ending = threading.Event()
        self._up = threading.Event()
        self._restarts = RestartLimit(_DEATHS_MAX, _DEATHS_S)
        self._refusal = ""
        self._process = self._spawn()
        self._watcher = threading.Thread(target=self._watch, name="fastrt-ps-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Id of the present process."""
        return self._process.pid

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the server accepts requests.

        Raises:
            FastrtError: it does not in this time; its error output says why.
        """
        if not self._up.wait(timeout_s) or self._ending.is_set():
            why = self._refusal or "its error output says why"
            raise FastrtError(f"server {self._settings['index']} did not start: {why}")

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt to reach the server, but not longer than until `end`."""
        self._ending.wait(seconds)

    def end(self) -> None:
        """Ask the server to end."""
        self._ending.set()
        process = self._process
        if process.stdin is not None:
            process.stdin.close()

    def wait(self) -> None:
        """Wait until the server has ended; see `end`."""
        self._watcher.join(END_S)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = {
            **self._settings,
            "head": os.getpid(),
            "fds": self._fds,
            "frozen": self._frozen(),
            "address": self.address or f"{self._settings['host']}:0",
            "unix": self.unix,
        }
        pipe = subprocess.PIPE
        process = supervise.spawn(_MODULE, "main()", name="server", pass_fds=self._fds, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        try:
            # Not as an argument: every user of the machine can read those, and the settings contain the token.
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended already, which `_watch` will see
        return process

    def _watch(self) -> None:
        """Read the process's addresses, wait for its end, and start it again; runs in a thread."""
        while True:
            process = self._process
            assert process.stdout is not None
            line = process.stdout.readline()
            if line:
                place = read_object(line, "a message of a server", own=True)
            if line and "failed" in place:
                self._refusal = place["failed"]
            elif line:
                self.address, self.unix = place["address"], place["unix"]
                is_first = not self._up.is_set()
                self._settings |= {"accept_loss": False, "expected": True}  # `accept_loss` is for the first start
                self._up.set()
                if not is_first:
                    self._restarted(self)
            supervise.wait_any([process])
            supervise.reap(process)
            if self._ending.is_set():
                return
            _log.warning("server %s has ended (%s)", self._settings["index"], process.returncode)
            may_restart = self._restarts.allows_another()
            forgets = self._settings["durability"] == "none"
            if not may_restart or not self._up.is_set() or forgets or self._refusal:
                self._ending.set()
                self._up.set()
                why = "has ended; with durability 'none' its parameters are lost" if forgets else _AGAIN
                why = f"cannot start: {self._refusal}" if self._refusal else why
                self._lost(f"server {self._settings['index']} {why}")
                return
            self._process = self._spawn()
            if self._ending.is_set() and self._process.stdin is not None:
                self._process.stdin.close()
