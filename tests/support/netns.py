"""Two hosts with a router between them, made of network namespaces, and a network that can be cut."""

import os
import subprocess
from collections.abc import Mapping

_counter = 0


def ip(*words: str) -> None:
    """Run `ip`.

    Raises:
        OSError: it is not installed.
        subprocess.CalledProcessError: it refuses, for want of the privilege mostly.
    """
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


class UnavailableError(Exception):
    """Network namespaces cannot be made here: for want of `ip`, or of the privilege."""


def make_network(router: str, hosts: Mapping[str, str], made: list[str]) -> None:
    """Make namespaces whose link `wire` leads to a router, where the other ends are `to0`, `to1` and so on.

    Args:
        router: its namespace.
        hosts: the address of each namespace; its network has 24 bits and belongs to it alone.
        made: gets the namespaces, as far as they were made.
    Raises:
        UnavailableError: the first namespace cannot be made.
        subprocess.CalledProcessError: something later fails, which is a fault.
    """
    try:
        ip("netns", "add", router)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise UnavailableError(f"{exc}: {getattr(exc, 'stderr', '')!r}") from None
    made.append(router)
    ip("-n", router, "link", "set", "lo", "up")
    ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    for k, (end, address) in enumerate(hosts.items()):
        gateway = address.rpartition(".")[0] + ".1"
        ip("netns", "add", end)
        made.append(end)
        ip("-n", end, "link", "set", "lo", "up")
        ip("-n", router, "link", "add", f"to{k}", "type", "veth", "peer", "name", "wire", "netns", end)
        for where, link, one in ((router, f"to{k}", gateway), (end, "wire", address)):
            ip("-n", where, "addr", "add", one + "/24", "dev", link)
            ip("-n", where, "link", "set", link, "up")
        ip("-n", end, "route", "add", "default", "via", gateway)


class Net:
    """Hosts "a" and "b". A cut drops packets in the router, without a word to either side.

    Raises:
        UnavailableError: the first namespace cannot be made.
        subprocess.CalledProcessError: something later fails, which is a fault.
    """

    def __init__(self) -> None:
        global _counter
        _counter += 1
        self._prefix = f"frt{os.getpid()}n{_counter}"
        self._made: list[str] = []
        self._cuts: set[str] = set()
        self._unplugged: set[str] = set()
        try:
            make_network(self._prefix + "r", {self._prefix + name: self.host(name) for name in "ab"}, self._made)
        except BaseException:
            self.close()
            raise

    def host(self, name: str) -> str:
        """The address of "a" or "b"."""
        return f"10.77.{1 + 'ab'.index(name)}.2"

    def within(self, name: str) -> list[str]:
        """Return the words that make a command run on that host, to be put before it."""
        return ["ip", "netns", "exec", self._prefix + name]

    def cut(self, *targets: str) -> None:
        """Drop whatever goes to these hosts."""
        for name in set(targets) - self._cuts:
            ip("-n", self._prefix + "r", "route", "add", "blackhole", self.host(name) + "/32")
            self._cuts.add(name)

    def unplug(self, *hosts: str) -> None:
        """Take the link to these hosts down: unlike at a cut, their kernels see that the carrier is gone."""
        for name in set(hosts) - self._unplugged:
            ip("-n", self._prefix + "r", "link", "set", f"to{'ab'.index(name)}", "down")
            self._unplugged.add(name)

    def heal(self) -> None:
        """Pass everything on again."""
        while self._unplugged:
            ip("-n", self._prefix + "r", "link", "set", f"to{'ab'.index(self._unplugged.pop())}", "up")
        while self._cuts:
            ip("-n", self._prefix + "r", "route", "del", "blackhole", self.host(self._cuts.pop()) + "/32")

    def close(self) -> None:
        """Remove everything; processes that still run there keep their namespace until they end."""
        while self._made:
            ip("netns", "del", self._made.pop())
