"""Keys used by a process that is no task of the job."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastrt.coordination import (
    CoordinationError,
    CoordinationTimeoutError,
    KeyExistsError,
    KeyMissingError,
    connect,
    open_keys,
    open_keys_async,
)


def test_keys_are_shared_with_tasks_and_nobody_waits_for_who_uses_them(serve: Any, raw: Any) -> None:
    address = serve(1).address
    with open_keys(address) as keys, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(keys.get, "from/a task", 50)
        keys.set("from/outside", b"\x00raw")
        assert raw(address).snapshot().members[0].state == "DISCONNECTED"
        with connect(address) as agent:
            assert agent.get("from/outside") == b"\x00raw"
            agent.set("from/a task", "text")
            assert waiting.result(50) == b"text"
            assert keys.get_dir("from") == agent.get_dir("from")
        with pytest.raises(KeyExistsError):
            keys.set("from/outside", "other")
        assert keys.increment("n", 3) == 3
        keys.delete("from")
        with pytest.raises(KeyMissingError):
            keys.try_get("from/outside")
        with pytest.raises(CoordinationTimeoutError, match="was not set within"):
            keys.get("never", 0.1)
    keys.close()
    with pytest.raises(CoordinationError, match="keys are closed"):
        keys.get("n")


def test_keys_for_asyncio(serve: Any) -> None:
    async def play() -> None:
        async with await open_keys_async(serve(1).address) as keys:
            found, _ = await asyncio.gather(keys.get("k", 50), keys.set("k", "v"))
            assert found == b"v"
        with pytest.raises(CoordinationError, match="keys are closed"):
            await keys.get("k")

    asyncio.run(play())


def test_keys_of_nobody_and_of_another_process_say_so(serve: Any, free_port: int) -> None:
    with open_keys(f"127.0.0.1:{free_port}") as keys:
        for call in (keys.try_get, keys.get_dir, keys.delete, keys.get):
            with pytest.raises(CoordinationTimeoutError, match=f"no coordinator answered on 127.0.0.1:{free_port}"):
                call("k", timeout_s=0.1)
        child = os.fork()
        if child == 0:
            outcome = 1
            try:
                keys.close()  # does nothing here
                keys.get("k", 1)
            except CoordinationError as refusal:
                outcome = 0 if "forked" in str(refusal) else 2
            finally:
                os._exit(outcome)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
