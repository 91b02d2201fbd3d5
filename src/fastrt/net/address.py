"""Addresses of servers: parsing and formatting host:port, and the rules for the addresses that a service may bind.

An IPv6 host stands in brackets (`[::1]:6464`); an address of a Unix socket is `unix:PATH`, which only gRPC takes.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from fastrt.errors import ConfigError, FastrtError
from fastrt.foreign_text import read_int

PORT_MAX = (1 << 16) - 1
_SHOWN_MAX = 80
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_ANY = ("0.0.0.0", "::")
_DOCUMENTATION = ("192.0.2.1", 9)  # RFC 5737: the default route leads there, and no machine has this address
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(ConfigError):
    """A text is not HOST:PORT. The message shows the text and names the fault."""


class InsecureBindError(FastrtError):
    """A service would be reachable from other machines without authentication or encryption."""


def split_address(address: str, port_min: int = 1) -> tuple[str, int]:
    """Parse host:port.

    Args:
        address: the text, of any origin.
        port_min: 0 where a server may ask for any free port.
    Returns:
        The host, an IPv6 address without its brackets; and the port.
    Raises:
        AddressError: the text is no such address.
    """
    host, _, port = address.rpartition(":")
    try:
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            ipaddress.IPv6Address(host)
        elif ":" in host:
            raise ValueError("an IPv6 host stands in brackets")
        elif not _NAME.fullmatch(host):
            raise ValueError("it has no host" if not host else "its host is no name")
        return host, read_int(port, "its port", port_min, PORT_MAX)
    except ValueError as error:
        shown = address if len(address) <= _SHOWN_MAX else f"{address[:_SHOWN_MAX]}..."
        raise AddressError(
            f"{shown!r} is not HOST:PORT: {error}. Give an address such as 127.0.0.1:6464 or [::1]:6464."
        ) from None


def is_host(text: str) -> bool:
    """Whether a text is a host's name or IPv4 address, as far as its characters tell."""
    return _NAME.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Whether a text is the address of a server that others can connect to."""
    try:
        split_address(text)
    except AddressError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """Format host:port; the host may be an IPv6 address with or without brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Return an address with another port, such as the one that the kernel chose; of a Unix socket the same address."""
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a host without brackets; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_same(one: str, other: str) -> bool:
    """Whether two addresses of servers are one: the same text, or the same port at names of one host.

    Names are looked up only where the texts differ and the ports do not. A text that is no address, or has no known
    host, is the same as its own text only.
    """
    if one == other:
        return True
    try:
        (host, port), (other_host, other_port) = split_address(one), split_address(other)
        return port == other_port and not _ips(host).isdisjoint(_ips(other_host))
    except (AddressError, OSError, UnicodeError):
        return False


def own_host_toward(address: str) -> str:
    """Return this machine's IP address on the route to a server.

    Raises:
        AddressError: the text is no address.
        OSError: no route leads there.
    """
    return _own_host_toward(*split_address(address))


def own_address() -> str:
    """Return the IP address by which other machines reach this one; 127.0.0.1 if it has no network."""
    try:
        return _own_host_toward(*_DOCUMENTATION)
    except OSError:
        return _first_own_address()


def reachable(address: str, toward: str | None = None) -> str:
    """Return the address by which other machines reach a server that listens on all addresses of this machine.

    Args:
        address: `host:port` where it listens.
        toward: `host:port` of a server near those machines; None: the machines on the default route.
    Returns:
        `address` with this machine's own address in place of 0.0.0.0; any other address unchanged.
    """
    host, port = split_address(address)
    if host not in _ANY:
        return address
    try:
        own = _own_host_toward(*(split_address(toward) if toward is not None else _DOCUMENTATION))
    except (OSError, AddressError):
        own = _first_own_address()
    return join_address(own, port)


def ip_of(host: str) -> IpAddress:
    """Parse an IP address, without its scope; an IPv4 address that is mapped into IPv6 counts as IPv4.

    A socket for both families shows IPv4 peers in the mapped form.

    Raises:
        ValueError: it is no IP address.
    """
    found = ipaddress.ip_address(host.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback_host(host: str) -> bool:
    """Whether a host, with or without brackets, is this machine's loopback; a name other than localhost is not."""
    try:
        return host == "localhost" or ip_of(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether `host:port` or `unix:path` can be reached from this machine only."""
    return address.startswith("unix:") or is_loopback_host(address.rpartition(":")[0])


def check_bind(
    address: str,
    *,
    authenticated: bool,
    encrypted: bool,
    remedy: str = "pass the session's token",
    encryption: str = "Use TLS (--tls-cert, --tls-key, --tls-ca), or give --insecure if no one else can read it",
) -> None:
    """Reject an address on which other machines could use a service, or read its traffic, without being meant to.

    Args:
        address: where the service is to listen.
        authenticated: clients prove who they are, or the user allows anonymous ones.
        encrypted: the traffic is encrypted, or the user allows it in the clear.
        remedy: how to authenticate clients of this service, for the message.
        encryption: how to encrypt its traffic, for the message.
    Raises:
        InsecureBindError: the address is not loopback, and one of the two is missing.
    """
    if is_loopback(address):
        return
    if not authenticated:
        raise InsecureBindError(
            f"Serving on {address} without authentication would let every machine that can reach it use this service "
            f"and run code here. Serve on 127.0.0.1, or {remedy}."
        )
    if not encrypted:
        raise InsecureBindError(
            f"Serving on {address} in the clear would send everything, the session's token too, readable over the "
            f"network. {encryption}."
        )


def _own_host_toward(host: str, port: int) -> str:
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends no packet: it only looks up the route
        return str(probe.getsockname()[0])


def _ips(host: str) -> set[IpAddress]:
    return {ip_of(str(found[4][0])) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _first_own_address() -> str:
    """Return an address of this machine where no route leads outside."""
    import psutil

    found = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    return next((own for own in found if not ipaddress.ip_address(own).is_loopback), "127.0.0.1")
