"""A client of the Debug Adapter Protocol, as editors have one."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

_PATIENCE_S = 60.0


class Editor:
    """Attaches to a debugger and answers with what it has seen; to be closed.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), _PATIENCE_S)
        self._file = self._sock.makefile("rwb")
        self._seq = 0
        self._heard: list[dict[str, Any]] = []
        self.ask("initialize", adapterID="debugpy", clientID="test", pathFormat="path")
        attach = self._send("attach", name="a task", connect={"host": host, "port": int(port)}, justMyCode=True)
        self._wait(lambda one: one.get("event") == "initialized")
        self.ask("configurationDone")
        self._answer(attach)

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request; the body of its answer."""
        return self._answer(self._send(command, **arguments))

    def stopped(self) -> tuple[str, list[tuple[str, int]]]:
        """Wait until a thread has stopped: why, and the names and lines of its frames, the innermost first."""
        event = self._wait(lambda one: one.get("event") == "stopped")["body"]
        self.thread = event["threadId"]
        frames = self.ask("stackTrace", threadId=self.thread)["stackFrames"]
        self._frame = frames[0]["id"]
        return event["reason"], [(one["name"], one["line"]) for one in frames]

    def evaluate(self, expression: str) -> str:
        """The value of an expression in the innermost frame, or the effect of a statement."""
        return str(self.ask("evaluate", expression=expression, frameId=self._frame, context="repl")["result"])

    def go_on(self, command: str = "continue") -> None:
        """Let the thread run: "continue", "next", "stepIn"."""
        self.ask(command, threadId=self.thread)

    def wait_for_end(self) -> None:
        """Wait until the debugger has closed the connection."""
        try:
            self._wait(lambda _one: False)
        except EOFError:
            return

    def close(self) -> None:
        """Leave, without a word."""
        self._file.close()
        self._sock.close()

    def _send(self, command: str, **arguments: Any) -> int:
        self._seq += 1
        message = {"seq": self._seq, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(message).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        self._file.flush()
        return self._seq

    def _answer(self, seq: int) -> Any:
        answer = self._wait(lambda one: one["type"] == "response" and one["request_seq"] == seq)
        assert answer["success"], answer
        return answer.get("body")

    def _wait(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for number, one in enumerate(self._heard):
            if is_it(one):
                return self._heard.pop(number)
        while not is_it(one := self._read()):
            self._heard.append(one)
        return one

    def _read(self) -> dict[str, Any]:
        size = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        data = self._file.read(size)
        if not data:
            raise EOFError("the debugger has closed the connection")
        found: dict[str, Any] = json.loads(data)
        return found
