"""loky: the executor behind joblib."""

from __future__ import annotations

import loky
from peers.futures import Futures


class Loky(Futures):
    """A reusable executor, as joblib uses it; its workers do not leave while they are idle."""

    def __init__(self, workers: int, store_bytes: int) -> None:
        super().__init__(loky.get_reusable_executor(max_workers=workers, timeout=None))

    def close(self) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)
