"""A check whether a peer's process has ended, or only cannot be reached for a while.

When a process ends, the kernel closes its connections and its port. A closed connection alone shows little: networks
break them, and servers end idle ones. A machine that rejects a new connection shows that the port is closed.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastrt.net.address import AddressError, split_address

_ANSWER_S = 1.0


async def is_closed(address: str) -> bool:
    """Whether the machine at an address rejects connections to this port.

    Args:
        address: host:port, or unix:path.
    """
    try:
        _, writer = await asyncio.wait_for(_connected(address), _ANSWER_S)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, AddressError, asyncio.TimeoutError):  # no answer, no route, or another form of address
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, port = split_address(address)
    return await asyncio.open_connection(host.strip("[]"), port)
