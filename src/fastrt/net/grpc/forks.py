"""Refuses gRPC in forked children: gRPC's threads do not exist there, and calls would wait for them forever."""

from __future__ import annotations

import os

from fastrt.errors import ForkedRuntimeError

_user: int | None = None


def use_grpc() -> None:
    """Note that this process uses gRPC from now on; called before its first channel and its first server.

    Raises:
        ForkedRuntimeError: the process that forked this one had used it.
    """
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise ForkedRuntimeError(
            f"process {_user}, which this one was forked from, has used gRPC, which does not work after a fork. Start "
            'processes that connect by subprocess, or by multiprocessing.get_context("spawn").'
        )
