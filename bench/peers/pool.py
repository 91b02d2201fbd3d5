"""The standard library's ProcessPoolExecutor."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from peers.futures import Futures


class Pool(Futures):
    """Its workers are forked, as by default before Python 3.14."""

    def __init__(self, workers: int, store_bytes: int) -> None:
        super().__init__(ProcessPoolExecutor(workers, mp_context=get_context("fork")))
