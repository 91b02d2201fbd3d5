"""Machines with an sshd each, and an ssh client whose settings and known hosts are those of a test."""

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from .machines import Machines

PROGRAMS = ("ssh", "sshd", "ssh-keygen")
_PORT = 22
_UP_S = 20.0
_SERVER = """
Port {port}
HostKey {folder}/host_{name}
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
SetEnv {variables}
"""
_CLIENT = """
Host *
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""


class Sshds:
    """The servers.

    Args:
        folder: for keys, settings and logs.
        machines: the hosts.
        names: those that have a server.
        variables: of each login.

    Attributes:
        path: a PATH on which `ssh` has the settings of the test.
        known_hosts: the file with the hosts' keys.
    """

    def __init__(self, folder: Path, machines: Machines, names: list[str], variables: Mapping[str, str]) -> None:
        self._folder, self._machines = folder, machines
        self._variables = " ".join(f'"{name}={value}"' for name, value in variables.items())
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        os.makedirs("/run/sshd", exist_ok=True)  # where sshd's unprivileged part lives; Debian makes it at boot
        for name in ("key", *(f"host_{name}" for name in names)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text("".join(f"{name} {(folder / f'host_{name}.pub').read_text()}" for name in names))
        (folder / "config").write_text(_CLIENT.format(folder=folder))
        (folder / "bin").mkdir()
        client = folder / "bin" / "ssh"
        client.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
        client.chmod(0o755)
        self.path = f"{client.parent}:{os.environ['PATH']}"
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the server of a host, and wait until it listens."""
        conf = self._folder / f"sshd_{name}.conf"
        conf.write_text(_SERVER.format(port=_PORT, folder=self._folder, name=name, variables=self._variables))
        log = self._folder / f"sshd_{name}.log"
        words = [*self._machines.within(name), "/usr/sbin/sshd", "-D", "-e", "-f", str(conf)]
        with open(log, "wb") as output:
            self._servers[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        until = time.monotonic() + _UP_S
        while b"Server listening" not in log.read_bytes():
            if self._servers[name].poll() is not None or time.monotonic() > until:
                raise AssertionError(f"sshd did not start: {log.read_text()}")
            threading.Event().wait(0.02)

    def stop(self, name: str) -> None:
        """End the server of a host; its logins stay."""
        server = self._servers.pop(name)
        server.terminate()
        server.wait(20)

    def close(self) -> None:
        """End all servers."""
        for name in list(self._servers):
            self.stop(name)
