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
    connecting = asyncio.ensure_future(_connected(address))
    try:  # not `wait_for`: it may swallow a cancellation that comes with the timeout
        done, _ = await asyncio.wait((connecting,), timeout=_ANSWER_S)
        if not done:
            return False
        _, writer = connecting.result()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, AddressError):  # no route, or another form of address
        return False
    finally:
        connecting.cancel()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, port = split_address(address)
    return await asyncio.open_connection(host.strip("[]"), port)
