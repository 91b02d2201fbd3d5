"""Addresses of this machine."""

from __future__ import annotations

from fastrt.net.address import own_address


def get_node_ip_address(address: str | None = None) -> str:
    """Return the address by which other machines reach this one; 127.0.0.1 if it has no network.

    Args:
        address: taken for Ray's sake: of a host that Ray tries to reach.
    Source:
        The semantics of `ray.util.get_node_ip_address`.
    """
    return own_address()


def get_node_instance_id() -> str:
    """Return the id that a cloud provider has given to the machine: empty, fastrt asks none."""
    return ""
