"""Addresses of this machine."""

from __future__ import annotations

import socket


def get_node_ip_address() -> str:
    """Return the address by which other machines reach this one; 127.0.0.1 if it has no network.

    Source:
        The semantics of `ray.util.get_node_ip_address`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent: the kernel only chooses a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_node_instance_id() -> str:
    """Return the id that a cloud provider has given to the machine: empty, fastrt asks none."""
    return ""
