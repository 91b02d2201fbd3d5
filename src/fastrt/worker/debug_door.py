"""The Unix socket at which `fastrt debug` talks to the debugger of this process, one client at a time.

A thread accepts the client and reads what it sends; the thread that stopped prints and waits for lines. The client may
leave and come back: the text since the last stop is kept, and shown again.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from pathlib import Path

from fastrt.folders import private_folder
from fastrt.store.debugging import (
    LOOK_S,
    DebugComplete,
    DebugEnd,
    DebugInterrupt,
    DebugLine,
    DebugNames,
    DebugPrompt,
    DebugTerminal,
    DebugText,
)
from fastrt.store.join import Link, listen
from fastrt.store.messages import Message

_SCREEN_CHARS = 64 << 10  # of the text that a client sees when it comes back
_PART_CHARS = 32 << 10  # of one message, whose length is bounded
_SEND_S = 5.0  # a client that does not read for that long is left
_NAMES_MAX = 200
_LINES_MAX = 1000  # that a client may send ahead


class Door:
    """Lets one client at a time talk to the debugger.

    Args:
        path: of the socket; its folder is created if it is missing.
        interrupt: called in the door's thread when the client wants running code to stop.
        complete: called in the thread that waits for a line: how a word can go on.
    """

    def __init__(
        self, path: Path, interrupt: Callable[[], object], complete: Callable[[str, str, int, int], list[str]]
    ) -> None:
        self._path, self._interrupt, self._complete = path, interrupt, complete
        self._lock = threading.RLock()  # of the client and what it has been sent
        self._asked: queue.SimpleQueue[DebugLine | DebugComplete] = queue.SimpleQueue()
        self._client: Link | None = None
        self._screen, self._prompt = "", ""
        self._about = ""  # the client's terminal, if the client only passes on its lines
        self._closed = False
        private_folder(path.parent, "the folder of debuggers")
        path.unlink(missing_ok=True)  # a dead process had the same number
        self._listener = listen(str(path))
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="fastrt-debug", daemon=True)
        self._thread.start()

    @property
    def has_client(self) -> bool:
        """Whether a client is there."""
        return self._client is not None

    def begin(self) -> None:
        """Forget the text of earlier stops."""
        self._screen = ""

    def write(self, text: str) -> None:
        """Show text to the client, or to the next one."""
        with self._lock:
            self._screen = (self._screen + text)[-_SCREEN_CHARS:]
            self._show(text)

    def ask(self, prompt: str, check: Callable[[], object]) -> str:
        """Wait for a line, without its end.

        Args:
            prompt: for the client.
            check: called now and then; it may raise to end the wait.
        """
        with self._lock:
            self._prompt = prompt
            self._send(DebugPrompt(prompt))
        try:
            while True:
                check()
                try:
                    asked = self._asked.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                if isinstance(asked, DebugLine):
                    break
                self._send(DebugNames(self._complete(asked.text, asked.line, asked.begin, asked.end)[:_NAMES_MAX]))
        finally:
            self._prompt = ""
        with self._lock:
            self._screen += f"{prompt}{asked.line}\n"
        return asked.line

    def close(self, why: str) -> None:
        """Send the client away for this reason, and remove the socket."""
        with self._lock:
            self._closed = True
            self._send(DebugEnd(why))
            self._path.unlink(missing_ok=True)
            os.write(self._wake, b"!")

    # ---- the door's thread ----

    def _serve(self) -> None:
        with self._listener:
            while not self._closed:
                poll = select.poll()
                poll.register(self._woken, select.POLLIN)
                poll.register(self._listener, select.POLLIN)
                client = self._client
                if client is not None:
                    poll.register(client, select.POLLIN)
                ready = {fd for fd, _ in poll.poll()}
                if client is not None and client.fileno() in ready:
                    self._read(client)
                if self._listener.fileno() in ready:
                    self._accept()
        with self._lock:  # which `close` holds until it has woken this thread
            self._drop()
            os.close(self._woken)
            os.close(self._wake)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.settimeout(_SEND_S)
        link = Link(sock)
        with self._lock:
            refused = ""
            if link.peer()[1] != os.geteuid():
                refused = "this debugger belongs to another user"
            elif self._client is not None:
                refused = f"{self._about or f'process {self._client.peer()[0]}'} is attached already"
            if refused or self._closed:
                link.send(DebugEnd(refused or "the task goes on"))
                link.close()
                return
            self._client = link
            self._show(self._screen)
            if self._prompt:
                self._send(DebugPrompt(self._prompt))

    def _read(self, client: Link) -> None:
        try:
            message = client.receive(0)
            while message is not None:
                self._on_message(message)
                message = client.receive(0) if client.waiting() else None
        except EOFError:  # also of a malformed message
            with self._lock:
                if self._client is client:
                    self._drop()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, DebugInterrupt):
            self._interrupt()
        elif isinstance(message, DebugTerminal):
            self._about = message.about
        elif isinstance(message, (DebugLine, DebugComplete)):
            if self._asked.qsize() >= _LINES_MAX:
                raise EOFError("the client sends lines faster than the debugger reads them")
            self._asked.put(message)
        else:
            raise EOFError(f"a client of the debugger does not send {message.operation}")

    # ---- under the lock ----

    def _show(self, text: str) -> None:
        for begin in range(0, len(text), _PART_CHARS):
            self._send(DebugText(text[begin : begin + _PART_CHARS]))

    def _send(self, message: Message) -> None:
        with self._lock:
            if self._client is not None and not self._client.send(message):
                self._client.hang_up()  # the door's thread drops it

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client, self._about = None, ""
        while not self._asked.empty():  # the next client gets none of its lines
            self._asked.get()
