"""Nodes that `fastrt run --hosts` starts on other machines by the system's ssh client.

ssh logs in as the user's own settings say, and asks nothing. The job's token goes through its standard input, which is
encrypted; command lines and environments, which others can read, never hold it. Standard input then stays open: when
it ends, the node ends, so a node outlives neither its ssh connection nor the process that started it, however either
dies. What the other machine prints goes to this one's standard error, marked with the host's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastrt.errors import ConfigError, FastrtError
from fastrt.launch.hostlist import expand
from fastrt.net.address import AddressError, is_loopback_host, join_address, own_host_toward

STARTED = "fastrt: the process of a node has started"  # the first line from it; those before are the login's and ssh's
_CONNECT_S = 20  # below the time after which missing hosts are named
_AGAIN_S = 2.0
_END_S = 15.0
_TAIL_LINES = 5
_LINE_MAX = 4096
_SSH_FAILED, _NOT_RUNNABLE, _NOT_FOUND = 255, 126, 127
_PORT_MAX = (1 << 16) - 1
_ANY_PORT = 9  # nothing is sent to it
_WORD = re.compile(r"(?:([A-Za-z0-9_][\w.+\-]*)@)?([A-Za-z0-9_][A-Za-z0-9_.\-]*)(?::(\d{1,5}))?", re.ASCII)
# ssh ends with 255 for each of its faults. After these another attempt would fail, too, or lock the account.
_FINAL = re.compile(
    r"host key|host identification|permission denied|too many authentication|bad configuration|bad owner|no matching "
    r"|unprotected private key|bad permissions",
    re.IGNORECASE,
)
# Forwardings, terminals and background masters are for sessions of people; the rest is as the user's settings say.
_OPTIONS = (
    *("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ClearAllForwardings=yes"),
    *("-o", "ControlMaster=no", "-o", "RemoteCommand=none", "-o", "ServerAliveInterval=10"),
)
# Without the folder in which ssh starts it on Python's path.
_REMOTE = "fastrt.launch.remote"
_START = f"import sys; sys.path.remove(''); from {_REMOTE} import main; sys.exit(main())"


@dataclass(frozen=True)
class SshHost:
    """A host to log in to.

    Attributes:
        name: as ssh takes it: a name, an address, or an alias of the user's settings.
        user: empty: the one of the user's settings.
        port: 0: the one of the user's settings.
    """

    name: str
    user: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.name if not self.port else f"{self.name}:{self.port}"

    def words(self) -> list[str]:
        """Return the host as arguments of ssh."""
        return [*(["-p", str(self.port)] if self.port else []), *(["-l", self.user] if self.user else []), self.name]


def parse_hosts(text: str) -> tuple[SshHost, ...]:
    """Parse the value of --hosts.

    Args:
        text: such as `a,b:2222,user@n[1-3]`.
    Raises:
        ConfigError: a word is no [USER@]HOST[:PORT], or two are the same.
    """
    found = []
    for word in expand(text):
        match = _WORD.fullmatch(word)
        if match is None or not 0 < int(match[3] or 1) <= _PORT_MAX:
            raise ConfigError(f"{word[:80]!r} is no host for ssh; it must be like n1, user@n1 or n1:2222")
        found.append(SshHost(match[2], match[1] or "", int(match[3] or 0)))
    names = [str(host) for host in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the host {name} is given more than once")
    return tuple(found)


def address_towards(hosts: Sequence[SshHost]) -> str:
    """Return this machine's address on the way to the first host whose name is resolved here; else an empty text.

    Raises:
        FastrtError: ssh is not installed.
    """
    for host in hosts:
        settings = _settings_of(host)
        try:
            found = own_host_toward(join_address(settings.get("hostname", host.name), _ANY_PORT))
        except (OSError, AddressError):
            continue
        if "proxyjump" not in settings and "proxycommand" not in settings:
            return "127.0.0.1" if is_loopback_host(found) else found
    return ""


def _settings_of(host: SshHost) -> dict[str, str]:
    """Ask ssh for the settings that it would use; they name the machine that an alias stands for."""
    try:
        answer = subprocess.run(["ssh", "-G", *host.words()], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise FastrtError("--hosts needs the program ssh, which is not installed here") from None
    pairs = dict(line.partition(" ")[::2] for line in answer.stdout.splitlines())
    return {name: value for name, value in pairs.items() if value != "none"}


class SshNodes:
    """The nodes of a job that ssh starts: rank 1 on the first host, and so on.

    Args:
        hosts: where.
        python: the interpreter there.
        order: what each process needs to know, besides its rank and name; see `JobOptions.order`.
        patience_s: for how long a host that is not reached is tried again.
        say: prints a line for people.
    """

    def __init__(
        self,
        hosts: Sequence[SshHost],
        python: str,
        order: Mapping[str, Any],
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._hosts, self._python, self._patience_s, self._say = hosts, python, patience_s, say
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._why: dict[int, str] = {}
        self._lost: set[int] = set()
        self._said: set[str] = set()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._threads = [
            threading.Thread(
                target=self._keep,
                args=[rank, host, {**order, "rank": rank, "name": str(host)}],
                name=f"fastrt-ssh-{host}",
                daemon=True,
            )
            for rank, host in enumerate(hosts, 1)
        ]
        for thread in self._threads:
            thread.start()

    def why(self, rank: int) -> str:
        """Say why a rank's node is not there, as far as ssh knows; else an empty text."""
        with self._lock:
            return self._why.get(rank, "")

    def lost(self) -> set[int]:
        """Return the ranks whose nodes will not come any more."""
        with self._lock:
            return set(self._lost)

    def end(self) -> None:
        """Let the nodes end."""
        self._closing.set()
        with self._lock:
            for ssh in self._running.values():
                _close_input(ssh)

    def close(self) -> None:
        """Let the nodes end, and wait for them, at most 15 s."""
        self.end()
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            for rank, ssh in self._running.items():
                self._say(f"{self._hosts[rank - 1]} has not ended its node within {_END_S:g} s")
                ssh.kill()

    def _keep(self, rank: int, host: SshHost, order: dict[str, Any]) -> None:
        """Run ssh until its node has ended; while the host cannot be reached, run it again."""
        until = time.monotonic() + self._patience_s
        self._set(rank, "ssh has not connected yet")
        while not self._closing.is_set():
            code, has_started, tail = self._run(rank, host, order)
            if self._closing.is_set() or (has_started and not code):
                self._set(rank, "its process has ended", True)
                return
            why = _reason(code, has_started, tail, self._python)
            is_lost = has_started or code != _SSH_FAILED or bool(_FINAL.search(why)) or time.monotonic() > until
            self._set(rank, why, is_lost)
            if is_lost or why not in self._said:
                self._said.add(why)
                self._say(f"{host}: {why}{'' if is_lost else '; ssh tries again'}")
            if is_lost:
                return
            self._closing.wait(_AGAIN_S)

    def _set(self, rank: int, why: str, is_lost: bool = False) -> None:
        with self._lock:
            self._why[rank] = why
            if is_lost:
                self._lost.add(rank)

    def _run(self, rank: int, host: SshHost, order: dict[str, Any]) -> tuple[int, bool, list[str]]:
        """Run ssh once; its exit code, whether the node's process has started, and the last lines before that."""
        command = f"exec {shlex.quote(self._python)} -c {shlex.quote(_START)}"
        with self._lock:
            if self._closing.is_set():
                return 0, False, []
            ssh = subprocess.Popen(
                ["ssh", *_OPTIONS, *host.words(), command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for the program; ssh would end the node
            )
            self._running[rank] = ssh
        assert ssh.stdin is not None
        assert ssh.stdout is not None
        try:
            with contextlib.suppress(OSError):  # it has ended already, and its output says why
                os.write(ssh.stdin.fileno(), json.dumps(order).encode() + b"\n")
            has_started = False
            tail: deque[str] = deque(maxlen=_TAIL_LINES)
            while line := ssh.stdout.readline(_LINE_MAX):
                text = "".join(sign for sign in line.decode(errors="replace") if sign.isprintable()).strip()
                if text == STARTED:
                    has_started = True
                    self._set(rank, "ssh has started its node, which has not connected")
                elif has_started and text and not self._closing.is_set():
                    sys.stderr.write(f"[{host}] {text}\n")
                    sys.stderr.flush()
                elif text and not has_started:
                    tail.append(text)
            return ssh.wait(), has_started, list(tail)
        finally:
            with self._lock:
                del self._running[rank]
                _close_input(ssh)
            ssh.stdout.close()


def _reason(code: int, has_started: bool, tail: Sequence[str], python: str) -> str:
    """Say why ssh has ended."""
    last = tail[-1] if tail else ""
    if has_started:
        if code == _SSH_FAILED:
            return "ssh has lost its connection, and the node ends"
        return f"its process ended with exit code {code}; its own output says why"
    if code == _SSH_FAILED:
        return "; ".join(tail) or "ssh failed and does not say why"
    if code in (_NOT_RUNNABLE, _NOT_FOUND):
        return f"there is no {python} that can be run; give the path of Python on the hosts by --python ({last})"
    missing = re.search(r"No module named '?(fastrt[\w.]*|[\w.]+)", last)
    if missing is not None and missing[1] == "fastrt":
        return f"{python} has no fastrt there; install it, or give another Python by --python"
    if missing is not None and missing[1].startswith("fastrt."):
        return f"{python} has an older fastrt there, without {missing[1]}; install the same version on all machines"
    return f"{python} ended with exit code {code}: {last or 'it does not say why'}"


def _close_input(ssh: subprocess.Popen[bytes]) -> None:
    assert ssh.stdin is not None
    with contextlib.suppress(OSError):
        ssh.stdin.close()
