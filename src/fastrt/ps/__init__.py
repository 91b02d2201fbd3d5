"""Parameter tables on servers, and `fastrt.ps.cluster`, the servers' membership.

`start` starts servers and gives a `Cluster`, whose tables workers push gradients to and pull values from.
"""

from fastrt.membership.options import MemberEvent
from fastrt.ps.embedding import Embedding
from fastrt.ps.errors import CheckpointError, NotFiniteError, ServerLostError, TableMismatchError, TableTimeoutError
from fastrt.ps.handles import Handle
from fastrt.ps.initializers import Constant, Normal, Uniform
from fastrt.ps.optimizers import FTRL, SGD, Adagrad, Adam, AdamW, LazyAdam, Momentum, Optimizer
from fastrt.ps.start import Cluster, connect, restore, start
from fastrt.ps.table import Table

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CheckpointError",
    "Cluster",
    "Constant",
    "Embedding",
    "Handle",
    "LazyAdam",
    "MemberEvent",
    "Momentum",
    "Normal",
    "NotFiniteError",
    "Optimizer",
    "ServerLostError",
    "Table",
    "TableMismatchError",
    "TableTimeoutError",
    "Uniform",
    "connect",
    "restore",
    "start",
]
