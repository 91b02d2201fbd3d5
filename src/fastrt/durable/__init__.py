"""Records on disk behind a state machine: checked logs, and the records of a service on top of them.

`CheckedLog` keeps payloads in order and proves at the next start that none is missing. `Journal` keeps a service's
records in one, `WriteLog` a front's writes.
"""

from fastrt.durable.errors import DamagedStateError, DiskFullError, StateDirectoryError
from fastrt.durable.journal import Journal, WriteLog
from fastrt.durable.log import CheckedLog
from fastrt.durable.mark import Mark, MarkFile

__all__ = [
    "CheckedLog",
    "DamagedStateError",
    "DiskFullError",
    "Journal",
    "Mark",
    "MarkFile",
    "StateDirectoryError",
    "WriteLog",
]
