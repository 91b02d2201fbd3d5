"""One file for each library in the comparison; `load` imports the one that is asked for, and none else."""

from __future__ import annotations

import importlib

from peers.base import Peer

# name -> (module, class, distribution, title)
PEERS = {
    "fastrt": ("peers.fastrt", "Fastrt", "fastrt", "fastrt"),
    "pool": ("peers.pool", "Pool", None, "ProcessPoolExecutor"),
    "loky": ("peers.loky", "Loky", "loky", "loky"),
    "ray": ("peers.ray", "Ray", "ray", "Ray"),
    "dask": ("peers.dask", "Dask", "distributed", "Dask"),
}


def load(name: str, workers: int, store_bytes: int) -> Peer:
    """Import and start a peer: ready for its first task."""
    module, attribute, _, _ = PEERS[name]
    peer: Peer = getattr(importlib.import_module(module), attribute)(workers, store_bytes)
    return peer
