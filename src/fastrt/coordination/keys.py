"""A coordinator's keys, for asyncio: used by agents of tasks and by processes outside of the job."""

from __future__ import annotations

import grpc

from fastrt.coordination.connection import Connection
from fastrt.coordination.errors import KeyExistsError


class AsyncKeys:
    """The keys of a coordinator. Made by `open_keys_async`; all methods belong to its event loop.

    Every call takes `timeout_s`; by default it waits without limit, also until a coordinator can be reached.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._call = connection.call

    async def __aenter__(self) -> AsyncKeys:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()

    async def set(self, key: str, value: str | bytes, overwrite: bool = False, timeout_s: float | None = None) -> None:
        """Set a key.

        Raises:
            KeyExistsError: it is set already, and `overwrite` was not given.
        """
        data = value.encode() if isinstance(value, str) else value
        asked: list[bool] = []
        try:
            await self._call(
                "InsertKeyValue", timeout_s, again=asked, kv={"key": key, "value": data}, allow_overwrite=overwrite
            )
        except KeyExistsError:
            # If the call was repeated, the first attempt may have set the key.
            if not asked or await self.try_get(key, timeout_s) != data:
                raise

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key; waits until there is one.

        Raises:
            CoordinationTimeoutError: it was not set in time.
        """
        return bytes((await self._call("GetKeyValue", timeout_s, key=key)).kv.value)

    async def try_get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key.

        Raises:
            KeyMissingError: it is not set.
        """
        return bytes((await self._call("TryGetKeyValue", timeout_s, key=key)).kv.value)

    async def get_dir(self, directory: str, timeout_s: float | None = None) -> dict[str, bytes]:
        """All keys below a directory with their values, in order of key."""
        answer = await self._call("GetKeyValueDir", timeout_s, directory_key=directory)
        return {pair.key: pair.value for pair in answer.kv}

    async def delete(self, key: str, timeout_s: float | None = None) -> None:
        """Remove a key and all keys below it; a missing one is no error."""
        await self._call("DeleteKeyValue", timeout_s, key=key, is_directory=True)

    async def increment(self, key: str, amount: int = 1, timeout_s: float | None = None) -> int:
        """Add to a decimal value, a missing one counting as 0; returns the sum.

        Raises:
            CoordinatorLostError: the coordinator broke off, and may or may not have added.
            CoordinationError: the value is not a number.
        """
        answer = await self._call("IncrementKeyValue", timeout_s, repeatable=False, key=key, increment=amount)
        return int(answer.kv.value)


async def open_keys_async(address: str, *, credentials: grpc.ChannelCredentials | None = None) -> AsyncKeys:
    """Open the keys of a coordinator without joining its job, from asyncio; see `open_keys`."""
    return AsyncKeys(Connection(address, "these keys are closed. Open them again.", credentials))
