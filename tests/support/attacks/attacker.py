"""A hostile process: plain Python without fastrt, as another user, that reports what it was given.

`python -I -S` starts in 15 ms. All modules are imported before the process changes its user, who may not read them.
"""

import json
import os
import subprocess
import sys
from typing import Any

OTHER_UID = 64321  # of a user that owns nothing
TOOLS = '''
import base64, encodings.idna, json, os, random, select, socket, stat, struct, sys, threading, time
given = json.loads(sys.argv[1])
if given["uid"] is not None:
    os.setgroups([]); os.setgid(given["uid"]); os.setuid(given["uid"])
random.seed(20)

def connect(address, patience=5.0):
    """A connection to "host:port", to "@abstract" or to a path."""
    if address.startswith(("@", "/")):
        sock = socket.socket(socket.AF_UNIX, given["type"])
        address = "\\0" + address[1:] if address.startswith("@") else address
    else:
        sock = socket.socket()
        host, _, port = address.rpartition(":")
        address = (host, int(port))
    sock.settimeout(patience)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock

def shout(sock, *parts):
    """Send all that the other end takes."""
    try:
        for part in parts:
            sock.sendall(part)
    except OSError:
        pass

def listen(sock, patience):
    """All that comes until the other end is silent, or has hung up."""
    came = b""
    sock.settimeout(patience)
    try:
        while piece := sock.recv(65536):
            came += piece
    except OSError:
        pass
    return came

def pause(seconds):
    select.select([], [], [], seconds)

def ready():
    print("ready", flush=True)

def wait():
    """Until the test releases this process."""
    sys.stdin.read()

address, opening = given.get("address"), base64.b64decode(given.get("opening", ""))
report = {}
'''


class Attacker:
    """One hostile process. `ready` waits until it has begun, `finish` ends it.

    Args:
        code: what it does, with the names of `TOOLS`. What it leaves in `report` is the result.
        uid: as which user; None: as this one.
        **given: for the code.
    """

    def __init__(self, code: str, uid: int | None = OTHER_UID, **given: Any) -> None:
        self.uid = uid
        program = TOOLS + code + "\nprint(json.dumps(report))\n"
        words = [sys.executable, "-I", "-S", "-c", program, json.dumps({"uid": uid, "type": 1, **given})]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )

    def ready(self) -> str:
        """Wait until it says that it has begun; further words of that line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready"):
            raise AssertionError(f"the attacker failed: {line}{self.process.communicate()[1]}")
        return line.removeprefix("ready").strip()

    def finish(self) -> dict[str, Any]:
        """Release it, and wait for its report."""
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, f"the attacker failed:\n{err[-2000:]}"
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
