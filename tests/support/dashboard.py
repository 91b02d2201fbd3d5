"""A dashboard in a process of its own, and requests to it."""

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import fastrt
from fastrt.runtime.dashboards import dashboards


class Dashboard:
    """`fastrt dashboard` for a runtime folder; `close` ends it.

    Attributes:
        url: the first printed address, with its code.
        port: where it listens on 127.0.0.1.
        token: for programs.
    """

    def __init__(self, runtime_dir: Path, *options: str, port: int = 0) -> None:
        code = "from fastrt.cli.main import main; main()"
        words = [sys.executable, "-c", code, "dashboard", "--port", str(port), *options]
        source = str(Path(fastrt.__file__).parents[1])
        env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.url = self.next_url()
        self.port = int(re.search(r":(\d+)/", self.url)[1])  # type: ignore[index]
        self.token = next(one.token for one in dashboards(runtime_dir) if one.pid == self.process.pid)

    def next_url(self) -> str:
        """Read the next address that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http" in line, line + self.process.stdout.read()
        return line.partition(": ")[2].strip()

    def request(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        """Send a request as it is: status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def view(self, view: str, **args: Any) -> dict[str, dict[str, Any]]:
        """The sections of a page, by name."""
        path = "/view?" + urlencode({"view": view, **args})
        status, _, body = self.request(path, authorization=f"Bearer {self.token}")
        assert status == 200, body
        return {section["id"]: section for section in json.loads(body)}

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Send the request of a button."""
        headers = {"authorization": f"Bearer {self.token}", "content_type": "application/json"}
        status, _, found = self.request(path, "POST", json.dumps(body).encode(), **headers)
        return status, json.loads(found) if found.startswith(b"{") else {"said": found.decode()}

    def close(self) -> None:
        """End it as Ctrl-C does."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=60)
        assert "Traceback" not in out, out

    def __enter__(self) -> "Dashboard":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
