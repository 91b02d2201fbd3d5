"""Finds out whether a peer that cannot be reached has ended: its port is closed then.

When a process ends, the kernel closes its connections and its port. A closed connection alone shows little: networks
break them, and servers end idle ones. A machine that rejects a new connection shows that the port is closed.
"""

from __future__ import annotations

import socket

from fastrt.net.address import AddressError, split_address

_ANSWER_S = 1.0


def is_closed(address: str) -> bool:
    """Whether the machine at an address rejects connections to this port; waits for a second at most.

    Args:
        address: host:port, or unix:path.
    """
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(_ANSWER_S)
                sock.connect(address.removeprefix("unix:"))
        else:
            host, port = split_address(address)
            socket.create_connection((host.strip("[]"), port), _ANSWER_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, AddressError):  # no answer, no route, or another form of address
        return False
    return False
