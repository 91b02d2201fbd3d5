"""The standard library's ProcessPoolExecutor."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from peers.futures import Futures


class Pool(Futures):
    """With the platform's default way to start workers."""

    def __init__(self, workers: int, store_bytes: int) -> None:
        super().__init__(ProcessPoolExecutor(workers))
