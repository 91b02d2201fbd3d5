"""Machines of a cluster on one real one: network and UTS namespaces at a router, whose names resolve to each other."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from .netns import ip, make_network

_counter = 0


class Machines:
    """Hosts with names and addresses of their own, and one file system.

    Args:
        folder: for the file that resolves their names.
        names: of the hosts.
        unresolved: hosts whose names the others cannot resolve.

    Raises:
        UnavailableError: namespaces cannot be made here.
    """

    def __init__(self, folder: Path, names: Sequence[str], unresolved: Sequence[str] = ()) -> None:
        global _counter
        _counter += 1
        self._prefix = f"frm{os.getpid()}x{_counter}"
        self._names = list(names)
        self._hosts = folder / "hosts"
        rows = [f"{self.address(name)} {name}" for name in names if name not in unresolved]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *rows]) + "\n")
        self._made: list[str] = []
        try:
            make_network(self._prefix + "r", {self.namespace(name): self.address(name) for name in names}, self._made)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        """The address of a host."""
        return f"10.78.{1 + self._names.index(name)}.2"

    def namespace(self, name: str) -> str:
        """The network namespace of a host."""
        return self._prefix + name

    def within(self, name: str) -> list[str]:
        """Return the words that make a command run on that host, to be put before it."""
        prepare = f'hostname {name} && mount --bind {shlex.quote(str(self._hosts))} /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(name), "unshare", "-u", "-m", "sh", "-c", prepare, "sh"]

    def mislead(self) -> None:
        """Give each host a second network that leads nowhere, and has the default route."""
        for k, name in enumerate(self._names):
            where, gateway = self.namespace(name), self.address(name)[:-1] + "1"
            ip("-n", where, "link", "add", "other", "type", "veth", "peer", "name", "nowhere")
            for link in ("other", "nowhere"):
                ip("-n", where, "link", "set", link, "up")
            ip("-n", where, "addr", "add", f"10.79.0.{11 + k}/24", "dev", "other")
            ip("-n", where, "route", "add", "10.78.0.0/16", "via", gateway)
            ip("-n", where, "route", "replace", "default", "dev", "other")

    def close(self) -> None:
        """Remove everything; processes that still run there keep their namespace until they end."""
        while self._made:
            ip("netns", "del", self._made.pop())
