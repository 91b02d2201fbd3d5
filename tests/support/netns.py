"""Two hosts with a router between them, made of network namespaces, and a network that can be cut."""

import os
import subprocess

_counter = 0


def ip(*words: str) -> None:
    """Run `ip`.

    Raises:
        OSError: it is not installed.
        subprocess.CalledProcessError: it refuses, for want of the privilege mostly.
    """
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class UnavailableError(Exception):
    """Network namespaces cannot be made here: for want of `ip`, or of the privilege."""


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
            self._make()
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
            ip("-n", self._prefix + "r", "link", "set", "to" + name, "down")
            self._unplugged.add(name)

    def heal(self) -> None:
        """Pass everything on again."""
        while self._unplugged:
            ip("-n", self._prefix + "r", "link", "set", "to" + self._unplugged.pop(), "up")
        while self._cuts:
            ip("-n", self._prefix + "r", "route", "del", "blackhole", self.host(self._cuts.pop()) + "/32")

    def close(self) -> None:
        """Remove everything; processes that still run there keep their namespace until they end."""
        while self._made:
            ip("netns", "del", self._made.pop())

    def _make(self) -> None:
        router = self._prefix + "r"
        try:
            ip("netns", "add", router)
        except (OSError, subprocess.CalledProcessError) as exc:
            raise UnavailableError(f"{exc}: {getattr(exc, 'stderr', '')!r}") from None
        self._made.append(router)
        ip("-n", router, "link", "set", "lo", "up")
        for name in (self._prefix + "a", self._prefix + "b"):
            ip("netns", "add", name)
            self._made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for name in "ab":
            end, gateway = self._prefix + name, self.host(name)[:-1] + "1"
            ip("-n", router, "link", "add", "to" + name, "type", "veth", "peer", "name", "wire", "netns", end)
            for where, link, address in ((router, "to" + name, gateway), (end, "wire", self.host(name))):
                ip("-n", where, "addr", "add", address + "/24", "dev", link)
                ip("-n", where, "link", "set", link, "up")
            ip("-n", end, "route", "add", "default", "via", gateway)
